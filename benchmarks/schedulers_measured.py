"""Replay schedulers on measured step times: what estimates are worth where nothing is made up.

Jobs are those of AdaptDL's benchmark (ResNet-18 on CIFAR, BERT-base, DeepSpeech2); they advance at
the step times that Pollux measured on T4s, and Sia on RTX 2080 Ti and A100, at the placement and
batch that the replay gave them. Policies believe the engine from its catalogue, the engine
corrected by what the replay saw, or the fitted forms of Optimus, Pollux and ONES.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from calibration.rivals import FORMS
from options import Options
from published.graphs import GraphStore
from published.machines import machine_of
from published.rows import parsed
from published.scheduler_sources import pollux, sia
from records import say
from replay_speeds import FittedSpeeds, drawn_requests, sample_counts
from schedulers import SEEDS, Case, gains, in_processes, replayed

import estimator as est
from estimator.calibrate.observation_files import read_rows
from estimator.machines.profile import MachineProfile
from estimator.replay.jobs import Job
from estimator.replay.nodes import AllocationShape, Nodes
from estimator.replay.replay import Costs
from estimator.replay.speeds import (
    CalibratedSpeeds,
    EngineSpeeds,
    Speeds,
)

# Machines of the catalogue with the networks that `published_accuracy` takes for these tables.
CLUSTERS = {
    "pollux_t4": "16x4:measured-t4",
    "sia_hetero": "3x8:measured-rtx-2080-ti+2x8:measured-a100",
}
_NAMES = {"t4": "measured-t4", "2080": "measured-rtx-2080-ti", "a100": "measured-a100"}
# More devices were measured on some placements only.
JOBS = 128
MOST_DEVICES = 16
# Each policy with what it is given to believe; the first of a table is the baseline.
ONE_TYPE = (
    *(("fifo", "engine"), ("srtf", "engine"), ("tiresias", "engine")),
    *(("max-min", each) for each in ("engine", "calibrated", "perfect")),
    *(("afs", each) for each in ("engine", "calibrated", "perfect")),
    *(("optimus", each) for each in ("engine", "calibrated", "optimus form", "perfect")),
    *(("pollux", each) for each in ("engine", "calibrated", "pollux form", "perfect")),
    *(("ones", each) for each in ("engine", "ones form", "engine, restarts of 1 s")),
)
# ONES changes a job's devices without stopping it; others are checkpointed and started again.
ONES_COSTS = Costs(restart_s=1.0)
TYPES = (
    *(("fifo", "engine"), ("srtf", "engine"), ("tiresias", "engine")),
    *(("gavel", each) for each in ("engine", "calibrated", "perfect")),
)
Points = dict[int, tuple[float, float]]


class MeasuredSpeeds:
    """Step times as they were measured on a placement, between measured batches by a line.

    A placement that was not measured takes the closest in nodes and ranks. Micro-batches before the
    last are not synchronised: they take the step without its synchronisation.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[str, str], dict[tuple[int, ...], Points]] = {}

    def add(
        self, graph: str, shape: AllocationShape, batch: int, step_s: float, sync_s: float
    ) -> None:
        """One row of a table; a placement seen again replaces what was there."""
        known = self._steps.setdefault((graph, shape.machine), {})
        known.setdefault(shape.per_node, {})[batch] = step_s, sync_s

    def step_times_s(
        self, job: Job, shapes: Sequence[AllocationShape], global_batch: int | None = None
    ) -> list[float]:
        """Seconds of one optimizer step on each shape."""
        return [self._step_s(job, shape, global_batch) for shape in shapes]

    def _step_s(self, job: Job, shape: AllocationShape, global_batch: int | None) -> float:
        known = self._steps[job.graph.name, shape.machine]
        points = known.get(shape.per_node) or known[min(known, key=partial(_distance, shape))]
        batch, micro_batches = job.split(shape.ranks, global_batch)
        batches = sorted(points)
        step_s, sync_s = (
            float(np.interp(batch, batches, [points[each][part] for each in batches]))
            for part in (0, 1)
        )
        return step_s + (micro_batches - 1) * (step_s - sync_s)

    def batches(self, graph: str, machine: str) -> list[int]:
        """Samples per device that were measured on one device."""
        return sorted(self._steps[graph, machine][1,])

    def has(self, graph: str, machine: str) -> bool:
        """Whether a model was measured on a machine type."""
        return (graph, machine) in self._steps


def _distance(shape: AllocationShape, per_node: tuple[int, ...]) -> float:
    nodes = abs(math.log(len(per_node) / len(shape.per_node)))
    return nodes + abs(math.log(sum(per_node) / shape.ranks))


