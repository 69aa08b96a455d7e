"""Run what Megatron-Core does outside of its fused kernels in kernels of its own.

Each of them reads and writes whole tensors. So run biases and clamps of experts:

Transformer Engine's grouped linear layer adds the bias of the first product, and sums its gradient,
in the product itself or in the cast of its gradient (module/grouped_linear.py). All else is
unfused (megatron/core, fusions/fused_bias_geglu.py, weighted_bias_quick_geglu_impl;
transformer/moe/experts.py, TEGroupedMLP._apply_bias):

- The halves of the first product are clamped one by one and put together again for the fused
  activation. Gradients of clamps read what was clamped, and are put together likewise.
- The bias of the second product is multiplied by each row's weight of routing and added, expert by
  expert; rows are put together and cast back. Weights of routing are in fp32 where DeepEP or
  HybridEP brings them (fused_a2a.py), and then all of that is.

Rotary embeddings too, where a model scales cosines and sines (YaRN's mscale is not 1): Transformer
Engine's fused one knows no such factor (megatron/core/models/common/embeddings/rope_utils.py,
apply_rotary_pos_emb and _apply_rotary_pos_emb_bshd). Forward it negates a half, puts halves
together, multiplies by cosines and sines, adds, and puts what is turned beside an empty rest;
gradients go the same way back, and are added to those of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from estimator.graph.ir.op_graph import GraphChanges, OpGraph
from estimator.graph.ir.ops import Op
from estimator.graph.ir.structure import value_roots

# Kernels that no compiler fuses, and how many of them one operator stands for.
EAGER, PIECES = "eager", "pieces"
_CLAMP = "aten.clamp."
_GROUPED = "aten._grouped_mm.default"
_SUMS = ("aten.add.Tensor", "aten.sub.Tensor")
_TURNING = (*_SUMS, "aten.neg.default", "aten.mul.Tensor")


class Unfused:
    """Kernels that no compiler fuses, one after the other, beside an operator of a graph."""

    def __init__(self, changes: GraphChanges, op: Op) -> None:
        self._changes, self._op = changes, op
        self.kernels: list[Op] = []

    def run(
        self,
        name: str,
        *read: int,
        like: int = 0,
        dtype: str | None = None,
        to: Sequence[int] = (),
        pieces: int = 0,
    ) -> int:
        """Add a kernel that writes some values, or else a new one as large as another; gives it."""
        made = tuple(to) or (self._changes.new(like, dtype),)
        keywords = {PIECES: pieces} if pieces else {}
        target = f"{EAGER}.{name}.default"
        self.kernels.append(self._changes.kernel(self._op, target, read, made, keywords=keywords))
        return made[0]


class ExpertBiases:
    """The kernels around the two products of one module of experts that have biases."""

    def __init__(
        self, ops: Sequence[Op], own: Sequence[int], changes: GraphChanges, weights: str
    ) -> None:
        self._ops, self._changes, self._weights = ops, changes, weights
        self._forward = [index for index in own if ops[index].phase == "forward"]
        self._backward = [index for index in own if ops[index].phase == "backward"]
        self._maker = {v: index for index in own for v in ops[index].outputs}

    def change(self, *, fused: bool) -> None:
        """Put the framework's kernels in the place of those traced; `fused`, products do all."""
        products = [i for i in self._forward if self._ops[i].call.target == _GROUPED]
        biases = [bias for product in products if (bias := self._bias_of(product))]
        if len(products) != 2 or len(biases) != 2:
            return
        first, second = biases
        self._in_product(first)
        if fused:
            self._in_product(second)
            return
        self._clamped(*products)
        self._weighted(products[1], second)

    def _bias_of(self, product: int) -> tuple[int, int, int] | None:
        """What takes the bias of each row's expert, adds it, and adds up rows to its gradient."""
        (made,) = self._ops[product].outputs
        for added in self._forward:
            op = self._ops[added]
            if op.call.target != "aten.add_.Tensor" or op.inputs[0] != made:
                continue
            taken = self._maker.get(op.inputs[1], added)
            shape = self._ops[taken].call.inputs[0].shape
            for summed in self._backward:
                is_sum = self._ops[summed].call.target == "aten.index_put.default"
                if is_sum and self._ops[summed].call.outputs[0].shape == shape:
                    return taken, added, summed
        return None

    def _in_product(self, bias: tuple[int, int, int]) -> None:
        taken, added, summed = bias
        self._changes.instead[taken] = None
        self._view(added, self._ops[added].inputs[0])
        gradient = self._ops[summed]
        self._changes.instead[summed] = self._changes.kernel(
            gradient, "te.bias_gradient.default", (), gradient.outputs
        )
        self._leave_out_zeros(summed)

    def _view(self, index: int, of: int) -> None:
        op = self._ops[index]
        self._changes.instead[index] = self._changes.kernel(
            op, "aten.alias.default", (of,), op.outputs, is_view=True
        )

    def _leave_out_zeros(self, summed: int) -> None:
        zeros = self._maker.get(self._ops[summed].inputs[0])
        if zeros is not None:
            self._changes.instead[zeros] = None

    # Clamps

    def _clamped(self, first: int, second: int) -> None:
        """Clamp the halves of a product, put them together, and so their gradients."""
        ops, changes = self._ops, self._changes
        clamps = [
            i for i in self._forward if first < i < second and ops[i].call.target.startswith(_CLAMP)
        ]
        halves = [value for index in clamps for value in ops[index].outputs]
        wheres = [i for i in self._backward if self._is_clamped_gradient(i, halves)]
        if len(clamps) != 2 or len(wheres) != 2 or clamps[1] - clamps[0] != 1:
            return
        unfused = Unfused(changes, ops[clamps[0]])
        clamped = [
            unfused.run("clamp", ops[index].inputs[0], like=half)
            for index, half in zip(clamps, halves, strict=True)
        ]
        whole = unfused.run("cat", *clamped, like=ops[first].outputs[0])
        for index, half in zip(clamps, halves, strict=True):
            changes.values[half] = replace(changes.values[half], base=whole)
            self._view(index, whole)
        # Both halves are views of what the last of these kernels makes.
        changes.before[clamps[0]] = unfused.kernels
        self._gradients_clamped(wheres)

    def _is_clamped_gradient(self, index: int, halves: Sequence[int]) -> bool:
        op = self._ops[index]
        if not halves or op.call.target != "aten.where.self":
            return False
        return op.call.outputs[0].shape == self._changes.values[halves[0]].spec.shape

    def _gradients_clamped(self, wheres: Sequence[int]) -> None:
        ops, changes = self._ops, self._changes
        made = []
        for index in wheres:
            op = ops[index]
            source = self._compared(op.inputs[0])
            changes.instead[self._maker[op.inputs[2]]] = None
            changes.instead[index] = changes.kernel(
                op, f"{EAGER}.clamp_backward.default", (op.inputs[1], source), op.outputs
            )
            made.append(op.outputs[0])
        spread = [i for i in self._backward if not set(made).isdisjoint(ops[i].inputs)]
        wide = {value for index in spread for value in ops[index].outputs}
        for index in self._backward:
            op = ops[index]
            if index in spread:
                changes.instead[index] = None
            elif wide and wide <= set(op.inputs):
                changes.instead[index] = changes.kernel(
                    op, f"{EAGER}.cat.default", made, op.outputs
                )

    def _compared(self, mask: int) -> int:
        """What was clamped, by the mask of its gradient, whose operators are left out."""
        op = self._ops[self._maker[mask]]
        self._changes.instead[self._maker[mask]] = None
        if op.call.target.startswith(("aten.ge.", "aten.le.")):
            return op.inputs[0]
        sources = [self._compared(value) for value in op.inputs]
        return sources[0]

    # The bias of the second product

    def _weighted(self, product: int, bias: tuple[int, int, int]) -> None:
        """Add the bias times the weights of routing in kernels of each expert."""
        ops, changes = self._ops, self._changes
        taken, added, summed = bias
        (result,) = ops[product].outputs
        parameter, experts = ops[taken].inputs[0], ops[taken].call.inputs[0].shape[0]
        rows = changes.new(result)
        changes.instead[product] = replace(ops[product], outputs=(rows,))
        changes.instead[taken] = None
        self._view(added, result)
        unfused = Unfused(changes, ops[added])
        like: dict[str, Any] = {"like": result, "dtype": self._weights}
        weighted = unfused.run("mul", parameter, **like, pieces=experts)
        sums = unfused.run("add", rows, weighted, **like, pieces=experts)
        if changes.values[sums].spec.dtype == changes.values[result].spec.dtype:
            unfused.run("cat", sums, to=(result,))
        else:
            unfused.run("copy", unfused.run("cat", sums, like=sums), to=(result,))
        changes.before[added] = unfused.kernels
        self._weighted_gradients(summed, experts)

    def _weighted_gradients(self, summed: int, experts: int) -> None:
        """Gradients of rows, of the bias and of the weights, from those of the sums."""
        ops, changes = self._ops, self._changes
        op = ops[summed]
        given = op.inputs[2]
        products = [
            i for i in self._backward if ops[i].call.target == _GROUPED and given in ops[i].inputs
        ]
        unfused, wide, narrow = Unfused(changes, op), given, given
        if changes.values[given].spec.dtype != self._weights:
            wide = unfused.run("copy", given, like=given, dtype=self._weights)
            narrow = unfused.run("copy", wide, like=given, pieces=experts)
        rows = unfused.run("cat", narrow, like=given)
        of_weights = unfused.run("mul", wide, like=wide, pieces=experts)
        # One number for each row.
        column = (replace(spec, shape=(*spec.shape[:-1], 1)) for spec in changes.values[wide].specs)
        unfused.run("sum", of_weights, to=(changes.add(column),), pieces=experts)
        of_bias = unfused.run("mul", wide, like=wide, pieces=experts)
        unfused.run("sum", of_bias, to=op.outputs, pieces=experts)
        changes.before[products[0]] = unfused.kernels
        for index in products:
            reading = tuple(rows if value == given else value for value in ops[index].inputs)
            changes.instead[index] = replace(ops[index], inputs=reading)
        changes.instead[summed] = None
        self._leave_out_zeros(summed)


