"""Say what a GPU can do in one dtype, by its datasheet and its architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike

from estimator.errors import ProfileError
from estimator.machines.architectures import architecture_of
from estimator.machines.profile import Device
from estimator.tensors import ITEM_BYTES

# The process for which the kernel model quotes its headrooms.
_REFERENCE_NM = 12.0
# What is taken of a device that does not say it, in base units: V100 SXM2's 80 multiprocessors, 300
# W and 1.53 GHz, rounded (NVIDIA V100 datasheet, 2020), the middle of the shipped catalogue.
_ASSUMED = {"sm_count": 80.0, "power_w": 300.0, "boost_clock_hz": 1.5e9}
_SAID = {
    "sm_count": "80 multiprocessors",
    "power_w": "a power limit of 300 W",
    "boost_clock_hz": "a boost clock of 1.5 GHz",
}
# Of an architecture that is not known: N5 or 4N, in which most GPUs since 2022 are made, with
# tensor cores as they have been since A100.
_ASSUMED_NM = 5.0
_HALF_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What `kernel_model` knows of a chip computing in one dtype; numbers, or arrays of one length.

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
    """A device as `kernel_model` sees it in a dtype of torch ("tfloat32" for fp32 on tensor cores).

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
    is_tensor = dtype != "float32" and dtype in device.peak_flops_per_s and tensor_cores != "none"
    clock_hz = _number(device, "boost_clock_hz")
    if is_tensor:
        clock_hz = _given(device, "tensor_clock_hz") or clock_hz
    if known is not None:
        peak, clock_hz = peak * known.above_boost_ratio, clock_hz * known.above_boost_ratio
    # A product of narrower factors takes less energy, by the bytes that it moves through the units.
    watts_per_flop = _number(device, "power_w") / peak
    if dtype in ITEM_BYTES:
        watts_per_flop *= max(_HALF_BYTES / ITEM_BYTES[dtype], 1.0)
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
    found = [said for name, said in _SAID.items() if _given(device, name) is None]
    if architecture_of(device) is None:
        found.append(f"a process of {_ASSUMED_NM:g} nm and today's tensor cores")
    return found


def peak_flops_per_s(device: Device, dtype: str) -> float:
    """The dense peak in a dtype; that of fp32, in which the rest is computed, where it has none."""
    peaks = device.peak_flops_per_s
    return peaks.get(dtype) or peaks.get("float32") or max(peaks.values())


def _number(device: Device, name: str) -> float:
    given = _given(device, name)
    return _ASSUMED[name] if given is None else given


def _given(device: Device, name: str) -> float | None:
    value = device.details.get(name)
    return float(value) if isinstance(value, int | float) and value > 0 else None
