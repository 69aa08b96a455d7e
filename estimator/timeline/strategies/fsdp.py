"""FullyShardedDataParallel (FSDP2) and HSDP: units are gathered before they compute.

Order and waits are those of torch.distributed.fsdp.fully_shard (torch 2.13; _fsdp_param_group.py,
_fsdp_state.py). In a micro-batch every block is gathered for its forward and for its backward pass,
the root once; gradients are reduce-scattered after each backward pass, and under HSDP the shards
all-reduced between replicates. On GPUs gathers run ahead of compute on the group's communicator; a
block's gradients are copied into their buffer only when the block before has been scattered. Gloo's
collectives block the rank. The compute of a micro-batch ends when all its gradients are reduced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from estimator.cache import Cache
from estimator.elementwise import Array, exp, maximum
from estimator.errors import ProfileError
from estimator.graph.ir.op_graph import OpGraph, frozen_unit_bytes, parameter_unit
from estimator.graph.ir.structure import UnitRun
from estimator.graph.memory.peak import Bytes
from estimator.graph.memory.sizes import (
    Gradient,
    StepTensors,
    block_bytes,
    optimizer_memory,
    rounded_bytes,
)
from estimator.graph.memory.step import (
    COPY_OUT,
    DROP,
    GATHER,
    PREFETCH,
    RESHARD,
    Holding,
    Ledger,
    MicroBatchMemory,
    Update,
    at,
    held_alone,
)
from estimator.kernels.durations import Durations, columns_of
from estimator.machines.profile import MachineProfile
from estimator.placement.mesh import ProcessGroup
from estimator.placement.topology import Cluster
from estimator.timeline.collectives.overlap import NO_OVERLAP, Overlap, OverlapCosts
from estimator.timeline.rank.lanes import (
    MicroBatches,
    ShardedPasses,
    copies_of_one_rank_s,
    hook_seconds,
    host_copies,
    segment_seconds,
    slowest_of,
    unit_copies_s,
)
from estimator.timeline.rank.rules import (
    DP,
    DP_REPLICATE,
    DP_SHARD,
    EXPERT_SHARD,
    Bucket,
    Communication,
    Groups,
    Network,
    RankLane,
    RankRequest,
    Ranks,
    Rules,
    StepShape,
    listed,
    rules_for,
    without_cost,
)
from estimator.timeline.rank.updates import accumulate_s, autocast_bytes
from estimator.timeline.simulator.tasks import (
    COMPUTE,
    NETWORK,
    NO_LABEL,
    REPLICATES,
    Label,
    TaskList,
    play,
)
from estimator.timeline.strategies.ddp import NORM_BYTES
from estimator.timeline.strategies.zero import (
    GradientsBefore,
    Reduction,
    reduced,
    unlike_micro_batches,
)
from estimator.units import format_bytes
from estimator.workload.strategies import FSDP, ShardDtypes

# Compute between passes through units, which a timeline lists operator by operator.
SEGMENTS = (Label("", phase="forward"), Label("", phase="backward"))


class UnitCosts(NamedTuple):
    """Seconds of each unit's collectives: (units,) of one step, (units, rows) of many."""

    gather_s: Any
    scatter_s: Any
    reduce_s: Any


