"""Say how long a GPU's kernels take, from their sizes and the chip's datasheet.

Matmuls run as tiles on multiprocessors: whole waves of tiles, each tile paying for its own
edges, with the tile size and the number of pieces of the inner sum that finish first; everything
else streams its bytes at a share of the memory's rate. A chip whose power limit does not feed its
units at full clock runs them slower. The shares are learnt from measured operators
(`tools/fit_kernels.py`) and hold on chips that none of them was measured on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from estimator.elementwise import Array
from estimator.errors import ProfileError
from estimator.files import shipped_data
from estimator.machines.profile import Device
from estimator.machines.typical import architecture_of
from estimator.tensors import ITEM_BYTES

# The process for which the kernel model quotes its headrooms.
_REFERENCE_NM = 12.0
# What is taken of a device that does not say it, in base units: V100 SXM2's 80 multiprocessors, 300
# W and 1.53 GHz, rounded (NVIDIA V100 datasheet, 2020), the middle of the shipped catalogue.
_ASSUMED = {
    "sm_count": (80.0, "80 multiprocessors"),
    "power_w": (300.0, "a power limit of 300 W"),
    "boost_clock_hz": (1.5e9, "a boost clock of 1.5 GHz"),
}
# Of an architecture that is not known: N5 or 4N, in which most GPUs since 2022 are made, with
# tensor cores as they have been since A100.
_ASSUMED_NM = 5.0
_HALF_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What the model knows of a chip computing in one dtype; numbers, or arrays of one length.

    `headroom` is power per peak flop and clock, pJ/(flop·GHz): low where a power limit makes a
    chip lower its clock under load.
    """

    flops_per_s: Any
    memory_bytes_per_s: ArrayLike
    multiprocessors: ArrayLike
    headroom: ArrayLike
    process_ratio: ArrayLike
    is_tensor: ArrayLike
    is_early_tensor: ArrayLike
    has_warp_groups: ArrayLike
    has_old_tlb: ArrayLike


def chip_of(device: Device, dtype: str) -> Chip:
    """A device as the model sees it in a dtype of torch ("tfloat32" for fp32 on tensor cores).

    What `assumed_of` lists is taken where the device does not say it. Raises ProfileError where its
    memory bandwidth is not known.
    """
    if device.memory_bandwidth_bytes_per_s is None:
        raise ProfileError(
            f"device '{device.name}' has no memory_bandwidth_bytes_per_s; add it from the datasheet"
        )
    peak = peak_flops_per_s(device, dtype)
    known = architecture_of(device)
    tensor_cores = "asynchronous" if known is None else known.tensor_cores
    has_units = dtype in device.peak_flops_per_s or peak > device.peak_flops_per_s["float32"]
    is_tensor = dtype != "float32" and has_units and tensor_cores != "none"
    clock_hz = _number(device, "boost_clock_hz")
    if is_tensor:
        clock_hz = _given(device, "tensor_clock_hz") or clock_hz
    if known is not None:
        peak, clock_hz = peak * known.above_boost_ratio, clock_hz * known.above_boost_ratio
        clock_hz = min(clock_hz, known.power_clock_hz)
    # A product of narrower factors takes less energy, by the bytes that it moves through the units.
    watts_per_flop = _number(device, "power_w") / peak
    if dtype in ITEM_BYTES:
        element_bytes = ITEM_BYTES[dtype] / (2 if dtype.endswith("_x2") else 1)
        watts_per_flop *= max(_HALF_BYTES / element_bytes, 1.0)
    return Chip(
        flops_per_s=peak,
        memory_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        multiprocessors=_number(device, "sm_count"),
        headroom=watts_per_flop * 1e12 / (clock_hz / 1e9),
        process_ratio=(_ASSUMED_NM if known is None else known.process_nm) / _REFERENCE_NM,
        is_tensor=is_tensor,
        is_early_tensor=is_tensor and tensor_cores == "registers",
        has_warp_groups=is_tensor and tensor_cores == "warp groups",
        has_old_tlb=known is not None and known.short_tlb,
    )


