"""Compute what a graph saves for gradients again, or move it to the host, after it was traced."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from estimator.graph.ir.op_graph import GraphChanges, OpGraph, unit_path
from estimator.graph.ir.ops import GraphColumns, Op
from estimator.graph.ir.structure import GraphStructure, unit_runs, value_roots

_GROUPED = "aten._grouped_mm.default"


def checkpointed(graph: OpGraph) -> OpGraph | None:
    """An eager graph as if it had been traced with checkpoint "full"; None where it has some.

    A summary has no operators, and blocks without parts have none to compute again.
    """
    if graph.is_summary or GraphStructure.of(graph).checkpoints.size:
        return None
    added = _Added(graph, _passes(graph))
    return added.graph(checkpoint="full") if added.copies else None


def with_recomputed(graph: OpGraph, modules: Sequence[str], layers: int) -> OpGraph:
    """An eager graph that computes some modules of its blocks again, by Megatron-Core's names.

    Of the first `layers` blocks all is. What "layernorm", "moe_act" and "mla_up_proj" give is
    dropped and made again for gradients, as what checkpoints around the others do.
    """
    if not modules and not layers:
        return graph
    passes = _passes(graph)
    groups = passes[:layers]
    for ops in passes[layers:]:
        grouped = [index for index in ops if graph.ops[index].call.target == _GROUPED]
        experts = {graph.ops[index].module for index in grouped}
        for module in modules:
            if module == "moe_act" and grouped:
                # Between two products of experts: more than a bias of the first.
                between = ((index, graph.ops[index]) for index in range(*grouped[:2]))
                groups.append(
                    [
                        index
                        for index, op in between
                        if op.module in experts and op.call.target not in (_GROUPED, *_BIASES)
                    ]
                )
            else:
                groups += _parts(graph, ops, module, experts)
    added = _Added(graph, [_with_views(graph, ops) for ops in groups if ops])
    return added.graph() if added.copies else graph


def _with_views(graph: OpGraph, group: list[int]) -> list[int]:
    """Operators and, of the rest of their block's pass, those that view what they make."""
    made = {value for index in group for value in graph.ops[index].outputs}
    unit, found = unit_path(graph.ops[group[0]].module), list(group)
    own = set(group)
    for index in range(group[0], len(graph.ops)):
        op = graph.ops[index]
        if op.phase != "forward" or unit_path(op.module) not in (unit, ""):
            break
        if index not in own and op.is_view and not made.isdisjoint(op.inputs):
            found.append(index)
            made.update(op.outputs)
    return sorted(found)


_BIASES = ("aten.index.Tensor", "aten.add_.Tensor")
# The modules of a block that Megatron-Core's names stand for (TransformerConfig.recompute_modules).
_PARTS = {
    "layernorm": re.compile(r"[^.]*(?:norm|ln_)[^.]*"),
    "mla_up_proj": re.compile(r"self_attn\.(?:q_b_proj|kv_b_proj)"),
    "mlp": re.compile(r"(?:mlp|feed_forward)\b.*"),
    "moe": re.compile(r"(?:mlp|block_sparse_moe)\b.*"),
    "shared_experts": re.compile(r".*\bshared_experts?\b.*"),
    "core_attn": re.compile(r".*attn.*"),
}


def _parts(graph: OpGraph, ops: list[int], name: str, experts: set[str]) -> list[list[int]]:
    """The operators of a block that are of one of its modules, or of each of its norms."""
    if (name == "mlp" and experts) or (name == "moe" and not experts):
        return []
    found: defaultdict[str, list[int]] = defaultdict(list)
    for index in ops:
        op = graph.ops[index]
        path = op.module.removeprefix(unit_path(op.module)).lstrip(".")
        of_attention = "attention" in op.call.target or name != "core_attn"
        if name in _PARTS and _PARTS[name].fullmatch(path) and of_attention:
            found[path if name in ("layernorm", "mla_up_proj") else ""].append(index)
    return list(found.values())


def with_offloaded(graph: OpGraph, layers: int) -> OpGraph:
    """A graph whose first `layers` blocks keep on the host what they save for gradients.

    It is moved there as it is made, and comes back while the block behind computes its gradients.
    """
    added = _Added(graph, _passes(graph)[: layers + 1], moves=True)
    return added.graph(assumptions=(*graph.assumptions, _MOVED.format(layers)))


_MOVED = "what {} layers save for gradients waits on the host, and is moved beside kernels"


