"""Join what ranks of one placement cost with what their network costs, and answer their step.

The step of the slowest rank is its compute, what it waits for, the spread between ranks, and the
update with the copies around it: `breakdown_of` adds them up for one placement or for a row of each
of many. What ranks wait for is told by their strategy (`strategies`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, Generic, NamedTuple
from weakref import ref

import numpy as np
from typing_extensions import TypeVar

from estimator.cache import Cache
from estimator.coefficients import UNCALIBRATED, Coefficients
from estimator.elementwise import Array, Indices, expected_maximum
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.memory.peak import PeakMemory
from estimator.machines.profile import MachineProfile
from estimator.machines.typical import DeviceMemory
from estimator.placement.mesh import Mesh, ProcessGroup, slowest_network
from estimator.placement.placement import NodeKind, Placement
from estimator.timeline.rank.lanes import InputCosts
from estimator.timeline.rank.program import (
    STEP,
    LaneCosts,
    RankClass,
    RankTable,
    UpdateCosts,
    step_key,
)
from estimator.timeline.rank.rules import (
    DP,
    Communication,
    Groups,
    Network,
    Ranks,
    Rules,
    StepShape,
)
from estimator.timeline.strategies import rules_of

# What a step may spend most of its time on.
BOTTLENECKS = ("compute", "host", "communication", "update", "stragglers", "input")
# Of one step, or of the step in each row.
Seconds = TypeVar("Seconds", float, Array, default=float)
_NONE: Any = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown(Generic[Seconds]):
    """Exclusive parts of the step of the slowest rank; they add up to the step time.

    In seconds, of one step or a row for each. `idle_s` is what pipelines wait in; data-parallel
    ranks wait for communication alone. `input_stall_s` is what a loader adds: work of the rank's
    own cores, copies to the device, waiting for batches. `layer_communication_s` is what ranks that
    share the layers of a micro-batch exchange, beside nothing else.

    >>> import estimator as est, torch
    >>> graph = est.trace_model(torch.nn.Linear(8, 8), torch.randn(4, 8), target="cuda")
    >>> answer = est.estimate(graph, "2x4:t4-g4dn")
    >>> abs(answer.breakdown.total_s / answer.step_time_s - 1) < 1e-12
    True
    """

    forward_s: Seconds
    backward_s: Seconds
    host_exposed_s: Seconds
    communication_exposed_s: Seconds
    straggler_s: Seconds
    update_s: Seconds
    copies_exposed_s: Seconds
    idle_s: Seconds = _NONE
    input_stall_s: Seconds = _NONE
    layer_communication_s: Seconds = _NONE

    @property
    def total_s(self) -> Seconds:
        total: Seconds = sum(_PARTS(self))
        return total

    @property
    def waiting_s(self) -> Seconds:
        """What ranks wait for each other and for the network."""
        return self.communication_exposed_s + self.straggler_s + self.idle_s

    @property
    def by_bottleneck(self) -> tuple[Seconds, ...]:
        """Seconds of each of `BOTTLENECKS`."""
        return (
            self.forward_s + self.backward_s,
            self.host_exposed_s,
            self.communication_exposed_s + self.copies_exposed_s + self.layer_communication_s,
            self.update_s,
            self.straggler_s + self.idle_s,
            self.input_stall_s,
        )

    @property
    def largest_share(self) -> tuple[str, float]:
        """What takes most of one step, one of `BOTTLENECKS`, and its share."""
        seconds: Any = self.by_bottleneck
        most = max(seconds)
        return BOTTLENECKS[seconds.index(most)], most / self.total_s


_PARTS = attrgetter(*(item.name for item in fields(Breakdown)))


class Ratios(NamedTuple):
    """Calibration's factors on the parts of a step, or of a step in each row."""

    compute: Any = 1.0
    update: Any = 1.0
    communication: Any = 1.0


UNCALIBRATED_RATIOS = Ratios()


def breakdown_of(
    slowest: LaneCosts,
    last: UpdateCosts,
    *,
    lane_s: Any,
    ranks: Any,
    share: Any,
    jitter_ratio: Any,
    waiting_s: Any,
    ratios: Ratios,
) -> Breakdown[Any]:
    """The parts of a step by its slowest rank and by the one whose update takes longest.

    `lane_s` is the slowest one's whole compute without calibration, `share` the part of the update
    that a rank does, `jitter_ratio` one standard deviation of ranks' compute, `waiting_s` the
    exposed communication.
    """
    compute = ratios.compute
    sharded_s = lane_s - slowest.lane_s
    return Breakdown(
        forward_s=slowest.forward_s * compute,
        backward_s=slowest.backward_s * compute,
        host_exposed_s=slowest.host_s * compute,
        communication_exposed_s=waiting_s,
        straggler_s=lane_s * compute * jitter_ratio * expected_maximum(ranks),
        update_s=last.update_s(share) * ratios.update,
        copies_exposed_s=(slowest.copies_s + sharded_s + last.copy_back_s) * compute,
        layer_communication_s=slowest.layer_collectives_s * compute,
    )