def assumed_of(device: Device) -> list[str]:
    """In words, what `chip_of` takes of a device that does not say it."""
    assumed = [words for name, (_, words) in _ASSUMED.items() if _given(device, name) is None]
    if architecture_of(device) is None:
        assumed.append(f"a process of {_ASSUMED_NM:g} nm and today's tensor cores")
    return assumed


def peak_flops_per_s(device: Device, dtype: str) -> float:
    """The dense peak in a dtype; that of fp32, in which the rest is computed, where it has none."""
    peaks = device.peak_flops_per_s
    if dtype == "float4_e2m1fn_x2" and dtype not in peaks and "float8_e4m3fn" in peaks:
        # Blackwell's tensor cores multiply twice as many.
        return 2.0 * peaks["float8_e4m3fn"]
    return peaks.get(dtype) or peaks.get("float32") or max(peaks.values())


def _number(device: Device, name: str) -> float:
    given = _given(device, name)
    return _ASSUMED[name][0] if given is None else given


def _given(device: Device, name: str) -> float | None:
    value = device.details.get(name)
    return float(value) if isinstance(value, int | float) and value > 0 else None


# Rows and columns of a tile, and the pieces that an inner sum is cut into (CUTLASS documentation,
# "Efficient GEMM in CUDA": threadblock tiles, split-K).
_TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
_SMALL_TILES = ((32, 128), (128, 32), (32, 32), (8, 128), (128, 8), (1, 128), (128, 1))
_PIECES = (1, 2, 4, 8, 16)
_TILE_ROWS, _TILE_COLUMNS, _TILE_PIECES = (
    np.array(column, dtype=float)
    for column in zip(
        *((rows, columns, k) for rows, columns in (*_TILES, *_SMALL_TILES) for k in _PIECES),
        strict=True,
    )
)
# Partial sums are written and read again in fp32.
_PARTIAL_SUM_BYTES = 8.0
# From this length of the inner sum on, rows of the factors lie further apart than the address
# translation caches reach; Pascal's reach least. Where both factors are stored by other rows, as in
# gradients of weights, a longer sum (a larger batch) moves nothing further apart there.
_LONG_INNER = 8192.0
# Half-precision rows that start at odd elements cannot be copied asynchronously, 4 bytes at a time
# or more, so that libraries fall back to kernels for Turing ("cutlass_75_…_align1" on A100:
# pegainfer-project/pegainfer, pull request 1046), whose instructions do half as much: GPT-2 124M
# gains 25 % with 50304 tokens instead of 50257 (Karpathy on nanoGPT, February 2023), so that its
# three products with the vocabulary took 2.5 times as long.
_ODD_RATIO = 0.4
# From Hopper on tensor cores are fed by bulk copies of 16 bytes or more; what starts elsewhere runs
# the kernels of older chips. On an H100 of ours (2026-11-26) GPT-2's three products with 50257
# tokens reach 0.15, 0.25 and 0.25 of the rate of aligned ones, BERT's with 30522 0.42 to 0.48.
_ODD_ON_GROUPS_RATIO, _UNEVEN_ON_GROUPS_RATIO = 0.21, 0.45
_BULK_COPY_BYTES = 16


def alignment_ratio(chip: Chip, aligned_bytes: ArrayLike) -> Array:
    """The share of its rate that a matmul keeps whose rows start at multiples of so many bytes."""
    aligned = np.asarray(aligned_bytes)
    is_odd, is_uneven = aligned < 2 * _HALF_BYTES, aligned < _BULK_COPY_BYTES
    on_groups = np.where(is_uneven, _UNEVEN_ON_GROUPS_RATIO, 1.0)
    on_groups = np.where(is_odd, _ODD_ON_GROUPS_RATIO, on_groups)
    ratio = np.where(chip.has_warp_groups, on_groups, np.where(is_odd, _ODD_RATIO, 1.0))
    return np.where(chip.is_tensor, ratio, 1.0)


