"""Say which memory a training step and its optimizer hold, and how much of it at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from estimator.errors import StrategyError
from estimator.graph.ir.op_graph import BoundGraph, OpGraph
from estimator.graph.ir.ops import Parameter
from estimator.graph.ir.shards import parameter_unit
from estimator.graph.ir.structure import GraphStructure
from estimator.graph.memory.workspace import workspace_bytes
from estimator.tensors import OpCall
from estimator.workload import Strategy
from estimator.workload.optimizers import (
    RULES,
    OptimizedTensor,
    check_optimizer,
    state_sizes,
    temporaries_bytes,
)

# The CUDA caching allocator rounds every block up to kMinBlockSize
# (c10/core/AllocatorConfig.h, torch 2.13).
CUDA_BLOCK_BYTES = 512


class OptimizerMemory(NamedTuple):
    """Bytes that an optimizer holds, of all parameters together and of the one with most.

    `state_bytes` stay between steps, master weights among them; while it updates,
    `together_bytes` are made of all parameters and `single_bytes` of one at a time.
    """

    state_bytes: int
    largest_state_bytes: int
    together_bytes: int
    largest_together_bytes: int
    single_bytes: int

    @property
    def update_bytes(self) -> int:
        return self.together_bytes + self.single_bytes


def optimizer_memory(
    graph: OpGraph,
    optimizer: str,
    *,
    stored_ratio: int = 1,
    master_ratio: int = 1,
    sharded: bool = False,
) -> OptimizerMemory:
    """What an optimizer holds of parameters that take `stored_ratio` times the traced bytes.

    With `sharded`, of all that the ranks which shard a model hold together.

    Master weights are copies of `master_ratio` times the size, 1: there are none. With them the
    state is as wide, and gradients are cast for the update (Float16OptimizerWithFloat16Params of
    Megatron-LM, BF16_Optimizer of DeepSpeed).
    """
    name = check_optimizer(optimizer)
    trained = [parameter for parameter in graph.parameters if parameter.gradient is not None]
    if name == graph.optimizer and any(p.optimizer or not p.updates for p in trained):
        # Optimizers update one after the other; what none updates has no state.
        by: dict[str, list[Parameter]] = {}
        for each in trained:
            if each.updates:
                by.setdefault(each.optimizer or name, []).append(each)
        options = {"stored_ratio": stored_ratio, "master_ratio": master_ratio, "sharded": sharded}
        held = [
            optimizer_memory(
                replace(
                    graph,
                    optimizer=own,
                    parameters=tuple([replace(p, optimizer=None) for p in some]),
                ),
                own,
                **options,  # type: ignore[arg-type]
            )
            for own, some in by.items()
        ]
        return OptimizerMemory(
            state_bytes=sum(one.state_bytes for one in held),
            **{
                field: max((getattr(one, field) for one in held), default=0)
                for field in OptimizerMemory._fields[1:]
            },
        )
    tensors = trained_tensors(graph, stored_ratio * master_ratio, sharded=sharded)
    masters = [tensor.size_bytes if master_ratio > 1 else 0 for tensor in tensors]
    states = [
        sum(state_sizes(name, tensor)) + master
        for tensor, master in zip(tensors, masters, strict=True)
    ]
    foreach = graph.target == "cuda" and RULES[name].form != "loop"
    each_bytes = [temporaries_bytes(name, [tensor], foreach=foreach)[0] for tensor in tensors]
    together, single = temporaries_bytes(name, tensors, foreach=foreach)
    return OptimizerMemory(
        state_bytes=sum(states),
        largest_state_bytes=max(states, default=0),
        together_bytes=together + sum(masters),
        largest_together_bytes=max(map(sum, zip(each_bytes, masters, strict=True)), default=0),
        single_bytes=single,
    )


def update_call(graph: OpGraph) -> OpCall:
    """The optimizer's whole step, as a call by which its seconds are kept."""
    trained = tuple(each.spec for each in graph.parameters if each.gradient is not None)
    return OpCall(f"update.{graph.optimizer}", (trained,))


def trained_tensors(
    graph: OpGraph, ratio: int = 1, *, sharded: bool = False
) -> list[OptimizedTensor]:
    """The parameters that get a gradient, `ratio` times as wide as they were traced.

    With `sharded`, those of all ranks that shard a model: experts that they divide come whole.
    """
    block = block_bytes(graph)
    blocks = [parameter_unit(parameter) for parameter in graph.parameters]
    return [
        _optimized(parameter, ratio, block, parts, in_block=bool(unit) or not any(blocks))
        for parameter, unit in zip(graph.parameters, blocks, strict=True)
        if parameter.gradient is not None
        for parts in (parameter.sharded_parts if sharded else 1,)
    ]