def with_input(parts: Breakdown[Any], costs: InputCosts) -> Breakdown[Any]:
    """A step with what its loader adds."""
    return replace(parts, input_stall_s=costs.stall_s(parts.total_s))


def after_s(update: UpdateCosts, share: Any, ratios: Ratios) -> Any:
    """Seconds from the last collective to the end of the update."""
    return update.copy_back_s * ratios.compute + update.update_s(share) * ratios.update


class Members(NamedTuple):
    """The ranks of a placement: what each kind of its nodes costs, and the kind of each group."""

    table: RankTable
    rules: Rules[Any]
    kinds: tuple[RankClass, ...]
    kind_of: tuple[int, ...]


def compiled_step(
    graph: OpGraph, shape: StepShape, batch: int | None, merging: bool, cache: Cache
) -> tuple[RankTable, Rules[Any]]:
    """What the ranks of a graph's step cost, and how they communicate: kept for the next one."""

    def made() -> tuple[RankTable, Rules[Any]]:
        rules = rules_of(graph, shape, cache)
        return RankTable(rules, shape, batch=batch, merging=merging, cache=cache), rules

    owners, details = step_key(graph, shape, batch, merging)
    return cache.get(STEP, owners, made, *details)


def members_of(
    graph: OpGraph,
    placement: Placement,
    batches: tuple[int, ...] | None,
    shape: StepShape,
    cache: Cache,
    *,
    merging: bool | None = None,
) -> Members:
    """Compile what is not known yet of a placement.

    `batches` are one for each of its groups; None for a graph without a batch size. `merging` says
    whether its ranks synchronise gradients, by default where there are several. Raises
    ProfileError, WorkloadError.
    """
    merging = placement.ranks > 1 if merging is None else merging
    table, rules = compiled_step(graph, shape, batches[0] if batches else None, merging, cache)
    if batches is None or batches.count(batches[0]) == len(batches):
        kinds = tuple([table[node] for node in placement.kinds])
        return Members(table, rules, kinds, placement.kind_of)
    numbers: dict[RankClass, int] = {}
    kind_of = []
    for number, batch in zip(placement.kind_of, placement.by_node_group(batches), strict=True):
        rank_program, _ = compiled_step(graph, shape, batch, merging, cache)
        kind_of.append(numbers.setdefault(rank_program[placement.kinds[number]], len(numbers)))
    return Members(table, rules, tuple(numbers), tuple(kind_of))


