"""Draw the workload of the poster's experiment: many jobs of a few traced models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from estimator.cluster.jobs import Job
from estimator.cluster.nodes import Nodes
from estimator.cluster.speeds import EngineSpeeds, Speeds
from estimator.graph.op_graph import OpGraph

REQUESTS = {1: 0.30, 2: 0.20, 4: 0.20, 8: 0.15, 16: 0.10, 32: 0.05}
MEDIAN_RUN_S = 3600.0
RUN_SPREAD = 1.3


def drawn_run_s(rng: np.random.Generator, jobs: int) -> NDArray[np.float64]:
    """Run times at the request: log-normal, median `MEDIAN_RUN_S`, spread `RUN_SPREAD`."""
    return MEDIAN_RUN_S * np.exp(RUN_SPREAD * rng.standard_normal(jobs))


def drawn_jobs(
    graphs: Mapping[str, Sequence[OpGraph]],
    nodes: Nodes,
    *,
    jobs: int,
    arrivals_every_s: float,
    seed: int,
) -> list[Job]:
    """Jobs of models drawn evenly over kinds, then over the kind's models.

    Arrivals are Poisson; requests go by `REQUESTS`; the run time at the request is log-normal with
    median `MEDIAN_RUN_S` and spread `RUN_SPREAD`. The global batch is the traced batch on every
    device asked for.
    """
    rng = np.random.default_rng(seed)
    kinds = list(graphs)
    arrivals_s = np.cumsum(rng.exponential(arrivals_every_s, jobs))
    counts = rng.choice(list(REQUESTS), jobs, p=list(REQUESTS.values()))
    run_s, speeds = drawn_run_s(rng, jobs), EngineSpeeds(nodes.cluster)
    found = []
    for number in range(jobs):
        models = graphs[kinds[int(rng.integers(len(kinds)))]]
        graph = models[int(rng.integers(len(models)))]
        found.append(
            job_of_run_time(
                graph,
                nodes,
                name=f"{number}-{graph.name}",
                arrival_s=float(arrivals_s[number]),
                devices=int(counts[number]),
                run_s=float(run_s[number]),
                speeds=speeds,
            )
        )
    return found


def job_of_run_time(
    graph: OpGraph,
    nodes: Nodes,
    *,
    name: str,
    arrival_s: float,
    devices: int,
    run_s: float,
    speeds: Speeds,
) -> Job:
    """A job that takes `run_s` at these speeds on the devices asked for."""
    batch = (graph.batch or 1) * devices
    job = Job(
        name=name,
        arrival_s=arrival_s,
        graph=graph,
        samples=batch,
        devices=devices,
        global_batch=batch,
    )
    (step_s,) = speeds.step_times_s(job, [nodes.packed(nodes.machines[0], devices)])
    return replace(job, samples=run_s / step_s * batch)
