"""Say how much memory a rank holds at most during a step under each data-parallel strategy.

FSDP is played as `torch.distributed.fsdp.fully_shard` issues its allocations (torch 2.13,
_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py). What is allocated follows the order in
which the host issues, not what the device has finished: the same on CPUs and on GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from estimator.graph.ir.op_graph import BoundGraph, OpGraph
from estimator.graph.ir.ops import Parameter
from estimator.graph.ir.shards import UnitRun, frozen_unit_bytes, parameter_unit, unit_runs
from estimator.graph.ir.structure import GraphStructure
from estimator.graph.memory.peak import (
    Envelope,
    OptimizerMemory,
    PeakMemory,
    ShardedMemory,
    StorageSizes,
    block_bytes,
    optimizer_memory,
    peak_memory,
    rounded_bytes,
    trained_tensors,
    upper_lines,
)
from estimator.workload import ShardDtypes, Strategy

Levels = NDArray[np.int64]
Places = NDArray[np.intp]

_AS_THEY_ARE = ShardDtypes()

# The instants around an op, in the order of issue. Before it FSDP allocates the buffer of an
# all-gather, allocates the whole parameters and copies them out, drops a buffer (in the forward
# pass that of the unit before, in the backward pass this one's), and prefetches the unit that comes
# next in the backward pass. After it, it frees the parameters and the input of the reduce-scatter
# before, allocates the next one and copies the gradients in, and replaces them by their shard.
GATHER, COPY_OUT, DROP, PREFETCH, RUN, RAN, RESHARD, COPY_IN, REDUCE = range(9)
_INSTANTS = 9


@overload
def at(op: int, instant: int) -> int: ...
@overload
def at(op: Places, instant: int) -> Places: ...
def at(op: int | Places, instant: int) -> int | Places:
    """The place of an instant around an op in the levels of a step."""
    return op * _INSTANTS + instant


def op_at(place: int, ops: int) -> int:
    """The op around which a place lies; after the last of them, the last one."""
    return min(place // _INSTANTS, ops - 1)


class Ledger:
    """Bytes held at every instant of a micro-batch, from intervals."""

    def __init__(self, ops: int) -> None:
        self.end = (ops + 1) * _INSTANTS
        self._changes: Levels = np.zeros(self.end + 1, dtype=np.int64)

    def hold(self, start: int, end: int, size_bytes: int) -> None:
        """Hold `size_bytes` from the instant `start` until just before `end`."""
        self._changes[start] += size_bytes
        self._changes[end] -= size_bytes

    def hold_each(self, starts: Places, ends: Places, sizes_bytes: Levels) -> None:
        """The same for several."""
        np.add.at(self._changes, starts, sizes_bytes)
        np.subtract.at(self._changes, ends, sizes_bytes)

    def levels(self) -> Levels:
        """What is held at each instant."""
        return np.cumsum(self._changes[:-1])


class Gradient(NamedTuple):
    """A storage of gradients: the op that makes it, the one after which it is final, its unit.

    The ranks that FSDP shards over have `parts` unlike ones.
    """

    born: int
    final: int
    size_bytes: int
    unit: str
    parts: int = 1


class Reduction(NamedTuple):
    """Gradients that one reduce-scatter carries, issued once op `after` has run.

    `after` is the number of ops where it follows the whole backward pass. Of the buffer's
    `size_bytes` all ranks together keep `shard_bytes`, None: as many.
    """

    after: int
    size_bytes: int
    shard_bytes: int | None = None

    @property
    def kept_bytes(self) -> int:
        """Bytes of all ranks' shards together."""
        return self.size_bytes if self.shard_bytes is None else self.shard_bytes


class MicroBatchGradients(NamedTuple):
    """Which gradients there are before a micro-batch, and whether it reduces its own."""

    held: Literal["nothing", "shards", "whole"]
    reduces: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOverStep:
    """What a rank holds at every instant; `gradient_shards` of all ranks together."""

    gathered: Levels
    buffers: Levels
    gradients: Levels
    gradient_shards: Levels


