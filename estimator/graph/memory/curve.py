"""Say what a rank holds during each operator of a step, by kind, and which tensors it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from estimator.graph.ir.op_graph import BoundGraph
from estimator.graph.ir.structure import GraphStructure
from estimator.graph.memory.peak import StorageSizes, peak_memory, rounded_bytes
from estimator.graph.memory.peak import block_bytes as block_of
from estimator.graph.memory.step import (
    Reduction,
    ShardedStep,
    at,
    holds_shards,
    play_step,
    step_memory,
)
from estimator.workload import Strategy

Sizes = NDArray[np.int64]

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


def memory_curve(
    bound: BoundGraph,
    *,
    optimizer: str,
    strategy: Strategy,
    merging: bool,
    shards: int = 1,
    buckets: Sequence[Reduction] = (),
    micro_batches: int = 1,
    threads: int = 1,
    structure: GraphStructure | None = None,
) -> MemoryCurve:
    """What `step_memory` takes the maximum of; `shards` is over how many ranks is divided.

    With several micro-batches it is that with the peak.
    """
    known = structure or GraphStructure.of(bound.graph)
    asked = bound, known, optimizer, strategy, shards, buckets
    if holds_shards(strategy, merging=merging):
        return _sharded_curve(*asked, micro_batches, threads)
    return _replica_curve(*asked, merging, threads)


def _replica_curve(
    bound: BoundGraph,
    structure: GraphStructure,
    optimizer: str,
    strategy: Strategy,
    shards: int,
    buckets: Sequence[Reduction],
    merging: bool,
    threads: int,
) -> MemoryCurve:
    """Of a rank that holds whole parameters and gradients."""
    own = optimizer if not merging or strategy.keeps.state == "whole" else "sgd"
    ranks = 2 if merging else 1
    replica = peak_memory(
        bound,
        optimizer=own,
        strategy=strategy,
        ranks=ranks,
        largest_bucket_bytes=max((each.size_bytes for each in buckets), default=0),
        threads=threads,
        structure=structure,
    )
    in_buckets = merging and strategy.holds_gradients_in_buckets
    state, update = replica.optimizer_state_bytes, replica.update_bytes
    if merging and strategy.keeps.state == "shard":
        share = step_memory(
            bound,
            optimizer=optimizer,
            strategy=strategy,
            merging=True,
            buckets=buckets,
            threads=threads,
            structure=structure,
        ).peak(shards)
        state, update = share.optimizer_state_bytes, share.update_bytes
    sizes = StorageSizes.of(bound, structure, threads)
    saved, temporary = _activation_levels(structure, sizes)
    gradients = _held(structure, sizes, sizes.gradients, structure.dies)
    if in_buckets:
        # Each is copied into its bucket when it is final, and released.
        temporary = temporary + _held(structure, sizes, sizes.gradients, structure.ready)
        gradients = np.full(len(saved), replica.gradients_bytes, dtype=np.int64)
    after = replica.gradients_bytes
    return MemoryCurve(
        levels={
            "parameters": _constant(saved, replica.parameters_bytes),
            "gradients": np.append(gradients, after),
            "optimizer state": _constant(saved, state),
            "buffers and inputs": _constant(saved, replica.buffers_bytes + replica.inputs_bytes),
            "activations": np.append(saved, 0),
            "temporaries": np.append(temporary, update),
            "communication buffers": _constant(saved, replica.bucket_bytes),
        }
    )


def _sharded_curve(
    bound: BoundGraph,
    structure: GraphStructure,
    optimizer: str,
    strategy: Strategy,
    shards: int,
    buckets: Sequence[Reduction],
    micro_batches: int,
    threads: int,
) -> MemoryCurve:
    """Of ZeRO-2 or FSDP: at each op the instant around it at which most is held."""
    step = ShardedStep(bound, structure, optimizer, threads, strategy)
    shares = strategy.keeps.parameters == "shard"
    own = -(-step.parameters_bytes // shards) if shares else step.parameters_bytes
    state = -(-step.state_bytes // shards)
    updating = [-(-size // shards) for size in (step.trained_bytes, step.update_bytes)]
    saved, temporary = _activation_levels(structure, StorageSizes.of(bound, structure, threads))
    best: MemoryCurve | None = None
    for played in play_step(step, buckets, micro_batches=micro_batches):
        gradients = played.gradients - (-played.gradient_shards // shards)
        rows = played.gathered + played.buffers + gradients + step.activations
        places = _highest_instants(rows, step.ops)
        # Before an op its own outputs are not there yet.
        over = step.activations[places] - saved
        kept = np.minimum(saved, step.activations[places])
        curve = MemoryCurve(
            levels={
                "parameters": np.append(own + played.gathered[places], own),
                "gradients": np.append(gradients[places], updating[0]),
                "optimizer state": _constant(temporary, state),
                "buffers and inputs": _constant(temporary, step.buffers_bytes + step.inputs_bytes),
                "activations": np.append(kept, 0),
                "temporaries": np.append(np.maximum(over, 0), updating[1]),
                "communication buffers": np.append(played.buffers[places], 0),
            }
        )
        if best is None or curve.peak_bytes > best.peak_bytes:
            best = curve
    assert best is not None
    return best


def _highest_instants(levels: Sizes, ops: int) -> NDArray[np.intp]:
    per_op = at(1, 0) - at(0, 0)
    rows = levels[: ops * per_op].reshape(ops, per_op)
    places = np.arange(ops) * per_op + rows.argmax(axis=1)
    # What follows the last op belongs to it.
    tail = levels[(ops - 1) * per_op :]
    places[-1] = (ops - 1) * per_op + int(tail.argmax())
    return places


def _constant(like: Sizes, size_bytes: int) -> Sizes:
    return np.full(len(like) + 1, size_bytes, dtype=np.int64)


def _activation_levels(structure: GraphStructure, sizes: StorageSizes) -> tuple[Sizes, Sizes]:
    """(what forward leaves for backward, what else operators hold) during each op."""
    is_saved = _is_saved(structure)[sizes.activations]
    saved = _held(structure, sizes, sizes.activations[is_saved], structure.dies)
    others = _held(structure, sizes, sizes.activations[~is_saved], structure.dies)
    return saved, others + sizes.workspaces


def _is_saved(structure: GraphStructure) -> NDArray[np.bool_]:
    """Which storages are made in the forward pass and used in the backward pass."""
    forward = np.append(structure.is_forward, False)
    return np.asarray(forward[np.maximum(structure.born, 0)] & ~forward[structure.dies])


def _held(
    structure: GraphStructure,
    sizes: StorageSizes,
    numbers: NDArray[np.intp],
    dies: NDArray[np.intp],
) -> Sizes:
    ops = len(structure.graph.ops)
    changes = np.zeros(ops + 2, dtype=np.int64)
    held = sizes.size_bytes[numbers]
    np.add.at(changes, np.maximum(structure.born[numbers], 0), held)
    np.add.at(changes, np.minimum(dies[numbers] + 1, ops + 1), -held)
    return np.cumsum(changes)[:ops]


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
    is_saved = _is_saved(known)
    block = block_of(graph)
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
                    kind=_kind(kind, bool(is_saved[number])),
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
