"""Turn halves of queries and keys one kernel after another, as Megatron-Core does with YaRN.

Transformer Engine's fused rotary embedding knows no factor of concentration: where a model scales
cosines and sines (YaRN's mscale is not 1), Megatron-Core turns without it, and nothing fuses that
(megatron/core/models/common/embeddings/rope_utils.py, apply_rotary_pos_emb and
_apply_rotary_pos_emb_bshd). Forward it negates a half, puts halves together, multiplies by cosines
and sines, adds, and puts what is turned beside an empty rest; gradients go the same way back, and
are added to those of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from estimator.graph.compile.expert_biases import EAGER, ExpertKernels
from estimator.graph.ir.op_graph import OpGraph, with_ops
from estimator.graph.ir.ops import Op
from estimator.graph.ir.structure import value_roots

_SUMS = ("aten.add.Tensor", "aten.sub.Tensor")
_TURNING = (*_SUMS, "aten.neg.default", "aten.mul.Tensor")


def with_unfused_rotary(graph: OpGraph) -> OpGraph:
    """The eager graph with Megatron-Core's kernels where its rotary embedding is scaled."""
    if not any(_scales(op) for op in graph.ops):
        return graph
    changes = ExpertKernels(list(graph.values))
    roots = value_roots(graph)
    maker = {value: index for index, op in enumerate(graph.ops) for value in op.outputs}
    for index, op in enumerate(graph.ops):
        turning = _turning(graph.ops, index, maker)
        if not turning:
            continue
        changes.instead |= dict.fromkeys(turning)
        read = (graph.ops[i].inputs[0] for i in turning)
        half = next(value for value in read if maker.get(value) not in turning)
        kernels = _forward if op.phase == "forward" else _backward
        changes.before[index] = kernels(op, roots[half], half, changes)
    ops: list[Op] = []
    place = []
    for index, op in enumerate(graph.ops):
        ops += changes.before.get(index, ())
        kept = changes.instead.get(index, op)
        ops += [kept] if kept else []
        place.append(max(len(ops) - 1, 0))
    return with_ops(graph, ops, changes.values, place)


def _scales(op: Op) -> bool:
    """Whether an operator scales cosines or sines."""
    if op.call.target != "aten.mul.Tensor" or "rotary" not in op.module:
        return False
    return any(isinstance(factor, float) and factor != 1.0 for factor in op.call.arguments)


def _turning(ops: Sequence[Op], index: int, maker: dict[int, int]) -> list[int]:
    """The operators that turn halves, by the one that puts these together; none for another."""
    op = ops[index]
    if op.call.target != "aten.cat.default" or len(op.inputs) != 2 or "attn" not in op.module:
        return []
    found, ahead = [index], list(op.inputs)
    for value in ahead:
        made = maker.get(value, index)
        target = ops[made].call.target
        if ops[made].module == op.module and target in _TURNING:
            found.append(made)
            # Sines and cosines are read second.
            ahead += ops[made].inputs[: 2 if target in _SUMS else 1]
    products = [made for made in found if ops[made].call.target == "aten.mul.Tensor"]
    return sorted(found) if len(products) == 4 else []


def _forward(op: Op, source: int, half: int, changes: ExpertKernels) -> list[Op]:
    negative, (result,) = changes.new(half), op.outputs
    turned, by_cosine, by_sine, total = (changes.new(result) for _ in range(4))
    return [
        changes.kernel(op, f"{EAGER}.neg.default", (half,), (negative,)),
        changes.kernel(op, f"{EAGER}.cat.default", (negative, half), (turned,)),
        changes.kernel(op, f"{EAGER}.mul.default", (source,), (by_cosine,)),
        changes.kernel(op, f"{EAGER}.mul.default", (turned,), (by_sine,)),
        changes.kernel(op, f"{EAGER}.add.default", (by_cosine, by_sine), (total,)),
        changes.kernel(op, f"{EAGER}.cat.default", (total,), (result,)),
    ]


def _backward(op: Op, source: int, half: int, changes: ExpertKernels) -> list[Op]:
    negative, (result,) = changes.new(half), op.outputs
    by_cosine, by_sine, turned, total, filled, copied, rest = (
        changes.new(result) for _ in range(7)
    )
    return [
        changes.kernel(op, f"{EAGER}.mul.default", (source,), (by_cosine,)),
        changes.kernel(op, f"{EAGER}.mul.default", (source,), (by_sine,)),
        changes.kernel(op, f"{EAGER}.neg.default", (half,), (negative,)),
        changes.kernel(op, f"{EAGER}.cat.default", (negative, half), (turned,)),
        changes.kernel(op, f"{EAGER}.add.default", (by_cosine, turned), (total,)),
        # A slice's gradient is put into zeros.
        changes.kernel(op, f"{EAGER}.fill.default", (), (filled,)),
        changes.kernel(op, f"{EAGER}.copy.default", (total,), (copied,)),
        changes.kernel(op, f"{EAGER}.fill.default", (), (rest,)),
        changes.kernel(op, f"{EAGER}.add.default", (copied, rest), (result,)),
    ]
