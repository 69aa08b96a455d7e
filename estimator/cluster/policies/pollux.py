"""Pollux: devices and batch sizes together, by goodput (OSDI 2021)."""

from __future__ import annotations

import heapq

from estimator.cluster.jobs import Job
from estimator.cluster.view import Grant, View

# The paper's scheduling interval, section 5.1.
ROUND_S = 60.0

# Goodput and global batch (None: the job's own) by count.
Goodputs = dict[int, tuple[float, int | None]]


class Pollux:
    """Goodput is throughput × (φ + B₀) / (φ + B); each count takes the batch that is best for it.

    The fitness of the paper with p = −1 is highest where Σ 1 / speedup is lowest, speedup being
    goodput over that on one device. On packed shapes of one machine type jobs do not depend on each
    other, so that the largest fall per device, step by step, stands for the paper's genetic search
    (`pollux_search`).
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
