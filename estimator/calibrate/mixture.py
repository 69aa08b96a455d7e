"""Mix the performance model with simple forms, each weighted by how it predicts what is left out.

Universal kriging, or Gaussian process regression with explicit basis functions (Rasmussen and
Williams 2006, section 2.7): the performance model is linearised about its fit, its standardised
parameters have unit normal priors and its residuals are a Gaussian process, so that predictive
means, variances and leave-one-out errors are linear algebra.

Where a job follows the performance model, that is the best of them; where repeated runs scatter, or
a part of the step follows nothing, a form with three parameters errs less, and the engine alone may
be better than either. Experts are combined in log space by exponential weights (Vovk 1990): a prior
weight times the likelihood of the observations, each predicted from all others, under errors of
unknown variance with an inverse-gamma prior (a Student t distribution). A form that has beaten the
performance model by no more than chance gets no credit for it: its squared errors are raised by
standard errors of their difference from the model's (as of cross-validation in Vehtari, Gelman and
Gabry 2017). The weights are local: on one device, within a node and across nodes, observations of
the same kind count most. Where a form says what the performance model cannot tell from its own
answer, within its predictive standard deviation, the form counts more: of two that fit alike the
one with fewer parameters is to be preferred. Where two or more observations that the robust fit
casts out lie beyond the batches of all others, nothing but the model's extrapolation contradicts
them: the same forms fitted to all observations join the experts, and there all are judged by these
first. Where experts disagree, that is part of the answer's uncertainty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from estimator.calibrate import design
from estimator.calibrate.baselines import (
    LinearScaling,
    OptimusRegressor,
    PolluxRegressor,
)
from estimator.calibrate.design import Dataset, Inputs, confirmed, effective_ratio, noise_variance
from estimator.calibrate.performance_model import BATCH, NODES, RANKS, Array, ModelValues

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
    noise_variance = design.noise_variance(model.sync_share)
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

    `observation` are their places in the table.
    """

    observation: NDArray[np.intp]
    log_ratio: Array
    variance: Array


class Posterior:
    """Predictive mean and variance of log step time about the fitted performance model."""

    def __init__(self, training: TrainingData) -> None:
        from scipy.linalg import cho_factor

        self._training = training
        self._factor: Array | None = None
        if count := len(training.noise_variance):
            covariance = design.lower_kernel(training.inputs)
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

    def mean_and_variance(self, inputs: Inputs, jacobian: Array) -> tuple[Array, Array]:
        """That, and the predictive variance of an observed log step time, its noise included."""
        cross = self._covariance(inputs)
        prior_variance = design.kernel_diagonal(inputs)
        residual = np.maximum(prior_variance - self._explained_variance(cross), 0)
        parameters = self.parameter_variance(jacobian - cross @ self._solved_jacobian)
        noise = design.noise_variance(inputs.sync_share)
        return self._mean(cross, jacobian), residual + parameters + noise

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
        cross = design.kernel(inputs, training)
        for place in np.flatnonzero(self._training.nugget_variance):
            same = (inputs.rows == training.rows[place]).all(axis=1)
            cross[same, place] += self._training.nugget_variance[place]
        return cross


MODEL, ENGINE = "model", "engine"
# Ends the names of forms that were fitted to outliers too.
OF_ALL = " of all observations"
Form = LinearScaling | OptimusRegressor | PolluxRegressor
OUTLIER_WEIGHT = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class MixturePrior:
    """What is believed of the experts before anything was observed.

    `errors` and `error_sigma` are the inverse-gamma prior on the variance of an expert's errors, as
    a number of errors and their standard deviation. `exponent` tempers the likelihood, since
    leave-one-out errors depend on each other. `standard_errors` is by how many of them an expert
    must be better than the performance model. A form's prior weight is that of n / (n + `half`)
    where n are of the same kind of placement: it says nothing of what it has not seen, and across
    nodes little before it has seen many, since it does not know how many nodes there are. Where it
    agrees with the performance model within `agreeing` standard deviations, it counts `agreement`
    times as much again.
    """

    weights: Mapping[str, float]
    errors: float = 4.0
    error_sigma: float = 0.05
    exponent: float = 0.5
    standard_errors: float = 2.0
    half: tuple[float, float, float] = (1.0, 1.0, 100.0)
    agreement: float = 30.0
    agreeing: float = 0.5