def play_fsdp(
    graph: OpGraph,
    units: Mapping[str, int],
    gradients: Sequence[Gradient],
    micro: MicroBatchGradients,
    dtypes: ShardDtypes = _AS_THEY_ARE,
    *,
    regathers: bool = True,
) -> MemoryOverStep:
    """A micro-batch of fully sharded units; `units` are the bytes that each of them gathers.

    Unless it `regathers`, a unit is whole from its first forward to its last backward pass.
    """
    ops = len(graph.ops)
    gathered, buffers = Ledger(ops), Ledger(ops)
    blocks = {path for path in units if path}
    forward, backward = (unit_runs(graph, blocks, phase) for phase in ("forward", "backward"))
    turn = next((i for i, op in enumerate(graph.ops) if op.phase == "backward"), ops)
    if "" in units:
        # The rest of the model is gathered once for both phases.
        gathered.hold(at(0, COPY_OUT), at(ops, RESHARD), units[""])
        forward.insert(0, UnitRun("", 0, 0))
    for first, last, path in _whole(forward, backward, regathers=regathers):
        gathered.hold(at(first, COPY_OUT), at(last, RESHARD), units[path])
    # In the forward pass a buffer is kept until the next unit has been copied out.
    dropped = [*(at(run.first, DROP) for run in forward[1:]), at(turn, GATHER)]
    for run, end in zip(forward, dropped, strict=False):
        _gather(graph, buffers, at(run.first, GATHER), end, units[run.path])
    # In the backward pass the rest of the model prefetches the last unit, and each the one before.
    asked = at(turn, GATHER) if "" in units else None
    for run in backward if regathers else ():
        start = at(run.first, GATHER) if asked is None else asked
        _gather(graph, buffers, start, at(run.first, DROP), units[run.path])
        asked = at(run.first, PREFETCH)
    ends = {path: [run.last for run in backward if run.path == path] for path in blocks}

    def released(gradient: Gradient) -> int:
        if not gradient.unit:
            return ops
        of_unit = ends.get(gradient.unit, [])
        return next((end for end in of_unit if end >= gradient.final), gradient.final)

    afters = [released(gradient) for gradient in gradients]
    reductions = _unit_reductions(gradients, afters, dtypes)
    whole, shards = _reduce(
        graph, buffers, gradients, afters, reductions, micro, dtypes.reduced_ratio
    )
    return MemoryOverStep(
        gathered=gathered.levels(),
        buffers=buffers.levels(),
        gradients=whole,
        gradient_shards=shards,
    )


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


def play_zero2(
    graph: OpGraph,
    buckets: Sequence[Reduction],
    gradients: Sequence[Gradient],
    micro: MicroBatchGradients,
) -> MemoryOverStep:
    """A micro-batch whose gradients are reduce-scattered bucket by bucket."""
    ops = len(graph.ops)
    buffers = Ledger(ops)
    afters = [
        next((bucket.after for bucket in buckets if bucket.after >= gradient.final), ops)
        for gradient in gradients
    ]
    whole, shards = _reduce(graph, buffers, gradients, afters, buckets, micro)
    return MemoryOverStep(
        gathered=Ledger(ops).levels(),
        buffers=buffers.levels(),
        gradients=whole,
        gradient_shards=shards,
    )


def _gather(graph: OpGraph, buffers: Ledger, start: int, end: int, size_bytes: int) -> None:
    buffers.hold(start, end, size_bytes)
    if graph.target == "cpu":
        # gloo gathers into a buffer of its own (ProcessGroupGloo.cpp, torch 2.13).
        buffers.hold(start, start + 1, size_bytes)


