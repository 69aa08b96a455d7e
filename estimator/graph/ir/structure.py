"""Hold what of a step no batch size changes: who makes and reads values, in which memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from estimator.elementwise import Flags, Indices, Sizes
from estimator.errors import WorkloadError
from estimator.graph.ir.op_graph import BoundGraph, OpGraph, unit_path
from estimator.graph.ir.ops import Op, ValueKind, gives_views
from estimator.tensors import OpCall, TensorSpec

KINDS: tuple[ValueKind, ...] = get_args(ValueKind)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dataflow:
    """The wiring of a graph; what there is none of is -1.

    `touched` are the values that ops read and then make, op by op, `held` those that they hold.
    `place` of an op is its place in the forward pass; of the backward pass, that of the forward
    op to whose stage it belongs, wherever stages begin. `first_place` has that of the first op of
    each module. `from_weights` are the parameters, frozen ones too, and what the forward pass makes
    of them: stages pass it on, and make masks and positions again.
    """

    touched: Indices
    touched_by: Indices
    is_made: Flags
    held: Indices
    held_by: Indices
    maker: Indices
    base: Indices
    kind: Indices
    is_forward: Flags
    is_repeated: Flags
    modules: tuple[str, ...]
    module_of: Indices
    place: Indices
    first_place: dict[str, int]
    from_weights: Flags

    @classmethod
    def of(cls, graph: OpGraph) -> Dataflow:
        ops, values = graph.ops, graph.values
        touched = _array(value for op in ops for value in (*op.inputs, *op.outputs))
        inputs, outputs = (
            _array(map(len, values))
            for values in ([op.inputs for op in ops], [op.outputs for op in ops])
        )
        touched_by = np.repeat(np.arange(len(ops)), inputs + outputs)
        sides = np.stack([inputs, outputs], axis=1).ravel()
        is_made = np.repeat(np.tile([False, True], len(ops)), sides)
        numbers: dict[str, int] = {}
        module_of = _array(numbers.setdefault(op.module, len(numbers)) for op in ops)
        codes = {kind: code for code, kind in enumerate(KINDS)}
        is_forward = np.array([op.phase == "forward" for op in ops], dtype=np.bool_)
        kind = _array(codes[value.kind] for value in values)
        from_weights = _from_weights(graph)
        maker = np.full(len(values), -1, dtype=np.intp)
        # Of several the first one: the last that is written here.
        maker[touched[is_made][::-1]] = touched_by[is_made][::-1]
        modules = tuple(numbers)
        tells = from_weights & (kind == codes["activation"])
        return cls(
            touched=touched,
            touched_by=touched_by,
            is_made=is_made,
            held=_array(value for op in ops for value in op.holds),
            held_by=np.repeat(np.arange(len(ops)), _array(len(op.holds) for op in ops)),
            maker=maker,
            base=_array(
                -1 if value.base is None or value.base == number else value.base
                for number, value in enumerate(values)
            ),
            kind=kind,
            is_forward=is_forward,
            is_repeated=np.array([op.is_repeated for op in ops], dtype=np.bool_),
            modules=modules,
            module_of=module_of,
            place=_places(is_forward, touched, touched_by, is_made, modules, module_of, tells),
            first_place=_first_places(modules, module_of[is_forward]),
            from_weights=from_weights,
        )


def _array(numbers: Iterable[int]) -> Indices:
    return np.fromiter(numbers, dtype=np.intp)


def _places(
    is_forward: Flags,
    touched: Indices,
    touched_by: Indices,
    is_made: Flags,
    modules: tuple[str, ...],
    module_of: Indices,
    tells: Flags,
) -> Indices:
    """The place in the forward pass that each op belongs to.

    The backward pass of a module is with the last forward op in it or in its parts (it meets the
    latest first), and where the last op stands that makes or reads any value that it takes, never
    behind the op before it.
    """
    count = int(is_forward.sum())
    place = np.where(is_forward, np.cumsum(is_forward) - 1, count - 1)
    forward = is_forward[touched_by]
    last_touch = np.full(len(tells), count, dtype=np.intp)
    last_touch[touched[forward]] = place[touched_by[forward]]
    last_touch[~tells] = count
    last_in: dict[str, int] = {}
    for module, last in zip(
        module_of[is_forward].tolist(), place[is_forward].tolist(), strict=True
    ):
        last_in[modules[module]] = last
    for name, last in list(last_in.items()):
        while name := name.rpartition(".")[0]:
            last_in[name] = max(last_in.get(name, -1), last)
    anchor = _array(last_in.get(name, count) for name in modules)[module_of]
    reads = ~forward & ~is_made
    np.minimum.at(anchor, touched_by[reads], last_touch[touched[reads]])
    behind = np.minimum.accumulate(np.minimum(anchor[~is_forward], max(count - 1, 0)))
    place[~is_forward] = behind
    return place


def _first_places(modules: tuple[str, ...], forward: Indices) -> dict[str, int]:
    """The place in the forward pass of the first op in each module or in a part of it."""
    numbers, firsts = np.unique(forward, return_index=True)
    places: dict[str, int] = {}
    for first, number in sorted(zip(firsts.tolist(), numbers.tolist(), strict=True)):
        name = modules[number]
        while name:
            places.setdefault(name, first)
            name = name.rpartition(".")[0]
    return places


def _from_weights(graph: OpGraph) -> Flags:
    values = graph.values
    weights = {index for index, value in enumerate(values) if value.kind == "parameter"}
    for op in graph.ops:
        if op.phase == "forward" and not weights.isdisjoint(op.inputs):
            weights.update(v for v in op.outputs if "float" in values[v].spec.dtype)
    flags = np.zeros(len(values), dtype=np.bool_)
    flags[list(weights)] = True
    return flags


def by_first(items: Indices, count: int) -> tuple[Indices, Indices]:
    """(the distinct ones of items below `count` in order of appearance, the number of each)."""
    first = np.zeros(count, dtype=np.intp)
    # Of several the first one: the last that is written here.
    first[items[::-1]] = np.arange(len(items))[::-1]
    is_first = first[items] == np.arange(len(items))
    numbers = np.zeros(count, dtype=np.intp)
    distinct = items[is_first]
    numbers[distinct] = np.arange(len(distinct))
    return distinct, numbers[items]


StorageKind = Literal["parameter", "buffer", "input", "constant", "activation", "gradient"]

BEFORE_STEP = -1
_KINDS: tuple[StorageKind, ...] = (*KINDS, "gradient")
_ADD = "aten.add.Tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One piece of memory and the values that share it.

    `root` is the value that owns it. It is held from the start of op `born` (-1: from before the
    step) to the end of op `dies` (the number of ops: to the end of backward and beyond).
    """

    values: tuple[int, ...]
    root: int
    born: int
    dies: int
    kind: StorageKind


