"""Play training among failures many times over: what the closed forms are checked against."""

from __future__ import annotations

import heapq
import math

import numpy as np
from numpy.typing import NDArray

from estimator.advise.rent.revocations import Lives, Revocations
from estimator.advise.rent.transient import TransientCluster
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


def simulated_lives_s(
    lives: Lives, work_s: float, *, start_hour: float = 0.0, runs: int = 4000, seed: int = 0
) -> NDArray[np.float64]:
    """Times of synchronous training whose instances go by the hour of the day and their age.

    One run after the other, event by event.
    """
    rng = np.random.default_rng(seed)
    times = np.zeros(runs)
    for run in range(runs):
        now_s, left_s, restart_s = 0.0, work_s, 0.0
        while left_s > 1e-6:
            ends_s = _taken_s(lives.revocations, now_s, start_hour, rng)
            now_s += restart_s
            restart_s = lives.restart_s
            while left_s > 1e-6:
                trains_s = min(lives.interval_s, left_s)
                if now_s + trains_s + lives.checkpoint_s > ends_s + 1e-6:
                    if lives.checkpoint_s <= lives.warning_s and lives.warning_s:
                        left_s -= min(max(ends_s - lives.checkpoint_s - now_s, 0.0), trains_s)
                    now_s = ends_s
                    break
                now_s += trains_s + lives.checkpoint_s
                left_s -= trains_s
        times[run] = now_s
    return times


def simulated_asynchronous_s(
    cluster: TransientCluster, steps: float, *, start_hour: float = 0.0, seed: int = 0
) -> float:
    """The time of one asynchronous training: each worker leaves by its own rate and comes back."""
    rng = np.random.default_rng(seed)
    there = [True] * len(cluster.workers)
    changes = [
        (_taken_s(worker.revocations, 0.0, start_hour, rng), number)
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
            # One that is back begins a life of its own.
            after = _taken_s(revocations, now, start_hour, rng) if there[number] else back_s
            heapq.heapreplace(changes, (after, number))
            continue
        now, done, kept, pause_s = ends, goal, kept + 1, cluster.checkpoint_s
        if done >= steps:
            return now + pause_s


def _taken_s(
    revocations: Revocations, now_s: float, start_hour: float, rng: np.random.Generator
) -> float:
    """When an instance that begins now is taken: its revocation, or the end of its lifetime."""
    limit_s = now_s + revocations.lifetime_s
    return min(_next_revocation_s(revocations, now_s, start_hour, rng), limit_s)


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
        rate, step_h = revocations.per_hour[int(hour % 24)], math.floor(hour) + 1 - hour
        if rate * step_h >= left:
            return (hour + left / rate - start_hour) * 3600
        left, hour = left - rate * step_h, hour + step_h
