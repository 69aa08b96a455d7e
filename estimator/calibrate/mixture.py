"""Mix the performance model with a simple form, each weighted by how it predicts what is left out.

Universal kriging, or Gaussian process regression with explicit basis functions (Rasmussen and
Williams 2006, section 2.7): the performance model is linearised about its fit, its standardised
parameters have unit normal priors and its residuals are a Gaussian process, so that predictive
means, variances and leave-one-out errors are linear algebra.

Where a job follows the performance model, that is the best; where repeated runs scatter, or a part
of the step follows nothing, a form with few parameters errs less, and the engine alone may be
better than either. Experts are combined in log space by exponential weights (Vovk 1990): a prior
weight times the likelihood of the observations, each predicted from all others, under errors of
unknown variance with an inverse-gamma prior (a Student t distribution). The weights are local: on
one device, within a node and across nodes, observations of the same kind count most. Where the form
says what the performance model cannot tell from its own answer, within its predictive standard
deviation, it counts more: of two that fit alike the one with fewer parameters is to be preferred.
Where experts disagree, that is part of the answer's uncertainty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from estimator.calibrate import design
from estimator.calibrate.design import (
    USUAL_NOISE_SIGMA,
    Dataset,
    Inputs,
    confirmed,
    effective_ratio,
    noise_variance,
)
from estimator.calibrate.performance_model import ACCUMULATION, BATCH, NODES, RANKS, Array
from estimator.graph.costs.call_costs import nonnegative_fit

# The Gaussian process takes so many distinct rows, the last observed: its cost is cubic in them.
_MOST_INPUTS = 256
# A quantile of the leave-one-out scores needs no more observations than this.
_SCORED_OBSERVATIONS = 200


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
    """Log step times about the fitted performance model: the Gaussian process given observations.

    `inputs` are those of `data`, `parameters` the fitted ones, standardised by their priors,
    `residuals` log(measured / fitted) and `observation_weights` those of the robust fit.
    """

    def __init__(
        self,
        data: Dataset,
        inputs: Inputs,
        parameters: Array,
        residuals: Array,
        observation_weights: Array,
    ) -> None:
        rows, row_of = data.distinct()
        noise = noise_variance(inputs.sync_share)
        weights, nugget = confirmed(observation_weights, row_of, residuals, inputs.sync_share)
        # Copies of one value say little more than the value does.
        copies = np.unique(np.column_stack([row_of, residuals]), axis=0, return_inverse=True)[1]
        weights = weights * effective_ratio(np.ones(len(weights)), copies.reshape(-1))
        total = np.bincount(row_of, weights, minlength=len(rows))
        mean = np.bincount(row_of, weights * residuals, minlength=len(rows)) / total
        first = np.unique(row_of, return_index=True)[1]
        last = np.argsort(first)[-_MOST_INPUTS:]
        observed = np.flatnonzero(np.isin(row_of, last))
        self._observed = observed[_scored(row_of[observed], residuals[observed])]
        place_of = np.empty(len(rows), dtype=np.intp)
        place_of[last] = np.arange(len(last))
        self._input_of = place_of[row_of[self._observed]]
        self._residuals = residuals[self._observed]
        # That of an observation does not depend on its weight in the robust fit.
        self._noise_of = noise[self._observed]
        self._inputs, self._parameters = inputs.part(first[last]), parameters
        self._mean, self._nugget = mean[last], nugget[last]
        self._noise = noise[first[last]] / total[last]
        self._factor_covariance()

    def _factor_covariance(self) -> None:
        """L of the covariance L·Lᵀ of all inputs, and what follows from it."""
        from scipy.linalg import cho_factor, cho_solve

        covariance = design.kernel(self._inputs, self._inputs)
        covariance[np.diag_indices_from(covariance)] += self._nugget + self._noise
        self._factor = covariance
        about_prior = self._mean + self._inputs.jacobian @ self._parameters
        self._dual_weights = about_prior
        if len(covariance):
            self._factor, _ = cho_factor(
                covariance, lower=True, overwrite_a=True, check_finite=False
            )
            self._dual_weights = cho_solve((self._factor, True), about_prior, check_finite=False)
        half = self._half(self._inputs.jacobian)
        self._parameter_covariance = np.eye(len(self._parameters)) - half.T @ half

    def _half(self, columns: Array) -> Array:
        """L⁻¹ times columns, the sum of whose squares is what the observations explain."""
        from scipy.linalg.lapack import dtrtrs

        return np.asarray(dtrtrs(self._factor, columns, lower=1)[0]) if len(columns) else columns

    def mean_and_variance(self, inputs: Inputs) -> tuple[Array, Array]:
        """That, and the predictive variance of an observed log step time, its noise included."""
        cross = design.kernel(inputs, self._inputs)
        for place in np.flatnonzero(self._nugget):
            same = (inputs.rows == self._inputs.rows[place]).all(axis=1)
            cross[same, place] += self._nugget[place]
        explained = (self._half(cross.T) ** 2).sum(axis=0)
        variance = np.maximum(design.kernel_diagonal(inputs) - explained, 0)
        mean = cross @ self._dual_weights - inputs.jacobian @ self._parameters
        return mean, variance + noise_variance(inputs.sync_share)

    def parameter_variance(self, inputs: Inputs) -> Array:
        """Variance of log step time that is due to the uncertainty of the parameters."""
        jacobian = inputs.jacobian
        return np.asarray(((jacobian @ self._parameter_covariance) * jacobian).sum(axis=1))

    @cached_property
    def left_out(self) -> LeftOut:
        """Errors of observations predicted from all other inputs; of many, some spread evenly.

        An outlier that the robust fit has down-weighted has the noise of an ordinary observation:
        outliers will occur among future observations too, and the intervals have to cover those.
        """
        from scipy.linalg.lapack import dtrtri

        # With P the inverse of the covariance, leaving out i gives the error (P·y)ᵢ / Pᵢᵢ and the
        # variance 1 / Pᵢᵢ (Rasmussen and Williams, eq. 5.12); P is L⁻ᵀ·L⁻¹.
        of, diagonal = self._input_of, np.zeros(0)
        if len(of):
            inverse, _ = dtrtri(self._factor, lower=1)
            diagonal = np.maximum((np.tril(inverse) ** 2).sum(axis=0), 1e-12)[of]
        error = self._dual_weights[of] / diagonal - self._mean[of]
        variance = np.maximum(1 / diagonal - self._noise[of], 0)
        return LeftOut(
            observation=self._observed,
            log_ratio=-(self._residuals + error),
            variance=variance + self._noise_of,
        )


MODEL, ENGINE, FORM = "model", "engine", "form"
OUTLIER_WEIGHT = 0.1


class LinearForm:
    """Step times as a sum of non-negative terms: computing, and synchronisation, nothing hidden.

    A constant and the samples of a rank; then α + β·(ranks − 2) within a node, and others across
    nodes, as in Pollux (Qiao et al., OSDI 2021). Fitted to relative errors.
    """

    def __init__(self, rows: Array, times: Array) -> None:
        self.coefficients_ = nonnegative_fit(self._terms(rows), times)

    def log_step(self, rows: Array) -> Array:
        """Logarithms of step times, in seconds."""
        step_s = self._terms(rows) @ self.coefficients_
        return np.asarray(np.log(np.maximum(step_s, np.finfo(float).tiny)))

    @staticmethod
    def _terms(rows: Array) -> Array:
        samples = rows[:, BATCH] * rows[:, ACCUMULATION]
        kinds, beyond = _kinds(rows), rows[:, RANKS] - 2
        within, across = kinds == 1, kinds == 2
        return np.column_stack(
            [samples, np.ones(len(rows)), within, within * beyond, across, across * beyond]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MixturePrior:
    """What is believed of the experts before anything was observed.

    `errors` and `error_sigma` are the inverse-gamma prior on the variance of an expert's errors, as
    a number of errors and their standard deviation. `exponent` tempers the likelihood, since
    leave-one-out errors depend on each other. A form's prior weight is that of n / (n + `half`)
    where n are of the same kind of placement: it says nothing of what it has not seen, and across
    nodes little before it has seen many, since it does not know how many nodes there are. Where it
    agrees with the performance model within `agreeing` standard deviations, it counts `agreement`
    times as much again.
    """

    weights: Mapping[str, float]
    errors: float = 4.0
    error_sigma: float = 0.05
    exponent: float = 0.5
    half: tuple[float, float, float] = (1.0, 1.0, 100.0)
    agreement: float = 30.0
    agreeing: float = 0.5


# Chosen on the tables that `benchmarks/calibration_pairs.py` judges, each source left out in turn.
# The performance model is centred on the engine, which alone is but a quarter of a form.
PRIOR = MixturePrior(
    weights={MODEL: 2.0, ENGINE: 0.25, FORM: 1.0},
    half=(1.0, 1.0, 30.0),
    agreeing=0.7,
)
# A performance model that corrects an engine knows more than a form that fits alike, and more of
# what was not seen (`benchmarks/published_accuracy.py`, after 8).
ENGINE_PRIOR = MixturePrior(
    weights=PRIOR.weights,
    error_sigma=0.1,
    half=(3.0, 3.0, 3.0),
    agreement=0.0,
)
# An error beyond this factor, in logarithms, says no more than this one.
_LARGEST_ERROR = 1.0
# Forms with so few parameters learn nothing from more rows.
_MOST_ROWS = 60
# Below this weight in the robust fit of the performance model an observation is an outlier, but of
# four at most one: where more are, the job scatters, and they count.
_MOST_OUTLIERS_RATIO = 0.25
_KINDS = 3
# How far forms usually are from steps, in logarithms.
_FORM_SIGMA = 0.1


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
        chosen = _chosen(observation_weights[left_out.observation], runs)
        kept = left_out.observation[chosen]
        self.kinds_ = _kinds(rows[kept])
        self.form_: LinearForm | None = None
        self.model_ = left_out, chosen
        self.left_out_ = {MODEL: left_out.log_ratio[chosen]}
        if engine_log_s is not None:
            self.left_out_[ENGINE] = (engine_log_s - log_times)[kept]
        if len(np.unique(places[kept])) > 1:
            self._fit_form(rows[kept], np.exp(log_times[kept]))
        self.prior_ = self.prior or (PRIOR if engine_log_s is None else ENGINE_PRIOR)
        self.weights_ = self.posterior_weights(self.prior_)
        return self

    def _fit_form(self, rows: Array, times: Array) -> None:
        """Fit the form, and predict every input by a fit to the others."""
        self.form_ = LinearForm(rows, times)
        errors = self.left_out_[FORM] = np.empty(len(rows))
        inputs = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
        for one in np.unique(inputs):
            out = inputs == one
            form = LinearForm(rows[~out], times[~out])
            errors[out] = form.log_step(rows[out]) - np.log(times[out])

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
            squares = np.minimum(np.abs(errors), _LARGEST_ERROR) ** 2
            total = prior.errors * prior.error_sigma**2 + counts @ squares
            variance = total / (prior.errors + counts.sum())
            known = same.sum() / (same.sum() + prior.half[kind])
            prior_weights = [
                prior.weights[name] * (known if name == FORM else 1.0) for name in experts
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
        self,
        rows: Array,
        log_model: Array,
        variance: Array,
        seen: Array,
        engine_log_s: Array | None = None,
    ) -> tuple[Array, Array]:
        """Log step times of rows seen so often, and the variance between the experts there.

        `variance` is the performance model's predictive one. What was observed of a row itself, the
        performance model knows: its n observations have n times the precision of one, beside which
        an expert that keeps none has that of its usual errors.
        """
        logs = {} if self.form_ is None else {FORM: self.form_.log_step(rows)}
        if engine_log_s is not None:
            logs[ENGINE] = engine_log_s
        share = 1 / (1 + seen * (_FORM_SIGMA / USUAL_NOISE_SIGMA) ** 2)
        away = {name: log - log_model for name, log in logs.items()}
        mean, between = self._pooled(_kinds(rows), away, variance, share)
        return log_model + mean, between

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
        weights *= 1 + prior.agreement * near
        weights *= share / (self.weights_[MODEL][kinds] + weights.sum(axis=0))
        mean = (weights * distances).sum(axis=0)
        return mean, np.maximum((weights * distances**2).sum(axis=0) - mean**2, 0)

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


def _kinds(rows: Array) -> NDArray[np.intp]:
    """Whether each row is on one device (0), within a node (1) or across nodes (2)."""
    return np.asarray((rows[:, RANKS] > 1).astype(np.intp) + (rows[:, NODES] > 1))


def _chosen(observation_weights: Array, counts: Array) -> NDArray[np.intp]:
    """Of many observations some that spread evenly, without outliers of the performance model.

    `counts` is how many independent observations each counts for.
    """
    least = np.argsort(observation_weights, kind="stable")
    least = least[np.cumsum(counts[least]) <= _MOST_OUTLIERS_RATIO * counts.sum()]
    outliers = least[observation_weights[least] < OUTLIER_WEIGHT]
    kept = np.setdiff1d(np.arange(len(observation_weights)), outliers)
    return kept[:: max(1, -(-len(kept) // _MOST_ROWS))]