class Stored(NamedTuple):
    """Every piece of memory of a step in order of birth, in arrays; see `Storage`.

    `storage_of` is the number of each value's storage.
    """

    storage_of: Indices
    roots: Indices
    born: Indices
    dies: Indices
    kinds: NDArray[np.str_]

    @classmethod
    def of(cls, graph: OpGraph, flow: Dataflow) -> Stored:
        """Those of a graph.

        A value and all its views and in-place results share one storage, held until the last op
        that uses any of them or is known to hold one. Parameters, buffers, inputs and constants are
        held throughout, gradients of parameters from their birth to the end.
        """
        root, ops = _roots(graph, flow), len(graph.ops)
        kinds = np.array(_KINDS)[flow.kind]
        trained = [p.gradient for p in graph.parameters if p.gradient is not None]
        of_gradients = root[trained]
        of_gradients = of_gradients[kinds[of_gradients] == "activation"]
        born, last_use = _uses(flow, root)
        is_activation = kinds == "activation"
        start = np.where(is_activation, born, BEFORE_STEP)
        end = np.where(is_activation, np.maximum(start, last_use), ops)
        kinds[of_gradients], end[of_gradients] = "gradient", ops
        roots = np.flatnonzero(root == np.arange(len(root)))
        roots = roots[np.argsort(start[roots], kind="stable")]
        number = np.zeros(len(root), dtype=np.intp)
        number[roots] = np.arange(len(roots))
        return cls(number[root], roots, start[roots], end[roots], kinds[roots])


def storages(graph: OpGraph) -> tuple[Storage, ...]:
    """Every piece of memory of the step with its lifetime, in order of birth."""
    stored = Stored.of(graph, Dataflow.of(graph))
    values: list[list[int]] = [[] for _ in stored.roots]
    for value, number in enumerate(stored.storage_of.tolist()):
        values[number].append(value)
    columns = (column.tolist() for column in (stored.roots, stored.born, stored.dies, stored.kinds))
    return tuple(
        Storage(values=tuple(own), root=root, born=born, dies=dies, kind=kind)
        for own, root, born, dies, kind in zip(values, *columns, strict=True)
    )


def value_roots(graph: OpGraph) -> list[int]:
    """For each value, the value that owns its storage, sums of gradients apart."""
    flow = Dataflow.of(graph)
    roots: list[int] = owners(_bases(flow, _view_ops(graph)[0])).tolist()
    return roots


