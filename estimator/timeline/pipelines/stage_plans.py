"""Cut a graph into the stages of a mesh's pipeline ranks, and plan each on the ranks of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from estimator.cache import Cache
from estimator.coefficients import UNCALIBRATED, Coefficients
from estimator.errors import StrategyError
from estimator.graph.op_graph import BoundGraph, OpGraph
from estimator.graph.stage_passes import held_between_passes, pass_seconds
from estimator.graph.stages import Blocks, Stage, stage_graphs
from estimator.machines.profile import CollectiveName
from estimator.placement.mesh import Mesh
from estimator.placement.placement import NodeKind
from estimator.placement.process_groups import ProcessGroup, groups_along
from estimator.timeline.collectives import CollectiveCosts, SizedCollective
from estimator.timeline.durations import bound_of, costed, dataflow_of, op_durations, structure_of
from estimator.timeline.exchanges import Exchanges
from estimator.timeline.pipelines.answer import StagePlan
from estimator.timeline.plan import (
    Members,
    StepPlan,
    members_of,
    ratios_of,
    slowest_kind,
    step_plan,
)
from estimator.timeline.ranks import RankKind, StepShape
from estimator.timeline.strategies.registry import without_cost
from estimator.workload.schedules import Schedule

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

# What two ranks gather is twice what each sends the other, in one round: what sending it takes.
_SEND: CollectiveName = "all_gather"


def stage_plans(
    graph: OpGraph,
    mesh: Mesh,
    batches: tuple[int, ...] | None,
    shape: StepShape,
    schedule: Schedule,
    cache: Cache,
    *,
    points: tuple[str, ...] = (),
    coefficients: Coefficients = UNCALIBRATED,
) -> tuple[StagePlan, ...]:
    """The stages of the graph of one rank, in the order of the model, for one micro-batch each.

    Where ranks hold two copies of the model, those of the second follow. They begin at `points`, by
    default where the slowest one takes least. Raises StrategyError, WorkloadError, ProfileError.
    """
    if graph.is_summary:
        raise StrategyError(
            f"{graph.name} is known by a summary, which cannot be cut into stages; trace it"
        )
    strategy = shape.strategy
    if strategy.kind == "zero2" or (strategy.kind == "fsdp" and strategy.reshard_after_forward):
        raise StrategyError(
            f"'{strategy}' exchanges shards for every micro-batch of a pipeline, which cannot be "
            "estimated; write fsdp:no_reshard, zero1, distributed-optimizer or ddp"
        )
    placement = mesh.placement
    one = shape._replace(accumulation_steps=1)
    layout = replace(mesh.parallelism, micro_batches=1)
    found = cache.get(
        "stage plans",
        (graph, placement.cluster, *placement.kinds),
        lambda: _stage_plans(graph, mesh, batches, one, schedule, points, cache),
        *(placement.allocation, layout, batches, one, schedule, points),
    )
    if coefficients is UNCALIBRATED:
        return found
    ratio, ratios = coefficients.communication_ratio, ratios_of(coefficients)
    return tuple(
        replace(
            each,
            plan=each.plan._replace(coefficients=coefficients, ratios=ratios),
            sent_s=ratio * each.sent_s,
            returned_s=ratio * each.returned_s,
            tied_s=ratio * each.tied_s,
        )
        for each in found
    )


def _stage_plans(
    graph: OpGraph,
    mesh: Mesh,
    batches: tuple[int, ...] | None,
    shape: StepShape,
    schedule: Schedule,
    points: tuple[str, ...],
    cache: Cache,
) -> tuple[StagePlan, ...]:
    batch = batches[0] if batches else None
    stages = _stages(graph, mesh, batch, shape, schedule, points, cache)
    if schedule.is_two_way:
        stages += stages
    merging = mesh.parallelism.replicas > 1
    whole = bound_of(graph, batch, cache)
    held = Counter(name for stage in stages for name in stage.parameters)
    tied = frozenset(name for name, count in held.items() if count > 1)
    plans: dict[Members, StepPlan] = {}
    found = []
    returned_s = 0.0
    for number, stage in enumerate(stages):
        members = members_of(stage.graph, mesh.placement, batches, shape, cache, merging=merging)
        own = _held(mesh, members, schedule.rank_of(number, mesh.parallelism.pp))
        plan = plans.get(own)
        if plan is None:
            plan = plans[own] = step_plan(mesh, own, cache)
        slowest = slowest_kind(plan.kinds, plan.shards)
        sent_s = _passing_s(mesh, schedule, number, stage.sent_bytes(whole), cache)
        found.append(
            StagePlan(
                stage=stage,
                plan=plan,
                passes_s=_passes_s(slowest, stage, cache),
                sent_s=sent_s,
                returned_s=returned_s,
                tied_s=_tied_s(mesh, schedule, number, stages, tied, cache),
                kept_bytes=_kept_bytes(
                    # Megatron-LM frees what it has sent (deallocate_pipeline_outputs).
                    slowest.program.bound,
                    () if mesh.parallelism.megatron else stage.outputs,
                    cache,
                ),
            )
        )
        # What a stage sends on comes back as its gradient, over the same link.
        returned_s = sent_s
    return tuple(found)


def _kept_bytes(bound: BoundGraph, outputs: tuple[int, ...], cache: Cache) -> int:
    structure = structure_of(bound.graph, cache)
    return cache.get(
        "held between passes",
        (bound,),
        lambda: held_between_passes(bound, structure, outputs),
        outputs,
    )


def _passes_s(kind: RankKind, stage: Stage, cache: Cache) -> tuple[float, float, float]:
    """Passes in a run of micro-batches, whose host is ahead where it can be."""

    def made() -> tuple[float, float, float]:
        lanes = replace(kind.program.lanes, count=3, lead_s=0.0)
        before, own = lanes.ends_s(0), lanes.ends_s(1)
        is_forward = structure_of(stage.graph, cache).is_forward
        ended_s = float(own[is_forward.sum() - 1])
        backward_s = float(own[-1]) - ended_s
        spent = lanes.device_s + lanes.host_s
        _, input_s, weight_s = pass_seconds(is_forward, stage.weight_shares, spent)
        share = weight_s / (input_s + weight_s or 1.0)
        return ended_s - float(before[-1]), backward_s * (1 - share), backward_s * share

    forward_s, input_s, weight_s = cache.get("passes", (kind.program,), made)
    slow = kind.slowdown_ratio
    return slow * forward_s, slow * input_s, slow * weight_s


def _stages(
    graph: OpGraph,
    mesh: Mesh,
    batch: int | None,
    shape: StepShape,
    schedule: Schedule,
    points: tuple[str, ...],
    cache: Cache,
) -> tuple[Stage, ...]:
    if not points:
        points = balanced_points(graph, mesh, batch, shape.exchanges, schedule, cache)
    known = structure_of(graph, cache), dataflow_of(graph, cache)
    return cache.get("stages", (graph,), lambda: stage_graphs(graph, points, *known), points)


def balanced_points(
    graph: OpGraph,
    mesh: Mesh,
    batch: int | None,
    exchanges: Exchanges | None,
    schedule: Schedule,
    cache: Cache,
) -> tuple[str, ...]:
    """The points by which the slowest stage takes least, on the first ranks' kind of node."""
    node = mesh.placement.kinds[0]
    bound = bound_of(graph, batch, cache)
    blocks = blocks_of(graph, cache)

    def spent() -> Array:
        profile = costed(node.profile, cache)
        durations = op_durations(bound, profile, devices_busy=node.ranks_per_node, cache=cache)
        exchanged_s = exchanges.seconds(bound, durations).each_s if exchanges else 0.0
        return np.asarray(durations.device_s + durations.host_s + exchanged_s)

    def balanced() -> tuple[str, ...]:
        seconds = cache.get("op seconds", (bound, node.profile), spent, *details)
        return blocks.balanced(stages, seconds)

    stages = schedule.model_stages(mesh.parallelism.pp)
    details = node.ranks_per_node, exchanges
    return cache.get("balanced", (bound, node.profile), balanced, *details, stages)


