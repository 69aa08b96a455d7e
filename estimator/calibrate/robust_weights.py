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


def robust_weights(errors: Array, jacobian: Array, observation_weights: Array) -> Array:
    """Weights of observations by their standardised residuals, 0 to 1.

    `errors` and `jacobian` are of all observations, then of the parameters' priors, under the
    `observation_weights` so far. A Student t distribution's weights, with those outside the 99.9 %
    interval down-weighted further. Residuals are studentised: divided by √(1 − leverage), since an
    observation pulls the fit towards itself.
    """
    count = len(observation_weights)
    rows = jacobian[:count]
    leverage = ((rows @ np.linalg.inv(jacobian.T @ jacobian)) * rows).sum(axis=1)
    variance = observation_weights * np.maximum(1 - leverage, 1e-6)
    z = np.maximum(np.abs(errors[:count]) / np.sqrt(variance), 1e-9)
    student = (_DEGREES_OF_FREEDOM + 1) / (_DEGREES_OF_FREEDOM + z**2)
    return np.asarray(np.minimum(student, 1) * np.minimum(1, _OUTLIER_Z / z) ** 2)


def confirmed(
    weights: Array,
    unweighted: Array,
    row_of: NDArray[np.intp],
    residuals: Array,
    sync_share: Array,
) -> tuple[Array, Array]:
    """Robust `weights`, restored for observations that agree on a row; each row's nugget variance.

    `unweighted` are those that no robust fit has changed. Three or more that agree within the noise
    are no outliers, however far the model is from them: the row has an effect of its own.
    """
    count = int(row_of.max(initial=-1)) + 1
    weights, nugget = weights.copy(), np.zeros(count)
    variance = gaussian_process.marginal_variance(sync_share)
    for row in np.flatnonzero(np.bincount(row_of, minlength=count) >= _CONFIRMED):
        members = np.flatnonzero(row_of == row)
        median = np.median(residuals[members])
        sigma = np.sqrt(gaussian_process.noise_variance(sync_share[members]))
        near = np.abs(residuals[members] - median) < _OUTLIER_Z * sigma
        if near.sum() >= _CONFIRMED:
            weights[members] = np.where(near, unweighted[members], weights[members])
            nugget[row] = max(median**2 - variance[members[0]], 0.0)
    return weights, nugget
