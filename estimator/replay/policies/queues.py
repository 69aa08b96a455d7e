"""Policies that give the counts asked for: first in first out, shortest remaining time first,
Tiresias-L (NSDI 2019) and Gavel (OSDI 2020): shares of time on unlike devices, met by rounds.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from estimator.replay.view import Grant, View, Waiting


class Fifo:
    """Static: a job keeps what it was given to its end.

    It goes on the cluster's first machine type that has room for what it asked for.
    """

    interval_s = 0.0
    moves_jobs = False

    def plan(self, view: View) -> dict[str, Grant]:
        """What runs stays; then the line, until its head does not fit."""
        grants = {waiting.job.name: waiting.grant for waiting in view.jobs if waiting.grant}
        free = {machine: view.nodes.free(machine) for machine in view.nodes.machines}
        for waiting in view.jobs:
            if waiting.grant:
                continue
            count = view.request(waiting.job)
            machine = next((m for m in free if is_room(view, waiting, count, m, free)), None)
            if machine is None:
                break
            free[machine] -= count
            grants[waiting.job.name] = Grant(count, machine)
        return grants


class Srtf:
    """Preemptive; remaining time is believed, at the count asked for."""

    interval_s = 0.0
    moves_jobs = True

    def plan(self, view: View) -> dict[str, Grant]:
        """Jobs by remaining time, each as soon as what it asked for is free."""
        return grant_requests(
            sorted(view.jobs, key=lambda waiting: remaining_s(view, waiting)), view
        )


def remaining_s(view: View, waiting: Waiting) -> float:
    """Believed time to the end at the count asked for, on the machine type that is fastest."""
    count = view.request(waiting.job)
    rate = max(view.rate(waiting.job, count, machine) for machine in view.machines)
    return waiting.remaining_samples / rate if rate else math.inf


def is_room(view: View, waiting: Waiting, count: int, machine: str, free: dict[str, int]) -> bool:
    """Whether devices are free on which the job fits."""
    return free[machine] >= count and view.rate(waiting.job, count, machine) > 0


def grant_requests(order: list[Waiting], view: View) -> dict[str, Grant]:
    """What each job asked for, in an order, on the first machine type that has as many left."""
    free = {machine: view.nodes.total(machine) for machine in view.nodes.machines}
    grants: dict[str, Grant] = {}
    for waiting in order:
        count = view.request(waiting.job)
        # Where it runs already it need not start again.
        held = [waiting.grant.machine] if waiting.grant else []
        for machine in (*held, *free):
            if is_room(view, waiting, count, machine, free):
                free[machine] -= count
                grants[waiting.job.name] = Grant(count, machine)
                break
    return grants


# Device-seconds at which a job falls to the next queue: one device-hour and ten, as in two-queue
# and three-queue settings of the paper's section 5.
QUEUES_AT_DEVICE_S = (3600.0, 36000.0)
# How often attained service is looked at.
ROUND_S = 60.0


class Tiresias:
    """Discretised least attained service: needs no estimate, preempts."""

    interval_s = ROUND_S
    moves_jobs = True

    def plan(self, view: View) -> dict[str, Grant]:
        """Jobs by queue, within a queue by arrival."""
        order = sorted(
            view.jobs,
            key=lambda waiting: bisect_right(QUEUES_AT_DEVICE_S, waiting.attained_device_s),
        )
        return grant_requests(order, view)


# The paper's round, section 5.
GAVEL_ROUND_S = 360.0

Shares = dict[str, dict[str, float]]


class Gavel:
    """Highest total throughput over that on the reference machine, at the counts asked for.

    max Σ X_jg · T_jg / T_j,ref, Σ_g X_jg ≤ 1, Σ_j n_j · X_jg ≤ N_g, X ≥ 0; the reference is the
    cluster's first machine type on which the job fits. In each round jobs go by X_jg over the
    rounds had on g so far; what is left goes to whoever waits, on the type that is fastest for him.
    """

    interval_s = GAVEL_ROUND_S
    moves_jobs = True

    def __init__(self) -> None:
        self._rounds: dict[tuple[str, str], int] = {}
        self._shares: Shares = {}
        self._solved_for: tuple[object, ...] = ()

    def plan(self, view: View) -> dict[str, Grant]:
        """This round's jobs, each on one machine type."""
        machines = view.nodes.machines
        free = {machine: view.nodes.total(machine) for machine in machines}
        counts = {waiting.job.name: view.request(waiting.job) for waiting in view.jobs}
        rates = {
            waiting.job.name: {m: view.rate(waiting.job, counts[waiting.job.name], m) for m in free}
            for waiting in view.jobs
        }
        solved_for = tuple(counts), tuple(free.items()), tuple(map(str, rates.values()))
        if solved_for != self._solved_for:
            self._shares = time_shares(rates, counts, free)
            self._solved_for = solved_for
        wanted = [(name, m) for name in counts for m in machines if self._shares[name][m] > 1e-6]
        wanted.sort(key=lambda pair: -self._priority(*pair))
        rest = [(name, m) for name in counts for m in sorted(free, key=lambda m: -rates[name][m])]
        held = {waiting.job.name: waiting.grant.machine for waiting in view.jobs if waiting.grant}
        rest.sort(key=lambda pair: held.get(pair[0]) != pair[1])
        grants: dict[str, Grant] = {}
        for name, machine in (*wanted, *rest):
            if name not in grants and free[machine] >= counts[name] and rates[name][machine] > 0:
                free[machine] -= counts[name]
                grants[name] = Grant(counts[name], machine)
                self._rounds[name, machine] = self._rounds.get((name, machine), 0) + 1
        return grants

    def _priority(self, name: str, machine: str) -> float:
        return self._shares[name][machine] / (self._rounds.get((name, machine), 0) + 1)


def time_shares(
    rates: dict[str, dict[str, float]], wanted: dict[str, int], devices: dict[str, int]
) -> Shares:
    """The linear program's X: the share of its time that each job spends on each machine type."""
    import numpy as np  # queues need neither

    from estimator.replay.policies.goodput import relaxed

    machines = list(devices)
    if not rates:
        return {}
    reference = [next((rate for rate in own.values() if rate > 0), 1.0) for own in rates.values()]
    gain = [own[m] / ref for own, ref in zip(rates.values(), reference) for m in machines]
    jobs, types = np.divmod(np.arange(len(gain)), len(machines))
    solution = relaxed(
        -np.array(gain),
        jobs=jobs,
        types=types,
        counts=np.array([float(wanted[job]) for job in rates])[jobs],
        devices=[*map(float, devices.values())],
        method="highs",
    )
    shares = solution.reshape(len(rates), len(machines)).tolist()
    return {job: dict(zip(machines, row, strict=True)) for job, row in zip(rates, shares)}
