"""Walk a traced graph with placements, and write down what one rank computes and sends.

Every value has a global shape and a placement, followed from operator to operator (`rules`); where
an operator needs what its rank does not hold, a collective comes before it. What is divided, and
what becomes of gradients, an axis says itself. The model is not traced again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from estimator.graph.costs.call_costs import FUSED, FusedKernel
from estimator.graph.ir.collectives import Overlapped, collective_call, makes_gradients
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import Op, Parameter, Phase, Value
from estimator.graph.partition.plan import Plan, Style, divided_weights, dtensor_modules
from estimator.graph.partition.rules import (
    PARTIAL,
    Given,
    Placed,
    Placement,
    Routed,
    Shard,
    local_spec,
    placed,
)
from estimator.machines.profile import CollectiveName
from estimator.tensors import OpCall, TensorSpec

# A view of a term of a sum is one itself.
KEEP_PARTIAL = {"view", "_unsafe_view", "reshape", "t", "transpose", "permute", "_to_copy"}


class Partitioner(ABC):
    """One pass over the operators of a graph, for one of `degree` ranks along `axis`."""

    # Whether collectives copy what they send, as torch's functional ones.
    copies = True

    def __init__(self, graph: OpGraph, axis: str, degree: int) -> None:
        self.graph, self.axis, self.degree = graph, axis, degree
        self.values: list[Value] = list(graph.values)
        self.at: list[Placement] = [None] * len(graph.values)
        self.ops: list[Op] = []
        self.made_in: dict[int, str] = {}
        self.moved: dict[int, int] = {}
        self.gathered: dict[tuple[str, int], int] = {}
        self.counts: Counter[str] = Counter()
        self.unknown: dict[str, None] = {}
        self.dtensors: set[str] = set()
        self.entered: set[tuple[str, str]] = set()
        # By identity, each with what it was made of: that stays while it is known.
        self._local: dict[tuple[int, object], tuple[TensorSpec, TensorSpec]] = {}
        self._parts: dict[tuple[int, int], tuple[OpCall, Placed, OpCall]] = {}
        self._calls: dict[tuple[OpCall], OpCall] = {}
        self._rules: dict[tuple[int, tuple[Placement, ...]], Placed] = {}

    def split(self) -> OpGraph:
        """The graph of one rank; raises StrategyError."""
        final: dict[int, list[int]] = {}
        for number, parameter in enumerate(self.graph.parameters):
            if parameter.ready_after is not None:
                final.setdefault(parameter.ready_after, []).append(number)
        parameters = list(self.graph.parameters)
        for index, op in enumerate(self.graph.ops):
            self._op(op)
            for number in final.get(index, ()):
                trained, gradient = parameters[number], parameters[number].gradient
                changes: dict[str, Any] = {}
                if gradient is not None:
                    gradient = self.moved.get(gradient, gradient)
                    changes = {"gradient": gradient, **self._trained(trained, gradient, op)}
                parameters[number] = replace(trained, ready_after=len(self.ops) - 1, **changes)
        return self._finished(tuple(parameters))

    # What an axis says

    @property
    @abstractmethod
    def assumptions(self) -> tuple[str, ...]:
        """What the split takes for granted."""

    @abstractmethod
    def _trained(self, parameter: Parameter, gradient: int, op: Op) -> dict[str, Any]:
        """What a rank holds of a parameter whose gradient is final; adds what it reduces."""

    @abstractmethod
    def _keeps_partial(self, op: Op, before: tuple[Placement, ...]) -> bool:
        """Whether an operator of terms of a sum makes terms of a sum."""

    def _current(self, value: int, op: Op) -> int:
        """What now stands for a value where an operator takes it."""
        return self.moved.get(value, value)

    def _makes_parts(self, op: Op) -> bool:
        """Whether an operator makes parts of what every rank holds whole."""
        return False

    def _summed_to(self, value: int) -> Placement:
        """Where the sum of the terms of all ranks is."""
        return None

    def _scope(self, op: Op) -> str:
        """Within which module what was gathered is used again."""
        return op.module

    def _overlaps(self, kind: CollectiveName, value: int, op: Op) -> Overlapped | None:
        """What a collective that an operator needs runs beside."""
        return None

    # Operators

    def _op(self, op: Op) -> None:
        if op.holds:
            op = replace(op, holds=tuple([self._held(value, op) for value in op.holds]))
        inputs = [self._current(value, op) for value in op.inputs]
        before = tuple([self.at[value] for value in inputs])
        if not any(before) and not self._makes_parts(op):
            if inputs != list(op.inputs) or op.module in self.dtensors:
                op = replace(op, inputs=tuple(inputs), enters_dtensor=self._enters(op))
            self._append(op)
            self._mark(op, (None,) * len(op.outputs))
            return
        if PARTIAL in before and not self._keeps_partial(op, before):
            inputs = [
                self._met(v, self._summed_to(v), op) if self.at[v] == PARTIAL else v for v in inputs
            ]
            before = tuple([self.at[value] for value in inputs])
        if PARTIAL in before:
            terms = Placed(before, (PARTIAL,) * len(op.outputs))
            laid = self._rules.setdefault((id(op.call), before), terms)
        else:
            laid = self._placed(op, before)
        inputs = [
            self._met(value, want, op) for value, want in zip(inputs, laid.wants, strict=True)
        ]
        if laid.reduced:
            other = placed(Given(op.other_call, before, self.degree, op.module, self.axis))
            for specs in zip(laid.reduced, other.reduced, strict=True):
                calls = [collective_call("all_reduce", self.axis, spec, spec) for spec in specs]
                self._issue("all_reduce", calls, op, (), ())
        self._append(
            replace(
                op,
                inputs=tuple(inputs),
                call=self._localized(op.call, laid),
                other_call=self._localized(op.other_call, laid),
                enters_dtensor=self._enters(op),
            )
        )
        self._mark(op, laid.outputs)

    def _held(self, value: int, op: Op) -> int:
        """What a node of autograd holds instead of a value of the whole graph."""
        return self.gathered.get((self._scope(op), value), value)

    def _enters(self, op: Op) -> bool:
        """Whether a module that DTensor runs is called with an operator, once a pass."""
        call = op.module, op.phase
        if call in self.entered or op.module not in self.dtensors:
            return False
        self.entered.add(call)
        return True

    def _mark(self, op: Op, outputs: Sequence[Placement]) -> None:
        for value, at in zip(op.outputs, outputs, strict=True):
            self.at[value] = at
            self.made_in[value] = op.module

    def _append(self, op: Op) -> None:
        """Add an operator; a view is one of what now stands for its input."""
        if op.is_view:
            for value in op.outputs:
                known = self.values[value]
                if known.base is not None and known.base != op.inputs[0]:
                    self.values[value] = replace(known, base=op.inputs[0])
        self.ops.append(op)

    def _placed(self, op: Op, before: tuple[Placement, ...]) -> Placed:
        # A rule tells the module only where it refuses a degree.
        key = id(op.call), before
        kept = self._rules.get(key)
        if kept is None:
            kept = placed(Given(op.call, before, self.degree, op.module, self.axis))
            self._rules[key] = kept
        if not kept.is_known:
            self.unknown[f"{op.call.target} in module '{op.module}'"] = None
        return kept

    # Collectives

    def _met(self, value: int, want: Placement, op: Op) -> int:
        """A value where an operator wants it: what every rank holds whole is cut for nothing."""
        have = self.at[value]
        is_there = isinstance(have, Shard) and isinstance(want, Shard) and have.dim == want.dim
        if have == want or have is None or is_there:
            return value
        if have == PARTIAL:
            kind: CollectiveName = "all_reduce" if want is None else "reduce_scatter"
            exchanged = self._exchanged(kind, value, want, op)
            self.moved[value] = exchanged
            return exchanged
        scope = self._scope(op)
        exchanged = self.gathered.get((scope, value), -1)
        if exchanged < 0 or self.at[exchanged] != want:
            kind = "all_gather" if want is None else "all_to_all"
            exchanged = self.gathered[scope, value] = self._exchanged(kind, value, want, op)
        return exchanged

    def _exchanged(self, kind: CollectiveName, value: int, want: Placement, op: Op) -> int:
        """What a collective makes of a value.

        torch's functional ones sum in a copy, and exchange along the first dimension alone: parts
        of another are put in order by one more copy (_functional_collectives.py).
        """
        have, overlaps = self.at[value], self._overlaps(kind, value, op)
        if self.copies and (kind == "all_reduce" or (isinstance(want, Shard) and want.dim)):
            value = self._copied(value, op)
        new = self._collective(kind, value, want, op, overlaps)
        in_order = not self.copies or not isinstance(have, Shard) or not have.dim
        return new if in_order else self._copied(new, op)

    def _collective(
        self,
        kind: CollectiveName,
        value: int,
        want: Placement,
        op: Op,
        overlaps: Overlapped | None = None,
    ) -> int:
        """Add a collective of a value before an operator; gives what it makes."""
        known, have = self.values[value], self.at[value]
        new = self._added(known, want)
        calls = []
        for spec in known.specs:
            given, made = self._spec(spec, have), self._spec(spec, want)
            calls.append(collective_call(kind, self.axis, given, made, overlaps=overlaps))
        self._issue(kind, calls, op, (value,), (new,))
        return new

    def _sliced(self, value: int, shard: Shard, op: Op, scope: str) -> int:
        """The rank's part of what every rank holds whole, a view of it, for a scope."""
        known = self.values[value]
        base = value if known.base is None else known.base
        new = self.gathered[scope, value] = self._added(known, shard, base=base, module=scope)
        calls = []
        for spec in known.specs:
            part = self._spec(spec, shard)
            arguments = (spec, shard.dim, 0, part.shape[shard.dim])
            calls.append(OpCall("aten.slice.Tensor", arguments, (), (part,)))
        self._add(f"{self.axis}_slice_{new}", calls, op, (value,), (new,))
        return new

    def _copied(self, value: int, op: Op) -> int:
        known, at = self.values[value], self.at[value]
        new = self._added(known, at)
        specs = [self._spec(spec, at) for spec in known.specs]
        calls = [OpCall("aten.clone.default", (spec,), (), (spec,)) for spec in specs]
        name = f"{self.axis}_copy_{new}"
        self._add(name, calls, op, (value,), (new,), is_view=False)
        return new

    def _added(
        self, known: Value, at: Placement, *, base: int | None = None, module: str = ""
    ) -> int:
        """A new value of the shape of another one, which may be a view of `base`."""
        self.values.append(replace(known, kind="activation", base=base))
        self.at.append(at)
        self.made_in[len(self.values) - 1] = module
        return len(self.values) - 1

    def _issue(
        self,
        kind: CollectiveName,
        calls: Sequence[OpCall],
        op: Op,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
    ) -> None:
        """Add a collective before an operator."""
        self.counts[kind] += 1
        self._add(f"{self.axis}_{kind}_{self.counts[kind]}", calls, op, inputs, outputs)

    def _add(
        self,
        name: str,
        calls: Sequence[OpCall],
        op: Op,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        *,
        is_view: bool = True,
    ) -> None:
        """Add an operator before another one; collectives run no kernel of their own."""
        call, other = (self._calls.setdefault((one,), one) for one in calls)
        self.ops.append(
            Op(
                name=name,
                call=call,
                other_call=other,
                phase=op.phase,
                module=op.module,
                inputs=inputs,
                outputs=outputs,
                is_view=is_view,
            )
        )

    # Local shapes

    def _spec(self, spec: TensorSpec, at: Placement) -> TensorSpec:
        # Of a shard the dimension alone counts.
        key = id(spec), at.dim if isinstance(at, Shard) else (at,)
        local = self._local.get(key)
        if local is None:
            local = self._local[key] = spec, local_spec(spec, at, self.degree)
        return local[1]

    def _localized(self, call: OpCall, placed: Placed) -> OpCall:
        """The call as one rank makes it; sizes among its arguments follow its result."""
        key = id(call), id(placed)
        known = self._parts.get(key)
        if known is not None:
            return known[2]
        outputs = tuple(
            [self._spec(spec, at) for spec, at in zip(call.outputs, placed.outputs, strict=True)]
        )
        sizes = {
            spec.shape: local.shape
            for spec, local in zip(call.outputs, outputs, strict=True)
            if spec.shape
        }
        wants = iter(placed.wants)

        def local(tree: Any) -> Any:
            if isinstance(tree, TensorSpec):
                return self._spec(tree, next(wants))
            if isinstance(tree, tuple):
                return sizes[tree] if tree in sizes else tuple([local(item) for item in tree])
            return tree

        arguments = tuple([local(item) for item in call.arguments])
        keywords = tuple([(name, local(item)) for name, item in call.keywords])
        made = OpCall(call.target, arguments, keywords, outputs)
        if call.target.startswith(FUSED):
            part = outputs[0].nbytes / call.outputs[0].nbytes
            made = FusedKernel.of(made).share(part).call(made.inputs, outputs)
        made = self._calls.setdefault((made,), made)
        self._parts[key] = call, placed, made
        return made

    def _finished(self, parameters: tuple[Parameter, ...]) -> OpGraph:
        values = tuple(
            [
                replace(
                    value,
                    spec=self._spec(value.spec, at),
                    other_spec=self._spec(value.other_spec, at),
                )
                if isinstance(at, (Shard, Routed))
                else value
                for value, at in zip(self.values, self.at, strict=True)
            ]
        )
        given = zip(self.graph.parameters, parameters, strict=True)
        trained_bytes = sum(undivided.spec.nbytes - part.spec.nbytes for undivided, part in given)
        divided = zip(self.graph.values, values, strict=False)
        left_bytes = sum(
            undivided.spec.nbytes - part.spec.nbytes
            for undivided, part in divided
            if undivided.kind == "parameter" and undivided.base is None
        )
        frozen_bytes = self.graph.frozen_parameter_bytes
        assumptions = list(self.assumptions)
        if self.unknown:
            assumptions.append(
                f"gathered whole for want of a rule: {', '.join(list(self.unknown)[:5])}"
            )
        return replace(
            self.graph,
            ops=tuple(self.ops),
            values=values,
            parameters=parameters,
            # Weights that are not trained are divided like the others.
            frozen_parameter_bytes=max(frozen_bytes - max(left_bytes - trained_bytes, 0), 0),
            assumptions=(*self.graph.assumptions, *assumptions),
        )


