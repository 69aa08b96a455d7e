"""Give operator calls their seconds on a machine known by its datasheet, by the kernel model.

What the model covers by a shape of its own (matmuls, convolutions, attention) it computes on the
chip's multiprocessors; every other operator streams its bytes. Bytes that are still in the
last-level cache come faster, which is what `Prediction` calls warm.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from estimator.elementwise import Array
from estimator.files import shipped_data
from estimator.graph.costs.call_costs import Features, features_of
from estimator.graph.costs.registry import Family
from estimator.kernels.datasheet_model import (
    Chip,
    attention_seconds,
    chip_of,
    convolution_kind,
    implicit_matmuls,
    load_kernel_model,
    matmul_seconds,
    narrow_ratio,
    peak_flops_per_s,
    sustained_ratio,
)
from estimator.machines.profile import Device, MachineProfile
from estimator.tensors import ITEM_BYTES, OpCall
from estimator.workload.recipe import TF32_BY_DEFAULT


@dataclass(frozen=True, slots=True)
class KernelPrediction:
    """Seconds with inputs in cache and from memory, and the fit's own relative error."""

    warm_s: float
    cold_s: float
    relative_error: float
    source: str


# Give cuDNN's fused attention its published rates, by chip, width of heads and tokens.
#
# A card of the same architecture reaches them in proportion to its peak. Heads of latent attention
# are wider for queries than for values. Of a window of few keys each block of queries waits for its
# own, so that its rate is far lower and does not depend on the tokens.

# Transformer Engine's fused attention, by whose name its calls go.
PREFIX = "te."
# Of fewer queries a call is one of a window.
_WINDOW = 512.0
_FULL_HEAD, _LATENT_HEAD = 128.0, 192.0


@lru_cache(maxsize=1)
def _published() -> Mapping[str, Any]:
    published: Mapping[str, Any] = json.loads(
        (shipped_data("fits") / "attention.json").read_text(encoding="utf-8")
    )
    return published


def has_rates(device: Device) -> bool:
    """Whether cuDNN's rates are known on a device."""
    return _chip(device) in _published()["tflops_per_s"]


def _chip(device: Device) -> str:
    """Under which name a device's rates are: Blackwell Ultra has faster exponentials."""
    return "gb110" if "B300" in device.name else str(device.details.get("architecture"))


def cudnn_seconds(features: Features, device: Device) -> float:
    """Seconds of a call of attention whose target says how it computes, without its launch."""
    published, architecture = _published(), _chip(device)
    _, queries, keys, size, causal = features.dims
    name, _, variant = features.target.removeprefix(PREFIX).rpartition(".")
    side = 1 if name.endswith("backward") else 0
    flops = features.cost.flops
    # On Hopper a backward pass in FP8 is slower than one in bf16.
    is_fp8 = "fp8" in variant and not (architecture == "gh100" and side)
    is_window = "window" in variant
    if is_window and is_fp8 and side:
        # On Blackwell one in FP8 skips no key before a window: over 128 of 4,096 to 32,768 tokens
        # it takes as long as over all before (results/gpt_oss, cuDNN 9.19 to 9.27, 2026).
        flops *= (queries + 1) / 2 / keys
        keys, causal, is_window = queries, 1.0, False
    if is_window or queries <= _WINDOW:
        rate = float(published["window_tflops_per_s"][architecture][side])
    else:
        kinds = published["tflops_per_s"][architecture]
        kind = "latent" if size >= _LATENT_HEAD else "bfloat16"
        if is_fp8:
            kind = "latent fp8" if kind == "latent" else "fp8"
        rates = [rates_of_kind[side] for rates_of_kind in kinds.get(kind, kinds["bfloat16"])]
        rate = float(np.interp(np.log(keys), np.log(published["tokens"]), rates))
        if size < _FULL_HEAD:
            rate *= published["half_head_ratio"][architecture][side]
        rate *= 1.0 if causal else published["unmasked_ratio"]
    if side and "deterministic" in variant:
        rate *= published["deterministic_ratio"]
    of_peak = device.peak_flops_per_s["bfloat16"] / published["peak_flops_per_s"][architecture]
    return float(flops / (rate * 1e12 * of_peak))


# Operators of other families compute in fp32 whatever their tensors hold, far from its peak.
_OTHER_COMPUTE_RATIO = 0.30
_HALF_BYTES = 2


