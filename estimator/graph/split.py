"""Give the graph of one rank of several that divide a model's layers, from that of one device.

Placements of tensors are followed from operator to operator (`split_rules`); where an operator
needs what its rank does not hold, a collective comes before it. The model is not traced again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from estimator.graph.exchanges import Overlapped, makes_gradients
from estimator.graph.op_graph import OpGraph
from estimator.graph.ops import Op, Parameter, Phase
from estimator.graph.split_placements import PARTIAL, Placement, Shard
from estimator.graph.split_plan import Plan, Style
from estimator.graph.split_rules import Placed
from estimator.graph.split_walk import KEEP_PARTIAL, Walk, op_name
from estimator.graph.split_weights import divided_weights, dtensor_modules
from estimator.machines.profile import CollectiveName
from estimator.tensors import OpCall


def split(graph: OpGraph, plan: Plan, *, tp: int, megatron: bool = False) -> OpGraph:
    """The graph of one of `tp` tensor-parallel ranks, its collectives among the operators.

    They are those of eager torch or, with `megatron`, of Megatron-LM's layers. Raises StrategyError
    for a degree that does not divide what the plan has it divide, and for a plan that names no
    module.
    """
    if tp == 1:
        return graph
    return (_MegatronSplitter if megatron else _Splitter)(graph, plan, tp).split()


class _Splitter(Walk):
    """Tensor-parallel ranks: weights are divided as a plan says."""

    _manner = "its collectives overlap nothing, as in eager torch"

    def __init__(self, graph: OpGraph, plan: Plan, degree: int) -> None:
        super().__init__(graph, "tp", degree)
        self.plan = plan
        modules = dict.fromkeys(op.module for op in graph.ops)
        plan.check(modules)
        self.styles: dict[str, Style | None] = plan.styles_of(modules)
        for weight, shard in divided_weights(graph, self.styles, self.axis, degree).items():
            self.at[weight] = shard
        self.dtensors = dtensor_modules(graph, self.styles, sequence=plan.sequence)

    @property
    def assumptions(self) -> tuple[str, ...]:
        found = [f"{self.axis}={self.degree} divides layers by {self.plan.source}; {self._manner}"]
        divided = any(parameter.is_expert for parameter in self.graph.parameters)
        if not divided and any(op_name(op) == "_grouped_mm" for op in self.graph.ops):
            found.append(f"experts are whole on every rank: {self.axis} does not divide them")
        return tuple(found)

    def _placed(self, op: Op, before: tuple[Placement, ...]) -> Placed:
        if self._makes_parts(op):
            return Placed((None, None), (Shard.along(op.call.outputs[0], 0),))
        return super()._placed(op, before)

    def _makes_parts(self, op: Op) -> bool:
        # The gradient of an embedding's divided rows, from all tokens'.
        divides = self.styles[op.module] == "vocabulary"
        return divides and op_name(op) == "embedding_dense_backward"

    def _current(self, value: int, op: Op) -> int:
        """What now stands for a value, gathered at the edge of a module that needs it whole."""
        value = self.moved.get(value, value)
        at, style = self.at[value], self.styles[op.module]
        maker = self.made_in.get(value, op.module)
        leaves = maker != op.module and op.phase == "forward"
        if leaves and isinstance(at, Shard) and self.styles.get(maker) == "gather":
            value = self.moved[value] = self._met(value, None, op)
            at = None
        if style == "gather" and op.phase == "backward" and at is None and maker != op.module:
            return self._cut(value, op)
        if not isinstance(at, Shard) or style is None or self.values[value].kind == "parameter":
            return value
        if self.made_in.get(value) == op.module or style in ("sequence", "vocabulary"):
            return value
        if op.phase == "backward" and op_name(op) == "add":
            # Autograd adds gradients up where the last of them is made, outside of the module.
            return value
        last = at.dim == len(self.values[value].spec.shape) - 1
        keeps = {
            "column": op.phase == "backward" and last,
            "gather": op.phase == "backward" and last,
            "row": last,
            "replicate": False,
        }[style]
        return value if keeps else self._met(value, None, op)

    def _cut(self, value: int, op: Op) -> int:
        """The rank's columns of a whole gradient, as the backward pass of a gather takes them."""
        known = self.values[value]
        if known.kind != "activation" or not known.spec.shape:
            return value
        shard = Shard.along(known.spec, -1)
        found = self.gathered.get((op.module, value), -1)
        if found < 0:
            base = value if known.base is None else known.base
            found = self._added(known, shard, base=base, module=op.module)
            self.gathered[op.module, value] = found
            calls = []
            for spec in (known.spec, known.other_spec):
                part = self._spec(spec, shard)
                arguments = (spec, shard.dim, 0, part.shape[shard.dim])
                calls.append(OpCall("aten.slice.Tensor", arguments, (), (part,)))
            self._add(f"{self.axis}_slice_{found}", calls, op, (value,), (found,))
        return found

    def _keeps_partial(self, op: Op, before: tuple[Placement, ...]) -> bool:
        name = op_name(op)
        if name in KEEP_PARTIAL:
            return self.made_in.get(self.moved.get(op.inputs[0], op.inputs[0])) == op.module
        sums = name == "add" and len(before) == 2 and op.phase == "backward"
        return sums and self.plan.reduces_once and before == (PARTIAL, PARTIAL)

    def _summed_to(self, value: int) -> Placement:
        spec = self.values[value].spec
        if self.plan.sequence and len(spec.shape) == 3 and self._has_samples(value):
            return Shard.along(spec, 1)
        return None

    def _scope(self, op: Op) -> str:
        return op.module.rpartition(".")[0] if self.plan.reduces_once else op.module

    def _has_samples(self, value: int) -> bool:
        one, two = self.values[value].spec.shape, self.values[value].other_spec.shape
        batch, other = self.graph.batch, self.graph.other_batch
        return one[1] % self.degree == 0 and (other is None or (one[0], two[0]) == (batch, other))

    def _trained(self, parameter: Parameter, op: Op) -> Parameter:
        """A parameter whose gradient is final: what of it a rank holds, and what it reduces."""
        gradient = parameter.gradient
        if gradient is None:
            return replace(parameter, ready_after=len(self.ops) - 1)
        gradient = self.moved.get(gradient, gradient)
        divides = self.styles[op.module] not in (None, "replicate", "sequence")
        if self.at[gradient] == PARTIAL or (self.at[gradient] is not None and not divides):
            gradient = self._met(gradient, None, op)
        return replace(
            parameter,
            spec=self._spec(parameter.spec, self.at[gradient]),
            gradient=gradient,
            ready_after=len(self.ops) - 1,
            is_dtensor=op.module in self.dtensors,
        )


