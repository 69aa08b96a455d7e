"""Set two machine profiles side by side, number by number."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from estimator.profile import CollectiveCost, Link, MachineProfile, UpdateCost

Unit = Literal["s", "bytes", "bytes_per_s", "flops_per_s"]


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
    theirs = {(group, name): value for group, name, _, value in _quantities(second)}
    return tuple(
        Compared(group=group, name=name, unit=unit, first=value, second=theirs[group, name])
        for group, name, unit, value in _quantities(first)
        if theirs.get((group, name), 0.0) > 0 and value > 0
    )


def groups_only_in(first: MachineProfile, second: MachineProfile) -> tuple[str, ...]:
    """What the first profile knows of and the second says nothing about, in words."""
    theirs = {_group_in_words(group) for group, *_ in _quantities(second)}
    mine = dict.fromkeys(_group_in_words(group) for group, *_ in _quantities(first))
    return tuple(group for group in mine if group not in theirs)


def _group_in_words(group: str) -> str:
    return "kernels" if group.startswith("kernel ") else group


def median_difference_ratio(rows: tuple[Compared, ...]) -> float:
    """How far the two profiles typically disagree, relative to the larger number of each pair."""
    return statistics.median(1 - min(row.ratio, 1 / row.ratio) for row in rows)


def _quantities(profile: MachineProfile) -> Iterator[tuple[str, str, Unit, float]]:
    yield from _device_quantities(profile)
    if profile.host is not None:
        for field in fields(profile.host):
            if field.name.endswith("_s"):
                yield "host", _spaced(field.name), "s", getattr(profile.host, field.name)
    if profile.memory is not None:
        yield "memory", "first touch of a byte", "s", profile.memory.first_touch_s_per_byte
        yield "memory", "cold read of a byte", "s", profile.memory.cold_read_s_per_byte
    for link in profile.links:
        yield from _link_quantities(link, "link")
    for link in profile.network:
        yield from _link_quantities(link, "network")
    for collective in profile.collectives:
        yield from _collective_quantities(collective)
    for update in profile.updates:
        yield from _update_quantities(update)
    for kernel in profile.kernels:
        for point in kernel.points:
            key = json.dumps(dict(point.call), sort_keys=True)
            yield f"kernel {kernel.target}, {kernel.dtype}", key, "s", point.warm_s


def _device_quantities(profile: MachineProfile) -> Iterator[tuple[str, str, Unit, float]]:
    # Devices of one profile are alike; the first stands for all.
    device = profile.devices[0]
    yield "device", "memory", "bytes", device.memory_bytes
    if device.memory_bandwidth_bytes_per_s is not None:
        yield "device", "memory bandwidth", "bytes_per_s", device.memory_bandwidth_bytes_per_s
    for dtype, rate in device.peak_flops_per_s.items():
        yield "device", f"peak, {dtype}", "flops_per_s", rate


def _link_quantities(link: Link, group: str) -> Iterator[tuple[str, str, Unit, float]]:
    pinned = ", pinned" if link.pinned else ""
    name = f"{link.kind}{pinned}, {link.reach.replace('_', ' ')}, {link.streams} at once"
    yield group, f"{name}, latency", "s", link.latency_s
    yield group, f"{name}, bandwidth", "bytes_per_s", link.bandwidth_bytes_per_s


def _collective_quantities(cost: CollectiveCost) -> Iterator[tuple[str, str, Unit, float]]:
    across = f", {cost.nodes} nodes" if cost.spans_nodes else ""
    name = f"{_spaced(cost.op)}, {cost.backend}, {cost.group_size} ranks{across}"
    yield "collective", f"{name}, latency", "s", cost.latency_s
    yield "collective", f"{name}, bandwidth", "bytes_per_s", cost.bandwidth_bytes_per_s


def _update_quantities(update: UpdateCost) -> Iterator[tuple[str, str, Unit, float]]:
    name = f"{update.optimizer}, {update.form}, {update.device}, {update.dtype}"
    yield "update", f"{name}, launch", "s", update.launch_s
    yield "update", f"{name}, per tensor", "s", update.per_tensor_s
    yield "update", f"{name}, per parameter", "s", update.per_parameter_s


def _spaced(name: str) -> str:
    return name.removesuffix("_s").replace("_", " ")
