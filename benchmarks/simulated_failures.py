"""Play training among failures many times over: what the closed forms are checked against."""

from __future__ import annotations

import heapq
import math

import numpy as np
from numpy.typing import NDArray

from estimator.advise.rent.transient import Revocations, TransientCluster
from estimator.errors import WorkloadError

_MOST_LIVES = 50_000


def simulated_times_s(
    work_s: float,
    interval_s: float,
    *,
    checkpoint_s: float,
    restart_s: float,
    mtbf_s: float,
    runs: int = 10_000,
    seed: int = 0,
) -> NDArray[np.float64]:
    """Times of synchronous training, one a run: lives between failures, played one after another.

    A life first restarts (the first does not), then keeps what whole intervals and their
    checkpoints it has time for. Raises WorkloadError where training does not end.
    """
    rng = np.random.default_rng(seed)
    times, left = np.zeros(runs), np.full(runs, float(work_s))
    restarts = np.zeros(runs)
    running = np.arange(runs)
    for _ in range(_MOST_LIVES):
        life = rng.exponential(mtbf_s, len(running))
        trains = np.maximum(life - restarts[running], 0.0)
        whole = np.ceil(left[running] / interval_s - 1e-9)
        kept = np.minimum(np.floor(trains / (interval_s + checkpoint_s)), whole)
        needed = left[running] + whole * checkpoint_s
        ended = trains >= needed
        times[running] += np.where(ended, restarts[running] + needed, life)
        left[running] -= kept * interval_s
        restarts[running] = restart_s
        running = running[~ended]
        if not len(running):
            return times
    raise WorkloadError(
        f"training with a failure every {mtbf_s:g} s does not end; keep checkpoints more often "
        f"than every {interval_s:g} s"
    )


def simulated_asynchronous_s(
    cluster: TransientCluster, steps: float, *, start_hour: float = 0.0, seed: int = 0
) -> float:
    """The time of one asynchronous training: each worker leaves by its own rate and comes back."""
    rng = np.random.default_rng(seed)
    there = [True] * len(cluster.workers)
    changes = [
        (_next_revocation_s(worker.revocations, 0.0, start_hour, rng), number)
        for number, worker in enumerate(cluster.workers)
    ]
    heapq.heapify(changes)
    now, done, kept, pause_s = 0.0, 0.0, 1, 0.0
    while True:
        at, number = changes[0]
        rates = (w.steps_per_s for w, is_there in zip(cluster.workers, there) if is_there)
        rate = min(sum(rates), cluster.most_steps_per_s)
        goal = min(kept * cluster.checkpoint_every_steps, steps)
        ends = now + pause_s + ((goal - done) / rate if rate else math.inf)
        if ends > at:
            trained_s = max(at - now - pause_s, 0.0)
            pause_s = max(pause_s - (at - now), 0.0)
            now, done = at, done + rate * trained_s
            there[number] = not there[number]
            revocations = cluster.workers[number].revocations
            back_s = now + cluster.replace_s
            after = _next_revocation_s(revocations, now, start_hour, rng)
            heapq.heapreplace(changes, (after if there[number] else back_s, number))
            continue
        now, done, kept, pause_s = ends, goal, kept + 1, cluster.checkpoint_s
        if done >= steps:
            return now + pause_s


def _next_revocation_s(
    revocations: Revocations, now_s: float, start_hour: float, rng: np.random.Generator
) -> float:
    """When the hazard since now reaches an exponential draw, hour by hour."""
    left = rng.exponential()
    if not revocations.mean_per_s:
        return math.inf
    if len(revocations.per_hour) == 1:
        return now_s + left / revocations.mean_per_s
    hour = start_hour + now_s / 3600
    while True:
        rate, step_h = revocations.rate_per_hour(hour % 24), math.floor(hour) + 1 - hour
        if rate * step_h >= left:
            return (hour + left / rate - start_hour) * 3600
        left, hour = left - rate * step_h, hour + step_h