class MicroBatch:
    """Adds the tasks of one micro-batch in the order in which FSDP issues them.

    It comes after all that is in the list; its last task ends it on all ranks.
    """

    def __init__(
        self,
        tasks: TaskList,
        passes: ShardedPasses,
        segments_s: Any,
        costs: UnitCosts,
        *,
        blocks: bool,
        named: bool = False,
    ) -> None:
        self._tasks, self._passes, self._blocks = tasks, passes, blocks
        self._named = named
        self._costs = costs
        self._replicates = bool(np.any(costs.reduce_s))
        forward, backward = len(passes.forward_ends), len(passes.backward_ends)
        units = len(passes.gathered_bytes)
        self._forward_s = segments_s[:forward]
        self._backward_s = segments_s[forward : forward + backward]
        copies_s = segments_s[forward + backward :]
        self._out_s, self._in_s = copies_s[:units], copies_s[units : 2 * units]
        # The last task of all: all ranks had ended the micro-batch before.
        self._begun = len(tasks.tasks) - 1 if tasks.tasks else None
        self._copied: list[int] = []
        self._scattered: int | None = None
        self._reduced: int | None = None

    def _add(self, lane: str, cost_s: Any, *after: int | None, of: tuple[str, int]) -> int:
        """Add what is done to a unit; where collectives block, after the task before it."""
        label = Label(f"{of[0]} unit {of[1]}") if self._named else NO_LABEL
        return self._tasks.add(lane, cost_s, *after, self._before, label=label)

    def _gather(self, unit: int, *after: int | None) -> int | None:
        if not self._passes.gathered_bytes[unit]:
            return None
        cost_s = self._costs.gather_s[unit]
        return self._add(NETWORK, cost_s, *after, of=("all-gather", unit))

    def _copy_out(self, unit: int, gathered: int | None) -> None:
        copied = self._add(COMPUTE, self._out_s[unit], gathered, of=("copy out", unit))
        self._copied.append(copied)

    def add(self, *, reducing: bool) -> None:
        """Add all; gradients are reduced, or kept whole on every rank."""
        self._forward()
        self._backward(reducing=reducing)
        self._end()

    def _compute(self, segment: Label, cost_s: Any) -> None:
        self._tasks.add(COMPUTE, cost_s, self._before, label=segment)

    @property
    def _before(self) -> int | None:
        """The task before, where collectives block their rank."""
        return len(self._tasks.tasks) - 1 if self._blocks and self._tasks.tasks else None

    def _forward(self) -> None:
        """A gather may run beside the compute of two blocks: until the one before them is copied.

        The buffers of two gathers exist at a time (wait_for_unshard).
        """
        passes = self._passes
        self._copy_out(0, self._gather(0, self._begun))
        self._compute(SEGMENTS[0], self._forward_s[0])
        for place, unit in enumerate(passes.forward, start=1):
            room = self._copied[place - 2] if place > 1 else self._begun
            self._copy_out(unit, self._gather(unit, room))
            self._compute(SEGMENTS[0], self._forward_s[place])
        self._compute(SEGMENTS[0], self._forward_s[-1])

    def _backward(self, *, reducing: bool) -> None:
        """Beside a block's compute the next one is gathered and the one before scattered.

        A block's gradients are copied in when the block before has been scattered (post_backward).
        """
        passes = self._passes
        units, regathers = passes.backward, passes.regathers
        gathered = self._gather(units[0], self._copied[-1]) if units and regathers else None
        self._compute(SEGMENTS[1], self._backward_s[0])
        last_pass = {unit: place for place, unit in enumerate(units)}
        for place, unit in enumerate(units):
            if regathers:
                self._copy_out(unit, gathered)
            if regathers and place + 1 < len(units):
                gathered = self._gather(units[place + 1], self._copied[-1])
            self._compute(SEGMENTS[1], self._backward_s[place + 1])
            if reducing and last_pass[unit] == place:
                self._reduce(unit)
        self._compute(SEGMENTS[1], self._backward_s[-1])
        if reducing:
            self._reduce(0)

    def _reduce(self, unit: int) -> None:
        if not self._passes.reduced_bytes[unit]:
            return
        copied = self._add(COMPUTE, self._in_s[unit], self._scattered, of=("copy in", unit))
        scatter_s = self._costs.scatter_s[unit]
        self._scattered = self._add(NETWORK, scatter_s, copied, of=("reduce-scatter", unit))
        if self._replicates:
            reduce_s = self._costs.reduce_s[unit]
            reduced = self._add(REPLICATES, reduce_s, self._scattered, of=("all-reduce", unit))
            self._reduced = reduced

    def _end(self) -> None:
        """All ranks have computed, and all gradients are reduced."""
        computed = self._tasks.add(COMPUTE, 0.0, self._before)
        joined = self._tasks.add(NETWORK, 0.0, computed, self._scattered, self._reduced)
        self._tasks.add(COMPUTE, 0.0, joined)


