"""Fit corrections of the engine's predictions to observed steps of a workload.

The regression sees the engine's compute, synchronisation and whole step. Without observations the
answer is exactly the engine's; with many it converges to what was observed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from estimator.calibrate.change_points import NO_HOSTS, Change, Hosts, Shown, level_variance
from estimator.calibrate.performance_model import (
    ENGINE_PRIORS,
    NODES,
    PARAMETERS,
    RANKS,
    Array,
    EngineTimes,
    LogNormalPrior,
    Priors,
)
from estimator.calibrate.regressor import StepTimeRegressor
from estimator.coefficients import Z_80, JobContent, PredictedStep, StepQuestion

# Correlation of a log parameter between jobs on the same machines, the between-group level of a
# hierarchical model: they have the network in common whatever they compute, and the devices in
# proportion to their likeness (`JobContent`), 1 for one model with another sequence length.
_CORRELATION = {"compute": 0.75, "intra_node": 0.84, "inter_node": 0.84}
_BY_LIKENESS = frozenset({"compute"})
# The engine's error differs from one batch or allocation of a job to another: one standard
# deviation after one observation. It is what the regression's own standard deviation, fitted to
# steps that no engine predicted, lacks on published steps after eight observations of a source
# (docs/accuracy.md).
_UNOBSERVED_STEP_SIGMA = 0.12
# What other jobs have shown and this one has not is no news of it.
_LEAST_TOLD = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """The corrected prediction of one step.

    `compute_ratio` and `sync_ratio` are factors on the engine's compute and synchronisation;
    `relative_error` is one standard deviation of log(measured / step_s), None where only other jobs
    were observed.
    """

    step_s: float
    compute_ratio: float
    sync_ratio: float
    relative_error: float | None
    remark: str


class StepCorrections:
    """Corrections of one workload in one layout on one set of machine types, such as "t4-g4dn"."""

    def __init__(self, machines: str, content: JobContent, *, layout: str | None = None) -> None:
        self.machines, self.content, self.layout = machines, content, layout

    @property
    def place(self) -> tuple[str, str | None]:
        """What its steps have in common: their machine types and their layout."""
        return self.machines, self.layout

    def fit(
        self,
        predicted: Sequence[PredictedStep],
        step_times_s: Sequence[float],
        *,
        at: Sequence[float] | None = None,
        hosts: Sequence[Hosts] = (),
        others: Sequence[StepCorrections] = (),
        expected: Sequence[Change] = (),
        by_name: int = 0,
    ) -> StepCorrections:
        """Learn from observed step times and the engine's prediction of each.

        `others` are corrections of other workloads on the same machines, which make the priors;
        `expected` is what has changed there as other jobs have shown. `at` is when each step was
        observed, in seconds, `hosts` where. `by_name` observations are known to be of this job by
        its name alone.
        """
        rows, times = _rows(predicted), _engine_times(predicted)
        self.regressor_: StepTimeRegressor = StepTimeRegressor(
            priors=_pooled_priors(self.content, others),
            peers=[other.spread() for other in others],
        )
        self.regressor_.fit(
            rows,
            step_times_s,
            engine_times=times,
            at=at,
            hosts=hosts,
            expected=expected,
        )
        changes = self.regressor_.changes_.changes
        self.shown_: Shown = Shown.of(self.machines, changes, at or (), hosts)
        if len(rows):
            # What all questions need is worked out before the first is asked.
            self.regressor_.prediction(rows[:1], engine_times=_engine_times(predicted[:1]))
        self.rows_, self.by_name_ = rows, by_name
        own = any(other.content.fingerprint == self.content.fingerprint for other in others)
        self.teachers_ = "of other layouts" if own else "of other jobs"
        self.distinct_rows_ = frozenset(map(tuple, rows.tolist()))
        return self

    def correct(
        self,
        predicted: Sequence[PredictedStep],
        *,
        hosts: Sequence[Hosts] = (),
        later: Sequence[Change] = (),
    ) -> list[Correction]:
        """The corrections of steps that the engine predicts, on hosts where these are named.

        `later` is what other jobs have shown of the machines: it holds for what this one was not
        observed on since.
        """
        rows, times = _rows(predicted), _engine_times(predicted)
        predicted_rows = self.regressor_.prediction(rows, engine_times=times)
        share = predicted_rows.network_share
        since = [
            change
            for change in later
            if change.host is None and change.at > self.shown_.last_at and len(self.rows_)
        ]
        shift = sum((change.log_shift(share) for change in since), np.zeros(len(rows)))
        step_s = np.exp(predicted_rows.log_step + shift)
        if not len(self.rows_):
            step_s = _within_engine_interval(step_s, predicted)
        model = predicted_rows.model
        errors = np.hypot(predicted_rows.half_width / Z_80, self._unobserved_step_sigma(rows))
        errors = np.sqrt(errors**2 + level_variance(since, share))
        changes = [*(one for one in self.shown_.changes if one.host is None), *since]
        unlike = self._unlike_hosts(later)
        corrections = []
        for row, step in enumerate(predicted):
            on = hosts[row] if hosts else NO_HOSTS
            of_hosts = _effect_of_hosts(unlike, on, step.question.nodes)
            error = math.hypot(errors[row], of_hosts.sigma)
            corrections.append(
                Correction(
                    step_s=float(step_s[row]) * math.exp(of_hosts.log_ratio),
                    compute_ratio=math.exp(model.log_compute[row]) / step.compute_s,
                    sync_ratio=math.exp(model.log_sync[row]) / step.sync_s if step.sync_s else 1.0,
                    relative_error=error if len(self.rows_) else None,
                    remark=self._remark(
                        step.question,
                        [*changes, *of_hosts.changes],
                        extrapolates=bool(predicted_rows.extrapolates[row]),
                    ),
                )
            )
        return corrections

    def _unlike_hosts(self, later: Sequence[Change]) -> dict[str, Change]:
        """The hosts that are slower or faster than others, by this job where it has been there."""
        seen_at = self.shown_.hosts
        since = [one for one in later if one.at > seen_at.get(one.host or "", -math.inf)]
        return {one.host: one for one in (*since, *self.shown_.changes) if one.host is not None}

    def _unobserved_step_sigma(self, rows: Array) -> Array:
        """The additional standard deviation of steps that were not themselves observed."""
        sigma = _UNOBSERVED_STEP_SIGMA / math.sqrt(max(len(self.rows_), 1))
        known = self.distinct_rows_
        return np.array([0.0 if tuple(row) in known else sigma for row in rows.tolist()])

    def _remark(
        self, question: StepQuestion, changes: Sequence[Change], *, extrapolates: bool
    ) -> str:
        count = len(self.rows_)
        if not count:
            return (
                f"corrected by what observed steps {self.teachers_} say of {self.machines}, within "
                "the engine's own interval"
            )
        remark = (
            f"corrected by {count} observed step{'s' if count > 1 else ''} of {question.workload} "
            f"on {self.machines}{f' with layout {self.layout}' if self.layout else ''}"
        )
        if self.by_name_:
            which = "which are" if self.by_name_ == count else f"{self.by_name_} of which are"
            remark += f", {which} known to be of this job by its name alone"
        large = [change for change in changes if abs(change.log_ratio) > _LEAST_TOLD]
        remark += "".join(f"; {change.sentence(self.machines)}" for change in large)
        if extrapolates:
            remark += (
                f", none of which is like {question.ranks} ranks on {question.nodes} nodes with "
                f"batch {question.batch:g}: do not trust it this far out"
            )
        return remark

    def log_parameter(self, name: str) -> float:
        """The logarithm of a fitted parameter of `performance_model.PARAMETERS`."""
        return float(self.regressor_.log_parameters_[PARAMETERS.index(name)])

    def spread(self) -> Array:
        """How much the job's steps vary, as a peer of other jobs (`intervals.Spread.posterior`)."""
        return self.regressor_.spread_.posterior

    def informative_rows(self, name: str) -> int:
        """How many observed rows depend on a parameter of _CORRELATION."""
        several, across = self.rows_[:, RANKS] > 1, self.rows_[:, NODES] > 1
        counts = {"compute": len(several), "intra_node": (several & ~across).sum()}
        return int(counts.get(name, across.sum()))


