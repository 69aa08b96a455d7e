"""Combine the posterior of the performance model's parameters with that of its residuals.

Universal kriging, or Gaussian process regression with explicit basis functions (Rasmussen and
Williams 2006, section 2.7): the performance model is linearised about its fit, its standardised
parameters have unit normal priors and its residuals are a Gaussian process, so that predictive
means, variances and leave-one-out errors are linear algebra.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.calibrate import gaussian_process
from estimator.calibrate.gaussian_process import Inputs
from estimator.calibrate.priors import Array

# A quantile of the leave-one-out scores needs no more observations than this.
_SCORED_OBSERVATIONS = 200


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingData:
    """Residuals of the fitted performance model at distinct inputs.

    `parameters` are the fitted ones, standardised by their priors; `jacobian` is d log(step) /
    d parameter, (inputs, parameters). `residuals` are weighted means of log(measured / fitted) at
    each input and `noise_variance` is that of these means; `nugget_variance` is that of an effect
    which an input shares with no other.

    Of each observation, `observation` is its place in the table, `observed_input` the index of its
    input, `observed_residual` its own log(measured / fitted), and `observed_noise_variance` the
    variance of its noise, which does not depend on its weight in the robust fit.
    """

    inputs: Inputs
    parameters: Array
    jacobian: Array
    residuals: Array
    noise_variance: Array
    nugget_variance: Array
    observation: NDArray[np.intp]
    observed_input: NDArray[np.intp]
    observed_residual: Array
    observed_noise_variance: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeftOut:
    """Observations predicted without them: log(predicted / observed), and its predicted variance.

    `observation` are their places in the table, `sync_share` the shares of synchronisation.
    """

    observation: NDArray[np.intp]
    log_ratio: Array
    variance: Array
    sync_share: Array


class Posterior:
    """Predictive mean and variance of log step time about the fitted performance model."""

    def __init__(self, training: TrainingData) -> None:
        from scipy.linalg import cho_factor

        self._training = training
        covariance = self._covariance(training.inputs) + np.diag(training.noise_variance)
        self._factor = cho_factor(covariance, check_finite=False) if len(covariance) else None
        jacobian = training.jacobian
        self._solved_jacobian = self._solve(jacobian)
        precision = np.eye(jacobian.shape[1]) + jacobian.T @ self._solved_jacobian
        self.parameter_covariance = np.linalg.inv(precision)
        gradient = self._solved_jacobian.T @ training.residuals - training.parameters
        self.parameter_shift = self.parameter_covariance @ gradient
        self._dual_weights = self._solve(training.residuals - jacobian @ self.parameter_shift)

    def mean(self, inputs: Inputs, jacobian: Array) -> Array:
        """What to add to the performance model's log step time at inputs."""
        return self._mean(self._covariance(inputs), jacobian)

    def mean_and_variance(self, inputs: Inputs, jacobian: Array) -> tuple[Array, Array]:
        """That, and the predictive variance of an observed log step time, its noise included."""
        cross = self._covariance(inputs)
        prior_variance = gaussian_process.kernel_diagonal(inputs)
        residual = np.maximum(prior_variance - self._explained_variance(cross), 0)
        parameters = self.parameter_variance(jacobian - cross @ self._solved_jacobian)
        noise = gaussian_process.noise_variance(inputs.sync_share)
        return self._mean(cross, jacobian), residual + parameters + noise

    def _mean(self, cross: Array, jacobian: Array) -> Array:
        return np.asarray(jacobian @ self.parameter_shift + cross @ self._dual_weights)

    def _explained_variance(self, cross: Array) -> Array:
        """The part of the residuals' prior variance that the training data explain."""
        from scipy.linalg.lapack import dtrtrs

        if self._factor is None:
            return np.zeros(len(cross))
        # cho_factor leaves U with UᵀU = K, so that |U⁻ᵀk|² = kᵀK⁻¹k.
        half, _ = dtrtrs(self._factor[0], cross.T, trans=1)
        return np.asarray((half * half).sum(axis=0))

    def parameter_variance(self, jacobian: Array) -> Array:
        """Variance of log step time that is due to the uncertainty of the parameters."""
        return np.asarray(((jacobian @ self.parameter_covariance) * jacobian).sum(axis=1))

    @cached_property
    def left_out(self) -> LeftOut:
        """Errors of observations predicted from all other inputs; of many, some spread evenly.

        An outlier that the robust fit has down-weighted has the noise of an ordinary observation:
        outliers will occur among future observations too, and the intervals have to cover those.
        """
        training = self._training
        stride = max(1, len(training.observed_input) // _SCORED_OBSERVATIONS)
        chosen = training.observed_input[::stride]
        inputs, place = np.unique(chosen, return_inverse=True)
        # With P the inverse of the whole covariance (kernel, noise and parameters), leaving out i
        # gives the error (P·y)ᵢ / Pᵢᵢ and the variance 1 / Pᵢᵢ (Rasmussen and Williams, eq. 5.12).
        about_prior = training.residuals + training.jacobian @ training.parameters
        inner = self._solved_jacobian @ self.parameter_covariance
        solved = self._solve(about_prior) - inner @ (self._solved_jacobian.T @ about_prior)
        unit = np.zeros((len(inputs), len(about_prior)))
        unit[np.arange(len(inputs)), inputs] = 1.0
        # Of K⁻¹; that of P is less by what the parameters explain.
        diagonal = self._explained_variance(unit)
        diagonal -= np.einsum("ij,ij->i", inner[inputs], self._solved_jacobian[inputs])
        diagonal = np.maximum(diagonal, 1e-12)
        left_out = (solved[inputs] / diagonal - training.residuals[inputs])[place]
        variance = np.maximum(1 / diagonal - training.noise_variance[inputs], 0)[place]
        return LeftOut(
            observation=training.observation[::stride],
            log_ratio=-(training.observed_residual[::stride] + left_out),
            variance=variance + training.observed_noise_variance[::stride],
            sync_share=training.inputs.sync_share[chosen],
        )

    def _solve(self, values: Array) -> Array:
        from scipy.linalg import cho_solve

        factor: Any = self._factor
        if factor is None:
            return values
        return np.asarray(cho_solve(factor, values, check_finite=False))

    def _covariance(self, inputs: Inputs) -> Array:
        """Covariance of the residuals at inputs with those at the training inputs."""
        training = self._training.inputs
        cross = gaussian_process.kernel(inputs, training)
        for place in np.flatnonzero(self._training.nugget_variance):
            same = (inputs.rows == training.rows[place]).all(axis=1)
            cross[same, place] += self._training.nugget_variance[place]
        return cross