class Roofline:
    """Seconds of calls on a machine known by its datasheet; stands in for `KernelFits`.

    With `pads_matmuls` factors whose rows start at odd elements are padded where that is faster, as
    torch.compile does (torch/_inductor/fx_passes/pad_mm.py).
    """

    def __init__(
        self,
        profile: MachineProfile,
        *,
        precision: str = "fp32",
        pads_matmuls: bool = False,
        kernel_model: Path | None = None,
    ) -> None:
        self.threads = 1
        self._pads_matmuls = pads_matmuls
        self.exact: dict[OpCall, tuple[float, float]] = {}
        self._device = profile.devices[0]
        self._precision = precision
        self.kernel_model = load_kernel_model(kernel_model)
        self.shared_error = self.kernel_model.errors["model"]
        self._matmuls = self.kernel_model.matmuls.sustained
        self._chips: dict[str, Chip] = {}
        memory_bound = self.kernel_model.memory_bound
        rate = self._device.memory_bandwidth_bytes_per_s or math.inf
        self._bytes_per_s = rate * memory_bound.memory_ratio(self._device)
        cache = self._device.details.get("l2_cache_bytes")
        self.cache_bytes = float(cache) if isinstance(cache, int | float) else 0.0

    def predict(self, call: OpCall) -> KernelPrediction | None:
        """Seconds of a call; None where its operator has no formula."""
        return self.predict_each([call], [features_of(call)])[0]

    def predict_each(
        self, calls: Sequence[OpCall], features: Sequence[Features | None]
    ) -> list[KernelPrediction | None]:
        """The same for several calls with their features."""
        known = iter(self.predict_features([f for f in features if f is not None]))
        return [None if feature is None else next(known) for feature in features]

    def predict_features(self, features: Sequence[Features]) -> list[KernelPrediction]:
        """The same for calls of which only the features are known."""
        alike: defaultdict[tuple[Family, str, str], list[int]] = defaultdict(list)
        for number, feature in enumerate(features):
            own = PREFIX if feature.target.startswith(PREFIX) else ""
            alike[feature.family, self._computed_in(feature), own].append(number)
        errors, speedup = self.kernel_model.errors, self.kernel_model.memory_bound.cache_speedup
        predictions: dict[int, KernelPrediction] = {}
        for (family, dtype, _), numbers in alike.items():
            some = [features[number] for number in numbers]
            seconds = _COMPUTED.get(family, Roofline._memory_bound_s)
            warm_s, cold_s = (
                seconds(self, some, self._chip_in(dtype), cached) for cached in (speedup, 1.0)
            )
            error = errors.get(family, errors["other"])
            for number, warm, cold in zip(numbers, warm_s, cold_s, strict=True):
                predictions[number] = KernelPrediction(
                    warm_s=warm, cold_s=max(cold, warm), relative_error=error, source="datasheet"
                )
        return [predictions[number] for number in range(len(features))]

    def _computed_in(self, features: Features) -> str:
        """In which dtype a call's matmuls are, as the kernel model tells them apart."""
        dtype = features.dtype
        if dtype == "float32" and (self._precision == "tf32" or features.family in TF32_BY_DEFAULT):
            dtype = "tfloat32"
        return dtype

    def _chip_in(self, dtype: str) -> Chip:
        if dtype not in self._chips:
            self._chips[dtype] = chip_of(self._device, dtype)
        return self._chips[dtype]

    def _matmuls_s(self, some: Sequence[Features], chip: Chip, cached: float) -> list[float]:
        kernel_model = self._matmuls
        batch, rows, columns, inner = np.array(
            [features.dims[:4] for features in some], dtype=float
        ).T

        def seconds_of(aligned_bytes: Sequence[float]) -> Array:
            return matmul_seconds(
                kernel_model,
                chip,
                batch=batch,
                rows=rows,
                columns=columns,
                inner=inner,
                moved_bytes=[features.cost.moved_bytes for features in some],
                aligned_bytes=aligned_bytes,
                inner_in_rows=[features.layout != "tn" for features in some],
                narrow_ratio=[narrow_ratio(f.target, f.dtype) for f in some],
                cached=cached,
            )

        matrices = [tensor_core_matrices(features) for features in some]
        seconds = seconds_of([_aligned_bytes(given) for given in matrices])
        if self._pads_matmuls:
            padded_bytes = [
                sum(matrix.bytes for matrix in given if matrix.aligned_bytes < _PADDED_BYTES)
                for given in matrices
            ]
            copies_s = 2 * np.array(padded_bytes) / (self._bytes_per_s * cached)
            seconds = np.minimum(seconds, seconds_of([_PADDED_BYTES] * len(some)) + copies_s)
        # A gradient of several matmuls is costed as one; its flops say how many there are.
        flops = np.array([features.cost.flops for features in some])
        times = flops / np.maximum(2.0 * batch * rows * columns * inner, 1.0)
        seconds_each: list[float] = (
            kernel_model.start_s + seconds * np.maximum(times, 1.0)
        ).tolist()
        return seconds_each

    def _attentions_s(self, some: Sequence[Features], chip: Chip, cached: float) -> list[float]:
        kernel_model = self.kernel_model.attention
        if some[0].target.startswith(PREFIX) and has_rates(self._device):
            device = self._device
            return [kernel_model.start_s + cudnn_seconds(features, device) for features in some]
        heads, queries, _, head_size = np.array(
            [features.dims[:4] for features in some], dtype=float
        ).T
        seconds = attention_seconds(
            kernel_model,
            chip,
            sustained=sustained_ratio(self._matmuls, chip),
            heads=heads,
            queries=queries,
            head_size=head_size,
            flops=[features.cost.flops for features in some],
            moved_bytes=[features.cost.moved_bytes for features in some],
            is_backward=[phase_of(features) == "backward" for features in some],
            waits=["cudnn_attention" not in features.target for features in some],
            cached=cached,
        )
        seconds_each: list[float] = (kernel_model.start_s + seconds).tolist()
        return seconds_each

    def _convolutions_s(self, some: Sequence[Features], _chip: Chip, cached: float) -> list[float]:
        start_s, factors = self.kernel_model.memory_bound.start_s, self.kernel_model.convolutions
        seconds = []
        for features, (kind, compute_s) in zip(some, self.convolutions(some), strict=True):
            name = f"{kind}.{phase_of(features)}"
            compute, moved = factors.get(f"{name}.{features.layout}") or factors[name]
            bytes_s = features.cost.moved_bytes / (self._bytes_per_s * cached)
            seconds.append(start_s + compute * compute_s + moved * bytes_s)
        return seconds

    def convolutions(self, some: Sequence[Features]) -> list[tuple[str, float]]:
        """(kind of convolution, seconds that its units compute at best) of calls in one dtype."""
        chip = self._chip_in(self._computed_in(some[0]))
        kinds = [convolution_kind(one.dims, is_tensor=bool(chip.is_tensor)) for one in some]
        compute_s, matmuls, of_call, moved = np.zeros(len(some)), [], [], []
        for number, (features, kind) in enumerate(zip(some, kinds, strict=True)):
            is_depthwise = kind.endswith("depthwise")
            if is_depthwise or not (chip.is_tensor or kind in ("grouped", "vector direct")):
                # Too little to multiply for tensor cores.
                own = self._chip_in("float32") if is_depthwise else chip
                rate = float(own.flops_per_s) * float(sustained_ratio(self._matmuls, own))
                compute_s[number] = features.cost.flops / rate
                continue
            implied = implicit_matmuls(
                features.dims,
                features.cost.flops,
                is_backward=phase_of(features) == "backward",
                is_tensor=bool(chip.is_tensor),
            )
            # Two of image, filter and output, or their gradients, are read, and one written.
            each_bytes = features.cost.moved_bytes * (2 / 3 if len(implied) > 1 else 1.0)
            matmuls += implied
            of_call += [number] * len(implied)
            moved += [each_bytes] * len(implied)
        if matmuls:
            sizes = zip(("batch", "rows", "columns", "inner"), np.array(matmuls).T, strict=True)
            seconds = matmul_seconds(self._matmuls, chip, moved_bytes=moved, **dict(sizes))
            np.add.at(compute_s, of_call, seconds)
        return list(zip(kinds, compute_s.tolist(), strict=True))

    def _recurrents_s(self, some: Sequence[Features], chip: Chip, cached: float) -> list[float]:
        return [self._recurrent_s(features, chip, cached) for features in some]

    def _recurrent_s(self, features: Features, chip: Chip, cached: float) -> float:
        """cuDNN multiplies all inputs at once, but states step by step, reading weights again.

        A step is a matmul and a kernel of its gates; gradients of weights are summed at the end.
        """
        samples, work, chains, at_once, columns, inner, steps = features.dims
        item_bytes = ITEM_BYTES.get(features.dtype, 4)
        batch = samples / steps
        weights_bytes = item_bytes * at_once * columns * inner
        speedup = self.kernel_model.memory_bound.cache_speedup
        held = speedup if weights_bytes <= self.cache_bytes else 1.0
        # Gates are written and read again, the state read.
        step_bytes = weights_bytes + item_bytes * at_once * batch * (2 * columns + inner)
        recurrent = chains * at_once * columns * inner
        times = features.cost.flops / (2 * samples * work)
        at_input = max(times * work - recurrent, 0.0) / columns
        product = partial(matmul_seconds, self._matmuls, chip, columns=columns)
        step_s = float(
            product(batch=at_once, rows=batch, inner=inner, moved_bytes=step_bytes, cached=held)[0]
        )
        moved, summed = features.cost.moved_bytes, max(at_input, 1.0)
        rest_s = float(
            product(batch=1.0, rows=samples, inner=summed, moved_bytes=moved, cached=cached)[0]
        )
        gates_s = self.kernel_model.memory_bound.start_s
        step_s += self._matmuls.start_s + gates_s
        return gates_s + chains * steps * step_s + rest_s

    def _memory_bound_s(self, some: Sequence[Features], _chip: Chip, cached: float) -> list[float]:
        flops_per_s = _OTHER_COMPUTE_RATIO * peak_flops_per_s(self._device, "float32")
        architecture = str(self._device.details.get("architecture"))
        model, seconds = self.kernel_model.memory_bound, []
        for features in some:
            moved = features.cost.moved_bytes * _CAST_RATIOS.get(features.target, 1.0)
            if architecture not in _TURNING:
                moved *= _NOT_TURNED.get(features.target, 1.0)
            if not moved:
                seconds.append(0.0)
                continue
            length = features.dims[1] if len(features.dims) > 1 else 1.0
            keys = memory_bound_keys(features, architecture)
            rate = model.share(keys, length) * self._bytes_per_s * cached
            seconds.append(model.start_s + max(features.cost.flops / flops_per_s, moved / rate))
        return seconds


