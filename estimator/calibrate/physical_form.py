"""Fit the step law to observed steps of one job on one kind of device, and predict from it.

Maximum a posteriori least squares in log space (priors of `priors`, law of `step_law`), robust to
outliers; what the law still misses near what was seen is carried over by `residual_field`. The
interface is that of `baselines`, with the most devices on one node as a fifth column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from estimator.calibrate import intervals, residual_field
from estimator.calibrate.posterior import Evidence, Posterior
from estimator.calibrate.priors import (
    COMPUTE_KNOWN,
    NEUTRAL,
    PARAMETERS,
    SYNC_KNOWN,
    Array,
    Priors,
    carried_over,
)
from estimator.calibrate.residual_field import Sites
from estimator.calibrate.step_law import (
    BATCH,
    LARGEST_NODE,
    NODES,
    RANKS,
    LawValues,
    Parts,
    Reference,
    log_step,
)
from estimator.calibrate.step_rows import Observed, placed_rows
from estimator.errors import WorkloadError

_ROUNDS = 6
_SETTLED = 0.01
_FIRST_STEP = 1.0
_GUESSES = 3
# Degrees of freedom of the Student law that errors of single observations are taken to follow.
_FREEDOM = 4.0
# Beyond the 99.9 % interval of a normal variable an observation is doubted, until two more agree.
_DOUBTFUL = 3.29
_CONFIRMED = 3
# What a row is near or far by.
_TOLD = [RANKS, NODES, BATCH, LARGEST_NODE]
# The field learns from so many distinct rows, the last ones: its cost grows with their cube.
_FIELD_SITES = 1000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """What a fitted form says of rows, in logarithms of seconds.

    Measured steps lie within `half_width` of `log_step` as often as was asked; rows that are
    `is_far` from everything seen are not to be trusted. `law` is the fitted law alone.
    """

    log_step: Array
    half_width: Array
    is_far: NDArray[np.bool_]
    law: LawValues


class PhysicalForm:
    """Step times of one job from few observations: sure of physics, unsure of the rest.

    `priors` are beliefs about the job; None takes those of no job in particular, centred on the
    engine's own seconds where these are given.
    """

    def __init__(self, *, priors: Priors | None = None) -> None:
        self.priors = priors

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        weights: ArrayLike | None = None,
        *,
        parts: Parts | None = None,
    ) -> Self:
        """Learn from rows, their step times in seconds, and the engine's seconds where known.

        A weight counts observations (1 is an ordinary one). Without rows only both parts say
        anything, so both must be given (as empty arrays).
        """
        seen = Observed.checked(X, y, weights, parts)
        compute_s, sync_s = (parts or Parts()).columns(len(seen.rows))
        if not len(seen.rows) and (compute_s is None or sync_s is None):
            raise WorkloadError(
                "there are no observations to learn from; give some, or both of the engine's parts"
            )
        priors = self.priors
        if priors is None:
            known = COMPUTE_KNOWN if compute_s is not None else {}
            priors = NEUTRAL.centred(**known, **(SYNC_KNOWN if sync_s is not None else {}))
        self.reference_ = _reference(seen, priors, compute_s)
        self.centres_, self.widths_ = priors.log_centres(), priors.widths()
        self.deviations_ = np.zeros(len(PARAMETERS))
        self.observation_weights_ = np.ones(len(seen.rows))
        if len(seen.rows):
            self._fit_law(seen)
        self.log_parameters_ = self.centres_ + self.widths_ * self.deviations_
        told = seen.rows[:, _TOLD]
        self.seen_range_ = np.stack([told.min(axis=0), told.max(axis=0)]) if len(told) else told
        self.posterior_ = Posterior(self._evidence(seen))
        return self

    def fit_from(
        self, origin: tuple[ArrayLike, ArrayLike], X: ArrayLike, y: ArrayLike
    ) -> PhysicalForm:
        """Learn the same job on a new kind of device, with what `origin`'s rows say of the job."""
        known = PhysicalForm().fit(*origin)
        spreads = known.widths_ * np.sqrt(np.diag(known.posterior_.parameter_covariance))
        priors = carried_over(known.log_parameters_, spreads, new=self.priors or NEUTRAL)
        return PhysicalForm(priors=priors).fit(X, y)

    def law(self, X: ArrayLike, *, parts: Parts | None = None) -> LawValues:
        """The fitted law at rows, without what was seen of these very rows."""
        return self._law(self.deviations_, placed_rows(X), parts)

    def predict(self, X: ArrayLike, *, parts: Parts | None = None) -> Array:
        """Step times of rows, in seconds."""
        sites, law = self._sites(X, parts)
        return np.exp(law.log_step + self.posterior_.mean(sites, law.jacobian * self.widths_))

    def predict_interval(
        self,
        X: ArrayLike,
        *,
        parts: Parts | None = None,
        coverage_ratio: float = intervals.COVERAGE_RATIO,
    ) -> tuple[Array, Array]:
        """Step times between which the given share of measured ones should lie, in seconds."""
        answer = self.answer(X, parts=parts, coverage_ratio=coverage_ratio)
        return (
            np.exp(answer.log_step - answer.half_width),
            np.exp(answer.log_step + answer.half_width),
        )

    def extrapolates_far(self, X: ArrayLike, *, parts: Parts | None = None) -> NDArray[np.bool_]:
        """Which rows are so far from everything seen that their prediction is not to be trusted."""
        return self.answer(X, parts=parts).is_far

    def answer(
        self,
        X: ArrayLike,
        *,
        parts: Parts | None = None,
        coverage_ratio: float = intervals.COVERAGE_RATIO,
    ) -> Answer:
        """All that the form has to say of rows."""
        sites, law = self._sites(X, parts)
        slopes = law.jacobian * self.widths_
        mean, variance = self.posterior_.mean_and_variance(sites, slopes)
        factors = self.posterior_.factors(law.sync_share, coverage_ratio)
        of_law = np.sqrt(self.posterior_.law_variance(slopes))
        return Answer(
            log_step=law.log_step + mean,
            half_width=factors * np.sqrt(variance),
            is_far=intervals.extrapolates_far(sites.rows[:, _TOLD], self.seen_range_, of_law),
            law=law,
        )

    def _law(self, deviations: Array, rows: Array, parts: Parts | None) -> LawValues:
        return log_step(self.centres_ + self.widths_ * deviations, rows, self.reference_, parts)

    def _sites(self, X: ArrayLike, parts: Parts | None) -> tuple[Sites, LawValues]:
        rows = placed_rows(X)
        law = self._law(self.deviations_, rows, parts)
        return Sites(rows=rows, sync_share=law.sync_share), law

    def _fit_law(self, seen: Observed) -> None:
        """Alternate between the law's parameters and the weights of doubtful observations."""
        from scipy.optimize import leastsq

        for _ in range(_ROUNDS):
            law = self._law(self.deviations_, seen.rows, seen.parts)
            variance = residual_field.total_variance(law.sync_share)
            scale = np.sqrt(seen.weights * self.observation_weights_ / variance)
            before = self.deviations_
            # Short first steps: far from the priors another optimum, less likely, may lie in wait.
            self.deviations_ = leastsq(
                lambda z, scale=scale: self._residuals(z, seen, scale)[0],
                before,
                Dfun=lambda z, scale=scale: self._residuals(z, seen, scale)[1],
                diag=np.ones(len(before)),
                factor=_FIRST_STEP,
                xtol=1e-6,
                ftol=1e-6,
                maxfev=100,
                full_output=True,
            )[0]
            weights = self._doubts(seen, scale)
            change = np.abs(weights - self.observation_weights_).max()
            self.observation_weights_ = weights
            if max(change, np.abs(self.deviations_ - before).max()) < _SETTLED:
                break

    def _residuals(self, deviations: Array, seen: Observed, scale: Array) -> tuple[Array, Array]:
        """Errors and slopes of observations in their spreads, and of parameters in their widths."""
        law = self._law(deviations, seen.rows, seen.parts)
        errors = np.concatenate([(law.log_step - seen.log_times) * scale, deviations])
        slopes = law.jacobian * self.widths_ * scale[:, None]
        return errors, np.vstack([slopes, np.eye(len(deviations))])

    def _doubts(self, seen: Observed, scale: Array) -> Array:
        """Weights of observations by how far they are from what the others say."""
        errors, slopes = self._residuals(self.deviations_, seen, scale)
        data = slopes[: len(seen.rows)]
        leverage = ((data @ np.linalg.inv(slopes.T @ slopes)) * data).sum(axis=1)
        free = self.observation_weights_ * np.maximum(1 - leverage, 1e-6)
        apart = np.maximum(np.abs(errors[: len(seen.rows)]) / np.sqrt(free), 1e-9)
        student = (_FREEDOM + 1) / (_FREEDOM + apart**2)
        return np.asarray(np.minimum(student, 1) * np.minimum(1, _DOUBTFUL / apart) ** 2)

    def _evidence(self, seen: Observed) -> Evidence:
        """What the distinct rows say beyond the law."""
        law = self._law(self.deviations_, seen.rows, seen.parts)
        rows, place = seen.distinct()
        first = np.full(len(rows), len(place))
        np.minimum.at(first, place, np.arange(len(place)))
        residuals = seen.log_times - law.log_step
        weights = seen.weights * self.observation_weights_
        own = np.zeros(len(rows))
        variance = residual_field.total_variance(law.sync_share)
        for site in np.flatnonzero(np.bincount(place, minlength=len(rows)) >= _CONFIRMED):
            members = np.flatnonzero(place == site)
            agreed = np.median(residuals[members])
            spread = np.sqrt(residual_field.run_variance(law.sync_share[members]))
            near = np.abs(residuals[members] - agreed) < _DOUBTFUL * spread
            if near.sum() >= _CONFIRMED:
                weights[members] = np.where(near, seen.weights[members], weights[members])
                own[site] = max(agreed**2 - variance[members[0]], 0.0)
        total = np.bincount(place, weights, minlength=len(rows))
        mean = np.bincount(place, weights * residuals, minlength=len(rows)) / total
        last = np.sort(np.argsort(first)[-_FIELD_SITES:])
        at = first[last]
        kept = np.full(len(rows), -1)
        kept[last] = np.arange(len(last))
        of_kept = kept[place] >= 0
        return Evidence(
            sites=Sites(rows=rows[last], sync_share=law.sync_share[at]),
            slopes=law.jacobian[at] * self.widths_,
            residuals=mean[last],
            noise=(residual_field.run_variance(law.sync_share[at]) / total[last]),
            own=own[last],
            deviations=self.deviations_,
            run_sites=kept[place[of_kept]],
            run_residuals=residuals[of_kept],
            run_noise=(residual_field.run_variance(law.sync_share) / seen.weights)[of_kept],
        )


def _reference(seen: Observed, priors: Priors, compute_s: Array | None) -> Reference:
    """Where the law is centred: the mean batch, and the compute that the fewest ranks suggest."""
    if not len(seen.rows):
        return Reference(compute_s=1.0, batch=1.0)
    batch = float(np.exp(np.log(seen.rows[:, BATCH]).mean()))
    if compute_s is not None:
        return Reference(compute_s=float(np.exp(np.log(compute_s).mean())), batch=batch)
    fewest = seen.rows[:, RANKS] == seen.rows[:, RANKS].min()
    rows, times = seen.rows[fewest], seen.log_times[fewest]
    guess_s = float(np.exp(times.mean()))
    for _ in range(_GUESSES):
        law = log_step(priors.log_centres(), rows, Reference(compute_s=guess_s, batch=batch))
        guess_s *= float(np.exp((times - law.log_step).mean()))
    return Reference(compute_s=guess_s, batch=batch)