def _roots(graph: OpGraph, flow: Dataflow) -> Indices:
    """For each value, the value that owns its storage."""
    is_view, keeps_base = _view_ops(graph)
    bases = _bases(flow, is_view)
    return owners(_with_sums(graph, flow, bases, keeps_base))


def _view_ops(graph: OpGraph) -> tuple[Flags, Flags]:
    """Whether each op gives views, and whether these hold the tensor which they are of.

    Of the latter autograd's is not the last reference to the storage, as where a weight is shared:
    of a linear layer it gets the transpose of a product.
    """
    targets = [op.call.target for op in graph.ops]
    view = {target: gives_views(target) for target in set(targets)}
    keeps = {target: is_one and "unsafe" not in target for target, is_one in view.items()}
    return np.array([view[t] for t in targets], bool), np.array([keeps[t] for t in targets], bool)


def _bases(flow: Dataflow, is_view: Flags) -> Indices:
    """What each value is a view of or made in, -1 for nothing."""
    base, by = flow.base.copy(), flow.touched_by
    first = np.searchsorted(by, np.arange(len(is_view)))
    # The schemas of unsafe_split and of views that return lists do not name what they share.
    made = np.flatnonzero(flow.is_made & is_view[by])
    owners = first[by[made]]
    value, source = flow.touched[made], flow.touched[owners]
    tells = (
        ~flow.is_made[owners] & (base[value] < 0) & (flow.kind[value] == _KINDS.index("activation"))
    )
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


def _with_sums(graph: OpGraph, flow: Dataflow, base: Indices, keeps_base: Flags) -> Indices:
    """Let the sum of two gradients take the place of the first where autograd does so."""
    owner = owners(base)
    reads = ~flow.is_made
    last_read = np.full(len(base), -1, dtype=np.intp)
    last_read[owner[flow.touched[reads]]] = flow.touched_by[reads]
    is_view = np.zeros(len(base), dtype=np.bool_)
    is_view[flow.touched[flow.is_made & keeps_base[flow.touched_by]]] = True
    base, merged = base.copy(), dict[int, int]()

    def owner_of(value: int) -> int:
        root = int(owner[value])
        while root in merged:
            root = merged[root]
        return root

    held = {int(owner[p.gradient]) for p in graph.parameters if p.gradient is not None}
    for index in np.flatnonzero(~flow.is_forward).tolist():
        op = graph.ops[index]
        if op.call.target != _ADD or not _accumulates(graph, op) or is_view[op.inputs[0]]:
            continue
        old, total = owner_of(op.inputs[0]), op.outputs[0]
        unshared = last_read[old] == index and owner_of(op.inputs[1]) != old
        # A file may say that a sum is one of its terms.
        unshared = unshared and old != total
        if graph.values[old].kind == "activation" and unshared and old not in held:
            base[total] = merged[total] = old
            last_read[old] = max(index, int(last_read[total]))
            if total in held:
                held.add(old)
    return base


def _accumulates(graph: OpGraph, op: Op) -> bool:
    """Whether autograd runs this sum of two gradients in place of the first.

    torch/csrc/autograd/input_buffer.cpp does so where it holds the last reference to a dense
    tensor; a trace with fake tensors, which are subclasses, shows a fresh sum instead.
    """
    if len(op.inputs) != 2:
        return False
    if not op.outputs or graph.values[op.outputs[0]].base is not None:
        return False
    old, new, total = (graph.values[value].spec for value in (*op.inputs, op.outputs[0]))
    return old.shape == new.shape == total.shape and old.dtype == total.dtype and is_dense(old)


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


def _uses(flow: Dataflow, root: Indices) -> tuple[Indices, Indices]:
    """The op that makes each storage, and the last op that touches or holds it; -1 for none."""
    born, last_use = (np.full(len(root), BEFORE_STEP, dtype=np.intp) for _ in range(2))
    made = flow.is_made
    # Of several ops the first one: the last that is written here.
    born[root[flow.touched[made]][::-1]] = flow.touched_by[made][::-1]
    last_use[root[flow.touched]] = flow.touched_by
    np.maximum.at(last_use, root[flow.held], flow.held_by)
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
        stored = Stored.of(graph, flow)
        is_view = np.array([op.is_view for op in graph.ops], dtype=np.bool_)
        is_run_again = _is_run_again(flow, call_of)
        return cls(
            graph=graph,
            call_of=call_of,
            first_op=first_op,
            spec_of=spec_of,
            first_value=first_value,
            storage_of=stored.storage_of,
            roots=stored.roots,
            kinds=stored.kinds,
            born=stored.born,
            dies=stored.dies,
            ready=_ready(graph, stored.storage_of, stored.dies),
            touches=_touches(flow, stored.storage_of, is_view),
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

    def storage_bytes(self, bound: BoundGraph) -> Sizes:
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
