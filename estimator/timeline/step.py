"""Play a planned step as events and list its spans, one track per class of ranks and lane."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from estimator.timeline.fastpath import RankClass, StepPlan, step_parts
from estimator.timeline.rank_kinds import RankKind
from estimator.timeline.schedule import ComputeLane, Flow, simulate
from estimator.timeline.spans import LANES, Label, Lane, SpanColumns, Timeline
from estimator.timeline.strategy_words import bucket_words

# torch/csrc/distributed/c10d/ProcessGroupGloo.hpp: two threads take collectives off the queue;
# ProcessGroupNCCL runs one stream per communicator.
BACKEND_SLOTS = {"cpu": 2, "cuda": 1}


def simulated_flow(plan: StepPlan) -> Flow:
    """The event simulation of a plan, from the first op to the last all-reduce."""
    lanes = []
    for ranks in plan.classes:
        scale = ranks.slowdown_ratio * plan.coefficients.compute_ratio
        program = ranks.program
        ready_s = program.ready_s * scale
        lanes.append(ComputeLane(ready_s=ready_s, total_s=program.lane_s * scale))
    slots = BACKEND_SLOTS[plan.classes[0].program.bound.graph.target]
    return simulate(
        lanes,
        plan.collective_s.tolist(),
        latency_s=plan.latency_s.tolist(),
        slots=slots,
        overlap=plan.overlap,
    )


def timeline_of(plan: StepPlan) -> Timeline:
    """The spans of one step; every rank of a class is listed as its first rank."""
    flow = simulated_flow(plan)
    parts = step_parts(plan)
    gathers_s, last_s = plan.sharding.gathers_s, plan.sharding.after_s
    gathering = flow.end_s + plan.broadcast_s
    finished = gathering + gathers_s
    after_s = parts.straggler_s + parts.copies_exposed_s - _copies_s(plan, parts.slowest)
    updating = finished + after_s
    updated = updating + parts.update_s
    listed = _Listed(plan)
    like = np.zeros(plan.ring.ranks, dtype=np.intp)
    for number, ranks in enumerate(plan.classes):
        first = ranks.ranks[0]
        like[list(ranks.ranks)] = first
        listed.add_ops(ranks, flow.wall_at[number])
        listed.add_buckets(first, flow)
        if gathers_s > 0:
            # Listed as one: where each unit waits depends on what the others gather.
            listed.add(Label("gather, scatter units"), first, "network", gathering, gathers_s)
        if after_s > 0:
            listed.add(Label("wait, copy back"), first, "compute", finished, after_s)
        update = Label("update", phase="update")
        listed.add(update, first, "compute", updating, parts.update_s)
        if last_s > 0:
            listed.add(Label("send parameters"), first, "network", updated, last_s)
    return Timeline(
        step_time_s=updated + last_s, spans=listed.columns(), ranks_like=tuple(like.tolist())
    )


def _copies_s(plan: StepPlan, ranks: RankKind) -> float:
    return ranks.program.copies_s * ranks.slowdown_ratio * plan.coefficients.compute_ratio


class _Listed:
    """The spans of a plan listed so far, as pieces of columns."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        program = plan.classes[0].program
        ops = program.bound.graph.ops
        buckets, doing = enumerate(program.buckets), bucket_words(program.strategy)
        self._labels = [Label(op.call.target, op.module, op.phase) for op in ops]
        # Every micro-batch runs the ops again.
        self._op_labels = np.arange(len(program.start_s)) % max(len(ops), 1)
        self._bucket_labels = self._new_labels(
            [Label(f"{doing} bucket {n} ({bucket.size_bytes} B)") for n, bucket in buckets]
        )
        self._single: dict[Label, NDArray[np.intp]] = {}
        self._pieces: list[tuple[NDArray[np.intp], int, Lane, ArrayLike, ArrayLike]] = []

    def _new_labels(self, labels: Sequence[Label]) -> NDArray[np.intp]:
        self._labels += labels
        return np.arange(len(self._labels) - len(labels), len(self._labels))

    def add(self, label: Label, rank: int, lane: Lane, start_s: float, duration_s: float) -> None:
        if label not in self._single:
            self._single[label] = self._new_labels([label])
        self._pieces.append((self._single[label], rank, lane, [start_s], [duration_s]))

    def add_ops(
        self, ranks: RankClass, wall_at: tuple[NDArray[np.float64], NDArray[np.float64]]
    ) -> None:
        program, plan = ranks.program, self._plan
        scale = ranks.slowdown_ratio * plan.coefficients.compute_ratio
        start_s = np.interp(program.start_s * scale, *wall_at)
        duration_s = np.maximum(np.interp(program.end_s * scale, *wall_at) - start_s, 0.0)
        start_s += plan.broadcast_s
        self._pieces.append((self._op_labels, ranks.ranks[0], "compute", start_s, duration_s))

    def add_buckets(self, rank: int, flow: Flow) -> None:
        before_s = self._plan.broadcast_s
        if before_s:
            self.add(Label("broadcast buffers"), rank, "network", 0.0, before_s)
        start_s, end_s = np.array(flow.collectives).reshape(-1, 2).T
        self._pieces.append(
            (self._bucket_labels, rank, "network", start_s + before_s, end_s - start_s)
        )

    def columns(self) -> SpanColumns:
        label, rank, lane, start_s, duration_s = zip(*self._pieces, strict=True)
        lengths = [len(each) for each in label]
        return SpanColumns(
            labels=self._labels,
            label=np.concatenate(label),
            rank=np.repeat(rank, lengths),
            lane=np.repeat([LANES.index(each) for each in lane], lengths),
            start_s=np.concatenate(start_s),
            duration_s=np.concatenate(duration_s),
        )
