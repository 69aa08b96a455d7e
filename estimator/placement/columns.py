"""Hold many allocations as columns, and count those of a pattern without writing them down."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from operator import methodcaller
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.elementwise import Integers, Sizes
from estimator.errors import AllocationError, quoted
from estimator.placement.allocation import Allocation, DeviceGroup

# Texts read at once, groups laid out at once, distinct groups remembered: these bound the memory.
_TEXTS_AT_ONCE = 1 << 16
_MOST_CELLS = 1 << 22
_MOST_GROUPS_KNOWN = 1 << 18
_count_joins = methodcaller("count", "+")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AllocationColumns:
    """One allocation a row, its groups in rank order from the left.

    `machine` is an index into `machines`, −1 where a row has no further group; `nodes` and
    `devices` say how many nodes, and how many devices on each. All have the shape (rows, groups).
    A machine is a type, or what a group of one host of a cluster file is written as.

    >>> columns = AllocationColumns.from_texts(["1x8:v100+2x4:t4", "a1[0,1]"])
    >>> columns.machines, columns.machine.tolist()
    (('v100', 't4', 'a1[0,1]'), [[0, 1], [2, -1]])
    """

    machines: tuple[str, ...]
    machine: Integers
    nodes: Integers
    devices: Integers

    def __post_init__(self) -> None:
        for name in ("machine", "nodes", "devices"):
            column, shape = getattr(self, name), self.machine.shape
            if column.ndim != 2 or column.shape != shape or column.dtype.kind not in "iu":
                raise AllocationError(
                    f"column '{name}' is {column.dtype} of shape {column.shape}; give integers, "
                    "one row an allocation and one column a group, alike for all columns"
                )
        _check_machines(self.machine, len(self.machines))

    def __len__(self) -> int:
        return len(self.machine)

    def __getitem__(self, rows: slice | NDArray[Any]) -> AllocationColumns:
        """Some of the rows: a slice, row numbers or flags."""
        return AllocationColumns(
            machines=self.machines,
            machine=self.machine[rows],
            nodes=self.nodes[rows],
            devices=self.devices[rows],
        )

    def allocation(self, row: int) -> Allocation:
        """A row as an allocation; raises AllocationError."""
        groups: list[DeviceGroup] = []
        columns = (self.machine[row].tolist(), self.nodes[row].tolist(), self.devices[row].tolist())
        for machine, nodes, devices in zip(*columns, strict=True):
            if machine < 0:
                break
            name = self.machines[machine]
            if "[" in name:
                groups.append(Allocation.parse(name).groups[0])
            else:
                groups.append(DeviceGroup(nodes=nodes, devices_per_node=devices, machine=name))
        return Allocation(tuple(groups))

    @classmethod
    def from_texts(cls, texts: Sequence[str | Allocation]) -> AllocationColumns:
        """Read allocations; raises AllocationError that names the first row it cannot read."""
        reader = TextReader()
        parts = list(reader.parts(texts))
        if len(parts) == 1:
            return parts[0][1]
        width = max((part.machine.shape[1] for _, part in parts), default=0)

        def stacked(name: str, missing: int) -> Integers:
            padded = np.full((width, len(texts)), missing, dtype=np.int32)
            for start, part in parts:
                column = getattr(part, name).T
                padded[: len(column), start : start + column.shape[1]] = column
            return padded.T

        return cls(
            machines=reader.machines,
            machine=stacked("machine", -1),
            nodes=stacked("nodes", 0),
            devices=stacked("devices", 0),
        )


def _check_machines(machine: Integers, known: int) -> None:
    if not len(machine):
        return
    if not machine.shape[1]:
        raise AllocationError("row 0 has no group; give each row at least one")
    if machine.max() >= known or machine.min() < -1:
        row = int(((machine >= known) | (machine < -1)).any(axis=1).argmax())
        raise AllocationError(
            f"row {row} has machine numbers {machine[row].tolist()} of {known} machines; count "
            "from 0 and write -1 where a row has no further group"
        )
    absent = machine.T < 0
    ragged = absent[0].copy()
    for left, right in pairwise(absent):
        ragged |= left & ~right
    if ragged.any():
        raise AllocationError(
            f"row {int(ragged.argmax())} has no group, or a gap before one; list each row's groups "
            "from the left"
        )


class TextReader:
    """Reads texts in parts; a machine keeps its number from part to part.

    Each distinct group, such as ``2x8:h100``, is read once and then only looked up. What is no
    group becomes one of 0 nodes, unless reading is strict.
    """

    def __init__(self) -> None:
        self._groups = _GroupNumbers()
        self._first_row = 0
        self._strict = True

    @property
    def machines(self) -> tuple[str, ...]:
        """The machines met so far, in the order of their numbers."""
        return tuple(self._groups.machines)

    def parts(
        self, texts: Sequence[str | Allocation], *, first_row: int = 0, strict: bool = True
    ) -> Iterator[tuple[int, AllocationColumns]]:
        """(first row, columns) of some thousand rows at a time.

        If strict, raises AllocationError that names the row, counted from `first_row`.
        """
        self._first_row, self._strict = first_row, strict
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            yield from self._part(texts[start : start + _TEXTS_AT_ONCE], start)

    def _part(
        self, part: Sequence[str | Allocation], start: int
    ) -> Iterator[tuple[int, AllocationColumns]]:
        texts = [text if isinstance(text, str) else str(text) for text in part]
        joins = np.fromiter(map(_count_joins, texts), np.int64, len(texts))
        if len(texts) > 1 and (int(joins.max()) + 1) * len(texts) > _MOST_CELLS:
            middle = len(texts) // 2
            yield from self._part(texts[:middle], start)
            yield from self._part(texts[middle:], start + middle)
            return
        try:
            columns = self._read(texts, joins)
        except AllocationError:
            if not self._strict:
                self._groups.read_all("+".join(texts).split("+"))
                yield start, self._read(texts, joins)
                return
            _raise_first(texts, self._first_row + start)
            raise
        yield start, columns

    def _read(self, texts: list[str], joins: Sizes) -> AllocationColumns:
        groups, count = self._groups, len(texts)
        groups.forget_if_many()
        parts = "+".join(texts).split("+")
        codes = np.fromiter(map(groups.__getitem__, parts), np.int32, len(parts))
        known = np.array(groups.columns, dtype=np.int32)
        width = int(joins.max()) + 1
        first = np.cumsum(joins + 1) - (joins + 1)
        columns = np.empty((3, width, count), dtype=np.int32)
        for number in range(width):
            there = joins >= number
            group = codes[np.minimum(first + number, len(codes) - 1)]
            columns[:, number] = known[:, group]
            columns[0, number][~there] = -1
        machine, nodes, devices = (column.T for column in columns)
        if groups.any_host and self._strict:
            _check_devices(texts)
        return AllocationColumns(
            machines=self.machines,
            machine=machine,
            nodes=nodes,
            devices=devices,
        )


def _check_devices(texts: Sequence[str]) -> None:
    """Raise AllocationError where a device is named twice, which only the whole text tells."""
    for text in texts:
        if "[" in text:
            Allocation.parse(text)


class _GroupNumbers(dict[str, int]):
    """Numbers of the groups met so far, by their text; an unknown one is read and numbered."""

    def __init__(self) -> None:
        self.machines: dict[str, int] = {}
        self.columns: list[list[int]] = [[], [], []]
        self.any_host = False

    def __missing__(self, text: str) -> int:
        group = Allocation.parse(text).groups[0]
        self.any_host |= group.host is not None
        return self._number(text, str(group.machine or group), group.nodes, group.devices_per_node)

    def _number(self, text: str, name: str, nodes: int, devices: int) -> int:
        machine = self.machines.setdefault(name, len(self.machines))
        for column, value in zip(self.columns, (machine, nodes, devices), strict=True):
            column.append(value)
        number = self[text] = len(self)
        return number

    def read_all(self, texts: Sequence[str]) -> None:
        """Number every group; what is none becomes one of 0 nodes."""
        for text in dict.fromkeys(texts):
            try:
                self[text]
            except AllocationError:
                self._number(text, "", 0, 0)

    def forget_if_many(self) -> None:
        """Start again, machines apart, before the groups themselves fill the memory."""
        if len(self) > _MOST_GROUPS_KNOWN:
            self.clear()
            self.columns = [[], [], []]


def _raise_first(texts: Sequence[str], start: int) -> None:
    for row, text in enumerate(texts, start):
        try:
            Allocation.parse(text)
        except AllocationError as error:
            raise AllocationError(f"row {row}: {error}") from None


_RANGE = r"[0-9]+(?:\.\.[0-9]+)?"
_COUNTS = rf"({_RANGE}(?:,{_RANGE})*)"
_PATTERN = re.compile(rf"{_COUNTS}x{_COUNTS}:([A-Za-z0-9][\w.\-]*(?:@[\w.]+)?)")
# Of one range; rows are counted in 64 bits.
_MOST_NUMBERS = 100_000
_MOST_DIGITS = 7
_MOST_ROWS = 1 << 62


@dataclass(frozen=True, slots=True)
class _PatternGroup:
    """One group of a pattern: numbers of nodes, of devices on each, and what they are of.

    Without numbers, `machine` is the text of a group that is always the same.
    """

    nodes: tuple[int, ...]
    devices: tuple[int, ...]
    machine: str

    def __len__(self) -> int:
        return len(self.nodes) * len(self.devices) or 1

    def text(self, number: int) -> str:
        if not self.nodes:
            return self.machine
        nodes, devices = divmod(number, len(self.devices))
        return f"{self.nodes[nodes]}x{self.devices[devices]}:{self.machine}"


@dataclass(frozen=True, slots=True)
class AllocationGrid:
    """Every allocation of a pattern, by number: as long as it may be, it takes no memory.

    Counts are numbers, ranges with both ends, or lists; groups joined by ``+`` combine freely, the
    last one varying quickest. A slice, or row numbers, are `AllocationColumns`, and `text` is one
    row. Raises AllocationError for what is no pattern.

    >>> grid = AllocationGrid("1..2x1,4:t4+1..3x8:v100-sxm")
    >>> len(grid), grid.text(0), grid.text(11)
    (12, '1x1:t4+1x8:v100-sxm', '2x4:t4+3x8:v100-sxm')
    >>> grid[3:5].nodes.tolist()
    [[1, 1], [1, 2]]
    """

    pattern: str

    def __post_init__(self) -> None:
        if math.prod(map(len, self._parts)) > _MOST_ROWS:
            raise AllocationError(f"{quoted(self.pattern)} names more than 2⁶² allocations")

    @property
    def _parts(self) -> tuple[_PatternGroup, ...]:
        return tuple([_part(text.strip(), self.pattern) for text in self.pattern.split("+")])

    def __len__(self) -> int:
        return math.prod(map(len, self._parts))

    def text(self, row: int) -> str:
        """One allocation as text; raises AllocationError where there is no such row."""
        if not 0 <= row < len(self):
            raise AllocationError(
                f"{quoted(self.pattern)} has {len(self)} allocations; ask for row 0 to "
                f"{len(self) - 1}, not {row}"
            )
        groups = []
        for part in reversed(self._parts):
            row, number = divmod(row, len(part))
            groups.append(part.text(number))
        return "+".join(reversed(groups))

    def texts(self) -> Iterator[str]:
        """All allocations in order."""
        choices = [[part.text(number) for number in range(len(part))] for part in self._parts]
        return map("+".join, product(*choices))

    def __getitem__(self, rows: slice | NDArray[np.integer[Any]]) -> AllocationColumns:
        """Some of the rows: a slice or row numbers."""
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)), dtype=np.int64)
        parts = self._parts
        # Each part's first choice tells the machines, and the columns of what is always the same.
        first = AllocationColumns.from_texts([self.text(0)])
        nodes = np.broadcast_to(first.nodes, (len(rows), len(parts))).copy()
        devices = np.broadcast_to(first.devices, nodes.shape).copy()
        rest = rows
        for group in reversed(range(len(parts))):
            part = parts[group]
            rest, number = np.divmod(rest, len(part))
            if part.nodes:
                places = np.divmod(number, len(part.devices))
                nodes[:, group] = np.array(part.nodes)[places[0]]
                devices[:, group] = np.array(part.devices)[places[1]]
        return AllocationColumns(
            machines=first.machines,
            machine=np.broadcast_to(first.machine, nodes.shape),
            nodes=nodes,
            devices=devices,
        )


def _part(text: str, pattern: str) -> _PatternGroup:
    match = _PATTERN.fullmatch(text)
    if match is None:
        return _PatternGroup((), (), text)
    nodes, devices = (_counts(count, pattern) for count in match.groups()[:2])
    return _PatternGroup(nodes, devices, match[3])


def _counts(text: str, pattern: str) -> tuple[int, ...]:
    """The numbers of ``1,2,4..8``; raises AllocationError."""
    counts: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("..")
        last = last or first
        is_long = max(len(first), len(last)) > _MOST_DIGITS
        low, high = (0, -1) if is_long else (int(first), int(last))
        if high < low or len(counts) + high - low >= _MOST_NUMBERS:
            raise AllocationError(
                f"{quoted(pattern)} counts from {first[:_MOST_DIGITS]} to {last[:_MOST_DIGITS]}; "
                f"write a range such as 1..8, of at most {_MOST_NUMBERS} numbers"
            )
        counts += range(low, high + 1)
    return tuple(dict.fromkeys(counts))
