"""Weigh observations by how far they are from a fit, unless others of the same step agree."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from estimator.calibrate import gaussian_process
from estimator.calibrate.priors import Array

# Degrees of freedom of the Student t distribution of an observation's error.
_DEGREES_OF_FREEDOM = 4.0
# An observation outside the 99.9 % interval of a normal variable is an outlier, until so many
# observations of the same row agree.
_OUTLIER_Z = 3.29
_CONFIRMED = 3
# Correlation between errors of the model in runs of one row: what it does not know of the row is
# the same in each, and about as large as their noise (`gaussian_process`).
_INTRACLASS_CORRELATION = 0.5


def effective_ratio(weights: Array, row_of: NDArray[np.intp]) -> Array:
    """What each observation says of the model as a share of what it would say as the only run.

    n runs of one row say as much as n / (1 + (n − 1)·ρ) independent ones, less than 1 / ρ (the
    design effect of Kish 1965, Survey Sampling), so that no row repeated often outweighs others.
    """
    runs = np.bincount(row_of, weights)[row_of]
    return np.asarray(1 / (1 + np.maximum(runs - 1, 0) * _INTRACLASS_CORRELATION))


def leverage(rows: Array, jacobian: Array) -> Array:
    """How much a fit with this `jacobian`, of which `rows` are some, follows each of these."""
    return np.asarray(((rows @ np.linalg.inv(jacobian.T @ jacobian)) * rows).sum(axis=1))


def robust_weights(
    errors: Array, jacobian: Array, observation_weights: Array, copy_of: NDArray[np.intp]
) -> Array:
    """Weights of observations by their standardised residuals, 0 to 1.

    `errors` and `jacobian` are of all observations, then of the parameters' priors, under the
    `observation_weights` so far. A Student t distribution's weights, with those outside the 99.9 %
    interval down-weighted further. Residuals are studentised: divided by √(1 − leverage), since an
    observation, with its copies (`copy_of` says of which it is one), pulls the fit towards itself.
    """
    count = len(observation_weights)
    of_copies = np.bincount(copy_of, leverage(jacobian[:count], jacobian))[copy_of]
    variance = observation_weights * np.maximum(1 - of_copies, 1e-6)
    z = np.maximum(np.abs(errors[:count]) / np.sqrt(variance), 1e-9)
    student = (_DEGREES_OF_FREEDOM + 1) / (_DEGREES_OF_FREEDOM + z**2)
    return np.asarray(np.minimum(student, 1) * np.minimum(1, _OUTLIER_Z / z) ** 2)


def robust_loss(z: Array) -> Array:
    """The loss of residuals, in standard deviations, of which `robust_weights` are the weights.

    Its derivative is z times the weight: half the square up to 1, then that of a Student t
    distribution and, for outliers, no more than a bound.
    """
    z, m = np.abs(z), _DEGREES_OF_FREEDOM
    near, student = np.minimum(z, 1), np.clip(z, 1, _OUTLIER_Z)
    far = np.maximum(z, _OUTLIER_Z)
    tail = np.log((1 + m / _OUTLIER_Z**2) / (1 + m / far**2)) * _OUTLIER_Z**2 / m
    return np.asarray(near**2 / 2 + (m + 1) / 2 * (np.log((m + student**2) / (m + 1)) + tail))


def confirmed(
    weights: Array,
    unweighted: Array,
    row_of: NDArray[np.intp],
    residuals: Array,
    sync_share: Array,
) -> tuple[Array, Array]:
    """Robust `weights`, restored for observations that agree on a row; each row's nugget variance.

    `unweighted` are those that no robust fit has changed. Three or more that agree within the noise
    are no outliers, however far the model is from them: the row has an effect of its own. Where
    others of the row contradict them, copies of one value, which no two runs share to the last
    digit, speak with one voice: most of the distinct values have to agree, and copies count
    together as less than two (`effective_ratio`).
    """
    count = int(row_of.max(initial=-1)) + 1
    weights, nugget = weights.copy(), np.zeros(count)
    variance = gaussian_process.marginal_variance(sync_share)
    for row in np.flatnonzero(np.bincount(row_of, minlength=count) >= _CONFIRMED):
        members = np.flatnonzero(row_of == row)
        distinct = np.unique(residuals[members])
        median = np.median(distinct)
        farthest = _OUTLIER_Z * np.sqrt(gaussian_process.noise_variance(sync_share[members]))
        near = np.abs(residuals[members] - median) < farthest
        is_most = 2 * np.sum(np.abs(distinct - median) < farthest[0]) > len(distinct)
        if near.sum() >= _CONFIRMED and is_most:
            weights[members] = np.where(near, unweighted[members], weights[members])
            nugget[row] = max(median**2 - variance[members[0]], 0.0)
        else:
            copy_of = np.searchsorted(distinct, residuals[members])
            weights[members] *= effective_ratio(np.ones(len(members)), copy_of)
    return weights, nugget
