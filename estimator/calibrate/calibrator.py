"""Correct estimates by the steps observed so far: multipliers on the engine's physical model."""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from estimator.calibrate.database import PATIENCE_S
from estimator.calibrate.observations import ObservationStore
from estimator.calibrate.observed import Observation, ObservedWorkload
from estimator.coefficients import (
    UNCALIBRATED,
    Coefficients,
    Engine,
    PredictedStep,
    StepQuestion,
)
from estimator.errors import EstimatorError
from estimator.placement.allocation import Allocation

if TYPE_CHECKING:
    from estimator.calibrate.corrections import Correction, StepCorrections
    from estimator.graph.op_graph import OpGraph

logger = logging.getLogger(__name__)

# An observation this old counts half: machines, drivers and neighbours change.
HALF_LIFE_DAYS = 30.0
_MOST_ANSWERS = 100_000
_Asked = tuple[str, int, int, str]


class Calibrator:
    """Observed steps, and what they teach of each workload and each cluster.

    ``estimate(graph, allocation, calibration=calibrator)`` gives the calibrated answer. Nothing is
    learnt of a workload before it is asked for with its graph; `fit` takes in what any process has
    observed since. Without observations an estimate is the engine's own. One calibrator goes with
    one cluster; after its machines were probed again, make a new one.

    `store` is an ObservationStore, a path, or None for the user's store. An observation counts half
    as much as one of the same job that is `half_life_days` younger. Raises StoreError where the
    store cannot be used.
    """

    def __init__(
        self,
        store: ObservationStore | str | os.PathLike[str] | None = None,
        *,
        half_life_days: float = HALF_LIFE_DAYS,
    ) -> None:
        self.store = store if isinstance(store, ObservationStore) else ObservationStore(store)
        self.half_life_days = half_life_days
        self._seen: dict[str, _Seen] = {}
        self._answers: OrderedDict[StepQuestion, Coefficients] = OrderedDict()

    def observe(
        self,
        workload: str | ObservedWorkload | OpGraph,
        allocation: str | Allocation,
        *,
        step_time_s: float,
        batch_per_gpu: int,
        **details: Any,
    ) -> None:
        """Keep one observed step time; `details` are further fields of `Observation`.

        Counts for estimates after the next `fit`. Raises ObservationError, StoreError.
        """
        summary = ObservedWorkload.of(workload)
        observation = Observation(
            workload=summary.name,
            allocation=str(allocation),
            step_time_s=step_time_s,
            batch_per_gpu=batch_per_gpu,
            **details,
        )
        self.add_many([observation], summaries=[summary])

    def add_many(
        self,
        observations: Iterable[Observation],
        *,
        summaries: Iterable[ObservedWorkload] = (),
        patience_s: float = PATIENCE_S,
    ) -> int:
        """Keep observations; how many were new. `estimator.observe` writes here."""
        return self.store.add_many(observations, summaries=summaries, patience_s=patience_s)

    def fit(self) -> Calibrator:
        """Learn from what was observed since the last fit, of every workload asked for so far."""
        self._answers.clear()
        changed = [seen.read(self.store) for seen in self._seen.values()]
        if any(changed):
            # What one workload teaches of the machines changes the answers for all; those seen most
            # teach first.
            for seen in sorted(self._seen.values(), key=lambda each: -len(each.observations)):
                seen.fit(self.half_life_days, self._others(seen))
        return self

    def coefficients_for(
        self,
        questions: Sequence[StepQuestion],
        allocations: Sequence[Allocation],
        engine: Engine,
    ) -> list[Coefficients]:
        """The factors for each step; see `coefficients.Calibration`."""
        workload = questions[0].workload if questions else ""
        seen = self._seen.get(workload)
        if seen is None or seen.engine.key != engine.key:
            seen = self._learn(workload, engine)
        answers = self._answers
        new = {
            q: where for q, where in zip(questions, allocations, strict=True) if q not in answers
        }
        answers.update(seen.answers(new))
        found = [answers[question] for question in questions]
        while len(answers) > _MOST_ANSWERS:
            answers.popitem(last=False)
        return found

    def _learn(self, workload: str, engine: Engine) -> _Seen:
        # What was answered by another graph, cluster or profile holds no more.
        self._answers.clear()
        seen = self._seen[workload] = _Seen(workload=workload, engine=engine)
        seen.read(self.store)
        seen.fit(self.half_life_days, self._others(seen))
        return seen

    def _others(self, seen: _Seen) -> list[StepCorrections]:
        """What was learnt of other workloads by their own observations."""
        return [
            fitted
            for other in self._seen.values()
            if other is not seen
            for fitted in other.fitted.values()
            if len(fitted.rows_)
        ]


