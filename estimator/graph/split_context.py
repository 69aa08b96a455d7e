"""Divide the tokens of samples over ranks that hold the same weights: context parallelism."""

from __future__ import annotations

from dataclasses import replace

from estimator.errors import StrategyError
from estimator.graph.cost_kernels import attention_arguments
from estimator.graph.op_graph import OpGraph
from estimator.graph.ops import Op, Parameter, Value
from estimator.graph.split_attention import attention_steps
from estimator.graph.split_kernels import attention_names
from estimator.graph.split_placements import PARTIAL, Placement, Shard
from estimator.graph.split_rules import Placed
from estimator.graph.split_walk import KEEP_PARTIAL, Walk, op_name
from estimator.tensors import TensorSpec

_ATTENTION = frozenset(attention_names())
_PRODUCTS = ("bmm", "baddbmm")
# What routes tokens to experts: every rank does so for its own.
_ROUTING = ("sort", "index", "index_put", "index_put_", "histc", "scatter", "new_zeros")
_TOKENS = 2  # of (samples, heads, tokens, width)


def split_context(graph: OpGraph, *, cp: int, ring: bool = False) -> OpGraph:
    """The graph of one of `cp` ranks, each with an equal part of every sample's tokens.

    Raises StrategyError where no tokens are found, and for attention that is not fused.
    """
    return graph if cp == 1 else _Splitter(graph, cp, ring=ring).split()


