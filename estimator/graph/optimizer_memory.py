"""Say what an optimizer holds of a graph's parameters, between steps and while it updates."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from estimator.graph.op_graph import OpGraph
from estimator.graph.ops import Parameter
from estimator.graph.shards import parameter_unit
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