# Chosen on the tables that `benchmarks/calibration_pairs.py` judges, each source left out in turn.
# The performance model is centred on the engine, which alone is but a quarter of a form.
PRIOR = MixturePrior(
    weights={MODEL: 2.0, ENGINE: 0.25, "linear": 0.1, "optimus": 1.0, "pollux": 2.0},
    standard_errors=8.0,
    half=(1.0, 1.0, 30.0),
    agreeing=0.7,
)
# A performance model that corrects an engine knows more than a form that fits alike, and more of
# what was not seen (`benchmarks/published_accuracy.py`, after 8).
ENGINE_PRIOR = MixturePrior(
    weights={**PRIOR.weights, "linear": 0.3},
    error_sigma=0.1,
    half=(3.0, 3.0, 3.0),
    agreement=0.0,
)
# An error beyond this factor, in logarithms, says no more than this one.
_LARGEST_ERROR = 1.0
# Forms with so few parameters learn nothing from more rows. Of few rows one is left out at a time;
# of many, groups, a quarter of them each.
_MOST_ROWS, _FEW_ROWS, _GROUPS_OF_FEW, _GROUPS_OF_MANY = 60, 20, 10, 4
# Below this weight in the robust fit of the performance model an observation is an outlier, but of
# four at most one: where more are, the job scatters, and they count.
_MOST_OUTLIERS_RATIO = 0.25
# So many outliers beyond the batches of all others refute the performance model there: nothing but
# its extrapolation contradicts them.
_REFUTING = 2
_REFUTED = 3
_KINDS = 4
# How far forms usually are from steps, in logarithms.
_FORM_SIGMA = 0.1
# How far from forms and engine, in logarithms, a prediction beyond all observed batches may be.
_LEEWAY = 0.1


