"""Draw the workload of the poster's experiment: many jobs of a few traced models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from estimator.cluster.jobs import Job
from estimator.cluster.nodes import Nodes
from estimator.cluster.speeds import EngineSpeeds
from estimator.graph.op_graph import OpGraph

REQUESTS = {1: 0.30, 2: 0.20, 4: 0.20, 8: 0.15, 16: 0.10, 32: 0.05}
MEDIAN_RUN_S = 3600.0
RUN_SPREAD = 1.3


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
    run_s = MEDIAN_RUN_S * np.exp(RUN_SPREAD * rng.standard_normal(jobs))
    speeds = EngineSpeeds()
    machine = nodes.machines[0]
    found = []
    for number in range(jobs):
        models = graphs[kinds[rng.integers(len(kinds))]]
        graph = models[rng.integers(len(models))]
        devices = int(counts[number])
        batch = (graph.batch or 1) * devices
        job = Job(
            name=f"{number}-{graph.name}",
            arrival_s=float(arrivals_s[number]),
            graph=graph,
            samples=batch,
            devices=devices,
            global_batch=batch,
        )
        (step_s,) = speeds.step_times_s(job, [nodes.packed(machine, devices)])
        found.append(replace(job, samples=float(run_s[number]) / step_s * batch))
    return found