def with_unfused_rotary(graph: OpGraph) -> OpGraph:
    """The eager graph with Megatron-Core's kernels where its rotary embedding is scaled."""
    if not any(_scales(op) for op in graph.ops):
        return graph
    changes = GraphChanges(graph)
    roots = value_roots(graph)
    maker = {value: index for index, op in enumerate(graph.ops) for value in op.outputs}
    for index, op in enumerate(graph.ops):
        if _orders_heads(op):
            changes.instead[index] = replace(op, is_view=True)
            (made,) = op.outputs
            changes.values[made] = replace(changes.values[made], base=roots[op.inputs[0]])
        turning = _turning(graph.ops, index, maker)
        if not turning:
            continue
        changes.instead |= dict.fromkeys(turning)
        read = (graph.ops[i].inputs[0] for i in turning)
        half = next(value for value in read if maker.get(value) not in turning)
        changes.before[index] = _turned(op, roots[half], half, changes)
    return changes.graph()


def _orders_heads(op: Op) -> bool:
    """Whether an operator copies what attention reads or gives to have tokens before heads.

    So they are throughout in Megatron-Core, whose attention gives them so as well.
    """
    if op.call.target != "aten.clone.default" or "attn" not in op.module:
        return False
    given, made = op.call.inputs[0], op.call.outputs[0]
    return len(given.shape) == 4 and given.strides is not None and given.shape == made.shape


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


def _turned(op: Op, source: int, half: int, changes: GraphChanges) -> list[Op]:
    """The kernels that turn halves, or their gradients back."""
    unfused, (like,) = Unfused(changes, op), op.outputs
    if op.phase == "forward":
        negative = unfused.run("neg", half, like=half)
        turned = unfused.run("cat", negative, half, like=like)
        by_cosine = unfused.run("mul", source, like=like)
        by_sine = unfused.run("mul", turned, like=like)
        total = unfused.run("add", by_cosine, by_sine, like=like)
        unfused.run("cat", total, to=op.outputs)
        return unfused.kernels
    by_cosine, _ = (unfused.run("mul", source, like=like) for _ in range(2))
    negative = unfused.run("neg", half, like=half)
    turned = unfused.run("cat", negative, half, like=like)
    total = unfused.run("add", by_cosine, turned, like=like)
    # A slice's gradient is put into zeros.
    unfused.run("fill", like=like)
    copied = unfused.run("copy", total, like=like)
    rest = unfused.run("fill", like=like)
    unfused.run("add", copied, rest, to=op.outputs)
    return unfused.kernels
