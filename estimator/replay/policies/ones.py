"""ONES: a population of schedules that evolves while jobs run (SC 2021)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from estimator.replay.jobs import Job
from estimator.replay.view import Grant, View, Waiting

POPULATION = 16
DROP_PROBABILITY = 0.3
MOST_GROWTH = 4
EPOCHS_TO_DOUBLE = 2
ROUND_S = 60.0
# Epochs of a job whose file does not say how long one is.
EPOCHS_ASSUMED = 10
NOBODY = -1

Schedule = NDArray[np.int64]


class Ones:
    """A schedule is a vector from device to job; the fittest of 16 is the plan.

    Each round: finished jobs are taken out; uniform crossover with probability ½; a job is dropped
    with p = 0.3; free devices go to new jobs, then to those with the least left; devices are
    reordered so that the fewest change hands; the 16 schedules with the lowest
    Σ Y·n·(1/ρ − 1) / X(n) are kept, Y the samples done and ρ ~ Beta(epochs done, β) the progress. A
    job's devices at most double every two epochs, up to four times what it asked for: ONES' limit
    on its batch, which is n times a device's there and stays the job's own here. Jobs that wait
    add nothing to the sum: a few wide jobs score better than many narrow ones.

    Jobs report when an epoch ends: Y and the draw of ρ stay until then, so that rounds between
    score alike and a job costs nothing before its first epoch ends. β is the epochs that jobs
    which have ended took on average, less those done, and at least 1; ONES fits it to more
    features of theirs, loss and accuracy among them, which replays do not have.
    """

    interval_s = ROUND_S
    moves_jobs = True

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._numbers: dict[str, int] = {}
        self._population: list[Schedule] = []
        # By the name of an unfinished job: all its epochs, and (epochs done, samples left).
        self._epochs: dict[str, float] = {}
        self._reports: dict[str, tuple[int, float]] = {}
        self._ended_epochs: list[float] = []

    def plan(self, view: View) -> dict[str, Grant]:
        """The fittest schedule's counts on one machine type."""
        self._learn(view)
        for each in view.jobs:
            self._numbers.setdefault(each.job.name, len(self._numbers))
        jobs = {self._numbers[each.job.name]: each for each in view.jobs}
        left = {number: self._left(each) for number, each in jobs.items()}
        limits = {number: self._limit(each) for number, each in jobs.items()}
        parents = [self._refreshed(one, view, set(jobs)) for one in self._population]
        parents = parents or [np.full(view.nodes.total(view.machine), NOBODY)]
        running = parents[0]
        pool = [self._refilled(one, left, limits) for one in parents]
        for _ in range(POPULATION):
            first, second = (parents[i] for i in self._rng.integers(len(parents), size=2))
            child = np.where(self._rng.random(len(first)) < 0.5, first, second)
            dropped = [n for n in jobs if self._rng.random() < DROP_PROBABILITY]
            child[np.isin(child, dropped)] = NOBODY
            pool.append(reordered(self._refilled(child, left, limits), running))
        scores = [self._score(one, jobs, left, view) for one in pool]
        self._population = [pool[i] for i in np.argsort(scores, kind="stable")[:POPULATION]]
        numbers, counts = np.unique(self._population[0], return_counts=True)
        return {
            jobs[number].job.name: Grant(count, view.machine)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
            if number != NOBODY
        }

    def _learn(self, view: View) -> None:
        """Remember how many epochs the jobs took that have ended since the last plan."""
        now = {each.job.name: each.job.samples / _epoch(each.job) for each in view.jobs}
        self._ended_epochs += [self._epochs[name] for name in self._epochs if name not in now]
        self._epochs = now

    def _left(self, each: Waiting) -> float:
        """Samples still to train, by the progress drawn when the last epoch ended."""
        name, done = each.job.name, _epochs_done(each)
        known, left = self._reports.get(name, (0, 0.0))
        if done > known:
            usual = float(np.mean(self._ended_epochs)) if self._ended_epochs else 0.0
            progress = self._rng.beta(done, max(usual - done, 1.0))
            left = done * _epoch(each.job) * (1 / progress - 1)
            self._reports[name] = done, left
        return left

    def _limit(self, each: Waiting) -> int:
        growth: int = min(2 ** (_epochs_done(each) // EPOCHS_TO_DOUBLE), MOST_GROWTH)
        return min(each.job.devices * growth, each.job.highest_count)

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
        """Free devices go to new jobs, then to those with the least left."""
        filled = schedule.copy()
        numbers, held = np.unique(filled, return_counts=True)
        counts = dict(zip(numbers.tolist(), held.tolist(), strict=True))
        for number, limit in limits.items():
            if counts.get(number, 0) > limit:
                filled[np.flatnonzero(filled == number)[limit:]] = NOBODY
                counts[number] = limit
        free = np.flatnonzero(filled == NOBODY).tolist()
        order = sorted(limits, key=lambda number: (left[number], number in counts))
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


def reordered(schedule: Schedule, running: Schedule) -> Schedule:
    """The same counts where the fewest devices change hands: jobs stay on those that they hold.

    >>> reordered(np.array([2, 2, 1, 3]), np.array([1, 1, 2, -1])).tolist()
    [1, 2, 2, 3]
    """
    placed = np.full_like(schedule, NOBODY)
    is_free = np.ones(len(schedule), dtype=bool)
    moving: list[int] = []
    for number, count in zip(*np.unique(schedule, return_counts=True), strict=True):
        kept = np.flatnonzero(running == number)[:count]
        placed[kept], is_free[kept] = number, False
        moving += [number] * (count - len(kept))
    placed[is_free] = moving
    return placed


def _epoch(job: Job) -> float:
    return job.epoch_samples or job.samples / EPOCHS_ASSUMED


def _epochs_done(each: Waiting) -> int:
    # The last sample of an epoch is a sum of times.
    return int((each.job.samples - each.remaining_samples) / _epoch(each.job) + 1e-9)
