"""Experts of ranks that share a batch: slices of its tokens, or sums of what all ranks' experts do.

As transformers' ``AllToAllEP`` and ``AllReduceEP`` (distributed/expert_parallel.py) where the ranks
of a tensor-parallel group are among those that share experts.
"""

from __future__ import annotations

from dataclasses import replace

from estimator.errors import StrategyError
from estimator.graph.op_graph import OpGraph
from estimator.graph.ops import Op, Parameter
from estimator.graph.split_experts import GROUPED, ExpertSplitter
from estimator.graph.split_placements import PARTIAL, Placement, Routed, Shard
from estimator.graph.split_plan import divided_experts
from estimator.graph.split_rules import Placed
from estimator.graph.split_walk import Walk, op_name
from estimator.tensors import OpCall, TensorSpec

# What routes tokens to experts: every rank does so for its own.
_ROUTING = ("sort", "index", "index_put", "index_put_", "new_zeros")


def slice_expert_tokens(graph: OpGraph, *, tp: int) -> OpGraph:
    """The graph of a rank that gives a slice of the tokens that `tp` ranks share to experts.

    Raises StrategyError where the degree does not divide the tokens.
    """
    return graph if tp == 1 else _Slices(graph, "tp", tp).split()


def sum_experts(graph: OpGraph, *, ep: int, imbalance: float = 1.0) -> OpGraph:
    """The graph of one of `ep` ranks that share a batch: its experts' part of the sum of all.

    Raises StrategyError as `split_experts` does.
    """
    return graph if ep == 1 else _Sums(graph, ep, imbalance / ep).split()


class _Modules:
    """The modules of divided experts: those with grouped matmuls, and what is below them."""

    def __init__(self, graph: OpGraph) -> None:
        grouped = {op.module for op in graph.ops if op_name(op) == GROUPED}
        self._own = divided_experts(graph.ep_plan, grouped) or grouped
        self._known: dict[str, str | None] = {}

    def of(self, module: str) -> str | None:
        """The module of experts that a module lies in."""
        if module not in self._known:
            parts = module.split(".")
            above = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
            self._known[module] = next((name for name in above if name in self._own), None)
        return self._known[module]


class _Slices(Walk):
    def __init__(self, graph: OpGraph, axis: str, degree: int) -> None:
        super().__init__(graph, axis, degree)
        self.modules = _Modules(graph)
        self.tokens = 0

    @property
    def assumptions(self) -> tuple[str, ...]:
        return (
            f"each of the {self.axis}={self.degree} ranks that share samples sends a slice of "
            "their tokens to experts, which are whole, and what comes back is gathered",
        )

    def _current(self, value: int, op: Op) -> int:
        value = super()._current(value, op)
        inside = self.modules.of(op.module)
        maker = self.modules.of(self.made_in.get(value, op.module))
        if isinstance(self.at[value], Shard) and inside != maker:
            self.moved[value] = found = self._met(value, None, op)
            return found
        known = self.values[value]
        enters = inside not in (None, maker) and self.at[value] is None and bool(known.spec.shape)
        return self._slice(value, op) if enters and known.kind == "activation" else value

    def _scope(self, op: Op) -> str:
        return self.modules.of(op.module) or op.module

    def _slice(self, value: int, op: Op) -> int:
        known, key = self.values[value], (self._scope(op), value)
        if key not in self.gathered:
            self.tokens = known.spec.shape[0]
            if self.tokens % self.degree:
                raise StrategyError(
                    f"{self.axis}={self.degree} does not divide the {self.tokens} tokens of module "
                    f"'{op.module}'; choose a divisor"
                )
            shard = Shard.along(known.spec, 0)
            base = value if known.base is None else known.base
            new = self.gathered[key] = self._added(known, shard, base=base, module=key[0])
            parts = [(spec, self._spec(spec, shard)) for spec in (known.spec, known.other_spec)]
            calls = [
                OpCall("aten.slice.Tensor", (spec, 0, 0, part.shape[0]), (), (part,))
                for spec, part in parts
            ]
            self._add(f"{self.axis}_tokens_{new}", calls, op, (value,), (new,))
        return self.gathered[key]

    def _placed(self, op: Op, before: tuple[Placement, ...]) -> Placed:
        name, specs = op_name(op), op.call.inputs
        if name == "histc":
            return Placed(before, (None,))
        if name in _ROUTING:
            return Placed(tuple(map(self._rows, specs)), tuple(map(self._rows, op.call.outputs)))
        if name == GROUPED and len(specs[1].shape) == 2:
            # A rank's experts have the rows of all ranks, their gradients are no terms of a sum.
            rows = Shard.along(specs[0], 1), Shard.along(specs[1], 0)
            return Placed((*rows, *before[2:]), (None,))
        if name == GROUPED:
            own = Shard.along(specs[0], 0), *before[1:]
            return Placed(own, (Shard.along(op.call.outputs[0], 0),))
        return super()._placed(op, before)

    def _rows(self, spec: TensorSpec) -> Shard | None:
        """The rank's part of what has a row, or several, for every token."""
        has_rows = bool(spec.shape) and spec.shape[0] >= self.tokens
        return Shard.along(spec, 0) if has_rows and spec.shape[0] % self.tokens == 0 else None

    def _keeps_partial(self, op: Op, before: tuple[Placement, ...]) -> bool:
        return False

    def _trained(self, parameter: Parameter, op: Op) -> Parameter:
        # The ranks with slices are among those that share experts.
        return replace(
            parameter,
            gradient=self.moved.get(parameter.gradient or -1, parameter.gradient),
            ready_after=len(self.ops) - 1,
            expert_parts=parameter.expert_parts // self.degree,
        )


class _Sums(ExpertSplitter):
    """Every rank has all tokens, and multiplies those of its experts."""

    def __init__(self, graph: OpGraph, degree: int, load: float) -> None:
        super().__init__(graph, degree, load)
        self.parts = 1
        self.modules = _Modules(graph)

    @property
    def assumptions(self) -> tuple[str, ...]:
        load = self.imbalance * self.degree
        routing = "evenly" if load == 1.0 else f"{load:.3g} times the mean to the busiest rank"
        return (
            f"ep={self.degree} divides {self.experts} experts of every layer over ranks that share "
            f"their tokens, which are routed {routing}; results are summed by an all-reduce, which "
            "overlaps nothing",
        )

    def _current(self, value: int, op: Op) -> int:
        value = super()._current(value, op)
        maker = self.modules.of(self.made_in.get(value, op.module))
        known = self.values[value]
        if maker is None or maker == self.modules.of(op.module) or known.kind != "activation":
            return value
        if self.at[value] is None:
            self.at[value] = PARTIAL
        return self._met(value, None, op) if self.at[value] == PARTIAL else value

    def _op(self, op: Op) -> None:
        if not self._divides(op):
            super()._op(op)
            return
        inputs = [self._current(value, op) for value in op.inputs]
        self._placed_op(op, inputs, self._grouped(op, tuple([self.at[v] for v in inputs])))

    def _placed_op(self, op: Op, inputs: list[int], found: Placed) -> None:
        calls = [self._localized(call, found) for call in (op.call, op.other_call)]
        self.ops.append(replace(op, inputs=tuple(inputs), call=calls[0], other_call=calls[1]))
        self._mark(op, [None if isinstance(at, Routed) else at for at in found.outputs])
