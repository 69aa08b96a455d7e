"""AFS-L: elastic sharing that weighs a short job's gain against a long one's (NSDI 2021)."""

from __future__ import annotations

from estimator.cluster.view import Grant, View

Curve = dict[int, float]


class Afs:
    """Devices are handed out step by step, from a job's count to its next.

    Of a shorter job s and a longer l (by remaining time at the current share) l gets it iff
    (X_l(n') − X_l(n)) / X_l(n') > (X_s(n') − X_s(n)) / X_s(n), gains per device. Jobs without
    devices come first, the shortest first. Hwang et al., "Elastic Resource Sharing for Distributed
    Deep Learning", section 4.
    """

    interval_s = 0.0
    moves_jobs = True

    def plan(self, view: View) -> dict[str, Grant]:
        """Counts on one machine type."""
        free = view.nodes.total(view.machine)
        if not free:
            return {}
        curves = {each.job.name: view.curve(each.job) for each in view.jobs}
        remaining = {each.job.name: each.remaining_samples for each in view.jobs}
        alone = {name: remaining[name] / curves[name][1] for name in curves}
        line = sorted(curves, key=alone.__getitem__)[:free]
        given = dict.fromkeys(line, 1)
        free -= len(line)
        climbs = {name: _Climb(curves[name], remaining[name]) for name in line}
        while climbs:
            climbs = {n: c for n, c in climbs.items() if c.needed and c.needed <= free}
            if not climbs:
                break
            order = sorted(climbs, key=lambda name: climbs[name].remaining_s)
            chosen = order[0]
            for longer in order[1:]:
                if climbs[longer].gain_as_longer > climbs[chosen].gain_as_shorter:
                    chosen = longer
            if climbs[chosen].gain_as_shorter <= 0:
                # What slows a job down ends its climb.
                del climbs[chosen]
                continue
            free -= climbs[chosen].needed
            given[chosen] = climbs[chosen].rise()
        return {name: Grant(count, view.machine) for name, count in given.items()}


class _Climb:
    """A job on its way up its curve, with the terms of the rule for its next step."""

    def __init__(self, curve: Curve, remaining: float) -> None:
        self._curve = curve
        self._counts = list(curve)
        self._remaining = remaining
        self._at = -1
        self.rise()

    def rise(self) -> int:
        """Take the next count."""
        self._at += 1
        count = self._counts[self._at]
        rate = self._curve[count]
        self.remaining_s = self._remaining / rate
        self.needed = 0
        if self._at + 1 < len(self._counts):
            higher = self._counts[self._at + 1]
            self.needed = higher - count
            gain = (self._curve[higher] - rate) / self.needed
            self.gain_as_shorter = gain / rate
            self.gain_as_longer = gain / self._curve[higher]
        return count
