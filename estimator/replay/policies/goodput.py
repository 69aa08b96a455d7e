"""Policies by goodput, devices and batch sizes together: Pollux (OSDI 2021), Sia (SOSP 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack

from estimator.replay.jobs import Job
from estimator.replay.policies.elastic import Pools, climbed
from estimator.replay.view import Grant, View, Waiting

# The scheduling interval of both papers: section 5.1 of Pollux', 4 of Sia's.
ROUND_S = 60.0

# Goodput and global batch (None: the job's own) by count.
Goodputs = dict[int, tuple[float, int | None]]


def goodputs(view: View, job: Job, machine: str) -> Goodputs:
    """Throughput × (φ + B₀) / (φ + B) by count, each with the batch that is best for it."""
    best: dict[int, tuple[float, int | None]] = {}
    for batch in batches(job):
        # None is the job's own batch, which is not asked of the engine twice.
        chosen = None if batch == job.global_batch else batch
        for count, rate in view.curve(job, machine, chosen).items():
            goodput = rate * job.useful_samples(batch) / batch
            if count not in best or goodput > best[count][0]:
                best[count] = goodput, chosen
    return dict(sorted(best.items()))


def batches(job: Job) -> list[int]:
    """The job's own global batch and its doublings up to the limit; only its own without φ."""
    most = job.most_global_batch or job.global_batch
    if job.gradient_noise_samples is None:
        most = job.global_batch
    doublings = [job.global_batch]
    while 2 * doublings[-1] <= most:
        doublings.append(2 * doublings[-1])
    return doublings


class Pollux(Pools):
    """Each job's goodput against that on its fewest devices, in the harmonic mean of all jobs.

    The fitness of the paper with p = −1 is highest where Σ 1 / speedup is lowest. On packed shapes
    of one machine type jobs do not depend on each other, so that the largest fall per device, step
    by step, stands for the paper's genetic search.
    """

    interval_s = ROUND_S

    def share(self, view: View) -> dict[str, Grant]:
        """Counts and batches on one machine type."""
        curves = {
            waiting.job.name: goodputs(view, waiting.job, view.machine) for waiting in view.jobs
        }
        # Who holds devices keeps at least one: an end of time without is a restart.
        line = [
            waiting.job.name for waiting in sorted(view.jobs, key=lambda waiting: not waiting.count)
        ]
        rates = {name: {n: goodput for n, (goodput, _) in curves[name].items()} for name in line}
        alone = {name: next(iter(curve.values())) for name, curve in rates.items()}

        def cost(name: str, rate: float, faster: float) -> float:
            return alone[name] / faster - alone[name] / rate

        given = climbed(rates, view.nodes.total(view.machine), cost)
        return {
            name: Grant(count, view.machine, curves[name][count][1])
            for name, count in given.items()
        }


# The paper's section 4: exponent of normalised goodputs, and the penalty of a job without devices.
_FAIRNESS_POWER = -0.5
_IDLE_PENALTY = 1.1
# The time of a restart that the policy assumes.
_RESTART_S = 30.0

Array = NDArray[np.float64]
_Choice = tuple[int, str, int, int | None]


class Sia:
    """A machine type and count for each job, by an integer program over all of them.

    min Σ x_jc · (r_j · G_jc)^−½ + 1.1 · (jobs without devices), one configuration c = (type, count)
    a job, counts within each type, solved by `assigned`: G is goodput over the job's least goodput,
    r = (T − N·S) / (T + S) where c is not what the job holds, T its age, N its restarts, S the time
    of one. A job starts on its fewest devices and at most doubles them in a round. Jayaram
    Subramanya et al., "Sia: Heterogeneity-aware, goodput-optimized ML-cluster scheduling" (SOSP
    2023), section 4.
    """

    interval_s = ROUND_S
    moves_jobs = True

    def plan(self, view: View) -> dict[str, Grant]:
        """This round's jobs, each on one machine type."""
        choices: list[_Choice] = []
        costs: list[float] = []
        for row, waiting in enumerate(view.jobs):
            for choice, cost in _choices(view, row, waiting):
                choices.append(choice)
                costs.append(cost)
        if not choices:
            return {}
        taken = assigned(
            np.array(costs),
            jobs=np.array([row for row, *_ in choices]),
            types=np.array([view.machines.index(machine) for _, machine, *_ in choices]),
            counts=np.array([count for _, _, count, _ in choices], dtype=float),
            devices=[float(view.nodes.total(machine)) for machine in view.machines],
        )
        return {
            view.jobs[row].job.name: Grant(count, machine, batch)
            for row, machine, count, batch in map(choices.__getitem__, taken)
        }


