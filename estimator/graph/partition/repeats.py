"""Divide a few of a model's equal blocks, and repeat what comes of them for all the others.

Language models and vision transformers repeat a block 12 to 126 times. A graph without most of its
equal blocks is divided in a small part of the time; where two blocks that follow each other have
become equal again, all that stood between them become the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from estimator.elementwise import Indices
from estimator.graph.ir.op_graph import OpGraph, parameter_unit, unit_path
from estimator.graph.ir.ops import GraphColumns, Parameter, by_first, first_places

# What is left out is worth the search from so many blocks on.
_LEAST_BLOCKS = 3


class RepeatedBlock(NamedTuple):
    """The ops of a repeated block: of the forward, then of the backward pass."""

    forward: slice
    backward: slice

    @property
    def ops(self) -> Indices:
        return np.concatenate([np.arange(part.start, part.stop) for part in self])


def _blocks(columns: GraphColumns, units: Sequence[str]) -> list[RepeatedBlock]:
    """Each of these units that has one after it: up to the first op of that; none if out of order.

    The backward pass meets them the other way round.
    """
    numbers = {unit: number for number, unit in enumerate(units)}
    unit_of = np.array(
        [numbers.get(unit_path(module), -1) for module in columns.modules], dtype=np.intp
    )[columns.module_of]
    firsts = []
    for is_of_pass in (columns.is_forward, ~columns.is_forward):
        ops = np.flatnonzero(is_of_pass & (unit_of >= 0))
        met, places = np.unique(unit_of[ops], return_index=True)
        if len(met) != len(units):
            return []
        firsts.append(ops[places].tolist())
    forward, backward = firsts
    if forward != sorted(forward) or backward != sorted(backward, reverse=True):
        return []
    ends = zip(backward, [*backward[:1], *backward], strict=False)
    return [
        RepeatedBlock(slice(*first), slice(*last))
        for first, last in zip(pairwise(forward), ends, strict=False)
    ]


def _are_alike(
    columns: GraphColumns, one: RepeatedBlock, two: RepeatedBlock, units: Sequence[str]
) -> bool:
    """Whether ops of two units make the same calls, whatever they take."""
    kinds = (columns.call_of, columns.is_forward, columns.is_repeated, columns.enters_dtensor)
    counts = (columns.made_begins - columns.begins[:-1], np.diff(columns.begins))
    here, there = one.ops, two.ops
    if len(here) != len(there):
        return False
    if any((kind[here] != kind[there]).any() for kind in (*kinds, *counts)):
        return False
    pairs = zip(columns.module_of[here].tolist(), columns.module_of[there].tolist(), strict=True)
    return all(
        columns.modules[other] == _renamed(columns.modules[own], *units) for own, other in {*pairs}
    )


def _renamed(path: str, unit: str, other: str) -> str:
    inside = path == unit or path.startswith(f"{unit}.")
    return other + path[len(unit) :] if inside else path


def _taken(columns: GraphColumns) -> Indices:
    """The values that ops touch, that they hold, and the base of each value: one row of slots."""
    return np.concatenate([columns.touched, columns.held, columns.base])


def _parts(columns: GraphColumns, slots: Indices) -> list[Indices]:
    """What ops touch, what they hold, and bases."""
    return np.split(slots, np.cumsum([len(columns.touched), len(columns.held)]))


class RepeatPattern(NamedTuple):
    """What two equal blocks that follow each other take at their `slots`.

    `own` are the values that each takes first; slots are those of its ops and the bases of these.
    What comes `step` blocks behind the one that takes it (-1: before it) is there number `place` of
    its own; a place of -1 is one value that both take. `kept` are the slots where ops
    outside of them hold the same of each, as the loss what autocast has cast and the last op what
    checkpoints saved, and the places of what they hold.
    """

    slots: tuple[Indices, Indices]
    own: tuple[Indices, Indices]
    step: Indices
    place: Indices
    kept: tuple[Indices, Indices]

    @classmethod
    def of(
        cls, columns: GraphColumns, one: RepeatedBlock, two: RepeatedBlock
    ) -> RepeatPattern | None:
        """That of two blocks that are alike; None where it is not clear."""
        taken, held_begins, count = _taken(columns), columns.held_begins, len(columns.spec_of)
        held = np.diff(held_begins)
        if (held[one.ops] != held[two.ops]).any():
            return None
        rows = ((columns.begins, 0), (held_begins, len(columns.touched)))
        of_ops = [
            np.concatenate(
                [
                    np.arange(begins[part.start], begins[part.stop]) + behind
                    for begins, behind in rows
                    for part in each
                ]
            )
            for each in (one, two)
        ]
        first = first_places(taken[: len(taken) - count], count)
        differs = taken[of_ops[0]] != taken[of_ops[1]]
        # The last place is of no value, -1.
        block, place = (np.full(count + 1, -1, dtype=np.intp) for _ in range(2))
        own, slots = [], []
        for number, some in enumerate(of_ops):
            values = taken[some][differs & (first[taken[some]] == some)]
            block[values], place[values] = number, np.arange(len(values))
            own.append(values)
            slots.append(np.concatenate([some, len(taken) - count + values]))
        if len(own[0]) != len(own[1]):
            return None
        here, there = (taken[some] for some in slots)
        is_own = (block[here] == 0) & (block[there] == 1) & (place[here] == place[there])
        is_before = (block[here] < 0) & (block[there] == 0)
        is_behind = (block[here] == 1) & (block[there] < 0)
        is_clear = (here == there) | is_own | is_before | is_behind
        # What stands before and behind takes nothing of the other block.
        by = np.concatenate([columns.touched_by, columns.held_by])
        of_block = block[taken[: len(by)]]
        apart = (by < one.forward.start) | (by >= one.backward.stop)
        between = (by >= two.forward.stop) & (by < two.backward.start)
        strays = ((of_block == 1) & apart) | ((of_block == 0) & between)
        places = place[taken[: len(by)]]
        keys, is_held = by * count + places, np.arange(len(by)) >= len(columns.touched)
        both = [np.flatnonzero(is_held & (apart | between) & (of_block == n)) for n in (0, 1)]
        kept, again = (
            mine[np.isin(keys[mine], keys[others])] for mine, others in (both, reversed(both))
        )
        strays[kept] = strays[again] = False
        unlike = [kind[own[0]] != kind[own[1]] for kind in (columns.spec_of, columns.kind)]
        if strays.any() or not is_clear.all() or np.any(unlike):
            return None
        return cls(
            slots=(slots[0], slots[1]),
            own=(own[0], own[1]),
            step=is_behind.astype(np.intp) - is_before,
            place=np.select([is_own | is_behind, is_before], [place[here], place[there]], -1),
            kept=(kept, places[kept]),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Repeats:
    """A graph, and the same with `units` of its equal blocks left out.

    `around` are the two blocks before and the two behind what is left out; `names` are those of the
    ops of the second of them, and of each that is left out.
    """

    short: OpGraph
    whole: OpGraph
    names: NDArray[np.object_] = field(repr=False)
    around: tuple[str, str, str, str]
    units: tuple[str, ...]

    @classmethod
    def of(cls, graph: OpGraph, columns: GraphColumns) -> Repeats | None:
        """Those of a graph; None where no blocks are equal."""
        if graph.frozen_parameter_bytes or any(
            p.gradient is None or p.ready_after is None for p in graph.parameters
        ):
            return None
        units = _longest_row(columns)
        blocks = _blocks(columns, units)
        first, last = _longest_alike(columns, blocks, units)
        if last - first < _LEAST_BLOCKS + 2:
            return None
        one, two = first + 1, last
        short = _short(graph, columns, blocks[one : two + 1], units[one + 1 : two])
        if short is None:
            return None
        found = cls(
            short=short,
            whole=graph,
            names=np.stack([columns.names[block.ops] for block in blocks[one:two]]),
            around=(units[one - 1], units[one], units[two], units[two + 1]),
            units=tuple(units[one + 1 : two]),
        )
        again = found.repeated(short)
        if again is None:
            return None
        own, repeated = _content(graph, columns), _content(again, GraphColumns.of(again))
        is_same = all(map(np.array_equal, own, repeated))
        return found if is_same else None

    def repeated(self, part: OpGraph) -> OpGraph | None:
        """What the whole graph becomes where the short one becomes a part; None if not clear."""
        columns = GraphColumns.of(part)
        blocks = _blocks(columns, self.around)
        if not blocks:
            return None
        _, one, two = blocks
        if not _are_alike(columns, one, two, self.around[1:3]):
            return None
        pattern = RepeatPattern.of(columns, one, two)
        if pattern is None:
            return None
        copies = _Copies(columns, one, pattern, self)
        try:
            parameters = tuple(copies.parameters(part.parameters))
        except KeyError:
            # One has become another, or its gradient none of its block's.
            return None
        more = copies.columns()
        return replace(part, ops=more.ops(), values=more.values(), parameters=parameters)


def _longest_row(columns: GraphColumns) -> tuple[str, ...]:
    """The longest row of units that are numbered one after the other, in the forward pass."""
    modules, _ = by_first(columns.module_of[columns.is_forward], len(columns.modules))
    rows: list[list[str]] = [[]]
    for unit in dict.fromkeys(unit_path(columns.modules[number]) for number in modules.tolist()):
        stem, _, number = unit.rpartition(".")
        before = rows[-1][-1] if rows[-1] else ""
        if unit and before == f"{stem}.{int(number) - 1}".removeprefix("."):
            rows[-1].append(unit)
        elif unit:
            rows.append([unit])
    longest: list[str] = max(rows, key=len)
    return tuple(longest)


def _longest_alike(
    columns: GraphColumns, blocks: Sequence[RepeatedBlock], units: Sequence[str]
) -> tuple[int, int]:
    """The first and the last block of the longest row of equal ones, the model's first apart."""
    best = start = end = 1
    for number, pair in enumerate(pairwise(blocks[1:]), 1):
        if not _are_alike(columns, *pair, units[number : number + 2]):
            start = number + 1
        elif number + 1 - start > end - best:
            best, end = start, number + 1
    return best, end


