"""Predict published collectives from half of their sizes, and larger groups from smaller ones.

Of ``collectives.csv``. Splits: ``sizes`` fits every other size of a group
and predicts the rest; ``devices`` predicts a group from groups with fewer devices on each of as
many nodes; ``nodes`` predicts a group from groups on fewer nodes that span at least two;
``catalogue`` and ``ends`` predict every system by a fit to the others (`collective_systems`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from collective_systems import GOALS as COLD_GOALS
from collective_systems import Group, case_of, cases_of_systems, fitted_to_all, read_groups
from options import Options
from records import say
from summary import summarise

from estimator.machines.profile import CollectiveCost, Device, Link, MachineProfile, Provenance
from estimator.placement.mesh import ring_between
from estimator.probe.links.copies import fit_line
from estimator.timeline.collectives.algorithms import RING_SHARE
from estimator.timeline.collectives.costs import GroupCollective

# Goals for the median error of a system.
GOALS = {"sizes": 0.15, "devices": 0.30, "nodes": 0.30}
ALL_GOALS = GOALS | COLD_GOALS
IMPORTED = Provenance(source="imported", relative_error=0.05)


def run(options: Options) -> Mapping[str, Any]:
    """Every prediction, and what is fitted to all systems."""
    groups = read_groups(options.data / "collectives.csv")
    cold = list(cases_of_systems(groups))
    cases = [case for split in GOALS for case in cases_of(split, groups)] + cold
    say(f"{len(groups)} groups, {len(cases)} predictions")
    rows = summarise(cases, by=("split", "system"))
    medians = [
        {
            "id": f"{row.group['split']}, {row.group['system']}: median error",
            "value": row.median_ratio,
            "bound": ALL_GOALS[row.group["split"]],
        }
        for row in rows
    ]
    report = [f"k fitted to all, {kind}: {k:.1f}" for kind, k in fitted_to_all(groups).items()]
    return {"cases": cases + medians, "summary": rows, "report": report}


def cases_of(split: str, groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Predictions of one split beside what was measured."""
    for target in groups:
        if split == "sizes":
            sizes = sorted(target.points)
            odd = {size: target.points[size] for size in sizes[::2]}
            known = [Group(*_identity(target), odd)]
            asked: Iterable[int] = sizes[1::2]
        else:
            known = [group for group in groups if teaches(split, group, target)]
            asked = sorted(target.points)
        if known:
            yield from _cases(split, target, known, asked)


def _identity(group: Group) -> tuple[Any, ...]:
    return group.source, group.system, group.op, group.dtype, group.nodes, group.ranks


def teaches(split: str, group: Group, target: Group) -> bool:
    """Whether a split may learn from `group` to predict `target`."""
    if _identity(group)[:4] != _identity(target)[:4]:
        return False
    if split == "devices":
        return group.nodes == target.nodes and group.per_node < target.per_node
    return 1 < group.nodes < target.nodes and group.per_node <= target.per_node


def _cases(
    split: str, target: Group, known: Sequence[Group], asked: Iterable[int]
) -> Iterator[dict[str, Any]]:
    profile = profile_of(known)
    wanted = cost_of(target)
    nic = max((link.bandwidth_bytes_per_s for link in profile.network), default=None)
    latency_s = max((link.latency_s for link in profile.network), default=0.0)
    model = GroupCollective.of(profile, target.op, ring_between(wanted, latency_s, nic, None))
    for size in asked:
        predicted_s = None if model is None else model.time_s(size)
        yield case_of(split, target, size, predicted_s, method="probe")


def profile_of(known: Sequence[Group]) -> MachineProfile:
    """A profile with the known groups, and a network whose rate the slimmest of them shows."""
    costs = tuple(cost_of(group) for group in known)
    across = [cost for cost in costs if cost.spans_nodes]
    network: tuple[Link, ...] = ()
    if across:
        slim = min(across, key=lambda cost: cost.group_size)
        network = (
            Link(
                kind="tcp",
                locality="rack",
                latency_s=slim.latency_s / (2 * slim.group_size),
                bandwidth_bytes_per_s=slim.bandwidth_bytes_per_s
                * RING_SHARE[slim.op](slim.group_size),
                provenance=IMPORTED,
            ),
        )
    devices = tuple(
        Device(kind="cuda", index=index, name="gpu", memory_bytes=1 << 34)
        for index in range(max(group.per_node for group in known))
    )
    return MachineProfile(
        name="published",
        devices=devices,
        network=network,
        collectives=costs,
        provenance=IMPORTED,
    )


def cost_of(group: Group) -> CollectiveCost:
    """The group as a profile holds it."""
    sizes = sorted(group.points)
    line = fit_line(sizes, [group.points[size] for size in sizes])
    return CollectiveCost(
        op=group.op,
        backend="nccl",
        group_size=group.ranks,
        nodes=group.nodes,
        points=tuple((float(size), group.points[size]) for size in sizes),
        latency_s=line.latency_s,
        bandwidth_bytes_per_s=line.bandwidth_bytes_per_s,
        provenance=IMPORTED,
    )