class ShardedNetwork(Network):
    """Gathers and scatters over the ranks that hold one replica, all-reduces between replicates."""

    _rules: FullyShardedDataParallel

    def __init__(
        self,
        rules: FullyShardedDataParallel,
        profiles: Sequence[MachineProfile],
        cluster: Cluster | None,
    ) -> None:
        super().__init__(rules, profiles, cluster)
        passes = rules.passes
        gathered, reduced, kept = passes.gathered_bytes, passes.reduced_bytes, passes.reduced_bytes
        self._of_experts = None
        if (experts := passes.experts) is not None:
            gathered, reduced = gathered - experts.gathered, reduced - experts.reduced
            kept = reduced + experts.parts * experts.reduced
            self._of_experts = (
                self._sized("all_gather", experts.gathered),
                self._sized("reduce_scatter", experts.reduced),
            )
        self._gather = self._sized("all_gather", gathered)
        self._scatter = self._sized("reduce_scatter", reduced)
        # What is all-reduced is the shard that a rank holds.
        self._reduce = self._sized("all_reduce", kept / (rules.strategy.shard or 1))
        strategy = rules.strategy
        self._host = host_copies(profiles, passes) if strategy.offload else None
        self._norm = None
        if rules.graph.clip_grad_norm:
            self._norm = self._sized("all_reduce", np.array([NORM_BYTES]))
        self._overlaps = OverlapCosts(profiles, passes.gathered_bytes, rules.cache)

    def communication(self, ranks: Ranks, *, errors: bool = True) -> Communication:
        costs, relative_error, unknown = self._costs(ranks)
        shape = self._rules.shape
        overlap = self._overlap(ranks, costs)
        if errors:
            once_s, slower_s = self._once_and_slower_s(ranks, costs, overlap, relative_error)
        else:
            once_s = slower_s = self._micro_batch_s(ranks, costs, overlap, reducing=True)
        earlier_s, earlier = 0.0, shape.accumulation_steps - 1
        if earlier and self._rules.strategy.gradient_sync:
            earlier_s = earlier * once_s
        elif earlier:
            earlier_s = earlier * self._micro_batch_s(ranks, costs, overlap, reducing=False)
        # What the earlier micro-batches' gradients are added up in follows all of them here.
        spent_s = earlier_s + once_s + self._sums_s(ranks) + self._norm_s(ranks)
        return Communication(
            exposed_s=maximum(spent_s - ranks.lane_s, 0.0),
            overlap=overlap,
            unknown=unknown,
            relative_error=relative_error if errors else None,
            slower_s=(slower_s - once_s) * shape.accumulation_steps,
        )

    def _once_and_slower_s(
        self, ranks: Ranks, costs: UnitCosts, overlap: Overlap, relative_error: Any
    ) -> tuple[Any, Any]:
        """A micro-batch that reduces gradients, and one whose collectives are off by their error.

        Nothing of gloo's is hidden, so that its error is that of the whole.
        """
        if self._blocks:
            once_s = self._micro_batch_s(ranks, costs, overlap, reducing=True)
            return once_s, once_s
        ratio = exp(relative_error)
        # Of one class of ranks that compute beside their collectives both are simulated at once.
        if not overlap.is_free and not any(map(np.ndim, (ratio, *costs[0][:1], *ranks.segments_s))):
            rows = UnitCosts(*(np.outer(each_s, (1.0, ratio)) for each_s in costs))
            both_s = self._micro_batch_s(ranks, rows, overlap, reducing=True)
            return tuple(np.broadcast_to(both_s, 2).tolist())  # a number where nothing is sharded
        slower = UnitCosts(*(_of_rows(each_s, ratio) * ratio for each_s in costs))
        return tuple(
            self._micro_batch_s(ranks, unit_costs, overlap, reducing=True)
            for unit_costs in (costs, slower)
        )

    def alone_s(self, ranks: Ranks) -> Any:
        costs, _, _ = self._costs(ranks)
        passes, shape = self._rules.passes, self._rules.shape
        reduced = [0, *passes.reduced]
        gathers_s = costs.gather_s[list(passes.gathered)].sum(axis=0)
        reductions_s = costs.scatter_s[reduced].sum(axis=0) + costs.reduce_s[reduced].sum(axis=0)
        times = shape.accumulation_steps if self._rules.strategy.gradient_sync else 1
        return shape.accumulation_steps * gathers_s + times * reductions_s + self._norm_s(ranks)

    def _norm_s(self, ranks: Ranks) -> Any:
        """Seconds of adding up the norms of shards of gradients, where they are clipped."""
        if self._norm is None:
            return 0.0
        return slowest_of(self._norm, ranks.groups[DP_SHARD], ranks.ratio).times_s[0]

    def _sums_s(self, ranks: Ranks) -> Any:
        """Seconds of adding up gradients, shards or whole, on the rank that takes longest."""
        if self._rules.shape.accumulation_steps == 1:
            return 0.0
        (group,) = ranks.groups[DP]
        shards = self._rules.shards(group.ranks) if self._rules.strategy.gradient_sync else 1
        seconds = ranks.segments_s[-1]
        most = seconds.max(axis=0) if isinstance(seconds, np.ndarray) else seconds
        return most / shards

    def _costs(self, ranks: Ranks) -> tuple[UnitCosts, Any, Any]:
        """(what each unit's collectives take over the slowest group, error of those of gradients,
        whether nothing tells one of them).
        """
        shards, replicates = ranks.groups[DP_SHARD], ranks.groups[DP_REPLICATE]
        gather = slowest_of(self._gather, shards, ranks.ratio)
        scatter = slowest_of(self._scatter, shards, ranks.ratio)
        reduce = slowest_of(self._reduce, replicates, ranks.ratio)
        gather_s, scatter_s = gather.times_s, scatter.times_s
        if self._of_experts is not None:
            own = [
                slowest_of(expert, ranks.groups.get(EXPERT_SHARD, ()), ranks.ratio)
                for expert in self._of_experts
            ]
            gather_s, scatter_s = gather_s + own[0].times_s, scatter_s + own[1].times_s
        if self._host is not None:
            to_device, to_host = self._host
            gather_s = gather_s + to_device.slowest_s(shards) * ranks.ratio
            scatter_s = scatter_s + to_host.slowest_s(shards) * ranks.ratio
        return (
            UnitCosts(gather_s, scatter_s, reduce.times_s),
            maximum(scatter.relative_error, reduce.relative_error),
            gather.unknown | scatter.unknown | reduce.unknown,
        )

    def _overlap(self, ranks: Ranks, costs: UnitCosts) -> Overlap:
        if self._blocks:
            return NO_OVERLAP
        alone_s = costs.gather_s.sum(axis=0) + costs.scatter_s.sum(axis=0)
        return self._overlaps.overlap(ranks.groups[DP][0], alone_s)

    @property
    def _blocks(self) -> bool:
        """Whether a rank stands still until its collective is done, as with gloo."""
        return self._rules.graph.target == "cpu"

    def _micro_batch_s(
        self, ranks: Ranks, costs: UnitCosts, overlap: Overlap, *, reducing: bool
    ) -> Any:
        tasks = TaskList()
        if costs.gather_s.ndim == 1:
            costs = UnitCosts(*(column.tolist() for column in costs))
        passes, blocks = self._rules.passes, self._blocks
        MicroBatch(tasks, passes, ranks.segments_s, costs, blocks=blocks).add(reducing=reducing)
        return play(tasks.tasks, overlap)

    def reductions(self, groups: Groups) -> Iterator[tuple[str, ProcessGroup, str]]:
        for (costs, _), axis in ((self._scatter, DP_SHARD), (self._reduce, DP_REPLICATE)):
            for group in groups[axis]:
                if group.ranks > 1:
                    yield costs.op.replace("_", "-"), group, costs.source(group)

    def missing(self, groups: Groups) -> ProfileError:
        for (costs, _), axis in (
            (self._scatter, DP_SHARD),
            (self._gather, DP_SHARD),
            (self._reduce, DP_REPLICATE),
        ):
            for group in groups[axis]:
                if group.ranks > 1 and costs.model(group).unknown:
                    return without_cost(self._profiles[group.network], costs.op)
        raise AssertionError("every collective of the strategy has a cost")

    def add_tasks(self, tasks: TaskList, ranks: Ranks, overlap: Overlap) -> None:
        costs, *_ = self._costs(ranks)
        shape = self._rules.shape
        count = shape.accumulation_steps
        for number in listed(count):
            last = number == count - 1
            reducing = last or self._rules.strategy.gradient_sync
            if last and (left := count - len(listed(count))):
                alike = self._rules.strategy.gradient_sync
                middle_s = left * self._micro_batch_s(ranks, costs, overlap, reducing=alike)
                label = Label(f"micro-batches 3 to {count - 1}, each alike")
                more = tasks.add(NETWORK, middle_s, len(tasks.tasks) - 1, label=label)
                tasks.add(COMPUTE, 0.0, more)
            passes, blocks = self._rules.passes, self._blocks
            micro = MicroBatch(tasks, passes, ranks.segments_s, costs, blocks=blocks, named=True)
            micro.add(reducing=reducing)
        if shape.accumulation_steps > 1:
            (group,) = ranks.groups[DP]
            shards = self._rules.shards(group.ranks) if self._rules.strategy.gradient_sync else 1
            summed = tasks.add(COMPUTE, ranks.segments_s[-1] / shards, label=Label("add gradients"))
            tasks.add(COMPUTE, 0.0, tasks.add(NETWORK, 0.0, summed))
        norm_s = self._norm_s(ranks)
        if norm_s:
            label = Label("all-reduce the gradients' norm")
            last_task = len(tasks.tasks) - 1
            tasks.add(COMPUTE, 0.0, tasks.add(NETWORK, norm_s, last_task, label=label))

    def add_after_update(self, tasks: TaskList, ranks: Ranks) -> None:
        pass


