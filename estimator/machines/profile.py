"""Hold what was measured of one machine type, as checked values and as JSON.

A profile stores measurements and simple fits; everything derived from them (kernel-cost fits,
collective costs on a topology) is derived where it is used, so a better formula needs no new probe.
All that a profile is made of is imported from here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from estimator.errors import ProfileError, first_fault, quoted
from estimator.files import write_text_atomically
from estimator.machines.measurements import (
    CollectiveCost,
    CollectiveName,
    Contention,
    Device,
    DeviceKind,
    HostCost,
    InputCost,
    Interference,
    KernelCost,
    KernelPoint,
    Link,
    LinkKind,
    Locality,
    MemoryCost,
    OverlapCost,
    PairMatrix,
    Provenance,
    Source,
    UpdateCost,
    check_not_negative,
    check_positive,
)

__all__ = [
    "CollectiveCost",
    "CollectiveName",
    "Contention",
    "Device",
    "DeviceKind",
    "HostCost",
    "InputCost",
    "Interference",
    "KernelCost",
    "KernelPoint",
    "Link",
    "LinkKind",
    "MachineProfile",
    "MemoryCost",
    "OverlapCost",
    "PairMatrix",
    "Provenance",
    "Locality",
    "SCHEMA_VERSION",
    "Source",
    "UpdateCost",
    "check_machine_name",
    "json_schema",
]

SCHEMA_VERSION = 2
# With the first tenth of the probe's kernel calls steps of eight models were off by up to 12 % from
# those with all of them, with 3 % of the calls by up to 27, with 2 % by up to 57.
_FEWEST_TIMED_RATIO = 0.1

# What version 1 called the fields of links, of timed kernels and of the profile itself.
_NAMES_OF_VERSION_1 = {
    "reach": "locality",
    "streams": "flows",
    "spread_ratio": "noise_ratio",
    "rank_spread_ratio": "rank_jitter_ratio",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """Everything known of one machine type: one node with `devices`.

    `network` are the links that leave the node, by locality and by flows through the NIC at once;
    `pairs` holds the single links of the very cluster that was probed. `kernels_timed_ratio` is the
    share of the probe's kernel calls that it came to time; None: not known.
    """

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    network: tuple[Link, ...] = ()
    pairs: PairMatrix | None = None
    collectives: tuple[CollectiveCost, ...] = ()
    overlaps: tuple[OverlapCost, ...] = ()
    kernels: tuple[KernelCost, ...] = ()
    contentions: tuple[Contention, ...] = ()
    host: HostCost | None = None
    memory: MemoryCost | None = None
    input: InputCost | None = None
    updates: tuple[UpdateCost, ...] = ()
    software: Mapping[str, str] = field(default_factory=dict)
    hardware: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    canary_s: float | None = None
    rank_jitter_ratio: float | None = None
    kernels_timed_ratio: float | None = None
    missing: tuple[str, ...] = ()
    interference: Interference | None = None
    provenance: Provenance
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("MachineProfile.devices is empty; a machine has at least one device")
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(
                f"profile has schema version {self.schema_version}, this package reads "
                f"{SCHEMA_VERSION}; probe the machine again"
            )
        check_positive(self, "canary_s")
        check_not_negative(self, "rank_jitter_ratio", "kernels_timed_ratio")

    def __repr__(self) -> str:
        # The generated one would print every kernel that was timed.
        return f"MachineProfile({self.name}: {len(self.devices)} x {self.devices[0].name})"

    @property
    def kind(self) -> DeviceKind:
        """The kind of the machine's devices; all devices of a profile are of one kind."""
        return self.devices[0].kind

    @property
    def is_cut(self) -> bool:
        """Whether the probe timed so few kernels that estimates are to say so."""
        timed_ratio = self.kernels_timed_ratio
        return timed_ratio is not None and timed_ratio < _FEWEST_TIMED_RATIO

    @property
    def device_faults(self) -> tuple[str, ...]:
        """A sentence on every state of a GPU that held back the probe and should not last."""
        return tuple(
            f"GPU {device.index} {fault}"
            for device in self.devices
            for fault in _faults_of(device.details)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Any, *, origin: str = "profile") -> MachineProfile:
        """Check and build a profile from plain JSON values; raises ProfileError naming `origin`."""
        from pydantic import ValidationError

        text = _unprintable(data)
        if text is not None:
            raise ProfileError(
                f"{origin} is not a machine profile ({quoted(text)} has unprintable characters); "
                "run 'estimator probe' to write a new one"
            )
        try:
            return _adapter().validate_python(_of_this_version(data))  # type: ignore[no-any-return]
        except ValidationError as error:
            raise ProfileError(
                f"{origin} is not a machine profile ({first_fault(error)[0]}); "
                "run 'estimator probe' to write a new one"
            ) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as JSON, whole or not at all."""
        write_text_atomically(Path(path), json.dumps(self.to_dict(), indent=1, allow_nan=False))


# What slows a GPU's clocks down beyond its usual limit of power, by NVML's names.
_THROTTLES = {
    "HwSlowdown": "was slowed down by its hardware",
    "HwThermalSlowdown": "was slowed down by heat",
    "SwThermalSlowdown": "was slowed down by heat",
    "HwPowerBrakeSlowdown": "was slowed down by the power supply",
    "ApplicationsClocksSetting": "ran at clocks that someone has set",
}
# Limits differ by some watts between boards of one kind.
_LOWERED_POWER_RATIO = 0.97


def _faults_of(details: Mapping[str, str | int | float | bool | None]) -> Iterable[str]:
    """What is wrong with a device of such details."""
    reasons = f"{details.get('throttle_reasons_at_work') or details.get('throttle_reasons') or ''}"
    yield from dict.fromkeys(_THROTTLES[name] for name in reasons.split(", ") if name in _THROTTLES)
    limit, usual = details.get("power_limit_w"), details.get("power_limit_default_w")
    if limit and usual and float(limit) < _LOWERED_POWER_RATIO * float(usual):
        yield f"has a power limit of {limit:g} W, where {usual:g} W is usual"
    if details.get("other_processes"):
        yield "ran other programs too"
    if details.get("ecc_uncorrected_errors"):
        yield "had memory errors that could not be corrected"
    if remapping := details.get("row_remapping"):
        yield f"has memory rows whose replacement is {remapping}"
    width, most = details.get("pcie_width"), details.get("pcie_width_most")
    if width and most and width < most:  # type: ignore[operator]
        yield f"has {width} of {most} PCIe lanes"


_NUMBERS = frozenset((bool, int, float, type(None)))


def _unprintable(data: Any) -> str | None:
    """A text in JSON values that would move a terminal's cursor, or None."""
    level = [data]
    while level:
        within: list[Iterable[Any]] = []
        for value in level:
            if isinstance(value, str):
                if not value.isprintable():
                    return value
            elif isinstance(value, (list, tuple)):
                within.append(value)
            elif isinstance(value, Mapping):
                within += value, value.values()
        # Most values are numbers: those go no further.
        level = [each for each in chain.from_iterable(within) if type(each) not in _NUMBERS]
    return None