def split(graph: OpGraph, plan: Plan, *, tp: int, megatron: bool = False) -> OpGraph:
    """The graph of one of `tp` tensor-parallel ranks, its collectives among the operators.

    They are those of eager torch or, with `megatron`, of Megatron-LM's layers. Raises StrategyError
    for a degree that does not divide what the plan has it divide, and for a plan that names no
    module.
    """
    if tp == 1:
        return graph
    return (_MegatronSplitter if megatron else _TensorSplitter)(graph, plan, tp).split()


class _TensorSplitter(Partitioner):
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
        listed = [f"{self.axis}={self.degree} divides layers by {self.plan.source}; {self._manner}"]
        divided = any(parameter.is_expert for parameter in self.graph.parameters)
        if not divided and any(op.call.name == "_grouped_mm" for op in self.graph.ops):
            listed.append(f"experts are whole on every rank: {self.axis} does not divide them")
        return tuple(listed)

    def _placed(self, op: Op, before: tuple[Placement, ...]) -> Placed:
        if self._makes_parts(op):
            return Placed((None, None), (Shard.along(op.call.outputs[0], 0),))
        return super()._placed(op, before)

    def _makes_parts(self, op: Op) -> bool:
        # The gradient of an embedding's divided rows, from all tokens'.
        divides = self.styles[op.module] == "vocabulary"
        return divides and op.call.name == "embedding_dense_backward"

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
        if op.phase == "backward" and op.call.name == "add":
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
        gathered = self.gathered.get((op.module, value), -1)
        if gathered < 0:
            gathered = self._sliced(value, shard, op, op.module)
        return gathered

    def _keeps_partial(self, op: Op, before: tuple[Placement, ...]) -> bool:
        name = op.call.name
        if name in KEEP_PARTIAL:
            return self.made_in.get(self.moved.get(op.inputs[0], op.inputs[0])) == op.module
        sums = name == "add" and len(before) == 2 and op.phase == "backward"
        return sums and self.plan.reduces_once and before == (PARTIAL, PARTIAL)

    def _summed_to(self, value: int) -> Placement:
        spec, other_spec = self.values[value].specs
        if not self.plan.sequence or len(spec.shape) != 3 or spec.shape[1] % self.degree:
            return None
        batch, other = self.graph.batch, self.graph.other_batch
        has_samples = (spec.shape[0], other_spec.shape[0]) == (batch, other)
        return Shard.along(spec, 1) if other is None or has_samples else None

    def _scope(self, op: Op) -> str:
        return op.module.rpartition(".")[0] if self.plan.reduces_once else op.module

    def _trained(self, parameter: Parameter, gradient: int, op: Op) -> dict[str, Any]:
        divides = self.styles[op.module] not in (None, "replicate", "sequence")
        if self.at[gradient] == PARTIAL or (self.at[gradient] is not None and not divides):
            gradient = self._met(gradient, None, op)
        spec = self._spec(parameter.spec, self.at[gradient])
        return {"spec": spec, "gradient": gradient, "is_dtensor": op.module in self.dtensors}


