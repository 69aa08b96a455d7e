"""Decide how far sizes grow, and how often each is repeated, within a slice of time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Larger messages than one that takes this long add little but waiting.
LONGEST_S = 1.5
# A size is tried where a warm-up and two more fit into the time that is left.
_FEWEST_CALLS = 3
# Short calls are cheap and noisy, long ones dear and steady: (seconds at most, repeats at least).
_FEWEST_REPEATS = ((0.02, 10), (0.25, 3), (math.inf, 2))
_MOST_REPEATS = 60


@dataclass(frozen=True, slots=True)
class Pace:
    """A plan for calls of rising `sizes_bytes`, whose time rises no faster than their size.

    All ranks that decide by equal numbers decide alike.

    >>> Pace((1 << 20, 4 << 20, 16 << 20)).goes_on(2, 4 << 20, call_s=0.4, left_s=3.0)
    False
    """

    sizes_bytes: Sequence[int]

    def goes_on(self, number: int, last_bytes: int, call_s: float, left_s: float) -> bool:
        """Whether size `number` comes next, after calls of `last_bytes` that take `call_s`.

        Two sizes at least, or there is no line.
        """
        expected_s = call_s * self.sizes_bytes[number] / last_bytes
        is_in_time = call_s <= LONGEST_S and _FEWEST_CALLS * expected_s <= left_s
        return number < 2 or is_in_time

    def repeats(self, number: int, call_s: float, left_s: float) -> int:
        """How often to repeat size `number`, leaving time for the larger ones to be tried."""
        fewest = next(least for longest_s, least in _FEWEST_REPEATS if call_s <= longest_s)
        size = self.sizes_bytes[number]
        larger_s, expected_s = 0.0, call_s
        for larger in self.sizes_bytes[number + 1 :]:
            if expected_s > LONGEST_S:
                break
            expected_s = call_s * larger / size
            larger_s += _FEWEST_CALLS * expected_s
        # Where there is no time for all of them, the larger ones share what is left.
        own_s = max(left_s - larger_s, 0.0) / (len(self.sizes_bytes) - number)
        return max(fewest, min(_MOST_REPEATS, math.floor(own_s / max(call_s, 1e-6))))