def _choices(view: View, row: int, waiting: Waiting) -> list[tuple[_Choice, float]]:
    """A job's configurations, each with the cost of taking it instead of none."""
    curves = {m: goodputs(view, waiting.job, m) for m in view.machines if view.nodes.total(m)}
    least = min((g for curve in curves.values() for g, _ in curve.values()), default=0.0)
    age = view.now_s - waiting.job.arrival_s
    kept = max(age - waiting.restarts * _RESTART_S, 1.0) / (age + _RESTART_S)
    priced = []
    for machine, curve in curves.items():
        most = max(2 * waiting.count, next(iter(curve), 0))
        for count, (goodput, batch) in curve.items():
            if count <= most:
                grant = Grant(count, machine, batch)
                stays = waiting.grant is None or waiting.grant == grant
                worth = goodput / least * (1.0 if stays else kept)
                cost = max(worth, 1e-6) ** _FAIRNESS_POWER - _IDLE_PENALTY
                priced.append(((row, machine, count, batch), min(cost, -1e-3)))
    return priced


def relaxed(
    costs: Array,
    *,
    jobs: NDArray[np.intp],
    types: NDArray[np.intp],
    counts: Array,
    devices: Sequence[float],
    method: str = "highs-ds",
) -> Array:
    """Shares of configurations of least total cost: at most one a job, within types' devices."""
    columns, size = np.arange(len(costs)), len(costs)
    per_job = csr_array((np.ones(size), (jobs, columns)), shape=(jobs.max() + 1, size))
    per_type = csr_array((counts, (types, columns)), shape=(len(devices), size))
    solved = linprog(
        costs,
        A_ub=vstack([per_job, per_type]),
        b_ub=[*np.ones(per_job.shape[0]), *devices],
        bounds=(0, 1),
        method=method,
    )
    return np.asarray(solved.x)


def assigned(
    costs: Array,
    *,
    jobs: NDArray[np.intp],
    types: NDArray[np.intp],
    counts: Array,
    devices: list[float],
) -> list[int]:
    """Configurations of least total cost, by number: at most one a job, within each type's devices.

    The program's linear relaxation is solved; a vertex of it leaves at most one job for each
    machine type undecided. These, and then whoever gains by it, take the best that still fits.
    """
    solution = relaxed(costs, jobs=jobs, types=types, counts=counts, devices=devices)
    taken = np.full(jobs.max() + 1, -1)
    decided = np.flatnonzero(solution > 1 - 1e-6)
    taken[jobs[decided]] = decided
    free = np.array(devices) - np.bincount(types[decided], counts[decided], len(devices))
    while True:
        now = taken[jobs]
        gains = np.where(now < 0, 0.0, costs[now]) - costs
        # What the job holds of the same type is free for it.
        own = np.where((now >= 0) & (types[now] == types), counts[now], 0.0)
        gains[counts > free[types] + own + 1e-9] = -np.inf
        best = int(gains.argmax())
        if gains[best] <= 1e-9:
            return [int(column) for column in taken if column >= 0]
        if now[best] >= 0:
            free[types[now[best]]] += counts[now[best]]
        free[types[best]] -= counts[best]
        taken[jobs[best]] = best