class StepPlan(NamedTuple):
    """All that decides a step: the kinds of ranks, their process groups, what disturbs them.

    `network` costs what the strategy sends over the groups, None for a single rank. `share` is the
    part of the update that a rank does, `shards` over how many ranks is divided what is sharded.
    """

    mesh: Mesh
    members: Members
    rules: Rules[Any]
    coefficients: Coefficients
    groups: Groups
    network: Network | None
    share: float
    shards: int

    @property
    def placement(self) -> Placement:
        return self.mesh.placement

    @property
    def kinds(self) -> tuple[RankClass, ...]:
        """What the ranks of each kind cost; a kind may come twice where networks differ."""
        return self.members.kinds

    @property
    def group(self) -> ProcessGroup:
        """The process group of all ranks."""
        groups = self.groups.get(DP)
        if groups:
            return groups[0]
        return ProcessGroup(ranks=1, nodes=1, per_node=1)

    @property
    def slowest_group(self) -> ProcessGroup:
        """The group over the slowest link: of all ranks, or of those that hold shards."""
        several = [group for groups in self.groups.values() for group in groups if group.nodes > 1]
        own = [g for axis, gs in self.groups.items() if axis != DP for g in gs if g.nodes > 1]
        return min(own or several or [self.group], key=lambda group: group.bytes_per_s)

    def alone_s(self, slowest: RankClass) -> float:
        """Seconds of all collectives of the step, one after the other."""
        return 0.0 if self.network is None else float(self.network.alone_s(self.ranks(slowest)))

    @property
    def reductions(self) -> tuple[tuple[str, ProcessGroup, str], ...]:
        """(what reduces gradients, over which group, where its cost comes from); often one."""
        return () if self.network is None else tuple(self.network.reductions(self.groups))

    @property
    def ranks_by_kind(self) -> dict[RankClass, list[int]]:
        """The ranks of each kind."""
        ranks_of: dict[RankClass, list[int]] = {kind: [] for kind in self.kinds}
        first = 0
        for node_group, number in zip(
            self.placement.node_groups, self.members.kind_of, strict=True
        ):
            ranks_of[self.kinds[number]].extend(range(first, first + node_group.ranks))
            first += node_group.ranks
        return ranks_of

    def under(self, coefficients: Coefficients) -> StepPlan:
        """The same under other coefficients."""
        return self._replace(coefficients=coefficients)

    @property
    def ratios(self) -> Ratios:
        """The coefficients' factors."""
        known = self.coefficients
        if known is UNCALIBRATED:
            return UNCALIBRATED_RATIOS
        return Ratios(known.compute_ratio, known.update_ratio, known.communication_ratio)

    def ranks(self, slowest: RankClass) -> Ranks:
        """What the ranks bring to their collectives, the slowest of them given."""
        compute = self.coefficients.compute_ratio
        lane_s = slowest.lane.length_s(self.shards) * compute
        return Ranks(
            groups=self.groups,
            ready=_ReadyByKind(self.kinds, lane_s, compute),
            segments_s=_segments_s(self.kinds, compute),
            lane_s=lane_s,
            compute_ratio=compute,
            ratio=self.coefficients.communication_ratio,
        )

    def communication(self) -> Communication | None:
        """What ranks wait for, with its errors; None for a single rank."""
        if self.network is None:
            return None
        slowest = slowest_kind(self.kinds, self.shards)
        return _communication(self, self.network, slowest, errors=True)

    def memory(self) -> tuple[PeakMemory, float]:
        """(what the ranks that need most need, largest share in use of what tensors can have)."""
        kinds, shards = self.kinds, self.shards
        if shards == 1:
            fullest = max(kinds, key=_WHOLE_BYTES)
            return fullest.whole_memory, max([kind.whole_ratio for kind in kinds])
        needed = [kind.program.memory.peak(shards) for kind in kinds]
        used = [
            peak.total_bytes / kind.device.usable_bytes
            for peak, kind in zip(needed, kinds, strict=True)
        ]
        return max(needed, key=attrgetter("total_bytes")), max(used)

    def fullest_device(self) -> tuple[DeviceMemory, int]:
        """(the memory of the devices with the largest share in use, what tensors take of it)."""
        held = [kind.program.memory.total_bytes(self.shards) for kind in self.kinds]
        pairs = zip(self.kinds, held, strict=True)
        kind, most = max(pairs, key=lambda pair: pair[1] / pair[0].device.usable_bytes)
        return kind.device, most


_WHOLE_BYTES = attrgetter("whole_memory.total_bytes")


class _ReadyByKind:
    """When the slowest kind of some ranks has each bucket ready; see `rules.Ready`."""

    alike = None

    def __init__(self, kinds: Sequence[RankClass], lane_s: float, compute_ratio: float) -> None:
        self._kinds, self._lane_s, self._ratio = kinds, lane_s, compute_ratio

    def slack_s(self, rows: Indices | None) -> Array:
        """Seconds of the slowest lane that are left then."""
        latest_s = self._kinds[0].ready_s
        if len(self._kinds) > 1:
            latest_s = np.maximum.reduce([kind.ready_s for kind in self._kinds])
        return self._lane_s - latest_s * self._ratio


def _segments_s(kinds: Sequence[RankClass], ratio: float) -> list[float] | list[Array]:
    """FSDP's segments: numbers where all ranks are alike, else arrays with one for each kind."""
    if not len(kinds[0].segments_s):
        return []
    if len(kinds) == 1:
        return (kinds[0].segments_s * ratio).tolist()  # type: ignore[no-any-return]
    return list(np.array([kind.segments_s for kind in kinds]).T * ratio)


def step_plan(
    mesh: Mesh,
    members: Members,
    cache: Cache,
    coefficients: Coefficients = UNCALIBRATED,
) -> StepPlan:
    """Join ranks, process groups and the costs of what they send."""
    ranks, rules = mesh.replicas, members.rules
    groups: dict[str, tuple[ProcessGroup, ...]] = {}
    network = None
    if ranks > 1:
        groups, networks = groups_of(mesh, rules)
        cluster = mesh.placement.cluster
        network = cache.get(
            "network", (rules, cluster, *networks), lambda: rules.network(networks, cluster)
        )
    return StepPlan(
        mesh=mesh,
        members=members,
        rules=rules,
        coefficients=coefficients,
        groups=groups,
        network=network,
        share=rules.update_share(ranks),
        shards=rules.shards(ranks),
    )


