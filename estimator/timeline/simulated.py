"""Play a planned step as events and list its spans, one track per class of ranks and lane."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from estimator.elementwise import Array, Indices
from estimator.timeline.collectives.overlap import NO_OVERLAP, Overlap
from estimator.timeline.plan import StepAnswer, StepPlan, answer_of
from estimator.timeline.rank.program import RankClass
from estimator.timeline.simulator.simulation import SimulatedStep, simulate
from estimator.timeline.simulator.tasks import (
    COMPUTE,
    LANES,
    Label,
    SpanColumns,
    TaskList,
    Timeline,
)

# torch/csrc/distributed/c10d/ProcessGroupGloo.hpp: two threads take collectives off the queue;
# ProcessGroupNCCL runs one stream per communicator.
BACKEND_SLOTS = {"cpu": 2, "cuda": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSimulation:
    """The tasks of a plan's step and their simulation; a class of ranks has a column each."""

    tasks: TaskList
    result: SimulatedStep
    kinds: tuple[RankClass, ...]


def simulate_plan(plan: StepPlan) -> StepSimulation:
    """The event simulation of a whole step: it ends when `answer_of` says."""
    answer = answer_of(plan)
    kinds = tuple(dict.fromkeys(plan.kinds))
    tasks = TaskList()
    overlap: Overlap = NO_OVERLAP
    if plan.network is None or answer.communication is None:
        tasks.add(COMPUTE, plan.ranks(answer.slowest).lane_s)
    else:
        overlap = answer.communication.overlap
        plan.network.add_tasks(tasks, _ranks(plan, answer, kinds), overlap)
    _add_update(tasks, plan, answer, kinds)
    slots = BACKEND_SLOTS[plan.members.table.graph.target]
    return StepSimulation(
        tasks=tasks, result=simulate(tasks.tasks, overlap, slots=slots), kinds=kinds
    )


def _ranks(plan: StepPlan, answer: StepAnswer, kinds: tuple[RankClass, ...]) -> Any:
    """What the ranks bring to their tasks; of bucketed ones when each bucket is ready, and all."""
    ranks = plan._replace(members=plan.members._replace(kinds=kinds)).ranks(answer.slowest)
    if ranks.segments_s:
        return ranks
    ratio = plan.coefficients.compute_ratio
    ready_s = _by_class([kind.ready_s * ratio for kind in kinds])
    lane_s = _by_class([kind.lane.length_s(plan.shards) * ratio for kind in kinds])
    return ranks._replace(segments_s=(ready_s, lane_s))


def _by_class(values: Sequence[Any]) -> Any:
    """The value of the only class, or all along the last axis."""
    return values[0] if len(values) == 1 else np.array(values).T


def _add_update(
    tasks: TaskList, plan: StepPlan, answer: StepAnswer, kinds: tuple[RankClass, ...]
) -> None:
    """What follows the last collective: waiting for the slowest rank, copies, the update."""
    ratios = plan.ratios
    if answer.parts.straggler_s > 0:
        waiting = Label("wait for the slowest rank")
        tasks.add(COMPUTE, answer.parts.straggler_s, label=waiting)
    copies_s = [kind.update.copy_back_s * ratios.compute for kind in kinds]
    if any(copies_s):
        tasks.add(COMPUTE, _by_class(copies_s), label=Label("copy back"))
    update_s = [kind.update.update_s(plan.share) * ratios.update for kind in kinds]
    updated = tasks.add(COMPUTE, _by_class(update_s), label=Label("update", phase="update"))
    assert updated == len(tasks.tasks) - 1
    if plan.network is not None:
        plan.network.add_after_update(tasks, plan.ranks(answer.slowest))
    if answer.parts.input_stall_s > 0:
        last = len(tasks.tasks) - 1
        tasks.add(COMPUTE, answer.parts.input_stall_s, last, label=Label("load the next batch"))


def timeline_of(plan: StepPlan) -> Timeline:
    """The spans of one step; every rank of a class is listed as its first rank."""
    step = simulate_plan(plan)
    tasks, result = step.tasks.tasks, step.result
    # What ranks compute in tasks without a name is listed operator by operator.
    named = [number for number, task in enumerate(tasks) if task.label.name]
    compute, network = LANES.index("compute"), LANES.index("network")
    lanes = [compute if tasks[number].lane == COMPUTE else network for number in named]
    ops = [Label(op.call.target, op.module, op.phase) for op in plan.members.table.graph.ops]
    numbers = np.arange(len(ops)), np.arange(len(named)) + len(ops)
    like = np.zeros(plan.placement.ranks, dtype=np.intp)
    pieces: list[tuple[Indices, int, list[int], Array, Array]] = []
    for number, (first, *others) in enumerate(plan.ranks_by_kind.values()):
        like[[first, *others]] = first
        for start_s, end_s in op_times_s(plan, step, number):
            pieces.append((numbers[0], first, [compute] * len(ops), start_s, end_s - start_s))
        start_s, end_s = result.start_s[named, number], result.end_s[named, number]
        pieces.append((numbers[1], first, lanes, start_s, end_s - start_s))
    label, rank, lane, start, duration = zip(*pieces, strict=True)
    spans = SpanColumns(
        labels=[*ops, *(tasks[number].label for number in named)],
        label=np.concatenate(label),
        rank=np.repeat(rank, [len(labels) for labels in label]),
        lane=np.concatenate(lane).astype(np.intp),
        start_s=np.concatenate(start),
        duration_s=np.concatenate(duration),
    )
    return Timeline(step_time_s=result.step_s, spans=spans, ranks_like=tuple(like.tolist()))


def op_times_s(plan: StepPlan, step: StepSimulation, number: int) -> Iterator[tuple[Array, Array]]:
    """(start, end) of each op of a class of ranks in some micro-batches, from the step's start.

    Of many micro-batches the first and the last ones are told.
    """
    kind, track = step.kinds[number], step.result.tracks[number]
    scale = kind.slowdown_ratio * plan.coefficients.compute_ratio
    program, segments_s = kind.program, kind.segments_s * plan.coefficients.compute_ratio
    own = plan.rules.op_ends_s(program.lanes, program.accumulate_s, segments_s, scale)
    for end_s, device_s in own:
        start_s = _at(end_s - device_s * scale, track, side="right")
        yield start_s, np.maximum(_at(end_s, track, side="left"), start_s)


def _at(work_s: Array, track: tuple[Array, Array], *, side: Literal["left", "right"]) -> Array:
    """When a rank has done some work: before it then waits (left), or after that (right)."""
    done, time = track
    after = np.clip(np.searchsorted(done, work_s, side=side), 1, len(done) - 1)
    before = after - 1
    length = done[after] - done[before]
    share = np.divide(work_s - done[before], length, out=np.ones_like(work_s), where=length > 0)
    return np.asarray(time[before] + np.clip(share, 0.0, 1.0) * (time[after] - time[before]))