def measured(path: Path, store: GraphStore, home: Path) -> tuple[MeasuredSpeeds, list[est.OpGraph]]:
    """The table's step times, and the graphs of its models; its machines go to a user's store."""
    speeds, graphs = MeasuredSpeeds(), dict[str, est.OpGraph]()
    profiles: dict[str, MachineProfile] = {}
    for line, cells in read_rows(path):
        row = parsed(path.stem, line, cells)
        workload = (pollux if path.stem == "pollux_t4" else sia)(row)
        graph = store.graph(workload.spec, workload.precision, workload.optimizer)
        graphs.setdefault(graph.name, graph)
        machine = next(name for part, name in _NAMES.items() if part in row.step.gpu.lower())
        profile = machine_of(row, workload.setting)
        if len(profile.devices) > len(profiles.get(machine, profile).devices) or (
            machine not in profiles
        ):
            profiles[machine] = replace(profile, name=machine)
        per_node = tuple(sorted(row.step.node_sizes, reverse=True))
        sync_s = float(row.text("sync_time_s"))
        batch = round(row.step.batch_per_gpu)
        speeds.add(
            graph.name, AllocationShape(machine, per_node), batch, row.step.step_time_s, sync_s
        )
    for profile in profiles.values():
        profile.save(home / "machines" / f"{profile.name}.json")
    return speeds, list(graphs.values())


def measured_jobs(
    true: MeasuredSpeeds,
    graphs: Sequence[est.OpGraph],
    nodes: Nodes,
    *,
    jobs: int,
    arrivals_every_s: float,
    seed: int,
) -> list[Job]:
    """Jobs as in the other experiment, of models measured on every machine type of the cluster.

    Requests are at most `MOST_DEVICES`; a device has the middle of the measured batches at the
    request, and never more or less than was measured.
    """
    rng = np.random.default_rng(seed)
    usable = [g for g in graphs if all(true.has(g.name, m) for m in nodes.machines)]
    found = []
    requests = drawn_requests(rng, jobs, arrivals_every_s, MOST_DEVICES)
    for number, (arrival_s, devices, run_s) in enumerate(requests):
        graph = usable[int(rng.integers(len(usable)))]
        batches = true.batches(graph.name, nodes.machines[0])
        global_batch = batches[len(batches) // 2] * devices
        job = Job(
            name=f"{number}-{graph.name}",
            arrival_s=arrival_s,
            graph=graph,
            samples=global_batch,
            devices=devices,
            global_batch=global_batch,
            most_devices=max(min(MOST_DEVICES, global_batch // batches[0]), devices),
            most_batch_per_gpu=batches[-1],
        )
        (step_s,) = true.step_times_s(job, [nodes.packed(nodes.machines[0], devices)])
        found.append(replace(job, samples=run_s / step_s * global_batch))
    return found


def model_of(job: Job) -> str:
    """Jobs of one model train alike, and what is seen of one is known of all."""
    return job.graph.name


def cases(
    cluster: str,
    true: MeasuredSpeeds,
    graphs: Sequence[est.OpGraph],
    jobs: int,
    seed: int,
    pairs: Sequence[tuple[str, str]],
) -> Iterator[Case]:
    """Policies, each with what it is given to believe, on one cluster and seed."""
    nodes = Nodes.parse(cluster)
    every_s = 60.0 * 512 / nodes.total()
    drawn = measured_jobs(true, graphs, nodes, jobs=jobs, arrivals_every_s=every_s, seed=seed)
    about = {"part": "measured", "arrivals_every_s": every_s, "seed": seed}
    for policy, label in pairs:
        believed: Speeds
        if label.endswith("form"):
            form = FORMS[label.split()[0]]
            believed = FittedSpeeds(form, true, partial(sample_counts, nodes), model_of)
        else:
            believed = {
                "engine": EngineSpeeds(),
                "engine, restarts of 1 s": EngineSpeeds(),
                "calibrated": CalibratedSpeeds(model_of),
                "perfect": true,
            }[label]
        costs = ONES_COSTS if "restarts" in label else None
        yield about | replayed(cluster, drawn, policy, true, believed, label, costs)


def run(options: Options) -> list[Case]:
    """Replay on each table that is there: gains against FIFO, in the mean of seeds."""
    store, replays = GraphStore(options.work), list[Case]()
    home = Path(tempfile.mkdtemp())
    os.environ["ESTIMATOR_HOME"] = str(home)
    for table, cluster in CLUSTERS.items():
        path = options.data / f"{table}.csv"
        if not path.exists():
            say(f"{table} does not ship; --data names a folder that holds {path.name}")
            continue
        true, graphs = measured(path, store, home)
        pairs = ONE_TYPE if table == "pollux_t4" else TYPES
        parts = [partial(cases, cluster, true, graphs, JOBS, seed, pairs) for seed in SEEDS]
        replays += chain.from_iterable(in_processes(parts))
    return [*gains(replays)]