class _HostEffect(NamedTuple):
    """What hosts add to the logarithm of a step, its standard deviation, and by which changes."""

    log_ratio: float = 0.0
    sigma: float = 0.0
    changes: Sequence[Change] = ()


def _effect_of_hosts(unlike: Mapping[str, Change], hosts: Hosts, nodes: int) -> _HostEffect:
    """Of hosts that are unlike the others on a step that waits for the slowest of its nodes.

    Where none is named, any may take part: the effect of those that would, times the chance that
    they do.
    """
    if not unlike:
        return _HostEffect()
    if hosts:
        slowest = [unlike[host] for host in hosts if host in unlike]
        if not slowest:
            return _HostEffect()
        change = max(slowest, key=lambda change: change.log_ratio)
        if len(slowest) < len(hosts) and change.log_ratio < 0:
            return _HostEffect()
        return _HostEffect(change.log_ratio, change.sigma, [change])
    changes = list(unlike.values())
    chances = np.array([min(nodes / change.hosts, 1.0) for change in changes])
    ratios = np.array([change.log_ratio for change in changes])
    chance = min(float(chances.sum()), 1.0)
    usual = float(chances @ ratios / chances.sum())
    variance = chance * (1 - chance) * usual**2
    variance += chance * float(chances @ (ratios - usual) ** 2 / chances.sum())
    return _HostEffect(chance * usual, math.sqrt(variance), changes)