def _of_rows(seconds: Array, ratio: Any) -> Array:
    """Seconds of each unit, in a column where `ratio` has a number for each row."""
    return seconds[:, None] if np.ndim(ratio) and seconds.ndim == 1 else seconds


@rules_for(FSDP)
class FullyShardedDataParallel(Rules[FSDP]):
    """Ranks hold shards of everything and gather parameters unit by unit."""

    network_class = ShardedNetwork
    axes = (DP, DP_SHARD, DP_REPLICATE)
    expert_axes = (EXPERT_SHARD,)
    waits_for = "gathering parameters and reducing gradients"

    def __init__(self, graph: OpGraph, shape: StepShape, cache: Cache) -> None:
        super().__init__(graph, shape, cache)
        self.dtypes = self.strategy.shard_dtypes(graph.precision)
        dtypes, regathers = self.dtypes, self.strategy.reshard_after_forward
        self.passes: ShardedPasses = cache.get(
            "sharded passes",
            (graph,),
            lambda: ShardedPasses.of(
                graph, dtypes, regathers=regathers, columns=columns_of(graph, cache)
            ),
            *(dtypes, regathers),
        )

    @property
    def segments(self) -> int:
        passes = self.passes
        ends = len(passes.forward_ends) + len(passes.backward_ends)
        return ends + 2 * len(passes.gathered_bytes) + 1

    def lane(self, request: RankRequest, durations: Durations) -> RankLane:
        """One micro-batch, and the copies of all: each ends when its gradients are reduced."""
        count, passes = request.accumulation_steps, self.passes
        summed_s = (count - 1) * accumulate_s(request.trained, *request.machine)
        if not request.merging:
            if self.strategy.offload:
                summed_s += count * copies_of_one_rank_s(request.profile, passes)
            return RankLane(
                lanes=request.lanes(durations, count=count, host_s=durations.host_s),
                copies_s=summed_s,
                beside_s=summed_s,
                accumulate_s=summed_s,
            )
        host_s = durations.host_s + hook_seconds(request.bound, passes, request.profile)
        lanes = request.lanes(durations, count=1, host_s=host_s)
        out_s, in_s = unit_copies_s(passes, *request.machine)
        shares = self.strategy.gradient_sync
        copied_s = count * out_s[list(passes.gathered)].sum()
        copied_s += (count if shares else 1) * in_s[[0, *passes.reduced]].sum()
        summed = request.updated if shares else request.trained
        sums_s = np.array([(count - 1) * accumulate_s(summed, *request.machine)])
        beside_s = float(copied_s) + (0.0 if shares else summed_s)
        return RankLane(
            lanes=lanes,
            copies_s=beside_s,
            beside_s=beside_s,
            accumulate_s=summed_s,
            repeats=count,
            sums_shards=shares,
            segments_s=np.concatenate([segment_seconds(lanes, passes), out_s, in_s, sums_s]),
        )

    def holding(self, tensors: StepTensors, buckets: Sequence[Bucket], *, merging: bool) -> Holding:
        """Alone a rank holds no shards but those that are kept in another dtype or on the host."""
        if not (merging or self.strategy.param is not None or self.strategy.offload):
            return held_alone(tensors)
        ratio, micro_batches = self.dtypes.stored_ratio, self._micro_batches(tensors)
        if self.strategy.offload:
            micro_batches = [
                replace(micro_batch, gradient_shards=None) for micro_batch in micro_batches
            ]
            return Holding(parameters=Bytes(), micro_batches=micro_batches)
        held = optimizer_memory(tensors.graph, stored_ratio=ratio, sharded=True)
        return Holding(
            parameters=Bytes(0, tensors.parameters_bytes(ratio, sharded=True)),
            # In the update no gradient is whole any more.
            updated=Bytes(0, tensors.trained_bytes(ratio, sharded=True)),
            updates=(Update.of(held, sharded=True),),
            micro_batches=micro_batches,
        )

    def _micro_batches(self, tensors: StepTensors) -> list[MicroBatchMemory]:
        """As `fully_shard` issues its allocations (torch 2.13, _fully_shard/_fsdp_param_group.py
        and _fsdp_collectives.py).
        """
        units = _unit_bytes(tensors.graph)
        unlike = unlike_micro_batches(self.shape.accumulation_steps, self.strategy.gradient_sync)
        return [
            _held_units(tensors, units, micro_batch, self.dtypes, self.passes)
            for micro_batch in unlike
        ]

    def op_ends_s(
        self, lanes: MicroBatches, accumulate_s: float, segments_s: Array, scale: float
    ) -> Iterator[tuple[Array, Array]]:
        if not len(segments_s):
            yield from super().op_ends_s(lanes, accumulate_s, segments_s, scale)
            return
        count, began_s = self.shape.accumulation_steps, 0.0
        for number in listed(count):
            reducing = number == count - 1 or self.strategy.gradient_sync
            offsets_s, length_s = self._offsets_s(segments_s.tolist(), reducing=reducing)
            yield began_s + lanes.ends_s(0) * scale + offsets_s, lanes.device_s
            began_s += length_s

    def _offsets_s(self, segments_s: list[float], *, reducing: bool) -> tuple[Array, float]:
        """(what a rank computes before each op beside ops, all that it does in a micro-batch)."""
        nothing = np.zeros(len(self.passes.gathered_bytes))
        tasks = TaskList()
        micro = MicroBatch(
            tasks, self.passes, segments_s, UnitCosts(nothing, nothing, nothing), blocks=True
        )
        micro.add(reducing=reducing)
        ends = (*self.passes.forward_ends, *self.passes.backward_ends)
        offsets_s = np.zeros(ends[-1])
        first, beside_s, length_s = 0, 0.0, 0.0
        segments = iter(ends)
        for task in tasks.tasks:
            if task.lane != COMPUTE:
                continue
            length_s += task.cost_s
            if task.label in SEGMENTS:
                end = next(segments)
                offsets_s[first:end] = beside_s
                first = end
            else:
                beside_s += task.cost_s
        return offsets_s, length_s

    def assumptions(self) -> Iterator[str]:
        if self.strategy.offload:
            yield (
                "shards are kept and updated on the host, whose memory is not counted; each unit's "
                "is copied before its gather and after its reduction, not beside others"
            )
        if copied := autocast_bytes(self.graph):
            half = self.graph.precision.removesuffix("-amp")
            yield (
                f"autocast holds {format_bytes(copied)} of {half} copies of weights, which FSDP "
                f"does not shard: --precision {half} --strategy fsdp:param={half},reduce=fp32 "
                f"gathers {half} and keeps none"
            )


