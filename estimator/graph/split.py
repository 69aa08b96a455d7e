"""Give the graph of one rank of several that divide a model's layers, from that of one device.

Placements of tensors are followed from operator to operator (`split_rules`); where an operator
needs what its rank does not hold, a collective comes before it. The model is not traced again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from estimator.graph.exchanges import collective_call
from estimator.graph.fused_calls import FUSED, FusedKernel
from estimator.graph.op_graph import OpGraph
from estimator.graph.ops import Op, Parameter, Value
from estimator.graph.split_kernels import placed
from estimator.graph.split_placements import PARTIAL, Placement, Shard, local_spec
from estimator.graph.split_plan import Plan, Style
from estimator.graph.split_rules import Given, Placed
from estimator.graph.split_weights import divided_weights
from estimator.machines.profile import CollectiveName
from estimator.tensors import OpCall, TensorSpec

# A view of a term of a sum is one itself.
_KEEP_PARTIAL = {"view", "_unsafe_view", "reshape", "t", "transpose", "permute", "_to_copy"}


def split(graph: OpGraph, plan: Plan, *, tp: int) -> OpGraph:
    """The graph of one of `tp` tensor-parallel ranks, its collectives among the operators.

    Raises StrategyError for a degree that does not divide what the plan has it divide, and for a
    plan that names no module.
    """
    if tp == 1:
        return graph
    return _Splitter(graph, plan, "tp", tp).split()


class _Splitter:
    """Walks the operators once; every value has a global shape and a placement."""

    def __init__(self, graph: OpGraph, plan: Plan, axis: str, degree: int) -> None:
        self.graph, self.plan, self.axis, self.degree = graph, plan, axis, degree
        self.values: list[Value] = list(graph.values)
        self.at: list[Placement] = [None] * len(graph.values)
        self.ops: list[Op] = []
        self.made_in: dict[int, str] = {}
        self.moved: dict[int, int] = {}
        self.gathered: dict[tuple[str, int], int] = {}
        self.counts: Counter[str] = Counter()
        self.unknown: dict[str, None] = {}
        self._local: dict[tuple[TensorSpec, Placement], TensorSpec] = {}
        self._calls: dict[tuple[Any, ...], OpCall] = {}
        self._rules: dict[tuple[int, str, tuple[Placement, ...]], Placed] = {}
        modules = dict.fromkeys(op.module for op in graph.ops)
        plan.check(modules)
        self.styles: dict[str, Style | None] = {name: plan.style_of(name) for name in modules}
        for weight, shard in divided_weights(graph, self.styles, axis, degree).items():
            self.at[weight] = shard

    def split(self) -> OpGraph:
        final: dict[int, list[int]] = {}
        for number, parameter in enumerate(self.graph.parameters):
            if parameter.ready_after is not None:
                final.setdefault(parameter.ready_after, []).append(number)
        parameters = list(self.graph.parameters)
        for index, op in enumerate(self.graph.ops):
            self._op(op)
            for number in final.get(index, ()):
                parameters[number] = self._trained(parameters[number], op)
        return self._finished(tuple(parameters))

    # Operators

    def _op(self, op: Op) -> None:
        inputs = [self._current(value, op) for value in op.inputs]
        before = tuple([self.at[value] for value in inputs])
        if not any(before) and not self._fills_vocabulary(op):
            if inputs != list(op.inputs):
                op = replace(op, inputs=tuple(inputs))
            self.ops.append(op)
            self._mark(op, (None,) * len(op.outputs))
            return
        if PARTIAL in before and not self._keeps_partial(op, before):
            inputs = [self._reduced(value, op) for value in inputs]
            before = tuple([self.at[value] for value in inputs])
        if PARTIAL in before:
            found = Placed(before, (PARTIAL,) * len(op.outputs))
        else:
            found = self._placed(op, before)
        inputs = [
            self._met(value, want, op) for value, want in zip(inputs, found.wants, strict=True)
        ]
        if found.reduced:
            other = placed(Given(op.other_call, before, self.degree, op.module, self.axis))
            for specs in zip(found.reduced, other.reduced, strict=True):
                calls = [collective_call("all_reduce", self.axis, spec, spec) for spec in specs]
                self._issue("all_reduce", calls, op, (), ())
        self.ops.append(
            replace(
                op,
                inputs=tuple(inputs),
                call=self._localized(op.call, found),
                other_call=self._localized(op.other_call, found),
            )
        )
        self._mark(op, found.outputs)

    def _mark(self, op: Op, outputs: Sequence[Placement]) -> None:
        for value, at in zip(op.outputs, outputs, strict=True):
            self.at[value] = at
            self.made_in[value] = op.module

    def _placed(self, op: Op, before: tuple[Placement, ...]) -> Placed:
        key = (id(op.call), op.module, before)
        found = self._rules.get(key)
        if found is None:
            found = placed(Given(op.call, before, self.degree, op.module, self.axis))
            self._rules[key] = found
        if not found.is_known:
            self.unknown[f"{op.call.target} in module '{op.module}'"] = None
        if self._fills_vocabulary(op):
            found = Placed((None, None), (Shard.along(op.call.outputs[0], 0),))
        return found

    def _fills_vocabulary(self, op: Op) -> bool:
        """Whether it makes the gradient of an embedding's divided rows, from all tokens'."""
        divides = self.styles[op.module] == "vocabulary"
        return divides and _name(op) == "embedding_dense_backward"

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
        if op.phase == "backward" and _name(op) == "add":
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
            found = self.gathered[op.module, value] = len(self.values)
            self.values.append(replace(known, base=known.base if known.base is not None else value))
            self.at.append(shard)
            self.made_in[found] = op.module
            calls = []
            for spec in (known.spec, known.other_spec):
                part = self._spec(spec, shard)
                arguments = (spec, shard.dim, 0, part.shape[shard.dim])
                calls.append(OpCall("aten.slice.Tensor", arguments, (), (part,)))
            self._add(f"{self.axis}_slice_{found}", calls, op, (value,), (found,))
        return found

    def _keeps_partial(self, op: Op, before: tuple[Placement, ...]) -> bool:
        name = _name(op)
        if name in _KEEP_PARTIAL:
            return self.made_in.get(self.moved.get(op.inputs[0], op.inputs[0])) == op.module
        sums = name == "add" and len(before) == 2 and op.phase == "backward"
        return sums and self.plan.reduces_once and before == (PARTIAL, PARTIAL)

    def _reduced(self, value: int, op: Op) -> int:
        """A sum over all ranks, of tokens divided where sequences are."""
        if self.at[value] != PARTIAL:
            return value
        spec = self.values[value].spec
        target: Placement = None
        if self.plan.sequence and len(spec.shape) == 3 and self._has_samples(value):
            target = Shard.along(spec, 1)
        return self._met(value, target, op)

    def _has_samples(self, value: int) -> bool:
        one, two = self.values[value].spec.shape, self.values[value].other_spec.shape
        batch, other = self.graph.batch, self.graph.other_batch
        return one[1] % self.degree == 0 and (other is None or (one[0], two[0]) == (batch, other))

    # Collectives

    def _met(self, value: int, want: Placement, op: Op) -> int:
        """A value where an operator wants it: what every rank holds whole is cut for nothing."""
        have = self.at[value]
        if have == want or have is None or self._alike(have, want):
            return value
        if have == PARTIAL:
            kind: CollectiveName = "all_reduce" if want is None else "reduce_scatter"
            found = self._exchanged(kind, value, want, op)
            self.moved[value] = found
            return found
        scope = op.module.rpartition(".")[0] if self.plan.reduces_once else op.module
        found = self.gathered.get((scope, value), -1)
        if found < 0 or self.at[found] != want:
            kind = "all_gather" if want is None else "all_to_all"
            found = self.gathered[scope, value] = self._exchanged(kind, value, want, op)
        return found

    @staticmethod
    def _alike(have: Placement, want: Placement) -> bool:
        return isinstance(have, Shard) and isinstance(want, Shard) and have.dim == want.dim

    def _exchanged(self, kind: CollectiveName, value: int, want: Placement, op: Op) -> int:
        known = self.values[value]
        new = len(self.values)
        self.values.append(
            Value(spec=known.spec, other_spec=known.other_spec, kind="activation", base=None)
        )
        self.at.append(want)
        self.made_in[new] = ""
        have = self.at[value]
        calls = [
            collective_call(kind, self.axis, self._spec(spec, have), self._spec(spec, want))
            for spec in (known.spec, known.other_spec)
        ]
        self._issue(kind, calls, op, (value,), (new,))
        return new

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
    ) -> None:
        """Add what runs no kernel, before an operator."""
        call, other = (self._calls.setdefault((each,), each) for each in calls)
        self.ops.append(
            Op(
                name=name,
                call=call,
                other_call=other,
                phase=op.phase,
                module=op.module,
                inputs=inputs,
                outputs=outputs,
                is_view=True,
            )
        )

    # Local shapes

    def _spec(self, spec: TensorSpec, at: Placement) -> TensorSpec:
        key = (spec, at)
        found = self._local.get(key)
        if found is None:
            found = self._local[key] = local_spec(spec, at, self.degree)
        return found

    def _localized(self, call: OpCall, found: Placed) -> OpCall:
        """The call as one rank makes it; sizes among its arguments follow its result."""
        key = (id(call), found.wants, found.outputs)
        known = self._calls.get(key)
        if known is not None:
            return known
        outputs = tuple(
            [self._spec(spec, at) for spec, at in zip(call.outputs, found.outputs, strict=True)]
        )
        sizes = {
            spec.shape: local.shape
            for spec, local in zip(call.outputs, outputs, strict=True)
            if spec.shape
        }
        wants = iter(found.wants)

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
        made = self._calls[key] = self._calls.setdefault((made,), made)
        return made

    # The result

    def _trained(self, parameter: Parameter, op: Op) -> Parameter:
        """A parameter whose gradient is final: what of it a rank holds, and what it reduces."""
        gradient = parameter.gradient
        if gradient is None:
            return replace(parameter, ready_after=len(self.ops) - 1)
        gradient = self.moved.get(gradient, gradient)
        divides = self.styles[op.module] not in (None, "replicate", "sequence")
        if self.at[gradient] == PARTIAL or (self.at[gradient] is not None and not divides):
            gradient = self._met(gradient, None, op)
        spec = self._spec(parameter.spec, self.at[gradient])
        return replace(parameter, spec=spec, gradient=gradient, ready_after=len(self.ops) - 1)

    def _finished(self, parameters: tuple[Parameter, ...]) -> OpGraph:
        values = tuple(
            [
                replace(
                    value,
                    spec=self._spec(value.spec, at),
                    other_spec=self._spec(value.other_spec, at),
                )
                if isinstance(at, Shard)
                else value
                for value, at in zip(self.values, self.at, strict=True)
            ]
        )
        assumptions = [
            f"{self.axis}={self.degree} divides layers by {self.plan.source}; its collectives "
            "overlap nothing, as in eager torch, and what DTensor does on the host is not counted"
        ]
        if self.unknown:
            assumptions.append(
                f"gathered whole for want of a rule: {', '.join(list(self.unknown)[:5])}"
            )
        if any(_name(op) == "_grouped_mm" for op in self.graph.ops):
            assumptions.append(f"experts are whole on every rank: {self.axis} does not divide them")
        return replace(
            self.graph,
            ops=tuple(self.ops),
            values=values,
            parameters=parameters,
            assumptions=(*self.graph.assumptions, *assumptions),
        )


def _name(op: Op) -> str:
    return op.call.target.split(".")[1]
