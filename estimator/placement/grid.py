"""Count the allocations of a pattern such as ``1..8x1..8:local`` without writing them down."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.errors import AllocationError, quoted
from estimator.placement.columns import AllocationColumns

_RANGE = r"[0-9]+(?:\.\.[0-9]+)?"
_COUNTS = rf"({_RANGE}(?:,{_RANGE})*)"
_PATTERN = re.compile(rf"{_COUNTS}x{_COUNTS}:([A-Za-z0-9][\w.\-]*(?:@[\w.]+)?)")
# Of one range; rows are counted in 64 bits.
_MOST_NUMBERS = 100_000
_MOST_DIGITS = 7
_MOST_ROWS = 1 << 62


@dataclass(frozen=True, slots=True)
class _Part:
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
    def _parts(self) -> tuple[_Part, ...]:
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
        found = []
        for part in reversed(self._parts):
            row, number = divmod(row, len(part))
            found.append(part.text(number))
        return "+".join(reversed(found))

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
            highest=None if first.highest is None else np.broadcast_to(first.highest, nodes.shape),
        )


def _part(text: str, pattern: str) -> _Part:
    match = _PATTERN.fullmatch(text)
    if match is None:
        return _Part((), (), text)
    nodes, devices = (_counts(count, pattern) for count in match.groups()[:2])
    return _Part(nodes, devices, match[3])


def _counts(text: str, pattern: str) -> tuple[int, ...]:
    """The numbers of ``1,2,4..8``; raises AllocationError."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("..")
        last = last or first
        is_long = max(len(first), len(last)) > _MOST_DIGITS
        low, high = (0, -1) if is_long else (int(first), int(last))
        if high < low or len(found) + high - low >= _MOST_NUMBERS:
            raise AllocationError(
                f"{quoted(pattern)} counts from {first[:_MOST_DIGITS]} to {last[:_MOST_DIGITS]}; "
                f"write a range such as 1..8, of at most {_MOST_NUMBERS} numbers"
            )
        found += range(low, high + 1)
    return tuple(dict.fromkeys(found))
