"""Elastic policies that climb curves of believed speed: max-min, AFS-L and Optimus."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from estimator.replay.policies.pools import Climb, Pools, admitted, climbed
from estimator.replay.view import Grant, View

Array = NDArray[np.float64]
# Believed throughput by count.
Curve = dict[int, float]


def _admitted_shortest_first(
    curves: dict[str, Curve], remaining: dict[str, float], free: int
) -> dict[str, int]:
    """Jobs on their fewest devices, by the time that they would take on these."""
    line = sorted(curves, key=lambda name: remaining[name] / next(iter(curves[name].values())))
    return admitted(((name, next(iter(curves[name]))) for name in line), free)


class MaxMin(Pools):
    """Counts rise together, none above the count that is believed fastest.

    Each job gets one device in the order of arrival; then those with the fewest go to their next
    count as long as there are devices. Of equals goes first whose next count is the most times as
    fast as one device: errors of two counts would add up in their ratio.
    """

    capped = True

    def share(self, view: View) -> dict[str, Grant]:
        """Max-min counts on one machine type."""
        free = view.nodes.total(view.machine)
        curves = {waiting.job.name: view.curve(waiting.job) for waiting in view.jobs}
        least = {name: next(iter(curve)) for name, curve in curves.items()}
        given = admitted(least.items(), free)
        free -= sum(given.values())
        best = {name: max(curves[name], key=curves[name].__getitem__) for name in given}
        rising = list(given)
        while rising:
            level = min(given[name] for name in rising)
            gains: dict[str, tuple[float, int]] = {}
            for name in rising:
                curve = curves[name]
                higher = next((count for count in curve if count > level), None)
                if given[name] == level and higher and not (self.capped and higher > best[name]):
                    gains[name] = curve[higher] / curve[least[name]], higher
            for name in sorted(gains, key=lambda name: -gains[name][0]):
                higher = gains[name][1]
                if higher - level <= free:
                    free -= higher - level
                    given[name] = higher
            rising = [name for name in rising if given[name] > level]
        return {name: Grant(count, view.machine) for name, count in given.items()}


class UncappedMaxMin(MaxMin):
    """Counts rise as long as there are devices, whatever they are believed to gain."""

    capped = False


class Afs(Pools):
    """AFS-L: devices are handed out step by step, from a job's count to its next.

    Of a shorter job s and a longer l (by remaining time at the current share) l gets it iff
    (X_l(n') − X_l(n)) / X_l(n') > (X_s(n') − X_s(n)) / X_s(n), gains per device. Jobs without
    devices come first, the shortest first. Hwang et al., "Elastic Resource Sharing for Distributed
    Deep Learning" (NSDI 2021), section 4.
    """

    def share(self, view: View) -> dict[str, Grant]:
        """Counts on one machine type."""
        curves = {waiting.job.name: view.curve(waiting.job) for waiting in view.jobs}
        remaining = {waiting.job.name: waiting.remaining_samples for waiting in view.jobs}
        free = view.nodes.total(view.machine)
        given = _admitted_shortest_first(curves, remaining, free)
        free -= sum(given.values())
        climbs = _Climbs([curves[name] for name in given], [remaining[name] for name in given])
        while (chosen := climbs.chosen(free)) is not None:
            free -= climbs.rise(chosen)
        return {name: Grant(n, view.machine) for name, n in zip(given, climbs.counts, strict=True)}


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
        while len(open_s):
            shortest = int(open_s.argmin())
            if open_s[shortest] == np.inf:
                break
            chosen = shortest
            # Longer jobs that gain more than the chosen one; the shortest of them is asked next.
            stays = (open_s > open_s[chosen]) & (
                self._gain_as_longer > self._gain_as_shorter[chosen]
            )
            open_s = np.where(stays, open_s, np.inf)
        return chosen

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


class Optimus(Pools):
    """One device each, shortest first; then the largest (remaining time now − with more) / devices.

    The dominant resource of a worker is its device; the paper's scheduling interval, section 6.1.
    Peng et al., "Optimus" (EuroSys 2018), section 4.1.
    """

    interval_s = 600.0

    def share(self, view: View) -> dict[str, Grant]:
        """Counts on one machine type."""
        curves = {waiting.job.name: view.curve(waiting.job) for waiting in view.jobs}
        remaining = {waiting.job.name: waiting.remaining_samples for waiting in view.jobs}
        free = view.nodes.total(view.machine)
        given = _admitted_shortest_first(curves, remaining, free)
        free -= sum(given.values())
        given = climbed(given, free, lambda name, n: _gain(name, n, curves, remaining))
        return {name: Grant(count, view.machine) for name, count in given.items()}


def _gain(
    name: str, count: int, curves: dict[str, Curve], remaining: dict[str, float]
) -> Climb | None:
    """The next count with what it saves per device, negated as a cost; None if nothing."""
    curve = curves[name]
    higher = next((point for point in curve if point > count), None)
    if higher is None or curve[higher] <= curve[count]:
        return None
    saved_s = remaining[name] / curve[count] - remaining[name] / curve[higher]
    return -saved_s / (higher - count), name, higher
