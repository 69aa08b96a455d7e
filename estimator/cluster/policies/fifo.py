"""First in, first out: what was asked for, in the order of arrival; the head of the line waits."""

from __future__ import annotations

from estimator.cluster.view import Grant, View


class Fifo:
    """Static: a job keeps what it was given to its end."""

    interval_s = 0.0
    moves_jobs = False

    def plan(self, view: View) -> dict[str, Grant]:
        """What runs stays; then the line, until its head does not fit."""
        grants = {each.job.name: each.grant for each in view.jobs if each.grant}
        free = {machine: view.nodes.free(machine) for machine in view.nodes.machines}
        for waiting in view.jobs:
            if waiting.grant:
                continue
            asked = waiting.job.devices
            machine = next((each for each in free if free[each] >= asked), None)
            if machine is None:
                break
            free[machine] -= asked
            grants[waiting.job.name] = Grant(asked, machine)
        return grants