def _within_engine_interval(step_s: Array, predicted: Sequence[PredictedStep]) -> Array:
    """Step times of a job that was not observed, kept within the engine's own intervals."""
    engine_s = np.array([step.step_s for step in predicted])
    factor = np.exp(Z_80 * np.array([step.relative_error for step in predicted]))
    return np.clip(step_s, engine_s / factor, engine_s * factor)


def _pooled_priors(content: JobContent, others: Sequence[StepCorrections]) -> Priors:
    """Priors of a job on machines that other jobs ran on: partial pooling of their parameters.

    A Gaussian process over jobs: a log parameter of two jobs has the correlation of _CORRELATION,
    for compute times their likeness. One fitted to n rows has about the standard error of one row,
    taken as sigma of the prior, over √n.
    """
    priors = {}
    for name, correlation in _CORRELATION.items():
        known = ENGINE_PRIORS.by_name[name]
        fits = [(model, model.informative_rows(name)) for model in others]
        jobs = [content, *(model.content for model, n in fits if n)]
        alike = [
            [one.likeness(two) if name in _BY_LIKENESS else 1.0 for two in jobs] for one in jobs
        ]
        covariance = correlation * np.array(alike)
        np.fill_diagonal(covariance, [1.0, *(1 + 1 / n for _, n in fits if n)])
        gain = np.linalg.solve(covariance[1:, 1:], covariance[1:, 0])
        values = [model.log_parameter(name) - math.log(known.median) for model, n in fits if n]
        priors[name] = LogNormalPrior(
            median=known.median * math.exp(float(gain @ np.array(values))),
            sigma=known.sigma * math.sqrt(1 - float(gain @ covariance[1:, 0])),
        )
    return ENGINE_PRIORS.updated(**priors)


def _rows(predicted: Sequence[PredictedStep]) -> Array:
    questions = [step.question for step in predicted]
    return np.array(
        [
            (q.ranks, q.nodes, max(q.batch, 1.0), q.accumulation_steps, q.most_on_node)
            for q in questions
        ],
        dtype=float,
    ).reshape(-1, 5)


def _engine_times(predicted: Sequence[PredictedStep]) -> EngineTimes:
    return EngineTimes(
        compute_s=np.array([step.compute_s for step in predicted], dtype=float),
        sync_s=np.array([step.sync_s for step in predicted], dtype=float),
        step_s=np.array([step.step_s for step in predicted], dtype=float),
    )
