"""Fit the performance model to observed steps of one job on one kind of device.

Where the engine's whole step is known, the ratio of it to the model's prior prediction is an offset
of the regression, as in a generalised linear model, since the model's overlap is not the engine's:
without observations the answer is then exactly the engine's.

Maximum a posteriori least squares in log space, with the priors of `priors` and weights that make
it robust to outliers (an M-estimator); a Gaussian process (`gaussian_process`) then models the
residuals, and `mixture` weighs all that against simple forms. The interface is that of `baselines`,
with the most devices on one node as a fifth column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from estimator.calibrate import gaussian_process, intervals
from estimator.calibrate.adaptive import adapted_coverage
from estimator.calibrate.design_matrix import Dataset, design_matrix, reference_of
from estimator.calibrate.gaussian_process import Inputs
from estimator.calibrate.intervals import ENGINE_SPREAD_PRIOR, SPREAD_PRIOR, Spread, SpreadPrior
from estimator.calibrate.mixture import Mixture
from estimator.calibrate.parameter_fit import fit_parameters
from estimator.calibrate.performance_model import (
    BATCH,
    LARGEST_NODE,
    NODES,
    RANKS,
    EngineTimes,
    ModelValues,
    evaluate_model,
)
from estimator.calibrate.populations import two_speeds
from estimator.calibrate.posterior import Posterior, training_data
from estimator.calibrate.priors import (
    COMPUTE_CORRECTIONS,
    ENGINE_PRIORS,
    PARAMETERS,
    SYNC_CORRECTIONS,
    WEAK_PRIORS,
    Array,
    Priors,
    transferred,
)
from estimator.errors import WorkloadError

# The columns by whose range a row is inside or outside of the training data.
_RANGE_COLUMNS = [RANKS, NODES, BATCH, LARGEST_NODE]
# So many of the last observations are compared with the intervals of so many before them.
_MOST_SUCCESSIVE, _MOST_BEFORE = 50, 50
_ENGINE_MEDIANS = ENGINE_PRIORS.log_medians()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """Predictions for rows, in logarithms of seconds.

    Measured steps lie within `half_width` of `log_step` as often as was asked; rows that
    `extrapolates` marks are too far from all observations to be trusted. `model` holds the values
    of the fitted performance model without the residuals' Gaussian process.
    """

    log_step: Array
    half_width: Array
    extrapolates: NDArray[np.bool_]
    model: ModelValues


class StepTimeRegressor:
    """Step times of one job from few observations: a performance model and its residuals.

    `priors` are those of the job's parameters; None takes the weakly informative ones, or those of
    corrections to the engine's seconds where these are given. `peers` are the spreads of other jobs
    on the same machines (`intervals.Spread.posterior`).
    """

    def __init__(
        self,
        *,
        priors: Priors | None = None,
        peers: Sequence[Array] = (),
        spread_prior: SpreadPrior | None = None,
    ) -> None:
        self.priors, self.peers, self.spread_prior = priors, peers, spread_prior

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        weights: ArrayLike | None = None,
        *,
        engine_times: EngineTimes | None = None,
    ) -> Self:
        """Learn from rows, their step times in seconds, and the engine's seconds where known.

        A weight counts observations (1 is an ordinary one). Without rows, both of the engine's
        times must be given (as empty arrays): all else is unknown then.
        """
        data = Dataset.checked(X, y, weights, engine_times)
        log_times, engine_log_s = data.log_times, _engine_log_s(engine_times)
        compute_s, sync_s = (engine_times or EngineTimes()).columns(len(data.rows))
        if not len(data.rows) and (compute_s is None or sync_s is None):
            raise WorkloadError(
                "there are no observations to learn from; give some, or both times of the engine"
            )
        priors = self.priors
        if priors is None:
            compute = COMPUTE_CORRECTIONS if compute_s is not None else {}
            sync = SYNC_CORRECTIONS if sync_s is not None else {}
            priors = WEAK_PRIORS.updated(**compute, **sync)
        self.reference_ = reference_of(data, priors, compute_s)
        data = replace(data, log_times=log_times - self._log_offsets(data.rows, engine_times))
        self.prior_medians_, self.prior_sigmas_ = priors.log_medians(), priors.sigmas()
        self.standardised_parameters_ = np.zeros(len(PARAMETERS))
        self.observation_weights_ = np.ones(len(data.rows))
        if len(data.rows):
            self._fit_model(data)
        residuals = data.log_times - self.model(data.rows, engine_times=engine_times).log_step
        row_of = data.distinct()[1]
        self.speeds_ = two_speeds(residuals, row_of, data.rows[:, NODES], data.weights)
        if self.speeds_ is not None:
            # All that follows is of the faster nodes.
            slower = self.speeds_.log_ratio * self.speeds_.is_slow
            log_times = log_times - slower
            data = replace(data, log_times=data.log_times - slower)
            self._fit_model(data)
        self.log_parameters_ = (
            self.prior_medians_ + self.prior_sigmas_ * self.standardised_parameters_
        )
        seen = data.rows[:, _RANGE_COLUMNS]
        self.observed_range_ = np.stack([seen.min(axis=0), seen.max(axis=0)]) if len(seen) else seen
        self._data = data
        self.posterior_ = self._posterior(data, self.observation_weights_)
        self._observed = data.rows, log_times, engine_log_s
        usual = gaussian_process.noise_variance(np.zeros(1)).item()
        self.replicate_variance_ = intervals.replicate_variance(
            log_times, self.observation_weights_, row_of, usual
        )
        return self

    @cached_property
    def mixture_(self) -> Mixture:
        """The weights of this model and of others, by their errors on what was left out."""
        rows, log_times, engine_log_s = self._observed
        return Mixture().fit(
            rows,
            log_times,
            left_out=self.posterior_.left_out,
            observation_weights=self.observation_weights_,
            engine_log_s=engine_log_s,
        )

    def fit_from(
        self, source: tuple[ArrayLike, ArrayLike], X: ArrayLike, y: ArrayLike
    ) -> StepTimeRegressor:
        """Learn the same job on a new kind of device, transferring what `source`'s rows tell."""
        known = StepTimeRegressor().fit(*source)
        variances = np.diag(known.posterior_.parameter_covariance)
        priors = transferred(
            known.log_parameters_,
            known.prior_sigmas_ * np.sqrt(variances),
            target=self.priors or WEAK_PRIORS,
        )
        return StepTimeRegressor(priors=priors).fit(X, y)

    def model(self, X: ArrayLike, *, engine_times: EngineTimes | None = None) -> ModelValues:
        """The fitted performance model at rows, without its residuals there."""
        return self._model(self.standardised_parameters_, design_matrix(X), engine_times)

    @cached_property
    def spread_(self) -> Spread:
        """How much this job varies beyond what is predicted of steps that were not seen."""
        left_out, distinct = self.mixture_.left_out, len(self.mixture_.rows_)
        of_errors = left_out.log_ratio, left_out.variance
        usual = SPREAD_PRIOR if self._observed[2] is None else ENGINE_SPREAD_PRIOR
        return Spread(*of_errors, distinct, self.peers, self.spread_prior or usual)

    def _spread_variance(self, rows: Array, variance: Array) -> Array:
        """The variance of rows whose predictive one is given, with the job's spread.

        What n runs of a step have shown of it is known; that they differ among each other remains.
        """
        return self._spread(self.mixture_.counts(rows), variance)

    def _spread(self, seen: Array, variance: Array) -> Array:
        """The same where each row was seen so often; repeated ones vary as runs do, no more."""
        inflation = np.where(seen > 1, 1.0, self.spread_.inflation_variance)
        scatter = self.spread_.scatter_variance / (1 + seen)
        return variance * inflation + scatter + self.replicate_variance_

    @property
    def scores_(self) -> tuple[Array, Array]:
        """Leave-one-out scores of observations, and the share of synchronisation in each.

        A score is the distance between an observation and its prediction from all other inputs, in
        predictive standard deviations.
        """
        left_out, spread = self.mixture_.left_out, self.spread_
        variance = left_out.variance * spread.inflation_variance + spread.scatter_variance
        return np.abs(left_out.log_ratio) / np.sqrt(variance), left_out.sync_share

    def predict(self, X: ArrayLike, *, engine_times: EngineTimes | None = None) -> Array:
        """Step times of rows, in seconds."""
        inputs, model = self._inputs(X, engine_times)
        jacobian = model.jacobian * self.prior_sigmas_
        mean, variance = self.posterior_.mean_and_variance(inputs, jacobian)
        log_step, _ = self._mixed(inputs.rows, model.log_step + mean, variance, engine_times)
        return np.exp(log_step)

    def predict_interval(
        self,
        X: ArrayLike,
        *,
        engine_times: EngineTimes | None = None,
        coverage_ratio: float = intervals.COVERAGE_RATIO,
    ) -> tuple[Array, Array]:
        """Step times between which the given share of measured ones should lie, in seconds."""
        found = self.prediction(X, engine_times=engine_times, coverage_ratio=coverage_ratio)
        return (
            np.exp(found.log_step - found.half_width),
            np.exp(found.log_step + found.half_width),
        )

    def extrapolates(
        self, X: ArrayLike, *, engine_times: EngineTimes | None = None
    ) -> NDArray[np.bool_]:
        """Which rows are too far from all observations for their prediction to be trusted."""
        return self.prediction(X, engine_times=engine_times).extrapolates

    def prediction(
        self,
        X: ArrayLike,
        *,
        engine_times: EngineTimes | None = None,
        coverage_ratio: float = intervals.COVERAGE_RATIO,
    ) -> Prediction:
        """Step times, intervals, the model's values and extrapolation of rows, at once."""
        inputs, model = self._inputs(X, engine_times)
        jacobian = model.jacobian * self.prior_sigmas_
        mean, variance = self.posterior_.mean_and_variance(inputs, jacobian)
        log_step, between = self._mixed(inputs.rows, model.log_step + mean, variance, engine_times)
        variance = self._spread_variance(inputs.rows, variance + between)
        quantiles = self._score_quantiles(inputs, coverage_ratio)
        half_width = intervals.half_width(quantiles, variance)
        if self.speeds_ is not None:
            half_width = half_width + self.speeds_.wider(inputs.rows[:, NODES], coverage_ratio)
        parameter_sigma = np.sqrt(self.posterior_.parameter_variance(jacobian))
        return Prediction(
            log_step=log_step,
            half_width=half_width,
            extrapolates=intervals.extrapolates(
                inputs.rows[:, _RANGE_COLUMNS], self.observed_range_, parameter_sigma
            ),
            model=model,
        )

    def _mixed(
        self, rows: Array, log_model: Array, variance: Array, engine_times: EngineTimes | None
    ) -> tuple[Array, Array]:
        """Log step times of the mixture, and the variance between its experts."""
        log_model = log_model + self._log_offsets(rows, engine_times)
        log_step, between = self.mixture_.combine(
            rows, log_model, variance, _engine_log_s(engine_times)
        )
        if self.speeds_ is not None:
            log_step = log_step + self.speeds_.log_shift(rows[:, NODES])
        return log_step, between

    def _log_offsets(self, rows: Array, times: EngineTimes | None) -> Array:
        """Log of the engine's step over the performance model's at the medians of its priors."""
        if times is None or times.step_s is None:
            return np.zeros(len(rows))
        at_medians = evaluate_model(_ENGINE_MEDIANS, rows, self.reference_, times)
        return np.asarray(np.log(times.step_s) - at_medians.log_step)

    @cached_property
    def _quantiles(self) -> dict[float, tuple[Array, Array]]:
        return {}

    def _score_quantiles(self, inputs: Inputs, coverage_ratio: float) -> Array:
        """Half-widths, in predictive standard deviations, that cover the given share of steps.

        A step that was seen more than once is judged by how repeated ones vary, others by how those
        left out do: of what is known of a step itself, the latter say nothing.
        """
        known = self._quantiles
        if coverage_ratio not in known:
            asked = adapted_coverage(self._successive_scores(), coverage_ratio)
            known[coverage_ratio] = (
                intervals.quantiles_on_grid(*self.scores_, asked),
                intervals.quantiles_on_grid(*self._repeated_scores(), asked),
            )
        new, seen = (intervals.interpolated(q, inputs.sync_share) for q in known[coverage_ratio])
        return np.where(self.mixture_.counts(inputs.rows) > 1, seen, new)

    def _repeated_scores(self) -> tuple[Array, Array]:
        """Scores of steps that were seen again, and the share of synchronisation in each."""
        data = self._data
        model = self._model(self.standardised_parameters_, data.rows, data.engine_times)
        noise = gaussian_process.noise_variance(model.sync_share) + self.replicate_variance_
        row_of = data.distinct()[1]
        away, is_repeated = intervals.away_from_others(data.log_times, row_of)
        return (away / np.sqrt(noise))[is_repeated], model.sync_share[is_repeated]

    def _successive_scores(self) -> Array:
        """Scores of the last observations, each predicted from those before it."""
        latest = self._data.originals()[-_MOST_BEFORE - _MOST_SUCCESSIVE :]
        data, weights = self._data.part(latest), self.observation_weights_[latest]
        first = len(weights) - min(len(weights) // 2, _MOST_SUCCESSIVE)
        before = self._posterior(data.part(slice(first)), weights[:first])
        after = data.part(slice(first, None))
        inputs, model = self._inputs(after.rows, after.engine_times)
        noise = gaussian_process.noise_variance(inputs.sync_share)
        errors, variance = before.successive(
            inputs,
            model.jacobian * self.prior_sigmas_,
            after.log_times - model.log_step,
            noise / (after.weights * weights[first:]),
        )
        _, row_of = data.distinct()
        seen = np.array([np.sum(row_of[:at] == row_of[at]) for at in range(first, len(weights))])
        return np.abs(errors) / np.sqrt(self._spread(seen, variance + noise))

    def _model(
        self, standardised: Array, rows: Array, engine_times: EngineTimes | None
    ) -> ModelValues:
        log_parameters = self.prior_medians_ + self.prior_sigmas_ * standardised
        return evaluate_model(log_parameters, rows, self.reference_, engine_times)

    def _inputs(self, X: ArrayLike, engine_times: EngineTimes | None) -> tuple[Inputs, ModelValues]:
        rows = design_matrix(X)
        model = self._model(self.standardised_parameters_, rows, engine_times)
        return Inputs(rows=rows, sync_share=model.sync_share), model

    def _fit_model(self, data: Dataset) -> None:
        def model_at(standardised: Array) -> ModelValues:
            return self._model(standardised, data.rows, data.engine_times)

        fit = fit_parameters(data, model_at, self.prior_sigmas_)
        self.standardised_parameters_, self.observation_weights_ = fit.standardised, fit.weights

    def _posterior(self, data: Dataset, observation_weights: Array) -> Posterior:
        """What some observations say of the residuals of the fitted model."""
        model = self._model(self.standardised_parameters_, data.rows, data.engine_times)
        jacobian = model.jacobian * self.prior_sigmas_
        return Posterior(
            training_data(data, model, self.standardised_parameters_, jacobian, observation_weights)
        )


def _engine_log_s(times: EngineTimes | None) -> Array | None:
    return None if times is None or times.step_s is None else np.log(times.step_s)
