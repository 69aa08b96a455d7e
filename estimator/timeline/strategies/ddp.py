"""DistributedDataParallel: buckets of gradients are all-reduced beside the backward pass.

The rules of all strategies that synchronise gradients in buckets stand here; those of ZeRO and of
parameter servers say what carries a bucket and what follows the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from estimator.cache import Cache
from estimator.elementwise import exp, where
from estimator.errors import ProfileError
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.profile import CollectiveName, MachineProfile
from estimator.placement.mesh import ProcessGroup
from estimator.placement.topology import Cluster
from estimator.timeline.collectives.costs import CollectiveCosts, CollectiveModel, SizedCollective
from estimator.timeline.collectives.overlap import Overlap, OverlapCosts
from estimator.timeline.rank.program import gradient_buckets
from estimator.timeline.rank.ranks import StepShape
from estimator.timeline.rank.rules import (
    DP,
    BucketQueue,
    Communication,
    Groups,
    Network,
    Ranks,
    Rules,
    strategy,
    without_cost,
)
from estimator.timeline.simulator.tasks import COMPUTE, NETWORK, Label, TaskList

Array = NDArray[np.float64]

# The norm of all gradients is one fp32 number.
NORM_BYTES = 4.0


@strategy("ddp")
class DistributedDataParallel(Rules):
    """All ranks hold everything and update everything."""

    reduce_op: ClassVar[CollectiveName] = "all_reduce"
    after_op: ClassVar[CollectiveName | None] = None
    reduced_by: ClassVar[str] = "all-reduce"
    """What reduces gradients, in words."""
    norm_op: ClassVar[CollectiveName | None] = None
    """What adds up the norms of shards of gradients where they are clipped."""

    def __init__(self, graph: OpGraph, shape: StepShape, cache: Cache) -> None:
        super().__init__(graph, shape, cache)
        buckets = gradient_buckets(graph, shape.strategy)
        self.gradient_bytes: Array = np.array([float(bucket.size_bytes) for bucket in buckets])
        ratio = shape.strategy.shard_dtypes(graph.precision).reduced_ratio
        self.bucket_bytes: Array = self.gradient_bytes * ratio

    def shards(self, ranks: Any) -> Any:
        return 1

    def update_share(self, ranks: Any) -> Any:
        return 1.0

    def network(
        self, profiles: Sequence[MachineProfile], cluster: Cluster | None
    ) -> BucketedNetwork:
        return BucketedNetwork(self, profiles, cluster)

    def reduce_costs(
        self, profiles: Sequence[MachineProfile], cluster: Cluster | None
    ) -> CollectiveCosts:
        """What carries one bucket of gradients."""
        kind = self.graph.target
        return CollectiveCosts(profiles, self.reduce_op, kind, cluster, self.cache)

    def bytes_after(self) -> Array:
        """The sizes of the collectives that follow the update, one after the other."""
        return np.zeros(0)

    def words(self, ranks: int) -> str:
        return f"reducing gradients of {ranks} ranks"


class BucketedNetwork(Network):
    """A queue of buckets, the buffers before it, and what follows the update.

    DDP sends the buffers of rank 0 around before a forward pass that will synchronise; where
    nothing says what that takes, it takes nothing.
    """

    def __init__(
        self,
        rules: DistributedDataParallel,
        profiles: Sequence[MachineProfile],
        cluster: Cluster | None,
    ) -> None:
        graph, cache = rules.graph, rules.cache
        self._rules, self._profiles, self._cluster = rules, profiles, cluster
        self.reduce = rules.reduce_costs(profiles, cluster)
        self.queue = BucketQueue(self.reduce.corrections, rules.bucket_bytes)
        whole = float(rules.bucket_bytes.sum())
        self._whole = SizedCollective(self.reduce.corrections, np.array([whole]))
        self._overlaps = OverlapCosts(profiles, rules.bucket_bytes, cache)
        self._buffers = self._sized("broadcast", np.array([float(graph.buffer_bytes)]))
        self._norm = None
        if rules.norm_op is not None and graph.clip_grad_norm:
            self._norm = self._sized(rules.norm_op, np.array([NORM_BYTES]))
        self._after = None
        if rules.after_op is not None:
            self._after = self._sized(rules.after_op, rules.bytes_after())

    def _sized(
        self, op: CollectiveName, sizes_bytes: Array
    ) -> tuple[CollectiveCosts, SizedCollective] | None:
        if not sizes_bytes.sum():
            return None
        kind, cache = self._rules.graph.target, self._rules.cache
        costs = CollectiveCosts(self._profiles, op, kind, self._cluster, cache)
        return costs, SizedCollective(costs.corrections, sizes_bytes)

    def communication(self, ranks: Ranks) -> Communication:
        (group,) = ranks.groups[DP]
        ratio, reduce = ranks.ratio, self.reduce.model(group)
        reduce_s = self._whole.time_s(reduce)
        overlap = self._overlaps.overlap(group, reduce_s)
        queued_s = self.queue.exposed_s(ranks.ready, reduce, ratio, overlap)
        before_s = self._buffers_s(ranks)
        after_s, unknown = self._after_s(ranks, reduce)
        return Communication(
            exposed_s=queued_s + before_s + self._norm_s(ranks) + after_s,
            relative_error=reduce.relative_error,
            overlap=overlap,
            unknown=reduce.unknown | unknown,
            slower_s=self._slower_s(ranks, reduce, overlap, queued_s),
        )

    def _slower_s(
        self, ranks: Ranks, reduce: CollectiveModel, overlap: Overlap, queued_s: Any
    ) -> Any:
        """What the queue adds if its collectives are off; with gloo what is exposed is measured."""
        if self._rules.graph.target == "cpu":
            return 0.0
        ratio = ranks.ratio * exp(reduce.relative_error)
        return self.queue.exposed_s(ranks.ready, reduce, ratio, overlap) - queued_s

    def alone_s(self, ranks: Ranks) -> Any:
        reduce = self.reduce.model(ranks.groups[DP][0])
        after_s, _ = self._after_s(ranks, reduce)
        queued_s = self.queue.sized.time_s(reduce) * ranks.ratio
        return queued_s + self._buffers_s(ranks) + self._norm_s(ranks) + after_s

    def _buffers_s(self, ranks: Ranks) -> Any:
        return self._known_s(self._buffers, ranks)

    def _norm_s(self, ranks: Ranks) -> Any:
        return self._known_s(self._norm, ranks)

    def _known_s(
        self, collective: tuple[CollectiveCosts, SizedCollective] | None, ranks: Ranks
    ) -> Any:
        """Seconds of a collective, none where nothing tells them."""
        if collective is None:
            return 0.0
        costs, sized = collective
        model = costs.model(ranks.groups[DP][0])
        return where(model.unknown, 0.0, sized.time_s(model)) * ranks.ratio

    def _after_s(self, ranks: Ranks, reduce: CollectiveModel) -> tuple[Any, Any]:
        """(seconds of what follows the update, whether nothing tells them)."""
        if self._after is None:
            return 0.0, False
        costs, sized = self._after
        model = costs.model(ranks.groups[DP][0])
        return sized.time_s(model) * ranks.ratio, model.unknown

    def reductions(self, groups: Groups) -> Iterator[tuple[str, ProcessGroup, str]]:
        for group in groups[DP]:
            yield self._rules.reduced_by, group, self.reduce.source(group)

    def missing(self, groups: Groups) -> ProfileError:
        (group,) = groups[DP]
        op = self._rules.reduce_op
        if not self.reduce.model(group).unknown and self._rules.after_op is not None:
            op = self._rules.after_op
        return without_cost(self._profiles[0], op)

    def add_tasks(self, tasks: TaskList, ranks: Ranks, overlap: Overlap) -> None:
        (group,) = ranks.groups[DP]
        model, queue = self.reduce.model(group), self.queue
        costs_s = queue.sized.times_s(model) * ranks.ratio
        latency_s = costs_s * queue.latency_ratio[model.reference]
        begun = None
        before_s = self._buffers_s(ranks)
        if before_s:
            begun = tasks.add(NETWORK, before_s, label=Label("broadcast buffers"))
        doing = self._rules.reduced_by
        ready_s, lane_s = ranks.segments_s
        computed = tasks.add(COMPUTE, ready_s[0] if len(ready_s) else lane_s, begun)
        sent = []
        for number, cost_s in enumerate(costs_s.tolist()):
            label = Label(f"{doing} bucket {number} ({int(queue.sizes_bytes[number])} B)")
            waits_s = float(latency_s[number])
            sent.append(tasks.add(NETWORK, cost_s, computed, latency_s=waits_s, label=label))
            following = ready_s[number + 1] if number + 1 < len(ready_s) else lane_s
            computed = tasks.add(COMPUTE, following - ready_s[number])
        # All ranks have come to the end of their compute, and all buckets are reduced.
        reduced = tasks.add(NETWORK, 0.0, computed, *sent)
        norm_s = self._norm_s(ranks)
        if norm_s:
            label = Label("all-reduce the gradients' norm")
            reduced = tasks.add(NETWORK, norm_s, reduced, label=label)
        tasks.add(COMPUTE, 0.0, reduced)

    def add_after_update(self, tasks: TaskList, ranks: Ranks) -> None:
        after_s, _ = self._after_s(ranks, self.reduce.model(ranks.groups[DP][0]))
        if after_s:
            last = len(tasks.tasks) - 1
            tasks.add(NETWORK, float(after_s), last, label=Label("send parameters"))
