"""Play a planned step as events and list its spans, one track per class of ranks and lane."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from estimator.timeline.fastpath import RankClass, StepPlan, step_parts
from estimator.timeline.schedule import ComputeLane, Flow, simulate
from estimator.timeline.spans import Span, Timeline

# torch/csrc/distributed/c10d/ProcessGroupGloo.hpp: two threads take collectives off the queue;
# ProcessGroupNCCL runs one stream per communicator.
BACKEND_SLOTS = {"cpu": 2, "cuda": 1}


def simulated_flow(plan: StepPlan) -> Flow:
    """The event simulation of a plan, from the first op to the last all-reduce."""
    lanes = []
    for ranks in plan.classes:
        scale = ranks.slowdown_ratio * plan.compute_ratio
        program = ranks.program
        ready_s = program.ready_s * scale
        lanes.append(ComputeLane(ready_s=ready_s, total_s=program.lane_s * scale))
    slots = BACKEND_SLOTS[plan.classes[0].program.bound.graph.target]
    return simulate(lanes, plan.collective_s.tolist(), slots=slots, overlap=plan.overlap)


def timeline_of(plan: StepPlan) -> Timeline:
    """The spans of one step; every rank of a class is listed as its first rank."""
    flow = simulated_flow(plan)
    parts = step_parts(plan)
    gathers_s, last_s = plan.sharding.gathers_s, plan.sharding.after_s
    gathering = flow.end_s + plan.broadcast_s
    finished = gathering + gathers_s
    after_s = parts.straggler_s + parts.copies_exposed_s - _copies_s(plan, parts.slowest)
    spans: list[Span] = []
    like = [0] * plan.ring.ranks
    for number, ranks in enumerate(plan.classes):
        first = ranks.ranks[0]
        for rank in ranks.ranks:
            like[rank] = first
        spans += _compute_spans(plan, ranks, flow.wall_at[number])
        spans += _network_spans(plan, first, flow)
        if gathers_s > 0:
            # Listed as one: where each unit waits depends on what the others gather.
            spans.append(Span("gather, scatter units", first, "network", gathering, gathers_s))
        if after_s > 0:
            spans.append(Span("wait, copy back", first, "compute", finished, after_s))
        updating = finished + after_s
        spans.append(Span("update", first, "compute", updating, parts.update_s, "", "update"))
        if last_s > 0:
            updated = updating + parts.update_s
            spans.append(Span("send parameters", first, "network", updated, last_s))
    return Timeline(
        step_time_s=finished + after_s + parts.update_s + last_s,
        spans=tuple(spans),
        ranks_like=tuple(like),
    )


def _copies_s(plan: StepPlan, ranks: RankClass) -> float:
    return ranks.program.copies_s * ranks.slowdown_ratio * plan.compute_ratio


def _compute_spans(
    plan: StepPlan, ranks: RankClass, wall_at: tuple[np.ndarray, np.ndarray]
) -> Iterator[Span]:
    program, first = ranks.program, ranks.ranks[0]
    scale = ranks.slowdown_ratio * plan.compute_ratio
    starts = np.interp(program.start_s * scale, *wall_at) + plan.broadcast_s
    ends = np.interp(program.end_s * scale, *wall_at) + plan.broadcast_s
    ops = program.bound.graph.ops
    for index, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        op = ops[index % len(ops)]
        length = max(end - start, 0.0)
        yield Span(op.call.target, first, "compute", start, length, op.module, op.phase)


def _network_spans(plan: StepPlan, first: int, flow: Flow) -> Iterator[Span]:
    if plan.broadcast_s:
        yield Span("broadcast buffers", first, "network", 0.0, plan.broadcast_s)
    buckets = plan.classes[0].program.buckets
    for number, (start, end) in enumerate(flow.collectives):
        name = f"all-reduce bucket {number} ({buckets[number].size_bytes} B)"
        yield Span(name, first, "network", start + plan.broadcast_s, end - start)
