"""Join two recorded runs, at two batch sizes, into operators that serve every batch size."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from estimator.graph.ops import Op, Parameter, Value
from estimator.graph.record import RecordedOp, Recorder
from estimator.graph.repeated import with_repeated
from estimator.tensors import OpCall, TensorSpec


@dataclass(slots=True)
class JoinedRuns:
    """The operators and values of both runs; `difference` says why the batch is fixed, if it is."""

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    difference: str | None

    @property
    def unknown_ops(self) -> tuple[str, ...]:
        """The operators that no formula tells the cost of."""
        from estimator.graph.costs import op_cost

        calls = {op.call: op.is_view for op in self.ops}
        unknown = {c.target for c, is_view in calls.items() if not is_view and op_cost(c) is None}
        return tuple(sorted(unknown))

    def parameters(
        self, ready: tuple[tuple[str, int, int | None, int | None], ...]
    ) -> tuple[Parameter, ...]:
        """Parameters from (name, value, gradient value, index of the op that completes it)."""
        return tuple(
            Parameter(
                name=name, spec=self.values[value].spec, gradient=gradient, ready_after=ready_after
            )
            for name, value, gradient, ready_after in ready
        )


def join_runs(first: Recorder, second: Recorder | None) -> JoinedRuns:
    """Match the runs operator by operator; without a match the first stands alone."""
    difference = None if second is None else _difference(first, second)
    if second is None or difference is not None:
        second = first
    pairs = _Pairs()
    counts: Counter[str] = Counter()
    ops = []
    for index, (one, two) in enumerate(zip(first.ops, second.ops, strict=True)):
        kind = one.call.target.split(".")[1]
        counts[kind] += 1
        call, other_call = pairs.calls(one.call, two.call)
        ops.append(
            Op(
                name=f"{kind}_{counts[kind]}",
                call=call,
                other_call=other_call,
                phase=one.phase,
                module=one.module,
                inputs=one.inputs,
                outputs=one.outputs,
                is_view=one.is_view,
                holds=first.holds.get(index, ()),
            )
        )
    values = []
    for left, right in zip(first.values, second.values, strict=True):
        spec, other_spec = pairs.specs(left.spec, right.spec)
        values.append(Value(spec=spec, other_spec=other_spec, kind=left.kind, base=left.base))
    return JoinedRuns(ops=with_repeated(ops, values), values=tuple(values), difference=difference)


def _difference(first: Recorder, second: Recorder) -> str | None:
    if first.placed != second.placed:
        return "it holds tensors for every sample"
    for position, (one, two) in enumerate(zip(first.ops, second.ops, strict=False)):
        if not _alike(one, two):
            where = f" in module '{one.module}'" if one.module else ""
            found = one.call.target
            if two.call.target != one.call.target:
                found = f"{one.call.target} or {two.call.target}"
            return f"operator {position}{where} depends on it ({found})"
    if len(first.ops) != len(second.ops) or len(first.values) != len(second.values):
        return f"{len(first.ops)} operators become {len(second.ops)} at twice the batch"
    return None


def _alike(one: RecordedOp, two: RecordedOp) -> bool:
    return (
        one.call.target == two.call.target
        and one.inputs == two.inputs
        and one.outputs == two.outputs
        and (one.call is two.call or _same_form(one.call, two.call))
    )


def _same_form(one: OpCall, two: OpCall) -> bool:
    return _same_tree(
        (one.arguments, one.keywords, one.outputs), (two.arguments, two.keywords, two.outputs)
    )


def _same_tree(one: Any, two: Any) -> bool:
    if isinstance(one, tuple):
        return (
            isinstance(two, tuple)
            and len(one) == len(two)
            and all(_same_tree(a, b) for a, b in zip(one, two, strict=True))
        )
    if isinstance(one, TensorSpec):
        return (
            isinstance(two, TensorSpec)
            and one.dtype == two.dtype
            and len(one.shape) == len(two.shape)
        )
    if type(one) is not type(two):
        return False
    return one == two or (isinstance(one, (int, float)) and not isinstance(one, bool))


class _Pairs:
    """Pairs of calls and specs in their final form: no strides where both are contiguous."""

    def __init__(self) -> None:
        self._specs: dict[tuple[TensorSpec, TensorSpec], tuple[TensorSpec, TensorSpec]] = {}
        self._calls: dict[tuple[int, int], tuple[OpCall, OpCall]] = {}
        self._unique: dict[OpCall, OpCall] = {}

    def specs(self, one: TensorSpec, two: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
        key = (one, two)
        found = self._specs.get(key)
        if found is None:
            if _is_contiguous(one) and _is_contiguous(two):
                left = TensorSpec(one.shape, one.dtype)
                found = (left, left if two.shape == one.shape else TensorSpec(two.shape, two.dtype))
            else:
                found = (one, one if two == one else two)
            self._specs[key] = found
        return found

    def calls(self, one: OpCall, two: OpCall) -> tuple[OpCall, OpCall]:
        # Recorders keep equal calls once, and alive, so identity stands for equality.
        key = (id(one), id(two))
        found = self._calls.get(key)
        if found is None:
            arguments = self._tree(one.arguments, two.arguments)
            keywords = self._tree(one.keywords, two.keywords)
            outputs = self._tree(one.outputs, two.outputs)
            left = OpCall(one.target, arguments[0], keywords[0], outputs[0])
            right = OpCall(two.target, arguments[1], keywords[1], outputs[1])
            left = self._unique.setdefault(left, left)
            found = self._calls[key] = (left, self._unique.setdefault(right, right))
        return found

    def _tree(self, one: Any, two: Any) -> tuple[Any, Any]:
        if isinstance(one, TensorSpec):
            return self.specs(one, two)
        if isinstance(one, tuple):
            pairs = [self._tree(a, b) for a, b in zip(one, two, strict=True)]
            return tuple([left for left, _ in pairs]), tuple([right for _, right in pairs])
        return one, two


def _is_contiguous(spec: TensorSpec) -> bool:
    if spec.strides is None:
        return True
    expected = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.strides), strict=True):
        if size == 0:
            return True
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
