"""Set two machine profiles side by side, number by number."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from estimator.machines.profile import CollectiveCost, Link, MachineProfile, UpdateCost

Unit = Literal["s", "bytes", "bytes_per_s", "flops_per_s"]
# Of log ratios: two probes of one machine differ by less, and one of many by less than so many
# times what the others do.
_LEAST_ODD, _ODD_FACTOR = math.log(1.1), 4.0
# What links do, so that unlike kinds of them can stand beside each other.
_ROLES = {"h2d": "host to device", "d2h": "device to host"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One positive number of a profile; a kernel's name is the call that took so long."""

    group: str
    name: str
    unit: Unit
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One quantity that both profiles have; `ratio` is the second over the first."""

    group: str
    name: str
    unit: Unit
    first: float
    second: float

    @property
    def ratio(self) -> float:
        return self.second / self.first


def compare_profiles(first: MachineProfile, second: MachineProfile) -> tuple[Compared, ...]:
    """Every positive quantity that both profiles have, in the order of the first.

    Kernels are compared call by call: a quantity is the time of one operator on one set of shapes.
    """
    theirs = {(quantity.group, quantity.name): quantity.value for quantity in _quantities(second)}
    return tuple(
        Compared(
            group=quantity.group,
            name=quantity.name,
            unit=quantity.unit,
            first=quantity.value,
            second=theirs[quantity.group, quantity.name],
        )
        for quantity in _quantities(first)
        if (quantity.group, quantity.name) in theirs
    )


def only_in(first: MachineProfile, second: MachineProfile) -> tuple[Quantity, ...]:
    """Every positive quantity of the first profile that the second says nothing about."""
    theirs = {(quantity.group, quantity.name) for quantity in _quantities(second)}
    return tuple(
        quantity for quantity in _quantities(first) if (quantity.group, quantity.name) not in theirs
    )


def median_difference_ratio(rows: Sequence[Compared]) -> float:
    """How far the two profiles typically disagree, relative to the larger number of each pair."""
    return statistics.median(1 - min(row.ratio, 1 / row.ratio) for row in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRatio:
    """How long one of several machines takes in a group of quantities, as a ratio of the usual.

    Usual is the median of all machines, quantity by quantity; `ratio` the median over the
    quantities that all have. It `is_odd` where that differs from 1 far more than on the others, and
    `is_disturbed` where the group was measured beside other programs.
    """

    machine: str
    group: str
    quantities: int
    ratio: float
    is_odd: bool
    is_disturbed: bool


def disturbed_groups(profile: MachineProfile) -> tuple[str, ...]:
    """The groups of quantities that were measured while other programs disturbed the probe."""
    if profile.interference is None or not profile.interference.matters:
        return ()
    measured: dict[str, Any] = {
        part: tuple(entry for entry in getattr(profile, part) if _is_measured(entry))
        for part in ("links", "network", "collectives", "updates", "kernels")
    } | {
        part: entry if (entry := getattr(profile, part)) and _is_measured(entry) else None
        for part in ("host", "memory", "input")
    }
    quantities = _quantities(replace(profile, **measured))
    return tuple(
        dict.fromkeys(
            _family(quantity.group) for quantity in quantities if quantity.unit != "bytes"
        )
    )


def _is_measured(part: Any) -> bool:
    return bool(part.provenance.source == "measured")


def _family(group: str) -> str:
    """All kernels are one group."""
    return "kernels" if group.startswith("kernel ") else group


def compare_several(profiles: Mapping[str, MachineProfile]) -> tuple[GroupRatio, ...]:
    """Every machine beside the usual one of three or more, group by group."""
    taken = [
        {
            (quantity.group, quantity.name): 1 / quantity.value
            if quantity.unit.endswith("_per_s")
            else quantity.value
            for quantity in _quantities(profile)
            if quantity.unit != "bytes"
        }
        for profile in profiles.values()
    ]
    groups: dict[str, list[list[float]]] = {}
    for key in taken[0]:
        if all(key in machine for machine in taken):
            values = [machine[key] for machine in taken]
            usual = statistics.median(values)
            groups.setdefault(_family(key[0]), []).append([value / usual for value in values])
    return tuple(
        row for group, ratios in groups.items() for row in _group_ratios(profiles, group, ratios)
    )


def _group_ratios(
    profiles: Mapping[str, MachineProfile], group: str, ratios: Sequence[Sequence[float]]
) -> Iterator[GroupRatio]:
    medians = [statistics.median(column) for column in zip(*ratios, strict=True)]
    off = [abs(math.log(ratio)) for ratio in medians]
    for index, (name, ratio) in enumerate(zip(profiles, medians, strict=True)):
        others = statistics.median(off[:index] + off[index + 1 :])
        yield GroupRatio(
            machine=name,
            group=group,
            quantities=len(ratios),
            ratio=ratio,
            is_odd=off[index] > max(_LEAST_ODD, _ODD_FACTOR * others),
            is_disturbed=group in disturbed_groups(profiles[name]),
        )


def _quantities(profile: MachineProfile) -> Iterator[Quantity]:
    for group, name, unit, value in _numbers(profile):
        if value is not None and value > 0:
            yield Quantity(group=group, name=name, unit=unit, value=value)


_Number = tuple[str, str, Unit, float | None]


def _numbers(profile: MachineProfile) -> Iterator[_Number]:
    yield from _device_quantities(profile)
    if profile.host is not None:
        for field in fields(profile.host):
            if field.name.endswith("_s"):
                seconds = getattr(profile.host, field.name)
                yield "host", _spaced(field.name), "s", seconds or 0.0
    if profile.memory is not None:
        yield "memory", "first touch of a byte", "s", profile.memory.first_touch_s_per_byte
        yield "memory", "cold read of a byte", "s", profile.memory.cold_read_s_per_byte
    if profile.input is not None:
        for name in ("disk", "cache", "copy"):
            yield "input", name, "bytes_per_s", getattr(profile.input, f"{name}_bytes_per_s") or 0.0
        for name, rate in (
            ("JPEG pixel", profile.input.jpeg_pixels_per_s),
            ("token", profile.input.tokens_per_s),
        ):
            yield "input", f"a million {name}s", "s", 1e6 / rate if rate else 0.0
    yield from _link_quantities(profile.links, "link", "between devices")
    yield from _link_quantities(profile.network, "network", "between nodes")
    for collective in profile.collectives:
        yield from _collective_quantities(collective)
    for update in profile.updates:
        yield from _update_quantities(update, profile)
    for kernel in profile.kernels:
        for point in kernel.points:
            key = json.dumps(point.call.encode(), sort_keys=True)
            yield f"kernel {kernel.target}, {kernel.dtype}", key, "s", point.warm_s


def _device_quantities(profile: MachineProfile) -> Iterator[_Number]:
    # Devices of one profile are alike; the first stands for all.
    device = profile.devices[0]
    yield "device", "memory", "bytes", device.memory_bytes
    if device.memory_bandwidth_bytes_per_s is not None:
        yield "device", "memory bandwidth", "bytes_per_s", device.memory_bandwidth_bytes_per_s
    for dtype, rate in device.peak_flops_per_s.items():
        yield "device", f"peak, {dtype}", "flops_per_s", rate


def _link_quantities(links: Sequence[Link], group: str, role: str) -> Iterator[_Number]:
    """Links by what they do; of several that do the same, all but the fastest by their kind too."""
    named: set[str] = set()
    for link in sorted(links, key=lambda link: -link.bandwidth_bytes_per_s):
        name = _ROLES.get(link.kind, role) + (", pinned" if link.pinned else "")
        if link.locality not in ("node", "rack"):
            name += f", {_spaced(link.locality)}"
        if link.flows > 1:
            name += f", {link.flows} at once"
        if link.ring_devices is not None:
            name += f", rings of up to {link.ring_devices}"
        if name in named:
            name += f", over {_spaced(link.kind)}"
        named.add(name)
        yield group, f"{name}, latency", "s", link.latency_s
        yield group, f"{name}, bandwidth", "bytes_per_s", link.bandwidth_bytes_per_s


def _collective_quantities(cost: CollectiveCost) -> Iterator[_Number]:
    across = f", {cost.nodes} nodes" if cost.spans_nodes else ""
    name = f"{_spaced(cost.op)}, {cost.backend}, {cost.group_size} ranks{across}"
    yield "collective", f"{name}, latency", "s", cost.latency_s
    yield "collective", f"{name}, bandwidth", "bytes_per_s", cost.bandwidth_bytes_per_s


def _update_quantities(update: UpdateCost, profile: MachineProfile) -> Iterator[_Number]:
    # An update on the machine's devices compares with one on other devices, whatever their kind.
    place = "" if update.device == profile.kind else f", on the {update.device}"
    dtype = "" if update.dtype == "float32" else f", {update.dtype}"
    name = f"{update.optimizer}, {update.form}{place}{dtype}"
    yield "update", f"{name}, launch", "s", update.launch_s
    yield "update", f"{name}, per tensor", "s", update.per_tensor_s
    yield "update", f"{name}, per parameter", "s", update.per_parameter_s


def _spaced(name: str) -> str:
    return name.removesuffix("_s").replace("_", " ")
