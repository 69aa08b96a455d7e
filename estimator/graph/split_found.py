"""Find by rule which layers of a traced graph tensor parallelism divides: column, then row.

A linear layer is divided by columns where everything that is made of its output reaches only
inputs of other linear layers without any exchange between ranks; those are divided by rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

from estimator.errors import StrategyError
from estimator.graph.op_graph import OpGraph
from estimator.graph.ops import Op
from estimator.graph.split_kernels import placed
from estimator.graph.split_placements import PARTIAL, Placement, Shard
from estimator.graph.split_plan import Plan, Style
from estimator.graph.split_rules import Given, Placed

_LINEAR = ("mm", "addmm")


def found_plan(graph: OpGraph, *, sequence: bool = False, vocabulary: bool = False) -> Plan:
    """The plan that a graph's own dataflow gives; raises StrategyError where there is none.

    With `sequence` tokens are divided between divided layers, and the vocabulary of the embedding
    of inputs; with `vocabulary` that of the last layer and its loss as well.
    """
    search = _Search(graph)
    styles: dict[str, Style] = {}
    for index in search.linears:
        module = graph.ops[index].module
        if module in styles:
            continue
        reached = search.rows_after(index)
        if reached and not any(styles.get(row, "row") != "row" for row in reached):
            styles[module] = "column"
            styles.update(dict.fromkeys(reached, "row"))
    if not styles:
        raise StrategyError(
            f"no pair of linear layers of {graph.name} can be divided by columns, then rows; "
            "give a plan with --tp-plan FILE, or leave tp out"
        )
    if sequence or vocabulary:
        styles.update(dict.fromkeys(search.embeddings(), "vocabulary"))
    if vocabulary:
        styles.update(dict.fromkeys(search.heads(styles), "column"))
    source = "columns, then rows, found from its dataflow"
    return Plan(tuple(styles.items()), sequence=sequence, reduces_once=sequence, source=source)


class _Search:
    """Who consumes each value of the forward pass, and which operators are linear layers."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.consumers: dict[int, list[int]] = {}
        weights: set[int] = set()
        self.linears: dict[int, int] = {}
        # By identity of the call, which the graph keeps.
        self._found: dict[tuple[int, tuple[Placement, ...]], Placed] = {}
        for index, op in enumerate(graph.ops):
            if op.phase != "forward":
                break
            for value in op.inputs:
                self.consumers.setdefault(value, []).append(index)
            if _is_view(op) and (
                op.inputs[0] in weights or graph.values[op.inputs[0]].kind == "parameter"
            ):
                weights.update(op.outputs)
            elif _name(op) in _LINEAR and (
                op.inputs[-1] in weights or graph.values[op.inputs[-1]].kind == "parameter"
            ):
                self.linears[index] = op.inputs[-2]

    def rows_after(self, start: int) -> set[str]:
        """The linear layers that take what a layer's divided columns become; empty if others do."""
        at: dict[int, Placement] = {}
        waiting: list[int] = []
        seen: set[int] = set()

        def mark(value: int, placement: Placement) -> None:
            at[value] = placement
            for index in self.consumers.get(value, ()):
                if index not in seen:
                    seen.add(index)
                    heappush(waiting, index)

        (output,) = self.graph.ops[start].outputs
        mark(output, Shard.along(self.graph.values[output].spec, -1))
        reached: set[str] = set()
        while waiting:
            index = heappop(waiting)
            op = self.graph.ops[index]
            if index in self.linears:
                if at.get(self.linears[index]) != Shard.along(op.call.inputs[-2], -1):
                    return set()
                reached.add(op.module)
                continue
            found = self._outputs(op, at)
            if found is None:
                return set()
            for value, placement in zip(op.outputs, found, strict=True):
                if placement is not None:
                    mark(value, placement)
        return reached

    def _outputs(self, op: Op, at: Mapping[int, Placement]) -> tuple[Placement, ...] | None:
        """Where an operator's results are, None if it needs an exchange; any degree will do."""
        given = tuple([at.get(value) for value in op.inputs])
        key = id(op.call), given
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = placed(Given(op.call, given, 1, op.module, ""))
        gathers = any(
            have is not None and want is None for have, want in zip(given, found.wants, strict=True)
        )
        if gathers or not found.is_known or PARTIAL in found.outputs or found.reduced:
            return None
        return found.outputs

    def embeddings(self) -> list[str]:
        """The largest embedding of each integer input."""
        found: dict[int, tuple[int, str]] = {}
        for op in self.graph.ops:
            if op.phase == "forward" and _name(op) == "embedding":
                rows = op.call.inputs[0].shape[0]
                value = op.inputs[1]
                if self.graph.values[value].kind == "input":
                    found[value] = max(found.get(value, (0, "")), (rows, op.module))
        return [module for _, module in found.values()]

    def heads(self, styles: Mapping[str, Style]) -> list[str]:
        """The last linear layer before a loss over classes."""
        losses = [
            index
            for index, op in enumerate(self.graph.ops)
            if op.phase == "forward" and _name(op) == "_log_softmax"
        ]
        before = [index for index in self.linears if losses and index < losses[-1]]
        last = self.graph.ops[before[-1]].module if before else ""
        return [last] if last and last not in styles else []


def _name(op: Op) -> str:
    return op.call.target.split(".")[1]


def _is_view(op: Op) -> bool:
    return _name(op) in ("t", "transpose", "_to_copy")
