"""Look up what was measured nearest to a process group, for one group or for a row of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from estimator.placement.process_groups import ProcessGroup

Shape = TypeVar("Shape", bound=Hashable)


class Nearest(Generic[Shape]):
    """Which of some measured things is nearest to a group, among those of the group's pool.

    A pool is one profile's groups on one node (2 · profile) or over nodes (2 · profile + 1).
    """

    def __init__(self, found: Sequence[tuple[int, Shape]], pools: int) -> None:
        self._shapes = list(dict.fromkeys(shape for _, shape in found))
        numbers = np.full((len(self._shapes), pools), -1, dtype=np.intp)
        for number, (pool, shape) in enumerate(found):
            row = self._shapes.index(shape)
            if numbers[row, pool] < 0:
                numbers[row, pool] = number
        self._numbers = numbers
        self._of_pool: list[list[tuple[int, Shape]]] = [
            [(n, shape) for n, shape in zip(column, self._shapes, strict=True) if n >= 0]
            for column in numbers.T.tolist()
        ]

    def to(self, pool: Any, distance: Callable[[Shape], Any]) -> tuple[Any, Any]:
        """(number of the first nearest, or -1; its distance) for one group or for each row."""
        # Among equals the first listed wins, whatever the order of the shapes.
        if isinstance(pool, int):
            found = [(distance(shape), number) for number, shape in self._of_pool[pool]]
            away, number = min(found, default=(math.inf, -1))
            return number, away
        best = np.full(len(pool), math.inf)
        chosen = np.full(len(pool), -1, dtype=np.intp)
        for shape, numbers in zip(self._shapes, self._numbers, strict=True):
            number = numbers[pool]
            away = np.where(number >= 0, distance(shape), math.inf)
            nearer = (away < best) | ((away == best) & (number < chosen))
            chosen = np.where(nearer, number, chosen)
            best = np.minimum(best, away)
        return chosen, best


def pool_of(group: ProcessGroup) -> Any:
    """The pool of a group or of each row: see `Nearest`."""
    return 2 * group.network + (group.nodes > 1)


class Lookup:
    """Values by number: plain ones for a plain number, arrays for an array of numbers.

    A value may be a tuple: an array of numbers then gives an array for each of its items.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._plain = list(values)
        columns = np.array(self._plain, dtype=np.float64).T
        self._columns = [column.copy() for column in columns] if columns.ndim > 1 else columns

    def __getitem__(self, number: Any) -> Any:
        if type(number) is int:
            return self._plain[number]
        if isinstance(self._columns, list):
            return [column[number] for column in self._columns]
        return self._columns[number]
