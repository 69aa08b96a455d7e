"""Divide the tokens of samples over ranks that hold the same weights: context parallelism.

As torch's ``context_parallel`` (experimental/_context_parallel/_attention.py): keys and values of
all ranks are gathered once a pass, or go around a ring; gradients of them always go around. Under
a causal mask a rank has an early and a late part of every sample, so that all compute alike: its
own block under the mask, then half of every other rank's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from estimator.errors import StrategyError
from estimator.graph.costs.matmuls import ATTENTION, attention_arguments
from estimator.graph.costs.registry import argument
from estimator.graph.ir.collectives import Overlapped, collective_call, ring_call
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import Op, Parameter, Value
from estimator.graph.partition.partitioner import KEEP_PARTIAL, Partitioner
from estimator.graph.partition.rules import PARTIAL, Placed, Placement, Shard
from estimator.tensors import OpCall, TensorSpec

_TOKENS = 2  # of (samples, heads, tokens, width)
# A block's output is weighed by the sums of its rows: out - sigmoid(...) * (out - block's).
_PASSES_OF_A_MERGE = 3


class PassCall(NamedTuple):
    """One call of a pass; `in2` is the attention's third tensor, `out0` its first result."""

    name: str
    call: OpCall
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    computes: bool = True


def attention_steps(call: OpCall, axis: str, degree: int, *, ring: bool) -> Iterator[PassCall]:
    """What one of `degree` ranks runs for a call of attention on its own tokens."""
    start, is_backward, _ = attention_arguments(call)
    names = [f"in{number}" for number in range(len(call.inputs))]
    keys = call.arguments[start + 1], call.arguments[start + 2]
    of_keys = names[start + 1], names[start + 2]
    for step in range(degree):
        if step < degree - 1 and (ring or step == 0):
            yield _joined(f"joined{step}", keys, of_keys)
            yield _sent(f"arrived{step}", keys, f"joined{step}", axis, degree, ring=ring)
        block = call if step == 0 else _block(call)
        given, results = list(names), [f"out{n}" for n in range(len(call.outputs))]
        if step:
            given[start + 1] = given[start + 2] = f"arrived{step - 1 if ring else 0}"
            results = [f"block{step}_{n}" for n in range(len(call.outputs))]
            of_keys = given[start + 1], given[start + 2]
        yield PassCall(f"block{step}", block, tuple(given), tuple(results))
        if is_backward:
            yield from _gradients(call, step, results, axis, degree)
        elif step:
            for turn in range(_PASSES_OF_A_MERGE):
                yield _sum(f"merged{step}_{turn}", call.outputs[0], ("out0", results[0]))


def _gradients(
    call: OpCall, step: int, results: list[str], axis: str, degree: int
) -> Iterator[PassCall]:
    """Sums in float32, and those of keys and values to the next rank."""
    for number in range(3):
        yield _sum(f"sum{step}_{number}", call.outputs[number], (f"out{number}", results[number]))
    keys = _wide(call.outputs[1]), _wide(call.outputs[2])
    yield _joined(f"gradients{step}", keys, (f"sum{step}_1", f"sum{step}_2"))
    last = step == degree - 1
    yield _sent(f"back{step}", keys, f"gradients{step}", axis, degree, ring=True, overlaps=not last)


def _joined(name: str, keys: tuple[TensorSpec, TensorSpec], given: tuple[str, str]) -> PassCall:
    """Keys and values in one buffer."""
    call = OpCall("aten.cat.default", (keys, 3), (), (_both(keys),))
    return PassCall(name, call, given, (name,))


def _sent(
    name: str,
    keys: tuple[TensorSpec, TensorSpec],
    given: str,
    axis: str,
    degree: int,
    *,
    ring: bool,
    overlaps: bool = True,
) -> PassCall:
    both = _both(keys)
    if ring:
        call = ring_call(axis, both, degree, overlaps=overlaps)
    else:
        gathered = TensorSpec((degree * both.shape[0], *both.shape[1:]), both.dtype)
        beside: Overlapped | None = "attention" if overlaps else None
        call = collective_call("all_gather", axis, both, gathered, overlaps=beside)
    return PassCall(name, call, (given,), (name,), computes=False)


def _both(keys: tuple[TensorSpec, TensorSpec]) -> TensorSpec:
    key, value = keys
    return TensorSpec((*key.shape[:3], key.shape[3] + value.shape[3]), key.dtype)


def _sum(name: str, spec: TensorSpec, given: tuple[str, str]) -> PassCall:
    wide = _wide(spec)
    return PassCall(name, OpCall("aten.add.Tensor", (wide, wide), (), (wide,)), given, (name,))