def groups_of(
    mesh: Mesh, rules: Rules[Any]
) -> tuple[dict[str, tuple[ProcessGroup, ...]], tuple[MachineProfile, ...]]:
    """(process groups along the axes of a strategy, the profiles that they name).

    Of the groups that reduce gradients, which work at once where ranks share layers too, the
    slowest counts.
    """
    if rules.axes == (DP,) and mesh.replicas == mesh.placement.ranks and mesh.ep == 1:
        # As most are asked, by the thousand.
        return {DP: (mesh.whole_group,)}, (slowest_network(mesh.placement).profile,)
    networks: dict[int, MachineProfile] = {}
    groups: dict[str, tuple[ProcessGroup, ...]] = {}
    experts = rules.expert_axes if mesh.ep > 1 else ()
    for axis in dict.fromkeys((DP, *rules.axes, *experts)):
        some = mesh.groups(axis)
        for _, node in some:
            networks.setdefault(id(node.profile), node.profile)
        named = tuple([_named(group, node, networks) for group, node in some])
        groups[axis] = (min(named, key=_BY_RATE),) if axis == DP else named
    return groups, tuple(networks.values())


_BY_RATE = attrgetter("bytes_per_s")


def _named(
    group: ProcessGroup, node: NodeKind, networks: dict[int, MachineProfile]
) -> ProcessGroup:
    """The group with the number of the profile that costs it."""
    number = list(networks).index(id(node.profile))
    return replace(group, network=number) if number else group


def at_link_rate(plan: StepPlan, factor: float) -> StepPlan:
    """The same plan with the links between nodes `factor` times as fast.

    Links within nodes stay as they are. Where unlike links follow each other, one that is made
    faster may leave the next one slowest: an upper bound of what a faster link brings.
    """
    groups = {
        axis: tuple(replace(g, bytes_per_s=g.bytes_per_s * factor) for g in groups)
        for axis, groups in plan.groups.items()
    }
    return plan._replace(groups=groups)


def slowest_kind(kinds: Sequence[RankClass], shards: int) -> RankClass:
    """The ranks with the longest lane."""
    if not kinds[0].lane.sharded_lane_s:
        return max(kinds, key=_LANE_S)
    return max(kinds, key=lambda kind: kind.lane.length_s(shards))


_LANE_S = attrgetter("lane.lane_s")


class StepAnswer(NamedTuple):
    """A plan's step: its parts, the rank that they are of, and what it waits for, errors apart."""

    parts: Breakdown[Any]
    slowest: RankClass
    communication: Communication | None


def answer_of(plan: StepPlan) -> StepAnswer:
    """The step of a plan; raises ProfileError where nothing tells what a collective costs."""
    kinds, shards, ratios = plan.members.kinds, plan.shards, plan.ratios
    if len(kinds) == 1:
        slowest = last = kinds[0]
        jitter_ratio = slowest.jitter_ratio
    else:
        slowest = slowest_kind(kinds, shards)
        behind_s = [after_s(kind.update, plan.share, ratios) for kind in kinds]
        last = kinds[behind_s.index(max(behind_s))]
        jitter_ratio = max([kind.jitter_ratio for kind in kinds])
    communication, waiting_s = None, 0.0
    if plan.network is not None:
        communication = _communication(plan, plan.network, slowest)
        if communication.unknown:
            raise plan.network.missing(plan.groups)
        waiting_s = float(communication.exposed_s)
    parts = breakdown_of(
        slowest.lane,
        last.update,
        lane_s=slowest.lane.length_s(shards),
        ranks=plan.mesh.placement.ranks,
        share=plan.share,
        jitter_ratio=jitter_ratio,
        waiting_s=waiting_s,
        ratios=ratios,
    )
    if plan.members.table.shape.loader is not None:
        parts = with_input(parts, slowest_input(kinds))
    return StepAnswer(parts, slowest, communication)


# Steps of which what ranks wait for is kept with their network.
_MOST_STEPS = 1 << 10


def _communication(
    plan: StepPlan, network: Network, slowest: RankClass, *, errors: bool = False
) -> Communication:
    """What ranks wait for, kept for the next step of the same kinds in groups of the same shape.

    Kinds are not kept alive from here: their programs are large.
    """
    factors = plan.ratios.compute, plan.coefficients.communication_ratio
    key = tuple(plan.groups.values()), tuple(map(id, plan.kinds)), plan.shards, factors
    known = network.known.get(key)
    if known is not None and not (errors and known[1].relative_error is None):
        kinds, parts = known
        if all(kept() is kind for kept, kind in zip(kinds, plan.kinds, strict=True)):
            return parts
    parts = network.communication(plan.ranks(slowest), errors=errors)
    if len(network.known) >= _MOST_STEPS:
        network.known.clear()
    network.known[key] = tuple(map(ref, plan.kinds)), parts
    return parts


def slowest_input(kinds: Sequence[RankClass]) -> InputCosts:
    """What the loaders of all kinds of ranks add together: every step waits for the slowest."""
    inputs = [kind.input for kind in kinds]
    return InputCosts(max(one.own_s for one in inputs), max(one.period_s for one in inputs))
