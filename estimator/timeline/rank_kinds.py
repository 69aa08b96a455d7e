"""Keep what one step of a graph costs whatever the allocation: by kind of node, by kind of line."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimator.graph.ops import OpGraph
from estimator.placement import NodeKind
from estimator.timeline.collectives import CollectiveModel, Corrections
from estimator.timeline.overlaps import GroupOverlap
from estimator.timeline.program import StepProgram, step_program
from estimator.workload import Strategy

Array = NDArray[np.float64]
_MOST_TABLES = 256
# Corrections and overlaps kept by one table: more than any cluster's profiles have.
_MOST_KNOWN = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankKind:
    """What a rank on one kind of node costs: its program, with times as long as the node is slow.

    `update_launch_s` is the part of the update that sharding does not shorten, `update_shared_s`
    the rest. Memory is that of a rank that shards nothing.
    """

    program: StepProgram
    slowdown_ratio: float
    ready_s: Array
    lane_s: float
    copy_back_s: float
    update_launch_s: float
    update_shared_s: float
    memory_bytes: int
    memory_ratio: float
    spread_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BucketFactors:
    """Seconds of a program's buckets as factors of a collective's α and β.

    Of a bucket alone, `latency_ratio` is the part in which the link can serve the one before;
    `behind_alpha` and `behind_beta` are what the link has to do for bucket k and all after it.
    """

    alpha: Array
    beta: Array
    latency_ratio: Array
    has_latency: bool
    behind_alpha: Array
    behind_beta: Array

    @classmethod
    def of(cls, sizes_bytes: Array, corrections: Corrections) -> BucketFactors:
        alpha = corrections.at(sizes_bytes)
        beta = alpha * sizes_bytes
        latency_ratio = corrections.latency_at(sizes_bytes)
        sent_ratio = 1.0 - latency_ratio
        return cls(
            alpha=alpha,
            beta=beta,
            latency_ratio=latency_ratio,
            has_latency=bool(latency_ratio.any()),
            behind_alpha=np.cumsum((alpha * sent_ratio)[::-1])[::-1],
            behind_beta=np.cumsum((beta * sent_ratio)[::-1])[::-1],
        )


class StepTable(dict[NodeKind, RankKind]):
    """A graph's step at one batch and strategy, compiled for a kind of node when it is first met.

    Looking up a node raises ProfileError or WorkloadError where it cannot be compiled. The sizes
    of buckets are the same for all kinds.
    """

    def __init__(
        self,
        graph: OpGraph,
        *,
        batch: int | None,
        merging: bool,
        strategy: Strategy,
        accumulation_steps: int,
    ) -> None:
        self.graph, self.strategy = graph, strategy
        self._batch, self._merging = batch, merging
        self._accumulation_steps = accumulation_steps
        self._shared: dict[tuple[int, int, float], RankKind] = {}
        self._factors: dict[Corrections, BucketFactors] = {}
        self._corrections: dict[tuple[Corrections, float], float] = {}
        self._local_s: dict[GroupOverlap, float] = {}

    def __missing__(self, node: NodeKind) -> RankKind:
        # Nodes that differ in their network alone run the same program at the same speed.
        key = (id(node.profile), node.busy, node.slowdown_ratio)
        found = self._shared.get(key)
        if found is None:
            found = self._shared[key] = self._compiled(node)
        self[node] = found
        return found

    def _compiled(self, node: NodeKind) -> RankKind:
        program = step_program(
            self.graph,
            node.profile,
            batch=self._batch,
            busy=node.busy,
            merging=self._merging,
            strategy=self.strategy,
            accumulation_steps=self._accumulation_steps,
        )
        slow, memory_bytes = node.slowdown_ratio, program.memory.total_bytes(1)
        return RankKind(
            program=program,
            slowdown_ratio=slow,
            ready_s=program.ready_s * slow,
            lane_s=program.lane_s * slow,
            copy_back_s=program.copy_back_s * slow,
            update_launch_s=program.update_launch_s * slow,
            update_shared_s=(program.update_s - program.update_launch_s) * slow,
            memory_bytes=memory_bytes,
            memory_ratio=memory_bytes / node.profile.devices[0].memory_bytes,
            spread_ratio=node.profile.rank_spread_ratio or 0.0,
        )

    def factors(self, sizes_bytes: Array, model: CollectiveModel) -> BucketFactors:
        """Those of the buckets' sizes under the corrections of a collective."""
        found = self._factors.get(model.corrections)
        if found is None:
            if len(self._factors) >= _MOST_KNOWN:
                self._factors.clear()
            found = BucketFactors.of(sizes_bytes, model.corrections)
            self._factors[model.corrections] = found
        return found

    def time_s(self, model: CollectiveModel, size_bytes: float) -> float:
        """`model.time_s`, its correction worked out once for each of the graph's few sizes."""
        if size_bytes <= 0:
            return 0.0
        key = (model.corrections, size_bytes)
        correction = self._corrections.get(key)
        if correction is None:
            if len(self._corrections) >= _MOST_KNOWN:
                self._corrections.clear()
            correction = float(model.corrections.at(np.array([size_bytes]))[0])
            self._corrections[key] = correction
        return (model.alpha_s + model.beta_s_per_byte * size_bytes) * correction

    def local_s(self, overlap: GroupOverlap, size_bytes: float) -> float:
        """`overlap.local_s` of all buckets together, worked out once."""
        found = self._local_s.get(overlap)
        if found is None:
            if len(self._local_s) >= _MOST_KNOWN:
                self._local_s.clear()
            found = self._local_s[overlap] = overlap.local_s(size_bytes)
        return found


_tables: OrderedDict[tuple[object, ...], StepTable] = OrderedDict()


def step_table(
    graph: OpGraph,
    *,
    batch: int | None,
    merging: bool,
    strategy: Strategy,
    accumulation_steps: int,
) -> StepTable:
    """The table of a step, kept from one estimate to the next.

    `merging` says whether there are other ranks to merge gradients with.
    """
    key = (id(graph), batch, merging, strategy, accumulation_steps)
    found = _tables.get(key)
    if found is None:
        found = _tables[key] = StepTable(
            graph,
            batch=batch,
            merging=merging,
            strategy=strategy,
            accumulation_steps=accumulation_steps,
        )
        while len(_tables) > _MOST_TABLES:
            _tables.popitem(last=False)
    return found
