"""Shortest remaining time first: what was asked for, to the jobs that end soonest."""

from __future__ import annotations

from estimator.cluster.view import Grant, View, Waiting


class Srtf:
    """Preemptive; remaining time is believed, at the count asked for."""

    interval_s = 0.0
    moves_jobs = True

    def plan(self, view: View) -> dict[str, Grant]:
        """Jobs by remaining time, each as soon as what it asked for is free."""
        return grant_requests(sorted(view.jobs, key=lambda each: remaining_s(view, each)), view)


def remaining_s(view: View, waiting: Waiting) -> float:
    """Believed time to the end at the count asked for."""
    return waiting.remaining_samples / view.rate(waiting.job, waiting.job.devices)


def grant_requests(order: list[Waiting], view: View) -> dict[str, Grant]:
    """What each job asked for, in an order, on the first machine type that has as many left."""
    free = {machine: view.nodes.total(machine) for machine in view.nodes.machines}
    grants: dict[str, Grant] = {}
    for each in order:
        # Where it runs already it need not start again.
        held = [each.grant.machine] if each.grant else []
        for machine in (*held, *free):
            if free[machine] >= each.job.devices:
                free[machine] -= each.job.devices
                grants[each.job.name] = Grant(each.job.devices, machine)
                break
    return grants