class _Splitter(Walk):
    def __init__(self, graph: OpGraph, degree: int, *, ring: bool) -> None:
        super().__init__(graph, "cp", degree)
        self.ring = ring
        self.divides_attention = False
        # (samples, tokens of each) of the batch.
        self.batch = (1, 1)
        for index, value in enumerate(graph.values):
            if value.kind == "input" and len(value.spec.shape) == 3:
                self.at[index] = self._tokens(value.spec, "")

    def split(self) -> OpGraph:
        found = super().split()
        if not self.divides_attention:
            raise StrategyError(
                f"cp={self.degree} divides the tokens of fused attention, and {self.graph.name} "
                "has none; use scaled_dot_product_attention, or leave cp out"
            )
        return found

    @property
    def assumptions(self) -> tuple[str, ...]:
        how = "go around a ring" if self.ring else "are gathered"
        return (
            f"cp={self.degree} divides the tokens of every sample evenly; keys and values {how}, "
            "as in torch's context_parallel, and gradients are averaged over its ranks too",
        )

    def _tokens(self, spec: TensorSpec, module: str) -> Shard:
        if spec.shape[1] % (2 * self.degree):
            where = f" of module '{module}'" if module else ""
            raise StrategyError(
                f"cp={self.degree} gives every rank two equal parts of a sample, but those{where} "
                f"have {spec.shape[1]} tokens; choose a multiple of {2 * self.degree}"
            )
        self.batch = spec.shape[0], spec.shape[1]
        return Shard.along(spec, 1)

    # What the walk asks

    def _makes_parts(self, op: Op) -> bool:
        # Every rank looks up its own tokens.
        is_lookup = op_name(op) == "embedding" and op.phase == "forward"
        return is_lookup and len(op.call.inputs[1].shape) == 2

    def _placed(self, op: Op, before: tuple[Placement, ...]) -> Placed:
        if self._makes_parts(op):
            own = self._tokens(op.call.inputs[1], op.module)
            return Placed((None, own), (Shard.along(op.call.outputs[0], 1),))
        if op_name(op) in _PRODUCTS and any(isinstance(at, Shard) and at.dim for at in before):
            raise StrategyError(
                f"cp={self.degree} divides fused attention alone, but module '{op.module}' "
                "multiplies tokens with each other; use scaled_dot_product_attention"
            )
        if op_name(op) in _ROUTING:
            inputs = tuple(map(self._rows, op.call.inputs))
            return Placed(inputs, tuple(map(self._rows, op.call.outputs)))
        if op_name(op) == "_grouped_mm":
            left, right, *_ = op.call.inputs
            if len(right.shape) == 2:
                rows = self._rows(right)
                wants: list[Placement] = [rows.at(1) if rows else None, rows]
                return Placed((*wants, *before[2:]), (PARTIAL,))
            return Placed((self._rows(left), None, *before[2:]), (self._rows(op.call.outputs[0]),))
        return super()._placed(op, before)

    def _rows(self, spec: TensorSpec) -> Shard | None:
        """The rank's part of what has a row, or several, for every token."""
        samples, length = self.batch
        rows = spec.shape[0] if spec.shape else 0
        whole = rows > 0 and rows % (samples * length) == 0
        return Shard(0, length, rows // (samples * length)) if whole else None

    def _op(self, op: Op) -> None:
        if op_name(op) in _ATTENTION and any(self.at[value] for value in op.inputs):
            self._attend(op)
            return
        super()._op(op)
        for value in op.outputs:
            # The loss of a rank is that of its own tokens.
            if self.at[value] == PARTIAL and self.values[value].spec.numel <= 1:
                self.at[value] = None

    def _keeps_partial(self, op: Op, before: tuple[Placement, ...]) -> bool:
        # Gradients of weights are summed with those of other samples, when all are there.
        name = op_name(op)
        if name in KEEP_PARTIAL or name == "all_reduce":
            return True
        return name == "add" and before == (PARTIAL, PARTIAL)

    def _trained(self, parameter: Parameter, op: Op) -> Parameter:
        gradient = parameter.gradient
        if gradient is not None:
            gradient = self.moved.get(gradient, gradient)
            if isinstance(self.at[gradient], Shard):
                gradient = self._met(gradient, None, op)
        return replace(parameter, gradient=gradient, ready_after=len(self.ops) - 1)

    # Attention

    def _attend(self, op: Op) -> None:
        self.divides_attention = True
        start, _, _ = attention_arguments(op.call)
        length = op.call.arguments[start].shape[_TOKENS]
        wants = tuple(self._at_tokens(spec, length, op) for spec in op.call.inputs)
        outputs = tuple(self._at_tokens(spec, length, op) for spec in op.call.outputs)
        found = Placed(wants, outputs)
        given = zip(op.inputs, wants, strict=True)
        inputs = [self._met(self._current(value, op), want, op) for value, want in given]
        known = {f"in{number}": value for number, value in enumerate(inputs)}
        known |= {f"out{number}": value for number, value in enumerate(op.outputs)}
        calls = (self._localized(call, found) for call in (op.call, op.other_call))
        both = (attention_steps(each, self.axis, self.degree, ring=self.ring) for each in calls)
        for one, two in zip(*both, strict=True):
            for name, spec, other in zip(
                one.outputs, one.call.outputs, two.call.outputs, strict=True
            ):
                if name not in known:
                    known[name] = len(self.values)
                    value = Value(spec=spec, other_spec=other, kind="activation")
                    self.values.append(value)
                    self.at.append(None)
                    self.made_in[known[name]] = op.module
            self.ops.append(
                replace(
                    op,
                    name=f"{op.name}_{one.name}",
                    call=self._calls.setdefault((one.call,), one.call),
                    other_call=self._calls.setdefault((two.call,), two.call),
                    inputs=tuple([known[name] for name in one.inputs]),
                    outputs=tuple([known[name] for name in one.outputs]),
                    is_view=not one.computes,
                )
            )
        self._mark(op, outputs)

    def _at_tokens(self, spec: TensorSpec, length: int, op: Op) -> Placement:
        if len(spec.shape) < 3 or spec.shape[_TOKENS] != length:
            return None
        if len(spec.shape) == 4 and spec.shape[3] == length:
            raise StrategyError(
                f"cp={self.degree} takes causal or full attention, but that of module "
                f"'{op.module}' has a mask of its own; leave the mask out"
            )
        return Shard.along(spec, _TOKENS)
