"""Run biases and clamps of experts as Megatron-Core does, outside of its fused kernels.

Transformer Engine's grouped linear layer adds the bias of the first product, and sums its gradient,
in the product itself or in the cast of its gradient (module/grouped_linear.py). All else runs in
kernels of its own, each of which reads and writes whole tensors of rows (megatron/core,
fusions/fused_bias_geglu.py, weighted_bias_quick_geglu_impl; transformer/moe/experts.py,
TEGroupedMLP._apply_bias):

- The halves of the first product are clamped one by one and put together again for the fused
  activation. Gradients of clamps read what was clamped, and are put together likewise.
- The bias of the second product is multiplied by each row's weight of routing and added, expert by
  expert; rows are put together and cast back. Weights of routing are in fp32 where DeepEP or
  HybridEP brings them (fused_a2a.py), and then all of that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from estimator.graph.ir.ops import Op, Value, with_calls
from estimator.tensors import OpCall, TensorSpec

# Kernels that no compiler fuses, and how many of them one operator stands for.
EAGER, PIECES = "eager", "pieces"
_CLAMP = "aten.clamp."
_GROUPED = "aten._grouped_mm.default"


@dataclass(slots=True)
class ExpertKernels:
    """Values of a graph, operators left out (None) or put in a place, and operators put before."""

    values: list[Value]
    instead: dict[int, Op | None] = field(default_factory=dict)
    before: dict[int, list[Op]] = field(default_factory=dict)

    def new(self, like: int, dtype: str | None = None) -> int:
        """A tensor as large as another one."""
        known = self.values[like]
        one, two = (
            replace(spec, dtype=dtype or spec.dtype, strides=None)
            for spec in (known.spec, known.other_spec)
        )
        self.values.append(Value(spec=one, other_spec=two, kind="activation"))
        return len(self.values) - 1

    def column(self, like: int) -> int:
        """One number for each row of another tensor."""
        made = self.new(like)
        one, two = (
            replace(spec, shape=(*spec.shape[:-1], 1))
            for spec in (self.values[made].spec, self.values[made].other_spec)
        )
        self.values[made] = replace(self.values[made], spec=one, other_spec=two)
        return made

    def kernel(
        self, op: Op, target: str, inputs: Sequence[int], outputs: Sequence[int], **changes: Any
    ) -> Op:
        """A call beside an operator that reads and writes values."""
        keywords = tuple(changes.pop("keywords", {}).items())
        one, two = (
            OpCall(target, given, keywords, made)
            for given, made in zip(self._specs(inputs), self._specs(outputs), strict=True)
        )
        name = f"{target.split('.')[1]}_{outputs[0]}"
        changes = {"name": name, "is_view": False, "holds": (), **changes}
        ends = {"inputs": tuple(inputs), "outputs": tuple(outputs)}
        return with_calls(op, (one, two), **changes, **ends)

    def _specs(self, values: Sequence[int]) -> tuple[tuple[TensorSpec, ...], ...]:
        known = [self.values[value] for value in values]
        return tuple(v.spec for v in known), tuple(v.other_spec for v in known)


class ExpertBiases:
    """The kernels around the two products of one module of experts that have biases."""

    def __init__(
        self, ops: Sequence[Op], own: Sequence[int], changes: ExpertKernels, weights: str
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
        whole = changes.new(ops[first].outputs[0])
        clamped = [changes.new(value) for value in halves]
        kernels = [
            changes.kernel(ops[index], f"{EAGER}.clamp.default", ops[index].inputs[:1], (made,))
            for index, made in zip(clamps, clamped, strict=True)
        ]
        last = ops[clamps[1]]
        kernels.append(changes.kernel(last, f"{EAGER}.cat.default", clamped, (whole,)))
        for index, half in zip(clamps, halves, strict=True):
            changes.values[half] = replace(changes.values[half], base=whole)
            self._view(index, whole)
        # Both halves are views of what the last of these kernels makes.
        changes.before[clamps[0]] = kernels
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
        parameter = ops[taken].inputs[0]
        experts = {"keywords": {PIECES: ops[taken].call.inputs[0].shape[0]}}
        rows, weighted, sums = (
            changes.new(result, dtype) for dtype in (None, self._weights, self._weights)
        )
        changes.instead[product] = replace(ops[product], outputs=(rows,))
        changes.instead[taken] = None
        self._view(added, result)
        op = ops[added]
        changes.before[added] = [
            changes.kernel(op, f"{EAGER}.mul.default", (parameter,), (weighted,), **experts),
            changes.kernel(op, f"{EAGER}.add.default", (rows, weighted), (sums,), **experts),
            *self._put_together(op, sums, result),
        ]
        self._weighted_gradients(summed, parameter, experts)

    def _put_together(self, op: Op, pieces: int, result: int) -> list[Op]:
        """Join rows of all experts in the dtype of a result."""
        changes = self._changes
        if changes.values[pieces].spec.dtype == changes.values[result].spec.dtype:
            return [changes.kernel(op, f"{EAGER}.cat.default", (pieces,), (result,))]
        joined = changes.new(pieces)
        return [
            changes.kernel(op, f"{EAGER}.cat.default", (pieces,), (joined,)),
            changes.kernel(op, f"{EAGER}.copy.default", (joined,), (result,)),
        ]

    def _weighted_gradients(self, summed: int, parameter: int, experts: dict[str, Any]) -> None:
        """Gradients of rows, of the bias and of the weights, from those of the sums."""
        ops, changes = self._ops, self._changes
        op = ops[summed]
        given = op.inputs[2]
        products = [
            i for i in self._backward if ops[i].call.target == _GROUPED and given in ops[i].inputs
        ]
        kernels, wide = [], given
        if changes.values[given].spec.dtype != self._weights:
            wide = changes.new(given, self._weights)
            kernels = [changes.kernel(op, f"{EAGER}.copy.default", (given,), (wide,))]
        narrow, rows = wide, changes.new(given)
        if wide != given:
            narrow = changes.new(given)
            kernels.append(
                changes.kernel(op, f"{EAGER}.copy.default", (wide,), (narrow,), **experts)
            )
        kernels.append(changes.kernel(op, f"{EAGER}.cat.default", (narrow,), (rows,)))
        of_bias, of_weights = changes.new(wide), changes.new(wide)
        total = changes.column(wide)
        kernels += [
            changes.kernel(op, f"{EAGER}.mul.default", (wide,), (of_weights,), **experts),
            changes.kernel(op, f"{EAGER}.sum.default", (of_weights,), (total,), **experts),
            changes.kernel(op, f"{EAGER}.mul.default", (wide,), (of_bias,), **experts),
            changes.kernel(op, f"{EAGER}.sum.default", (of_bias,), op.outputs, **experts),
        ]
        changes.before[products[0]] = kernels
        for index in products:
            reading = tuple(rows if value == given else value for value in ops[index].inputs)
            changes.instead[index] = replace(ops[index], inputs=reading)
        changes.instead[summed] = None
        self._leave_out_zeros(summed)
