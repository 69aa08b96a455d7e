"""Tiresias-L: queues by device time attained, first come first served within (NSDI 2019)."""

from __future__ import annotations

from bisect import bisect_right

from estimator.cluster.policies.srtf import grant_requests
from estimator.cluster.view import Grant, View

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