def blocks_of(graph: OpGraph, cache: Cache) -> Blocks:
    """The blocks of a graph, worked out once."""
    return cache.get("blocks", (graph,), lambda: Blocks.of(graph, dataflow_of(graph, cache)))


def _held(mesh: Mesh, members: Members, rank: int) -> Members:
    """Of the kinds of nodes, those on which the ranks of one pipeline rank are."""
    each = mesh.placement.ranks // mesh.parallelism.pp
    begin, end = rank * each, (rank + 1) * each
    first, numbers = 0, list[int]()
    for node_group, number in zip(mesh.placement.node_groups, members.kind_of, strict=True):
        if first < end and first + node_group.ranks > begin:
            numbers.append(number)
        first += node_group.ranks
    held = dict.fromkeys(numbers)
    place = {number: place for place, number in enumerate(held)}
    # Nodes that the stage is not on stand for its first: nothing of them is asked.
    return members._replace(
        kinds=tuple(members.kinds[number] for number in held),
        kind_of=tuple(place.get(number, 0) for number in members.kind_of),
    )


def _passing_s(mesh: Mesh, schedule: Schedule, number: int, size_bytes: int, cache: Cache) -> float:
    """Seconds of passing on what a stage makes; 0 on the same rank and at the end."""
    if not size_bytes:
        return 0.0
    ranks = mesh.parallelism.pp
    pair = schedule.rank_of(number, ranks), schedule.rank_of(number + 1, ranks)
    return _pair_s(mesh, *pair, _SEND, 2 * size_bytes, cache)


