"""Aggregate the step durations of a training loop in windows, from its steady state on."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from estimator.errors import ObservationError

WARMUP_STEPS = 5
# Steady state: the medians of three durations and of the three before them agree within 10 %. Until
# then they may fall (caches fill, kernels are autotuned) or rise (the queue of an asynchronous
# device fills).
_COMPARED_DURATIONS = 3
_STEADY_RATIO = 0.1
# After so many durations without a steady state the loop's step time is taken to be variable.
_MOST_UNSTEADY_DURATIONS = 30
# A window ends at 50 steps or after 5 s; each later one lasts twice as long, up to 64 times, so
# that a day of training becomes some hundreds of observations.
WINDOW_STEPS, WINDOW_S = 50, 5.0
_LONGEST_WINDOW_RATIO = 64
_FEWEST_DURATIONS_OF_NOISE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Consecutive steps in steady state: median seconds per step, and their noise.

    `spread_ratio` is half of the 10–90 % range over the median, None for fewer than five durations.
    """

    steps: int
    step_time_s: float
    spread_ratio: float | None


class Windows:
    """Takes durations, each of one or several steps, and gives a window whenever one is full."""

    def __init__(self, *, warmup_steps: int = WARMUP_STEPS) -> None:
        if warmup_steps < 0:
            raise ObservationError(f"warmup_steps is 0 or more, found {warmup_steps}; leave it out")
        self.warmup_steps = warmup_steps
        self.dropped_steps = 0
        self._is_steady = False
        self._window_ratio = 1
        self._durations: list[tuple[float, int]] = []
        self._steps, self._seconds = 0, 0.0

    def add(self, seconds: float, steps: int) -> Window | None:
        """The window that these steps complete, if they complete one."""
        if self.dropped_steps < self.warmup_steps:
            self.dropped_steps += steps
            return None
        self._durations.append((seconds / steps, steps))
        self._steps += steps
        self._seconds += seconds
        if not self._is_steady:
            self._detect_steady_state()
        is_full = (
            self._steps >= WINDOW_STEPS * self._window_ratio
            or self._seconds >= WINDOW_S * self._window_ratio
        )
        return self.close() if self._is_steady and is_full else None

    def close(self) -> Window | None:
        """End the window that is being filled; None if there is nothing steady in it."""
        durations, steps = self._durations, self._steps
        self._durations, self._steps, self._seconds = [], 0, 0.0
        if not self._is_steady:
            self.dropped_steps += steps
            return None
        self._window_ratio = min(2 * self._window_ratio, _LONGEST_WINDOW_RATIO)
        times_s = sorted(time_s for time_s, _ in durations)
        step_time_s = statistics.median(times_s) if times_s else 0.0
        if step_time_s <= 0:
            return None  # no steps, or steps below the resolution of the clock
        spread_ratio = None
        if len(times_s) >= _FEWEST_DURATIONS_OF_NOISE:
            tenths = statistics.quantiles(times_s, n=10, method="inclusive")
            spread_ratio = (tenths[-1] - tenths[0]) / 2 / step_time_s
        return Window(steps=steps, step_time_s=step_time_s, spread_ratio=spread_ratio)

    def _detect_steady_state(self) -> None:
        """Detect the steady state, and drop the durations before it."""
        count = len(self._durations)
        if count < 2 * _COMPARED_DURATIONS:
            return
        latest = self._durations[-_COMPARED_DURATIONS:]
        before = self._durations[-2 * _COMPARED_DURATIONS : -_COMPARED_DURATIONS]
        now_s, then_s = (statistics.median(s for s, _ in each) for each in (latest, before))
        is_steady = abs(now_s - then_s) <= _STEADY_RATIO * then_s
        if is_steady or count >= _MOST_UNSTEADY_DURATIONS:
            self._is_steady = True
            self._durations = before + latest
            kept = sum(steps for _, steps in self._durations)
            self.dropped_steps += self._steps - kept
            self._steps = kept
            self._seconds = sum(time_s * steps for time_s, steps in self._durations)
