"""Detect outliers: observations that the others of their workload contradict.

Most are of a wrong unit, milliseconds taken for seconds: a factor of 1,000. The threshold is 500,
since steps themselves vary. An observation is an outlier if it is more than 500 times off

- the others of the same workload, allocation, layout, strategy and batch, if there are two or more;
- else the others of its workload on the same machine types (a CPU and a GPU may well differ by a
  factor of 500).

Off is longer than 500 × both their median step time and its own samples × their median time per
sample (samples of one rank and step), or shorter than 1/500 of both: from one batch to another,
step times lie between equal and proportional. Of only two observations, the later is the outlier.
The rule is applied to a whole workload whenever it is read: later observations may show that the
first one is an outlier, or that one taken for an outlier is not.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from estimator.calibrate.observed import Observation
from estimator.placement.allocation import Allocation
from estimator.units import format_seconds

OUTLIER_RATIO = 500.0


def outliers(observations: Iterable[Observation]) -> dict[str, str]:
    """The identities of outliers, each with the reason.

    `observations` are in the order of arrival and all that are known of each job.
    """
    jobs: dict[tuple[str, str], list[Observation]] = defaultdict(list)
    for observation in observations:
        jobs[observation.job].append(observation)
    found: dict[str, str] = {}
    for ours in jobs.values():
        times_s = [one.step_time_s for one in ours]
        # Step times that all lie within the ratio contain no outlier.
        if max(times_s) / min(times_s) > OUTLIER_RATIO:
            for alike in _by_machines(ours).values():
                found.update(_outliers_among(alike))
    return found


def _by_machines(
    observations: Iterable[Observation],
) -> dict[frozenset[str | None], list[Observation]]:
    groups: dict[frozenset[str | None], list[Observation]] = defaultdict(list)
    for one in observations:
        placed = Allocation.parse(one.allocation).groups
        # Hosts of a cluster file do not say what machines they are: they count as one type.
        groups[frozenset(group.machine for group in placed)].append(one)
    return groups


def _outliers_among(observations: Sequence[Observation]) -> Iterable[tuple[str, str]]:
    """Outliers of one workload on one set of machine types."""
    pairs: dict[tuple[object, ...], list[Observation]] = defaultdict(list)
    for one in observations:
        asked = one.allocation, one.layout, one.strategy, one.batch_per_gpu, one.accumulation_steps
        pairs[asked].append(one)
    anywhere = _Sample(observations, "of this workload on such machines")
    for same in pairs.values():
        here = _Sample(same, "of this workload, allocation and batch")
        for one in same:
            reason = (here if len(same) > 2 else anywhere).outlier_reason(one)
            if reason is not None:
                yield one.identity, reason


class _Sample:
    """Observations each of which can be compared with the median of the others."""

    def __init__(self, observations: Sequence[Observation], what: str) -> None:
        self.observations, self.what = observations, what
        self.times_s = sorted(one.step_time_s for one in observations)
        self.times_s_per_sample = sorted(
            one.step_time_s / one.samples_per_rank for one in observations
        )

    def outlier_reason(self, one: Observation) -> str | None:
        """Why one of them is an outlier, if it is."""
        others = len(self.observations) - 1
        if others == 0 or (others == 1 and one is self.observations[0]):
            return None
        time_s, samples = one.step_time_s, one.samples_per_rank
        equal_s = _median_without(self.times_s, time_s)
        proportional_s = samples * _median_without(self.times_s_per_sample, time_s / samples)
        if time_s > OUTLIER_RATIO * (longest_s := max(equal_s, proportional_s)):
            ratio, side, expected_s = time_s / longest_s, "longer", longest_s
        elif time_s * OUTLIER_RATIO < (shortest_s := min(equal_s, proportional_s)):
            ratio, side, expected_s = shortest_s / time_s, "shorter", shortest_s
        else:
            return None
        count = "the other" if others == 1 else f"{others} others"
        return (
            f"{format_seconds(time_s)} is {ratio:.0f} times {side} than the "
            f"{format_seconds(expected_s)} of {count} {self.what}"
        )


def _median_without(values: Sequence[float], value: float) -> float:
    """The median of sorted positive numbers without one of them; of an even count, geometric."""
    taken = bisect_left(values, value)
    rest = len(values) - 1
    low, high = (values[index + (index >= taken)] for index in ((rest - 1) // 2, rest // 2))
    return math.sqrt(low * high)
