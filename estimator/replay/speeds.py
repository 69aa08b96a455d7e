"""How fast a job trains on a shape of devices: what is true, and what a policy believes."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
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
from estimator.estimates.neighbours import Sender, link_ratios, sharing
from estimator.estimates.request import EstimateRequest
from estimator.estimates.table import estimate_many
from estimator.placement.allocation import Allocation
from estimator.placement.topology import Cluster
from estimator.replay.jobs import Job
from estimator.replay.nodes import AllocationShape, Nodes

# Hidden differences between the engine and the machine, as standard deviations of the logarithm:
# of a job's computing, of its network, and of each of its allocations.
COMPUTE_SPREAD = 0.12
NETWORK_SPREAD = 0.25
ALLOCATION_SPREAD = 0.05


class Speeds(Protocol):
    """Step times of jobs on shapes: of the engine, or a table of one's own."""

    def step_times_s(
        self, job: Job, shapes: Sequence[AllocationShape], global_batch: int | None = None
    ) -> list[float]:
        """Seconds of one optimizer step on each shape; inf where the job does not fit."""
        ...


class EngineSpeeds:
    """What the engine says, each (job's graph, split, shape) asked once, many in one table."""

    def __init__(self, cluster: Cluster | None = None) -> None:
        self._cluster = cluster
        self._known: dict[tuple[Hashable, int, AllocationShape], float] = {}

    def __reduce__(self) -> tuple[type[EngineSpeeds], tuple[Cluster | None]]:
        # What is known goes by where graphs are in memory: another process has others there.
        return EngineSpeeds, (self._cluster,)

    def step_times_s(
        self, job: Job, shapes: Sequence[AllocationShape], global_batch: int | None = None
    ) -> list[float]:
        """Seconds of one optimizer step on each shape; inf where the job does not fit."""
        kind, batch = job.speed_key, global_batch or job.global_batch
        keys = [(kind, batch, shape) for shape in shapes]
        if any(key not in self._known for key in keys):
            self.ask((job, shape, batch) for shape in shapes)
        return [self._known[key] for key in keys]

    def ask(self, steps: Iterable[tuple[Job, AllocationShape, int | None]]) -> None:
        """Work out steps of many jobs and global batches, those of jobs alike in one table."""
        missing: dict[Hashable, tuple[Job, dict[_Step, None]]] = {}
        for job, shape, global_batch in steps:
            kind, batch = job.speed_key, global_batch or job.global_batch
            if (kind, batch, shape) not in self._known:
                missing.setdefault(kind, (job, {}))[1][shape, batch] = None
        for kind, (job, asked) in missing.items():
            for (shape, batch), step_s in _step_times_s(job, asked, self._cluster).items():
                self._known[kind, batch, shape] = step_s


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
        self.factors: dict[str, _Factors] = {}
        for number, job in enumerate(jobs):
            compute, network = np.random.default_rng([seed, number]).standard_normal(2)
            self.factors[job.name] = _Factors(
                float(np.exp(compute_spread * compute)), float(np.exp(network_spread * network))
            )
        self._known: dict[tuple[str, int, AllocationShape], float] = {}

    def step_times_s(
        self, job: Job, shapes: Sequence[AllocationShape], global_batch: int | None = None
    ) -> list[float]:
        """Seconds of one optimizer step on each shape; inf where the job does not fit."""
        batch = global_batch or job.global_batch
        keys = [(job.name, batch, shape) for shape in shapes]
        missing = [(shape, batch) for key, shape in zip(keys, shapes) if key not in self._known]
        if missing:
            step_s_of = _step_times_s(job, missing, self._cluster, self.factors[job.name])
            for (shape, _), step_s in step_s_of.items():
                factor = self._allocation_factor(job, shape)
                self._known[job.name, batch, shape] = step_s * factor
        return [self._known[key] for key in keys]

    def _allocation_factor(self, job: Job, shape: AllocationShape) -> float:
        seed = [self._seed, self._numbers[job.name]]
        for part in (shape, *shape.also):
            seed += [len(part.machine), *part.machine.encode(), *part.per_node]
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


