"""Put the repeated blocks of a graph behind activation checkpoints after it was traced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from estimator.graph.compile.megatron import compiled_like
from estimator.graph.ir.op_graph import OpGraph, UnitRun, unit_path, unit_runs
from estimator.graph.ir.ops import Op, Value
from estimator.graph.ir.structure import GraphStructure


def with_checkpoints(graph: OpGraph) -> OpGraph | None:
    """The graph as if it had been traced with checkpoint "full"; None where that is not known.

    A summary has no operators, a graph that was compiled needs its eager one; nothing is left to
    compute again where blocks run behind checkpoints already, and none where they have no parts.
    """
    if graph.execution != "eager":
        eager = None if graph.eager is None else with_checkpoints(graph.eager)
        if eager is None:
            return None
        eager = replace(eager, name=graph.name, optimizer=graph.optimizer)
        return replace(compiled_like(eager, graph), eager=eager)
    if graph.is_summary or GraphStructure.of(graph).checkpoints.size:
        return None
    runs = unit_runs(graph, _blocks(graph), "forward")
    added = _Added(graph, runs)
    return added.graph() if added.copies else None


def _blocks(graph: OpGraph) -> set[str]:
    """The repeated blocks that have parts."""
    modules = dict.fromkeys(op.module for op in graph.ops)
    return {unit for path in modules if (unit := unit_path(path)) and path != unit}


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecomputedOps:
    """What a checkpoint runs again before one op of the backward pass."""

    before: int
    ops: tuple[int, ...]
    values: dict[int, int]


class _Added:
    """A graph's values with those that checkpoints make again, and where they do."""

    def __init__(self, graph: OpGraph, runs: Sequence[UnitRun]) -> None:
        self._graph = graph
        self.values: list[Value] = list(graph.values)
        self._maker: dict[int, int] = {}
        self._run_of: dict[int, int] = {}
        own: list[list[int]] = [[] for _ in runs]
        for number, run in enumerate(runs):
            for index in range(run.first, run.last + 1):
                op = graph.ops[index]
                if op.phase == "forward" and unit_path(op.module) == run.path:
                    own[number].append(index)
                    for value in op.outputs:
                        self._maker.setdefault(value, index)
                        self._run_of.setdefault(value, number)
        self._paths = [run.path for run in runs]
        self.copies: dict[int, _RecomputedOps] = {}
        for number, saved in self._saved().items():
            needed = {value for values in saved.values() for value in values}
            last = max(self._maker[value] for value in needed)
            # The second run ends once it has all that the backward pass reads.
            again = tuple(index for index in own[number] if index <= last)
            self.copies[number] = _RecomputedOps(
                before=min(saved), ops=again, values=self._made(again)
            )

    def _saved(self) -> dict[int, dict[int, list[int]]]:
        """For each run the ops of its backward pass that read what it makes, and what they read."""
        found: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)
        for index, op in enumerate(self._graph.ops):
            if op.phase == "backward":
                for number, values in self._own_reads(op, op.inputs).items():
                    found[number][index] = values
        return found

    def _own_reads(self, op: Op, values: Sequence[int]) -> dict[int, list[int]]:
        """Of some values those that the forward pass of an op's own block makes, by its run."""
        unit = unit_path(op.module)
        found: defaultdict[int, list[int]] = defaultdict(list)
        for value in values:
            number = self._run_of.get(value)
            if number is not None and self._paths[number] == unit:
                found[number].append(value)
        return found

    def _made(self, ops: Sequence[int]) -> dict[int, int]:
        """The values that some ops make, and those that they make again."""
        numbers: dict[int, int] = {}
        for index in ops:
            for value in self._graph.ops[index].outputs:
                if value not in numbers:
                    numbers[value] = len(self.values)
                    self.values.append(self._graph.values[value])
        for value, number in numbers.items():
            base = self._graph.values[value].base
            if base is not None:
                self.values[number] = replace(self.values[number], base=numbers.get(base, base))
        return numbers

    def graph(self) -> OpGraph:
        graph = self._graph
        before: defaultdict[int, list[_RecomputedOps]] = defaultdict(list)
        for copy in self.copies.values():
            before[copy.before].append(copy)
        ops: list[Op] = []
        place: list[int] = []
        for index, op in enumerate(graph.ops):
            for copy in before.get(index, ()):
                ops.extend(self._again(graph.ops[number], copy.values) for number in copy.ops)
            place.append(len(ops))
            ops.append(self._reading(op) if op.phase == "backward" else op)
        parameters = [
            each if each.ready_after is None else replace(each, ready_after=place[each.ready_after])
            for each in graph.parameters
        ]
        return replace(
            graph,
            ops=tuple(ops),
            values=tuple(self.values),
            parameters=tuple(parameters),
            module_calls=graph.module_calls + self._module_calls(),
            checkpoint="full",
        )

    def _again(self, op: Op, numbers: dict[int, int]) -> Op:
        return replace(
            op,
            name=f"{op.name}_again",
            phase="backward",
            inputs=tuple(numbers.get(value, value) for value in op.inputs),
            outputs=tuple(numbers[value] for value in op.outputs),
            holds=tuple(numbers.get(value, value) for value in op.holds),
            is_repeated=True,
        )

    def _reading(self, op: Op) -> Op:
        """An op of the backward pass that reads and holds what is made again of its own block."""
        numbers: dict[int, int] = {}
        for number in self._own_reads(op, (*op.inputs, *op.holds)):
            if number in self.copies:
                numbers |= self.copies[number].values
        # A view of what was saved is one of what is made again, and so are its own views.
        bases = dict(numbers)
        for value in op.inputs:
            before, now = self._graph.values[value].base, self.values[value].base
            if before is not None and now is not None and before != now:
                bases[before] = now
        for value in op.outputs:
            base = self.values[value].base
            if base in bases:
                self.values[value] = replace(self.values[value], base=bases[base])
        if not numbers:
            return op
        return replace(
            op,
            inputs=tuple(numbers.get(value, value) for value in op.inputs),
            holds=tuple(numbers.get(value, value) for value in op.holds),
        )

    def _module_calls(self) -> int:
        """How many modules are called again: those in a block, whose own forward() runs as such."""
        calls = 0
        for number, copy in self.copies.items():
            parts: set[str] = set()
            for index in copy.ops:
                path = self._graph.ops[index].module
                while len(path) > len(self._paths[number]):
                    parts.add(path)
                    path = path.rpartition(".")[0]
            calls += len(parts)
        return calls
