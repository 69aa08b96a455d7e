"""Divide a few of a model's equal blocks, and repeat what comes of them for all the others.

Language models and vision transformers repeat a block 12 to 126 times. A graph without most of its
equal blocks is divided in a small part of the time; where two blocks that follow each other have
become equal again, all that stood between them become the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from estimator.elementwise import Flags, Indices
from estimator.graph.ir.op_graph import OpGraph, unit_path
from estimator.graph.ir.ops import GraphColumns, Parameter, by_first

# What is left out is worth the search from so many blocks on.
_LEAST_BLOCKS = 3
_FIXED, _OWN, _LEFT, _RIGHT = range(4)
# Of the copy that a value stands in, from that which takes it.
_ROWS = np.array([0, 0, -1, 1], dtype=np.intp)


class RepeatedBlock(NamedTuple):
    """The ops of a repeated block: of the forward, then of the backward pass."""

    forward: slice
    backward: slice

    @property
    def ops(self) -> Indices:
        return np.concatenate([np.arange(part.start, part.stop) for part in self])

    @property
    def lengths(self) -> tuple[int, int]:
        return self.forward.stop - self.forward.start, self.backward.stop - self.backward.start


def _blocks(columns: GraphColumns, units: Sequence[str]) -> list[RepeatedBlock]:
    """Each of these units that has one after it: up to the first op of that; none if out of order.

    The backward pass meets them the other way round.
    """
    numbers = {unit: number for number, unit in enumerate(units)}
    unit_of = np.array(
        [numbers.get(unit_path(module), -1) for module in columns.modules], dtype=np.intp
    )[columns.module_of]
    forward, backward = ([0] * len(units) for _ in range(2))
    for firsts, ops in (
        (forward, np.flatnonzero(columns.is_forward & (unit_of >= 0))),
        (backward, np.flatnonzero(~columns.is_forward & (unit_of >= 0))),
    ):
        found, places = np.unique(unit_of[ops], return_index=True)
        if len(found) != len(units):
            return []
        firsts[:] = ops[places].tolist()
    if forward != sorted(set(forward)) or backward != sorted(set(backward), reverse=True):
        return []
    return [
        RepeatedBlock(slice(*passed), slice(backward[number], backward[number - 1]))
        if number
        else RepeatedBlock(slice(*passed), slice(backward[0], backward[0]))
        for number, passed in enumerate(pairwise(forward))
    ]


def _slots(begins: Indices, ops: Indices) -> Indices:
    """The places in `touched` or `held` of what some ops take, op by op."""
    counts = begins[ops + 1] - begins[ops]
    ends = np.cumsum(counts)
    return np.arange(int(counts.sum())) + np.repeat(begins[ops] - ends + counts, counts)


def _are_alike(columns: GraphColumns, one: Indices, two: Indices, units: tuple[str, str]) -> bool:
    """Whether ops of two units make the same calls, whatever they take."""
    kinds = (columns.call_of, columns.is_forward, columns.is_repeated, columns.enters_dtensor)
    counts = (columns.made_begins - columns.begins[:-1], np.diff(columns.begins))
    if len(one) != len(two):
        return False
    if any((kind[one] != kind[two]).any() for kind in (*kinds, *counts)):
        return False
    pairs = set(zip(columns.module_of[one].tolist(), columns.module_of[two].tolist(), strict=True))
    return all(
        columns.modules[there] == _renamed(columns.modules[here], *units) for here, there in pairs
    )


def _renamed(module: str, unit: str, other: str) -> str:
    inside = module == unit or module.startswith(f"{unit}.")
    return other + module[len(unit) :] if inside else module


class RepeatPattern(NamedTuple):
    """How two equal blocks that follow each other stand in a graph, and what copies of them take.

    `own` are the values of the first block, `other` the same of the second. `codes` say of each
    value that the first block takes where it is: fixed, its own, of the block before or after it;
    `numbers` which of `own` it is there.
    """

    one: RepeatedBlock
    two: RepeatedBlock
    own: Indices
    other: Indices
    codes: Indices
    numbers: Indices

    @classmethod
    def of(cls, columns: GraphColumns, units: Sequence[str]) -> RepeatPattern | None:
        """That of the second and third of four units; None where it is not clear."""
        blocks = _blocks(columns, units)
        if not blocks:
            return None
        one, two = blocks[1:3]
        if not _are_alike(columns, one.ops, two.ops, (units[1], units[2])):
            return None
        image, count = _images(columns, (one, two)), len(columns.spec_of)
        if image is None:
            return None
        moves = np.flatnonzero((image >= 0) & (image != np.arange(count)))
        maker = columns.maker[moves]
        own = moves[(maker < 0) | _is_in(maker, one)]
        other = image[own]
        numbers = np.full((3, count), -1, dtype=np.intp)
        numbers[0][own] = numbers[2][other] = np.arange(len(own))
        into = image[moves]
        numbers[1][moves] = numbers[0][into]
        code = np.full(count, _FIXED, dtype=np.intp)
        for mark, row in ((_LEFT, 1), (_RIGHT, 2), (_OWN, 0)):
            code[numbers[row] >= 0] = mark
        number = np.select([code == _OWN, code == _LEFT, code == _RIGHT], list(numbers), 0)
        pattern = cls(one, two, own, other, code, number)
        is_known = (code[moves] != _FIXED).all() and pattern._is_clear(columns, image)
        return pattern if is_known else None

    def _is_clear(self, columns: GraphColumns, image: Indices) -> bool:
        """Whether values are alike, and what stands before and behind takes none of the others."""
        own, other, base = self.own, self.other, columns.base
        bases = base[own]
        has = bases >= 0
        moved = np.where(image[bases] >= 0, image[bases], bases)
        is_alike = (
            (columns.spec_of[own] == columns.spec_of[other]).all()
            and (columns.kind[own] == columns.kind[other]).all()
            and ((base[other] >= 0) == has).all()
            and (base[other][has] == moved[has]).all()
        )
        is_own, is_other = (np.zeros(len(image), dtype=np.bool_) for _ in range(2))
        is_own[own] = is_other[other] = True
        if not is_alike or (is_own & is_other).any():
            return False
        for values, by in ((columns.touched, columns.touched_by), (columns.held, columns.held_by)):
            is_left = (by < self.one.forward.start) | (by >= self.one.backward.stop)
            is_right = (by >= self.two.forward.stop) & (by < self.two.backward.start)
            if (is_other[values] & is_left).any() or (is_own[values] & is_right).any():
                return False
        return True


def _is_in(ops: Indices, block: RepeatedBlock) -> Flags:
    inside = (ops >= block.forward.start) & (ops < block.forward.stop)
    return np.asarray(inside | ((ops >= block.backward.start) & (ops < block.backward.stop)))


def _images(columns: GraphColumns, blocks: Sequence[RepeatedBlock]) -> Indices | None:
    """What stands for each value in the block after its own; None if that is not one value."""
    here, there = (
        np.concatenate([block.ops for block in some]) for some in (blocks[:-1], blocks[1:])
    )
    held = columns.held_begins
    one, two = (
        np.concatenate(
            [columns.touched[_slots(columns.begins, ops)], columns.held[_slots(held, ops)]]
        )
        for ops in (here, there)
    )
    if len(one) != len(two):
        return None
    image = np.full(len(columns.spec_of), -1, dtype=np.intp)
    image[one] = two
    known = image[image >= 0]
    is_one = (image[one] == two).all() and len(np.unique(known)) == len(known)
    return image if is_one else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Repeats:
    """A graph, and the same with `units` of its equal blocks left out.

    `around` are the two blocks before and the two behind what is left out. `parameters` are for
    each one of the whole graph the number of that which is like it in the short one and the copy
    that it is of, 0 for itself.
    """

    short: OpGraph
    whole: OpGraph
    names: tuple[NDArray[np.object_], ...] = field(repr=False)
    around: tuple[str, str, str, str]
    units: tuple[str, ...]
    parameters: tuple[tuple[int, int], ...] = field(repr=False)

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
        images = _images(columns, blocks[one : two + 1])
        if images is None:
            return None
        short = _Short(graph, columns, blocks, one, two)
        few, like = short.graph(images), short.like()
        if few is None or like is None:
            return None
        found = cls(
            short=few,
            whole=graph,
            names=tuple(columns.names[blocks[number].ops] for number in range(one, two)),
            around=(units[one - 1], units[one], units[two], units[two + 1]),
            units=tuple(units[one + 1 : two]),
            parameters=like,
        )
        again = found.repeated(few)
        return found if again is not None and _is_same(again, graph, columns) else None

    def repeated(self, part: OpGraph) -> OpGraph | None:
        """What the whole graph becomes where the short one becomes a part; None if not clear."""
        columns = GraphColumns.of(part)
        pattern = RepeatPattern.of(columns, self.around)
        if pattern is None or len(part.parameters) != len(self.short.parameters):
            return None
        copies = _Copies(columns, pattern, self)
        parameters = tuple(copies.parameters(part.parameters))
        if len(parameters) < len(self.parameters):
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
    best = start = 1
    end = 1
    for number in range(1, len(blocks) - 1):
        pair = units[number], units[number + 1]
        if not _are_alike(columns, blocks[number].ops, blocks[number + 1].ops, pair):
            start = number + 1
        elif number + 1 - start > end - best:
            best, end = start, number + 1
    return best, end


class _Short:
    """A graph without the blocks between two of those that are alike from the one to the other."""

    def __init__(
        self,
        graph: OpGraph,
        columns: GraphColumns,
        blocks: Sequence[RepeatedBlock],
        one: int,
        two: int,
    ) -> None:
        self._graph, self._columns = graph, columns
        self._left_out = two - one - 1
        ops, count = len(columns.call_of), len(columns.spec_of)
        self._is_out = np.zeros(ops, dtype=np.bool_)
        self._is_out[np.concatenate([blocks[number].ops for number in range(one + 1, two)])] = True
        self._place = np.cumsum(~self._is_out) - 1
        places = np.arange(ops)
        self._is_left = (places < blocks[one].forward.stop) | (places >= blocks[one].backward.start)
        self._stays = np.ones(count, dtype=np.bool_)
        self._stays[columns.touched[self._is_out[columns.touched_by]]] = False
        self._number = np.arange(count)
        # What stands for a value in the block after its own, and in the one before.
        self._forth = self._back = np.arange(count)
        self._further = self._nearer = np.arange(count)

    def graph(self, images: Indices) -> OpGraph | None:
        """The short graph; `images` are what stands for values in the next block, -1 for nothing.

        None where a value that stays is a view of what does not.
        """
        short = self._wired(images)
        if short is None:
            return None
        number, is_out = self._number, self._is_out
        return replace(
            self._graph,
            ops=short.ops(),
            values=short.values(),
            parameters=tuple(
                replace(
                    parameter,
                    gradient=int(number[parameter.gradient or 0]),
                    ready_after=int(self._place[parameter.ready_after or 0]),
                )
                for parameter in self._graph.parameters
                if not is_out[parameter.ready_after or 0]
            ),
            inputs=tuple(
                replace(given, value=int(number[given.value])) for given in self._graph.inputs
            ),
        )

    def _wired(self, images: Indices) -> GraphColumns | None:
        columns, is_out, every = self._columns, self._is_out, np.arange(len(images))
        self._forth, self._back = np.where(images < 0, every, images), every.copy()
        self._back[self._forth] = every
        for _ in range(self._left_out):
            self._further = self._forth[self._further]
            self._nearer = self._back[self._nearer]
        touched = self._taken(columns.touched, columns.touched_by)
        held = self._taken(columns.held, columns.held_by)
        self._stays[touched] = self._stays[held] = True
        stays, base, maker = self._stays, columns.base, columns.maker
        lost = (base >= 0) & stays & ~stays[base]
        beyond = np.where(
            self._is_left[maker] | (maker < 0), self._further[base], self._nearer[base]
        )
        base = np.where(lost, beyond, base)[stays]
        if not stays[base[base >= 0]].all():
            return None
        number = self._number = np.cumsum(stays) - 1
        ops, own_touch = np.flatnonzero(~is_out), ~is_out[columns.touched_by]
        return replace(
            columns,
            **columns.of_ops(ops),
            spec_of=columns.spec_of[stays],
            touched=number[touched],
            touched_by=self._place[columns.touched_by[own_touch]],
            is_made=columns.is_made[own_touch],
            held=number[held],
            held_by=self._place[columns.held_by[~is_out[columns.held_by]]],
            base=np.where(base < 0, -1, number[base]),
            kind=columns.kind[stays],
        )

    def _taken(self, values: Indices, by: Indices) -> Indices:
        """What ops that stay take: for what a block that does not makes, what the nearest does."""
        own = ~self._is_out[by]
        values, by = values[own], by[own]
        maker = self._columns.maker[values]
        beyond = np.where(self._is_left[by], self._further[values], self._nearer[values])
        return np.where((maker >= 0) & self._is_out[maker], beyond, values)

    def like(self) -> tuple[tuple[int, int], ...] | None:
        """`Repeats.parameters`, known once the graph is; None where one is like no other."""
        every = self._graph.parameters
        own = [p.gradient for p in every if not self._is_out[p.ready_after or 0]]
        number = {gradient: place for place, gradient in enumerate(own)}
        known = []
        for parameter in every:
            value, copy = parameter.gradient or 0, 0
            while value not in number and copy <= self._left_out:
                value, copy = int(self._back[value]), copy + 1
            if value not in number:
                return None
            known.append((number[value], copy))
        return tuple(known)


class _Copies:
    """The columns of a graph with copies of a block between it and its equal."""

    def __init__(self, columns: GraphColumns, pattern: RepeatPattern, repeats: Repeats) -> None:
        self._columns, self._pattern, self._repeats = columns, pattern, repeats
        self.count = len(repeats.units)
        one, first = pattern.one, np.arange(len(columns.call_of))

        def spread(of_ops: Indices, forward: Indices, backward: Indices) -> Indices:
            parts = np.split(of_ops, [one.forward.stop, one.backward.start])
            return np.concatenate([parts[0], forward, parts[1], backward, parts[2]])

        self._order = spread(first, *(np.tile(first[part], self.count) for part in one))
        # The copy that an op is of: that of the block itself is 0, that of its equal the last.
        copy = np.zeros(len(first), dtype=np.intp)
        for part in pattern.two:
            copy[part] = self.count + 1
        numbers, (forward, backward) = np.arange(1, self.count + 1), one.lengths
        self._copy = spread(copy, np.repeat(numbers, forward), np.repeat(numbers[::-1], backward))
        own, values = len(pattern.own), len(columns.spec_of)
        more = values + np.arange(self.count * own).reshape(self.count, own)
        self._values = np.concatenate([pattern.own[None], more, pattern.other[None]])
        self._takes = np.zeros(len(first), dtype=np.bool_)
        self._takes[np.concatenate([pattern.one.ops, pattern.two.ops])] = True

    def columns(self) -> GraphColumns:
        """All that the graph with its copies has."""
        columns, order = self._columns, self._order
        held_begins = columns.held_begins
        touched, holds = _slots(columns.begins, order), _slots(held_begins, order)
        by, held_by = (
            np.repeat(np.arange(len(order)), begins[order + 1] - begins[order])
            for begins in (columns.begins, held_begins)
        )
        own, count = self._pattern.own, self.count
        modules, module_of = self._modules()
        other, base = self._pattern.other, columns.base
        of_own, *of_copies = (
            self._moved(base[own], np.full(len(own), copy)) for copy in range(count + 1)
        )
        bases = np.concatenate([base, *of_copies])
        bases[own] = of_own
        bases[other] = self._moved(base[own], np.full(len(own), count + 1), of=base[other])
        return replace(
            columns,
            **columns.of_ops(order) | {"names": self._names(), "module_of": module_of},
            modules=modules,
            spec_of=np.concatenate([columns.spec_of, np.tile(columns.spec_of[own], count)]),
            touched=self._taken(columns.touched, touched, by, columns.begins),
            touched_by=by,
            is_made=columns.is_made[touched],
            held=self._taken(columns.held, holds, held_by, held_begins),
            held_by=held_by,
            base=bases,
            kind=np.concatenate([columns.kind, np.tile(columns.kind[own], count)]),
        )

    def _taken(self, values: Indices, slots: Indices, by: Indices, begins: Indices) -> Indices:
        """What ops take: of the first block's values each copy has its own."""
        pattern, found = self._pattern, values[slots]
        # What the equal block takes has its place in the first one.
        like = values.copy()
        like[_slots(begins, pattern.two.ops)] = values[_slots(begins, pattern.one.ops)]
        takes = self._takes[self._order[by]]
        copies = self._copy[by][takes]
        found[takes] = self._moved(like[slots][takes], copies, of=found[takes])
        return found

    def _moved(self, values: Indices, copies: Indices, of: Indices | None = None) -> Indices:
        """What stands for values that the first block takes in copies of it.

        Where that is in no copy it is what the graph has, `of`.
        """
        pattern = self._pattern
        codes, numbers = pattern.codes[values], pattern.numbers[values]
        rows = copies + _ROWS[codes]
        is_own = (values >= 0) & (codes != _FIXED) & (rows >= 0) & (rows <= self.count + 1)
        moved = self._values[np.where(is_own, rows, 0), np.where(is_own, numbers, 0)]
        return np.where(is_own, moved, values if of is None else of)

    def _modules(self) -> tuple[tuple[str, ...], Indices]:
        columns, unit = self._columns, self._repeats.around[1]
        modules = list(columns.modules)
        table = np.tile(np.arange(len(modules)), (self.count + 2, 1))
        inside = [n for n, module in enumerate(modules) if unit_path(module) == unit]
        for copy, other in enumerate(self._repeats.units, 1):
            table[copy, inside] = len(modules) + np.arange(len(inside))
            modules += [_renamed(columns.modules[number], unit, other) for number in inside]
        copies = np.where(self._copy > self.count, 0, self._copy)
        return tuple(modules), table[copies, columns.module_of[self._order]]

    def _names(self) -> NDArray[np.object_]:
        """The names that ops have in the whole graph, where they come from one of it."""
        columns, known = self._columns, self._repeats.names
        place = {name: number for number, name in enumerate(known[0].tolist())}
        names = columns.names[self._order]
        copied = np.flatnonzero((self._copy > 0) & (self._copy <= self.count))
        of_block = columns.names[self._pattern.one.ops].tolist()
        places = np.zeros(len(columns.call_of), dtype=np.intp)
        places[self._pattern.one.ops] = [place.get(name, -1) for name in of_block]
        of_copy = places[self._order[copied]]
        table = np.stack(known)
        named = of_copy >= 0
        names[copied[named]] = table[self._copy[copied[named]], of_copy[named]]
        return names

    def parameters(self, own: Sequence[Parameter]) -> Iterator[Parameter]:
        """Those of the whole graph, up to one whose gradient is none of the block's."""
        pattern = self._pattern
        forward, backward = (self.count * length for length in pattern.one.lengths)
        ends, length = (pattern.one.forward.stop, pattern.one.backward.start), backward
        for (number, copy), parameter in zip(
            self._repeats.parameters, self._repeats.whole.parameters, strict=True
        ):
            like = own[number]
            gradient, ready = like.gradient, like.ready_after
            if gradient is None or ready is None:
                return
            if copy:
                if pattern.codes[gradient] != _OWN or ready < ends[1]:
                    return
                gradient = int(self._values[copy, pattern.numbers[gradient]])
                ready += forward + (self.count - copy) * pattern.one.lengths[1]
            else:
                ready += (ready >= ends[0]) * forward + (ready >= ends[1]) * length
            yield replace(like, name=parameter.name, gradient=gradient, ready_after=ready)


