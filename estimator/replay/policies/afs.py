"""AFS-L: elastic sharing that weighs a short job's gain against a long one's (NSDI 2021)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from estimator.replay.view import Grant, View

Array = NDArray[np.float64]


class Afs:
    """Devices are handed out step by step, from a job's count to its next.

    Of a shorter job s and a longer l (by remaining time at the current share) l gets it iff
    (X_l(n') − X_l(n)) / X_l(n') > (X_s(n') − X_s(n)) / X_s(n), gains per device. Jobs without
    devices come first, the shortest first. Hwang et al., "Elastic Resource Sharing for Distributed
    Deep Learning", section 4.
    """

    interval_s = 0.0
    moves_jobs = True

    def plan(self, view: View) -> dict[str, Grant]:
        """Counts on one machine type."""
        free = view.nodes.total(view.machine)
        if not free:
            return {}
        curves = {each.job.name: view.curve(each.job) for each in view.jobs}
        remaining = {each.job.name: each.remaining_samples for each in view.jobs}
        line = sorted(curves, key=lambda name: remaining[name] / curves[name][1])[:free]
        free -= len(line)
        climbs = _Climbs([curves[name] for name in line], [remaining[name] for name in line])
        while (chosen := climbs.chosen(free)) is not None:
            free -= climbs.rise(chosen)
        return {name: Grant(n, view.machine) for name, n in zip(line, climbs.counts, strict=True)}


class _Climbs:
    """Jobs on their way up their curves, with the terms of the rule for the next step of each.

    The terms of all jobs are arrays: the rule is asked for every step of thousands of jobs.
    """

    def __init__(self, curves: list[dict[int, float]], remaining: list[float]) -> None:
        self._steps = [list(curve.items()) for curve in curves]
        self._remaining = remaining
        self._at = [0] * len(curves)
        self._remaining_s = np.zeros(len(curves))
        self._gain_as_shorter = np.zeros(len(curves))
        self._gain_as_longer = np.zeros(len(curves))
        self._needed = np.zeros(len(curves))
        for number in range(len(curves)):
            self._look_up(number)

    @property
    def counts(self) -> list[int]:
        """The count that each job has reached."""
        return [steps[at][0] for steps, at in zip(self._steps, self._at, strict=True)]

    def chosen(self, free: int) -> int | None:
        """Who takes the next step by the rule, of those whose step fits and brings something."""
        open_s = np.where(self._needed <= free, self._remaining_s, np.inf)
        chosen: int | None = None
        while True:
            shortest = int(np.argmin(open_s)) if len(open_s) else 0
            if not len(open_s) or open_s[shortest] == np.inf:
                return chosen
            chosen = shortest
            # Longer jobs that gain more than the chosen one; the shortest of them is asked next.
            longer = open_s > open_s[chosen]
            open_s[~(longer & (self._gain_as_longer > self._gain_as_shorter[chosen]))] = np.inf

    def rise(self, number: int) -> int:
        """Take a job to its next count; the devices that this takes."""
        needed = int(self._needed[number])
        self._at[number] += 1
        self._look_up(number)
        return needed

    def _look_up(self, number: int) -> None:
        steps, at = self._steps[number], self._at[number]
        count, rate = steps[at]
        self._remaining_s[number] = self._remaining[number] / rate
        # What slows a job down, and the top of its curve, end its climb.
        self._needed[number] = np.inf
        if at + 1 < len(steps) and steps[at + 1][1] > rate:
            higher, faster = steps[at + 1]
            self._needed[number] = higher - count
            gain = (faster - rate) / (higher - count)
            self._gain_as_shorter[number] = gain / rate
            self._gain_as_longer[number] = gain / faster