# A running job: what it is, its devices by the index of a node, another global batch if chosen.
RunningJob = tuple[Job, Mapping[int, int], int | None]


class SharedLinks:
    """How much longer the steps of jobs are whose links between nodes others use at once.

    See `estimates.neighbours`; nodes are hosts of a cluster. `true` speeds may have hidden factors,
    which count here too.
    """

    def __init__(self, nodes: Nodes, true: Speeds) -> None:
        self._nodes, self._factors = nodes, getattr(true, "factors", {})
        self._senders: dict[Hashable, Sender] = {}
        self._known: dict[Hashable, list[float]] = {}

    def slowdowns(self, running: Mapping[str, RunningJob]) -> dict[str, float]:
        """By what factor the steps of each job are longer than alone."""
        shared = dict.fromkeys(running, 1.0)
        senders = {
            name: self._sender(name, *job) for name, job in running.items() if len(job[1]) > 1
        }
        names = list(senders)
        for numbers in sharing([sender.crossed for _, sender in senders.values()]):
            together = [names[number] for number in numbers]
            key = frozenset(senders[name][0] for name in together)
            some = [senders[name] for name in sorted(together)]
            if key not in self._known:
                ratios = link_ratios([sender for _, sender in some])
                self._known[key] = [
                    sender.timing(ratio)[1] / sender.timing(1.0)[1]
                    for (_, sender), ratio in zip(some, ratios, strict=True)
                ]
            shared.update(zip(sorted(together), self._known[key], strict=True))
        return shared

    def _sender(
        self, name: str, job: Job, given: Mapping[int, int], global_batch: int | None
    ) -> tuple[Hashable, Sender]:
        key = name, *sorted(given.items()), global_batch
        if key not in self._senders:
            ranks = sum(given.values())
            batch, micro_batches = job.split(ranks, global_batch)
            request = EstimateRequest.of(
                job.graph,
                self._nodes.allocation(given),
                batch_per_gpu=batch,
                accumulation_steps=micro_batches,
                strategy=job.strategy,
                layout=job.layout,
                loader=job.loader,
                cluster=self._nodes.cluster,
                calibration=self._factors.get(name),
            )
            (self._senders[key],) = DEFAULT.senders([request])
        return key, self._senders[key]


# Devices, and the global batch.
_Step = tuple[AllocationShape, int]


def _step_times_s(
    job: Job,
    steps: Iterable[_Step],
    cluster: Cluster | None,
    calibration: Calibration | None = None,
) -> dict[_Step, float]:
    """The engine's step times of one job, a table for each number of micro-batches.

    Unlike devices share a global batch by speed: a table for each batch.
    """
    step_s: dict[_Step, float] = {}
    tables: dict[tuple[int, int | None], list[_Step]] = {}
    for shape, batch in dict.fromkeys(steps):
        _, micro_batches = job.split(shape.ranks, batch)
        tables.setdefault((micro_batches, batch if shape.also else None), []).append((shape, batch))
    for (micro_batches, mixed_batch), rows in tables.items():
        is_mixed = mixed_batch is not None
        batches = np.array([job.split(shape.ranks, batch)[0] for shape, batch in rows])
        table = estimate_many(
            job.graph,
            [str(shape) for shape, _ in rows],
            global_batch=mixed_batch,
            batch_per_gpu=None if is_mixed else batches,
            accumulation_steps=micro_batches,
            strategy=job.strategy,
            layout=job.layout,
            loader=job.loader,
            cluster=cluster,
            calibration=calibration,
            strict=not is_mixed and job.layout is None,
        )
        # A batch that cannot be split over these groups, or a layout, is no choice either.
        runs = table.answered & (table.fits != "no")
        step_s.update(zip(rows, np.where(runs, table.step_time_s, np.inf).tolist(), strict=True))
    return step_s


