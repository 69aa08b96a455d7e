"""ONES: a population of schedules that evolves while jobs run (SC 2021)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from estimator.cluster.view import Grant, View, Waiting

POPULATION = 16
DROP_PROBABILITY = 0.3
MOST_GROWTH = 4
EPOCHS_TO_DOUBLE = 2
ROUND_S = 60.0
# Epochs of a job whose file does not say how long one is.
EPOCHS_ASSUMED = 10
# Pseudo-epochs to come, of the Beta distribution of progress.
BETA = 1.0
NOBODY = -1

Schedule = NDArray[np.int64]


class Ones:
    """A schedule is a vector from device to job; the fittest of 16 is the plan.

    Each round: finished jobs are taken out; uniform crossover with probability ½; a job is dropped
    with p = 0.3; free devices go to jobs without any, then to those with the least left; the 16
    schedules with the lowest Σ Y·n·(1/ρ − 1) / X(n) are kept, Y the samples done and ρ ~
    Beta(epochs done, β) the progress. A job's devices, and with them its batch, at most double
    every two epochs, up to four times what it asked for. The replay leaves jobs whose
    count stays where they are, which is ONES' reordering with the fewest moves.
    """

    interval_s = ROUND_S
    moves_jobs = True

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._numbers: dict[str, int] = {}
        self._population: list[Schedule] = []

    def plan(self, view: View) -> dict[str, Grant]:
        """The fittest schedule's counts on one machine type."""
        for each in view.jobs:
            self._numbers.setdefault(each.job.name, len(self._numbers))
        jobs = {self._numbers[each.job.name]: each for each in view.jobs}
        left = {number: self._left(each) for number, each in jobs.items()}
        limits = {number: self._limit(each) for number, each in jobs.items()}
        parents = [self._refreshed(one, view, set(jobs)) for one in self._population]
        parents = parents or [np.full(view.nodes.total(view.machine), NOBODY)]
        pool = [self._refilled(one, left, limits) for one in parents]
        for _ in range(POPULATION):
            first, second = (parents[i] for i in self._rng.integers(len(parents), size=2))
            child = np.where(self._rng.random(len(first)) < 0.5, first, second)
            dropped = [n for n in jobs if self._rng.random() < DROP_PROBABILITY]
            child[np.isin(child, dropped)] = NOBODY
            pool.append(self._refilled(child, left, limits))
        scores = [self._score(one, jobs, left, view) for one in pool]
        self._population = [pool[i] for i in np.argsort(scores, kind="stable")[:POPULATION]]
        numbers, counts = np.unique(self._population[0], return_counts=True)
        return {
            jobs[number].job.name: Grant(count, view.machine)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
            if number != NOBODY
        }

    def _left(self, each: Waiting) -> float:
        """Samples still to train, as a draw of the progress says: Y · (1/ρ − 1)."""
        done = each.job.samples - each.remaining_samples
        progress = self._rng.beta(self._epochs(each) + 1.0, BETA)
        epoch = each.job.epoch_samples or each.job.samples / EPOCHS_ASSUMED
        return max(done, epoch) * (1 / max(progress, 1e-6) - 1)

    def _epochs(self, each: Waiting) -> float:
        epoch = each.job.epoch_samples or each.job.samples / EPOCHS_ASSUMED
        return (each.job.samples - each.remaining_samples) / epoch

    def _limit(self, each: Waiting) -> int:
        growth = min(2 ** (self._epochs(each) // EPOCHS_TO_DOUBLE), MOST_GROWTH)
        return min(int(each.job.devices * growth), each.job.highest_count)

    def _refreshed(self, schedule: Schedule, view: View, alive: set[int]) -> Schedule:
        """Without jobs that have ended, for the devices there are now."""
        devices = view.nodes.total(view.machine)
        fresh = np.full(devices, NOBODY)
        known = schedule[:devices]
        fresh[: len(known)] = np.where(np.isin(known, list(alive)), known, NOBODY)
        return fresh

    def _refilled(
        self, schedule: Schedule, left: dict[int, float], limits: dict[int, int]
    ) -> Schedule:
        """Free devices go to jobs without any, then to those with the least left."""
        filled = schedule.copy()
        numbers, held = np.unique(filled, return_counts=True)
        counts = dict(zip(numbers.tolist(), held.tolist(), strict=True))
        for number, limit in limits.items():
            if counts.get(number, 0) > limit:
                filled[np.flatnonzero(filled == number)[limit:]] = NOBODY
                counts[number] = limit
        free = np.flatnonzero(filled == NOBODY).tolist()
        order = sorted(limits, key=lambda number: (number in counts, left[number]))
        for number in order:
            wanted = min(limits[number] - counts.get(number, 0), len(free))
            if wanted > 0:
                filled[free[:wanted]] = number
                free = free[wanted:]
        return filled

    def _score(
        self, schedule: Schedule, jobs: dict[int, Waiting], left: dict[int, float], view: View
    ) -> float:
        """Device time that the scheduled jobs still need; the lower the better."""
        numbers, counts = np.unique(schedule, return_counts=True)
        total = 0.0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if number != NOBODY:
                rate = view.rate(jobs[number].job, count)
                total += count * left[number] / rate
        return total
