"""What a policy believes of speeds: wrong by a known amount, or learnt from what was replayed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from estimator.calibrate.corrections import StepCorrections
from estimator.cluster.jobs import Job
from estimator.cluster.nodes import Shape
from estimator.cluster.speeds import Speeds
from estimator.coefficients import UNCALIBRATED, PredictedStep
from estimator.engine import DEFAULT, TrialEngine


class MistakenSpeeds:
    """Speeds off by log-normal factors: one device exact, one factor for each power of two.

    `error_ratio` is the standard deviation of a factor's logarithm; factors are independent
    between jobs and between powers of two.
    """

    def __init__(self, exact: Speeds, error_ratio: float, jobs: Sequence[Job], seed: int) -> None:
        self._exact, self._error, self._seed = exact, error_ratio, seed
        self._numbers = {job.name: number for number, job in enumerate(jobs)}
        self._factors: dict[tuple[str, int], float] = {}

    def step_times_s(
        self, job: Job, shapes: Sequence[Shape], global_batch: int | None = None
    ) -> list[float]:
        """Seconds of one optimizer step on each shape."""
        exact = self._exact.step_times_s(job, shapes, global_batch)
        return [
            self._factor(job, shape.ranks) * each for shape, each in zip(shapes, exact, strict=True)
        ]

    def _factor(self, job: Job, ranks: int) -> float:
        power = ranks.bit_length() - 1
        if not power:
            return 1.0
        if (job.name, power) not in self._factors:
            rng = np.random.default_rng([self._seed, self._numbers[job.name], power])
            self._factors[job.name, power] = math.exp(self._error * rng.standard_normal())
        return self._factors[job.name, power]


class CalibratedSpeeds:
    """The engine's answers, corrected for each job by the steps that it was seen to take.

    The corrections are the calibrator's (`calibrate.corrections`), one set for each job and machine
    type; a shape is observed once.
    """

    def __init__(self) -> None:
        self._predicted: dict[tuple[int, int, int, Shape], PredictedStep] = {}
        self._seen: dict[tuple[str, str], dict[tuple[Shape, int | None], float]] = {}
        self._fitted: dict[tuple[str, str], StepCorrections] = {}

    def observe(self, job: Job, shape: Shape, step_s: float, global_batch: int | None) -> bool:
        """Take in the step time of a running job; whether that changes what is believed."""
        seen = self._seen.setdefault((job.name, shape.machine), {})
        if (shape, global_batch) in seen:
            return False
        seen[shape, global_batch] = step_s
        predicted = [self._predict(job, each, batch) for each, batch in seen]
        self._fitted[job.name, shape.machine] = StepCorrections(
            shape.machine, DEFAULT.content(job.graph)
        ).fit(predicted, list(seen.values()), weights=[1.0] * len(seen), others=[])
        return True

    def step_times_s(
        self, job: Job, shapes: Sequence[Shape], global_batch: int | None = None
    ) -> list[float]:
        """Seconds of one optimizer step on each shape."""
        predicted = [self._predict(job, shape, global_batch) for shape in shapes]
        found = [each.step_s for each in predicted]
        for machine in {shape.machine for shape in shapes}:
            fitted = self._fitted.get((job.name, machine))
            if fitted is not None:
                rows = [row for row, shape in enumerate(shapes) if shape.machine == machine]
                corrected = fitted.correct([predicted[row] for row in rows])
                for row, correction in zip(rows, corrected, strict=True):
                    found[row] = correction.step_s
        return found

    def _predict(self, job: Job, shape: Shape, global_batch: int | None) -> PredictedStep:
        batch, micro_batches = job.split(shape.ranks, global_batch)
        key = id(job.graph), batch, micro_batches, shape
        if key not in self._predicted:
            engine = TrialEngine(
                engine=DEFAULT,
                graph=job.graph,
                cluster=None,
                profile=None,
                content=DEFAULT.content(job.graph),
            )
            self._predicted[key] = engine.predict(
                str(shape),
                batch_per_gpu=batch,
                accumulation_steps=micro_batches,
                strategy="ddp",
                coefficients=UNCALIBRATED,
            )
        return self._predicted[key]