# A running job is seen for hundreds of steps, as a store keeps them in windows: a step seen three
# times is taken as it was seen.
_TIMES_SEEN = 3
# Samples per replica and micro-batch, micro-batches, devices.
_StepKey = tuple[int, int, AllocationShape]


class CalibratedSpeeds:
    """The engine's answers, corrected by the steps that jobs were seen to take.

    The corrections are the calibrator's (`calibrate.corrections`), one set for each workload and
    machine type. Every job is a workload of its own unless `workload` says which jobs train the
    same model. A shape and batch are observed once, for a running job's many steps. The stalls of a
    job that has a loader are the engine's.
    """

    def __init__(
        self,
        workload: Callable[[Job], str] = lambda job: job.name,
        cluster: Cluster | None = None,
    ) -> None:
        self._workload, self._cluster = workload, cluster
        self._engine = EngineSpeeds(cluster)
        self._jobs: dict[str, dict[str, None]] = {}
        self._predicted: dict[tuple[Hashable, _StepKey], PredictedStep] = {}
        self._seen: dict[tuple[str, str], dict[_StepKey, float]] = {}
        self._fitted: dict[tuple[str, str], StepCorrections] = {}
        self._seen_on_several: dict[tuple[str, _StepKey], float] = {}

    def observe(
        self, job: Job, shape: AllocationShape, step_s: float, global_batch: int | None
    ) -> Iterable[str]:
        """Take in the step time of a running job; the jobs of which other speeds are believed."""
        workload, step = self._workload(job), _step_of(job, shape, global_batch)
        if job.loader is not None:
            return ()
        if shape.also:
            # One observation of several machine types says nothing of any one of them.
            known = self._seen_on_several.setdefault((workload, step), step_s)
            return self._jobs.get(workload, {}) if known is step_s else ()
        seen = self._seen.setdefault((workload, shape.machine), {})
        if step in seen:
            return ()
        seen[step] = step_s
        predicted = [self._predict(job, step) for step in seen]
        self._fitted[workload, shape.machine] = StepCorrections(
            shape.machine, DEFAULT.content(job.graph)
        ).fit(_TIMES_SEEN * predicted, _TIMES_SEEN * list(seen.values()))
        return self._jobs.get(workload, {})

    def step_times_s(
        self, job: Job, shapes: Sequence[AllocationShape], global_batch: int | None = None
    ) -> list[float]:
        """Seconds of one optimizer step on each shape; inf where the job does not fit."""
        workload = self._workload(job)
        self._jobs.setdefault(workload, {})[job.name] = None
        step_s = self._engine.step_times_s(job, shapes, global_batch)
        steps = [_step_of(job, shape, global_batch) for shape in shapes]
        rows_of: dict[str, list[int]] = {}
        for row, shape in enumerate(shapes):
            if shape.also:
                step_s[row] = self._seen_on_several.get((workload, steps[row]), step_s[row])
            elif math.isfinite(step_s[row]) and job.loader is None:
                rows_of.setdefault(shape.machine, []).append(row)
        for machine, rows in rows_of.items():
            if (fitted := self._fitted.get((workload, machine))) is not None:
                predicted = [self._predict(job, steps[row]) for row in rows]
                for row, correction in zip(rows, fitted.correct(predicted), strict=True):
                    step_s[row] = correction.step_s
        return step_s

    def _predict(self, job: Job, step: _StepKey) -> PredictedStep:
        key = job.speed_key, step
        if key not in self._predicted:
            batch, micro_batches, shape = step
            engine = TrialEngine(DEFAULT, EstimateRequest.of(job.graph, cluster=self._cluster))
            self._predicted[key] = engine.predict(
                str(shape),
                batch_per_gpu=batch,
                accumulation_steps=micro_batches,
                strategy=job.strategy,
                coefficients=UNCALIBRATED,
                layout=job.layout,
            )
        return self._predicted[key]


def _step_of(job: Job, shape: AllocationShape, global_batch: int | None) -> _StepKey:
    return (*job.split(shape.ranks, global_batch), shape)
