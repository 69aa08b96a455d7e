"""Read one clock on all ranks of a group, as far as messages there and back can tell."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

# The quickest of these tells the offset best: what delays a message makes it slower, never quicker.
_ROUND_TRIPS = 8

Window = tuple[float, float, float]


class SharedClock:
    """Rank 0's `time.perf_counter`, read on every rank of the default group.

    Between two marks, at which all ranks meet, a rank's clock is taken to run steadily.
    """

    def __init__(self, torch: Any, dist: Any, device: Any) -> None:
        self.torch, self.dist, self.device = torch, dist, device
        self._marks: list[tuple[float, float]] = []

    def mark(self) -> None:
        """Compare clocks; all ranks call this together, and it takes some log2(ranks) messages."""
        rank, world_size = self.dist.get_rank(), self.dist.get_world_size()
        offset_s, span = 0.0, 1
        # In each round, ranks that know rank 0's clock tell as many that do not know it yet.
        while span < world_size:
            if rank < span and rank + span < world_size:
                self._answer(rank + span, offset_s)
            elif span <= rank < 2 * span:
                offset_s = self._ask(rank - span)
            span *= 2
        self._marks = [*self._marks[-1:], (time.perf_counter(), offset_s)]

    def shifted(self, windows: Sequence[Sequence[float]]) -> list[Window]:
        """(bytes, entered, left) between the last two marks, on rank 0's clock."""
        return [
            (size, entered + self._offset_s(entered), left + self._offset_s(left))
            for size, entered, left in windows
        ]

    def _offset_s(self, at: float) -> float:
        (first, before), (last, after) = self._marks[0], self._marks[-1]
        if last <= first:
            return after
        return before + (after - before) * (at - first) / (last - first)

    def _ask(self, other: int) -> float:
        quickest_s, offset_s = float("inf"), 0.0
        for _ in range(_ROUND_TRIPS):
            began = time.perf_counter()
            self.dist.send(self._number(0.0), dst=other)
            told = self._number(0.0)
            self.dist.recv(told, src=other)
            theirs, ended = float(told), time.perf_counter()
            if ended - began < quickest_s:
                quickest_s, offset_s = ended - began, theirs - (began + ended) / 2
        return offset_s

    def _answer(self, other: int, offset_s: float) -> None:
        asked = self._number(0.0)
        for _ in range(_ROUND_TRIPS):
            self.dist.recv(asked, src=other)
            float(asked)  # where it lies on a device, it has come only once it was read
            self.dist.send(self._number(time.perf_counter() + offset_s), dst=other)

    def _number(self, value: float) -> Any:
        return self.torch.tensor([value], dtype=self.torch.float64, device=self.device)