@dataclass(slots=True, kw_only=True, eq=False)
class _Seen:
    """The observations of one workload beside what an engine predicts of them."""

    workload: str
    engine: Engine
    revision: int = -1
    observations: list[tuple[Observation, PredictedStep]] = field(default_factory=list)
    predicted: dict[_Asked, PredictedStep | str] = field(default_factory=dict)
    fitted: dict[str, StepCorrections] = field(default_factory=dict)

    def read(self, store: ObservationStore) -> bool:
        """Take in what was observed, if anything is new; whether it was."""
        # Read first: what comes in between is read again rather than missed.
        revision = store.revision
        if revision == self.revision:
            return False
        self.revision = revision
        before = len(self.observations)
        self.observations, refused = [], Counter[str]()
        for observation in store.observations(workload=self.workload):
            # A later observation may show an earlier one to be an outlier, or none.
            if observation.outlier_reason is not None:
                continue
            predicted = self._predict(observation)
            if isinstance(predicted, PredictedStep):
                self.observations.append((observation, predicted))
            else:
                refused[predicted] += 1
        for reason, count in refused.items():
            logger.warning("%d observations of %s are left out: %s", count, self.workload, reason)
        return len(self.observations) != before

    def _predict(self, observation: Observation) -> PredictedStep | str:
        """The engine's prediction of an observed step, cached, or why there is none."""
        asked = (
            observation.allocation,
            observation.batch_per_gpu,
            observation.accumulation_steps,
            observation.strategy,
        )
        if asked not in self.predicted:
            try:
                self.predicted[asked] = self.engine.predict(
                    observation.allocation,
                    batch_per_gpu=observation.batch_per_gpu,
                    accumulation_steps=observation.accumulation_steps,
                    strategy=observation.strategy,
                    coefficients=UNCALIBRATED,
                )
            except EstimatorError as error:
                self.predicted[asked] = str(error)
        return self.predicted[asked]

    def fit(self, half_life_days: float, others: Sequence[StepCorrections]) -> None:
        """Learn the corrections of every set of machine types that was observed."""
        from estimator.calibrate.corrections import StepCorrections

        by_machines: dict[str, list[tuple[Observation, PredictedStep]]] = {
            other.machines: [] for other in others
        }
        for observation, predicted in self.observations:
            key = predicted.question.machines
            by_machines.setdefault(key, []).append((observation, predicted))
        self.fitted = {}
        for machines, observed in by_machines.items():
            # Age counts from the newest observation, not from today: without newer ones, old
            # observations keep their full weight.
            newest = max((one.at for one, _ in observed), default=None)
            ages = [(newest - one.at).total_seconds() / 86400 for one, _ in observed if newest]
            weights = [0.5 ** (age / half_life_days) for age in ages]
            alike = [other for other in others if other.machines == machines]
            self.fitted[machines] = StepCorrections(machines).fit(
                [predicted for _, predicted in observed],
                [one.step_time_s for one, _ in observed],
                weights=weights,
                others=alike,
            )

    def answers(
        self, asked: Mapping[StepQuestion, Allocation]
    ) -> Iterator[tuple[StepQuestion, Coefficients]]:
        """The factors for steps that are asked, by the corrections of their machine types."""
        by_machines: dict[str, list[StepQuestion]] = {}
        for question in asked:
            if question.machines in self.fitted:
                by_machines.setdefault(question.machines, []).append(question)
            else:
                yield question, UNCALIBRATED
        for machines, questions in by_machines.items():
            cold = [self._asked(asked[question], question, UNCALIBRATED) for question in questions]
            corrections = self.fitted[machines].correct(cold)
            for question, found in zip(questions, corrections, strict=True):
                yield question, self._scaled(asked[question], question, found)

    def _asked(
        self, allocation: Allocation, question: StepQuestion, coefficients: Coefficients
    ) -> PredictedStep:
        return self.engine.predict(
            allocation,
            batch_per_gpu=round(question.batch) or None,
            accumulation_steps=question.accumulation_steps,
            strategy=question.strategy,
            coefficients=coefficients,
        )

    def _scaled(
        self, allocation: Allocation, question: StepQuestion, found: Correction
    ) -> Coefficients:
        """Factors that make the engine's step the corrected one.

        The engine's overlap is not the performance model's, so the model's factors alone give
        another step: they are scaled by the ratio of both.
        """
        trial = Coefficients(
            compute_ratio=found.compute_ratio,
            update_ratio=found.compute_ratio,
            communication_ratio=found.sync_ratio,
        )
        scale = found.step_s / self._asked(allocation, question, trial).step_s
        return Coefficients(
            compute_ratio=found.compute_ratio * scale,
            update_ratio=found.compute_ratio * scale,
            communication_ratio=found.sync_ratio * scale,
            relative_error=found.relative_error,
            remark=found.remark,
        )
