"""Move tokens to their experts and back as Megatron-Core does, in a traced step.

One kernel of Transformer Engine copies each token once for each of its experts, in the order of
these, and one adds up what they give; neither sorts rows again nor needs them in fp32. Routing
weights multiply inside the experts' activation (WeightedSwiGLU), which also gives their gradient,
so that no result of an expert is saved. Routers multiply bf16 factors whatever they add up in
(RouterGatingLinearFunction). Where ranks divide experts, DeepEP and HybridEP copy on the way: what
is sent are tokens, what comes back are their sums (megatron/core/transformer/moe, moe_utils.py,
token_dispatcher.py, fused_a2a.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from estimator.graph.compile.unfused_kernels import ExpertBiases
from estimator.graph.ir.collectives import is_collective
from estimator.graph.ir.op_graph import GraphChanges, OpGraph
from estimator.graph.ir.ops import Op, with_calls
from estimator.graph.ir.structure import value_roots
from estimator.tensors import TensorSpec
from estimator.workload.recipe import Recipe

GROUPED = "aten._grouped_mm.default"
PERMUTE, UNPERMUTE = "te.permute.default", "te.unpermute.default"
_ROUTERS = (".gate", ".router")
_NARROW, _WIDE = "bfloat16", "float32"


def with_expert_tokens(graph: OpGraph, recipe: Recipe) -> OpGraph:
    """The eager graph with Megatron-Core's kernels around experts, whole or of one rank's."""
    experts = dict.fromkeys(op.module for op in graph.ops if op.call.target == GROUPED)
    if not experts:
        return graph
    changed = _ExpertTokens(graph, recipe)
    for module in experts:
        changed.experts(module)
    changed.routers()
    return changed.graph()


class _ExpertTokens(GraphChanges):
    """Which operators of a graph are left out, which stand in their place, which values differ."""

    def __init__(self, graph: OpGraph, recipe: Recipe) -> None:
        super().__init__(graph)
        self._recipe, self._roots = recipe, value_roots(graph)
        self._of_module: dict[str, list[int]] = {}
        for index, op in enumerate(graph.ops):
            self._of_module.setdefault(op.module, []).append(index)

    # Experts

    def experts(self, module: str) -> None:
        """Change what leads to the grouped products of a module, and from them."""
        ops, own = self._graph.ops, self._of_module[module]
        forward = [index for index in own if ops[index].phase == "forward"]
        backward = [index for index in own if ops[index].phase == "backward"]
        products = [index for index in forward if ops[index].call.target == GROUPED]
        if not products:
            return
        copying = next(filter(self._copies_tokens, (i for i in forward if i < products[0])), None)
        weighing = next(filter(self._weighs, (i for i in forward if i > products[-1])), None)
        if copying is None or weighing is None:
            return
        weights = _WIDE if self._recipe.dispatch else ops[weighing].call.inputs[1].dtype
        biases = ExpertBiases(ops, own, self, weights)
        biases.change(fused=self._recipe.fused_grouped_mlp)
        copies = _rows(ops[copying].call.outputs[0]) // _rows(ops[copying].call.inputs[0])
        tokens = ops[copying].inputs[0]
        self._put(copying, PERMUTE, tokens, ops[copying].outputs[:1])
        last = self._summed(weighing, forward)
        self._put(last, UNPERMUTE, ops[weighing].inputs[0], ops[last].outputs)
        sent = {ops[copying].outputs[0]: (copying, tokens)}
        added = {ops[weighing].inputs[0]: last}
        if copied := self._gradients_copied(backward):
            sent[copied[0]] = copied[1:]
        for index in backward:
            call = ops[index].call
            adds_rows = call.target == "aten.index_put.default" and len(call.inputs) == 3
            # Of each token, or of each expert.
            if index not in self.instead and adds_rows and _is_rows(call.inputs[2]):
                values = ops[index].inputs[2]
                self._put(index, UNPERMUTE, values, ops[index].outputs)
                added[values] = index
                self._leave_out_zeros(ops[index].inputs[0], backward)
        self._exchanged(own, sent, added, copies)

    def _copies_tokens(self, index: int) -> bool:
        """Whether an operator takes rows of tokens by the order of their experts."""
        op = self._graph.ops[index]
        if op.call.target != "aten.index.Tensor" or len(op.inputs) != 2:
            return False
        source, out = op.call.inputs[0], op.call.outputs[0]
        is_weight = self.values[self._roots[op.inputs[0]]].kind == "parameter"
        return len(source.shape) == len(out.shape) == 2 and not is_weight

    def _weighs(self, index: int) -> bool:
        """Whether an operator multiplies what experts give by the weights of routing."""
        op = self._graph.ops[index]
        if op.call.target != "aten.mul.Tensor" or len(op.inputs) != 2:
            return False
        data, weights = op.call.inputs
        return len(data.shape) == 2 and weights.shape == (data.shape[0], 1)

    def _summed(self, weighing: int, forward: Sequence[int]) -> int:
        """Leave out all from the weighing to the sum of each token, which is the last of them."""
        ops, last = self._graph.ops, weighing
        made, rows = set(ops[weighing].outputs), _rows(ops[weighing].call.outputs[0])
        self.instead[weighing] = None
        for index in (index for index in forward if index > weighing):
            op = ops[index]
            if made.isdisjoint(op.inputs):
                continue
            is_summed = _rows(ops[last].call.outputs[0]) < rows and not ops[last].is_view
            if is_collective(op.call) or (is_summed and op.call.target != "aten._to_copy.default"):
                break
            self.instead[index] = None
            made.update(op.outputs)
            last = index
        return last

    def _gradients_copied(self, backward: Sequence[int]) -> tuple[int, int, int] | None:
        """Copy the gradient of tokens to their experts in one kernel, with those of weights.

        Gives the copy, the operator that stands for all, and the gradient that it copies.
        """
        ops = self._graph.ops
        region = []
        for index in backward:
            if ops[index].call.target == GROUPED or is_collective(ops[index].call):
                break
            region.append(index)
        own = set(region)
        made = {v: index for index in region if not ops[index].is_view for v in ops[index].outputs}
        first = ops[region[0]] if region else None
        if first is None or not first.inputs:
            return None
        read = {
            self._roots[value]
            for index, op in enumerate(ops[region[0] :], region[0])
            if index not in own
            for value in op.inputs
        }
        outer = [value for value in made if value in read]
        wide = [v for v in outer if _is_rows(self.values[v].spec)]
        if len(wide) != 1:
            return None
        place = made[wide[0]]
        for index in region:
            root = self._roots[ops[index].outputs[0]]
            # Views of what the forward pass saved stay.
            if not ops[index].is_view or (root in made and root not in outer):
                self.instead[index] = None
        self._put(place, PERMUTE, first.inputs[0], (*wide, *(v for v in outer if v not in wide)))
        return wide[0], place, first.inputs[0]

    def _leave_out_zeros(self, value: int, backward: Sequence[int]) -> None:
        for index in backward:
            op = self._graph.ops[index]
            if op.outputs == (value,) and op.call.target.startswith("aten.new_zeros"):
                self.instead[index] = None

    def _exchanged(
        self,
        own: Sequence[int],
        sent: dict[int, tuple[int, int]],
        added: dict[int, int],
        copies: int,
    ) -> None:
        """Have ranks exchange tokens: each copied on its way, or before it leaves."""
        ops, recipe = self._graph.ops, self._recipe
        exchanges = [
            index
            for index in own
            if is_collective(ops[index].call)
            and ops[index].call.arguments[1:2] == ("ep",)
            and ops[index].inputs
        ]
        about = {
            value for index in exchanges for value in (*ops[index].inputs, *ops[index].outputs)
        }
        for index in own:
            op = ops[index]
            if op.call.target == "aten.clone.default" and about & {*op.inputs, *op.outputs}:
                self._put(index, PERMUTE, op.inputs[0], op.outputs)
        keywords: list[tuple[str, Any]] = []
        keywords += [("overlaps", "micro-batch")] if recipe.expert_overlap else []
        keywords += [("copies", copies)] if recipe.dispatch else []
        for index in exchanges:
            op = ops[index]
            op = with_calls(op, [replace(call, keywords=tuple(keywords)) for call in op.calls])
            self.instead[index] = op
            if recipe.dispatch is None:
                continue
            if op.inputs[0] in sent:
                # The copy's other results, gradients of weights, come with what is received.
                place, value = sent[op.inputs[0]]
                if copy := self.instead[place]:
                    self.instead[place] = None
                    outputs = (*op.outputs, *copy.outputs[1:])
                    self.instead[index] = self._with(op, (value,), copy, op, outputs)
                    self._leave_out_views(op.inputs[0], own)
            elif op.outputs[0] in added:
                place = added[op.outputs[0]]
                if summed := self.instead[place]:
                    self.instead[place] = None
                    self.instead[index] = self._with(op, op.inputs, op, summed, summed.outputs)

    def _leave_out_views(self, value: int, own: Sequence[int]) -> None:
        for index in own:
            op = self._graph.ops[index]
            if op.is_view and value in op.inputs and not is_collective(op.call):
                self.instead[index] = None

    def _with(
        self, op: Op, inputs: tuple[int, ...], giving: Op, taking: Op, outputs: tuple[int, ...]
    ) -> Op:
        """An exchange from what one operator reads to what another one makes."""
        calls = []
        for mine, given, taken in zip(op.calls, giving.calls, taking.calls, strict=True):
            specs = tuple(self.values[v].spec for v in outputs[len(taken.outputs) :])
            arguments = (given.inputs[0], *mine.arguments[1:])
            calls.append(replace(mine, arguments=arguments, outputs=(*taken.outputs, *specs)))
        return with_calls(op, calls, inputs=inputs, outputs=outputs)

    # Routers

    def routers(self) -> None:
        """Have products of routers take bf16 factors, and give bf16 what is read as such."""
        narrow: dict[int, int] = {}
        for op, _ in self._of_routers():
            if op.call.target == "aten._to_copy.default" and op.call.inputs[0].dtype == _NARROW:
                narrow[op.outputs[0]] = op.inputs[0]
        wide = {op.outputs[0]: index for op, index in self._of_routers() if _is_product(op)}
        reads: dict[int, list[int]] = {}
        for index, op in enumerate(self._graph.ops):
            for value in op.inputs:
                reads.setdefault(self._roots[value], []).append(index)
        for copied in tuple(narrow):
            readers = [self._graph.ops[index] for index in reads.get(copied, ())]
            if not all(op.is_view or _is_product(op) for op in readers):
                del narrow[copied]
        for op, index in self._of_routers():
            root = self._roots[op.inputs[0]] if op.inputs else -1
            if op.outputs and op.outputs[0] in narrow:
                self.instead[index] = None
            elif op.is_view and root in narrow:
                self.instead[index] = _narrowed(op, tuple(narrow.get(v, v) for v in op.inputs))
                known, base = self.values[op.outputs[0]], self._roots[narrow[root]]
                one, two = (replace(spec, dtype=_NARROW) for spec in known.specs)
                known = replace(known, spec=one, other_spec=two, base=base)
                self.values[op.outputs[0]] = known
            elif _is_product(op) and any(self._roots[v] in narrow for v in op.inputs):
                self.instead[index] = _narrowed(op, tuple(narrow.get(v, v) for v in op.inputs))
            elif op.call.target == "aten._to_copy.default" and root in wide:
                self._narrow_result(index, wide[root], reads)

    def _of_routers(self) -> Iterator[tuple[Op, int]]:
        for module, indices in self._of_module.items():
            if module.endswith(_ROUTERS):
                yield from ((self._graph.ops[index], index) for index in indices)

    def _narrow_result(self, index: int, product: int, reads: dict[int, list[int]]) -> None:
        """Let a product give at once the bf16 result that one operator copies it to."""
        made = self.instead.get(product, self._graph.ops[product])
        copy = self._graph.ops[index]
        if made is None or copy.inputs != made.outputs or len(reads[made.outputs[0]]) != 1:
            return
        calls = [
            replace(call, outputs=(replace(call.outputs[0], dtype=_NARROW),)) for call in made.calls
        ]
        self.instead[index] = None
        self.instead[product] = with_calls(made, calls, outputs=copy.outputs)

    def _put(self, index: int, target: str, value: int, outputs: tuple[int, ...]) -> None:
        """Have a kernel that reads one tensor stand in the place of an operator."""
        op = self._graph.ops[index]
        self.instead[index] = self.kernel(op, target, (value,), outputs, holds=op.holds)


def _rows(spec: TensorSpec) -> int:
    return spec.shape[0]


def _is_rows(spec: TensorSpec) -> bool:
    return len(spec.shape) == 2 and spec.shape[1] > 1 and "float" in spec.dtype


def _is_product(op: Op) -> bool:
    return op.call.target == "aten.mm.default" and op.call.outputs[0].dtype == _WIDE


def _narrowed(op: Op, inputs: tuple[int, ...]) -> Op:
    """An operator with bf16 arguments; a view of these is bf16 too."""
    calls = []
    for call in op.calls:
        arguments = tuple(
            replace(a, dtype=_NARROW) if isinstance(a, TensorSpec) else a for a in call.arguments
        )
        outputs = call.outputs
        if op.is_view:
            outputs = tuple(replace(spec, dtype=_NARROW) for spec in outputs)
        calls.append(replace(call, arguments=arguments, outputs=outputs))
    return with_calls(op, calls, inputs=inputs)