def _reduce(
    graph: OpGraph,
    buffers: Ledger,
    gradients: Sequence[Gradient],
    afters: Sequence[int],
    reductions: Sequence[Reduction],
    micro: MicroBatchGradients,
    reduced_ratio: float = 1.0,
) -> tuple[Levels, Levels]:
    """Whole gradients and gradient shards; gradient k goes after op `afters[k]`.

    Gradients that are kept whole are added up in the dtype of the reduction, in which an element
    takes `reduced_ratio` times as many bytes.
    """
    whole, shards = Ledger(len(graph.ops)), Ledger(len(graph.ops))
    for gradient, after in zip(gradients, afters, strict=True):
        size, kept = gradient.size_bytes, int(gradient.size_bytes * reduced_ratio)
        gone = at(after, REDUCE) if micro.reduces else whole.end
        if micro.held == "whole":
            whole.hold(0, gone, kept)
            # In one dtype added in place as it is made, else when its unit has them all.
            gone = at(gradient.final, RAN) if kept == size else at(after, RESHARD)
        elif not micro.reduces and kept != size:
            whole.hold(at(after, RAN), gone, kept)
            gone = at(after, RESHARD)
        whole.hold(at(gradient.born, RUN), gone, size)
    if micro.held == "shards":
        shards.hold(0, shards.end, sum(each.kept_bytes for each in reductions))
    if not micro.reduces:
        return whole.levels(), shards.levels()
    # One reduce-scatter is in flight: its input is freed when the next one's is allocated.
    freed = [*(at(each.after, RESHARD) for each in reductions[1:]), buffers.end]
    for reduction, end in zip(reductions, freed, strict=False):
        after, size = reduction.after, reduction.size_bytes
        if (start := at(after, COPY_IN)) < end:
            buffers.hold(start, end, size)
        if graph.target == "cpu":
            # gloo reduces a copy of its input (ProcessGroupGloo.cpp, torch 2.13).
            buffers.hold(at(after, REDUCE), at(after, REDUCE) + 1, size)
        if micro.held != "shards":
            shards.hold(at(after, REDUCE), shards.end, reduction.kept_bytes)
    return whole.levels(), shards.levels()


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
    if not merging or strategy.keeps.state == "whole":
        ranks = 2 if merging else 1
        return ShardedMemory.of_replica(
            replicate(optimizer=optimizer, strategy=strategy, ranks=ranks)
        )
    # A worker of parameter servers updates nothing, and plain SGD without master weights holds
    # nothing.
    replica = replicate(optimizer="sgd", strategy=replace(strategy, master=False), ranks=2)
    if strategy.keeps.state == "servers":
        return ShardedMemory.of_replica(replica)
    master_ratio = strategy.master_ratio(bound.graph.precision)
    own = optimizer_memory(bound.graph, optimizer, master_ratio=master_ratio)
    if strategy.cuts_tensors:
        # Such shares are even.
        own = own._replace(largest_state_bytes=0, largest_together_bytes=0)
    return _zero1_memory(replica, own)


def holds_shards(strategy: Strategy, *, merging: bool) -> bool:
    """Whether a rank holds shards of gradients, as under ZeRO-2, or of parameters too.

    Alone it holds none, but those that are kept in another dtype or on the host.
    """
    shards = merging or strategy.param is not None or strategy.offload
    return shards and strategy.keeps.gradients == "shard"


def play_step(
    step: ShardedStep, buckets: Sequence[Reduction], *, micro_batches: int
) -> list[MemoryOverStep]:
    """What each micro-batch that may have the peak holds beside activations, ZeRO-2 or FSDP."""
    strategy = step.strategy
    passes = _micro_batches(micro_batches, strategy.gradient_sync)
    if strategy.keeps.parameters == "whole":
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


def _micro_batches(micro_batches: int, gradient_sync: bool) -> list[MicroBatchGradients]:
    """The micro-batches of a step, among which is the one with the peak."""
    if micro_batches == 1:
        return [MicroBatchGradients("nothing", reduces=True)]
    if gradient_sync:
        return [MicroBatchGradients("shards", reduces=True)]
    before = MicroBatchGradients("whole" if micro_batches > 2 else "nothing", reduces=False)
    return [before, MicroBatchGradients("whole", reduces=True)]


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
        shards = strategy.keeps.parameters == "shard"
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

    def memory(self, played: Sequence[MemoryOverStep]) -> ShardedMemory:
        """The peak over micro-batches and the update."""
        fixed, sharded = self.inputs_bytes + self.buffers_bytes, self.state_bytes
        whole = self.strategy.keeps.parameters == "whole"
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
