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
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from estimator.coefficients import UNCALIBRATED, Coefficients
from estimator.elementwise import expected_maximum
from estimator.graph.ops import OpGraph
from estimator.placement import NodeKind, Placement
from estimator.profile import MachineProfile
from estimator.timeline.collectives import CollectiveModel, collective_model
from estimator.timeline.overlaps import nearest_overlap
from estimator.timeline.program import StepProgram
from estimator.timeline.rank_kinds import BucketFactors, RankKind, StepTable, step_table
from estimator.timeline.rings import Ring, ring_of
from estimator.timeline.schedule import NO_OVERLAP, Overlap
from estimator.timeline.sharding import NO_SHARDING, Sharding, reduce_model, sharding_of
from estimator.workload import Strategy

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks that run the same program; their lane takes `slowdown_ratio` times as long."""

    program: StepProgram
    slowdown_ratio: float = 1.0
    ranks: tuple[int, ...] = (0,)


class Members(NamedTuple):
    """The ranks of a placement: what each of its kinds of nodes costs, and each site's kind."""

    table: StepTable
    kinds: tuple[RankKind, ...]
    kind_of: tuple[int, ...]


def members_of(
    graph: OpGraph,
    placement: Placement,
    batches: tuple[int, ...] | None,
    strategy: Strategy,
    accumulation_steps: int = 1,
) -> Members:
    """Compile what is not known yet of a placement.

    `batches` are one for each of its groups; None for a graph without a batch size. Raises
    ProfileError, WorkloadError.
    """

    def table_of(batch: int | None) -> StepTable:
        return step_table(
            graph,
            batch=batch,
            merging=placement.ranks > 1,
            strategy=strategy,
            accumulation_steps=accumulation_steps,
        )

    table = table_of(batches[0] if batches else None)
    if batches is None or batches.count(batches[0]) == len(batches):
        kinds = tuple([table[node] for node in placement.kinds])
        return Members(table, kinds, placement.kind_of)
    numbers: dict[RankKind, int] = {}
    kind_of = []
    for number, batch in zip(placement.kind_of, placement.by_site(batches), strict=True):
        kind = table_of(batch)[placement.kinds[number]]
        kind_of.append(numbers.setdefault(kind, len(numbers)))
    return Members(table, tuple(numbers), tuple(kind_of))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """All that decides a step: the kinds of ranks, the collectives' costs, how both disturb.

    `network` is the profile whose collectives were used; `reduce` merges one bucket and `factors`
    says what all of them make of it; None where there is nothing to merge. `broadcast_s` sends the
    buffers of rank 0 before the forward pass.
    """

    placement: Placement
    members: Members
    ring: Ring
    coefficients: Coefficients
    network: MachineProfile | None = None
    reduce: CollectiveModel | None = None
    factors: BucketFactors | None = None
    broadcast_s: float = 0.0
    overlap: Overlap = NO_OVERLAP
    sharding: Sharding = NO_SHARDING

    @property
    def kinds(self) -> tuple[RankKind, ...]:
        """What the ranks of each kind cost; a kind may come twice where networks differ."""
        return self.members.kinds

    @property
    def classes(self) -> tuple[RankClass, ...]:
        """Ranks by the program that they run and by how slow they run it."""
        ranks_of: dict[RankKind, list[int]] = {kind: [] for kind in self.members.kinds}
        first = 0
        for site, number in zip(self.placement.sites, self.members.kind_of, strict=True):
            ranks_of[self.members.kinds[number]].extend(range(first, first + site.ranks))
            first += site.ranks
        return tuple(
            RankClass(program=kind.program, slowdown_ratio=kind.slowdown_ratio, ranks=tuple(ranks))
            for kind, ranks in ranks_of.items()
        )

    @property
    def collective_s(self) -> Array:
        """Seconds of each bucket's collective alone."""
        if self.factors is None or self.reduce is None:
            return np.zeros(0)
        alpha_s, beta = self.reduce.alpha_s, self.reduce.beta_s_per_byte
        line_s = alpha_s * self.factors.alpha + beta * self.factors.beta
        return np.asarray(line_s * self.coefficients.communication_ratio)

    @property
    def communication_s(self) -> float:
        """All collectives of a step one after the other, as if nothing overlapped them."""
        sharding = self.sharding
        return (
            float(self.collective_s.sum())
            + self.broadcast_s
            + sharding.gathers_s
            + sharding.after_s
        )

    @property
    def latency_s(self) -> Array:
        """The part of each bucket's collective in which the link can serve the one before."""
        return self.collective_s * (self.factors.latency_ratio if self.factors else 0.0)


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
    slowest: RankKind

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
    placement: Placement, members: Members, coefficients: Coefficients = UNCALIBRATED
) -> StepPlan:
    """Join what the ranks of a placement cost with what its network costs.

    Raises ProfileError where the profile lacks a collective that the strategy needs.
    """
    ring = ring_of(placement)
    if placement.ranks == 1:
        return StepPlan(placement=placement, members=members, ring=ring, coefficients=coefficients)
    slowest = min(placement.kinds, key=_network_order)
    return _over_network(placement, members, ring, coefficients, slowest.profile)


def _network_order(kind: NodeKind) -> tuple[float, int]:
    return kind.nic_bytes_per_s or math.inf, -kind.busy


def _over_network(
    placement: Placement,
    members: Members,
    ring: Ring,
    coefficients: Coefficients,
    network: MachineProfile,
) -> StepPlan:
    table, program = members.table, members.kinds[0].program
    sizes_bytes, ratio = program.bucket_bytes, coefficients.communication_ratio
    reduce = reduce_model(program, network, ring)
    return StepPlan(
        placement=placement,
        members=members,
        ring=ring,
        coefficients=coefficients,
        network=network,
        reduce=reduce,
        factors=table.factors(sizes_bytes, reduce),
        broadcast_s=_broadcast_s(table, network, ring) * ratio,
        overlap=_overlap(table, network, ring, reduce, program.buckets_bytes),
        sharding=sharding_of(program, network, ring, ratio),
    )


