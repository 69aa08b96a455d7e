"""Follow while a step is traced when the last tensor of each piece of memory goes.

Autograd, user code and Python's frames hold fake tensors from when to when they hold real ones: a
node of autograd all that it saved until it has run, a caller the output of a model until its loss
is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol


class Uses(Protocol):
    """An operator by the values that it touches."""

    @property
    def inputs(self) -> tuple[int, ...]: ...
    @property
    def outputs(self) -> tuple[int, ...]: ...


class Lifetimes:
    """How many tensors stand for each value that owns memory, and after which op none does."""

    def __init__(self) -> None:
        self._alive: Counter[int] = Counter()
        self._released: dict[int, int] = {}

    def appeared(self, root: int) -> None:
        """One more tensor shares the memory of a value."""
        self._alive[root] += 1

    def vanished(self, root: int, op: int) -> None:
        """A tensor that shared it is gone after an op."""
        self._alive[root] -= 1
        if not self._alive[root]:
            self._released[root] = op

    def holds(self, ops: Sequence[Uses], roots: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """By op, the values that are released after it although it does not touch them."""
        last_use: dict[int, int] = {}
        for index, op in enumerate(ops):
            for value in (*op.inputs, *op.outputs):
                last_use[roots[value]] = index
        found: dict[int, list[int]] = {}
        for root, index in self._released.items():
            if index > last_use.get(root, index):
                found.setdefault(index, []).append(root)
        return {index: tuple(each) for index, each in found.items()}
