"""Combine the posterior of the performance model's parameters with that of its residuals.

Universal kriging, or Gaussian process regression with explicit basis functions (Rasmussen and
Williams 2006, section 2.7): the performance model is linearised about its fit, its standardised
parameters have unit normal priors and its residuals are a Gaussian process, so that predictive
means, variances and leave-one-out errors are linear algebra.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from estimator.calibrate import gaussian_process
from estimator.calibrate.design_matrix import Dataset
from estimator.calibrate.gaussian_process import Inputs
from estimator.calibrate.performance_model import ModelValues
from estimator.calibrate.priors import Array
from estimator.calibrate.robust_weights import confirmed, effective_ratio

# The Gaussian process takes so many distinct rows, the last observed: its cost is cubic in them.
_MOST_INPUTS = 1000
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


def training_data(
    data: Dataset,
    model: ModelValues,
    parameters: Array,
    jacobian: Array,
    observation_weights: Array,
) -> TrainingData:
    """Residuals of the fitted model at the distinct rows of some observations.

    `parameters` and `jacobian` are standardised by their priors; `observation_weights` are those of
    the robust fit.
    """
    rows, row_of = data.distinct()
    first = np.full(len(rows), len(row_of))
    np.minimum.at(first, row_of, np.arange(len(row_of)))
    residuals = data.log_times - model.log_step
    noise_variance = gaussian_process.noise_variance(model.sync_share)
    weights = data.weights * observation_weights
    weights, nugget = confirmed(weights, data.weights, row_of, residuals, model.sync_share)
    # Copies of one value say little more than the value does.
    copies = np.unique(np.column_stack([row_of, residuals]), axis=0, return_inverse=True)[1]
    weights = weights * effective_ratio(np.ones(len(weights)), copies.reshape(-1))
    total = np.bincount(row_of, weights, minlength=len(rows))
    mean = np.bincount(row_of, weights * residuals, minlength=len(rows)) / total
    last = np.sort(np.argsort(first)[-_MOST_INPUTS:])
    input_of = np.full(len(rows), -1)
    input_of[last] = np.arange(len(last))
    is_kept = input_of[row_of] >= 0
    # Those that will be left out come last: their block of the inverse is cheap then.
    kept = row_of[is_kept]
    is_scored = np.isin(last, kept[_scored(kept, residuals[is_kept])])
    last = np.concatenate([last[~is_scored], last[is_scored]])
    input_of[last] = np.arange(len(last))
    at = first[last]
    return TrainingData(
        inputs=Inputs(rows=rows[last], sync_share=model.sync_share[at]),
        parameters=parameters,
        jacobian=jacobian[at],
        residuals=mean[last],
        noise_variance=noise_variance[at] / total[last],
        nugget_variance=nugget[last],
        observation=np.flatnonzero(is_kept),
        observed_input=input_of[row_of[is_kept]],
        observed_residual=residuals[is_kept],
        observed_noise_variance=(noise_variance / data.weights)[is_kept],
    )


def _scored(row_of: NDArray[np.intp], residuals: Array) -> NDArray[np.intp]:
    """Some of the observations, spread evenly; of copies of one only the first."""
    _, first = np.unique(np.column_stack([row_of, residuals]), axis=0, return_index=True)
    return np.sort(first)[:: max(1, len(first) // _SCORED_OBSERVATIONS)]


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
        self._factor: Array | None = None
        if count := len(training.noise_variance):
            covariance = gaussian_process.lower_kernel(training.inputs)
            own = training.nugget_variance + training.noise_variance
            covariance[np.arange(count), np.arange(count)] += own
            self._factor, _ = cho_factor(
                covariance, lower=True, overwrite_a=True, check_finite=False
            )
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

    def successive(
        self, inputs: Inputs, jacobian: Array, residuals: Array, noise_variance: Array
    ) -> tuple[Array, Array]:
        """Errors of further observations, each predicted from those before it, and their variances.

        `residuals` are log(measured / fitted), in order of arrival. The Cholesky factor of their
        predictive covariance gives each given those before it (Dawid 1984); noise is left out of
        the variances.
        """
        from scipy.linalg import solve_triangular

        cross = self._covariance(inputs)
        free = jacobian - cross @ self._solved_jacobian
        covariance = gaussian_process.kernel(inputs, inputs) - cross @ self._solve(cross.T)
        for same, variance in self._own_effects(inputs):
            covariance[np.ix_(same, same)] += variance
        covariance += free @ self.parameter_covariance @ free.T + np.diag(noise_variance)
        factor = np.linalg.cholesky(covariance)
        errors = solve_triangular(factor, residuals - self._mean(cross, jacobian), lower=True)
        deviations = np.diag(factor)
        return errors * deviations, np.maximum(deviations**2 - noise_variance, 0)

    def _mean(self, cross: Array, jacobian: Array) -> Array:
        return np.asarray(jacobian @ self.parameter_shift + cross @ self._dual_weights)

    def _explained_variance(self, cross: Array) -> Array:
        """The part of the residuals' prior variance that the training data explain."""
        from scipy.linalg.lapack import dtrtrs

        if self._factor is None:
            return np.zeros(len(cross))
        # L·Lᵀ = K, so that |L⁻¹k|² = kᵀK⁻¹k.
        half, _ = dtrtrs(self._factor, cross.T, lower=1)
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
        scored = _scored(training.observed_input, training.observed_residual)
        chosen = training.observed_input[scored]
        inputs, place = np.unique(chosen, return_inverse=True)
        # With P the inverse of the whole covariance (kernel, noise and parameters), leaving out i
        # gives the error (P·y)ᵢ / Pᵢᵢ and the variance 1 / Pᵢᵢ (Rasmussen and Williams, eq. 5.12).
        about_prior = training.residuals + training.jacobian @ training.parameters
        inner = self._solved_jacobian @ self.parameter_covariance
        solved = self._solve(about_prior) - inner @ (self._solved_jacobian.T @ about_prior)
        # Of K⁻¹; that of P is less by what the parameters explain.
        diagonal = self._inverse_diagonal(inputs)
        diagonal -= np.einsum("ij,ij->i", inner[inputs], self._solved_jacobian[inputs])
        diagonal = np.maximum(diagonal, 1e-12)
        left_out = (solved[inputs] / diagonal - training.residuals[inputs])[place]
        variance = np.maximum(1 / diagonal - training.noise_variance[inputs], 0)[place]
        return LeftOut(
            observation=training.observation[scored],
            log_ratio=-(training.observed_residual[scored] + left_out),
            variance=variance + training.observed_noise_variance[scored],
            sync_share=training.inputs.sync_share[chosen],
        )

    def _inverse_diagonal(self, inputs: NDArray[np.intp]) -> Array:
        """The diagonal of K⁻¹ at inputs, in rising order."""
        from scipy.linalg.lapack import dtrtri

        if self._factor is None:
            return np.zeros(0)
        # The last block of K⁻¹ is L⁻ᵀ·L⁻¹ of the last block of L.
        inverse, _ = dtrtri(self._factor[inputs[0] :, inputs[0] :], lower=1)
        return np.asarray((np.tril(inverse) ** 2).sum(axis=0)[inputs - inputs[0]])

    def _solve(self, values: Array) -> Array:
        from scipy.linalg import cho_solve

        if self._factor is None:
            return values
        return np.asarray(cho_solve((self._factor, True), values, check_finite=False))

    def _covariance(self, inputs: Inputs) -> Array:
        """Covariance of the residuals at inputs with those at the training inputs."""
        training = self._training.inputs
        cross = gaussian_process.kernel(inputs, training)
        for place in np.flatnonzero(self._training.nugget_variance):
            same = (inputs.rows == training.rows[place]).all(axis=1)
            cross[same, place] += self._training.nugget_variance[place]
        return cross

    def _own_effects(self, inputs: Inputs) -> Iterator[tuple[NDArray[np.intp], float]]:
        """Which inputs are of each row that has an effect of its own, and its variance."""
        training = self._training
        for place in np.flatnonzero(training.nugget_variance):
            same = (inputs.rows == training.inputs.rows[place]).all(axis=1)
            yield np.flatnonzero(same), float(training.nugget_variance[place])
