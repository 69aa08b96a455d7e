"""Learn how observed steps differ from the engine's, by the step law with the engine's parts.

The law is no engine: what it says of the engine's own parts before anything is learnt differs from
the engine's step by an offset, row by row. Taken off what was observed and put onto what is
predicted, the offset makes the engine's answer the one without observations, and what was seen the
answer with many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from estimator.accuracy import Z_80
from estimator.calibrate.physical_form import PhysicalForm
from estimator.calibrate.priors import (
    COMPUTE_KNOWN,
    NEUTRAL,
    PARAMETERS,
    SYNC_KNOWN,
    Array,
    LogPrior,
    Priors,
)
from estimator.calibrate.step_law import NODES, RANKS, Parts, Reference, log_step
from estimator.coefficients import PredictedStep, StepQuestion

ENGINE_KNOWN = NEUTRAL.centred(**COMPUTE_KNOWN, **SYNC_KNOWN)
# Jobs on the same machines have the network and the devices in common, and differ by this much
# (one standard deviation of a logarithm) in what they make of them.
_BETWEEN_JOBS = {"compute": 0.15, "within": 0.2, "across": 0.2}
# The engine is off by another factor at another batch or allocation of the same job: one standard
# deviation after one observation. What the form's own spread, found on steps that no engine
# predicted, lacks on published steps after eight observations of a source (docs/accuracy.md).
_UNLIKE_STEP_ERROR = 0.12


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What was learnt of one step.

    `compute_ratio` and `sync_ratio` are the law's factors on the engine's parts; `relative_error`
    is one standard deviation of log(measured / step_s), None where only other jobs were seen.
    """

    step_s: float
    compute_ratio: float
    sync_ratio: float
    relative_error: float | None
    remark: str


class StepCorrections:
    """Corrections of one workload on one set of machine types, such as "t4-g4dn"."""

    def __init__(self, machines: str) -> None:
        self.machines = machines

    def fit(
        self,
        predicted: Sequence[PredictedStep],
        step_times_s: Sequence[float],
        *,
        weights: Sequence[float],
        others: Sequence[StepCorrections] = (),
    ) -> StepCorrections:
        """Learn from observed step times beside what the engine says of each.

        `others` are corrections of other workloads on the same machines, all there is to go by
        where no step of this one was observed. A weight is how many observations one counts for.
        """
        rows, parts = _rows(predicted), _parts(predicted)
        observed_s = np.array(step_times_s, dtype=float) / _offsets(predicted, rows, parts)
        self.form_ = PhysicalForm(priors=_shared(others))
        self.form_.fit(rows, observed_s, weights, parts=parts)
        self.rows_ = rows
        self.seen_ = frozenset(map(tuple, rows.tolist()))
        return self

    def correct(self, predicted: Sequence[PredictedStep]) -> list[Correction]:
        """The corrections of steps that the engine predicts."""
        rows, parts = _rows(predicted), _parts(predicted)
        answer = self.form_.answer(rows, parts=parts)
        step_s = np.exp(answer.log_step) * _offsets(predicted, rows, parts)
        law = answer.law
        errors = np.hypot(answer.half_width / Z_80, self._unlike_error(rows))
        return [
            Correction(
                step_s=float(step_s[row]),
                compute_ratio=math.exp(law.log_compute[row]) / step.compute_s,
                sync_ratio=math.exp(law.log_sync[row]) / step.sync_s if step.sync_s else 1.0,
                relative_error=float(errors[row]) if len(self.rows_) else None,
                remark=self._remark(step.question, is_far=bool(answer.is_far[row])),
            )
            for row, step in enumerate(predicted)
        ]

    def _unlike_error(self, rows: Array) -> Array:
        """What comes on top for steps that differ from all that was observed."""
        error = _UNLIKE_STEP_ERROR / math.sqrt(max(len(self.rows_), 1))
        return np.array([0.0 if tuple(row) in self.seen_ else error for row in rows.tolist()])

    def _remark(self, question: StepQuestion, *, is_far: bool) -> str:
        seen = len(self.rows_)
        if not seen:
            return f"corrected by what observed steps of other jobs say of {self.machines}"
        remark = (
            f"corrected by {seen} observed step{'s' if seen > 1 else ''} of {question.workload} on "
            f"{self.machines}"
        )
        if is_far:
            remark += (
                f", none of which is like {question.ranks} ranks on {question.nodes} nodes with "
                f"batch {question.batch:g}: do not trust it this far out"
            )
        return remark

    def log_parameter(self, name: str) -> float:
        """The logarithm of a learnt factor of `priors.PARAMETERS`."""
        return float(self.form_.log_parameters_[PARAMETERS.index(name)])

    def informative(self, name: str) -> int:
        """How many observed rows say something of a factor of _BETWEEN_JOBS."""
        several, across = self.rows_[:, RANKS] > 1, self.rows_[:, NODES] > 1
        telling = {"compute": len(several), "within": (several & ~across).sum()}
        return int(telling.get(name, across.sum()))


def _shared(others: Sequence[StepCorrections]) -> Priors:
    """What is believed of a job before it was seen on machines that other jobs have run on."""
    priors = {}
    for name, between in _BETWEEN_JOBS.items():
        known = ENGINE_KNOWN.by_name[name]
        told = [(each.log_parameter(name), each.informative(name)) for each in others]
        # A job of n rows knows its own factor to within the width of the prior over √n.
        precisions = [1 / (between**2 + known.width**2 / n) for _, n in told if n]
        values = [value for value, n in told if n]
        total = sum(precisions) + 1 / known.width**2
        mean = sum(p * value for p, value in zip(precisions, values, strict=True)) / total
        mean += math.log(known.centre) / known.width**2 / total
        width = min(math.sqrt(1 / total + between**2), known.width)
        priors[name] = LogPrior(centre=math.exp(mean), width=width)
    return ENGINE_KNOWN.centred(**priors)


def _rows(predicted: Sequence[PredictedStep]) -> Array:
    asked = [step.question for step in predicted]
    return np.array(
        [
            (q.ranks, q.nodes, max(q.batch, 1.0), q.accumulation_steps, q.most_on_node)
            for q in asked
        ],
        dtype=float,
    ).reshape(-1, 5)


def _parts(predicted: Sequence[PredictedStep]) -> Parts:
    return Parts(
        compute_s=np.array([step.compute_s for step in predicted], dtype=float),
        sync_s=np.array([step.sync_s for step in predicted], dtype=float),
    )


def _offsets(predicted: Sequence[PredictedStep], rows: Array, parts: Parts) -> Array:
    """The engine's step over what the law says of its parts before anything is learnt."""
    law = log_step(ENGINE_KNOWN.log_centres(), rows, Reference(compute_s=1.0, batch=1.0), parts)
    return np.array([step.step_s for step in predicted]) / np.exp(law.log_step)
