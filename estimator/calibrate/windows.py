"""Cut the laps of a training loop into windows of steady steps, warm-up left out."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from estimator.errors import ObservationError

WARMUP_STEPS = 5
# Steady: the medians of three laps and of the three before them agree within 10 %. Times may fall
# (caches fill, kernels are chosen) or rise (the queue of an asynchronous device fills) until then.
_COMPARED_LAPS = 3
_STEADY_RATIO = 0.1
# A loop that has not settled after so many laps varies by nature.
_MOST_UNSTEADY_LAPS = 30
# A window ends at 50 steps or after 5 s; each later one lasts twice as long, up to 64 times, so
# that a day of training becomes some hundreds of observations.
WINDOW_STEPS, WINDOW_S = 50, 5.0
_LONGEST_WINDOW_RATIO = 64
_FEWEST_LAPS_OF_SPREAD = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Steady steps one after the other: median seconds per step, and how far laps differ.

    `spread_ratio` is half of the 10–90 % range over the median, None for fewer than five laps.
    """

    steps: int
    step_time_s: float
    spread_ratio: float | None


class Windows:
    """Takes laps, each some steps timed together, and gives a window whenever one is full."""

    def __init__(self, *, warmup_steps: int = WARMUP_STEPS) -> None:
        if warmup_steps < 0:
            raise ObservationError(f"warmup_steps is 0 or more, found {warmup_steps}; leave it out")
        self.warmup_steps = warmup_steps
        self.dropped_steps = 0
        self._is_steady = False
        self._window_ratio = 1
        self._laps: list[tuple[float, int]] = []
        self._steps, self._seconds = 0, 0.0

    def add(self, seconds: float, steps: int) -> Window | None:
        """The window that this lap fills, if it fills one."""
        if self.dropped_steps < self.warmup_steps:
            self.dropped_steps += steps
            return None
        self._laps.append((seconds / steps, steps))
        self._steps += steps
        self._seconds += seconds
        if not self._is_steady:
            self._settle()
        is_full = (
            self._steps >= WINDOW_STEPS * self._window_ratio
            or self._seconds >= WINDOW_S * self._window_ratio
        )
        return self.close() if self._is_steady and is_full else None

    def close(self) -> Window | None:
        """End the window that is being filled; None if there is nothing steady in it."""
        laps, steps = self._laps, self._steps
        self._laps, self._steps, self._seconds = [], 0, 0.0
        if not self._is_steady:
            self.dropped_steps += steps
            return None
        self._window_ratio = min(2 * self._window_ratio, _LONGEST_WINDOW_RATIO)
        times_s = sorted(time_s for time_s, _ in laps)
        step_time_s = statistics.median(times_s) if times_s else 0.0
        if step_time_s <= 0:
            return None  # no lap, or a clock too coarse to see one
        spread_ratio = None
        if len(times_s) >= _FEWEST_LAPS_OF_SPREAD:
            tenths = statistics.quantiles(times_s, n=10, method="inclusive")
            spread_ratio = (tenths[-1] - tenths[0]) / 2 / step_time_s
        return Window(steps=steps, step_time_s=step_time_s, spread_ratio=spread_ratio)

    def _settle(self) -> None:
        """See whether the last laps are steady, and drop those before them."""
        latest, before = self._laps[-_COMPARED_LAPS:], self._laps[-2 * _COMPARED_LAPS :]
        before = before[:-_COMPARED_LAPS]
        if len(before) < _COMPARED_LAPS:
            return
        now_s, then_s = (statistics.median(lap[0] for lap in laps) for laps in (latest, before))
        if abs(now_s - then_s) <= _STEADY_RATIO * then_s or len(self._laps) >= _MOST_UNSTEADY_LAPS:
            self._is_steady = True
            self._laps = before + latest
            kept = sum(steps for _, steps in self._laps)
            self.dropped_steps += self._steps - kept
            self._steps = kept
            self._seconds = sum(time_s * steps for time_s, steps in self._laps)
