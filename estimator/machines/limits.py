"""Set a machine's GPUs below their datasheet: a power limit, or a clock."""

from __future__ import annotations

import re
from dataclasses import replace

from estimator.errors import ProfileError, quoted
from estimator.machines.profile import Device, MachineProfile

_LIMIT = re.compile(r"([1-9][0-9]{0,5}(?:\.[0-9]+)?)(W|MHz)")
_HZ_PER_MHZ = 1e6


def split_limit(name: str) -> tuple[str, str | None]:
    """(name of a machine, its limit) of a text such as ``h100-sxm@500W``.

    >>> split_limit("h100-sxm@500W"), split_limit("t4")
    (('h100-sxm', '500W'), ('t4', None))
    """
    machine, at, limit = name.partition("@")
    return (machine, limit) if at else (name, None)


def with_limit(profile: MachineProfile, limit: str) -> MachineProfile:
    """The machine under ``500W`` (nvidia-smi -pl) or ``1410MHz`` (nvidia-smi -lgc).

    A power limit lowers the clock that busy units hold (see `timeline.kernel_model`), a clock the
    peaks themselves; memory keeps its rate. Raises ProfileError for a machine whose kernels were
    measured, and for a limit above what the device has.
    """
    found = _LIMIT.fullmatch(limit)
    if found is None:
        raise ProfileError(f"limit {quoted(limit)} is unknown; write one such as 500W or 1410MHz")
    if profile.kernels or profile.kind != "cuda":
        raise ProfileError(
            f"'{profile.name}' was measured as it runs; set the limit there and run 'estimator "
            "probe' again"
        )
    value = float(found[1])
    limited = _at_power if found[2] == "W" else _at_clock
    devices = tuple(limited(device, value) for device in profile.devices)
    return replace(profile, name=f"{profile.name}@{limit}", devices=devices)


def _at_power(device: Device, watts: float) -> Device:
    _check(device, "power_w", watts, "W")
    return replace(device, details={**device.details, "power_w": watts})


def _at_clock(device: Device, mhz: float) -> Device:
    clock_hz = mhz * _HZ_PER_MHZ
    boost_hz = _check(device, "boost_clock_hz", clock_hz, "Hz")
    tensor_hz = float(device.details.get("tensor_clock_hz") or boost_hz)
    peaks = {
        dtype: peak * min(clock_hz / (boost_hz if dtype == "float32" else tensor_hz), 1.0)
        for dtype, peak in device.peak_flops_per_s.items()
    }
    details = {**device.details, "boost_clock_hz": clock_hz}
    if "tensor_clock_hz" in details:
        details["tensor_clock_hz"] = min(clock_hz, tensor_hz)
    return replace(device, peak_flops_per_s=peaks, details=details)


def _check(device: Device, name: str, limit: float, unit: str) -> float:
    most = device.details.get(name)
    if not isinstance(most, int | float) or limit > most:
        has = f"{most:g} {unit}" if isinstance(most, int | float) else "no such figure"
        raise ProfileError(
            f"'{device.name}' is limited to {limit:g} {unit}, and its datasheet has {has}; choose "
            "a lower limit"
        )
    return float(most)
