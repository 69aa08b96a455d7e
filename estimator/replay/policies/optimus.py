"""Optimus: devices go where they shorten the remaining time most (EuroSys 2018)."""

from __future__ import annotations

import heapq

from estimator.replay.view import Grant, View

# The paper's scheduling interval, section 6.1.
ROUND_S = 600.0


class Optimus:
    """One device each, shortest first; then the largest (remaining time now − with more) / devices.

    The dominant resource of a worker is its device. Peng et al., "Optimus", section 4.1.
    """

    interval_s = ROUND_S
    moves_jobs = True

    def plan(self, view: View) -> dict[str, Grant]:
        """Counts on one machine type."""
        free = view.nodes.total(view.machine)
        if not free:
            return {}
        curves = {each.job.name: view.curve(each.job) for each in view.jobs}
        remaining = {each.job.name: each.remaining_samples for each in view.jobs}
        line = sorted(curves, key=lambda name: remaining[name] / curves[name][1])[:free]
        given = dict.fromkeys(line, 1)
        free -= len(line)
        gains = [gain for name in line if (gain := _gain(name, 1, curves[name], remaining[name]))]
        heapq.heapify(gains)
        while gains and free:
            _, name, higher = heapq.heappop(gains)
            if higher - given[name] > free:
                continue
            free -= higher - given[name]
            given[name] = higher
            if gain := _gain(name, higher, curves[name], remaining[name]):
                heapq.heappush(gains, gain)
        return {name: Grant(count, view.machine) for name, count in given.items()}


def _gain(
    name: str, count: int, curve: dict[int, float], remaining: float
) -> tuple[float, str, int] | None:
    """The next count with what it saves per device, negated for the heap; None if nothing."""
    higher = next((each for each in curve if each > count), None)
    if higher is None or curve[higher] <= curve[count]:
        return None
    saved_s = remaining / curve[count] - remaining / curve[higher]
    return -saved_s / (higher - count), name, higher
