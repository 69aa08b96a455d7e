"""Fit the performance model to observed steps of one job on one kind of device.

Maximum a posteriori least squares in log space, with the priors of `PARAMETERS`, reweighted until
observations that contradict the others count little (an M-estimator); where any is cast out, once
more without it. A Gaussian process then models the residuals, and `mixture` weighs all that against
a simple form.

What was observed before the machines became slower or faster is moved to what it would be today
(`change_points`), and goes on to teach how steps grow.

Where the engine's whole step is known, the ratio of it to the model's prior prediction is an offset
of the regression, as in a generalised linear model, since the model's overlap is not the engine's:
without observations the answer is then exactly the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from estimator.calibrate import design, intervals
from estimator.calibrate.change_points import (
    Change,
    Steps,
    find_changes,
    level_variance,
    no_changes,
)
from estimator.calibrate.design import (
    Dataset,
    Inputs,
    design_matrix,
    effective_ratio,
    one_thread,
    reference_of,
    robust_weights,
)
from estimator.calibrate.intervals import (
    ENGINE_SPREAD_PRIOR,
    SPREAD_PRIOR,
    Spread,
)
from estimator.calibrate.mixture import OUTLIER_WEIGHT, Mixture, Posterior
from estimator.calibrate.performance_model import (
    ACCUMULATION,
    BATCH,
    ENGINE_PRIORS,
    LARGEST_NODE,
    NODES,
    PARAMETERS,
    RANKS,
    WEAK_PRIORS,
    Array,
    EngineTimes,
    ModelValues,
    Priors,
    evaluate_model,
)

# Iteratively reweighted least squares: most iterations, and the change that counts as converged.
_MOST_ITERATIONS = 6
_TOLERANCE = 0.01
# Of MINPACK. Short first steps: a long one may end in a local optimum far from the priors.
_MINPACK = {"factor": 1.0, "xtol": 1e-6, "ftol": 1e-6, "maxfev": 100}
# Of fewer rows, copies of one value confirm each other.
_FEWEST_ROWS = 5
# A job's only observation contradicts nothing but the priors, which know no step of this job. It is
# believed up to this factor from their medians, where the tail of a Student t distribution of an
# engine's errors (of sigma 0.2) falls to the odds of a mistake: 1 in 100, of any size up to 1,000.
_MOST_ALONE_RATIO = 7.0


def fit_parameters(
    data: Dataset, model_at: Callable[[Array], ModelValues], prior_sigmas: Array
) -> tuple[Array, Array]:
    """Parameters standardised by their priors, and the weights of observations, 0 to 1.

    Iteratively reweighted least squares; `model_at` gives the model at standardised parameters.
    """
    from scipy.optimize import leastsq

    row_of = data.distinct()[1]
    copy_of = _copies(data, row_of)
    # No two runs agree to the last digit: all copies of one count as one.
    copies = np.bincount(copy_of, minlength=1)[copy_of]
    away = np.abs(model_at(np.zeros(len(prior_sigmas))).log_step - data.log_times)
    is_believed_alone = len(away) == 1 and away.item() < np.log(_MOST_ALONE_RATIO)

    @lru_cache(maxsize=1)
    def errors_at(standardised: bytes, scale: bytes) -> tuple[Array, Array]:
        """Standardised errors of observations, then of parameters from priors; their jacobian."""
        z, factors = np.frombuffer(standardised), np.frombuffer(scale)
        model = model_at(z)
        errors = np.concatenate([(model.log_step - data.log_times) * factors, z])
        jacobian = model.jacobian * prior_sigmas * factors[:, None]
        return errors, np.vstack([jacobian, np.eye(len(z))])

    def reweighted(weights: Array) -> tuple[Array, Array]:
        parameters = np.zeros(len(prior_sigmas))
        for _ in range(_MOST_ITERATIONS):
            before, weights_before = parameters, weights
            effective = effective_ratio(weights / copies, row_of) / copies
            variance = design.marginal_variance(model_at(parameters).sync_share)
            scale = np.sqrt(weights * effective / variance).tobytes()
            # Asked for the errors at a point, then for their derivatives there.
            parameters = leastsq(
                lambda z, scale=scale: errors_at(z.tobytes(), scale)[0],
                before,
                Dfun=lambda z, scale=scale: errors_at(z.tobytes(), scale)[1],
                diag=np.ones(len(before)),
                full_output=True,
                **_MINPACK,
            )[0]
            if is_believed_alone:
                break
            at_end = errors_at(parameters.tobytes(), scale)
            weights = robust_weights(*at_end, weights * effective, copy_of)
            change = np.abs(weights - weights_before).max()
            if max(change, np.abs(parameters - before).max()) < _TOLERANCE:
                break
        return parameters, weights

    parameters, weights = reweighted(np.ones(len(data.rows)))
    if (weights < OUTLIER_WEIGHT).any():
        # Before they were known to be outliers they may have led to another local optimum.
        return reweighted(weights)
    return parameters, weights


def _copies(data: Dataset, row_of: NDArray[np.intp]) -> NDArray[np.intp]:
    """Of which value each observation is a copy; of few rows each is one of its own.

    Of these that is no sign of a mistake: three observations confirm each other.
    """
    if row_of.max(initial=-1) + 1 < _FEWEST_ROWS:
        return np.arange(len(row_of))
    values = np.column_stack([row_of, data.log_times])
    return np.unique(values, axis=0, return_inverse=True)[1].reshape(-1)


# The columns by whose range a row is inside or outside of the training data.
_RANGE_COLUMNS = [RANKS, NODES, BATCH, LARGEST_NODE]
# Changes are searched for again about a fit that knows of them.
_MOST_SEARCHES = 2
_ENGINE_MEDIANS = ENGINE_PRIORS.log_medians()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTimePrediction:
    """Predictions for rows, in logarithms of seconds.

    Four of five measured steps lie within `half_width` of `log_step`; rows that `extrapolates`
    marks are too far from all observations to be trusted. `model` holds the values
    of the fitted performance model without the residuals' Gaussian process.
    """

    log_step: Array
    half_width: Array
    extrapolates: NDArray[np.bool_]
    model: ModelValues
    network_share: Array


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
    ) -> None:
        self.priors, self.peers = priors, peers

    @one_thread
    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        *,
        engine_times: EngineTimes | None = None,
        at: ArrayLike | None = None,
        hosts: Sequence[frozenset[str]] = (),
        expected: Sequence[Change] = (),
    ) -> Self:
        """Learn from rows, their step times in seconds, and the engine's seconds where known.

        `at` is when each was seen, in seconds: without it nothing has changed meanwhile, and all is
        of the present. `hosts` are those that each ran on, where they are named: a prediction is of
        hosts like most, and `changes_` name the others. `expected` is what other jobs have shown of
        the same machines. Without rows the engine's times are empty arrays: all else is unknown.
        """
        log_times = np.log(np.asarray(y, dtype=float))
        data = Dataset(rows=design_matrix(X), log_times=log_times, engine_times=engine_times)
        priors = self.priors or (WEAK_PRIORS if engine_times is None else ENGINE_PRIORS)
        self.reference_ = reference_of(data, priors)
        data = replace(data, log_times=log_times - self._log_offsets(data.rows, engine_times))
        self.prior_medians_, self.prior_sigmas_ = priors.log_medians(), priors.sigmas()
        self.standardised_parameters_ = np.zeros(len(PARAMETERS))
        self.observation_weights_ = np.ones(len(data.rows))
        self.changes_ = no_changes(len(data.rows))
        if len(data.rows):
            self._fit_model(data)
        if at is not None:
            data = self._of_today(data, np.asarray(at, dtype=float), hosts, expected)
            log_times = log_times + self.changes_.log_shift
        seen = data.rows[:, _RANGE_COLUMNS]
        self.observed_range_ = np.stack([seen.min(axis=0), seen.max(axis=0)]) if len(seen) else seen
        self._data = data
        inputs, model = self._inputs(data.rows, data.engine_times)
        self.posterior_ = Posterior(
            data,
            inputs,
            self.standardised_parameters_,
            data.log_times - model.log_step,
            self.observation_weights_,
        )
        self._observed = data.rows, log_times, _engine_log_s(engine_times)
        return self

    @property
    def log_parameters_(self) -> Array:
        """The logarithms of the fitted parameters, in the order of PARAMETERS."""
        return np.asarray(self.prior_medians_ + self.prior_sigmas_ * self.standardised_parameters_)

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

    def model(self, X: ArrayLike, *, engine_times: EngineTimes | None = None) -> ModelValues:
        """The fitted performance model at rows, without its residuals there."""
        return self._model(self.standardised_parameters_, design_matrix(X), engine_times)

    @cached_property
    def spread_(self) -> Spread:
        """How much this job varies beyond what is predicted of steps that were not seen."""
        left_out = self.mixture_.left_out
        usual = SPREAD_PRIOR if self._observed[2] is None else ENGINE_SPREAD_PRIOR
        return Spread(left_out.log_ratio, left_out.variance, self.peers, usual)

    def _spread(self, seen: Array, variance: Array) -> Array:
        """The variance of rows seen so often whose predictive one is given, with the job's spread.

        What n runs of a step have shown of it is known; that they differ among each other remains:
        repeated ones vary as runs do, no more.
        """
        inflation = np.where(seen > 1, 1.0, self.spread_.inflation_variance)
        scatter = self.spread_.scatter_variance / (1 + seen)
        return variance * inflation + scatter

    @property
    def scores_(self) -> Array:
        """Leave-one-out scores of observations.

        A score is the distance between an observation and its prediction from all other inputs, in
        predictive standard deviations.
        """
        left_out, spread = self.mixture_.left_out, self.spread_
        variance = left_out.variance * spread.inflation_variance + spread.scatter_variance
        return np.abs(left_out.log_ratio) / np.sqrt(variance)

    def predict(self, X: ArrayLike, *, engine_times: EngineTimes | None = None) -> Array:
        """Step times of rows, in seconds."""
        return np.exp(self.prediction(X, engine_times=engine_times).log_step)

    def predict_interval(
        self, X: ArrayLike, *, engine_times: EngineTimes | None = None
    ) -> tuple[Array, Array]:
        """Step times between which four of five measured ones should lie, in seconds."""
        predicted = self.prediction(X, engine_times=engine_times)
        low, high = (predicted.log_step + sign * predicted.half_width for sign in (-1, 1))
        return np.exp(low), np.exp(high)

    def prediction(
        self, X: ArrayLike, *, engine_times: EngineTimes | None = None
    ) -> StepTimePrediction:
        """Step times, intervals, the model's values and extrapolation of rows, at once."""
        rows = design_matrix(X)
        # The algebra of one row is too small for several threads.
        with one_thread if len(rows) > 1 else nullcontext():
            inputs, model = self._inputs(rows, engine_times)
            mean, variance = self.posterior_.mean_and_variance(inputs)
            log_model = model.log_step + mean + self._log_offsets(rows, engine_times)
            seen = self.mixture_.counts(rows)
            log_step, between = self.mixture_.combine(
                rows, log_model, variance, seen, _engine_log_s(engine_times)
            )
            variance = self._spread(seen, variance + between)
            share = network_share(rows, model, engine_times)
            # Changes have left today's level less sure than that of before.
            variance = variance + level_variance(self.changes_.changes, share)
            of_new, of_repeated = self._quantiles
            quantiles = np.where(seen > 1, of_repeated, of_new)
            parameter_sigma = np.sqrt(self.posterior_.parameter_variance(inputs))
        return StepTimePrediction(
            log_step=log_step,
            half_width=intervals.half_width(quantiles, variance) + abs(self.changes_.unconfirmed),
            extrapolates=intervals.extrapolates(
                rows[:, _RANGE_COLUMNS], self.observed_range_, parameter_sigma
            ),
            model=model,
            network_share=share,
        )

    def _log_offsets(self, rows: Array, times: EngineTimes | None) -> Array:
        """Log of the engine's step over the performance model's at the medians of its priors."""
        if times is None:
            return np.zeros(len(rows))
        at_medians = evaluate_model(_ENGINE_MEDIANS, rows, self.reference_, times)
        return np.asarray(np.log(times.step_s) - at_medians.log_step)

    @cached_property
    def _quantiles(self) -> tuple[float, float]:
        """Half-widths, in predictive standard deviations, that cover four of five steps.

        A step that was seen more than once is judged by how repeated ones vary, others by how those
        left out do: of what is known of a step itself, the latter say nothing.
        """
        scores = self.scores_, self._repeated_scores()
        of_new, of_repeated = map(intervals.score_quantile, scores)
        return of_new, of_repeated

    def _repeated_scores(self) -> Array:
        """Scores of steps that were seen again."""
        data = self._data
        model = self._model(self.standardised_parameters_, data.rows, data.engine_times)
        noise = np.sqrt(design.noise_variance(model.sync_share))
        away, is_repeated = intervals.away_from_others(data.log_times, data.distinct()[1])
        return np.asarray((away / noise)[is_repeated])

    def _model(
        self, standardised: Array, rows: Array, engine_times: EngineTimes | None
    ) -> ModelValues:
        log_parameters = self.prior_medians_ + self.prior_sigmas_ * standardised
        return evaluate_model(log_parameters, rows, self.reference_, engine_times)

    def _inputs(self, rows: Array, engine_times: EngineTimes | None) -> tuple[Inputs, ModelValues]:
        model = self._model(self.standardised_parameters_, rows, engine_times)
        jacobian = model.jacobian * self.prior_sigmas_
        return Inputs(rows=rows, sync_share=model.sync_share, jacobian=jacobian), model

    def _fit_model(self, data: Dataset) -> None:
        def model_at(standardised: Array) -> ModelValues:
            return self._model(standardised, data.rows, data.engine_times)

        self.standardised_parameters_, self.observation_weights_ = fit_parameters(
            data, model_at, self.prior_sigmas_
        )

    def _of_today(
        self,
        data: Dataset,
        at: Array,
        hosts: Sequence[frozenset[str]],
        expected: Sequence[Change],
    ) -> Dataset:
        """Steps as they would be today, of a model fitted to them: found twice, since a fit to
        what has changed is off itself."""
        today = data
        for _ in range(_MOST_SEARCHES if len(data.rows) else 0):
            inputs, model = self._inputs(data.rows, data.engine_times)
            before, self.changes_ = (
                self.changes_,
                find_changes(
                    Steps(
                        inputs=inputs,
                        network_share=network_share(data.rows, model, data.engine_times),
                        residuals=data.log_times - model.log_step,
                        parameters=self.standardised_parameters_,
                        at=at,
                        hosts=hosts,
                    ),
                    expected,
                ),
            )
            if np.abs(self.changes_.log_shift - before.log_shift).max() < _TOLERANCE:
                break
            today = replace(data, log_times=data.log_times + self.changes_.log_shift)
            self._fit_model(today)
        return replace(data, log_times=data.log_times + self.changes_.log_shift)


def network_share(rows: Array, model: ModelValues, times: EngineTimes | None) -> Array:
    """How much longer, in logarithms, steps take whose synchronisation takes e times as long.

    Between the elasticity of the model, which hides most of a short one behind compute, and the
    part of the engine's step that is no compute.
    """
    if times is None:
        return model.sync_share
    exposed = 1 - times.compute_s * rows[:, ACCUMULATION] / times.step_s
    return np.asarray((np.maximum(exposed, 0) * (rows[:, RANKS] > 1) + model.sync_share) / 2)


def _engine_log_s(times: EngineTimes | None) -> Array | None:
    return None if times is None else np.log(times.step_s)
