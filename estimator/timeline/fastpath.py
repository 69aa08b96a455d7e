"""Answer one data-parallel step in closed form: no events, only sums and a maximum over buckets.

The queue of collectives is work-conserving: however many are in flight, together they advance one
second per second alone, and 1/s beside compute, which meanwhile advances at 1 − e/s. So in lane
time, work arrives at the ready times and drains at 1/(s − e), and the backlog W when compute ends
is Lindley's recursion written as a maximum over buckets k,

    W = max(0, max_k(t_k + … + t_K − (lane − ready_k) / (s − e))),

and the step ends e seconds per second of drained work after the lane, plus W alone on the network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from estimator.coefficients import UNCALIBRATED, Coefficients
from estimator.placement import Placement
from estimator.profile import MachineProfile
from estimator.timeline.collectives import CollectiveModel, collective_model
from estimator.timeline.overlaps import overlap_of
from estimator.timeline.program import StepProgram
from estimator.timeline.rings import Ring, ring_of
from estimator.timeline.schedule import Overlap
from estimator.timeline.sharding import Sharding, reduce_model, sharding_of

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks that run the same program; their lane takes `slowdown_ratio` times as long."""

    program: StepProgram
    slowdown_ratio: float = 1.0
    ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """All that decides a step: the classes of ranks, the collectives' costs, how both disturb.

    `network` is the profile whose collectives were used; `reduce` merges one bucket; None where
    there is nothing to merge. `broadcast_s` sends the buffers of rank 0 before the forward pass.
    """

    classes: tuple[RankClass, ...]
    ring: Ring
    network: MachineProfile | None
    reduce: CollectiveModel | None
    collective_s: Array
    broadcast_s: float
    overlap: Overlap
    spread_ratio: float
    sharding: Sharding = field(default_factory=Sharding)
    update_ratio: float = 1.0
    compute_ratio: float = 1.0
    communication_ratio: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Exclusive parts of the step of the slowest class of ranks, in seconds."""

    forward_s: float
    backward_s: float
    host_exposed_s: float
    communication_exposed_s: float
    straggler_s: float
    update_s: float
    copies_exposed_s: float
    idle_s: float
    slowest: RankClass

    @property
    def step_s(self) -> float:
        return (
            self.forward_s
            + self.backward_s
            + self.host_exposed_s
            + self.communication_exposed_s
            + self.straggler_s
            + self.update_s
            + self.copies_exposed_s
            + self.idle_s
        )


def step_plan(
    placement: Placement,
    programs: Sequence[StepProgram],
    coefficients: Coefficients = UNCALIBRATED,
) -> StepPlan:
    """Join the programs of an allocation's sites (in its order) with what its network costs.

    Raises ProfileError where the profile lacks a collective that the strategy needs.
    """
    ring = ring_of(placement)
    classes = _classes(placement, programs)
    if placement.ranks == 1:
        return StepPlan(
            classes=classes,
            ring=ring,
            network=None,
            reduce=None,
            collective_s=np.zeros(0),
            broadcast_s=0.0,
            overlap=Overlap(),
            spread_ratio=0.0,
            update_ratio=coefficients.update_ratio,
            compute_ratio=coefficients.compute_ratio,
            communication_ratio=coefficients.communication_ratio,
        )
    profile = min(
        placement.sites, key=lambda site: (site.nic_bytes_per_s or math.inf, -site.per_node)
    ).profile
    reduce = reduce_model(programs[0], profile, ring)
    ratio = coefficients.communication_ratio
    program = programs[0]
    collective_s = reduce.times_s(program.bucket_bytes) * ratio
    return StepPlan(
        classes=classes,
        ring=ring,
        network=profile,
        reduce=reduce,
        collective_s=collective_s,
        broadcast_s=_broadcast_s(program, profile, ring) * ratio,
        overlap=overlap_of(profile, ring, reduce, float(program.bucket_bytes.sum())),
        spread_ratio=max(site.profile.rank_spread_ratio or 0.0 for site in placement.sites),
        sharding=sharding_of(program, profile, ring, ratio),
        update_ratio=coefficients.update_ratio,
        compute_ratio=coefficients.compute_ratio,
        communication_ratio=ratio,
    )


def at_link_rate(plan: StepPlan, factor: float) -> StepPlan:
    """The same plan with the slowest link `factor` times as fast (and the next one then slowest).

    Other links are taken as never slower: an upper bound of what the faster link brings.
    """
    if plan.network is None or plan.reduce is None:
        return plan
    ring = replace(plan.ring, bytes_per_s=plan.ring.bytes_per_s * factor)
    program = plan.classes[0].program
    faster = reduce_model(program, plan.network, ring)
    return replace(
        plan,
        ring=ring,
        reduce=faster,
        collective_s=faster.times_s(program.bucket_bytes) * plan.communication_ratio,
        broadcast_s=_broadcast_s(program, plan.network, ring) * plan.communication_ratio,
        overlap=overlap_of(plan.network, ring, faster, float(program.bucket_bytes.sum())),
        sharding=sharding_of(program, plan.network, ring, plan.communication_ratio),
    )


def _classes(placement: Placement, programs: Sequence[StepProgram]) -> tuple[RankClass, ...]:
    members: dict[tuple[int, float], tuple[StepProgram, list[int]]] = {}
    first = 0
    for site, program in zip(placement.sites, programs, strict=True):
        key = (id(program), site.slowdown_ratio)
        known = members.setdefault(key, (program, []))
        known[1].extend(range(first, first + site.ranks))
        first += site.ranks
    return tuple(
        RankClass(program=program, slowdown_ratio=slowdown, ranks=tuple(ranks))
        for (_, slowdown), (program, ranks) in members.items()
    )


def _broadcast_s(program: StepProgram, profile: MachineProfile, ring: Ring) -> float:
    """DDP broadcasts the buffers of rank 0 before a forward pass that will synchronise."""
    size = program.bound.graph.buffer_bytes
    model = collective_model(profile, "broadcast", ring) if size else None
    return model.time_s(size) if model else 0.0


def step_parts(plan: StepPlan) -> StepParts:
    """The parts of a plan's step, in closed form (see the module's docstring)."""
    slowest = max(plan.classes, key=lambda c: c.program.lane_s * c.slowdown_ratio)
    program, scale = slowest.program, slowest.slowdown_ratio * plan.compute_ratio
    lane_s = program.lane_s * scale
    after_s = [_after_s(plan, each) for each in plan.classes]
    copy_back_s, update_s = max(after_s, key=sum)
    ranks = plan.ring.ranks
    return StepParts(
        forward_s=program.forward_s * scale,
        backward_s=program.backward_s * scale,
        host_exposed_s=program.host_s * scale,
        communication_exposed_s=_communication_s(plan, lane_s),
        straggler_s=lane_s * plan.spread_ratio * expected_maximum(ranks),
        update_s=update_s,
        copies_exposed_s=program.copies_s * scale + copy_back_s,
        idle_s=0.0,
        slowest=slowest,
    )


def _communication_s(plan: StepPlan, lane_s: float) -> float:
    waited_s = exposed_s(_ready_s(plan), lane_s, plan.collective_s, plan.overlap)
    return waited_s + plan.broadcast_s + plan.sharding.gathers_s + plan.sharding.after_s


def _after_s(plan: StepPlan, ranks: RankClass) -> tuple[float, float]:
    """(copying reduced buckets back, update) of a class, after the last all-reduce."""
    program, slow = ranks.program, ranks.slowdown_ratio
    shared_s = (program.update_s - program.update_launch_s) * plan.sharding.update_share
    update_s = program.update_launch_s + shared_s
    return program.copy_back_s * slow, update_s * slow * plan.update_ratio


def exposed_s(ready_s: Array, lane_s: float, collective_s: Array, overlap: Overlap) -> float:
    """Seconds from the end of the undisturbed lane to the end of the last collective.

    `ready_s` and `collective_s` are per bucket, in launch order; `ready_s` never falls.
    """
    if not len(collective_s):
        return 0.0
    slack_s = lane_s - ready_s
    suffix_s = np.cumsum(collective_s[::-1])[::-1]
    exposed, drain = overlap.exposed_ratio, overlap.slowdown - overlap.exposed_ratio
    if drain > 0:
        backlog_s = max(float((suffix_s - slack_s / drain).max()), 0.0)
    else:
        # Compute stands still beside collectives: only what is ready at its very end is left.
        backlog_s = float(suffix_s[slack_s <= 0].max(initial=0.0))
    return exposed * (float(suffix_s[0]) - backlog_s) + backlog_s


def _ready_s(plan: StepPlan) -> Array:
    first, *others = plan.classes
    ready_s = first.program.ready_s * (first.slowdown_ratio * plan.compute_ratio)
    for each in others:
        scale = each.slowdown_ratio * plan.compute_ratio
        ready_s = np.maximum(ready_s, each.program.ready_s * scale)
    return ready_s


def expected_maximum(ranks: int) -> float:
    """Expected maximum of `ranks` standard normal values (Blom 1958 approximation)."""
    if ranks <= 1:
        return 0.0
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