def _short(
    graph: OpGraph, columns: GraphColumns, blocks: Sequence[RepeatedBlock], units: Sequence[str]
) -> OpGraph | None:
    """A graph without the blocks between the first and the last of some equal ones.

    `units` are left out. Whether it is one, repeating it tells.
    """
    one, *out, two = blocks
    head, tail = RepeatPattern.of(columns, one, out[0]), RepeatPattern.of(columns, out[-1], two)
    if head is None or tail is None:
        return None
    slots = _taken(columns)
    for is_lost, own, pattern, other in (
        (head.step > 0, head.slots[0], head, tail.own[1]),
        (tail.step < 0, tail.slots[1], tail, head.own[0]),
    ):
        slots[own[is_lost]] = other[pattern.place[is_lost]]
    touched, held, base = _parts(columns, slots)
    is_out = np.zeros(len(columns.call_of), dtype=np.bool_)
    is_out[np.concatenate([block.ops for block in out])] = True
    makers = columns.maker[held]
    touches, holds = ~is_out[columns.touched_by], ~is_out[columns.held_by]
    holds &= (makers < 0) | ~is_out[makers]
    stays = np.ones(len(base), dtype=np.bool_)
    stays[columns.touched[~touches]] = False
    stays[touched[touches]] = stays[held[holds]] = True
    number, place, base = np.cumsum(stays) - 1, np.cumsum(~is_out) - 1, base[stays]
    short = replace(
        columns,
        **columns.of_ops(np.flatnonzero(~is_out)),
        spec_of=columns.spec_of[stays],
        touched=number[touched[touches]],
        touched_by=place[columns.touched_by[touches]],
        is_made=columns.is_made[touches],
        held=number[held[holds]],
        held_by=place[columns.held_by[holds]],
        base=np.where(base < 0, -1, number[base]),
        kind=columns.kind[stays],
    )
    parameters = tuple(
        replace(
            parameter,
            gradient=int(number[parameter.gradient or 0]),
            ready_after=int(place[parameter.ready_after or 0]),
        )
        for parameter in graph.parameters
        if parameter_unit(parameter) not in units
    )
    inputs = tuple(replace(given, value=int(number[given.value])) for given in graph.inputs)
    ops, values = short.ops(), short.values()
    return replace(graph, ops=ops, values=values, parameters=parameters, inputs=inputs)


