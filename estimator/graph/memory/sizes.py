"""Say how large the tensors of a step are: parameters, what an optimizer holds, activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from estimator.elementwise import Indices, Sizes
from estimator.graph.ir.op_graph import BoundGraph, OpGraph, parameter_unit
from estimator.graph.ir.ops import Parameter
from estimator.graph.ir.structure import GraphStructure
from estimator.graph.memory.workspace import workspace_bytes
from estimator.tensors import OpCall
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
    graph: OpGraph, *, stored_ratio: int = 1, master_ratio: int = 1, sharded: bool = False
) -> OptimizerMemory:
    """What a graph's optimizer holds of parameters that take `stored_ratio` times the traced bytes.

    With `sharded`, of all that the ranks which shard a model hold together.

    Master weights are copies of `master_ratio` times the size, 1: there are none. With them the
    state is as wide, and gradients are cast for the update (Float16OptimizerWithFloat16Params of
    Megatron-LM, BF16_Optimizer of DeepSpeed).
    """
    name = check_optimizer(graph.optimizer)
    trained = [parameter for parameter in graph.parameters if parameter.gradient is not None]
    if any(p.optimizer or not p.updates for p in trained):
        # Optimizers update one after the other; what none updates has no state.
        by: dict[str, list[Parameter]] = {}
        for parameter in trained:
            if parameter.updates:
                own = replace(parameter, optimizer=None)
                by.setdefault(parameter.optimizer or name, []).append(own)
        held = [
            optimizer_memory(
                replace(graph, optimizer=own, parameters=tuple(some)),
                stored_ratio=stored_ratio,
                master_ratio=master_ratio,
                sharded=sharded,
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
    trained = tuple(
        parameter.spec for parameter in graph.parameters if parameter.gradient is not None
    )
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSizes:
    """What each storage of a graph takes at one batch size, in blocks of the device's allocator.

    `activations` and `gradients` are the numbers of the storages that are one, `workspaces` what
    each op takes beside its tensors.
    """

    size_bytes: Sizes
    activations: Indices
    gradients: Indices
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


class Gradient(NamedTuple):
    """A storage of gradients: the op that makes it, the one after which it is final, its unit.

    The ranks that shard a model have `parts` unlike ones.
    """

    born: int
    final: int
    size_bytes: int
    unit: str
    parts: int = 1


class StepTensors:
    """What there is to hold in a step of one batch size: a strategy says for how long."""

    def __init__(self, bound: BoundGraph, structure: GraphStructure, threads: int = 1) -> None:
        self.graph, self.structure = bound.graph, structure
        self.ops = len(bound.graph.ops)
        self.sizes = StorageSizes.of(bound, structure, threads)
        self.inputs_bytes = self.sizes.inputs_bytes
        self.buffers_bytes = bound.graph.buffer_bytes + self.sizes.constants_bytes

    def parameters_bytes(self, stored_ratio: int = 1, *, sharded: bool = False) -> int:
        """All parameters, `stored_ratio` times as wide as they were traced.

        With `sharded`, of all ranks that shard a model: experts that they divide come whole.
        """
        own_bytes = self._bytes_of(self.graph.parameters, sharded=sharded)
        return stored_ratio * (self.graph.frozen_parameter_bytes + own_bytes)

    def trained_bytes(self, stored_ratio: int = 1, *, sharded: bool = False) -> int:
        """The same of the parameters that get a gradient."""
        trained = [p for p in self.graph.parameters if p.gradient is not None]
        return stored_ratio * self._bytes_of(trained, sharded=sharded)

    def _bytes_of(self, parameters: Sequence[Parameter], *, sharded: bool) -> int:
        block = block_bytes(self.graph)
        return sum(
            rounded_bytes(parameter.spec.nbytes, block)
            * (parameter.sharded_parts if sharded else 1)
            for parameter in parameters
        )

    @cached_property
    def gradients(self) -> tuple[Gradient, ...]:
        """The storages of gradients: until when each is made, and for which unit."""
        return tuple(self._gradients())

    def _gradients(self) -> Iterator[Gradient]:
        graph, structure = self.graph, self.structure
        of_gradient = {p.gradient: p for p in graph.parameters if p.gradient is not None}
        owners_of: dict[int, list[Parameter]] = {}
        for value, parameter in sorted(of_gradient.items()):
            owners_of.setdefault(int(structure.storage_of[value]), []).append(parameter)
        for number in self.sizes.gradients.tolist():
            owners = owners_of[number]
            ready = [self.ops - 1 if p.ready_after is None else p.ready_after for p in owners]
            size, born = int(self.sizes.size_bytes[number]), int(structure.born[number])
            unit, parts = parameter_unit(owners[0]), owners[0].sharded_parts
            yield Gradient(born, max(ready), size, unit, parts)