@lru_cache(maxsize=1)
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(MachineProfile)


def _of_this_version(data: Any) -> Any:
    """A profile's values as this version names them, without contentions of first touches.

    Earlier versions measured those; a step that keeps its memory, as all that is timed here,
    touches nothing for the first time. Keys that have gone need nothing: unknown ones are passed
    over.
    """
    if not isinstance(data, dict):
        return data
    if data.get("schema_version", 1) == 1:
        data = {_NAMES_OF_VERSION_1.get(key, key): value for key, value in data.items()}
        for key in ("links", "network", "kernels"):
            data[key] = _renamed(data.get(key, ()))
        data["schema_version"] = SCHEMA_VERSION
    contentions = data.get("contentions")
    if not isinstance(contentions, list | tuple):
        return data
    kept = [
        item
        for item in contentions
        if not (isinstance(item, dict) and item.get("bound") == "first_touch")
    ]
    return {**data, "contentions": kept}


def _renamed(items: Any) -> Any:
    """A list of records of version 1, and their points, with the names of this version."""
    if not isinstance(items, list | tuple):
        return items
    found = []
    for item in items:
        if isinstance(item, dict):
            item = {_NAMES_OF_VERSION_1.get(key, key): value for key, value in item.items()}
            if "points" in item:
                item["points"] = _renamed(item["points"])
        found.append(item)
    return found


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a profile file, with the dialect that it is written in."""
    from pydantic.json_schema import GenerateJsonSchema

    return {"$schema": GenerateJsonSchema.schema_dialect, **_adapter().json_schema()}


def check_machine_name(name: str) -> str:
    """The name of a machine type, if it can stand in an allocation; raises ProfileError."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.\-]*", name):
        raise ProfileError(
            f"{quoted(name)} cannot stand in an allocation; use letters, digits, '.', '_' and '-'"
        )
    return name