class _MegatronSplitter(_TensorSplitter):
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
        # A view of nothing is one of a shape alone, as what counts the tokens of experts takes.
        if op.is_view and op.inputs and op.inputs[0] in self._whole:
            divided, views = self._whole[op.inputs[0]]
            self._whole[op.outputs[0]] = divided, (*views, op)

    def _exchanged(self, kind: CollectiveName, value: int, want: Placement, op: Op) -> int:
        exchanged = super()._exchanged(kind, value, want, op)
        if kind == "all_gather" and not makes_gradients(op):
            self._whole[exchanged] = value, ()
        return exchanged

    def _current(self, value: int, op: Op) -> int:
        """What now stands for a value; what is kept divided is gathered again for a gradient."""
        is_of_forward = self._made.get(value, op.phase) != op.phase
        if value not in self._whole or not (is_of_forward or makes_gradients(op)):
            return super()._current(value, op)
        divided, views = self._whole[value]
        op = replace(op, is_repeated=False)
        current = self._met(divided, None, op)
        for view in views:
            before, key = current, (self._scope(op), view.outputs[0])
            current = self.gathered.get(key, -1)
            if current < 0:
                known = self.values[view.outputs[0]]
                current = self._added(known, None, base=before, module=op.module)
                self.gathered[key] = current
                again = replace(view, inputs=(before,), outputs=(current,), phase=op.phase)
                self.ops.append(replace(again, module=op.module, name=f"{view.name}_again"))
        return current

    def _scope(self, op: Op) -> str:
        return super()._scope(op) + (" again" if makes_gradients(op) else "")

    def _overlaps(self, kind: CollectiveName, value: int, op: Op) -> Overlapped | None:
        is_state = len(self.values[value].spec.shape) == 3
        if not makes_gradients(op) or not is_state:
            return None
        return "product" if kind != "all_gather" or value in self._made else None