_SAME = (
    *("call_of", "is_forward", "is_repeated", "is_view", "enters_dtensor", "names"),
    *("touched_by", "is_made", "held_by"),
)


def _is_same(again: OpGraph, graph: OpGraph, columns: GraphColumns) -> bool:
    """Whether a graph is another one, whatever the numbers of its values."""
    other = GraphColumns.of(again)
    for name in _SAME:
        if not np.array_equal(getattr(columns, name), getattr(other, name)):
            return False
    mine, others = (
        np.array(each.modules, dtype=np.object_)[each.module_of] for each in (columns, other)
    )
    if not np.array_equal(mine, others) or len(columns.spec_of) != len(other.spec_of):
        return False
    number = np.full(len(other.spec_of), -1, dtype=np.intp)
    number[other.touched] = columns.touched
    number[other.held] = columns.held
    known = np.flatnonzero(number >= 0)
    own, bases = number[known], other.base[known]
    if not np.array_equal(number[other.touched], columns.touched):
        return False
    return (
        np.array_equal(number[other.held], columns.held)
        and np.array_equal(columns.spec_of[own], other.spec_of[known])
        and np.array_equal(columns.kind[own], other.kind[known])
        and np.array_equal(columns.base[own], np.where(bases < 0, -1, number[bases]))
        and all(
            replace(one, gradient=int(number[one.gradient or 0])) == two
            for one, two in zip(again.parameters, graph.parameters, strict=True)
        )
    )
