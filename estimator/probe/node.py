"""What all devices of one node measure together, in a world of theirs; the home rank reports it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from estimator.machines.profile import Device, LinkKind
from estimator.probe.cluster.findings import ClusterFindings, Member, World
from estimator.probe.cluster.group import Group
from estimator.probe.cluster.signed_store import SignedStore, dist
from estimator.probe.cluster.steps import (
    MEASURING_RATIO,
    ProbePlan,
    measure_collectives,
    measure_overlaps,
    measure_pairs,
)
from estimator.probe.devices.backend import open_backend
from estimator.probe.devices.contention import rank_jitter_ratio, summarise, time_contention
from estimator.probe.devices.ranks import report
from estimator.probe.links.collectives import BLOCKING_PARTS, NODE_PARTS, NODE_SIZES_BYTES
from estimator.probe.links.copies import (
    MESSAGE_SIZES_BYTES,
    Points,
    host_copies,
    link_from,
    peer_links,
    time_peer_copies,
)
from estimator.probe.links.network import pair_link
from estimator.probe.links.overlap import NODE_CASES

_COMPUTE_RATIO = 3.0


def collectives_of_node(group: Group, plan: ProbePlan, seconds: float) -> None:
    """Every collective over the first 2, 3, … and all devices of this node."""
    count = len(group.world.members)
    parts = [*NODE_PARTS, *(BLOCKING_PARTS if group.kind == "cpu" else ())]
    # All devices first: the group that data-parallel training uses most. It has half the time,
    # where smaller groups are to be measured too.
    for size in range(count, 1, -1):
        share = 1.0 if count == 2 else 0.5 if size == count else 0.5 / (count - 2)
        measure_collectives(group, plan, range(size), parts, seconds * share, NODE_SIZES_BYTES)


def overlap_of_node(group: Group, plan: ProbePlan, seconds: float) -> None:
    """All-reduces over all devices of this node beside compute."""
    ranks = range(len(group.world.members))
    measure_overlaps(group, plan, ranks, NODE_CASES, _COMPUTE_RATIO, MEASURING_RATIO * seconds)


def links_of_node(group: Group, plan: ProbePlan, seconds: float) -> None:
    """The links between devices of this node; of accelerators those to the host, all busy, too."""
    if group.kind != "cuda":
        # The loopback of a host is one, whichever cores talk over it.
        timed = measure_pairs(group, (0, 1), [[(0, 1)]], MESSAGE_SIZES_BYTES, seconds)
        plan.findings.links += [
            pair_link("loopback", "node", message) for message in timed.values()
        ]
        return
    devices = group.world.own_devices
    everything = range(len(devices))
    own_s = seconds / 2

    def over_the_host(*, group: Any, **_: Any) -> list[Any]:
        import torch

        backend = open_backend("cuda")

        def meet() -> None:
            dist.barrier(group)
            backend.synchronize()

        return host_copies(backend, torch, meet=meet, budget_s=own_s)

    points: dict[tuple[LinkKind, bool], Points] = {}
    for message in itertools.chain(*group.measured(everything, over_the_host)):
        points.setdefault((message["kind"], message["pinned"]), []).extend(message["points"])
    for (kind, pinned), copied in points.items():
        plan.findings.links.append(link_from(kind, copied, pinned=pinned, flows=len(devices)))
    plan.keep()
    # One process copies from any device to any other.
    indices = [device.index for device in devices]
    (between,) = group.measured((0,), lambda **_: time_peer_copies(indices, budget_s=own_s)) or [[]]
    pairs = {(one["from"], one["to"]): one["points"] for one in between}
    plan.findings.links += peer_links(devices, pairs)
    plan.keep()


def contention_of_node(group: Group, plan: ProbePlan, seconds: float) -> None:
    """What calls take with 2 and with all devices of this node busy, beside what they do alone."""
    counts = sorted({2, len(group.world.members)})
    measure = partial(time_contention, budget_s=seconds / len(counts))
    for count in counts:
        if reports := group.measured(range(count), measure):
            plan.findings.contentions += summarise(reports, at=plan.findings.at)
            plan.findings.rank_jitter_ratio = rank_jitter_ratio(reports)
            plan.keep()


# What is measured of one node alone, by the name of its part of the probe.
NODE_STEPS = {
    "collectives": collectives_of_node,
    "contention": contention_of_node,
    "overlap": overlap_of_node,
    "copies": links_of_node,
}


def run_on_node(_rank: int, _world_size: int, arguments: Mapping[str, Any]) -> None:
    """Run one of NODE_STEPS in the world of one node; the home rank reports the findings so far."""
    group = group_of_node(arguments["devices"])
    findings = ClusterFindings(at=arguments["at"])

    def keep() -> None:
        if group.is_home:
            report(asdict(findings))

    plan = ProbePlan(findings=findings, keep=keep)
    NODE_STEPS[arguments["step"]](group, plan, arguments["seconds"])
    keep()


_own_group: Group | None = None


def group_of_node(devices: Sequence[Mapping[str, Any]]) -> Group:
    """This rank's side of the world of one node's `devices`, whose process group is up.

    It is the same in every call of a process: the world's keys are used once.
    """
    global _own_group
    if _own_group is None:
        members = tuple(
            Member(rank=rank, host="", device=device, machine="")
            for rank, device in enumerate(TypeAdapter(list[Device]).validate_python(devices))
        )
        # The group's own store is a file that no other user can read.
        own = dist.PrefixStore("steps", dist.distributed_c10d._get_default_store())
        store = SignedStore(own, b"")
        _own_group = Group(store, World(members=members), dist.get_rank())
    return _own_group
