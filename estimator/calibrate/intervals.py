"""Turn a predictive standard deviation into an interval with the stated coverage.

Normalised conformal prediction: an interval's half-width is a quantile of the leave-one-out scores
(absolute errors in predictive standard deviations) times the predictive standard deviation. With
few observations the quantile leans on a prior distribution of scores: a Student t distribution,
heavier-tailed than the normal, like the errors on jobs that were never observed.

Some machines scatter: the same step takes 20 to 50 % longer in one run than in another; and some
jobs follow the performance model less than others. How much is estimated first, under a Student t
distribution: a variance on top of the predictive one, and a factor on the latter. That is partial
pooling: with few observations a job is taken to be like the others on its machines, and these like
all jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from estimator.calibrate.performance_model import Array
from estimator.coefficients import INTERVAL_ALPHA

COVERAGE_RATIO = 1 - INTERVAL_ALPHA
# Degrees of freedom and scale of the prior scores, and the number of observations that they count
# for. The scale is below one, since the parameters' priors are wider than the spread of the jobs
# that they were fitted to. Scale and count lie between the best for the jobs of Pollux alone and
# the best for those of Sia alone.
_PRIOR_DEGREES_OF_FREEDOM = 6.0
_PRIOR_SCALE = 0.70
PRIOR_COUNT = 18.0
_PRIOR_POINTS = 200
# The grid of a job's spread: standard deviations of log step time by which its runs may scatter
# beyond what is predicted, and factors on the predictive standard deviation; the degrees of freedom
# of its errors.
_SCATTER_SIGMAS = np.array([0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6])
_INFLATIONS = np.array([0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0])
_SPREAD_DEGREES_OF_FREEDOM = 6.0
# A row extrapolates when the standard deviation that is due to the parameters exceeds a third, or
# when a count or the batch lies beyond four times the observed range.
_EXTRAPOLATION_SIGMA = 0.3
_EXTRAPOLATION_FACTOR = 4.0
# A wider interval than a factor of 3.3 to either side says no more than this one.
_LARGEST_HALF_WIDTH = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadPrior:
    """What is believed of a job's spread before anything was observed.

    Scatter has an exponential prior of mean `scatter_mean`, the factor on the predictive standard
    deviation a log-normal one. This prior counts for `jobs` other jobs of a machine.
    """

    scatter_mean: float = 0.2
    inflation_median: float = 0.82
    inflation_sigma: float = 0.5
    jobs: float = 0.3

    def log_density(self) -> Array:
        """Of each point of the grid, (inflations, scatters), up to a constant."""
        z = np.log(_INFLATIONS / self.inflation_median) / self.inflation_sigma
        return np.asarray(-(z**2)[:, None] / 2 - _SCATTER_SIGMAS / self.scatter_mean)


# Chosen on the tables that `benchmarks/calibration_pairs.py` judges, each source left out in turn.
SPREAD_PRIOR = SpreadPrior()
# Beside an engine, whose errors widen intervals already, these are wide enough
# (`benchmarks/published_accuracy.py`, after 8).
ENGINE_SPREAD_PRIOR = SpreadPrior(scatter_mean=0.1, inflation_median=1.0, inflation_sigma=0.01)


class Spread:
    """How much steps of one job vary beyond what is predicted, from its left-out errors.

    `errors` are log(predicted / observed) of observations left out in turn, `variance` the
    predicted ones. `peers` are posteriors of other jobs on the same machines; `posterior`, of this
    job by itself, is one for them. `inflation_variance` is the posterior mean of the squared
    factor, `scatter_variance` that of the variance on top, in units of scores.
    """

    def __init__(
        self,
        errors: Array,
        variance: Array,
        peers: Sequence[Array] = (),
        prior: SpreadPrior = SPREAD_PRIOR,
    ) -> None:
        squares = errors[:, None, None] ** 2
        predicted = variance[:, None, None] * _PRIOR_SCALE**2
        total = predicted * _INFLATIONS[:, None] ** 2 + _SCATTER_SIGMAS**2
        freedom = _SPREAD_DEGREES_OF_FREEDOM
        log_t = -(freedom + 1) / 2 * np.log1p(squares / total / freedom) - np.log(total) / 2
        log_likelihood, log_alone = log_t.sum(axis=0), prior.log_density()
        self.posterior = _normalised(log_likelihood + log_alone)
        log_pooled = log_alone
        if peers:
            pooled = prior.jobs * _normalised(log_alone) + np.sum(peers, axis=0)
            # Where it is too small for a float: log(0) is −∞, which the sum below takes.
            with np.errstate(divide="ignore"):
                log_pooled = np.log(pooled)
        weights = _normalised(log_likelihood + log_pooled)
        self.inflation_variance = float(weights.sum(axis=1) @ _INFLATIONS**2)
        self.scatter_variance = float(weights.sum(axis=0) @ _SCATTER_SIGMAS**2) / _PRIOR_SCALE**2


def _normalised(log_density: Array) -> Array:
    """Probabilities that sum to 1, however small the largest of them is."""
    density = np.exp(log_density - log_density.max())
    return np.asarray(density / density.sum())


def away_from_others(log_times: Array, row_of: NDArray[np.intp]) -> tuple[Array, NDArray[np.bool_]]:
    """How far each run is from the mean of the others of its step, and which have others.

    Divided by what the variance of a difference from a mean of n − 1 is above that of one run. It
    is n / (n − 1) times as far from their mean as from that of all, so that √(n / (n − 1)) remains.
    """
    of_row = np.bincount(row_of, minlength=1)
    mean = np.bincount(row_of, log_times, minlength=1) / np.maximum(of_row, 1)
    count = of_row[row_of]
    ratio = np.sqrt(count / np.maximum(count - 1, 1))
    return np.abs(log_times - mean[row_of]) * ratio, count > 1


@cache
def prior_scores() -> Array:
    """Quantiles, evenly spaced in probability, of the scores expected of an unobserved job."""
    from scipy.special import stdtrit

    levels = (np.arange(_PRIOR_POINTS) + 0.5) / _PRIOR_POINTS
    return np.asarray(_PRIOR_SCALE * stdtrit(_PRIOR_DEGREES_OF_FREEDOM, (1 + levels) / 2))


def score_quantile(scores: Array) -> float:
    """The quantile of the scores that covers COVERAGE_RATIO of steps.

    `scores` are |measured − predicted| / predictive standard deviation of each observation, left
    out in turn.
    """
    prior = prior_scores()
    values = np.concatenate([np.abs(scores), prior])
    weights = np.concatenate([np.ones(len(scores)), np.full(len(prior), PRIOR_COUNT / len(prior))])
    order = np.argsort(values)
    # The conformal correction (1 + 1/n) for the observation that is yet to come.
    level = min(COVERAGE_RATIO * (1 + 1 / (len(scores) + PRIOR_COUNT)), 1.0)
    cumulated = np.cumsum(weights[order])
    at = np.searchsorted(cumulated, level * cumulated[-1])
    return float(values[order][min(at, len(order) - 1)])


def half_width(quantiles: Array, variance: Array) -> Array:
    """Half-widths of intervals, in logarithms, from score quantiles and predictive variances."""
    return np.asarray(np.minimum(quantiles * np.sqrt(variance), _LARGEST_HALF_WIDTH))


def extrapolates(rows: Array, observed: Array, parameter_sigma: Array) -> NDArray[np.bool_]:
    """Which rows not to trust: the parameters are uncertain there, or nothing like them was seen.

    `rows` are positive features, one row each, `observed` the least and the largest of each that
    were observed, if any were; `parameter_sigma` is the standard deviation of log step time at
    `rows` that is due to the parameters.
    """
    is_uncertain = np.asarray(parameter_sigma > _EXTRAPOLATION_SIGMA)
    if not len(observed):
        return is_uncertain
    least, largest = observed
    is_beyond = (rows * _EXTRAPOLATION_FACTOR < least) | (rows > _EXTRAPOLATION_FACTOR * largest)
    return np.asarray(is_uncertain | is_beyond.any(axis=1))