class _MegatronSplitter(_Splitter):
    """Tensor-parallel ranks by Megatron-LM's layers (megatron/core/tensor_parallel/layers.py).

    Sums are made in place, and of gradients beside the product that gives a weight's. What tokens
    are divided for is kept divided, and gathered again beside the product before that (Korthikanti
    et al., Reducing Activation Recomputation in Large Transformer Models, section 4.2.2).
    """

    copies = False
    _manner = "its collectives overlap gradients' products, as in Megatron-LM"

    def __init__(self, graph: OpGraph, plan: Plan, degree: int) -> None:
        super().__init__(graph, plan, degree)
        self.dtensors = set()
        # In which phase what is kept for gradients was made.
        self._made: dict[int, Phase] = {}
        # Of what was gathered and of views of it: what is divided, and the views that led there.
        self._whole: dict[int, tuple[int, tuple[Op, ...]]] = {}

    def _held(self, value: int, op: Op) -> int:
        return self._whole[value][0] if value in self._whole else value

    def _mark(self, op: Op, outputs: Sequence[Placement]) -> None:
        super()._mark(op, outputs)
        if makes_gradients(op):
            return
        self._made.update(dict.fromkeys(op.outputs, op.phase))
        if op.is_view and op.inputs[0] in self._whole:
            divided, views = self._whole[op.inputs[0]]
            self._whole[op.outputs[0]] = divided, (*views, op)

    def _exchanged(self, kind: CollectiveName, value: int, want: Placement, op: Op) -> int:
        found = super()._exchanged(kind, value, want, op)
        if kind == "all_gather" and not makes_gradients(op):
            self._whole[found] = value, ()
        return found

    def _current(self, value: int, op: Op) -> int:
        """What now stands for a value; what is kept divided is gathered again for a gradient."""
        is_of_forward = self._made.get(value, op.phase) != op.phase
        if value not in self._whole or not (is_of_forward or makes_gradients(op)):
            return super()._current(value, op)
        divided, views = self._whole[value]
        op = replace(op, is_repeated=False)
        found = self._met(divided, None, op)
        for view in views:
            before, key = found, (self._scope(op), view.outputs[0])
            found = self.gathered.get(key, -1)
            if found < 0:
                known = self.values[view.outputs[0]]
                found = self._added(known, None, base=before, module=op.module)
                self.gathered[key] = found
                again = replace(view, inputs=(before,), outputs=(found,), phase=op.phase)
                self.ops.append(replace(again, module=op.module, name=f"{view.name}_again"))
        return found

    def _scope(self, op: Op) -> str:
        return super()._scope(op) + (" again" if makes_gradients(op) else "")

    def _overlaps(self, kind: CollectiveName, value: int, op: Op) -> Overlapped | None:
        is_state = len(self.values[value].spec.shape) == 3
        if not makes_gradients(op) or not is_state:
            return None
        return "product" if kind != "all_gather" or value in self._made else None
