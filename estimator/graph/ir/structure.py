"""Hold what of a step no batch size changes: who makes and reads values, in which memory."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimator.elementwise import Flags, Indices, Sizes
from estimator.errors import WorkloadError
from estimator.graph.ir.op_graph import BoundGraph, OpGraph, unit_path
from estimator.graph.ir.ops import ACTIVATION, KINDS, GraphColumns, Numbered, gives_views
from estimator.tensors import OpCall, TensorSpec


@dataclass(frozen=True, slots=True)
class UnitRun:
    """One forward or backward pass through a unit: its first and its last op."""

    path: str
    first: int
    last: int


def unit_runs(columns: GraphColumns, paths: Container[str], is_of_phase: Flags) -> list[UnitRun]:
    """The passes of a phase through units with some paths, in order.

    A unit that is called again after another one has another pass; ops of no such unit, the rest of
    the model among them, end none.
    """
    units = [unit_path(module) for module in columns.modules]
    numbers = {unit: number for number, unit in enumerate(dict.fromkeys(units))}
    unit_of = np.array([numbers[unit] if unit in paths else -1 for unit in units], dtype=np.intp)
    own = unit_of[columns.module_of]
    ops = np.flatnonzero(is_of_phase & (own >= 0))
    begins = np.flatnonzero(np.diff(own[ops], prepend=-1))
    lasts = [*(begins[1:] - 1).tolist(), len(ops) - 1]
    names = list(numbers)
    return [
        UnitRun(names[own[ops[first]]], int(ops[first]), int(ops[last]))
        for first, last in zip(begins.tolist(), lasts, strict=False)
    ]


BEFORE_STEP = -1
_KINDS = (*KINDS, "gradient")
_ADD = "aten.add.Tensor"


def value_roots(graph: OpGraph) -> list[int]:
    """For each value, the value that owns its storage, sums of gradients apart."""
    columns = GraphColumns.of(graph)
    roots: list[int] = owners(_bases(columns, _view_ops(columns)[0])).tolist()
    return roots


def _view_ops(columns: GraphColumns) -> tuple[Flags, Flags]:
    """Whether each op gives views, and whether these hold the tensor which they are of.

    Of the latter autograd's is not the last reference to the storage, as where a weight is shared:
    of a linear layer it gets the transpose of a product.
    """
    targets = [call.target for call, _ in columns.calls]
    view = [gives_views(target) for target in targets]
    keeps = ["unsafe" not in target for target in targets]
    is_view = columns.of_calls(view)
    return is_view, is_view & columns.of_calls(keeps)


def _bases(columns: GraphColumns, is_view: Flags) -> Indices:
    """What each value is a view of or made in, -1 for nothing."""
    base, by = columns.base.copy(), columns.touched_by
    # The schemas of unsafe_split and of views that return lists do not name what they share.
    made = np.flatnonzero(columns.is_made & is_view[by])
    owners = columns.begins[by[made]]
    value, source = columns.touched[made], columns.touched[owners]
    tells = ~columns.is_made[owners] & (base[value] < 0) & (columns.kind[value] == ACTIVATION)
    base[value[tells][::-1]] = source[tells][::-1]
    return base


def owners(base: Indices) -> Indices:
    """The end of each chain of bases; raises WorkloadError for a ring, which has none."""
    owner = np.where(base < 0, np.arange(len(base)), base)
    # Each round goes twice as far.
    for _ in range(len(base).bit_length() + 1):
        if np.array_equal(further := owner[owner], owner):
            return owner
        owner = further
    raise WorkloadError("tensors of the graph are views of each other; trace the model again")


def _with_sums(graph: OpGraph, columns: GraphColumns, base: Indices, keeps_base: Flags) -> Indices:
    """Let the sum of two gradients take the place of the first where autograd does so."""
    owner = owners(base)
    reads = ~columns.is_made
    last_read = np.full(len(base), -1, dtype=np.intp)
    last_read[owner[columns.touched[reads]]] = columns.touched_by[reads]
    is_view = np.zeros(len(base), dtype=np.bool_)
    is_view[columns.touched[columns.is_made & keeps_base[columns.touched_by]]] = True
    base, merged = base.copy(), dict[int, int]()
    # What follows looks at single places, which lists give faster.
    owned_by, read_last = owner.tolist(), last_read.tolist()

    def owner_of(value: int) -> int:
        root: int = owned_by[value]
        while root in merged:
            root = merged[root]
        return root

    held = {owned_by[p.gradient] for p in graph.parameters if p.gradient is not None}
    # Ops of the backward pass that add two tensors up.
    reads_two = columns.made_begins - columns.begins[:-1] == 2
    is_sum = columns.of_calls(call.target == _ADD for call, _ in columns.calls)
    is_sum = is_sum & ~columns.is_forward & reads_two & (columns.begins[1:] > columns.made_begins)
    sums = np.flatnonzero(is_sum)
    terms = columns.touched[columns.begins[sums, None] + [0, 1, 2]]
    accumulates = _accumulates(columns, terms) & ~is_view[terms[:, 0]]
    for index, (one, other, total) in zip(
        sums[accumulates].tolist(), terms[accumulates].tolist(), strict=True
    ):
        old = owner_of(one)
        unshared = read_last[old] == index and owner_of(other) != old
        # A file may say that a sum is one of its terms.
        unshared = unshared and old != total
        if columns.kind[old] == ACTIVATION and unshared and old not in held:
            base[total] = merged[total] = old
            read_last[old] = max(index, read_last[total])
            if total in held:
                held.add(old)
    return base


def _accumulates(columns: GraphColumns, terms: Indices) -> Flags:
    """Whether autograd runs sums of two gradients in place of the first; rows of these and the sum.

    torch/csrc/autograd/input_buffer.cpp does so where it holds the last reference to a dense
    tensor; a trace with fake tensors, which are subclasses, shows a fresh sum instead.
    """
    rows = list(map(tuple, columns.spec_of[terms].tolist()))
    alike = {}
    for row in set(rows):
        old, new, made = (columns.specs[number][0] for number in row)
        same = old.shape == new.shape == made.shape and old.dtype == made.dtype
        alike[row] = same and is_dense(old)
    takes_place = np.array([alike[row] for row in rows], dtype=np.bool_)
    return takes_place & (columns.base[terms[:, 2]] < 0)


def is_dense(spec: TensorSpec) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of dims.

    >>> [is_dense(TensorSpec((2, 3), "float32", strides)) for strides in ((1, 2), (0, 1))]
    [True, False]
    """
    if spec.strides is None:
        return True
    expected = 1
    for stride, size in sorted(zip(spec.strides, spec.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _uses(columns: GraphColumns, root: Indices) -> tuple[Indices, Indices]:
    """The op that makes each storage, and the last op that touches or holds it; -1 for none."""
    born, last_use = (np.full(len(root), BEFORE_STEP, dtype=np.intp) for _ in range(2))
    made = columns.is_made
    # Of several ops the first one: the last that is written here.
    born[root[columns.touched[made]][::-1]] = columns.touched_by[made][::-1]
    last_use[root[columns.touched]] = columns.touched_by
    np.maximum.at(last_use, root[columns.held], columns.held_by)
    return born, last_use


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

    A value and all its views and in-place results share one storage: `storage_of` is the number of
    each value's, in order of birth, `roots` and `kinds` are the values that own them and what they
    are for. A storage is held from the start of op `born` (-1: from before the step) to the end of
    op `dies`, the last that uses any of them or is known to hold one (the number of ops: to the end
    of backward and beyond). Parameters, buffers, inputs and constants are held throughout,
    gradients of parameters from their birth to the end; after op `ready` the last gradient in one
    is final, where there are any. Python issues the ops of the forward pass and those that a
    checkpoint runs again; `checkpoints` are the first ones that each checkpoint does.
    """

    graph: OpGraph
    columns: GraphColumns
    storage_of: Indices
    roots: Indices
    kinds: NDArray[np.str_]
    born: Indices
    dies: Indices
    ready: Indices
    touches: Touches
    is_run_again: Flags
    checkpoints: Indices

    @classmethod
    def of(cls, graph: OpGraph, columns: GraphColumns | None = None) -> GraphStructure:
        """That of a graph; `columns` are its own where they are at hand."""
        columns = columns or GraphColumns.of(graph)
        is_view, keeps_base = _view_ops(columns)
        bases = _bases(columns, is_view)
        root = owners(_with_sums(graph, columns, bases, keeps_base))
        kinds = np.array(_KINDS)[columns.kind]
        trained = [p.gradient for p in graph.parameters if p.gradient is not None]
        of_gradients = root[trained]
        of_gradients = of_gradients[kinds[of_gradients] == "activation"]
        born, last_use = _uses(columns, root)
        is_activation = kinds == "activation"
        start = np.where(is_activation, born, BEFORE_STEP)
        ops = len(graph.ops)
        end = np.where(is_activation, np.maximum(start, last_use), ops)
        kinds[of_gradients], end[of_gradients] = "gradient", ops
        roots = np.flatnonzero(root == np.arange(len(root)))
        roots = roots[np.argsort(start[roots], kind="stable")]
        number = np.zeros(len(root), dtype=np.intp)
        number[roots] = np.arange(len(roots))
        storage_of, dies = number[root], end[roots]
        # Those that a checkpoint calls again; gradients need forward work of their own, too.
        call = columns.module_of * len(columns.calls) + columns.call_of
        is_run_again = columns.is_repeated & np.isin(call, call[columns.is_forward])
        return cls(
            graph=graph,
            columns=columns,
            storage_of=storage_of,
            roots=roots,
            kinds=kinds[roots],
            born=start[roots],
            dies=dies,
            ready=_ready(graph, storage_of, dies),
            touches=_touches(columns, storage_of),
            is_run_again=is_run_again,
            checkpoints=_checkpoints(columns, is_run_again & ~columns.is_view),
        )

    def at(self, batch: int | None) -> BoundGraph:
        """What `graph.at(batch)` gives, worked out for distinct calls and shapes alone."""
        columns, line = self.columns, self.graph.line(batch)
        calls = [line.at(*both) for both in columns.calls]
        specs = [line.at(*both) for both in columns.specs]
        return BoundGraph(
            graph=self.graph,
            batch=self.graph.batch if batch is None else batch,
            calls=Numbered(tuple(calls), columns.call_of).gathered(),
            specs=Numbered(tuple(specs), columns.spec_of).gathered(),
        )

    def distinct_calls(self, bound: BoundGraph) -> tuple[OpCall, ...]:
        """The distinct calls at a batch size, by number."""
        return self.columns.distinct_calls(bound.calls)

    def storage_bytes(self, bound: BoundGraph) -> Sizes:
        """The size of each storage at a batch size: that of the largest value in it."""
        columns = self.columns
        of_spec = [spec.storage_bytes for spec in columns.distinct_specs(bound.specs)]
        sizes = np.zeros(len(self.roots), dtype=np.int64)
        np.maximum.at(sizes, self.storage_of, np.array(of_spec, dtype=np.int64)[columns.spec_of])
        return sizes


def _checkpoints(columns: GraphColumns, runs_again: Flags) -> Indices:
    """The first kernel that each block runs again; views of weights belong to no checkpoint."""
    ops = np.flatnonzero(runs_again)
    modules, places = np.unique(columns.module_of[ops], return_index=True)
    first: dict[str, int] = {}
    for place, module in sorted(zip(places.tolist(), modules.tolist(), strict=True)):
        first.setdefault(unit_path(columns.modules[module]), place)
    return ops[list(first.values())]


def _ready(graph: OpGraph, storage_of: Indices, dies: Indices) -> Indices:
    final: dict[int, int] = {}
    for parameter in graph.parameters:
        if parameter.gradient is not None and parameter.ready_after is not None:
            number = int(storage_of[parameter.gradient])
            final[number] = max(final.get(number, 0), parameter.ready_after)
    ready = dies.copy()
    ready[list(final)] = list(final.values())
    return ready


def _touches(columns: GraphColumns, storage_of: Indices) -> Touches:
    counts = ~columns.is_view[columns.touched_by]
    every = int(storage_of.max(initial=0)) + 1
    pairs = columns.touched_by[counts] * every + storage_of[columns.touched[counts]]
    distinct, place = np.unique(pairs, return_inverse=True)
    op, storage = np.divmod(distinct, every)
    is_read = np.zeros(len(distinct), dtype=np.bool_)
    is_read[place[~columns.is_made[counts]]] = True
    by_storage = np.argsort(storage, kind="stable")
    before, after = by_storage[:-1], by_storage[1:]
    previous = np.full(len(distinct), -1, dtype=np.intp)
    previous[after] = np.where(storage[before] == storage[after], op[before], -1)
    return Touches(op=op, storage=storage, is_read=is_read, previous=previous)
