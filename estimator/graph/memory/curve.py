"""Say what a rank holds during each operator of a step, by kind, and which tensors it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from estimator.elementwise import Flags, Sizes
from estimator.graph.ir.op_graph import BoundGraph
from estimator.graph.ir.structure import GraphStructure
from estimator.graph.memory.sizes import StorageSizes, block_bytes, rounded_bytes

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
    forward = np.append(structure.is_forward, False)
    return np.asarray(forward[np.maximum(structure.born, 0)] & ~forward[structure.dies])


def live_tensors(tensors: Iterable[LiveTensor], place: int) -> tuple[LiveTensor, ...]:
    """Those that are held during op `place`, the largest first.

    `place` may be the number of ops: the update.
    """
    alive = [tensor for tensor in tensors if tensor.born <= place <= tensor.dies]
    return tuple(sorted(alive, key=lambda tensor: (-tensor.size_bytes, tensor.born)))


def tensors_of(
    bound: BoundGraph, *, threads: int = 1, structure: GraphStructure | None = None
) -> tuple[LiveTensor, ...]:
    """Parameters, gradients and activations of a step.

    Optimizer state and buffers of collectives are not among them, nor what a strategy gathers or
    shards.
    """
    known = structure or GraphStructure.of(bound.graph)
    graph = bound.graph
    sizes = StorageSizes.of(bound, known, threads)
    saved = is_saved(known)
    block = block_bytes(graph)
    found = [
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
    for numbers, kind in ((sizes.activations, "activations"), (sizes.gradients, "gradients")):
        for number in numbers.tolist():
            born = int(known.born[number])
            op = graph.ops[born] if born >= 0 else None
            found.append(
                LiveTensor(
                    kind=_kind(kind, bool(saved[number])),
                    op=op.call.target if op else "",
                    module=op.module if op else "",
                    size_bytes=int(sizes.size_bytes[number]),
                    born=born,
                    dies=int(known.dies[number]),
                )
            )
    return tuple(found)


def _kind(kind: str, is_saved: bool) -> MemoryKind:
    if kind == "gradients":
        return "gradients"
    return "activations" if is_saved else "temporaries"


def by_module(tensors: Sequence[LiveTensor], depth: int = 2) -> dict[str, int]:
    """Bytes by the first `depth` names of a module's path, the most first.

    >>> by_module([], depth=1)
    {}
    """
    found: dict[str, int] = {}
    for tensor in tensors:
        path = module_path(tensor.module, depth)
        found[path] = found.get(path, 0) + tensor.size_bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def module_path(path: str, depth: int) -> str:
    """The first `depth` names of a module's path.

    >>> module_path("transformer.h.0.attn", 3), module_path("", 3)
    ('transformer.h.0', '(the model itself)')
    """
    return ".".join(path.split(".")[:depth]) or "(the model itself)"