def _held_units(
    tensors: StepTensors,
    units: Mapping[str, int],
    micro: GradientsBefore,
    dtypes: ShardDtypes,
    passes: ShardedPasses,
) -> MicroBatchMemory:
    """A micro-batch of fully sharded units; `units` are the bytes that each of them gathers.

    Where none is gathered again, a unit is whole from its first forward to its last backward pass.
    """
    graph, ops, gradients = tensors.graph, tensors.ops, tensors.gradients
    gathered, buffers = Ledger(ops), Ledger(ops)
    forward, backward = [*passes.forward_runs], passes.backward_runs
    turn = int(np.append(tensors.structure.columns.is_forward, False).argmin())
    if "" in units:
        # The rest of the model is gathered once for both phases.
        gathered.hold(at(0, COPY_OUT), at(ops, RESHARD), units[""])
        forward.insert(0, UnitRun("", 0, 0))
    for first, last, path in _whole(forward, backward, regathers=passes.regathers):
        gathered.hold(at(first, COPY_OUT), at(last, RESHARD), units[path])
    # In the forward pass a buffer is kept until the next unit has been copied out.
    dropped = [*(at(run.first, DROP) for run in forward[1:]), at(turn, GATHER)]
    for run, end in zip(forward, dropped, strict=False):
        _gather(graph, buffers, at(run.first, GATHER), end, units[run.path])
    # In the backward pass the rest of the model prefetches the last unit, and each the one before.
    gathered_at = at(turn, GATHER) if "" in units else None
    for run in backward if passes.regathers else ():
        start = at(run.first, GATHER) if gathered_at is None else gathered_at
        _gather(graph, buffers, start, at(run.first, DROP), units[run.path])
        gathered_at = at(run.first, PREFETCH)
    ends = {path: [run.last for run in backward if run.path == path] for path in units}

    def released(gradient: Gradient) -> int:
        if not gradient.unit:
            return ops
        of_unit = ends.get(gradient.unit, [])
        return next((end for end in of_unit if end >= gradient.final), gradient.final)

    afters = [released(gradient) for gradient in gradients]
    reductions = _unit_reductions(gradients, afters, dtypes)
    ledgers = reduced(tensors, buffers, afters, reductions, micro, dtypes.reduced_ratio)
    return replace(ledgers, gathered=gathered.levels())


