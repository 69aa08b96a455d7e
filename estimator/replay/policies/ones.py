"""ONES: a population of schedules that evolves while jobs run (SC 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from estimator.replay.jobs import Job
from estimator.replay.policies.elastic import Pools
from estimator.replay.view import Grant, View, Waiting

POPULATION = 16
MUTATION_PROBABILITY = 0.3
MOST_GROWTH = 4
EPOCHS_TO_DOUBLE = 2
ROUND_S = 60.0
# Epochs of a job whose file does not say how long one is.
EPOCHS_ASSUMED = 10
NOBODY = -1

Holders = NDArray[np.int64]


class Genome(NamedTuple):
    """A genome: the job of each device, and the global batch of each job whose batch may change."""

    holders: Holders
    batches: Mapping[int, int]


class Ones(Pools):
    """A schedule says which job each device trains and in what batches; the fittest is the plan.

    Each round: finished jobs are taken out; uniform crossover with probability ½ of devices and
    batches; a job is dropped with p = 0.3, and its batch halved or doubled as often; free devices
    go to new jobs, then to those with the least left; devices are reordered so that the fewest
    change hands; the 16 schedules with the lowest Σ Y·n·(1/ρ − 1) / X(n, B) are kept, Y the samples
    done and ρ ~ Beta(epochs done, β) the progress. A job's batch starts at its own share of each
    device and at most doubles every two epochs, up to four times its own and its
    `most_global_batch`: ONES' limit, at which the learning rate is scaled linearly and every sample
    counts. Jobs that name no `most_global_batch` keep their batch; their devices are limited alike.
    Jobs that wait add nothing to the sum: a few wide jobs score better than many narrow ones.

    Jobs report when an epoch ends: Y and the draw of ρ stay until then, so that rounds between
    score alike and a job costs nothing before its first epoch ends. β is the epochs that jobs
    which have ended took on average, less those done, and at least 1; ONES fits it to more
    features of theirs, loss and accuracy among them, which replays do not have.
    """

    interval_s = ROUND_S

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._numbers: dict[str, int] = {}
        self._populations: dict[str, list[Genome]] = {}
        # By the name of an unfinished job: all its epochs, and (epochs done, samples left).
        self._epochs: dict[str, float] = {}
        self._reports: dict[str, tuple[int, float]] = {}
        self._ended_epochs: list[float] = []
        # By machine type and the number of a job: the least samples a device that did not fit.
        self._too_much: dict[tuple[str, int], float] = {}

    def plan(self, view: View) -> dict[str, Grant]:
        """The fittest schedule of each machine type."""
        self._learn(view)
        return super().plan(view)

    def share(self, view: View) -> dict[str, Grant]:
        """The fittest schedule's counts and batches on one machine type."""
        for waiting in view.jobs:
            self._numbers.setdefault(waiting.job.name, len(self._numbers))
        jobs = {
            self._numbers[waiting.job.name]: _Contender(
                waiting,
                self._left(waiting),
                view.curve(waiting.job),
                self._too_much.get((view.machine, self._numbers[waiting.job.name]), math.inf),
            )
            for waiting in view.jobs
        }
        known = self._populations.get(view.machine, [])
        parents = [self._refreshed(one, view, jobs) for one in known]
        parents = parents or [Genome(np.full(view.nodes.total(view.machine), NOBODY), {})]
        candidates = [self._refilled(one, jobs) for one in parents]
        for _ in range(POPULATION):
            first, second = (parents[i] for i in self._rng.integers(len(parents), size=2))
            child = self._refilled(self._child(first, second, jobs), jobs)
            ordered = reordered(child.holders, parents[0].holders)
            candidates.append(Genome(ordered, child.batches))
        counts = [_counts(one.holders) for one in candidates]
        view.ask(
            (jobs[number].job, count, one.batches[number])
            for one, held in zip(candidates, counts, strict=True)
            for number, count in held.items()
            if number in one.batches
        )
        scores = [self._score(*one, jobs, view) for one in zip(candidates, counts, strict=True)]
        fittest = np.argsort(scores, kind="stable")[:POPULATION]
        self._populations[view.machine] = [candidates[i] for i in fittest]
        batches = candidates[fittest[0]].batches
        return {
            jobs[number].job.name: Grant(count, view.machine, batches.get(number))
            for number, count in counts[fittest[0]].items()
        }

    def _child(self, first: Genome, second: Genome, jobs: Mapping[int, _Contender]) -> Genome:
        """Crossover of two schedules; some jobs dropped, some batches halved or doubled."""
        of_first = self._rng.random(len(first.holders)) < 0.5
        holders = np.where(of_first, first.holders, second.holders)
        dropped = [number for number in jobs if self._rng.random() < MUTATION_PROBABILITY]
        holders[np.isin(holders, dropped)] = NOBODY
        batches = {}
        for number in [n for n, waiting in jobs.items() if waiting.job.most_global_batch]:
            parents = [one.batches for one in (first, second) if number in one.batches]
            if parents:
                batch = parents[int(self._rng.integers(len(parents)))][number]
                if self._rng.random() < MUTATION_PROBABILITY:
                    batch = batch * 2 if self._rng.random() < 0.5 else max(batch // 2, 1)
                batches[number] = batch
        return Genome(holders, batches)

    def _learn(self, view: View) -> None:
        """Remember how many epochs the jobs took that have ended since the last plan."""
        now = {waiting.job.name: waiting.job.samples / _epoch(waiting.job) for waiting in view.jobs}
        self._ended_epochs += [self._epochs[name] for name in self._epochs if name not in now]
        self._epochs = now

    def _left(self, waiting: Waiting) -> float:
        """Samples still to train, by the progress drawn when the last epoch ended."""
        name, done = waiting.job.name, _epochs_done(waiting)
        known, left = self._reports.get(name, (0, 0.0))
        if done > known:
            usual = float(np.mean(self._ended_epochs)) if self._ended_epochs else 0.0
            progress = self._rng.beta(done, max(usual - done, 1.0))
            left = done * _epoch(waiting.job) * (1 / progress - 1)
            self._reports[name] = done, left
        return left

    def _refreshed(self, schedule: Genome, view: View, alive: Mapping[int, _Contender]) -> Genome:
        """Without jobs that have ended, for the devices there are now."""
        devices = view.nodes.total(view.machine)
        fresh = np.full(devices, NOBODY)
        known = schedule.holders[:devices]
        fresh[: len(known)] = np.where(np.isin(known, list(alive)), known, NOBODY)
        return Genome(fresh, {n: b for n, b in schedule.batches.items() if n in alive})

    def _refilled(self, schedule: Genome, jobs: Mapping[int, _Contender]) -> Genome:
        """Free devices go to new jobs, then to those with the least left; batches fit them."""
        filled = schedule.holders.copy()
        counts = _counts(filled)
        for number, count in list(counts.items()):
            kept = jobs[number].most if count >= jobs[number].least else 0
            if count > kept:
                filled[np.flatnonzero(filled == number)[kept:]] = NOBODY
                counts[number] = kept
        free = np.flatnonzero(filled == NOBODY).tolist()
        order = sorted(jobs, key=lambda number: (jobs[number].left, bool(counts.get(number))))
        for number in order if free else ():
            held = counts.get(number, 0)
            more = min(jobs[number].most - held, len(free))
            if more > 0 and held + more >= jobs[number].least:
                filled[free[:more]] = number
                free = free[more:]
                counts[number] = held + more
        batches = {
            number: jobs[number].batch_within(schedule.batches.get(number), count)
            for number, count in counts.items()
            if count and jobs[number].job.most_global_batch
        }
        return Genome(filled, batches)

    def _score(
        self, schedule: Genome, counts: dict[int, int], jobs: Mapping[int, _Contender], view: View
    ) -> float:
        """Device time that the scheduled jobs still need; the lower the better.

        Jobs whose batch does not fit on their devices lose them: memory is part of ONES' limit.
        """
        total = 0.0
        for number, count in list(counts.items()):
            batch = schedule.batches.get(number)
            rate = view.rate(jobs[number].job, count, None, batch)
            if rate:
                total += count * jobs[number].left / rate
                continue
            if batch is not None:
                key, share = (view.machine, number), batch / count
                self._too_much[key] = min(self._too_much.get(key, math.inf), share)
            schedule.holders[schedule.holders == number] = NOBODY
            del counts[number]
        return total


class _Contender:
    """A job of this round: samples left by the draw, and its limits of devices and batch.

    A job whose batch is its own is given no count that is believed slower than a lower one.
    """

    def __init__(
        self, waiting: Waiting, left: float, curve: Mapping[int, float], too_much: float
    ) -> None:
        self.job, self.left, self.least = waiting.job, left, next(iter(curve))
        self._too_much = too_much
        growth: int = min(2 ** (_epochs_done(waiting) // EPOCHS_TO_DOUBLE), MOST_GROWTH)
        self.most = max(min(self.job.devices * growth, self.job.highest_count), self.least)
        own = self.job.global_batch
        self._most_batch = min(own * growth, self.job.most_global_batch or own)
        if not self.job.most_global_batch:
            self.most = min(self.most, max(curve, key=curve.__getitem__))

    def batch_within(self, batch: int | None, count: int) -> int:
        """A global batch on so many devices; a new one is the job's own share of each of them."""
        share = batch or max(self.job.global_batch // self.job.devices, 1) * count
        chosen = min(share, self._most_batch)
        if chosen >= self._too_much * count:
            chosen = int(self._too_much * count / 2)
        return max(chosen, count)


def _counts(holders: Holders) -> dict[int, int]:
    """Devices by the number of the job that holds them."""
    counts = np.bincount(holders + 1)[1:]
    held = np.flatnonzero(counts)
    return dict(zip(held.tolist(), counts[held].tolist(), strict=True))


def reordered(schedule: Holders, running: Holders) -> Holders:
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


def _epochs_done(waiting: Waiting) -> int:
    # The last sample of an epoch is a sum of times.
    return int((waiting.job.samples - waiting.remaining_samples) / _epoch(waiting.job) + 1e-9)