# Of 2 and 4 times bf16's rate, products of factors that were cast before keep this: the twelve of
# a layer take 31.97 and 16.79 ms in bf16 and FP8 on an H200 NVL, 13.10 and 6.81 on a B300, and
# there 7.16 in MXFP8, whose scales are read too, and 3.76 in NVFP4 (TransformerEngine,
# docs/examples/gemm_profiling).
_NARROW_RATIOS = {"float8_e4m3fn": 0.96, "float4_e2m1fn_x2": 0.89}
_MXFP8_RATIO = 0.92


def narrow_ratio(target: str, dtype: str) -> float:
    """The share of the rate of wider factors, per bit, that a product of narrow ones keeps."""
    return _MXFP8_RATIO if target.endswith(".mxfp8") else _NARROW_RATIOS.get(dtype, 1.0)


# How sharply a roofline's or a power limit's two regimes meet.
_SHARPNESS = 4.0
_POWER_SHARPNESS = 6.0
# Of a product without elements no share of its seconds can be taken.
_LEAST_S = 1e-15


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulModel:
    """Matmuls: shares of the peak by kind of unit, and what tiles cost beyond their work.

    A tile of r × c reaches the share (1 + half_tile · (r + c) / (r · c))⁻¹ of `*_ratio` of the
    peak, as if its inner sum were `*_extra_inner` longer. `*_headroom` is where power begins to
    limit the clock on a 12 nm chip, scaled by (process / 12 nm) ** process_exponent; that of tensor
    cores is of bursts, as operators are timed, `sustained_tensor_headroom` of a run of minutes.
    """

    vector_ratio: float
    tensor_ratio: float
    early_tensor_ratio: float
    vector_half_tile: float
    tensor_half_tile: float
    vector_extra_inner: float
    tensor_extra_inner: float
    memory_ratio: float
    vector_headroom: float
    tensor_headroom: float
    sustained_tensor_headroom: float
    process_exponent: float
    long_inner: float
    old_tlb_long_inner: float
    start_s: float

    @property
    def sustained(self) -> MatmulModel:
        """The model of chips that have been training for minutes."""
        return replace(self, tensor_headroom=self.sustained_tensor_headroom)


def sustained_ratio(model: MatmulModel, chip: Chip) -> Array:
    """The share of its boost clock that a chip holds within its power limit, units fully busy.

    >>> from estimator.machines.catalogue import load_profile
    >>> from estimator.kernels.datasheet_model import chip_of
    >>> chip = chip_of(load_profile("t4").devices[0], "float16")  # 70 W
    >>> bool(sustained_ratio(load_kernel_model().matmuls.sustained, chip) < 0.6)
    True
    """
    needed = np.where(chip.is_tensor, model.tensor_headroom, model.vector_headroom)
    needed = needed * np.asarray(chip.process_ratio) ** model.process_exponent
    lack = needed / np.asarray(chip.headroom)
    return np.asarray((1.0 + lack**_POWER_SHARPNESS) ** (-1.0 / _POWER_SHARPNESS))