def at_link_rate(plan: StepPlan, factor: float) -> StepPlan:
    """The same plan with the slowest link `factor` times as fast (and the next one then slowest).

    Other links are taken as never slower: an upper bound of what the faster link brings.
    """
    if plan.network is None:
        return plan
    ring = replace(plan.ring, bytes_per_s=plan.ring.bytes_per_s * factor)
    return _over_network(plan.placement, plan.members, ring, plan.coefficients, plan.network)


def _broadcast_s(table: StepTable, profile: MachineProfile, ring: Ring) -> float:
    """DDP broadcasts the buffers of rank 0 before a forward pass that will synchronise."""
    size = table.graph.buffer_bytes
    model = collective_model(profile, "broadcast", ring) if size else None
    return table.time_s(model, size) if model else 0.0


def _overlap(
    table: StepTable,
    profile: MachineProfile,
    ring: Ring,
    reduce: CollectiveModel,
    size_bytes: float,
) -> Overlap:
    """How compute and the reduction of all buckets, of `size_bytes` bytes, disturb each other."""
    nearest = nearest_overlap(profile, ring)
    if nearest is None:
        return NO_OVERLAP
    local_s = table.local_s(nearest, size_bytes)
    if math.isinf(local_s):
        return nearest.scaled(1.0)
    return nearest.scaled(min(local_s / table.time_s(reduce, size_bytes), 1.0))


def step_parts(plan: StepPlan) -> StepParts:
    """The parts of a plan's step, in closed form (see the module's docstring)."""
    kinds, compute_ratio = plan.members.kinds, plan.coefficients.compute_ratio
    slowest = max(kinds, key=_lane_s)
    program, scale = slowest.program, slowest.slowdown_ratio * compute_ratio
    lane_s = program.lane_s * scale
    copy_back_s, update_s = _after_s(plan)
    spread_ratio = max([kind.spread_ratio for kind in kinds])
    return StepParts(
        forward_s=program.forward_s * scale,
        backward_s=program.backward_s * scale,
        host_exposed_s=program.host_s * scale,
        communication_exposed_s=_communication_s(plan, lane_s),
        straggler_s=lane_s * spread_ratio * expected_maximum(plan.ring.ranks),
        update_s=update_s,
        copies_exposed_s=program.copies_s * scale + copy_back_s,
        idle_s=0.0,
        slowest=slowest,
    )


_lane_s = attrgetter("lane_s")


def _after_s(plan: StepPlan) -> tuple[float, float]:
    """(copying reduced buckets back, update) after the last all-reduce, of the longer class."""
    share, ratio = plan.sharding.update_share, plan.coefficients.update_ratio
    longest = -1.0
    for kind in plan.members.kinds:
        update_s = (kind.update_launch_s + kind.update_shared_s * share) * ratio
        copy_back_s = kind.copy_back_s * plan.coefficients.compute_ratio
        if copy_back_s + update_s > longest:
            longest = copy_back_s + update_s
            after_s = copy_back_s, update_s
    return after_s


def _communication_s(plan: StepPlan, lane_s: float) -> float:
    if plan.factors is None or plan.reduce is None:
        return 0.0
    ratio = plan.coefficients.communication_ratio
    factors, reduce = plan.factors, plan.reduce
    suffix_s = factors.behind_alpha * (reduce.alpha_s * ratio)
    suffix_s += factors.behind_beta * (reduce.beta_s_per_byte * ratio)
    slack_s = lane_s - _ready_s(plan)
    if factors.has_latency:
        slack_s -= plan.latency_s
    waited_s = _exposed_s(slack_s, suffix_s, plan.overlap)
    return waited_s + plan.broadcast_s + plan.sharding.gathers_s + plan.sharding.after_s


def exposed_s(
    ready_s: Array, lane_s: float, collective_s: Array, latency_s: Array, overlap: Overlap
) -> float:
    """Seconds from the end of the undisturbed lane to the end of the last collective.

    All per bucket, in launch order: when it is ready (never falling), its collective alone, and
    the part of that in which the link can serve the one before.
    """
    sent_s = np.cumsum((collective_s - latency_s)[::-1])[::-1]
    return _exposed_s(lane_s - ready_s - latency_s, sent_s, overlap)


def _exposed_s(slack_s: Array, suffix_s: Array, overlap: Overlap) -> float:
    """`exposed_s` by what is left of the lane when each bucket can be sent, and what follows it.

    A bucket that can be sent only after the lane's end has negative slack.
    """
    if not len(suffix_s):
        return 0.0
    exposed, drain = overlap.exposed_ratio, overlap.slowdown - overlap.exposed_ratio
    beside_s = np.maximum(slack_s, 0.0)
    if drain > 0:
        left_s = suffix_s - beside_s / drain
    else:
        # Compute stands still beside collectives: only what is ready at its very end is left.
        left_s = np.where(beside_s > 0, 0.0, suffix_s)
    backlog_s = max(float(left_s.max()), 0.0)
    after_s = max(float((left_s + (beside_s - slack_s)).max()), 0.0)
    return exposed * (float(suffix_s[0]) - backlog_s) + after_s


def _ready_s(plan: StepPlan) -> Array:
    """When the slowest kind has each bucket ready."""
    kinds, ratio = plan.members.kinds, plan.coefficients.compute_ratio
    if len(kinds) == 1:
        return kinds[0].ready_s * ratio
    return np.asarray(np.array([kind.ready_s for kind in kinds]).max(axis=0) * ratio)
