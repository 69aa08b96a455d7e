"""Hold in arrays who reads, makes and shares each value of a graph, and where passes belong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from estimator.graph.op_graph import OpGraph
from estimator.graph.ops import ValueKind

Indices = NDArray[np.intp]
Flags = NDArray[np.bool_]

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
            _array(map(len, each))
            for each in ([op.inputs for op in ops], [op.outputs for op in ops])
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
            place=_places(is_forward, touched, touched_by, is_made, module_of, tells),
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
    module_of: Indices,
    tells: Flags,
) -> Indices:
    """The place in the forward pass that each op belongs to.

    The backward pass of a module is with its last forward op (it meets the latest first), and where
    the last op stands that makes or reads any value that it takes, never behind the op before it.
    """
    count = int(is_forward.sum())
    place = np.where(is_forward, np.cumsum(is_forward) - 1, count - 1)
    forward = is_forward[touched_by]
    last_touch = np.full(len(tells), count, dtype=np.intp)
    last_touch[touched[forward]] = place[touched_by[forward]]
    last_touch[~tells] = count
    last_of_module = np.full(int(module_of.max(initial=0)) + 1, count, dtype=np.intp)
    last_of_module[module_of[is_forward]] = place[is_forward]
    anchor = last_of_module[module_of]
    reads = ~forward & ~is_made
    np.minimum.at(anchor, touched_by[reads], last_touch[touched[reads]])
    behind = np.minimum.accumulate(np.minimum(anchor[~is_forward], max(count - 1, 0)))
    place[~is_forward] = behind
    return place


def _first_places(modules: tuple[str, ...], forward: Indices) -> dict[str, int]:
    """The place in the forward pass of the first op in each module or in a part of it."""
    numbers, firsts = np.unique(forward, return_index=True)
    found: dict[str, int] = {}
    for first, number in sorted(zip(firsts.tolist(), numbers.tolist(), strict=True)):
        name = modules[number]
        while name:
            found.setdefault(name, first)
            name = name.rpartition(".")[0]
    return found


def _from_weights(graph: OpGraph) -> Flags:
    values = graph.values
    found = {index for index, value in enumerate(values) if value.kind == "parameter"}
    for op in graph.ops:
        if op.phase == "forward" and not found.isdisjoint(op.inputs):
            found.update(v for v in op.outputs if "float" in values[v].spec.dtype)
    flags = np.zeros(len(values), dtype=np.bool_)
    flags[list(found)] = True
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