def matmul_seconds(
    model: MatmulModel,
    chip: Chip,
    *,
    batch: ArrayLike,
    rows: ArrayLike,
    columns: ArrayLike,
    inner: ArrayLike,
    moved_bytes: ArrayLike,
    aligned_bytes: ArrayLike = _BULK_COPY_BYTES,
    inner_in_rows: ArrayLike = True,
    narrow_ratio: ArrayLike = 1.0,
    cached: float = 1.0,
) -> Array:
    """Seconds of matmuls (batch, rows, inner) × (batch, inner, columns), without the start.

    Sizes and `moved_bytes` (what the matmul must read and write) are numbers or arrays of one
    length, as are the multiple of bytes at which the rows of all matrices start on tensor cores,
    whether any factor is stored by rows along the inner sum, and the `narrow_ratio`. `cached`
    multiplies the memory's rate where the factors are in the last-level cache.
    """
    count, m, n, k, moved = (
        np.atleast_1d(np.asarray(item, dtype=float))[:, None]
        for item in (batch, rows, columns, inner, moved_bytes)
    )
    tensor = _column(chip.is_tensor)
    share = np.where(_column(chip.is_early_tensor), model.early_tensor_ratio, model.tensor_ratio)
    share = np.where(tensor, share, model.vector_ratio)
    extra_inner = np.where(tensor, model.tensor_extra_inner, model.vector_extra_inner)
    half_tile = np.where(tensor, model.tensor_half_tile, model.vector_half_tile)
    old_tlb_long_inner = model.old_tlb_long_inner * _column(inner_in_rows)
    long_inner = np.where(_column(chip.has_old_tlb), old_tlb_long_inner, model.long_inner)
    rate = _column(chip.flops_per_s) * share * _column(sustained_ratio(model, chip))
    rate = rate / (1.0 + long_inner * np.maximum(0.0, np.log(np.maximum(k, 1.0) / _LONG_INNER)))
    rate = rate * _column(alignment_ratio(chip, aligned_bytes)) * _column(narrow_ratio)

    tiles = count * np.ceil(m / _TILE_ROWS) * np.ceil(n / _TILE_COLUMNS) * _TILE_PIECES
    waves = np.ceil(tiles / _column(chip.multiprocessors))
    area = _TILE_ROWS * _TILE_COLUMNS
    edge = 1.0 + half_tile * (_TILE_ROWS + _TILE_COLUMNS) / area
    tile_flops = 2.0 * area * (k / _TILE_PIECES + extra_inner)
    compute_s = waves * tile_flops * edge * _column(chip.multiprocessors) / rate
    partial = np.where(_TILE_PIECES > 1, _PARTIAL_SUM_BYTES * count * m * n * _TILE_PIECES, 0.0)
    bytes_per_s = _column(chip.memory_bytes_per_s) * model.memory_ratio * cached
    memory_s = (moved + partial) / bytes_per_s
    # A soft roofline: the longer of two, a little more where they are equal.
    longest = np.maximum(np.maximum(compute_s, memory_s), _LEAST_S)
    share = (np.minimum(compute_s, memory_s) / longest) ** _SHARPNESS
    return np.asarray((longest * (1.0 + share) ** (1.0 / _SHARPNESS)).min(axis=1))


def _column(values: ArrayLike) -> Array:
    return np.atleast_1d(np.asarray(values))[:, None]


def memory_classes(device: Device) -> tuple[str, ...]:
    """What a device's memory is, the closest class first.

    "HBM" is stacked on the chip's carrier, "GDDR" soldered around it; "GDDR ECC" keeps the check
    bits of its error correction among the data, to be fetched too.
    """
    kind = str(device.details.get("memory_type", "")).rstrip("0123456789eXx")
    if kind == "GDDR" and device.details.get("memory_ecc_in_band"):
        return "GDDR ECC", kind
    return (kind,)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBoundModel:
    """Kernels that move bytes: shares of the memory's peak rate.

    `memory_ratios` are what a plain kernel reaches, by architecture, else by class of memory, else
    "other": stacked memory ("HBM") reaches more than cards' ("GDDR"). `shares` are what kernels
    reach of that, by "operator.phase", "family.phase" or "family", the first that is known: a
    number, or (row length, share) points that are interpolated over the logarithm.
    """

    memory_ratios: Mapping[str, float]
    shares: Mapping[str, float | tuple[tuple[float, float], ...]]
    cache_speedup: float
    start_s: float

    def memory_ratio(self, device: Device) -> float:
        """The share of the memory's peak rate that a plain kernel reaches on a device."""
        keys = (str(device.details.get("architecture")), *memory_classes(device), "other")
        return next(self.memory_ratios[key] for key in keys if key in self.memory_ratios)

    def share(self, keys: tuple[str, ...], row_length: float) -> float:
        """The share for the first of `keys` that is known; that of "other" where none is."""
        known = (*keys, "other")
        share = next(self.shares[key] for key in known if key in self.shares)
        if isinstance(share, float | int):
            return float(share)
        lengths, shares = zip(*share, strict=True)
        return float(np.interp(np.log(max(row_length, 1.0)), np.log(lengths), shares))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionModel:
    """Fused attention: flops at a share of the peak, and the tensors' bytes on top.

    The share grows with the head size: small heads leave the exponentials' units the bottleneck.
    Head sizes between the kernels' steps are padded, and reach `padded_ratio` of the share. Kernels
    that wait for tensor cores (FlashAttention-2's, memory-efficient ones) reach `waiting_ratio`
    of it on those of Hopper and later, which compute while groups of warps load. cuDNN's take turns
    between exponentials and products there, and reach `overlapping_ratio` of it with full heads;
    with half of one exponentials are the bottleneck, and they gain nothing.
    """

    forward_ratio: float
    backward_ratio: float
    padded_ratio: float
    small_head: float
    memory_ratio: float
    start_s: float
    waiting_ratio: float = 1.0
    overlapping_ratio: float = 1.0


