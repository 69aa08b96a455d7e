"""Play what FSDP and ZeRO-2 hold beside activations during one micro-batch, instant by instant.

FSDP is played as `torch.distributed.fsdp.fully_shard` issues its allocations (torch 2.13,
_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py). What is allocated follows the order in
which the host issues, not what the device has finished: the same on CPUs and on GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from estimator.graph.op_graph import OpGraph
from estimator.graph.shards import UnitRun, unit_runs
from estimator.workload import ShardDtypes

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


class MicroBatch(NamedTuple):
    """Which gradients there are before a micro-batch, and whether it reduces its own."""

    held: Literal["nothing", "shards", "whole"]
    reduces: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What a rank holds at every instant; `gradient_shards` of all ranks together."""

    gathered: Levels
    buffers: Levels
    gradients: Levels
    gradient_shards: Levels


def play_fsdp(
    graph: OpGraph,
    units: Mapping[str, int],
    gradients: Sequence[Gradient],
    micro: MicroBatch,
    dtypes: ShardDtypes = _AS_THEY_ARE,
    *,
    regathers: bool = True,
) -> Played:
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
    return Played(
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
    graph: OpGraph, buckets: Sequence[Reduction], gradients: Sequence[Gradient], micro: MicroBatch
) -> Played:
    """A micro-batch whose gradients are reduce-scattered bucket by bucket."""
    ops = len(graph.ops)
    buffers = Ledger(ops)
    afters = [
        next((bucket.after for bucket in buckets if bucket.after >= gradient.final), ops)
        for gradient in gradients
    ]
    whole, shards = _reduce(graph, buffers, gradients, afters, buckets, micro)
    return Played(
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
    micro: MicroBatch,
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