class _Copies:
    """A graph with copies of a block between it and its equal."""

    def __init__(
        self, columns: GraphColumns, one: RepeatedBlock, pattern: RepeatPattern, repeats: Repeats
    ) -> None:
        self._columns, self._one, self._pattern, self._repeats = columns, one, pattern, repeats
        count, ops = len(repeats.units), len(columns.call_of)
        self._begins = np.arange(ops + 1)
        copy = np.repeat(np.arange(1, count + 1)[:, None], len(one.ops), axis=1)
        # The op that each is a copy of, and the copy that it is of; 0 for itself.
        self._order = self._spliced(self._begins[:-1], np.tile(one.ops, (count, 1)), self._begins)
        self._copy = self._spliced(np.zeros(ops, dtype=np.intp), copy, self._begins)
        own = len(pattern.own[0])
        more = len(columns.spec_of) + np.arange(count * own).reshape(count, own)
        self._own = np.concatenate([pattern.own[:1], more, pattern.own[1:]])

    def _spliced(self, column: NDArray[Any], copies: NDArray[Any], begins: Indices) -> NDArray[Any]:
        """A column with a row of copies of the block's part each, where the parts of ops begin so.

        In the backward pass the last copy comes first.
        """
        begin, end, back = begins[
            [self._one.forward.start, self._one.forward.stop, self._one.backward.start]
        ]
        before, between, behind = np.split(column, [end, back])
        forward, backward = np.split(copies, [end - begin], axis=1)
        return np.concatenate([before, forward.ravel(), between, backward[::-1].ravel(), behind])

    def columns(self) -> GraphColumns:
        """All that the graph with its copies has."""
        columns, pattern, count = self._columns, self._pattern, len(self._repeats.units)
        slots = _taken(columns)
        here, there = (slots[some] for some in pattern.slots)
        rows = np.arange(count + 2)[:, None] + pattern.step
        taken = np.where(pattern.place < 0, here, self._own[rows.clip(0, count + 1), pattern.place])
        # The first block takes what is before it, its equal what is behind, as they did.
        taken[0] = np.where(pattern.step < 0, here, taken[0])
        taken[-1] = np.where(pattern.step > 0, there, taken[-1])
        slots[pattern.slots[0]], slots[pattern.slots[1]] = taken[0], taken[-1]
        touched, held, base = _parts(columns, slots)
        held, held_begins = self._held(held)
        begins, own = columns.begins, pattern.own[0]
        touches = pattern.slots[0][pattern.slots[0] < len(columns.touched)]
        of_ops = taken[1:-1, : taken.shape[1] - len(own)]
        of_touched, of_held = np.split(of_ops, [len(touches)], axis=1)
        modules, module_of = self._modules()
        places = np.arange(len(self._order))
        return replace(
            columns,
            **columns.of_ops(self._order) | {"names": self._names(), "module_of": module_of},
            modules=modules,
            spec_of=np.concatenate([columns.spec_of, np.tile(columns.spec_of[own], count)]),
            touched=self._spliced(touched, of_touched, begins),
            touched_by=np.repeat(places, np.diff(begins)[self._order]),
            is_made=self._spliced(
                columns.is_made, np.tile(columns.is_made[touches], (count, 1)), begins
            ),
            held=self._spliced(held, of_held, held_begins),
            held_by=np.repeat(places, np.diff(held_begins)[self._order]),
            base=np.concatenate([base, taken[1:-1, of_ops.shape[1] :].ravel()]),
            kind=np.concatenate([columns.kind, np.tile(columns.kind[own], count)]),
        )

    def _held(self, held: Indices) -> tuple[Indices, Indices]:
        """(what ops hold, where the part of each begins): of copies what is kept of the first."""
        columns, count = self._columns, len(self._repeats.units)
        slots, places = self._pattern.kept
        slots = slots - len(columns.touched)
        by = columns.held_by[slots]
        behind = slots[np.searchsorted(by, by, side="right") - 1] + 1
        copies = self._own[1:-1][:, places]
        begins = columns.held_begins
        begins = begins + count * np.searchsorted(slots, begins)
        return np.insert(held, np.tile(behind, count), copies.ravel()), begins

    def _modules(self) -> tuple[tuple[str, ...], Indices]:
        columns, unit = self._columns, self._repeats.around[1]
        inside = [n for n, module in enumerate(columns.modules) if unit_path(module) == unit]
        number = np.full(len(columns.modules), -1, dtype=np.intp)
        number[inside] = np.arange(len(inside))
        modules = [
            _renamed(columns.modules[place], unit, other)
            for other in self._repeats.units
            for place in inside
        ]
        own = columns.module_of[self._order]
        of_copy = len(columns.modules) + (self._copy - 1) * len(inside) + number[own]
        is_other = (self._copy > 0) & (number[own] >= 0)
        return (*columns.modules, *modules), np.where(is_other, of_copy, own)

    def _names(self) -> NDArray[np.object_]:
        """The names that ops have in the whole graph, where they come from one of it."""
        known = {name: place for place, name in enumerate(self._repeats.names[0].tolist())}
        own = self._columns.names[self._one.ops]
        places = np.array([known.get(name, -1) for name in own.tolist()], dtype=np.intp)
        copies = np.where(places < 0, own, self._repeats.names[1:, places])
        return self._spliced(self._columns.names, copies, self._begins)

    def parameters(self, own: Sequence[Parameter]) -> Iterator[Parameter]:
        """Those of the whole graph; raises KeyError where one has no like among its `own`."""
        by_name = {parameter.name: parameter for parameter in own}
        copies = {unit: copy for copy, unit in enumerate(self._repeats.units, 1)}
        numbers = {value: n for n, value in enumerate(self._pattern.own[0].tolist())}
        place = np.full((len(copies) + 1, len(self._begins)), -1, dtype=np.intp)
        place[self._copy, self._order] = np.arange(len(self._order))
        for parameter in self._repeats.whole.parameters:
            unit = parameter_unit(parameter)
            copy, name = copies.get(unit, 0), parameter.name
            like = by_name[_renamed(name, unit, self._repeats.around[1]) if copy else name]
            gradient = like.gradient
            if copy:
                gradient = int(self._own[copy, numbers[gradient or 0]])
            ready = int(place[copy, like.ready_after or 0])
            if ready < 0:
                raise KeyError(name)
            yield replace(like, name=name, gradient=gradient, ready_after=ready)


def _content(graph: OpGraph, columns: GraphColumns) -> list[Any]:
    """All that a graph computes, its values numbered as they are met."""
    count = len(columns.spec_of)
    values, numbers = by_first(
        np.concatenate([columns.touched, columns.held, np.arange(count)]), count
    )
    touched, held, number = _parts(columns, numbers)
    # What an op holds has no order.
    held = held[np.lexsort((held, columns.held_by))]
    base = columns.base[values]
    modules = np.array(columns.modules, dtype=np.object_)[columns.module_of]
    return [
        *(columns.of_ops(np.arange(len(modules))) | {"module_of": modules}).values(),
        *(touched, columns.touched_by, columns.is_made, held, columns.held_by),
        *(columns.spec_of[values], columns.kind[values], np.where(base < 0, -1, number[base])),
        [(p.name, p.spec, number[p.gradient or 0], p.ready_after) for p in graph.parameters],
    ]