# Whose tensor cores multiply FP8 by rows alone, so that casts with one scale write columns, too.
# Others read either way what rows are (TransformerEngine, docs/features/low_precision_training/
# performance_considerations): such a cast moves three of four bytes, and nothing is turned.
_TURNING = frozenset({"gh100", "ad10x", "ad10x-geforce"})
_NOT_TURNED = {"te.quantize.turned": 0.75, "te.quantize.turn": 0.0}
# Two FP4 numbers and a ninth of them for scales are in a byte, which a tensor has for one.
_CAST_RATIOS = {"te.quantize.nvfp4": (2 + 9 / 16) / (2 + 1)}


class TensorCoreMatrix(NamedTuple):
    """A factor or the result of a matmul: the multiple of bytes at which its rows start, and what
    it holds."""

    aligned_bytes: int
    bytes: float


# What tensor cores multiply that may start at any element.
_ALIGNED_DTYPES = {"float16": 2, "bfloat16": 2, "tfloat32": 4}
# torch.compile pads factors to rows of so many bytes (torch/_inductor/fx_passes/pad_mm.py,
# `get_alignment_size`).
_PADDED_BYTES = 16


def tensor_core_matrices(features: Features) -> list[TensorCoreMatrix]:
    """The two factors and the result of a matmul on tensor cores; none of another.

    A factor stored by rows has rows of the inner dimension (the first) or of columns, else of rows
    or of the inner one. Products with a vector run kernels of their own.
    """
    batch, rows, columns, inner = features.dims[:4]
    element_bytes = _ALIGNED_DTYPES.get(features.dtype)
    if element_bytes is None or min(rows, columns) <= 1:
        return []
    matrices = (
        (rows if features.layout in ("tn", "tt") else inner, rows * inner),
        (inner if features.layout in ("nt", "tt") else columns, inner * columns),
        (columns, rows * columns),
    )
    return [
        TensorCoreMatrix(
            math.gcd(element_bytes * int(length), _PADDED_BYTES), element_bytes * batch * size
        )
        for length, size in matrices
    ]


