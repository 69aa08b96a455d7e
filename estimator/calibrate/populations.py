"""Tell two populations of machines of one name, and model steps on each apart.

A step waits for its slowest node: where a share p of nodes is slow, a step on n of them is slow
with the probability 1 − (1 − p)ⁿ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimator.calibrate.priors import Array

# Two populations differ by this much at least.
_LEAST_SHIFT_RATIO = 0.05
# Standard errors between both, as for `drift`.
_LEAST_Z = 4.5
# Observation noise between two runs of the same step is at least about this (`gaussian_process`).
_LEAST_SIGMA = 0.02
# Steps of each of two populations, and the share of variance that two groups may leave: normal
# values cut in two leave 1 − 2/π = 0.36, uniform ones a quarter.
_LEAST_POPULATION = 4
_MOST_WITHIN_RATIO = 0.12


@dataclass(frozen=True, slots=True, kw_only=True)
class Populations:
    """Machines of one name whose steps fall into two groups, one `ratio` times as long."""

    name: str
    ratio: float
    slower: int
    steps: int

    def __str__(self) -> str:
        return (
            f"steps on {self.name} fall into two groups: {self.slower} of {self.steps} take "
            f"{self.ratio:.2f} times as long as the others; name the unlike machines apart"
        )


def populations(name: str, residuals: Array) -> Populations | None:
    """Two groups of log(observed / expected), far apart and each close together, else None."""
    is_slow = slower_ones(residuals)
    if is_slow is None:
        return None
    shift = float(residuals[is_slow].mean() - residuals[~is_slow].mean())
    count = int(is_slow.sum())
    return Populations(name=name, ratio=math.exp(shift), slower=count, steps=len(residuals))


def slower_ones(residuals: Array) -> NDArray[np.bool_] | None:
    """Which residuals are of the slower of two populations, None where there is but one.

    The cut is the one that leaves least variance within both groups (Fisher 1958). Of one normal
    population it leaves 36 % of the variance; two groups have to leave far less.
    """
    order = np.argsort(residuals, kind="stable")
    values, steps = residuals[order], len(residuals)
    if steps < 2 * _LEAST_POPULATION:
        return None
    # Sum of squares between two groups, the shorter's values adding to `below`; the mean is 0.
    values = values - values.mean()
    shorter = np.arange(_LEAST_POPULATION, steps - _LEAST_POPULATION + 1)
    below = np.cumsum(values)[shorter - 1]
    between = below**2 * steps / (shorter * (steps - shorter))
    best = int(np.argmax(between))
    cut, total = int(shorter[best]), float(values @ values)
    within = max(total - float(between[best]), 0.0)
    shift = float(values[cut:].mean() - values[:cut].mean())
    is_apart = within < _MOST_WITHIN_RATIO * total and math.expm1(shift) > _LEAST_SHIFT_RATIO
    if not is_apart or shift < _LEAST_Z * max(math.sqrt(within / steps), _LEAST_SIGMA):
        return None
    is_slow = np.zeros(steps, dtype=bool)
    is_slow[order[cut:]] = True
    return is_slow


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TwoSpeeds:
    """One job on nodes of one name, a share `node_ratio` of which is slower.

    `is_slow` says which observed steps were; these take e^`log_ratio` times as long.
    """

    log_ratio: float
    node_ratio: float
    is_slow: NDArray[np.bool_]

    def slow_probability(self, nodes: Array) -> Array:
        """How probably a step on so many nodes has a slow one among them."""
        return np.asarray(1 - (1 - self.node_ratio) ** nodes)

    def log_shift(self, nodes: Array) -> Array:
        """How much longer, in logarithms, the more probable step is than that of fast nodes."""
        return np.where(self.slow_probability(nodes) > 0.5, self.log_ratio, 0.0)

    def wider(self, nodes: Array, coverage_ratio: float) -> Array:
        """What an interval that covers so many steps needs to reach those of the other speed."""
        slow = self.slow_probability(nodes)
        is_needed = np.minimum(slow, 1 - slow) > 1 - coverage_ratio
        return np.where(is_needed, self.log_ratio, 0.0)


def two_speeds(
    residuals: Array, row_of: NDArray[np.intp], nodes: Array, weights: Array
) -> TwoSpeeds | None:
    """Two populations among the steps of one job, in order of arrival, or None.

    They are told by steps seen more than once: one has to be in both groups, or else the groups may
    be what the model does not know of rows. Where one group follows the other, something has
    changed: nodes taken at random would alternate twice as often as is asked here.
    """
    is_slow = slower_ones(residuals)
    if is_slow is None or not np.intersect1d(row_of[is_slow], row_of[~is_slow]).size:
        return None
    slow, steps = int(is_slow.sum()), len(is_slow)
    if np.count_nonzero(np.diff(is_slow)) < slow * (steps - slow) / steps:
        return None
    return TwoSpeeds(
        log_ratio=float(residuals[is_slow].mean() - residuals[~is_slow].mean()),
        node_ratio=_slow_node_ratio(is_slow, nodes, weights),
        is_slow=is_slow,
    )


def _slow_node_ratio(is_slow: NDArray[np.bool_], nodes: Array, weights: Array) -> float:
    """The share of slow nodes by which as many steps are expected to be slow as were."""
    from scipy.optimize import brentq

    seen = weights @ is_slow
    return float(brentq(lambda share: weights @ (1 - (1 - share) ** nodes) - seen, 0.0, 1.0))
