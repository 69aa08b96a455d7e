"""Fit the performance model's parameters to observations, some of which may be wrong.

Maximum a posteriori least squares in log space, reweighted until observations that contradict the
others count little (an M-estimator). Its loss is bounded, so that it has several optima: one
outlier of leverage may cast out the good observations instead. Where any is cast out, fits that
begin without one row each compete by that loss (as the MM-estimators of Yohai 1987 begin from a fit
that outliers do not reach).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from estimator.calibrate import gaussian_process
from estimator.calibrate.design_matrix import Dataset
from estimator.calibrate.mixture import OUTLIER_WEIGHT
from estimator.calibrate.performance_model import ModelValues
from estimator.calibrate.priors import Array
from estimator.calibrate.robust_weights import (
    effective_ratio,
    leverage,
    robust_loss,
    robust_weights,
)

# Iteratively reweighted least squares: most iterations, and the change that counts as converged.
_MOST_ITERATIONS = 6
_TOLERANCE = 0.01
# Of MINPACK. Short first steps: a long one may end in a local optimum far from the priors.
_MINPACK = {"factor": 1.0, "xtol": 1e-6, "ftol": 1e-6, "maxfev": 100}
# Of fewer rows none says which is wrong, and beside more no single one decides; between, so many
# are left out in turn.
_FEWEST_ROWS, _MOST_ROWS, _MOST_STARTS = 5, 40, 10
# A job's only observation contradicts nothing but the priors, which know no step of this job. It is
# believed up to this factor from their medians, where the tail of a Student t distribution of an
# engine's errors (of sigma 0.2) falls to the odds of a mistake: 1 in 100, of any size up to 1,000.
_MOST_ALONE_RATIO = 7.0
# Next to nothing: weights divide.
_LEFT_OUT_WEIGHT = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterFit:
    """Parameters standardised by their priors, and the weights of observations, 0 to 1."""

    standardised: Array
    weights: Array


def fit_parameters(
    data: Dataset, model_at: Callable[[Array], ModelValues], prior_sigmas: Array
) -> ParameterFit:
    """The best of several robust fits; `model_at` gives the model at standardised parameters."""
    search = _Search(data, model_at, prior_sigmas)
    none = np.zeros(len(prior_sigmas))
    if search.is_believed_alone():
        fit = ParameterFit(standardised=none, weights=np.ones(1))
        return replace(fit, standardised=search.reweighted(fit, most_iterations=1).standardised)
    fit = search.reweighted(ParameterFit(standardised=none, weights=np.ones(len(data.rows))))
    if not (fit.weights < OUTLIER_WEIGHT).any():
        return fit
    starts = [fit, *search.without_one_row(fit)]
    if len(starts) > 1:
        fit = search.reweighted(min(starts, key=search.loss))
    # Before they were known to be outliers they may have led to another local optimum.
    return search.reweighted(ParameterFit(standardised=none, weights=fit.weights))


class _Search:
    """Robust fits of one model to one set of observations."""

    def __init__(
        self, data: Dataset, model_at: Callable[[Array], ModelValues], prior_sigmas: Array
    ) -> None:
        self.data, self.model_at, self.prior_sigmas = data, model_at, prior_sigmas
        self.row_of = data.distinct()[1]
        # Of few rows that is no sign of a mistake: three observations confirm each other.
        values = np.column_stack([self.row_of, data.log_times])
        self.copy_of = np.arange(len(values))
        if self.row_of.max(initial=-1) + 1 >= _FEWEST_ROWS:
            self.copy_of = np.unique(values, axis=0, return_inverse=True)[1].reshape(-1)

    def is_believed_alone(self) -> bool:
        """Whether there is but one observation, within a factor of what the priors say."""
        if len(self.data.rows) != 1:
            return False
        model = self.model_at(np.zeros(len(self.prior_sigmas)))
        away = np.abs(model.log_step - self.data.log_times).item()
        return bool(away < np.log(_MOST_ALONE_RATIO))

    def reweighted(
        self, start: ParameterFit, most_iterations: int = _MOST_ITERATIONS
    ) -> ParameterFit:
        """Iteratively reweighted least squares: alternate between parameters and weights."""
        from scipy.optimize import leastsq

        parameters, weights = start.standardised, start.weights
        for _ in range(most_iterations):
            effective = effective_ratio(self.data.weights * weights, self.row_of)
            variance = gaussian_process.marginal_variance(self.model_at(parameters).sync_share)
            scale = np.sqrt(self.data.weights * weights * effective / variance)
            before, weights_before = parameters, weights
            # Asked for the errors at a point, then for their derivatives there.
            at = lru_cache(maxsize=1)(partial(self._errors, scale=scale))
            parameters = leastsq(
                lambda z, at=at: at(z.tobytes())[0],
                before,
                Dfun=lambda z, at=at: at(z.tobytes())[1],
                diag=np.ones(len(before)),
                full_output=True,
                **_MINPACK,
            )[0]
            weights = robust_weights(*at(parameters.tobytes()), weights * effective, self.copy_of)
            change = np.abs(weights - weights_before).max()
            if max(change, np.abs(parameters - before).max()) < _TOLERANCE:
                break
        return ParameterFit(standardised=parameters, weights=weights)

    def without_one_row(self, fit: ParameterFit) -> Iterator[ParameterFit]:
        """Fits to all rows but one, from the medians of the priors.

        Those first that a fit has cast out, then those on which the parameters rest most.
        """
        none, ones = np.zeros(len(self.prior_sigmas)), np.ones(len(self.data.rows))
        model = self.model_at(none)
        scale = np.sqrt(1 / gaussian_process.marginal_variance(model.sync_share))
        _, first = np.unique(self.row_of, return_index=True)
        jacobian = (model.jacobian * self.prior_sigmas * scale[:, None])[first]
        of_rows = leverage(jacobian, np.vstack([jacobian, np.eye(len(none))]))
        if not _FEWEST_ROWS <= len(first) <= _MOST_ROWS:
            return
        of_rows[self.row_of[fit.weights < OUTLIER_WEIGHT]] += 1
        for row in np.argsort(-of_rows, kind="stable")[:_MOST_STARTS]:
            weights = np.where(self.row_of == row, _LEFT_OUT_WEIGHT, ones)
            yield self.reweighted(
                ParameterFit(standardised=none, weights=weights), most_iterations=1
            )

    def loss(self, fit: ParameterFit) -> float:
        """What a fit minimises: the bounded loss of all observations, and that of the priors."""
        model = self.model_at(fit.standardised)
        sigma = np.sqrt(gaussian_process.marginal_variance(model.sync_share))
        z = (model.log_step - self.data.log_times) / sigma
        counts = self.data.weights * effective_ratio(self.data.weights, self.row_of)
        return float(counts @ robust_loss(z) + fit.standardised @ fit.standardised / 2)

    def _errors(self, parameters: bytes, scale: Array) -> tuple[Array, Array]:
        """Standardised errors of observations, then of parameters from their priors; jacobian."""
        standardised = np.frombuffer(parameters)
        model = self.model_at(standardised)
        errors = np.concatenate([(model.log_step - self.data.log_times) * scale, standardised])
        jacobian = model.jacobian * self.prior_sigmas * scale[:, None]
        return errors, np.vstack([jacobian, np.eye(len(standardised))])