class Mixture:
    """The weights of experts on one job, and the simple forms among them."""

    def __init__(self, prior: MixturePrior | None = None) -> None:
        self.prior = prior

    def fit(
        self,
        rows: Array,
        log_times: Array,
        *,
        left_out: LeftOut,
        observation_weights: Array,
        engine_log_s: Array | None = None,
    ) -> Self:
        """Weigh the experts by rows of (ranks, nodes, batch, micro-batches, …) and log seconds.

        `left_out` are errors of the performance model on rows that it has not seen,
        `observation_weights` those of its robust fit, and `engine_log_s` what the engine says of
        each row.
        """
        distinct, places = np.unique(rows, axis=0, return_inverse=True)
        self.rows_ = distinct
        counts = np.bincount(places.reshape(-1), observation_weights, len(distinct))
        self.count_of_ = dict(zip(map(tuple, distinct.tolist()), counts.tolist(), strict=True))
        place = places.reshape(-1)[left_out.observation]
        runs = effective_ratio(np.ones(len(place)), place)
        chosen, is_kept = _chosen(observation_weights[left_out.observation], runs)
        kept = left_out.observation[chosen]
        batches = rows[kept[is_kept], BATCH]
        self.believed_batches_ = batches.min(initial=np.inf), batches.max(initial=0.0)
        is_refuting = ~is_kept & self._is_beyond(rows[kept])
        self.is_refuted_ = bool(runs[chosen] @ is_refuting >= _REFUTING)
        if not self.is_refuted_:
            chosen, kept, is_kept = chosen[is_kept], kept[is_kept], is_kept[is_kept]
        self.kinds_ = self._kinds(rows[kept])
        self.forms_: dict[str, Form] = {}
        self.model_ = left_out, chosen
        self.left_out_ = {MODEL: left_out.log_ratio[chosen]}
        if engine_log_s is not None:
            self.left_out_[ENGINE] = (engine_log_s - log_times)[kept]
        if len(np.unique(places[kept[is_kept]])) > 1:
            times = np.exp(log_times[kept])
            self._fit_forms(rows[kept], times, is_kept)
            if self.is_refuted_:
                self._fit_forms(rows[kept], times, np.ones_like(is_kept), OF_ALL)
        self.prior_ = self.prior or (PRIOR if engine_log_s is None else ENGINE_PRIOR)
        self.weights_ = self.posterior_weights(self.prior_)
        return self

    def _fit_forms(
        self, rows: Array, times: Array, is_fitted: NDArray[np.bool_], suffix: str = ""
    ) -> None:
        """Fit the forms to some rows, and predict every row by fits to those of other inputs."""
        pollux = PolluxRegressor().fit(rows[is_fitted], times[is_fitted])
        forms: dict[str, Form] = {
            "linear": LinearScaling().fit(rows[is_fitted], times[is_fitted]),
            "optimus": OptimusRegressor().fit(rows[is_fitted], times[is_fitted]),
            "pollux": pollux,
        }
        errors = {name: np.empty(len(rows)) for name in forms}
        input_of = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
        fitted = np.unique(input_of[is_fitted])
        number = np.zeros(len(rows), dtype=np.intp)
        number[fitted] = np.arange(len(fitted))
        groups = number[input_of]
        groups %= _GROUPS_OF_FEW if is_fitted.sum() <= _FEW_ROWS else _GROUPS_OF_MANY
        for group in np.unique(groups):
            out = groups == group
            others = ~out & is_fitted
            for name, form in (
                ("linear", LinearScaling()),
                ("optimus", OptimusRegressor()),
                # The fit to all rows is where the fit to all but a few begins.
                ("pollux", PolluxRegressor([pollux.parameters_])),
            ):
                predicted = form.fit(rows[others], times[others]).predict(rows[out])
                errors[name][out] = _log(predicted / times[out])
        self.forms_ |= {name + suffix: form for name, form in forms.items()}
        self.left_out_ |= {name + suffix: found for name, found in errors.items()}

    def posterior_weights(self, prior: MixturePrior) -> dict[str, Array]:
        """Weights of the experts for each kind of placement, which sum to 1."""
        experts = list(self.left_out_)
        errors = np.column_stack([self.left_out_[name] for name in experts])
        weights = np.empty((_KINDS, len(experts)))
        for kind in range(_KINDS):
            same = self.kinds_ == kind
            # However many there are elsewhere, they do not outweigh those of the same kind.
            others = min(1.0, (1 + same.sum()) / max((~same).sum(), 1))
            counts = np.where(same, 1.0, others)
            # Where several have refuted the performance model, theirs is no mistake and no chance.
            is_refuted = kind == _REFUTED
            largest = np.inf if is_refuted else _LARGEST_ERROR
            squares = np.minimum(np.abs(errors), largest) ** 2
            worse = squares - squares[:, [experts.index(MODEL)]]
            mean = counts @ worse / max(counts.sum(), 1.0)
            standard_error = np.sqrt(counts @ (worse - mean) ** 2)
            total = prior.errors * prior.error_sigma**2 + counts @ squares
            total += prior.standard_errors * standard_error * (not is_refuted)
            variance = total / (prior.errors + counts.sum())
            known = same.sum() / (same.sum() + (1.0 if is_refuted else prior.half[kind]))
            prior_weights = [
                prior.weights[name.removesuffix(OF_ALL)] * (known if name in self.forms_ else 1.0)
                for name in experts
            ]
            log_likelihood = -prior.exponent * counts.sum() / 2 * np.log(variance)
            likelihood = np.exp(log_likelihood - log_likelihood.max())
            weights[kind] = np.array(prior_weights) * likelihood
        weights /= weights.sum(axis=1, keepdims=True)
        return dict(zip(experts, weights.T, strict=True))

    def counts(self, rows: Array) -> Array:
        """How many observations there are of each row; outliers count less."""
        return np.array([self.count_of_.get(tuple(row), 0.0) for row in rows.tolist()])

    def combine(
        self, rows: Array, log_model: Array, variance: Array, engine_log_s: Array | None = None
    ) -> tuple[Array, Array]:
        """Log step times of rows, and the variance between the experts there.

        `variance` is the performance model's predictive one. What was observed of a row itself, the
        performance model knows: its n observations have n times the precision of one, beside which
        an expert that keeps none has that of its usual errors.
        """
        logs = {name: _log(form.step_s(rows)) for name, form in self.forms_.items()}
        if engine_log_s is not None:
            logs[ENGINE] = engine_log_s
        share = 1 / (1 + self.counts(rows) * _FORM_SIGMA**2 / noise_variance(np.zeros(1)))
        away = {name: log - log_model for name, log in logs.items()}
        mean, between = self._pooled(self._kinds(rows), away, variance, share)
        return self._bounded(rows, log_model + mean, list(logs.values())), between

    def _pooled(
        self, kinds: NDArray[np.intp], away: Mapping[str, Array], variance: Array, share: Array
    ) -> tuple[Array, Array]:
        """Mean and variance over experts of how far they are `away` from the performance model."""
        if not away:
            return np.zeros(len(kinds)), np.zeros(len(kinds))
        prior = self.prior_
        distances = np.array(list(away.values()))
        weights = np.array([self.weights_[name][kinds] for name in away])
        near = np.exp(-(distances**2) / (2 * prior.agreeing**2 * variance))
        weights *= 1 + prior.agreement * near * (kinds != _REFUTED)
        weights *= share / (self.weights_[MODEL][kinds] + weights.sum(axis=0))
        mean = (weights * distances).sum(axis=0)
        return mean, np.maximum((weights * distances**2).sum(axis=0) - mean**2, 0)

    def _is_beyond(self, rows: Array) -> NDArray[np.bool_]:
        """Whether each row is beyond the batches of all observations that are no outliers."""
        low, high = self.believed_batches_
        return np.asarray((rows[:, BATCH] < low) | (rows[:, BATCH] > high))

    def _kinds(self, rows: Array) -> NDArray[np.intp]:
        """Whether each row is on one device (0), within a node (1), across nodes (2) or refuted."""
        kinds = (rows[:, RANKS] > 1).astype(np.intp) + (rows[:, NODES] > 1)
        return np.where(self._is_beyond(rows), _REFUTED, kinds) if self.is_refuted_ else kinds

    def _bounded(self, rows: Array, log_s: Array, others: Sequence[Array]) -> Array:
        """Keep predictions beyond the batches of few rows between those of forms and engine.

        Their steps grow with the batch, and never faster than it.
        """
        if not self.forms_ or len(self.rows_) > _FEW_ROWS:
            return log_s
        batches = self.rows_[:, BATCH]
        beyond = (rows[:, BATCH] < batches.min()) | (rows[:, BATCH] > batches.max())
        low = np.min(others, axis=0) - _LEEWAY
        high = np.max(others, axis=0) + _LEEWAY
        return np.where(beyond, np.clip(log_s, low, high), log_s)

    @property
    def left_out(self) -> LeftOut:
        """Errors of the mixture on what was left out; of the performance model on outliers."""
        model, chosen = self.model_
        mean, between = self._pooled(
            self.kinds_,
            {
                name: errors - model.log_ratio[chosen]
                for name, errors in self.left_out_.items()
                if name != MODEL
            },
            model.variance[chosen],
            np.ones(len(chosen)),
        )
        errors, variance = model.log_ratio.copy(), model.variance.copy()
        errors[chosen] += mean
        variance[chosen] += between
        return replace(model, log_ratio=errors, variance=variance)


def _chosen(
    observation_weights: Array, counts: Array
) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Of many observations some that spread evenly; and which are no outliers of the model.

    `counts` is how many independent observations each counts for.
    """
    count = len(observation_weights)
    least = np.argsort(observation_weights, kind="stable")
    least = least[np.cumsum(counts[least]) <= _MOST_OUTLIERS_RATIO * counts.sum()]
    outliers = least[observation_weights[least] < OUTLIER_WEIGHT]
    kept = np.setdiff1d(np.arange(count), outliers)
    kept = kept[:: max(1, -(-len(kept) // _MOST_ROWS))]
    chosen = np.sort(np.concatenate([kept, outliers[:_MOST_ROWS]]))
    return chosen, np.isin(chosen, kept)


def _log(times: Array) -> Array:
    return np.log(np.maximum(times, np.finfo(float).tiny))
