"""ONES: a population of schedules that evolves while jobs run (SC 2021)."""

from __future__ import annotations

import math
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

Numbers = NDArray[np.int64]


class Schedules(NamedTuple):
    """Schedules of one machine type: a genome is a row of both arrays.

    `holders`, of shape (schedules, devices), is the number of the job that each device trains, in
    the order of `names`; `batches`, of shape (schedules, jobs), its global batch, 0 where that is
    not chosen.
    """

    names: list[str]
    holders: Numbers
    batches: Numbers


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
        self._populations: dict[str, Schedules] = {}
        # By the name of an unfinished job: all its epochs, and (epochs done, samples left).
        self._epochs: dict[str, float] = {}
        self._reports: dict[str, tuple[int, float]] = {}
        self._ended_epochs: list[float] = []
        # By machine type and job: the least samples a device that did not fit.
        self._too_much: dict[tuple[str, str], float] = {}

    def plan(self, view: View) -> dict[str, Grant]:
        """The fittest schedule of each machine type."""
        self._learn(view)
        return super().plan(view)

    def share(self, view: View) -> dict[str, Grant]:
        """The fittest schedule's counts and batches on one machine type."""
        limits = self._limits(view)
        parents = self._refreshed(view)
        children = self._children(parents, limits)
        running = parents.holders[0]
        holders = np.concatenate([parents.holders, children.holders])
        counts = _refilled(_counts(holders, len(view.jobs)), limits, len(running))
        batches = limits.batches(np.concatenate([parents.batches, children.batches]), counts)
        rates = self._rates(view, counts, batches)
        counts[rates == 0] = 0
        needed_s = counts * limits.left / np.where(rates > 0, rates, 1)
        fittest = np.argsort(needed_s.sum(axis=1), kind="stable")[:POPULATION]
        counts, batches = counts[fittest], batches[fittest] * (counts[fittest] > 0)
        self._populations[view.machine] = Schedules(
            parents.names, reordered(counts, running), batches
        )
        return {
            name: Grant(count, view.machine, batch or None)
            for name, count, batch in zip(
                parents.names, counts[0].tolist(), batches[0].tolist(), strict=True
            )
            if count
        }

    def _children(self, parents: Schedules, limits: _Limits) -> Schedules:
        """Crossover of two schedules; some jobs dropped, some batches halved or doubled."""
        draw = self._rng.random
        first, second = self._rng.integers(len(parents.holders), size=(2, POPULATION))
        holders, batches = parents.holders[first], parents.batches[first]
        np.copyto(holders, parents.holders[second], where=draw(holders.shape) < 0.5)
        # The last column is that of devices without a job.
        dropped = draw((POPULATION, batches.shape[1] + 1)) < MUTATION_PROBABILITY
        holders[np.take_along_axis(dropped, holders, axis=1)] = NOBODY
        others = parents.batches[second]
        np.copyto(
            batches, others, where=(others > 0) & ((batches == 0) | (draw(others.shape) < 0.5))
        )
        mutated = (batches > 0) & (draw(batches.shape) < MUTATION_PROBABILITY)
        doubled = draw(batches.shape) < 0.5
        batches[mutated & doubled] *= 2
        halved = mutated & ~doubled
        batches[halved] = np.maximum(batches[halved] // 2, 1)
        return Schedules(parents.names, holders, batches)

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

    def _limits(self, view: View) -> _Limits:
        """Of each job of this round: samples left by the draw, limits of devices and batch.

        A job whose batch is its own is given no count that is believed slower than a lower one.
        """
        rows = []
        for waiting in view.jobs:
            job, curve = waiting.job, view.curve(waiting.job)
            least = next(iter(curve))
            growth = min(2 ** (_epochs_done(waiting) // EPOCHS_TO_DOUBLE), MOST_GROWTH)
            most = max(min(job.devices * growth, job.highest_count), least)
            if not job.most_global_batch:
                most = min(most, max(curve, key=curve.__getitem__))
            batch = min(job.global_batch * growth, job.most_global_batch or 0)
            share = max(job.global_batch // job.devices, 1)
            too_much = self._too_much.get((view.machine, job.name), math.inf)
            rows.append((self._left(waiting), least, most, share, batch, too_much))
        return _Limits(*np.array(rows, dtype=float).reshape(-1, len(_Limits._fields)).T)

    def _refreshed(self, view: View) -> Schedules:
        """The last schedules without jobs that have ended, for the devices there are now."""
        names = [waiting.job.name for waiting in view.jobs]
        shape = 1, view.nodes.total(view.machine)
        if (last := self._populations.get(view.machine)) is None:
            return Schedules(names, np.full(shape, NOBODY), np.zeros((1, len(names)), int))
        numbers = {name: number for number, name in enumerate(last.names)}
        before = np.array([numbers.get(name, NOBODY) for name in names], int)
        now = np.full(len(last.names) + 1, NOBODY)
        now[before[before >= 0]] = np.flatnonzero(before >= 0)
        holders = np.full((len(last.holders), shape[1]), NOBODY)
        known = last.holders[:, : shape[1]]
        holders[:, : known.shape[1]] = now[known]
        none = np.zeros((len(last.batches), 1), int)
        return Schedules(names, holders, np.hstack([last.batches, none])[:, before])

    def _rates(self, view: View, counts: Numbers, batches: Numbers) -> NDArray[np.float64]:
        """Believed throughput of each job of each schedule; 0: no device, or it does not fit.

        Memory is part of ONES' limit: what does not fit is remembered.
        """
        rates = np.zeros(counts.shape)
        held = counts.nonzero()
        columns = np.stack([held[1], counts[held], batches[held]], axis=1)
        unlike, which = np.unique(columns, axis=0, return_inverse=True)
        jobs = [waiting.job for waiting in view.jobs]
        asked = [(jobs[number], count, batch or None) for number, count, batch in unlike.tolist()]
        view.ask(one for one in asked if one[2])
        known = [view.rate(job, count, None, batch) for job, count, batch in asked]
        for rate, (job, count, batch) in zip(known, asked, strict=True):
            if batch and not rate:
                key = view.machine, job.name
                self._too_much[key] = min(self._too_much.get(key, math.inf), batch / count)
        rates[held] = np.array(known)[which.ravel()] if known else 0
        return rates


class _Limits(NamedTuple):
    """Arrays over the jobs of a round: samples left, fewest and most devices, and batches.

    `share` is a new batch's on one device, `most_batch` 0 where a job's batch is its own,
    `too_much` the least samples a device that did not fit.
    """

    left: NDArray[np.float64]
    least: NDArray[np.float64]
    most: NDArray[np.float64]
    share: NDArray[np.float64]
    most_batch: NDArray[np.float64]
    too_much: NDArray[np.float64]

    def batches(self, batches: Numbers, counts: Numbers) -> Numbers:
        """Global batches on so many devices; a new one is the job's own share of each of them."""
        chosen = np.minimum(np.where(batches, batches, self.share * counts), self.most_batch)
        limit = self.too_much * np.maximum(counts, 1)
        chosen = np.where(chosen >= limit, limit / 2, chosen)
        return (np.maximum(chosen, counts) * ((counts > 0) & (self.most_batch > 0))).astype(int)


def _counts(holders: Numbers, jobs: int) -> Numbers:
    """Devices of each job in each schedule, of shape (schedules, jobs)."""
    rows = np.arange(len(holders))[:, None] * (jobs + 1)
    counts = np.bincount((rows + holders + 1).ravel(), minlength=len(holders) * (jobs + 1))
    return counts.reshape(len(holders), jobs + 1)[:, 1:]


def _refilled(counts: Numbers, limits: _Limits, devices: int) -> Numbers:
    """Free devices go to new jobs, then to those with the least left."""
    counts = np.where(counts >= limits.least, np.minimum(counts, limits.most), 0).astype(int)
    free = devices - counts.sum(axis=1)
    order = np.lexsort((counts > 0, np.broadcast_to(limits.left, counts.shape)))
    rows = np.arange(len(counts))
    for number in order.T:
        held = counts[rows, number]
        given = np.minimum(limits.most[number] - held, free).astype(int)
        given[held + given < limits.least[number]] = 0
        counts[rows, number] += given
        free -= given
        if not free.any():
            break
    return counts


def reordered(counts: Numbers, running: Numbers) -> Numbers:
    """The jobs of devices where the fewest change hands: jobs stay on those that they hold.

    `counts` are devices by schedule and job, `running` is the job of each device.

    >>> reordered(np.array([[0, 1, 2, 1]]), np.array([1, 1, 2, -1])).tolist()
    [[1, 2, 2, 3]]
    """
    counts = np.column_stack([len(running) - counts.sum(axis=1), counts])
    by_holder = np.argsort(running, kind="stable")
    place = np.empty_like(running)
    place[by_holder] = np.arange(len(running)) - np.searchsorted(
        running[by_holder], running[by_holder]
    )
    stays = place < counts[:, running + 1]
    held = np.bincount(running + 1, minlength=counts.shape[1])
    moving = counts - np.minimum(counts, held)
    holders = np.where(stays, running, NOBODY)
    numbers = np.tile(np.arange(counts.shape[1]) - 1, len(counts))
    holders[~stays] = np.repeat(numbers, moving.ravel())
    return holders


def _epoch(job: Job) -> float:
    return job.epoch_samples or job.samples / EPOCHS_ASSUMED


def _epochs_done(waiting: Waiting) -> int:
    # The last sample of an epoch is a sum of times.
    return int((waiting.job.samples - waiting.remaining_samples) / _epoch(waiting.job) + 1e-9)