def _unit_reductions(
    gradients: Sequence[Gradient], afters: Sequence[int], dtypes: ShardDtypes
) -> list[Reduction]:
    """One of all gradients that go after the same op."""
    sizes: Counter[int] = Counter()
    kept: Counter[int] = Counter()
    for after, gradient in zip(afters, gradients, strict=True):
        sizes[after] += gradient.size_bytes
        kept[after] += gradient.size_bytes * gradient.parts
    return [
        Reduction(after, int(size * dtypes.reduced_ratio), kept[after] * dtypes.stored_ratio)
        for after, size in sorted(sizes.items())
    ]


def _whole(
    forward: Sequence[UnitRun], backward: Sequence[UnitRun], *, regathers: bool
) -> Iterator[tuple[int, int, str]]:
    """(first op, last op, unit) of the stretches in which a unit is whole, the rest's apart."""
    blocks = [run for run in (*forward, *backward) if run.path]
    if regathers:
        yield from ((run.first, run.last, run.path) for run in blocks)
        return
    for path in dict.fromkeys(run.path for run in blocks):
        own = [run for run in blocks if run.path == path]
        yield own[0].first, own[-1].last, path


def _gather(graph: OpGraph, buffers: Ledger, start: int, end: int, size_bytes: int) -> None:
    buffers.hold(start, end, size_bytes)
    if graph.target == "cpu":
        # gloo gathers into a buffer of its own (ProcessGroupGloo.cpp, torch 2.13).
        buffers.hold(start, start + 1, size_bytes)


def _unit_bytes(graph: OpGraph) -> dict[str, int]:
    """What FSDP gathers of every unit that has parameters, trained or not."""
    block = block_bytes(graph)
    units = Counter(frozen_unit_bytes(graph))
    for parameter in graph.parameters:
        units[parameter_unit(parameter)] += rounded_bytes(parameter.spec.nbytes, block)
    return {path: size for path, size in units.items() if size}
