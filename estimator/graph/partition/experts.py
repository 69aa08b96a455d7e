"""Divide experts over ranks with batches of their own, slices of one batch, or sums.

As transformers' ``AllToAllEP`` (distributed/expert_parallel.py) and torchtitan: every token goes to
the ranks of its experts by one all-to-all and comes back by another, as do their gradients. Where
the ranks of a tensor-parallel group are among those that share experts, as ``AllToAllEP`` and
``AllReduceEP`` there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from estimator.errors import StrategyError
from estimator.graph.costs.call_costs import family_of
from estimator.graph.ir.collectives import collective_call
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import Op, Parameter, with_calls
from estimator.graph.partition.partitioner import KEEP_PARTIAL, Partitioner
from estimator.graph.partition.plan import divided_experts, forward_ops, weights_of
from estimator.graph.partition.rules import PARTIAL, Placed, Placement, Routed, Shard
from estimator.tensors import OpCall, TensorSpec

EXPERT_DP = "expert_dp"
GROUPED = "_grouped_mm"
_TRANSPOSES = ("t", "transpose")
_KEEP_ROWS = ("split", "cat", "chunk", "slice", "slice_backward", "alias", "detach")
# They take a shape and a dtype from their first tensor, not its elements.
_LIKE = ("new_zeros", "new_empty", "new_ones", "empty_like", "zeros_like")


def has_experts(graph: OpGraph) -> bool:
    """Whether a graph has experts that ranks can divide."""
    return any(op.call.name == GROUPED for op in graph.ops)


def split_experts(graph: OpGraph, *, ep: int, imbalance: float = 1.0) -> OpGraph:
    """The graph of one of `ep` ranks, each with an equal part of every layer's experts.

    The rank with most tokens has `imbalance` times the mean. Raises StrategyError where there are
    no grouped experts, or some that the degree does not divide.
    """
    return graph if ep == 1 else ExpertSplitter(graph, ep, imbalance).split()


class ExpertSplitter(Partitioner):
    """One of the ranks among which experts are divided."""

    def __init__(self, graph: OpGraph, degree: int, imbalance: float) -> None:
        super().__init__(graph, "ep", degree)
        self.imbalance = imbalance
        # Of the ranks that FSDP shards other weights over, how many have unlike experts.
        self.parts = degree
        self.dispatched: dict[int, int] = {}
        self.combined: dict[int, int] = {}
        # What a transposed value was before, and which dimensions of it.
        self.straight: dict[int, int] = {}
        self.counted: set[str] = set()
        # By which each token takes the biases of its expert.
        self.numbers: set[int] = set()
        self.experts = self._divided()

    @property
    def assumptions(self) -> tuple[str, ...]:
        routing = "tokens are routed evenly"
        if self.imbalance != 1.0:
            routing = f"the rank with most tokens has {self.imbalance:.3g} times the mean"
        source = "" if self.named is None else ", by base_model_ep_plan of its config"
        return (
            f"ep={self.degree} divides {self.experts} experts of every layer{source}; {routing}, "
            "they go by all-to-all, which overlaps nothing, and gradients of experts are reduced "
            "as they become ready",
        )

    def _divided(self) -> int:
        """Mark the weights of experts; how many there are in a layer."""
        weights = weights_of(self.graph)
        grouped = {op.module for op in self.graph.ops if op.call.name == GROUPED}
        self.named = divided_experts(self.graph.ep_plan, grouped)
        count = 0
        for op in forward_ops(self.graph):
            if self._divides(op) and op.inputs[1] in weights:
                weight, _ = weights[op.inputs[1]]
                count = self.graph.values[weight].spec.shape[0]
                if count % self.degree:
                    raise StrategyError(
                        f"ep={self.degree} does not divide the {count} experts of module "
                        f"'{op.module}'; choose a divisor"
                    )
                self.at[weight] = Shard.along(self.graph.values[weight].spec, 0)
        for op in self.graph.ops:
            bias = op.inputs[0] if op.call.name == "index" and op.module in grouped else -1
            if bias in weights and op.call.inputs[0].shape[0] == count:
                self.at[bias] = Shard.along(op.call.inputs[0], 0)
                self.numbers.add(op.inputs[1])
        if not count:
            raise StrategyError(
                f"ep={self.degree} divides the experts of grouped matmuls, and {self.graph.name} "
                "has none; leave ep out"
            )
        return count

    def _divides(self, op: Op) -> bool:
        """Whether an operator is of divided experts: all are where no plan names them."""
        return op.call.name == GROUPED and (self.named is None or op.module in self.named)

    # What the walk asks

    def _op(self, op: Op) -> None:
        inputs = [self._current(value, op) for value in op.inputs]
        before = tuple([self.at[value] for value in inputs])
        name = op.call.name
        if self._divides(op) and any(before):
            self._placed_op(op, inputs, self._grouped(op, before))
        elif name in ("index", "index_put") and op.inputs[1] in self.numbers:
            self._placed_op(op, inputs, self._of_biases(op))
        elif name in _TRANSPOSES and inputs[0] in self.dispatched:
            # Of rows that are with their experts: those that were sent are not kept.
            rows = self.dispatched[inputs[0]]
            self._op(replace(op, inputs=(rows, *op.inputs[1:])))
        elif not any(isinstance(at, Routed) for at in before):
            super()._op(op)
            if name in _TRANSPOSES and len(op.call.inputs[0].shape) == 2 and not any(before):
                self.straight[op.outputs[0]] = op.inputs[0]
        elif name in _LIKE:
            self._append(op)
            self._mark(op, (None,) * len(op.outputs))
        elif (found := self._routed(op, before)) is not None:
            self._placed_op(op, inputs, found)
        else:
            # Tokens are back with the ranks that sent them.
            self._placed_op(
                op, inputs, Placed((None,) * len(inputs), (None,) * len(op.call.outputs))
            )

    def _held(self, value: int, op: Op) -> int:
        # What was sent is not kept, what came is.
        value = super()._held(value, op)
        return self.combined.get(value, self.dispatched.get(value, value))

    def _placed_op(self, op: Op, inputs: list[int], found: Placed) -> None:
        given = [self._met(v, want, op) for v, want in zip(inputs, found.wants, strict=True)]
        calls = [self._localized(call, found) for call in op.calls]
        holds = tuple([self._held(value, op) for value in op.holds])
        self._append(with_calls(op, calls, inputs=tuple(given), holds=holds))
        self._mark(op, found.outputs)

    def _grouped(self, op: Op, before: tuple[Placement, ...]) -> Placed:
        """Rows of experts by weights, or rows by rows to the weights' gradients."""
        left, right, *rest = op.call.inputs
        others: tuple[Placement, ...] = tuple(Shard.along(spec, 0) for spec in rest)
        if len(right.shape) == 3:
            wants = (Routed(0, self.imbalance), Shard.along(right, 0))
            return Placed((*wants, *others), (Routed(0, self.imbalance),))
        wants_rows = (Routed(len(left.shape) - 1, self.imbalance), Routed(0, self.imbalance))
        return Placed((*wants_rows, *others), (Shard.along(op.call.outputs[0], 0),))

    def _of_biases(self, op: Op) -> Placed:
        """The bias of each token's expert, or the sum of tokens' gradients of it."""
        rows, divided = Routed(0, self.imbalance), Shard.along(op.call.inputs[0], 0)
        if op.call.name == "index":
            return Placed((divided, None), (rows,))
        return Placed((divided, None, rows), (divided,))

    def _routed(self, op: Op, before: tuple[Placement, ...]) -> Placed | None:
        """Work on tokens where their experts are; None for what mixes them with others."""
        pairs = zip(op.call.inputs, before, strict=True)
        first, routed = next((spec, at) for spec, at in pairs if isinstance(at, Routed))
        name = op.call.name
        if any(isinstance(at, Routed) and at != routed for at in before):
            return None
        if name in _TRANSPOSES and len(first.shape) == 2:
            return Placed(before, (Routed(1 - routed.dim, self.imbalance),))
        by_element = family_of(op.call.target) in ("elementwise", "fill", "copy")
        if not by_element and name not in _KEEP_ROWS:
            return None
        for spec, at in zip(op.call.inputs, before, strict=True):
            if at is None and spec.numel > 1:
                return None
        rows = first.shape[routed.dim]
        if any(spec.shape[routed.dim] != rows for spec in op.call.outputs):
            return None
        return Placed(before, (routed,) * len(op.call.outputs))

    def _keeps_partial(self, op: Op, before: tuple[Placement, ...]) -> bool:
        return op.call.name in KEEP_PARTIAL or before == (PARTIAL, PARTIAL)

    def _trained(self, parameter: Parameter, gradient: int, op: Op) -> dict[str, Any]:
        at, known = self.at[gradient], self.values[gradient]
        if not isinstance(at, Shard):
            return {}
        specs = [self._spec(spec, at) for spec in known.specs]
        calls = [collective_call("all_reduce", EXPERT_DP, spec, spec) for spec in specs]
        reduced = self._added(known, at, base=gradient)
        self._issue("all_reduce", calls, op, (gradient,), (reduced,))
        return {"spec": self._spec(parameter.spec, at), "expert_parts": self.parts}

    # Tokens to their experts and back

    def _met(self, value: int, want: Placement, op: Op) -> int:
        have = self.at[value]
        if isinstance(want, Routed) and have is None:
            return self._dispatched(value, want, op)
        if isinstance(have, Routed) and want is None:
            return self._combined(value, op)
        return super()._met(value, want, op)

    def _dispatched(self, value: int, want: Routed, op: Op) -> int:
        if value in self.dispatched:
            return self.dispatched[value]
        if value in self.straight:
            rows = self._dispatched(self.straight[value], Routed(0, self.imbalance), op)
            new = self._added(self.values[value], want, base=rows)
            calls = []
            for pair in zip(self.values[rows].specs, self.values[value].specs, strict=True):
                given, made = map(self._spec, pair, (self.at[rows], want))
                calls.append(OpCall("aten.transpose.int", (given, 0, 1), (), (made,)))
            self._add(f"ep_transpose_{new}", calls, op, (rows,), (new,))
        else:
            self._tell_counts(op)
            sent = self._collective("all_to_all", value, want, op)
            # Rows come rank by rank, and are put in the order of experts.
            new = self._copied(sent, op)
        self.dispatched[value] = new
        return new

    def _combined(self, value: int, op: Op) -> int:
        found = self.combined.get(value)
        if found is None:
            found = self.combined[value] = self._collective(
                "all_to_all", self._copied(value, op), None, op
            )
        return found

    def _tell_counts(self, op: Op) -> None:
        """How many tokens each expert gets from each rank, once a layer."""
        if op.phase == "forward" and op.module not in self.counted:
            self.counted.add(op.module)
            counts = TensorSpec((self.experts,), "int64")
            calls = [collective_call("all_to_all", self.axis, counts, counts)] * 2
            self._issue("all_to_all", calls, op, (), ())


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
        grouped = {op.module for op in graph.ops if op.call.name == GROUPED}
        self._own = divided_experts(graph.ep_plan, grouped) or grouped
        self._known: dict[str, str | None] = {}

    def of(self, module: str) -> str | None:
        """The module of experts that a module lies in."""
        if module not in self._known:
            parts = module.split(".")
            above = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
            self._known[module] = next((name for name in above if name in self._own), None)
        return self._known[module]


class _Slices(Partitioner):
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
            self._sliced(value, Shard.along(known.spec, 0), op, key[0])
        return self.gathered[key]

    def _placed(self, op: Op, before: tuple[Placement, ...]) -> Placed:
        name, specs = op.call.name, op.call.inputs
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

    def _trained(self, parameter: Parameter, gradient: int, op: Op) -> dict[str, Any]:
        # The ranks with slices are among those that share experts.
        return {"expert_parts": parameter.expert_parts // self.degree}


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
        calls = [self._localized(call, found) for call in op.calls]
        self._append(with_calls(op, calls, inputs=tuple(inputs)))
        self._mark(op, [None if isinstance(at, Routed) else at for at in found.outputs])
