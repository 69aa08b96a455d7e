"""How fast a job trains on a shape of devices: what is true, and what a policy believes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from estimator.calibrate.corrections import StepCorrections
from estimator.coefficients import (
    UNCALIBRATED,
    Calibration,
    Coefficients,
    PredictedStep,
    StepPredictor,
    StepQuestion,
)
from estimator.estimates.engine import DEFAULT, TrialEngine
from estimator.estimates.table import estimate_many
from estimator.graph.ir.op_graph import OpGraph
from estimator.placement.allocation import Allocation
from estimator.placement.topology import Cluster
from estimator.replay.jobs import Job
from estimator.replay.nodes import AllocationShape

# Hidden differences between the engine and the machine, as standard deviations of the logarithm:
# of a job's computing, of its network, and of each of its allocations.
COMPUTE_SPREAD = 0.12
NETWORK_SPREAD = 0.25
ALLOCATION_SPREAD = 0.05


class Speeds(Protocol):
    """Step times of jobs on shapes."""

    def step_times_s(
        self, job: Job, shapes: Sequence[AllocationShape], global_batch: int | None = None
    ) -> list[float]:
        """Seconds of one optimizer step on each shape."""
        ...


class EngineSpeeds:
    """What the engine says, each (graph, split, shape) asked once, many in one table."""

    def __init__(self, cluster: Cluster | None = None) -> None:
        self._cluster = cluster
        self._known: dict[tuple[int, int, int, AllocationShape], float] = {}

    def __reduce__(self) -> tuple[type[EngineSpeeds], tuple[Cluster | None]]:
        # What is known goes by where graphs are in memory: another process has others there.
        return EngineSpeeds, (self._cluster,)

    def step_times_s(
        self, job: Job, shapes: Sequence[AllocationShape], global_batch: int | None = None
    ) -> list[float]:
        """Seconds of one optimizer step on each shape."""
        keys = [(id(job.graph), *job.split(s.ranks, global_batch), s) for s in shapes]
        missing = [key for key in dict.fromkeys(keys) if key not in self._known]
        if missing:
            self._known.update(_asked(job, missing, self._cluster))
        return [self._known[key] for key in keys]


class TrueSpeeds:
    """The engine's answer times factors that no policy sees: per job, and per job and shape.

    A job's computing and its network each go by a log-normal factor of their own; so does each of
    its shapes. The factors depend on the seed and the job's number alone.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        seed: int,
        *,
        cluster: Cluster | None = None,
        compute_spread: float = COMPUTE_SPREAD,
        network_spread: float = NETWORK_SPREAD,
        allocation_spread: float = ALLOCATION_SPREAD,
    ) -> None:
        self._seed, self._cluster = seed, cluster
        self._allocation_spread = allocation_spread
        self._numbers = {job.name: number for number, job in enumerate(jobs)}
        self._factors: dict[str, _Factors] = {}
        for number, job in enumerate(jobs):
            compute, network = np.random.default_rng([seed, number]).standard_normal(2)
            self._factors[job.name] = _Factors(
                float(np.exp(compute_spread * compute)), float(np.exp(network_spread * network))
            )
        self._known: dict[tuple[str, int | None, AllocationShape], float] = {}

    def step_times_s(
        self, job: Job, shapes: Sequence[AllocationShape], global_batch: int | None = None
    ) -> list[float]:
        """Seconds of one optimizer step on each shape."""
        keys = [(job.name, global_batch, shape) for shape in shapes]
        missing = [shape for key, shape in zip(keys, shapes) if key not in self._known]
        if missing:
            asked = [(id(job.graph), *job.split(s.ranks, global_batch), s) for s in missing]
            found = _asked(job, asked, self._cluster, self._factors[job.name])
            for key in asked:
                known = job.name, global_batch, key[-1]
                self._known[known] = found[key] * self._allocation_factor(job, key[-1])
        return [self._known[key] for key in keys]

    def _allocation_factor(self, job: Job, shape: AllocationShape) -> float:
        machine = [len(shape.machine), *shape.machine.encode()]
        seed = [self._seed, self._numbers[job.name], *machine, *shape.per_node]
        return float(
            np.exp(self._allocation_spread * np.random.default_rng(seed).standard_normal())
        )


