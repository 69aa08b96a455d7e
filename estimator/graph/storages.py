"""Find the pieces of memory that a training step holds, and from when to when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from estimator.errors import WorkloadError
from estimator.graph.dataflow import KINDS, Dataflow, Flags, Indices
from estimator.graph.op_graph import OpGraph
from estimator.graph.ops import Op, gives_views
from estimator.tensors import TensorSpec

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
    found = Stored.of(graph, Dataflow.of(graph))
    values: list[list[int]] = [[] for _ in found.roots]
    for value, number in enumerate(found.storage_of.tolist()):
        values[number].append(value)
    columns = (each.tolist() for each in (found.roots, found.born, found.dies, found.kinds))
    return tuple(
        Storage(values=tuple(own), root=root, born=born, dies=dies, kind=kind)
        for own, root, born, dies, kind in zip(values, *columns, strict=True)
    )


def value_roots(graph: OpGraph) -> list[int]:
    """For each value, the value that owns its storage, sums of gradients apart."""
    flow = Dataflow.of(graph)
    found: list[int] = _owners(_bases(flow, _view_ops(graph)[0])).tolist()
    return found


def _roots(graph: OpGraph, flow: Dataflow) -> Indices:
    """For each value, the value that owns its storage."""
    is_view, keeps_base = _view_ops(graph)
    bases = _bases(flow, is_view)
    return _owners(_with_sums(graph, flow, bases, keeps_base))


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
    of = first[by[made]]
    value, source = flow.touched[made], flow.touched[of]
    tells = ~flow.is_made[of] & (base[value] < 0) & (flow.kind[value] == _KINDS.index("activation"))
    base[value[tells][::-1]] = source[tells][::-1]
    return base


def _owners(base: Indices) -> Indices:
    """The end of each chain of bases; raises WorkloadError for a ring, which has none."""
    found = np.where(base < 0, np.arange(len(base)), base)
    # Each round goes twice as far.
    for _ in range(len(base).bit_length() + 1):
        if np.array_equal(further := found[found], found):
            return found
        found = further
    raise WorkloadError("tensors of the graph are views of each other; trace the model again")


def _with_sums(graph: OpGraph, flow: Dataflow, base: Indices, keeps_base: Flags) -> Indices:
    """Let the sum of two gradients take the place of the first where autograd does so."""
    owner = _owners(base)
    reads = ~flow.is_made
    last_read = np.full(len(base), -1, dtype=np.intp)
    last_read[owner[flow.touched[reads]]] = flow.touched_by[reads]
    is_view = np.zeros(len(base), dtype=np.bool_)
    is_view[flow.touched[flow.is_made & keeps_base[flow.touched_by]]] = True
    base, merged = base.copy(), dict[int, int]()

    def owner_of(value: int) -> int:
        found = int(owner[value])
        while found in merged:
            found = merged[found]
        return found

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
