"""Cut a graph into the stages of a mesh's pipeline ranks, and plan each on the ranks of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from estimator.cache import Cache
from estimator.coefficients import UNCALIBRATED, Coefficients
from estimator.errors import StrategyError
from estimator.graph.op_graph import BoundGraph, OpGraph
from estimator.graph.stages import Stage, balanced_points, held_between_passes, stage_graphs
from estimator.machines.profile import CollectiveName
from estimator.placement.mesh import Mesh
from estimator.placement.process_groups import groups_along
from estimator.timeline.collectives import CollectiveCosts, SizedCollective
from estimator.timeline.durations import structure_of
from estimator.timeline.pipelines.answer import StagePlan
from estimator.timeline.plan import Members, members_of, step_plan
from estimator.timeline.program import step_program
from estimator.timeline.ranks import StepShape
from estimator.timeline.strategies.registry import without_cost
from estimator.workload.schedules import Schedule

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
    coefficients: Coefficients = UNCALIBRATED,
) -> tuple[StagePlan, ...]:
    """The stages of the graph of one rank, in the order of the model, for one micro-batch each.

    They begin where the slowest one takes least. Raises StrategyError, WorkloadError, ProfileError.
    """
    if graph.is_summary:
        raise StrategyError(
            f"{graph.name} is known by a summary, which cannot be cut into stages; trace it"
        )
    batch = batches[0] if batches else None
    stages = _stages(graph, mesh, batch, shape, schedule, cache)
    one = shape._replace(accumulation_steps=1)
    merging = mesh.parallelism.replicas > 1
    whole = cache.get("bound", (graph,), lambda: graph.at(batch), batch)
    found = []
    ratio, returned_s = coefficients.communication_ratio, 0.0
    for number, stage in enumerate(stages):
        members = members_of(stage.graph, mesh.placement, batches, one, cache, merging=merging)
        own = _held(mesh, members, schedule.rank_of(number, mesh.parallelism.pp))
        sent_s = ratio * _passing_s(mesh, schedule, number, stage.sent_bytes(whole), cache)
        found.append(
            StagePlan(
                stage=stage,
                plan=step_plan(mesh, own, cache, coefficients),
                sent_s=sent_s,
                returned_s=returned_s,
                tied_s=ratio * _tied_s(mesh, schedule, number, stages, cache),
                kept_bytes=_kept_bytes(own.kinds[0].program.bound, cache),
            )
        )
        # What a stage sends on comes back as its gradient, over the same link.
        returned_s = sent_s
    return tuple(found)


def _kept_bytes(bound: BoundGraph, cache: Cache) -> int:
    structure = structure_of(bound.graph, cache)
    return cache.get("held between passes", (bound,), lambda: held_between_passes(bound, structure))


def _stages(
    graph: OpGraph,
    mesh: Mesh,
    batch: int | None,
    shape: StepShape,
    schedule: Schedule,
    cache: Cache,
) -> tuple[Stage, ...]:
    count = mesh.parallelism.pp * schedule.virtual
    node = mesh.placement.kinds[0]

    def cut() -> tuple[Stage, ...]:
        program = step_program(
            graph,
            node.profile,
            batch=batch,
            devices_busy=node.ranks_per_node,
            merging=False,
            strategy=shape.strategy,
            exchanges=shape.exchanges,
            cache=cache,
        )
        spent = program.durations.device_s + program.durations.host_s
        return stage_graphs(graph, balanced_points(graph, count, spent))

    details = (count, batch, node.ranks_per_node, shape.exchanges)
    return cache.get("stages", (graph, node.profile), cut, *details)


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
    rows: Indices = np.arange(mesh.placement.ranks).reshape(mesh.parallelism.pp, -1)
    group, node = min(
        groups_along(mesh.placement, rows[[one, other]].T), key=lambda each: each[0].bytes_per_s
    )
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
    mesh: Mesh, schedule: Schedule, number: int, stages: Sequence[Stage], cache: Cache
) -> float:
    """Seconds in which gradients of weights that two stages share are added up between them."""
    own = {parameter.name: parameter.spec.nbytes for parameter in stages[number].graph.parameters}
    ranks, spent_s = mesh.parallelism.pp, 0.0
    for other, stage in enumerate(stages):
        if other != number:
            shared = sum(own.get(parameter.name, 0) for parameter in stage.graph.parameters)
            pair = schedule.rank_of(number, ranks), schedule.rank_of(other, ranks)
            spent_s += _pair_s(mesh, *pair, "all_reduce", shared, cache) if shared else 0.0
    return spent_s