class _Factors:
    """One job's hidden factors, as the engine takes them."""

    def __init__(self, compute_ratio: float, network_ratio: float) -> None:
        self.coefficients = Coefficients(
            compute_ratio=compute_ratio,
            update_ratio=compute_ratio,
            communication_ratio=network_ratio,
        )

    def coefficients_for(
        self,
        questions: Sequence[StepQuestion],
        allocations: Sequence[Allocation],
        engine: StepPredictor,
    ) -> list[Coefficients]:
        """The same factors for every step; see `coefficients.Calibration`."""
        return [self.coefficients] * len(questions)


_Key = tuple[int, int, int, AllocationShape]


def _asked(
    job: Job, keys: Sequence[_Key], cluster: Cluster | None, calibration: Calibration | None = None
) -> dict[_Key, float]:
    """The engine's step times of one job, a table for each number of micro-batches."""
    found: dict[_Key, float] = {}
    for micro_batches in dict.fromkeys(key[2] for key in keys):
        rows = [key for key in keys if key[2] == micro_batches]
        table = estimate_many(
            job.graph,
            [str(key[3]) for key in rows],
            batch_per_gpu=np.array([key[1] for key in rows]),
            accumulation_steps=micro_batches,
            cluster=cluster,
            calibration=calibration,
            strict=True,
        )
        found.update(zip(rows, table.step_time_s.tolist(), strict=True))
    return found


# A running job is seen for hundreds of steps, as a store keeps them in windows: a step seen three
# times is taken as it was seen.
_STEADY = 3.0
# Graph, samples per rank and micro-batch, micro-batches, devices.
_StepKey = tuple[int, int, int, AllocationShape]


class CalibratedSpeeds:
    """The engine's answers, corrected by the steps that jobs were seen to take.

    The corrections are the calibrator's (`calibrate.corrections`), one set for each workload and
    machine type. Every job is a workload of its own unless `workload` says which jobs train the
    same model. A shape and batch are observed once, for a running job's many steps.
    """

    def __init__(
        self,
        workload: Callable[[Job], str] = lambda job: job.name,
        cluster: Cluster | None = None,
    ) -> None:
        self._workload, self._cluster = workload, cluster
        self._jobs: dict[str, dict[str, None]] = {}
        self._predicted: dict[_StepKey, PredictedStep] = {}
        self._seen: dict[tuple[str, str], dict[_StepKey, float]] = {}
        self._fitted: dict[tuple[str, str], StepCorrections] = {}

    def observe(
        self, job: Job, shape: AllocationShape, step_s: float, global_batch: int | None
    ) -> Iterable[str]:
        """Take in the step time of a running job; the jobs of which other speeds are believed."""
        workload, asked = self._workload(job), _asked_of(job, shape, global_batch)
        seen = self._seen.setdefault((workload, shape.machine), {})
        if asked in seen:
            return ()
        seen[asked] = step_s
        predicted = [self._predict(job.graph, each) for each in seen]
        self._fitted[workload, shape.machine] = StepCorrections(
            shape.machine, DEFAULT.content(job.graph)
        ).fit(predicted, list(seen.values()), weights=[_STEADY] * len(seen), others=[])
        return self._jobs.get(workload, {})

    def step_times_s(
        self, job: Job, shapes: Sequence[AllocationShape], global_batch: int | None = None
    ) -> list[float]:
        """Seconds of one optimizer step on each shape."""
        workload = self._workload(job)
        self._jobs.setdefault(workload, {})[job.name] = None
        asked = [_asked_of(job, shape, global_batch) for shape in shapes]
        predicted = [self._predict(job.graph, each) for each in asked]
        found = [each.step_s for each in predicted]
        for machine in {shape.machine for shape in shapes}:
            fitted = self._fitted.get((workload, machine))
            if fitted is not None:
                rows = [row for row, shape in enumerate(shapes) if shape.machine == machine]
                corrected = fitted.correct([predicted[row] for row in rows])
                for row, correction in zip(rows, corrected, strict=True):
                    found[row] = correction.step_s
        return found

    def _predict(self, graph: OpGraph, asked: _StepKey) -> PredictedStep:
        if asked not in self._predicted:
            _, batch, micro_batches, shape = asked
            engine = TrialEngine(
                engine=DEFAULT,
                graph=graph,
                cluster=self._cluster,
                profile=None,
                content=DEFAULT.content(graph),
            )
            self._predicted[asked] = engine.predict(
                str(shape),
                batch_per_gpu=batch,
                accumulation_steps=micro_batches,
                strategy="ddp",
                coefficients=UNCALIBRATED,
            )
        return self._predicted[asked]


def _asked_of(job: Job, shape: AllocationShape, global_batch: int | None) -> _StepKey:
    return (id(job.graph), *job.split(shape.ranks, global_batch), shape)