def _optimized(
    parameter: Parameter, ratio: int, block: int, parts: int, *, in_block: bool
) -> OptimizedTensor:
    first, *rest = parameter.spec.shape or (1,)
    return OptimizedTensor(
        shape=(first * parts, *rest) if parameter.spec.shape else (),
        elements=parameter.spec.numel * parts,
        size_bytes=ratio * rounded_bytes(parameter.spec.nbytes, block) * parts,
        in_block=in_block,
    )


def block_bytes(graph: OpGraph) -> int:
    """What the allocator of the graph's device rounds sizes up to."""
    return CUDA_BLOCK_BYTES if graph.target == "cuda" else 1


def rounded_bytes(size_bytes: int, block: int) -> int:
    """A size in whole blocks of an allocator."""
    return -(-size_bytes // block) * block


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
    if strategy.has_gradient_buffer:
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


Counts = NDArray[np.int64]


@overload
def held_bytes(fixed_bytes: int, sharded_bytes: int, shards: int) -> int: ...
@overload
def held_bytes(
    fixed_bytes: int | Counts, sharded_bytes: int | Counts, shards: Counts
) -> Counts: ...
def held_bytes(
    fixed_bytes: int | Counts, sharded_bytes: int | Counts, shards: int | Counts
) -> int | Counts:
    """Bytes of a rank that holds `fixed_bytes` whole and one of `shards` shards of the others.

    >>> held_bytes(100, 10, 4)
    103
    """
    # The part that is divided is rounded up.
    return fixed_bytes - (-sharded_bytes // shards)


@dataclass(frozen=True, slots=True)
class Envelope:
    """The most that a rank holds over some instants, for any number of shards.

    At each instant a rank holds fixed bytes and sharded bytes / shards: a line in 1 / shards.
    `lines` are the pairs (fixed, sharded) of the instants that are the largest for some number of
    shards from 1 on, the one for the most shards first.
    """

    lines: tuple[tuple[int, int], ...]

    @classmethod
    def through(cls, lines: Sequence[tuple[int, int]]) -> Envelope:
        """The envelope of any lines, at least one.

        >>> Envelope.through([(0, 80), (50, 20), (40, 10), (10, 60), (60, 0)]).lines
        ((60, 0), (50, 20), (0, 80))
        """
        return cls(tuple(lines[index] for index in upper_lines(lines)))

    @overload
    def at(self, shards: int) -> int: ...
    @overload
    def at(self, shards: Counts) -> Counts: ...
    def at(self, shards: int | Counts) -> int | Counts:
        """Bytes of a rank at a number of shards, or at each of an array."""
        if isinstance(shards, np.ndarray):
            levels = [held_bytes(fixed, sharded, shards) for fixed, sharded in self.lines]
            return np.asarray(np.maximum.reduce(levels))
        return max([held_bytes(fixed, sharded, shards) for fixed, sharded in self.lines])


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
            (first, low), (middle, mid) = (lines[each] for each in kept[-2:])
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

    `replica` is that of a rank that shards nothing.
    Shards are taken to be even. FSDP2 cuts a tensor along its first dimension and pads: a rank's
    shard may have up to a row of each tensor more.
    """

    total: Envelope
    peak_ops: tuple[int | None, ...]
    parameters: Envelope
    gradients: Envelope
    optimizer_state: Envelope
    buckets: Envelope
    update: Envelope
    buffers_bytes: int
    inputs_bytes: int
    activations_bytes: int
    replica: PeakMemory | None = None

    @classmethod
    def of_replica(cls, peak: PeakMemory) -> ShardedMemory:
        """What a rank needs that shards nothing."""

        def whole(size_bytes: int) -> Envelope:
            return Envelope(((size_bytes, 0),))

        return cls(
            total=whole(peak.total_bytes),
            peak_ops=(peak.peak_op,),
            parameters=whole(peak.parameters_bytes),
            gradients=whole(peak.gradients_bytes),
            optimizer_state=whole(peak.optimizer_state_bytes),
            buckets=whole(peak.bucket_bytes),
            update=whole(peak.update_bytes),
            buffers_bytes=peak.buffers_bytes,
            inputs_bytes=peak.inputs_bytes,
            activations_bytes=peak.activations_bytes,
            replica=peak,
        )

    @overload
    def total_bytes(self, shards: int) -> int: ...
    @overload
    def total_bytes(self, shards: Counts) -> Counts: ...
    def total_bytes(self, shards: int | Counts) -> int | Counts:
        """Bytes at the peak where that many ranks share what is sharded."""
        return self.total.at(shards)

    def peak(self, shards: int) -> PeakMemory:
        """The peak and its parts, each at its own maximum, where `shards` ranks share."""
        if self.replica is not None:
            return self.replica
        levels = [held_bytes(fixed, sharded, shards) for fixed, sharded in self.total.lines]
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
