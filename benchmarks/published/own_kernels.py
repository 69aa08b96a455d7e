"""Take operators for the kernels that a trainer's library has for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import estimator as est
from estimator.graph.costs.call_costs import FusedKernel, family_of, features_of, op_cost
from estimator.graph.costs.registry import argument, cost_of
from estimator.graph.ir.ops import Op, OpCost
from estimator.tensors import OpCall

_FLASH = "_scaled_dot_product_flash_attention"


def with_own_kernels(graph: est.OpGraph, module: str) -> est.OpGraph:
    """The graph with one pass over scores, as a compiler's kernel makes it, in modules of a name.

    torch's own softmax takes several times the bytes' time in its backward pass; megatron's
    scaled_upper_triang_masked_softmax holds a row in registers both ways.
    """

    def is_one(op: Op) -> bool:
        return op.module.endswith(f".{module}") and family_of(op.call.target) == "softmax"

    return _replaced(graph, is_one, _own)


def _replaced(
    graph: est.OpGraph, is_one: Callable[[Op], bool], own: Callable[[OpCall], OpCall]
) -> est.OpGraph:
    """The graph with other calls for those of some operators, compiled or not."""
    made = cache(own)
    ops = (
        replace(op, call=made(op.call), other_call=made(op.other_call)) if is_one(op) else op
        for op in graph.ops
    )
    eager = None if graph.eager is None else _replaced(graph.eager, is_one, own)
    return replace(graph, ops=tuple(ops), eager=eager)


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


def with_cudnn_attention(graph: est.OpGraph) -> est.OpGraph:
    """The graph with cuDNN's fused attention for FlashAttention-2's, as Transformer Engine has it.

    On Hopper it prefers cuDNN's (transformer_engine/pytorch/attention, get_attention_backend).
    """
    return _replaced(graph, _is_flash, _by_cudnn)


def _is_flash(op: Op) -> bool:
    return _FLASH in op.call.target


def _by_cudnn(call: OpCall) -> OpCall:
    """The same tensors in the order of cuDNN's signatures (aten/native_functions.yaml)."""
    target = call.target.replace("flash_attention", "cudnn_attention")
    given = call.arguments
    if "backward" in call.target:
        *tensors, cum_q, cum_k, max_q, max_k, drop, causal, seed, offset = given[:14]
        arguments = (*tensors, seed, offset, None, cum_q, cum_k, max_q, max_k, drop, causal)
    else:
        drop = argument(call, 3, "dropout_p", 0.0)
        causal = argument(call, 4, "is_causal", False)
        arguments = (*given[:3], None, True, drop, causal)
    keywords = tuple(item for item in call.keywords if item[0] == "scale")
    return OpCall(target, arguments, keywords, call.outputs)


# Of what FlashAttention-2 makes of a GPU's peak, what FlashAttention in Triton did: 0.37 and 0.25
# of an A100's with 4,096 tokens and heads of 64, forward and backward (triton-lang/triton,
# python/test/regression/test_performance.py, 2023), where the kernel model has 0.57 and 0.47.
_TRITON_RATIOS = {"forward": 0.65, "backward": 0.53}
_TRITON = "flash_attn_triton"


def with_triton_attention(graph: est.OpGraph) -> est.OpGraph:
    """The graph with FlashAttention of 2022 in Triton for torch's attention."""
    return _replaced(graph, _is_flash, _by_triton)


def _by_triton(call: OpCall) -> OpCall:
    phase = "backward" if "backward" in call.target else "forward"
    return replace(call, target=f"{_TRITON}.{phase}.default")


def _by_torch(call: OpCall) -> OpCall:
    suffix = "_backward" if "backward" in call.target else ""
    return replace(call, target=f"aten.{_FLASH}{suffix}.default")


def _triton_dims(call: OpCall) -> tuple[float, ...]:
    features = features_of(_by_torch(call))
    assert features is not None
    return features.dims


def _triton_cost(call: OpCall) -> OpCost:
    cost = op_cost(_by_torch(call))
    assert cost is not None
    return replace(cost, flops=cost.flops / _TRITON_RATIOS[call.target.split(".")[1]])


cost_of(*(f"{_TRITON}.{phase}" for phase in _TRITON_RATIOS), family="attention", dims=_triton_dims)(
    _triton_cost
)

ATTENTION = {"cudnn": with_cudnn_attention, "triton": with_triton_attention}
