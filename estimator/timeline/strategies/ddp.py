"""DistributedDataParallel: buckets of gradients are all-reduced beside backward; and local SGD.

The rules of all strategies that synchronise gradients in buckets stand here; those of ZeRO and of
parameter servers say what carries a bucket and what follows the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, ClassVar, TypeVar

import numpy as np

from estimator.cache import Cache
from estimator.elementwise import Array, exp, where
from estimator.errors import ProfileError
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.memory.peak import Bytes
from estimator.graph.memory.sizes import OptimizerMemory, StepTensors, optimizer_memory
from estimator.graph.memory.step import Holding, Update, held_whole
from estimator.kernels.durations import Durations
from estimator.machines.profile import CollectiveName, MachineProfile
from estimator.placement.mesh import ProcessGroup
from estimator.placement.topology import Cluster
from estimator.timeline.collectives.costs import CollectiveCosts, CollectiveModel, SizedCollective
from estimator.timeline.collectives.overlap import Overlap, OverlapCosts
from estimator.timeline.rank.rules import (
    DP,
    Bucket,
    BucketQueue,
    Communication,
    Groups,
    Network,
    QueuedSeconds,
    RankLane,
    RankRequest,
    Ranks,
    Rules,
    StepShape,
    rules_for,
    without_cost,
)
from estimator.timeline.rank.updates import accumulate_s, copies_s
from estimator.timeline.simulator.tasks import COMPUTE, NETWORK, Label, TaskList
from estimator.workload.strategies import DDP, Bucketed, LocalSGD, Strategy

# Of the flat tensor of averaged parameters: it is filled, divided, and copied back.
_FLAT_PASSES = 3
# The norm of all gradients is one fp32 number.
NORM_BYTES = 4.0
# Shapes of groups of which what their buckets cost is kept.
_MOST_GROUPS = 1 << 10


def gradient_buckets(graph: OpGraph, strategy: Bucketed) -> tuple[Bucket, ...]:
    """The buckets of a graph, in the order in which DDP launches them.

    torch/csrc/distributed/c10d/reducer.cpp, `compute_bucket_assignment_by_size` and
    `Reducer::rebuild_buckets`: after the first step buckets follow the order in which gradients
    became ready, one chain of buckets for each dtype, each closed once its size reaches the cap;
    the first bucket of a chain has a cap of its own.
    """
    last_op = len(graph.ops) - 1
    closed: list[Bucket] = []
    open_buckets: dict[str, Bucket] = {}
    first_done: set[str] = set()
    for parameter in graph.parameters:
        if parameter.is_expert:
            continue
        dtype = parameter.spec.dtype
        ready = last_op if parameter.ready_after is None else parameter.ready_after
        before = open_buckets.pop(dtype, Bucket(size_bytes=0, tensors=0, ready_after=-1))
        grown = Bucket(
            size_bytes=before.size_bytes + parameter.spec.nbytes,
            tensors=before.tensors + 1,
            ready_after=max(before.ready_after, ready),
        )
        cap = strategy.bucket_cap_bytes if dtype in first_done else strategy.first_cap_bytes
        if not strategy.bucketed or grown.size_bytes >= cap:
            closed.append(grown)
            first_done.add(dtype)
        else:
            open_buckets[dtype] = grown
    closed.extend(open_buckets.values())
    # The reducer launches bucket k only after every bucket before it is ready.
    launched = accumulate((bucket.ready_after for bucket in closed), max)
    pairs = zip(closed, launched, strict=True)
    return tuple([replace(bucket, ready_after=latest) for bucket, latest in pairs])


_Reduced = tuple[CollectiveModel, Overlap, QueuedSeconds | None]


class BucketedNetwork(Network):
    """A queue of buckets, the buffers before it, and what follows the update.

    DDP sends the buffers of rank 0 around before a forward pass that will synchronise; where
    nothing says what that takes, or nothing wraps the model, it takes nothing.
    """

    _rules: ReplicaRules[Any]

    def __init__(
        self, rules: ReplicaRules[Any], profiles: Sequence[MachineProfile], cluster: Cluster | None
    ) -> None:
        super().__init__(rules, profiles, cluster)
        graph, cache = rules.graph, rules.cache
        self.reduce = self._reducing()
        self.queue = BucketQueue(self.reduce.corrections, rules.bucket_bytes)
        total_bytes = float(rules.bucket_bytes.sum())
        self._whole = SizedCollective(self.reduce.corrections, np.array([total_bytes]))
        self._overlaps = OverlapCosts(profiles, rules.bucket_bytes, cache)
        self._of_group: dict[ProcessGroup, _Reduced] = {}
        self._buffers = None
        if graph.buffer_bytes and rules.buckets:
            self._buffers = self._sized("broadcast", np.array([float(graph.buffer_bytes)]))
        self._norm = None
        if rules.norm_op is not None and graph.clip_grad_norm:
            self._norm = self._sized(rules.norm_op, np.array([NORM_BYTES]))
        self._after = None
        if rules.after_op is not None and (after_bytes := rules.bytes_after()).any():
            self._after = self._sized(rules.after_op, after_bytes)

    def _reducing(self) -> Any:
        """What carries one bucket of gradients."""
        return self._costs_of(self._rules.reduce_op)

    def communication(self, ranks: Ranks, *, errors: bool = True) -> Communication:
        (group,) = ranks.groups[DP]
        reduce, overlap, queued_s = self._reduced(group)
        relative_error: Any = self.reduce.relative_error(group, reduce) if errors else None
        # With gloo what is exposed is measured; else a collective that is off may no longer hide.
        hides = errors and self._rules.graph.target != "cpu"
        queued_s, if_slower_s = self.queue.exposed_s(
            ranks.ready,
            reduce,
            ranks.ratio,
            overlap,
            slower=exp(relative_error) if hides else None,
            queued_s=queued_s,
        )
        beside_s = self._known_s(ranks, self._buffers, self._norm)
        after_s, unknown = self._after_s(ranks, reduce)
        return Communication(
            exposed_s=queued_s + beside_s + after_s,
            overlap=overlap,
            unknown=reduce.unknown | unknown,
            relative_error=relative_error,
            slower_s=if_slower_s - queued_s,
        )

    def _reduced(self, group: ProcessGroup) -> _Reduced:
        """(what reduces a bucket, how it disturbs, what is queued), kept by group."""
        known = self._of_group.get(group) if isinstance(group.ranks, int) else None
        if known is not None:
            return known
        reduce = self.reduce.model(group)
        overlap = self._overlaps.overlap(group, self._whole.time_s(reduce))
        if not isinstance(group.ranks, int):
            return reduce, overlap, None
        if len(self._of_group) >= _MOST_GROUPS:
            self._of_group.clear()
        found = self._of_group[group] = reduce, overlap, self.queue.queued(reduce, reduce.reference)
        return found

    def alone_s(self, ranks: Ranks) -> Any:
        reduce = self.reduce.model(ranks.groups[DP][0])
        after_s, _ = self._after_s(ranks, reduce)
        queued_s = self.queue.sized.time_s(reduce) * ranks.ratio
        return queued_s + self._known_s(ranks, self._buffers, self._norm) + after_s

    def _known_s(
        self, ranks: Ranks, *collectives: tuple[CollectiveCosts, SizedCollective] | None
    ) -> Any:
        """Seconds of some collectives, none where nothing tells them."""
        seconds: Any = 0.0
        for costs, sized in filter(None, collectives):
            model = costs.model(ranks.groups[DP][0])
            seconds = seconds + where(model.unknown, 0.0, sized.time_s(model)) * ranks.ratio
        return seconds

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
        before_s = self._known_s(ranks, self._buffers)
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
        norm_s = self._known_s(ranks, self._norm)
        if norm_s:
            label = Label("all-reduce the gradients' norm")
            reduced = tasks.add(NETWORK, norm_s, reduced, label=label)
        tasks.add(COMPUTE, 0.0, reduced)

    def add_after_update(self, tasks: TaskList, ranks: Ranks) -> None:
        after_s, _ = self._after_s(ranks, self.reduce.model(ranks.groups[DP][0]))
        if after_s:
            last = len(tasks.tasks) - 1
            tasks.add(NETWORK, float(after_s), last, label=Label("send parameters"))


S = TypeVar("S", bound=Strategy)
B = TypeVar("B", bound=Bucketed)


class ReplicaRules(Rules[S]):
    """All ranks hold everything and update everything; there may be buckets of gradients."""

    network_class = BucketedNetwork
    reduce_op: ClassVar[CollectiveName] = "all_reduce"
    after_op: ClassVar[CollectiveName | None] = None
    reduced_by: ClassVar[str] = "all-reduce"
    """What reduces gradients, in words."""
    norm_op: ClassVar[CollectiveName | None] = None
    """What adds up the norms of shards of gradients where they are clipped."""

    def __init__(self, graph: OpGraph, shape: StepShape, cache: Cache) -> None:
        super().__init__(graph, shape, cache)
        self.buckets = self.gradient_buckets()
        self.gradient_bytes: Array = np.array([float(bucket.size_bytes) for bucket in self.buckets])
        self.reduced_ratio = self.strategy.shard_dtypes(graph.precision).reduced_ratio
        self.bucket_bytes: Array = self.gradient_bytes * self.reduced_ratio

    def gradient_buckets(self) -> tuple[Bucket, ...]:
        """What gradients are merged in."""
        return ()

    @property
    def in_buckets(self) -> bool:
        """Whether no gradient is held beside the buckets."""
        return bool(getattr(self.strategy, "gradient_as_bucket_view", False))

    @property
    def cast_copies(self) -> float:
        """What casting a bucket to the dtype of its reduction moves, in copies of the bucket.

        torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py: a bucket is cast, divided by
        the number of ranks as such, and copied back; reading and writing it once is one copy.
        """
        ratio = self.reduced_ratio
        return 0.0 if ratio == 1 else (1 + ratio + 2 * ratio + ratio + 1) / 2

    def held_bucket_bytes(self, gradients_bytes: int) -> int:
        """As much as all gradients, and the copy of one bucket that is cast."""
        largest = max((bucket.size_bytes for bucket in self.buckets), default=0)
        return gradients_bytes + (
            0 if self.reduced_ratio == 1 else int(largest * self.reduced_ratio)
        )

    def lane(self, request: RankRequest, durations: Durations) -> RankLane:
        """All micro-batches; the last one alone synchronises gradients."""
        count = request.accumulation_steps
        summed_s = (count - 1) * accumulate_s(request.trained, *request.machine)
        buckets = self.buckets if request.merging else ()
        sizes = [bucket.size_bytes for bucket in buckets]
        back_s = copies_s(request.profile, sizes, request.devices_busy, request.cache)
        each_s = back_s * (1 + self.cast_copies)
        copied_s = float(each_s.sum()) if request.profile.host else 0.0
        return RankLane(
            lanes=request.lanes(
                durations,
                count=count,
                host_s=durations.host_s,
                added_s=_added_s(request, buckets, each_s),
            ),
            copies_s=copied_s + summed_s,
            beside_s=summed_s,
            accumulate_s=summed_s,
            buckets=buckets,
            copy_back_s=0.0 if self.in_buckets else float(back_s.sum()),
        )

    def optimizer(self, tensors: StepTensors, *, sharded: bool = False) -> OptimizerMemory:
        """What one rank holds of the optimizer; if `sharded`, all ranks that share it together."""
        master_ratio = self.strategy.master_ratio(self.graph.precision)
        graph = tensors.graph

        def made() -> OptimizerMemory:
            return optimizer_memory(graph, master_ratio=master_ratio, sharded=sharded)

        # The same at every batch size.
        return self.cache.get("optimizer memory", (graph,), made, master_ratio, sharded)

    def updates(self, tensors: StepTensors) -> tuple[Update, ...]:
        """What ranks hold of the optimizer where there are several; see `Holding.updates`."""
        return (Update.of(self.optimizer(tensors), sharded=False),)

    def holding(self, tensors: StepTensors, buckets: Sequence[Bucket], *, merging: bool) -> Holding:
        if not merging:
            return held_whole(tensors, ReplicaRules.updates(self, tensors))
        return held_whole(
            tensors,
            self.updates(tensors),
            bucket_bytes=self.held_bucket_bytes(tensors.trained_bytes()),
            in_buckets=self.in_buckets,
        )

    def assumptions(self) -> Iterator[str]:
        if self.strategy.master_ratio(self.graph.precision) > 1:
            yield (
                "master weights: gradients are cast to fp32 and updated weights back, 12 bytes each"
            )

    def bytes_after(self) -> Array:
        """The sizes of the collectives that follow the update, one after the other."""
        return np.zeros(0)


class BucketedRules(ReplicaRules[B]):
    """Ranks merge gradients in buckets."""

    def gradient_buckets(self) -> tuple[Bucket, ...]:
        return gradient_buckets(self.graph, self.strategy)


@rules_for(DDP)
class DistributedDataParallel(BucketedRules[DDP]):
    """Gradients are all-reduced in buckets."""


class AveragingNetwork(BucketedNetwork):
    """One all-reduce of all parameters, of which each step has its part."""

    def _after_s(self, ranks: Ranks, reduce: CollectiveModel) -> tuple[Any, Any]:
        seconds, unknown = super()._after_s(ranks, reduce)
        return seconds / self._rules.strategy.every, unknown


@rules_for(LocalSGD)
class PeriodicAveraging(ReplicaRules[LocalSGD]):
    """Local SGD: no gradient is sent; parameters are averaged after the update of some steps.

    torch/distributed/algorithms/model_averaging (torch 2.13), averagers.py and utils.py: parameters
    that have a gradient are copied into one flat tensor, divided by the number of ranks,
    all-reduced and copied back. A step is the mean over those from one average to the next.
    """

    network_class = AveragingNetwork
    after_op = "all_reduce"
    waits_for = "averaging parameters"

    def bytes_after(self) -> Array:
        return np.array([float(self._averaged_bytes())])

    def _averaged_bytes(self) -> int:
        return sum(p.spec.nbytes for p in self.graph.parameters if p.gradient is not None)

    def lane(self, request: RankRequest, durations: Durations) -> RankLane:
        own = super().lane(request, durations)
        if not request.merging:
            return own
        sizes = [self._averaged_bytes()]
        copy_s = copies_s(request.profile, sizes, request.devices_busy, request.cache)
        return replace(own, copy_back_s=_FLAT_PASSES * float(copy_s.sum()) / self.strategy.every)

    def updates(self, tensors: StepTensors) -> tuple[Update, ...]:
        """Once the optimizer has updated there is the flat tensor beside its state."""
        (update,) = super().updates(tensors)
        return update, Update(update.state, Bytes(tensors.trained_bytes()))

    def held_bucket_bytes(self, gradients_bytes: int) -> int:
        return 0

    def assumptions(self) -> Iterator[str]:
        yield (
            f"parameters are averaged after every {self.strategy.every} steps, over which a step "
            "is the mean; that more steps may be needed is not counted"
        )


def _added_s(request: RankRequest, buckets: Sequence[Bucket], each_s: Array) -> tuple[Any, Any]:
    """Seconds of host and device that DDP adds to ops: its own host work, and copies."""
    host = request.profile.host
    if not buckets or host is None:
        return 0.0, 0.0
    host_s, device_s = np.zeros(len(request.graph.ops)), np.zeros(len(request.graph.ops))
    host_s[0] = host.ddp_step_s
    ready = [bucket.ready_after for bucket in buckets]
    tensors = np.array([bucket.tensors for bucket in buckets])
    np.add.at(device_s, ready, each_s)
    np.add.at(host_s, ready, host.ddp_bucket_s + tensors * host.backward_op_s)
    return host_s, device_s
