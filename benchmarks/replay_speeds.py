"""Jobs of an experiment, and speeds that policies may believe: mistaken, or of other systems."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from calibration.evaluation import Regressor

from estimator.graph.ir.op_graph import OpGraph
from estimator.replay.job_files import drawn_run_s, job_of_run_time
from estimator.replay.jobs import Job
from estimator.replay.nodes import AllocationShape, Nodes
from estimator.replay.speeds import EngineSpeeds, Speeds

# How many devices jobs ask for, and how often.
REQUESTS = {1: 0.30, 2: 0.20, 4: 0.20, 8: 0.15, 16: 0.10, 32: 0.05}


def drawn_requests(
    rng: np.random.Generator, jobs: int, arrivals_every_s: float, most: int
) -> list[tuple[float, int, float]]:
    """(arrival, devices, seconds at the request) of each job.

    Arrivals are Poisson; requests go by `REQUESTS`, up to `most` devices; run times are those of
    `drawn_run_s`.
    """
    arrivals_s = np.cumsum(rng.exponential(arrivals_every_s, jobs))
    share = {count: ratio for count, ratio in REQUESTS.items() if count <= most}
    counts = rng.choice(list(share), jobs, p=np.array(list(share.values())) / sum(share.values()))
    columns = (arrivals_s, counts, drawn_run_s(rng, jobs))
    return list(zip(*(column.tolist() for column in columns), strict=True))


def drawn_jobs(
    graphs: Mapping[str, Sequence[OpGraph]],
    nodes: Nodes,
    *,
    jobs: int,
    arrivals_every_s: float,
    seed: int,
) -> list[Job]:
    """Jobs of models drawn evenly over kinds, then over the kind's models.

    Requests are of as many devices as a machine type has. The global batch is the traced batch on
    every device asked for.
    """
    rng = np.random.default_rng(seed)
    kinds = list(graphs)
    most = max(nodes.size(machine) for machine in nodes.machines)
    requests = drawn_requests(rng, jobs, arrivals_every_s, most)
    drawn, speeds = [], EngineSpeeds(nodes.cluster)
    for number, (arrival_s, devices, run_s) in enumerate(requests):
        models = graphs[kinds[int(rng.integers(len(kinds)))]]
        graph = models[int(rng.integers(len(models)))]
        drawn.append(
            job_of_run_time(
                graph,
                nodes,
                name=f"{number}-{graph.name}",
                arrival_s=arrival_s,
                devices=devices,
                run_s=run_s,
                speeds=speeds,
            )
        )
    return drawn


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
        self, job: Job, shapes: Sequence[AllocationShape], global_batch: int | None = None
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


class FittedSpeeds:
    """A throughput model of another system, fitted to the steps that jobs were seen to take.

    As in Optimus (EuroSys 2018, section 3.2) a job first runs for a few steps on a few counts,
    which is charged to nobody; later steps are added as the replay sees them. `form` makes one of
    the regressors of `calibration.baselines`; `workload` is as in `CalibratedSpeeds`.
    """

    def __init__(
        self,
        form: Callable[[], Regressor],
        true: Speeds,
        sampled: Callable[[Job], Sequence[AllocationShape]],
        workload: Callable[[Job], str] = lambda job: job.name,
    ) -> None:
        self._form, self._true, self._sampled = form, true, sampled
        self._workload = workload
        self._jobs: dict[str, dict[str, None]] = {}
        self._seen: dict[tuple[str, str], dict[tuple[float, ...], float]] = {}
        self._fitted: dict[tuple[str, str], Regressor] = {}

    def observe(
        self, job: Job, shape: AllocationShape, step_s: float, global_batch: int | None
    ) -> Iterable[str]:
        """Take in the step time of a running job; the jobs of which other speeds are believed."""
        is_new = self._add(job, shape, step_s, global_batch)
        return self._jobs[self._workload(job)] if is_new else ()

    def step_times_s(
        self, job: Job, shapes: Sequence[AllocationShape], global_batch: int | None = None
    ) -> list[float]:
        """Seconds of one optimizer step on each shape."""
        workload = self._workload(job)
        jobs = self._jobs.setdefault(workload, {})
        if job.name not in jobs:
            jobs[job.name] = None
            sampled = self._sampled(job)
            for shape, seconds in zip(sampled, self._true.step_times_s(job, sampled), strict=True):
                self._add(job, shape, seconds, None)
        found = []
        for shape in shapes:
            key = workload, shape.machine
            if key not in self._fitted:
                seen = self._seen[key]
                self._fitted[key] = self._form().fit(list(seen), list(seen.values()))
            found.append(float(self._fitted[key].predict([_row(job, shape, global_batch)])[0]))
        return found

    def _add(
        self, job: Job, shape: AllocationShape, step_s: float, global_batch: int | None
    ) -> bool:
        """Whether the step is the first of its kind."""
        key, row = (self._workload(job), shape.machine), _row(job, shape, global_batch)
        seen = self._seen.setdefault(key, {})
        if row in seen:
            return False
        seen[row] = step_s
        self._fitted.pop(key, None)
        return True


def sample_counts(nodes: Nodes, job: Job) -> list[AllocationShape]:
    """One device, two, four, and what was asked for, packed on each machine type."""
    counts = {count for count in (1, 2, 4, job.devices) if count <= job.highest_count}
    return [nodes.packed(machine, count) for machine in nodes.machines for count in sorted(counts)]


def _row(job: Job, shape: AllocationShape, global_batch: int | None) -> tuple[float, ...]:
    """Ranks, nodes, samples per rank and micro-batch, micro-batches (`calibration.baselines`)."""
    return (shape.ranks, len(shape.per_node), *job.split(shape.ranks, global_batch))
