"""Take the softmax of some modules for the hand-written kernel that their library has for it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import estimator as est
from estimator.graph.costs import family_of, features_of, op_cost
from estimator.graph.fused_calls import FusedKernel
from estimator.tensors import OpCall


def with_own_kernels(graph: est.OpGraph, module: str) -> est.OpGraph:
    """The graph with one pass over scores, as a compiler's kernel makes it, in modules of a name.

    torch's own softmax takes several times the bytes' time in its backward pass; megatron's
    scaled_upper_triang_masked_softmax holds a row in registers both ways.
    """
    own = cache(_own)
    ops = (
        replace(op, call=own(op.call), other_call=own(op.other_call))
        if op.module.endswith(f".{module}") and family_of(op.call.target) == "softmax"
        else op
        for op in graph.ops
    )
    return replace(graph, ops=tuple(ops))


def _own(call: OpCall) -> OpCall:
    cost, features = op_cost(call), features_of(call)
    assert cost is not None
    assert features is not None
    rows, row_length = features.dims
    kernel = FusedKernel(
        family="softmax",
        flops=int(cost.flops),
        read_bytes=int(cost.read_bytes),
        rows=int(rows),
        row_length=int(row_length),
        members=(call.target,),
    )
    return kernel.call(call.inputs, call.outputs)