def _pair_s(
    mesh: Mesh, one: int, other: int, op: CollectiveName, size_bytes: int, cache: Cache
) -> float:
    """Seconds of a collective of the ranks of two pipeline ranks, pair by pair and all at once."""
    if one == other:
        return 0.0
    placement, count = mesh.placement, mesh.parallelism.pp

    def slowest() -> tuple[ProcessGroup, NodeKind]:
        rows: Indices = np.arange(placement.ranks).reshape(count, -1)
        pairs = groups_along(placement, rows[[one, other]].T)
        return min(pairs, key=lambda each: each[0].bytes_per_s)

    owners = placement.cluster, *placement.kinds
    group, node = cache.get("pair", owners, slowest, placement.allocation, count, one, other)
    costs = cache.get(
        "pairs",
        (node.profile, mesh.placement.cluster),
        lambda: CollectiveCosts(
            (node.profile,), op, node.profile.kind, mesh.placement.cluster, cache
        ),
        op,
    )
    model = costs.model(group)
    if model.unknown:
        raise without_cost(node.profile, op)
    sized = SizedCollective(costs.corrections, np.array([float(size_bytes)]))
    return float(sized.time_s(model))


def _tied_s(
    mesh: Mesh,
    schedule: Schedule,
    number: int,
    stages: Sequence[Stage],
    tied: frozenset[str],
    cache: Cache,
) -> float:
    """Seconds in which gradients of weights that ranks share are added up between them.

    `tied` are the names of all weights that several stages hold. What several of one rank hold
    counts for the first of these.
    """
    one, ranks = stages[number], mesh.parallelism.pp
    if tied.isdisjoint(one.parameters):
        return 0.0
    sizes = [parameter.spec.nbytes for parameter in one.graph.parameters]
    own = dict(zip(one.parameters, sizes, strict=True))
    rank, elsewhere = schedule.rank_of(number, ranks), dict[int, set[str]]()
    for other, stage in enumerate(stages):
        where = schedule.rank_of(other, ranks)
        if where != rank:
            elsewhere.setdefault(where, set()).update(own.keys() & stage.parameters)
        elif other < number:
            for name in own.keys() & stage.parameters:
                del own[name]
    return sum(
        _pair_s(mesh, rank, where, "all_reduce", sum(own[name] for name in names), cache)
        for where, shared in elsewhere.items()
        if (names := shared & own.keys())
    )