# Depthwise kernels of cuDNN and torch are written for filters of up to 5 × 5.
_WIDEST_DEPTHWISE = 25
# Without tensor cores: transforms are for 3 × 3 filters on images, none for 3 × 3 × 3 on volumes.
_VECTOR_KINDS = {1: "vector pointwise", 9: "vector transformed", 27: "vector direct"}
# An image of so few channels is the first layer's.
_FEW_CHANNELS = 4


def convolution_kind(dims: tuple[float, ...], *, is_tensor: bool) -> str:
    """Which algorithm a convolution of these `Features.dims` runs, as far as its sizes tell."""
    _, inputs, _, groups, _, kernel, _, _ = dims
    if groups > 1 and inputs == 1:
        return "depthwise" if kernel <= _WIDEST_DEPTHWISE else "wide depthwise"
    if groups > 1:
        return "grouped"
    if not is_tensor:
        return _VECTOR_KINDS.get(int(kernel), "vector dense")
    if inputs <= _FEW_CHANNELS:
        return "first"
    return "pointwise" if kernel == 1 else "dense"


# Tensor cores take channels in eights (cuDNN developer guide, "Tensor Core Operations").
_CHANNELS = 8.0


def implicit_matmuls(
    dims: tuple[float, ...], flops: float, *, is_backward: bool, is_tensor: bool
) -> list[tuple[float, float, float, float]]:
    """(batch, rows, columns, inner) of the matmuls that a convolution is computed as.

    Forward positions × outputs over inputs × filter. Backward outputs × inputs × filter over
    positions, and where `flops` are those of two, positions × inputs over outputs × filter, of
    which a strided convolution has a part at each (Chetlur et al.: cuDNN, 2014).
    """
    images, inputs, outputs, groups, out_positions, kernel, in_positions, _ = dims
    applied = min(out_positions, in_positions)
    gradients = flops / (2 * images * groups * inputs * outputs * kernel * applied)
    if is_tensor:
        inputs, outputs = (math.ceil(count / _CHANNELS) * _CHANNELS for count in (inputs, outputs))
    if not is_backward:
        return [(groups, images * applied, outputs, inputs * kernel)]
    matmuls = [(groups, outputs, inputs * kernel, images * applied)]
    if gradients > 1.5:
        met = outputs * kernel * applied / in_positions
        matmuls.append((groups, images * in_positions, inputs, max(met, 1.0)))
    return matmuls


# Fused attention works on blocks of so many queries, and on head sizes in steps (Dao,
# FlashAttention-2, 2023); the share of the peak is quoted at this head size.
_QUERY_BLOCK = 128.0
_HEAD_STEP = 32.0
_FULL_HEAD = 128.0