def _aligned_bytes(matrices: Sequence[TensorCoreMatrix]) -> int:
    return min((matrix.aligned_bytes for matrix in matrices), default=_PADDED_BYTES)


def is_unaligned(features: Features) -> bool:
    """Whether rows of a matmul on tensor cores start elsewhere than bulk copies may begin."""
    return (
        features.family == "matmul"
        and _aligned_bytes(tensor_core_matrices(features)) < _PADDED_BYTES
    )


def memory_bound_keys(features: Features, architecture: str = "") -> tuple[str, ...]:
    """Under which names a call's share of the memory's rate may be known, the closest first."""
    phase = phase_of(features)
    kinds = [kind for kind in _OWN_SHARES if kind in features.target]
    own = [f"{kind}.{name}" for kind in kinds for name in (architecture, phase) if name]
    return (*own, f"{features.family}.{phase}", features.family)


def phase_of(features: Features) -> str:
    """ "forward" or "backward", by the operator's name."""
    return "backward" if "backward" in features.target else "forward"


# Kinds of operators whose kernels are unlike the rest of their family.
_OWN_SHARES = ("batch_norm", "group_norm", "quantize")
_COMPUTED: Mapping[Family, Callable[[Roofline, Sequence[Features], Chip, float], list[float]]] = {
    "matmul": Roofline._matmuls_s,
    "convolution": Roofline._convolutions_s,
    "attention": Roofline._attentions_s,
    "recurrent": Roofline._recurrents_s,
}
# Of which a chip's multiprocessors set the pace, not its memory alone.
COMPUTED_FAMILIES = frozenset(_COMPUTED)
