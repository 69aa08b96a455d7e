"""Turn a predictive spread into an interval that covers as often as it says.

Conformal: the width is the quantile of how far observations were from what all others said of
them, in units of the predicted spread. With few observations it leans on scores known beforehand:
a Student law, heavier than normal, which is how errors of the form fall on jobs it never saw.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from estimator.accuracy import INTERVAL_ALPHA

Array = NDArray[np.float64]

COVERAGE_RATIO = 1 - INTERVAL_ALPHA
# Degrees of freedom and scale of the scores known beforehand, and how many observations they weigh.
# The scale is below one, since priors are kept wider than the jobs that they were found on. Scale
# and weight lie between what suits the jobs of Pollux and those of Sia best, each alone.
_SHIPPED_FREEDOM = 6.0
_SHIPPED_SCALE = 0.70
_SHIPPED_WEIGHT = 18.0
_SHIPPED_POINTS = 200
# Places at which factors are found, how far a score is felt from its own, and how much everywhere:
# steps on one device say next to nothing of how a network varies.
_KNOTS = np.linspace(0, 1, 6)
_REACH = 0.2
_ANYWHERE = 0.02
# A row is far from what was seen when the law's own uncertainty exceeds a third, or when a count
# or the batch lies beyond four times the range seen.
_FAR_LOG_SPREAD = 0.3
_FAR_FACTOR = 4.0


@cache
def shipped_scores() -> Array:
    """Absolute scores expected of a job that was never seen, evenly over their distribution."""
    from scipy.special import stdtrit

    levels = (np.arange(_SHIPPED_POINTS) + 0.5) / _SHIPPED_POINTS
    return np.asarray(_SHIPPED_SCALE * stdtrit(_SHIPPED_FREEDOM, (1 + levels) / 2))


def knot_factors(scores: Array, places: Array, coverage_ratio: float = COVERAGE_RATIO) -> Array:
    """Spreads to either side that cover the given share of rows, at each of a few places.

    `scores` are |measured − predicted from the others| / predicted spread of each observation;
    `places`, from 0 to 1, say where it lies (how much synchronisation rules it), and those near
    a knot count most for it. `factors_at` answers from them.
    """
    shipped = shipped_scores()
    values = np.concatenate([np.abs(scores), shipped])
    order = np.argsort(values)
    # One more observation, the next one, is as likely to lie anywhere among those seen.
    level = min(coverage_ratio * (1 + 1 / (len(scores) + _SHIPPED_WEIGHT)), 1.0)
    factors = []
    for knot in _KNOTS:
        near = np.exp(-(((places - knot) / _REACH) ** 2) / 2)
        each = np.full(len(shipped), _SHIPPED_WEIGHT / len(shipped))
        below = np.cumsum(np.concatenate([_ANYWHERE + near, each])[order])
        at = np.searchsorted(below, level * below[-1])
        factors.append(values[order][min(at, len(order) - 1)])
    return np.array(factors)


def factors_at(knots: Array, asked: Array) -> Array:
    """The factors at places between those of `knot_factors`."""
    return np.asarray(np.interp(asked, _KNOTS, knots))


def extrapolates_far(rows: Array, seen: Array, log_spread: Array) -> NDArray[np.bool_]:
    """Which rows not to trust: the law is unsure of them, or nothing like them was seen.

    `rows` and `seen` are positive features, one row each; `log_spread` is the law's own standard
    deviation of log step time at `rows`.
    """
    unsure = np.asarray(log_spread > _FAR_LOG_SPREAD)
    if not len(seen):
        return unsure
    above = (rows > _FAR_FACTOR * seen.max(axis=0)).any(axis=1)
    below = (rows * _FAR_FACTOR < seen.min(axis=0)).any(axis=1)
    return np.asarray(unsure | above | below)
