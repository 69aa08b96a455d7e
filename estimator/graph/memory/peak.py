"""Views of what a rank holds: the peak for any number of shards, each op's level, its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, NamedTuple, TypeVar, get_args

import numpy as np

from estimator.elementwise import Flags, Sizes
from estimator.graph.ir.op_graph import BoundGraph
from estimator.graph.ir.structure import GraphStructure
from estimator.graph.memory.sizes import StepTensors, block_bytes, rounded_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """The most memory that live tensors of one rank take during a step, and its parts.

    Each part is that part's own maximum; `total_bytes` is the maximum over time of their sum, which
    is less: gradients grow while activations shrink. `activations_bytes` is the most that
    activations, temporaries of the graph and workspaces of its operators hold at once.
    `bucket_bytes` are DDP's buckets, or the buffers of a sharded step's collectives.
    `update_bytes` is what the optimizer needs beyond its state while it updates. `peak_op` is the
    op at which the total is reached (None: during the update).
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    bucket_bytes: int
    buffers_bytes: int
    inputs_bytes: int
    activations_bytes: int
    update_bytes: int
    total_bytes: int
    peak_op: int | None


# A number of shards, or one for each of some cases.
Shards = TypeVar("Shards", int, Sizes)


class Bytes(NamedTuple):
    """Bytes of a rank: what it holds whole, and what it holds one shard of."""

    whole: int = 0
    sharded: int = 0

    def at(self, shards: Shards) -> Shards:
        """All that a rank holds of it, the shard rounded up.

        >>> Bytes(100, 10).at(4)
        103
        """
        return self.whole - (-self.sharded // shards)


@dataclass(frozen=True, slots=True)
class Envelope:
    """The most that a rank holds over some instants, for any number of shards.

    At each instant a rank holds fixed bytes and sharded bytes / shards: a line in 1 / shards.
    `lines` are those of the instants that are the largest for some number of shards from 1 on, the
    one for the most shards first.
    """

    lines: tuple[Bytes, ...]

    @classmethod
    def through(cls, lines: Sequence[tuple[int, int]]) -> Envelope:
        """The envelope of any lines, at least one.

        >>> [tuple(line) for line in Envelope.through([(0, 80), (50, 20), (40, 10), (60, 0)]).lines]
        [(60, 0), (50, 20), (0, 80)]
        """
        return cls(tuple(Bytes(*lines[index]) for index in upper_lines(lines)))

    def at(self, shards: Shards) -> Shards:
        """Bytes of a rank at a number of shards, or at each of an array."""
        levels = [line.at(shards) for line in self.lines]
        return reduce(np.maximum, levels) if isinstance(shards, np.ndarray) else max(levels)


def upper_lines(lines: Sequence[tuple[int, int]]) -> list[int]:
    """Indices of the lines (at 0, slope) that are above all others somewhere between 0 and 1.

    They stand in the order in which they are the highest, from 0 on.
    """
    kept: list[int] = []
    for index in sorted(range(len(lines)), key=lambda i: (-lines[i][0], -lines[i][1])):
        at_zero, slope = lines[index]
        if kept and slope <= lines[kept[-1]][1]:
            continue
        while len(kept) > 1:
            (first, low), (middle, mid) = (lines[number] for number in kept[-2:])
            # Where the new line passes the first of them, the one between is not above it yet.
            if (first - at_zero) * (mid - low) > (first - middle) * (slope - low):
                break
            kept.pop()
        # It is passed at 1 at the earliest by the time it would matter.
        if not kept or at_zero + slope > sum(lines[kept[-1]]):
            kept.append(index)
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedMemory:
    """`PeakMemory` of a rank for any number of shards; `peak_ops` belong to the lines of `total`.

    `passes` is the most that is held before the update.
    Shards are taken to be even. FSDP2 cuts a tensor along its first dimension and pads: a rank's
    shard may have up to a row of each tensor more.
    """

    total: Envelope
    peak_ops: tuple[int | None, ...]
    passes: Envelope
    parameters: Envelope
    gradients: Envelope
    optimizer_state: Envelope
    buckets: Envelope
    update: Envelope
    buffers_bytes: int
    inputs_bytes: int
    activations_bytes: int

    def total_bytes(self, shards: Shards) -> Shards:
        """Bytes at the peak where that many ranks share what is sharded."""
        return self.total.at(shards)

    def peak(self, shards: int) -> PeakMemory:
        """The peak and its parts, each at its own maximum, where `shards` ranks share."""
        levels = [line.at(shards) for line in self.total.lines]
        total = max(levels)
        return PeakMemory(
            parameters_bytes=self.parameters.at(shards),
            gradients_bytes=self.gradients.at(shards),
            optimizer_state_bytes=self.optimizer_state.at(shards),
            bucket_bytes=self.buckets.at(shards),
            buffers_bytes=self.buffers_bytes,
            inputs_bytes=self.inputs_bytes,
            activations_bytes=self.activations_bytes,
            update_bytes=self.update.at(shards),
            total_bytes=total,
            peak_op=self.peak_ops[levels.index(total)],
        )


MemoryKind = Literal[
    "parameters",
    "gradients",
    "optimizer state",
    "buffers and inputs",
    "activations",
    "temporaries",
    "communication buffers",
]
KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryCurve:
    """Bytes that live tensors of one rank take during each op, by kind; the last is the update.

    `activations` are what the forward pass leaves for the backward pass; `temporaries` everything
    else that operators make, hold inside themselves or need to update parameters.
    """

    levels: Mapping[MemoryKind, Sizes]

    @property
    def total(self) -> Sizes:
        """All kinds together."""
        return np.asarray(sum(self.levels.values()))

    @property
    def peak_bytes(self) -> int:
        return int(self.total.max())

    @property
    def peak_at(self) -> int:
        """The op with the peak; the number of ops where that is the update."""
        return int(self.total.argmax())

    def at(self, place: int) -> dict[MemoryKind, int]:
        """Bytes of each kind during an op."""
        return {kind: int(levels[place]) for kind, levels in self.levels.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """One piece of memory held at some op: what made it, where in the model, and until when.

    `born` is -1 for what is there before the step; `op` is then empty.
    """

    kind: MemoryKind
    op: str
    module: str
    size_bytes: int
    born: int
    dies: int


def is_saved(structure: GraphStructure) -> Flags:
    """Which storages are made in the forward pass and used in the backward pass."""
    forward = np.append(structure.columns.is_forward, False)
    return np.asarray(forward[np.maximum(structure.born, 0)] & ~forward[structure.dies])


def live_tensors(tensors: Iterable[LiveTensor], place: int) -> tuple[LiveTensor, ...]:
    """Those that are held during op `place`, the largest first.

    `place` may be the number of ops: the update.
    """
    alive = [tensor for tensor in tensors if tensor.born <= place <= tensor.dies]
    return tuple(sorted(alive, key=lambda tensor: (-tensor.size_bytes, tensor.born)))


def tensors_of(bound: BoundGraph) -> tuple[LiveTensor, ...]:
    """Parameters, gradients and activations of a step.

    Optimizer state and buffers of collectives are not among them, nor what a strategy gathers or
    shards.
    """
    graph, structure = bound.graph, GraphStructure.of(bound.graph)
    held, saved, block = StepTensors(bound, structure), is_saved(structure), block_bytes(graph)
    tensors = [
        LiveTensor(
            kind="parameters",
            op="",
            module=parameter.name.rpartition(".")[0],
            size_bytes=rounded_bytes(parameter.spec.nbytes, block),
            born=-1,
            dies=len(graph.ops),
        )
        for parameter in graph.parameters
    ]
    for number in (*held.activations.tolist(), *held.gradient_storages.tolist()):
        kind: MemoryKind = "activations" if saved[number] else "temporaries"
        born = int(structure.born[number])
        op = graph.ops[born] if born >= 0 else None
        tensors.append(
            LiveTensor(
                kind="gradients" if structure.kinds[number] == "gradient" else kind,
                op=op.call.target if op else "",
                module=op.module if op else "",
                size_bytes=int(held.size_bytes[number]),
                born=born,
                dies=int(structure.dies[number]),
            )
        )
    return tuple(tensors)


def by_module(tensors: Sequence[LiveTensor], depth: int = 2) -> dict[str, int]:
    """Bytes by the first `depth` names of a module's path, the most first.

    >>> by_module([], depth=1)
    {}
    """
    totals: Counter[str] = Counter()
    for tensor in tensors:
        totals[module_path(tensor.module, depth)] += tensor.size_bytes
    return dict(totals.most_common())


def module_path(path: str, depth: int) -> str:
    """The first `depth` names of a module's path.

    >>> module_path("transformer.h.0.attn", 3), module_path("", 3)
    ('transformer.h.0', '(the model itself)')
    """
    return ".".join(path.split(".")[:depth]) or "(the model itself)"
