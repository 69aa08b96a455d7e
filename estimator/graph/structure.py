"""Hold what of a step no batch size changes: its distinct calls, and who touches which memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from estimator.graph.dataflow import Dataflow, Flags, Indices
from estimator.graph.op_graph import BoundGraph, OpGraph
from estimator.graph.shards import unit_path
from estimator.graph.storages import Stored
from estimator.tensors import OpCall


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Touches:
    """Each time that an operator touches a storage, in order; views touch nothing.

    `previous` is the operator that touched the storage before, -1 for none. What an operator both
    reads and writes is read.
    """

    op: Indices
    storage: Indices
    is_read: Flags
    previous: Indices


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphStructure:
    """What a graph is at any batch size, in arrays.

    `call_of` gives each op the number of its call: equal at both traced batch sizes is equal at
    all. `first_op` is an op of each distinct call; `spec_of` and `first_value` are the same for the
    shapes of values. `storage_of` is the number of each value's storage, `roots` and `kinds` are
    the values that own them and what they are for; storages are held from the start of op `born` to
    the end of op `dies`, and after op `ready` the last gradient in one is final, where there
    are any. Python issues the ops of the forward pass and those that a checkpoint runs again;
    `checkpoints` are the first ones that each checkpoint does. An op `enters_dtensor` where it is
    the first of a module's call that DTensor runs.
    """

    graph: OpGraph
    call_of: Indices
    first_op: tuple[int, ...]
    spec_of: Indices
    first_value: tuple[int, ...]
    storage_of: Indices
    roots: Indices
    kinds: NDArray[np.str_]
    born: Indices
    dies: Indices
    ready: Indices
    touches: Touches
    is_view: Flags
    is_forward: Flags
    is_run_again: Flags
    checkpoints: Indices
    enters_dtensor: Flags

    @classmethod
    def of(cls, graph: OpGraph, flow: Dataflow | None = None) -> GraphStructure:
        """That of a graph; `flow` is its own where it is at hand."""
        flow = flow or Dataflow.of(graph)
        call_of, first_op = _numbered([(op.call, op.other_call) for op in graph.ops])
        spec_of, first_value = _numbered([(v.spec, v.other_spec) for v in graph.values])
        found = Stored.of(graph, flow)
        is_view = np.array([op.is_view for op in graph.ops], dtype=np.bool_)
        is_run_again = _is_run_again(flow, call_of)
        return cls(
            graph=graph,
            call_of=call_of,
            first_op=first_op,
            spec_of=spec_of,
            first_value=first_value,
            storage_of=found.storage_of,
            roots=found.roots,
            kinds=found.kinds,
            born=found.born,
            dies=found.dies,
            ready=_ready(graph, found.storage_of, found.dies),
            touches=_touches(flow, found.storage_of, is_view),
            is_view=is_view,
            is_forward=flow.is_forward,
            is_run_again=is_run_again,
            checkpoints=_checkpoints(flow, is_run_again & ~is_view),
            enters_dtensor=np.array([op.enters_dtensor for op in graph.ops], dtype=np.bool_),
        )

    def at(self, batch: int | None) -> BoundGraph:
        """What `graph.at(batch)` gives, worked out for distinct calls and shapes alone."""
        graph, calls, values = self.graph, self.first_op, self.first_value
        one_of_each = replace(
            graph,
            ops=tuple([graph.ops[op] for op in calls]),
            values=tuple([graph.values[value] for value in values]),
        )
        few = one_of_each.at(batch)
        return BoundGraph(
            graph=graph,
            batch=few.batch,
            calls=tuple([few.calls[number] for number in self.call_of.tolist()]),
            specs=tuple([few.specs[number] for number in self.spec_of.tolist()]),
        )

    def distinct_calls(self, bound: BoundGraph) -> tuple[OpCall, ...]:
        """The distinct calls at a batch size, by number."""
        return tuple([bound.calls[op] for op in self.first_op])

    def storage_bytes(self, bound: BoundGraph) -> NDArray[np.int64]:
        """The size of each storage at a batch size: that of the largest value in it."""
        of_spec = [bound.specs[value].storage_bytes for value in self.first_value]
        sizes = np.zeros(len(self.roots), dtype=np.int64)
        np.maximum.at(sizes, self.storage_of, np.array(of_spec, dtype=np.int64)[self.spec_of])
        return sizes


def _is_run_again(flow: Dataflow, call_of: Indices) -> Flags:
    """Whether a checkpoint calls an op again; gradients need forward work of their own, too."""
    call = flow.module_of * (int(call_of.max(initial=0)) + 1) + call_of
    return np.asarray(flow.is_repeated & np.isin(call, call[flow.is_forward]))


def _checkpoints(flow: Dataflow, runs_again: Flags) -> Indices:
    """The first kernel that each block runs again; views of weights belong to no checkpoint."""
    first: dict[str, int] = {}
    for index in np.flatnonzero(runs_again).tolist():
        first.setdefault(unit_path(flow.modules[flow.module_of[index]]), index)
    return np.array(list(first.values()), dtype=np.intp)


def _ready(graph: OpGraph, storage_of: Indices, dies: Indices) -> Indices:
    final: dict[int, int] = {}
    for parameter in graph.parameters:
        if parameter.gradient is not None and parameter.ready_after is not None:
            number = int(storage_of[parameter.gradient])
            final[number] = max(final.get(number, 0), parameter.ready_after)
    ready = dies.copy()
    ready[list(final)] = list(final.values())
    return ready


def _touches(flow: Dataflow, storage_of: Indices, is_view: Flags) -> Touches:
    counts = ~is_view[flow.touched_by]
    every = int(storage_of.max(initial=0)) + 1
    pairs = flow.touched_by[counts] * every + storage_of[flow.touched[counts]]
    distinct, place = np.unique(pairs, return_inverse=True)
    op, storage = np.divmod(distinct, every)
    is_read = np.zeros(len(distinct), dtype=np.bool_)
    is_read[place[~flow.is_made[counts]]] = True
    by_storage = np.argsort(storage, kind="stable")
    before, after = by_storage[:-1], by_storage[1:]
    previous = np.full(len(distinct), -1, dtype=np.intp)
    previous[after] = np.where(storage[before] == storage[after], op[before], -1)
    return Touches(op=op, storage=storage, is_read=is_read, previous=previous)


def _numbered(items: Iterable[tuple[Hashable, Hashable]]) -> tuple[Indices, tuple[int, ...]]:
    """(the number of each item among the distinct ones, where each of these comes first)."""
    # Equal calls of a saved graph are one object, which is found much faster than an equal one.
    by_object: dict[tuple[int, int], int] = {}
    by_value: dict[tuple[Hashable, Hashable], int] = {}
    first: list[int] = []
    numbers: list[int] = []
    for place, item in enumerate(items):
        objects = id(item[0]), id(item[1])
        number = by_object.get(objects)
        if number is None:
            number = by_object[objects] = by_value.setdefault(item, len(first))
            if number == len(first):
                first.append(place)
        numbers.append(number)
    return np.array(numbers, dtype=np.intp), tuple(first)
