"""Pollux: devices and batch sizes together, by goodput (OSDI 2021)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from estimator.replay.jobs import Job
from estimator.replay.nodes import AllocationShape
from estimator.replay.view import Grant, View, Waiting

# The paper's scheduling interval, section 5.1.
ROUND_S = 60.0

# Goodput and global batch (None: the job's own) by count.
Goodputs = dict[int, tuple[float, int | None]]


class Pollux:
    """Goodput is throughput × (φ + B₀) / (φ + B); each count takes the batch that is best for it.

    The fitness of the paper with p = −1 is highest where Σ 1 / speedup is lowest, speedup being
    goodput over that on one device. On packed shapes of one machine type jobs do not depend on each
    other, so that the largest fall per device, step by step, stands for the paper's genetic search
    (`PolluxSearch`).
    """

    interval_s = ROUND_S
    moves_jobs = True

    def plan(self, view: View) -> dict[str, Grant]:
        """Counts and batches on one machine type."""
        curves = {each.job.name: self._goodputs(view, each.job) for each in view.jobs}
        free = view.nodes.total(view.machine)
        # Who holds devices keeps at least one: an end of time without is a restart.
        line = sorted(view.jobs, key=lambda each: not each.count)[:free]
        given = {each.job.name: min(curves[each.job.name]) for each in line}
        free -= sum(given.values())
        falls = [fall for name, count in given.items() if (fall := _fall(name, count, curves))]
        heapq.heapify(falls)
        while falls and free:
            _, name, higher = heapq.heappop(falls)
            if higher - given[name] > free:
                continue
            free -= higher - given[name]
            given[name] = higher
            if fall := _fall(name, higher, curves):
                heapq.heappush(falls, fall)
        return {
            name: Grant(count, view.machine, curves[name][count][1])
            for name, count in given.items()
        }

    def _goodputs(self, view: View, job: Job) -> Goodputs:
        """Goodput and batch by count; of counts, those that are faster than all below."""
        best: dict[int, tuple[float, int | None]] = {}
        for batch in batches(job):
            # None is the job's own batch, which is not asked of the engine twice.
            chosen = None if batch == job.global_batch else batch
            for count, rate in view.curve(job, None, chosen).items():
                goodput = rate * job.useful_samples(batch) / batch
                if count not in best or goodput > best[count][0]:
                    best[count] = goodput, chosen
        return best


def batches(job: Job) -> list[int]:
    """The job's own global batch and its doublings up to the limit; only its own without φ."""
    most = job.most_global_batch or job.global_batch
    if job.gradient_noise_samples is None:
        most = job.global_batch
    found = [job.global_batch]
    while 2 * found[-1] <= most:
        found.append(2 * found[-1])
    return found


def _fall(name: str, count: int, curves: dict[str, Goodputs]) -> tuple[float, str, int] | None:
    """The next count with the fall of 1 / speedup per device, negated by being a difference."""
    curve = curves[name]
    higher = next((each for each in curve if each > count), None)
    if higher is None or curve[higher][0] <= curve[count][0]:
        return None
    alone = curve[1][0]
    return (alone / curve[higher][0] - alone / curve[count][0]) / (higher - count), name, higher


POPULATION, GENERATIONS = 100, 100
# The delay of a re-allocation that the fitness assumes.
RESTART_S = 30.0
# A job without devices: with p = −1 a speed-up of 0 would make all such placements equal.
_IDLE_SPEED_UP = 1e-2

# Devices by job and node, for each of a population.
Placements = NDArray[np.int64]
Array = NDArray[np.float64]