def _passes(graph: OpGraph) -> list[list[int]]:
    """The operators of the forward passes through repeated blocks that have parts."""
    columns = GraphColumns.of(graph)
    blocks = {unit for path in columns.modules if (unit := unit_path(path)) and path != unit}
    return [
        [
            index
            for index in range(run.first, run.last + 1)
            if graph.ops[index].phase == "forward"
            and unit_path(graph.ops[index].module) == run.path
        ]
        for run in unit_runs(columns, blocks, columns.is_forward)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecomputedOps:
    """What runs again before one op of the backward pass, or comes back from the host."""

    before: int
    ops: tuple[int, ...]
    values: dict[int, int]
    loaded: Op | None = None


class _Added(GraphChanges):
    """A graph's values with those that there are again, and where: operators that `groups` list.

    With `moves` they come from the host, but for those of the last group.
    """

    def __init__(
        self, graph: OpGraph, groups: Sequence[Sequence[int]], *, moves: bool = False
    ) -> None:
        super().__init__(graph)
        self._maker: dict[int, int] = {}
        self._run_of: dict[int, int] = {}
        for number, ops in enumerate(groups):
            for index in ops:
                for value in graph.ops[index].outputs:
                    self._maker.setdefault(value, index)
                    self._run_of.setdefault(value, number)
        if moves:
            self._know_views()
        self._paths = [unit_path(graph.ops[ops[0]].module) for ops in groups]
        self.copies: dict[int, _RecomputedOps] = {}
        saved = self._saved()
        for number, reads in saved.items():
            needed = {value for values in reads.values() for value in values}
            last = max(self._maker[value] for value in needed)
            if not moves:
                # The second run ends once it has all that the backward pass reads.
                again = tuple(index for index in groups[number] if index <= last)
                self.copies[number] = _RecomputedOps(
                    before=min(reads), ops=again, values=self._made(again)
                )
            elif number < len(groups) - 1:
                # It is on its way while the block behind is at work.
                before = min(saved.get(number + 1, reads))
                self.copies[number] = self._moved(before, needed)

    def _know_views(self) -> None:
        """Views that were fused into their readers are made where what they are views of is."""
        self._roots = value_roots(self._graph)
        self._views: defaultdict[int, list[int]] = defaultdict(list)
        for value, root in enumerate(self._roots):
            self._views[root].append(value)
            if value not in self._maker and root in self._maker:
                self._maker[value] = self._maker[root]
                self._run_of[value] = self._run_of[root]

    def _moved(self, before: int, needed: set[int]) -> _RecomputedOps:
        """Storages that come back from the host."""
        values, known = dict[int, int](), self._graph.values
        # A view of a weight is no copy of it.
        roots = {root for v in needed if known[root := self._roots[v]].kind == "activation"}
        for root in sorted(roots):
            values[root] = len(self.values)
            self.values.append(replace(known[root], base=None))
            for view in self._views[root]:
                if view != root:
                    values[view] = len(self.values)
                    self.values.append(replace(known[view], base=values[root]))
        loaded = tuple(values[root] for root in sorted(roots))
        op = self._graph.ops[before]
        op = self.kernel(op, "te.reload.default", (), loaded, is_view=True)
        return _RecomputedOps(before=before, ops=(), values=values, loaded=op)

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

    def graph(self, **changes: Any) -> OpGraph:
        ops = self._graph.ops
        for copy in self.copies.values():
            self.before[copy.before] += [] if copy.loaded is None else [copy.loaded]
            self.before[copy.before] += [self._again(ops[index], copy.values) for index in copy.ops]
        for index, op in enumerate(ops):
            if op.phase == "backward":
                self.instead[index] = self._reading(op)
        calls = self._graph.module_calls + self._module_calls()
        return super().graph(module_calls=calls, **changes)

    def _again(self, op: Op, numbers: dict[int, int]) -> Op:
        changes = {"name": f"{op.name}_again", "phase": "backward", "is_repeated": True}
        outputs = tuple(numbers[value] for value in op.outputs)
        return _taking(op, numbers, outputs=outputs, **changes)

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
        return _taking(op, numbers) if numbers else op

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


def _taking(op: Op, numbers: dict[int, int], **changes: Any) -> Op:
    """An op that reads and holds some values by other numbers."""
    inputs, holds = (tuple(numbers.get(v, v) for v in ends) for ends in (op.inputs, op.holds))
    return replace(op, inputs=inputs, holds=holds, **changes)
