"""Dynamic max-min fairness: the job with the fewest devices is the next to get more."""

from __future__ import annotations

from estimator.replay.view import Grant, View


class MaxMin:
    """Counts rise together, none above the count that is believed fastest.

    Each job gets one device in the order of arrival; then those with the fewest go to their next
    count as long as there are devices. Of equals goes first whose next count is the most times as
    fast as one device: errors of two counts would add up in their ratio.
    """

    interval_s = 0.0
    moves_jobs = True
    capped = True

    def plan(self, view: View) -> dict[str, Grant]:
        """Max-min counts on one machine type."""
        free = view.nodes.total(view.machine)
        curves = {each.job.name: view.curve(each.job) for each in view.jobs[:free]}
        given = dict.fromkeys(curves, 1)
        free -= len(given)
        best = {name: max(curve, key=curve.__getitem__) for name, curve in curves.items()}
        rising = list(curves)
        while rising:
            level = min(given[name] for name in rising)
            gains: dict[str, tuple[float, int]] = {}
            for name in rising:
                curve = curves[name]
                higher = next((count for count in curve if count > level), None)
                if given[name] == level and higher and not (self.capped and higher > best[name]):
                    gains[name] = curve[higher] / curve[1], higher
            for name in sorted(gains, key=lambda name: -gains[name][0]):
                higher = gains[name][1]
                if higher - level <= free:
                    free -= higher - level
                    given[name] = higher
            rising = [name for name in rising if given[name] > level]
        return {name: Grant(count, view.machine) for name, count in given.items()}


class UncappedMaxMin(MaxMin):
    """Counts rise as long as there are devices, whatever they are believed to gain."""

    capped = False
