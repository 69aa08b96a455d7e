"""Check the probe against itself and against links of known rate.

Three parts: `sizes` fits every link and collective on half of its message sizes and predicts the
other half; `repeat` compares two probes of this machine; `links` sends messages through links that
the kernel limits to a known rate, between two network namespaces made for it (needs root).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from options import Options
from records import say
from testbed.description import TestbedDescription
from testbed.launch import launch
from testbed.network import testbed, unavailable_reason

from estimator.machines.comparison import compare_profiles, median_difference_ratio
from estimator.machines.profile import MachineProfile
from estimator.placement.mesh import ring_between
from estimator.placement.placement import hop_locality, network_latency_s, nic_of
from estimator.probe.devices.updates import fit_update
from estimator.probe.links.copies import MESSAGE_SIZES_BYTES, fit_line
from estimator.probe.links.network import pair_link, time_pairs
from estimator.probe.machine import probe_machine
from estimator.timeline.collectives.costs import GroupCollective
from estimator.units import parse_bandwidth_bytes_per_s

SIZES_BOUND_RATIO, REPEAT_BOUND_RATIO, LINK_BOUND_RATIO = 0.15, 0.10, 0.05
MEGABITS_PER_S = (200, 1000)
# Of the 1514 bytes of a full Ethernet frame at MTU 1500, 1448 are TCP payload (with timestamps).
PAYLOAD_RATIO = 1448 / 1514
LINK_BUDGET_S = 12.0

Row = dict[str, Any]


def run(options: Options) -> Iterator[Row]:
    """Links of known rate, then two probes of a minute; a quick run has the links alone."""
    if (load := os.getloadavg()[0]) > 0.5:
        say(f"other work is running here (load {load:.1f}): trust no figure")
    yield from links_part()
    if not options.quick:
        profiles = [probe_machine(budget_s=60.0, strict=True) for _ in range(2)]
        yield from sizes_part(profiles[0])
        yield from repeat_part(*profiles)


def judged(part: str, name: str, error_ratio: float, bound_ratio: float | None, **more: Any) -> Row:
    """One figure beside its bound; without a bound it is shown and not judged."""
    return {"id": f"{part}: {name}", "value": error_ratio, "bound": bound_ratio, **more}


# Half of the sizes predict the other half


def sizes_part(profile: MachineProfile) -> list[Row]:
    """Every link and collective of one probe, by the prediction that the engine uses; updates."""
    rows, errors = [], []
    for name, found in (*collective_halves(profile), *link_halves(profile)):
        rows.append(judged("sizes", name, statistics.median(found), None))
        errors += found
    for name, found in update_errors(profile):
        rows.append(judged("sizes", name, statistics.median(found), None))
    if not errors:
        return [*rows, skipped("sizes", "the probe measured no collective and no link")]
    total = statistics.median(errors)
    name = f"all {len(errors)} held-out message sizes"
    return [*rows, judged("sizes", name, total, SIZES_BOUND_RATIO)]


def collective_halves(profile: MachineProfile) -> Iterator[tuple[str, list[float]]]:
    """Errors on every second size, interpolated between the others."""
    for cost in profile.collectives:
        half = dataclasses.replace(profile, collectives=(halved(cost),))
        nic = nic_of(half, math.ceil(cost.group_size / cost.nodes))
        ring = ring_between(cost, network_latency_s(half, hop_locality(None)), nic, half)
        model = GroupCollective.of(half, cost.op, ring)
        if model is not None and len(cost.points) >= 4:
            name = f"{cost.op}, {cost.backend}, {cost.group_size} ranks"
            yield name, errors_at(cost.points[1::2], model.time_s)


def halved(cost: Any) -> Any:
    """The cost as if only every second size had been measured."""
    kept = cost.points[::2]
    line = fit_line([size for size, _ in kept], [seconds for _, seconds in kept])
    return dataclasses.replace(
        cost,
        points=kept,
        latency_s=line.latency_s,
        bandwidth_bytes_per_s=line.bandwidth_bytes_per_s,
    )


def link_halves(profile: MachineProfile) -> Iterator[tuple[str, list[float]]]:
    """Errors of the line through every second size on the others."""
    for link in profile.links:
        kept, held_out = link.points[::2], link.points[1::2]
        if len(kept) >= 2 and held_out:
            line = fit_line([size for size, _ in kept], [seconds for _, seconds in kept])
            fitted = dataclasses.replace(
                link,
                latency_s=line.latency_s,
                bandwidth_bytes_per_s=line.bandwidth_bytes_per_s,
            )
            pinned = ", pinned" if link.pinned else ""
            name = f"link {link.kind}{pinned}, {link.flows} at once"
            yield name, errors_at(held_out, fitted.transfer_time_s)


def update_errors(profile: MachineProfile) -> Iterator[tuple[str, list[float]]]:
    """Errors on every point of the cost fitted to all the others: they vary in two directions."""
    for update in profile.updates:
        if len(update.points) < 5:
            continue
        errors = []
        for index, (tensors, parameters, seconds) in enumerate(update.points):
            others = update.points[:index] + update.points[index + 1 :]
            launch_s, per_tensor_s, per_parameter_s, _ = fit_update(others)
            fitted_s = launch_s + tensors * per_tensor_s + parameters * per_parameter_s
            errors.append(abs(fitted_s - seconds) / seconds)
        yield f"update {update.optimizer}, {update.form}, {update.device}, leave one out", errors


def errors_at(
    points: Sequence[tuple[float, float]], predict: Callable[[float], float]
) -> list[float]:
    """|predicted − measured| / measured at every point."""
    return [abs(predict(size) - seconds) / seconds for size, seconds in points]


# Two probes of one machine


def repeat_part(first: MachineProfile, second: MachineProfile) -> list[Row]:
    """How far two probes disagree, by group of numbers and over all of them."""
    compared = tuple(row for row in compare_profiles(first, second) if row.unit != "bytes")
    groups: dict[str, list[Any]] = {}
    for row in compared:
        groups.setdefault("kernels" if row.group.startswith("kernel ") else row.group, []).append(
            row
        )
    rows = [
        judged("repeat", f"{group} ({len(found)})", median_difference_ratio(tuple(found)), None)
        for group, found in groups.items()
    ]
    total = median_difference_ratio(compared)
    return [*rows, judged("repeat", f"all {len(compared)} entries", total, REPEAT_BOUND_RATIO)]


# Links of known rate


def links_part() -> list[Row]:
    """Payload rate recovered through links that the kernel limits, beside the rate it should be."""
    if reason := unavailable_reason():
        return [skipped("links", reason)]
    rows = []
    for megabits_per_s in MEGABITS_PER_S:
        name = f"{megabits_per_s} Mbit/s"
        rate = parse_bandwidth_bytes_per_s(name)
        expected = rate * PAYLOAD_RATIO
        two = TestbedDescription.uniform(nodes=2, devices=1, uplink=name)
        with testbed(two) as bed:
            said, _ = launch(bed, two.all_devices(), [sys.executable, __file__], pinned=True)
        link = pair_link("tcp", "rack", json.loads(said))
        error = abs(link.bandwidth_bytes_per_s / expected - 1)
        note = f"{link.bandwidth_bytes_per_s / 1e6:.2f} of {expected / 1e6:.2f} MB/s of payload"
        rows.append(judged("links", f"link limited to {name}", error, LINK_BOUND_RATIO, note=note))
    return rows


def skipped(part: str, reason: str) -> Row:
    """A part that cannot be had here, and why."""
    say(f"{part}: skipped: {reason}")
    return {"id": f"{part}: skipped", "status": "skipped", "reason": reason}


def send_messages() -> None:
    """One of two ranks: the first prints what it saw of the probe's own messages."""
    import torch.distributed as torch_distributed

    dist: Any = torch_distributed
    dist.init_process_group("gloo")
    how = {"kind": "cpu", "group": None, "sizes_bytes": MESSAGE_SIZES_BYTES}
    for message in time_pairs([[(0, 1)]], **how, budget_s=LINK_BUDGET_S):
        print(json.dumps(message))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    send_messages()