def attention_seconds(
    model: AttentionModel,
    chip: Chip,
    *,
    sustained: ArrayLike,
    heads: ArrayLike,
    queries: ArrayLike,
    head_size: ArrayLike,
    flops: ArrayLike,
    moved_bytes: ArrayLike,
    is_backward: ArrayLike,
    waits: ArrayLike = True,
    cached: float = 1.0,
) -> Array:
    """Seconds of fused attention calls, without the start; `heads` are those of all samples.

    Each multiprocessor takes one block of queries of one head at a time; the tensors' bytes come
    on top, since a block reads its queries before and writes its sums after it computes.
    """
    blocks = np.asarray(heads) * np.ceil(np.asarray(queries) / _QUERY_BLOCK)
    filled = blocks / np.asarray(chip.multiprocessors)
    padded = np.ceil(np.asarray(head_size) / _HEAD_STEP) * _HEAD_STEP
    share = np.where(is_backward, model.backward_ratio, model.forward_ratio)
    share = share * np.where(padded > np.asarray(head_size), model.padded_ratio, 1.0)
    size = np.minimum(padded, _FULL_HEAD)
    share = share * (1.0 + model.small_head / _FULL_HEAD) / (1.0 + model.small_head / size)
    overlapping = 1.0 + (model.overlapping_ratio - 1.0) * np.clip(2 * size / _FULL_HEAD - 1, 0, 1)
    by_groups = np.where(waits, model.waiting_ratio, overlapping)
    share = share * np.where(chip.has_warp_groups, by_groups, 1.0)
    rate = np.asarray(chip.flops_per_s) * share * np.asarray(sustained)
    compute_s = np.asarray(flops) * (padded / np.asarray(head_size)) / rate
    compute_s = compute_s * np.ceil(filled) / filled
    bytes_per_s = np.asarray(chip.memory_bytes_per_s) * model.memory_ratio * cached
    return np.asarray(compute_s + np.asarray(moved_bytes) / bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelModel:
    """The fitted coefficients, and how far each family's calls are off on chips not fitted to.

    Convolutions take the seconds of their compute and those of the bytes that they stream, each
    times a factor by "kind.phase", or by "kind.phase.layout" of its layout. Compute is that
    of `implicit_matmuls` on tensor cores, else flops at the peak; libraries copy images into the
    layout that their kernels want, and sums over all positions (gradients of filters) go through
    memory, so that bytes cost more than those of a plain kernel.

    `errors` are medians of |predicted − measured| / measured by family, "other" for the rest;
    "model" is one standard deviation of what the kernels of a whole step are off together.
    """

    matmuls: MatmulModel
    convolutions: Mapping[str, tuple[float, float]]
    memory_bound: MemoryBoundModel
    attention: AttentionModel
    errors: Mapping[str, float]

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> KernelModel:
        """The coefficients of a fitted file (`data/fits/kernels.json`)."""
        return cls(
            matmuls=MatmulModel(**plain["matmuls"]),
            convolutions=plain["convolutions"],
            memory_bound=MemoryBoundModel(**plain["memory_bound"]),
            attention=AttentionModel(**plain["attention"]),
            errors=plain["errors"],
        )


_chosen: list[Path] = []


def choose_kernel_model(path: Path) -> None:
    """Let everything estimated from now on take this model instead of the one that ships.

    For judging a model on what it was not fitted to, before anything else is estimated.
    """
    _chosen[:] = [path]


def load_kernel_model(path: Path | None = None) -> KernelModel:
    """A fitted kernel model, by default the chosen one, else the one that ships; read once."""
    chosen = _chosen[0] if _chosen else shipped_data("fits") / "kernels.json"
    return _read_kernel_model(path or chosen)


@lru_cache(maxsize=4)
def _read_kernel_model(path: Path) -> KernelModel:
    return KernelModel.from_dict(json.loads(path.read_text(encoding="utf-8")))
