"""Say how much memory a rank holds at most during a step under each data-parallel strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from estimator.graph.memory import (
    PeakMemory,
    StorageSizes,
    peak_memory,
)
from estimator.graph.op_graph import BoundGraph, OpGraph
from estimator.graph.ops import Parameter
from estimator.graph.optimizer_memory import (
    OptimizerMemory,
    block_bytes,
    optimizer_memory,
    rounded_bytes,
    trained_tensors,
)
from estimator.graph.shard_play import (
    RAN,
    RUN,
    Gradient,
    Ledger,
    Levels,
    MicroBatch,
    Played,
    Reduction,
    at,
    op_at,
    play_fsdp,
    play_zero2,
)
from estimator.graph.sharded_memory import Envelope, ShardedMemory, upper_lines
from estimator.graph.shards import frozen_unit_bytes, parameter_unit
from estimator.graph.structure import GraphStructure
from estimator.workload import Strategy


def step_memory(
    bound: BoundGraph,
    *,
    optimizer: str,
    strategy: Strategy,
    merging: bool,
    buckets: Sequence[Reduction] = (),
    micro_batches: int = 1,
    threads: int = 1,
    structure: GraphStructure | None = None,
) -> ShardedMemory:
    """The peak memory of a rank's step, in steady state, by the number of shards.

    `merging` says whether there are other ranks to merge gradients with, in these `buckets`.
    Without the strategy's `gradient_sync` a sharded step with several micro-batches reduces
    gradients in the last one alone and holds them whole until then.
    `threads` are those that one rank has on a CPU, `structure` that of the graph where it is at
    hand.
    """
    known = structure or GraphStructure.of(bound.graph)
    if holds_shards(strategy, merging=merging):
        step = ShardedStep(bound, known, optimizer, threads, strategy)
        return step.memory(play_step(step, buckets, micro_batches=micro_batches))
    replicate = partial(
        peak_memory,
        bound,
        largest_bucket_bytes=max((each.size_bytes for each in buckets), default=0),
        threads=threads,
        structure=known,
    )
    if not merging or strategy.kind == "ddp":
        ranks = 2 if merging else 1
        return ShardedMemory.of_replica(
            replicate(optimizer=optimizer, strategy=strategy, ranks=ranks)
        )
    # A worker of parameter servers updates nothing, and plain SGD holds nothing.
    replica = replicate(optimizer="sgd", strategy=strategy, ranks=2)
    if strategy.kind == "ps":
        return ShardedMemory.of_replica(replica)
    master_ratio = strategy.master_ratio(bound.graph.precision)
    own = optimizer_memory(bound.graph, optimizer, master_ratio=master_ratio)
    if strategy.kind == "distributed-optimizer":
        # Its shares are cut through tensors, and even.
        own = own._replace(largest_state_bytes=0, largest_together_bytes=0)
    return _zero1_memory(replica, own)


def holds_shards(strategy: Strategy, *, merging: bool) -> bool:
    """Whether a rank holds shards of gradients, as under ZeRO-2, or of parameters too.

    Alone it holds none, but those that are kept in another dtype or on the host.
    """
    shards = merging or strategy.param is not None or strategy.offload
    return shards and strategy.kind in ("zero2", "fsdp")


def play_step(
    step: ShardedStep, buckets: Sequence[Reduction], *, micro_batches: int
) -> list[Played]:
    """What each micro-batch that may have the peak holds beside activations, ZeRO-2 or FSDP."""
    strategy = step.strategy
    passes = _micro_batches(micro_batches, strategy.gradient_sync)
    if strategy.kind == "zero2":
        ratio = step.dtypes.reduced_ratio
        sent = [Reduction(b.after, int(b.size_bytes * ratio), b.size_bytes) for b in buckets]
        return [play_zero2(step.graph, sent, step.gradients, each) for each in passes]
    units, regathers = _unit_bytes(step.graph), strategy.reshard_after_forward
    played = [
        play_fsdp(step.graph, units, step.gradients, each, step.dtypes, regathers=regathers)
        for each in passes
    ]
    if strategy.offload:
        return [replace(p, gradient_shards=np.zeros_like(p.gradient_shards)) for p in played]
    return played


def _micro_batches(micro_batches: int, gradient_sync: bool) -> list[MicroBatch]:
    """The micro-batches of a step, among which is the one with the peak."""
    if micro_batches == 1:
        return [MicroBatch("nothing", reduces=True)]
    if gradient_sync:
        return [MicroBatch("shards", reduces=True)]
    before = MicroBatch("whole" if micro_batches > 2 else "nothing", reduces=False)
    return [before, MicroBatch("whole", reduces=True)]


def _zero1_memory(replica: PeakMemory, own: OptimizerMemory) -> ShardedMemory:
    """DDP's memory with a share of the optimizer; `replica` is that of a rank without any
    and `own` what all of it holds.

    ZeroRedundancyOptimizer gives whole tensors to ranks, the largest first, each to the rank that
    has the least so far (torch/distributed/optim/zero_redundancy_optimizer.py, torch 2.13). Some
    rank has no less than an even share, and one has the largest tensor; of many tensors the fullest
    rank has little more than that.
    """
    states = [(0, own.state_bytes), (own.largest_state_bytes, 0)]
    # A loop has the temporaries of one tensor at a time, on some rank those of the largest one.
    single = own.single_bytes
    updates = [(single, own.together_bytes), (single + own.largest_together_bytes, 0)]
    in_update = replica.parameters_bytes + replica.buffers_bytes + replica.inputs_bytes
    in_update += replica.gradients_bytes + replica.bucket_bytes
    lines: list[tuple[int, int]] = []
    for state, update in zip(states, updates, strict=True):
        lines.append((replica.total_bytes + state[0], state[1]))
        lines.append((in_update + state[0] + update[0], state[1] + update[1]))
    peaks = (replica.peak_op, None) * 2
    upper = upper_lines(lines)
    return replace(
        ShardedMemory.of_replica(replica),
        replica=None,
        total=Envelope(tuple(lines[index] for index in upper)),
        peak_ops=tuple(peaks[index] for index in upper),
        optimizer_state=Envelope.through(states),
        update=Envelope.through(updates),
    )


def _unit_bytes(graph: OpGraph) -> dict[str, int]:
    """What FSDP gathers of every unit that has parameters, trained or not."""
    block = block_bytes(graph)
    units = Counter(frozen_unit_bytes(graph))
    for parameter in graph.parameters:
        units[parameter_unit(parameter)] += rounded_bytes(parameter.spec.nbytes, block)
    return {path: size for path, size in units.items() if size}


class ShardedStep:
    """What a step under ZeRO-2 or FSDP holds beside what is played of it; everything in bytes.

    Of parameters, gradients and the optimizer it is that of all shards; none of it is on the device
    where they are offloaded.
    """

    def __init__(
        self,
        bound: BoundGraph,
        structure: GraphStructure,
        optimizer: str,
        threads: int,
        strategy: Strategy,
    ) -> None:
        graph = self.graph = bound.graph
        self.ops, self.strategy = len(graph.ops), strategy
        dtypes = self.dtypes = strategy.shard_dtypes(graph.precision)
        shards = strategy.kind == "fsdp"
        trained = trained_tensors(graph, dtypes.stored_ratio, sharded=shards)
        self.trained_bytes = sum(tensor.size_bytes for tensor in trained)
        held = optimizer_memory(
            graph,
            optimizer,
            stored_ratio=dtypes.stored_ratio,
            master_ratio=strategy.master_ratio(graph.precision),
            sharded=shards,
        )
        self.state_bytes, self.update_bytes = held.state_bytes, held.update_bytes
        block = block_bytes(graph)
        self.parameters_bytes = dtypes.stored_ratio * (
            graph.frozen_parameter_bytes
            + sum(
                rounded_bytes(parameter.spec.nbytes, block)
                * (parameter.sharded_parts if shards else 1)
                for parameter in graph.parameters
            )
        )
        if strategy.offload:
            self.parameters_bytes = self.state_bytes = self.trained_bytes = self.update_bytes = 0
        sizes = StorageSizes.of(bound, structure, threads)
        self.inputs_bytes = sizes.inputs_bytes
        self.buffers_bytes = graph.buffer_bytes + sizes.constants_bytes
        self.gradients = list(_gradients(structure, sizes))
        activations = Ledger(self.ops)
        own, every = sizes.activations, np.arange(self.ops)
        activations.hold_each(
            at(structure.born[own], RUN), at(structure.dies[own], RAN), sizes.size_bytes[own]
        )
        activations.hold_each(at(every, RUN), at(every, RAN), sizes.workspaces)
        self.activations = activations.levels()

    def memory(self, played: Sequence[Played]) -> ShardedMemory:
        """The peak over micro-batches and the update."""
        fixed, sharded = self.inputs_bytes + self.buffers_bytes, self.state_bytes
        whole = self.strategy.kind == "zero2"
        parameters = (self.parameters_bytes, 0) if whole else (0, self.parameters_bytes)
        fixed, sharded = fixed + parameters[0], sharded + parameters[1]
        # In the update no gradient is whole any more.
        updating = self.trained_bytes + self.update_bytes
        places: list[int | None] = [None]
        lines, gradients = [(fixed, sharded + updating)], [(0, self.trained_bytes)]
        for each in played:
            held = each.gathered + each.buffers + each.gradients + self.activations
            for place in _highest(held, each.gradient_shards):
                places.append(op_at(place, self.ops))
                level = fixed + int(held[place]), sharded + int(each.gradient_shards[place])
                lines.append(level)
            gradients += [
                (int(each.gradients[place]), int(each.gradient_shards[place]))
                for place in _highest(each.gradients, each.gradient_shards)
            ]
        upper = upper_lines(lines)
        gathered = max(_most(each.gathered) for each in played)
        return ShardedMemory(
            total=Envelope(tuple(lines[index] for index in upper)),
            peak_ops=tuple(places[index] for index in upper),
            parameters=Envelope(((parameters[0] + gathered, parameters[1]),)),
            gradients=Envelope.through(gradients),
            optimizer_state=Envelope(((0, self.state_bytes),)),
            buckets=Envelope(((max(_most(each.buffers) for each in played), 0),)),
            update=Envelope(((0, self.update_bytes),)),
            buffers_bytes=self.buffers_bytes,
            inputs_bytes=self.inputs_bytes,
            activations_bytes=_most(self.activations),
        )


def _gradients(structure: GraphStructure, sizes: StorageSizes) -> Iterator[Gradient]:
    """The storages of gradients: until when each is made, and for which unit."""
    graph = structure.graph
    of_gradient = {p.gradient: p for p in graph.parameters if p.gradient is not None}
    owners_of: dict[int, list[Parameter]] = {}
    for value, parameter in sorted(of_gradient.items()):
        owners_of.setdefault(int(structure.storage_of[value]), []).append(parameter)
    for number in sizes.gradients.tolist():
        owners = owners_of[number]
        ready = [len(graph.ops) - 1 if p.ready_after is None else p.ready_after for p in owners]
        size, born = int(sizes.size_bytes[number]), int(structure.born[number])
        unit, parts = parameter_unit(owners[0]), owners[0].sharded_parts
        yield Gradient(born, max(ready), size, unit, parts)


def _most(levels: Levels) -> int:
    return int(levels.max(initial=0))


def _highest(fixed: Levels, sharded: Levels) -> list[int]:
    """Where most is held, once for every stretch of time in which the sharded part is constant."""
    bounds = [0, *(np.flatnonzero(np.diff(sharded)) + 1).tolist(), len(sharded)]
    return [start + int(fixed[start:end].argmax()) for start, end in pairwise(bounds)]
