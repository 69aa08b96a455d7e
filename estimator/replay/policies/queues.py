"""Queues: first in first out, shortest remaining time first, and Tiresias-L (NSDI 2019)."""

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
        grants = {each.job.name: each.grant for each in view.jobs if each.grant}
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
        return grant_requests(sorted(view.jobs, key=lambda each: remaining_s(view, each)), view)


def remaining_s(view: View, waiting: Waiting) -> float:
    """Believed time to the end at the count asked for, on the machine type that is fastest."""
    count = view.request(waiting.job)
    rate = max(view.rate(waiting.job, count, machine) for machine in view.machines)
    return waiting.remaining_samples / rate if rate else math.inf


def is_room(view: View, each: Waiting, count: int, machine: str, free: dict[str, int]) -> bool:
    """Whether devices are free on which the job fits."""
    return free[machine] >= count and view.rate(each.job, count, machine) > 0


def grant_requests(order: list[Waiting], view: View) -> dict[str, Grant]:
    """What each job asked for, in an order, on the first machine type that has as many left."""
    free = {machine: view.nodes.total(machine) for machine in view.nodes.machines}
    grants: dict[str, Grant] = {}
    for each in order:
        count = view.request(each.job)
        # Where it runs already it need not start again.
        held = [each.grant.machine] if each.grant else []
        for machine in (*held, *free):
            if is_room(view, each, count, machine, free):
                free[machine] -= count
                grants[each.job.name] = Grant(count, machine)
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
            view.jobs, key=lambda each: bisect_right(QUEUES_AT_DEVICE_S, each.attained_device_s)
        )
        return grant_requests(order, view)
