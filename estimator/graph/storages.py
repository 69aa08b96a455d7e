"""Find the pieces of memory that a training step holds, and from when to when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from estimator.graph.costs import family_of
from estimator.graph.op_graph import OpGraph
from estimator.graph.ops import Op
from estimator.tensors import TensorSpec

StorageKind = Literal["parameter", "buffer", "input", "constant", "activation", "gradient"]

BEFORE_STEP = -1


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


def storages(graph: OpGraph) -> tuple[Storage, ...]:
    """Every piece of memory of the step with its lifetime, in order of birth.

    A value and all its views and in-place results share one storage, held until the last op that
    uses any of them or is known to hold one.
    Parameters, buffers, inputs and constants are held throughout, gradients of parameters from
    their birth to the end.
    """
    roots = _roots(graph)
    born, last_use = _uses(graph, roots)
    gradients = {
        roots[parameter.gradient]
        for parameter in graph.parameters
        if parameter.gradient is not None
    }
    members: dict[int, list[int]] = {}
    for value, root in enumerate(roots):
        members.setdefault(root, []).append(value)
    found = []
    for root, values in members.items():
        kind: StorageKind = graph.values[root].kind
        start = born.get(root, BEFORE_STEP)
        end = len(graph.ops)
        if kind == "activation" and root in gradients:
            kind = "gradient"
        elif kind == "activation":
            end = max(start, last_use.get(root, start))
        else:
            start = BEFORE_STEP
        found.append(Storage(values=tuple(values), root=root, born=start, dies=end, kind=kind))
    return tuple(sorted(found, key=lambda storage: (storage.born, storage.root)))


def value_roots(graph: OpGraph) -> list[int]:
    """For each value, the value that owns its storage, sums of gradients apart."""
    bases = _bases(graph)
    return [_owner(bases, value) for value in range(len(graph.values))]


def _roots(graph: OpGraph) -> list[int]:
    """For each value, the value that owns its storage."""
    bases = _bases(graph)
    _share_sums(graph, bases)
    return [_owner(bases, value) for value in range(len(graph.values))]


def _bases(graph: OpGraph) -> list[int | None]:
    bases = [value.base for value in graph.values]
    for op in graph.ops:
        # The schemas of unsafe_split and of views that return lists do not name what they share.
        if op.inputs and family_of(op.call.target) == "view":
            for value in op.outputs:
                if bases[value] is None and graph.values[value].kind == "activation":
                    bases[value] = op.inputs[0]
    return bases


def _owner(bases: list[int | None], value: int) -> int:
    while (base := bases[value]) is not None and base != value:
        value = base
    return value


def _share_sums(graph: OpGraph, bases: list[int | None]) -> None:
    """Let the sum of two gradients take the place of the first where autograd does so."""
    last_read: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        for value in op.inputs:
            last_read[_owner(bases, value)] = index
    held = {
        _owner(bases, parameter.gradient)
        for parameter in graph.parameters
        if parameter.gradient is not None
    }
    views = {value for op in graph.ops if _keeps_base(op) for value in op.outputs}
    for index, op in enumerate(graph.ops):
        if not _accumulates(graph, op) or op.inputs[0] in views:
            continue
        old = _owner(bases, op.inputs[0])
        unshared = last_read[old] == index and _owner(bases, op.inputs[1]) != old
        if graph.values[old].kind == "activation" and unshared and old not in held:
            total = op.outputs[0]
            bases[total] = old
            last_read[old] = max(index, last_read.get(total, index))
            if total in held:
                held.add(old)


def _accumulates(graph: OpGraph, op: Op) -> bool:
    """Whether autograd runs this sum of two gradients in place of the first.

    torch/csrc/autograd/input_buffer.cpp does so where it holds the last reference to a dense
    tensor; a trace with fake tensors, which are subclasses, shows a fresh sum instead.
    """
    if op.phase != "backward" or op.call.target != "aten.add.Tensor" or len(op.inputs) != 2:
        return False
    if not op.outputs or graph.values[op.outputs[0]].base is not None:
        return False
    old, new, total = (graph.values[value].spec for value in (*op.inputs, op.outputs[0]))
    return old.shape == new.shape == total.shape and old.dtype == total.dtype and is_dense(old)


def _keeps_base(op: Op) -> bool:
    """Whether its results are views that hold the tensor which they are of.

    Then autograd's is not the last reference to the storage, as where a weight is shared: of a
    linear layer it gets the transpose of a product.
    """
    return family_of(op.call.target) == "view" and "unsafe" not in op.call.target


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


def _uses(graph: OpGraph, roots: list[int]) -> tuple[dict[int, int], dict[int, int]]:
    """The op that makes each storage, and the last op that touches or holds it."""
    born: dict[int, int] = {}
    last_use: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        for value in op.outputs:
            born.setdefault(roots[value], index)
        for value in (*op.inputs, *op.outputs, *op.holds):
            last_use[roots[value]] = index
    return born, last_use
