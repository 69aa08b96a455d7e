"""Say which memory a training step holds, when, and how much of it at most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimator.errors import StrategyError
from estimator.graph.op_graph import BoundGraph
from estimator.graph.optimizer_memory import block_bytes, optimizer_memory, rounded_bytes
from estimator.graph.structure import GraphStructure
from estimator.graph.workspace import workspace_bytes
from estimator.workload import Strategy

Sizes = NDArray[np.int64]
Numbers = NDArray[np.intp]


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


def peak_memory(
    bound: BoundGraph,
    *,
    optimizer: str,
    strategy: Strategy,
    ranks: int,
    largest_bucket_bytes: int = 0,
    threads: int = 1,
    structure: GraphStructure | None = None,
) -> PeakMemory:
    """The peak of live tensors of one rank over a whole step, in steady state.

    Optimizer state exists from the start (any step but the first), gradients are released before
    it (`zero_grad(set_to_none=True)`, the default). DDP's buckets (ranks > 1) are as large as the
    gradients and always held; as bucket views, gradients live in them; where they are cast to be
    reduced, a copy of one (`largest_bucket_bytes`) is held too. `threads` are those that one
    rank has on a CPU: they decide how convolutions run. `structure` is that of the graph where it
    is at hand.
    """
    if ranks < 1:
        raise StrategyError(f"a step runs on at least 1 rank, found {ranks}; use 1 or more")
    graph = bound.graph
    rounding = block_bytes(graph)
    sizes = [rounded_bytes(parameter.spec.nbytes, rounding) for parameter in graph.parameters]
    trained = [
        size
        for size, parameter in zip(sizes, graph.parameters, strict=True)
        if parameter.gradient is not None
    ]
    in_buckets = ranks > 1 and strategy.holds_gradients_in_buckets
    known = structure or GraphStructure.of(graph)
    held = StorageSizes.of(bound, known, threads)
    gradients, activations = _levels(known, held, gradients_in_buckets=in_buckets)
    parameters_bytes = sum(sizes) + graph.frozen_parameter_bytes
    buffers_bytes = graph.buffer_bytes + held.constants_bytes
    master_ratio = strategy.master_ratio(graph.precision)
    own = optimizer_memory(graph, optimizer, master_ratio=master_ratio)
    state_bytes, update_bytes = own.state_bytes, own.update_bytes
    bucket_bytes = _bucket_bytes(strategy, graph.precision, sum(trained), largest_bucket_bytes)
    bucket_bytes = bucket_bytes if ranks > 1 else 0
    in_graph = gradients + activations
    most = int(in_graph.max(initial=0))
    gradients_bytes = int(gradients.max(initial=0))
    in_update = gradients_bytes + update_bytes
    standing_bytes = parameters_bytes + buffers_bytes + held.inputs_bytes
    return PeakMemory(
        parameters_bytes=parameters_bytes,
        gradients_bytes=bucket_bytes if in_buckets else gradients_bytes,
        optimizer_state_bytes=state_bytes,
        bucket_bytes=0 if in_buckets else bucket_bytes,
        buffers_bytes=buffers_bytes,
        inputs_bytes=held.inputs_bytes,
        activations_bytes=int(activations.max(initial=0)),
        update_bytes=update_bytes,
        total_bytes=standing_bytes + state_bytes + bucket_bytes + max(most, in_update),
        peak_op=None if in_update > most or not len(in_graph) else int(in_graph.argmax()),
    )


def _bucket_bytes(
    strategy: Strategy, precision: str, gradients_bytes: int, largest_bytes: int
) -> int:
    ratio = strategy.shard_dtypes(precision).reduced_ratio
    if strategy.kind == "distributed-optimizer":
        return int(gradients_bytes * ratio)
    return gradients_bytes + (0 if ratio == 1 else int(largest_bytes * ratio))


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSizes:
    """What each storage of a graph takes at one batch size, in blocks of the device's allocator.

    `activations` and `gradients` are the numbers of the storages that are one, `workspaces` what
    each op takes beside its tensors.
    """

    size_bytes: Sizes
    activations: Numbers
    gradients: Numbers
    inputs_bytes: int
    constants_bytes: int
    workspaces: Sizes

    @classmethod
    def of(cls, bound: BoundGraph, structure: GraphStructure, threads: int) -> StorageSizes:
        """`threads` are those that one rank has on a CPU."""
        block = block_bytes(bound.graph)
        sizes = -(-structure.storage_bytes(bound) // block) * block
        kinds = structure.kinds
        workspaces = np.zeros(len(bound.calls), dtype=np.int64)
        if bound.graph.target == "cpu" and len(bound.calls):
            of_call = [
                workspace_bytes(call, threads=threads) for call in structure.distinct_calls(bound)
            ]
            workspaces = np.array(of_call, dtype=np.int64)[structure.call_of]
        return cls(
            size_bytes=sizes,
            activations=np.flatnonzero(kinds == "activation"),
            gradients=np.flatnonzero(kinds == "gradient"),
            inputs_bytes=int(sizes[kinds == "input"].sum()),
            constants_bytes=int(sizes[kinds == "constant"].sum()),
            workspaces=workspaces,
        )


def _levels(
    structure: GraphStructure, sizes: StorageSizes, *, gradients_in_buckets: bool
) -> tuple[Sizes, Sizes]:
    """Bytes of gradients and of activations during each op; gradients in buckets are copied there.

    A storage is held from the start of the op that makes it to the end of the last one it is for.
    """
    ops = len(structure.graph.ops)

    def levels(*some: tuple[Numbers, Numbers]) -> Sizes:
        changes = np.zeros(ops + 2, dtype=np.int64)
        for numbers, dies in some:
            held = sizes.size_bytes[numbers]
            np.add.at(changes, np.maximum(structure.born[numbers], 0), held)
            np.add.at(changes, np.minimum(dies + 1, ops + 1), -held)
        return np.cumsum(changes)[:ops]

    own = (sizes.activations, structure.dies[sizes.activations])
    if gradients_in_buckets:
        copied = (sizes.gradients, structure.ready[sizes.gradients])
        return np.zeros(ops, dtype=np.int64), levels(own, copied) + sizes.workspaces
    gradients = (sizes.gradients, structure.dies[sizes.gradients])
    return levels(gradients), levels(own) + sizes.workspaces
