"""Turn a predictive standard deviation into an interval with the stated coverage.

Normalised conformal prediction: an interval's half-width is a quantile of the leave-one-out scores
(absolute errors in predictive standard deviations) times the predictive standard deviation. With
few observations the quantile leans on a prior distribution of scores: a Student t distribution,
heavier-tailed than the normal, like the errors on jobs that were never observed. Scores of steps
with a similar share of synchronisation count most (localised conformal prediction, Guan 2023).
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from estimator.accuracy import INTERVAL_ALPHA

Array = NDArray[np.float64]

COVERAGE_RATIO = 1 - INTERVAL_ALPHA
# Degrees of freedom and scale of the prior scores, and the number of observations that they count
# for. The scale is below one, since the parameters' priors are wider than the spread of the jobs
# that they were fitted to. Scale and count lie between the best for the jobs of Pollux alone and
# the best for those of Sia alone.
_PRIOR_DEGREES_OF_FREEDOM = 6.0
_PRIOR_SCALE = 0.70
_PRIOR_COUNT = 18.0
_PRIOR_POINTS = 200
# Shares of synchronisation at which quantiles are computed; the bandwidth of the Gaussian weights
# of scores about each, and the weight of scores however far away. That is small: steps on a single
# device say next to nothing of how steps vary that a network bounds.
_GRID = np.linspace(0, 1, 6)
_BANDWIDTH = 0.2
_FLOOR_WEIGHT = 0.02
# A row extrapolates when the standard deviation that is due to the parameters exceeds a third, or
# when a count or the batch lies beyond four times the observed range.
_EXTRAPOLATION_SIGMA = 0.3
_EXTRAPOLATION_FACTOR = 4.0


@cache
def prior_scores() -> Array:
    """Quantiles, evenly spaced in probability, of the scores expected of an unobserved job."""
    from scipy.special import stdtrit

    levels = (np.arange(_PRIOR_POINTS) + 0.5) / _PRIOR_POINTS
    return np.asarray(_PRIOR_SCALE * stdtrit(_PRIOR_DEGREES_OF_FREEDOM, (1 + levels) / 2))


def quantiles_on_grid(
    scores: Array, sync_share: Array, coverage_ratio: float = COVERAGE_RATIO
) -> Array:
    """The quantile of the scores that covers the given share of steps, at each grid point.

    `scores` are |measured − predicted| / predictive standard deviation of each observation, left
    out in turn; `sync_share`, from 0 to 1, is the share of synchronisation in its step, and the
    grid is over that share. `interpolated` answers between the grid points.
    """
    prior = prior_scores()
    values = np.concatenate([np.abs(scores), prior])
    order = np.argsort(values)
    # The conformal correction (1 + 1/n) for the observation that is yet to come.
    level = min(coverage_ratio * (1 + 1 / (len(scores) + _PRIOR_COUNT)), 1.0)
    quantiles = []
    for point in _GRID:
        near = np.exp(-(((sync_share - point) / _BANDWIDTH) ** 2) / 2)
        prior_weights = np.full(len(prior), _PRIOR_COUNT / len(prior))
        cumulated = np.cumsum(np.concatenate([_FLOOR_WEIGHT + near, prior_weights])[order])
        at = np.searchsorted(cumulated, level * cumulated[-1])
        quantiles.append(values[order][min(at, len(order) - 1)])
    return np.array(quantiles)


def interpolated(quantiles: Array, sync_share: Array) -> Array:
    """The quantiles of `quantiles_on_grid` at shares between its grid points."""
    return np.asarray(np.interp(sync_share, _GRID, quantiles))


def extrapolates(rows: Array, observed: Array, parameter_sigma: Array) -> NDArray[np.bool_]:
    """Which rows not to trust: the parameters are uncertain there, or nothing like them was seen.

    `rows` and `observed` are positive features, one row each; `parameter_sigma` is the standard
    deviation of log step time at `rows` that is due to the parameters.
    """
    is_uncertain = np.asarray(parameter_sigma > _EXTRAPOLATION_SIGMA)
    if not len(observed):
        return is_uncertain
    above = (rows > _EXTRAPOLATION_FACTOR * observed.max(axis=0)).any(axis=1)
    below = (rows * _EXTRAPOLATION_FACTOR < observed.min(axis=0)).any(axis=1)
    return np.asarray(is_uncertain | above | below)