def _wide(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(spec.shape, "float32")


def _block(call: OpCall) -> OpCall:
    """All own queries with another rank's keys: the early half of them under a causal mask."""
    start, is_backward, causal_at = attention_arguments(call)
    if not argument(call, causal_at, "is_causal", False):
        return call
    arguments: list[Any] = list(call.arguments)
    for place in (start + 1, start + 2):
        arguments[place] = _half(arguments[place])
    keywords = tuple((name, False if name == "is_causal" else v) for name, v in call.keywords)
    if causal_at < len(arguments):
        arguments[causal_at] = False
    outputs = call.outputs
    if is_backward:
        outputs = (outputs[0], _half(outputs[1]), _half(outputs[2]), *outputs[3:])
    return replace(call, arguments=tuple(arguments), keywords=keywords, outputs=outputs)


def _half(spec: TensorSpec) -> TensorSpec:
    shape = list(spec.shape)
    shape[_TOKENS] //= 2
    return TensorSpec(tuple(shape), spec.dtype)


_PRODUCTS = ("bmm", "baddbmm")
# What routes tokens to experts: every rank does so for its own.
_ROUTING = ("sort", "index", "index_put", "index_put_", "histc", "scatter", "new_zeros")


def split_context(graph: OpGraph, *, cp: int, ring: bool = False) -> OpGraph:
    """The graph of one of `cp` ranks, each with an equal part of every sample's tokens.

    Raises StrategyError where no tokens are found, and for attention that is not fused.
    """
    return graph if cp == 1 else _TokenSplitter(graph, cp, ring=ring).split()


class _TokenSplitter(Partitioner):
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
        split_graph = super().split()
        if not self.divides_attention:
            raise StrategyError(
                f"cp={self.degree} divides the tokens of fused attention, and {self.graph.name} "
                "has none; use scaled_dot_product_attention, or leave cp out"
            )
        return split_graph

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
        is_lookup = op.call.name == "embedding" and op.phase == "forward"
        return is_lookup and len(op.call.inputs[1].shape) == 2

    def _placed(self, op: Op, before: tuple[Placement, ...]) -> Placed:
        if self._makes_parts(op):
            own = self._tokens(op.call.inputs[1], op.module)
            return Placed((None, own), (Shard.along(op.call.outputs[0], 1),))
        if op.call.name in _PRODUCTS and any(isinstance(at, Shard) and at.dim for at in before):
            raise StrategyError(
                f"cp={self.degree} divides fused attention alone, but module '{op.module}' "
                "multiplies tokens with each other; use scaled_dot_product_attention"
            )
        if op.call.name in _ROUTING:
            inputs = tuple(map(self._rows, op.call.inputs))
            return Placed(inputs, tuple(map(self._rows, op.call.outputs)))
        if op.call.name == "_grouped_mm":
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
        is_batch = rows > 0 and rows % (samples * length) == 0
        return Shard(0, length, rows // (samples * length)) if is_batch else None

    def _op(self, op: Op) -> None:
        if op.call.name in ATTENTION and any(self.at[value] for value in op.inputs):
            self._attend(op)
            return
        super()._op(op)
        for value in op.outputs:
            # The loss of a rank is that of its own tokens.
            if self.at[value] == PARTIAL and self.values[value].spec.numel <= 1:
                self.at[value] = None

    def _keeps_partial(self, op: Op, before: tuple[Placement, ...]) -> bool:
        # Gradients of weights are summed with those of other samples, when all are there.
        name = op.call.name
        if name in KEEP_PARTIAL or name == "all_reduce":
            return True
        return name == "add" and before == (PARTIAL, PARTIAL)

    def _trained(self, parameter: Parameter, gradient: int, op: Op) -> dict[str, Any]:
        is_part = isinstance(self.at[gradient], Shard)
        return {"gradient": self._met(gradient, None, op)} if is_part else {}

    # Attention

    def _attend(self, op: Op) -> None:
        self.divides_attention = True
        start, _, _ = attention_arguments(op.call)
        length = op.call.arguments[start].shape[_TOKENS]
        wants = tuple(self._at_tokens(spec, length, op) for spec in op.call.inputs)
        outputs = tuple(self._at_tokens(spec, length, op) for spec in op.call.outputs)
        placed = Placed(wants, outputs)
        given = zip(op.inputs, wants, strict=True)
        inputs = [self._met(self._current(value, op), want, op) for value, want in given]
        known = {f"in{number}": value for number, value in enumerate(inputs)}
        known |= {f"out{number}": value for number, value in enumerate(op.outputs)}
        calls = (self._localized(call, placed) for call in op.calls)
        both = (attention_steps(call, self.axis, self.degree, ring=self.ring) for call in calls)
        for one, two in zip(*both, strict=True):
            for name, spec, other in zip(
                one.outputs, one.call.outputs, two.call.outputs, strict=True
            ):
                if name not in known:
                    value = Value(spec=spec, other_spec=other, kind="activation")
                    known[name] = self._added(value, None, module=op.module)
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