class PolluxSearch:
    """Devices of each node for each job, found by a genetic algorithm; section 4.2 of the paper.

    Fitness is the power mean of speed-ups with p = −1, each the goodput over that on a fair share
    of the devices; a job that would be re-allocated counts (T − R·δ) / (T + δ) times as much, T its
    age, R its re-allocations, δ the delay. Each of 100 generations mutates each number of devices
    with probability 1 / nodes, crosses parents that won a tournament, row by row, and repairs what
    came of it: at most what a job can use, one job at most that shares a node with others while it
    spans several, and no node beyond its devices. The 100 fittest live; they are kept for the next
    round.
    """

    interval_s = ROUND_S
    moves_jobs = False

    def __init__(self, seed: int = 0, generations: int = GENERATIONS) -> None:
        self._generations = generations
        self._rng = np.random.default_rng(seed)
        self._names: list[str] = []
        self._population: Placements = np.zeros((0, 0, 0), dtype=np.int64)
        self._restarts: dict[str, int] = {}

    def plan(self, view: View) -> dict[str, Grant]:
        """Grants that name their nodes, on one machine type."""
        sizes = np.array(
            [0 if down else n.devices for n, down in zip(view.nodes.nodes, view.nodes.is_down)]
        )
        if not view.jobs or not sizes.any():
            return {}
        fitness = _Fitness(view, self._restarts)
        most = np.array([each.job.highest_count for each in view.jobs])
        population = self._repaired(self._started(view.jobs, fitness.held), sizes, most)
        scores = fitness(population)
        for _ in range(self._generations):
            children = self._repaired(self._children(population, scores, sizes), sizes, most)
            population = np.concatenate([population, children])
            scores = np.concatenate([scores, fitness(children)])
            best = np.argsort(-scores, kind="stable")[:POPULATION]
            population, scores = population[best], scores[best]
        self._names = [each.job.name for each in view.jobs]
        self._population = population
        return self._grants(view, population[0], fitness)

    def _started(self, jobs: Sequence[Waiting], held: Placements) -> Placements:
        """The last round's population for the jobs of this one, and what they hold."""
        rows = {name: row for row, name in enumerate(self._names)}
        found = np.repeat(held[None], max(len(self._population), 1) + 1, axis=0)
        for row, each in enumerate(jobs):
            if each.job.name in rows and len(self._population):
                found[1:, row] = self._population[:, rows[each.job.name]]
        return found

    def _children(self, parents: Placements, scores: Array, sizes: NDArray[np.int64]) -> Placements:
        count, jobs, nodes = len(parents), parents.shape[1], parents.shape[2]
        pairs = self._rng.integers(count, size=(2, POPULATION, 2))
        won = np.take_along_axis(pairs, scores[pairs].argmax(axis=2)[..., None], axis=2)[..., 0]
        of_first = self._rng.random((POPULATION, jobs, 1)) < 0.5
        children = np.where(of_first, parents[won[0]], parents[won[1]])
        mutated = self._rng.random(children.shape) < 1 / nodes
        return np.where(mutated, self._rng.integers(0, sizes + 1, size=children.shape), children)

    def _repaired(
        self, placements: Placements, sizes: NDArray[np.int64], most: NDArray[np.int64]
    ) -> Placements:
        placements = self._cut(placements, most[None, :, None], axis=2)
        spans = (np.count_nonzero(placements, axis=2) > 1)[..., None] & (placements > 0)
        order = np.where(spans, self._rng.random(placements.shape), -1.0)
        stays = ~spans | (order == order.max(axis=1, keepdims=True))
        return self._cut(placements * stays, sizes[None, None, :], axis=1)

    def _cut(self, placements: Placements, limit: NDArray[np.int64], axis: int) -> Placements:
        """At most `limit` devices along an axis; who comes last in a random order loses them."""
        order = self._rng.permutation(placements.shape[axis])
        shuffled = np.take(placements, order, axis=axis)
        before = np.cumsum(shuffled, axis=axis) - shuffled
        kept = np.clip(limit - before, 0, shuffled)
        return np.take(kept, np.argsort(order), axis=axis)

    def _grants(self, view: View, placement: Placements, fitness: _Fitness) -> dict[str, Grant]:
        grants = {}
        for row, each in enumerate(view.jobs):
            used = np.flatnonzero(placement[row]).tolist()
            on = tuple((node, int(placement[row, node])) for node in used)
            if each.grant and each.grant.on != on:
                self._restarts[each.job.name] = self._restarts.get(each.job.name, 0) + 1
            if on:
                count = sum(devices for _, devices in on)
                batch = fitness.batch(row, count, len(on))
                # A batch alone is changed without a restart, which a replay cannot do: it stays.
                if each.grant and each.grant.on == on:
                    batch = each.grant.global_batch
                grants[each.job.name] = Grant(count, view.machine, batch, on)
        return grants


class _Fitness:
    """The fitness of placements of the jobs of a view."""

    def __init__(self, view: View, restarts: dict[str, int]) -> None:
        self._view = view
        jobs, nodes = view.jobs, view.nodes.nodes
        self.held = np.zeros((len(jobs), len(nodes)), dtype=np.int64)
        total = view.nodes.total(view.machine)
        self._goodputs = np.full((len(jobs), total + 1, len(nodes) + 1), np.nan)
        self._goodputs[:, 0] = 0.0
        self._batches: dict[tuple[int, int, int], int | None] = {}
        fair = max(total // len(jobs), 1)
        self._fair = np.zeros(len(jobs))
        self._factor = np.ones(len(jobs))
        for row, each in enumerate(jobs):
            for node, devices in each.grant.on or () if each.grant else ():
                self.held[row, node] = devices
            count = min(fair, each.job.highest_count)
            shape = view.nodes.packed(view.machine, count)
            self._fair[row] = self._best(each.job, shape)[0]
            age = view.now_s - each.job.arrival_s
            again = restarts.get(each.job.name, 0)
            self._factor[row] = max(age - again * RESTART_S, 0.0) / (age + RESTART_S)
        self._runs = self.held.any(axis=1)

    def __call__(self, placements: Placements) -> Array:
        """The harmonic mean of speed-ups, one for each placement."""
        ranks, nodes = placements.sum(axis=2), np.count_nonzero(placements, axis=2)
        rows = np.broadcast_to(np.arange(ranks.shape[1]), ranks.shape)
        goodputs = self._goodputs[rows, ranks, nodes]
        unknown = np.isnan(goodputs)
        if unknown.any():
            keys = np.stack([rows[unknown], ranks[unknown], nodes[unknown]], axis=1)
            for row, count, spread in np.unique(keys, axis=0).tolist():
                self._ask(row, count, spread)
            goodputs = self._goodputs[rows, ranks, nodes]
        moved = self._runs & (placements != self.held).any(axis=2)
        speed_ups = goodputs / self._fair * np.where(moved, self._factor, 1.0)
        return np.asarray(1 / np.mean(1 / np.maximum(speed_ups, _IDLE_SPEED_UP), axis=1))

    def batch(self, row: int, count: int, nodes: int) -> int | None:
        """The global batch with the best goodput, None for the job's own."""
        return self._batches[row, count, nodes]

    def _ask(self, row: int, count: int, nodes: int) -> None:
        fewer, more = divmod(count, nodes)
        shape = AllocationShape(self._view.machine, (fewer + 1,) * more + (fewer,) * (nodes - more))
        found = self._best(self._view.jobs[row].job, shape)
        self._goodputs[row, count, nodes], self._batches[row, count, nodes] = found

    def _best(self, job: Job, shape: AllocationShape) -> tuple[float, int | None]:
        found: list[tuple[float, int | None]] = []
        for batch in batches(job):
            chosen = None if batch == job.global_batch else batch
            (step_s,) = self._view.believed.step_times_s(job, [shape], chosen)
            found.append((job.useful_samples(chosen) / step_s, chosen))
        return max(found, key=lambda pair: pair[0])
