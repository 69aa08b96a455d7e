"""Replay 512 jobs on 512 GPUs: what good estimates are worth to schedulers.

Jobs of traced CNN, RNN, GAN and Transformer models on two clusters, at two arrival
rates, three seeds: every policy; then, on a quarter of the first cluster, elastic policies on
speeds that are off by a known amount or learnt in the replay.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import chain, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import scheduler_models
from options import Options
from records import kept_graph, say
from replay_speeds import MistakenSpeeds, drawn_jobs

import estimator as est
from estimator.replay.jobs import Job
from estimator.replay.nodes import Nodes
from estimator.replay.policies import load_policy
from estimator.replay.replay import Costs, Replay, outcome
from estimator.replay.speeds import (
    CalibratedSpeeds,
    EngineSpeeds,
    Speeds,
    TrueSpeeds,
)

CLUSTERS = ("64x8:dgx-a100", "128x4:gtx-1080-roce")
POLICIES = (
    *("fifo", "max-min", "max-min-uncapped", "afs", "srtf", "tiresias", "optimus"),
    *("gavel", "pollux"),
)
ELASTIC = ("max-min", "afs", "optimus")
ERRORS = (0.0, 0.10, 0.25, 0.50)
SEEDS, RATES, JOBS = (0, 1, 2), (60.0, 20.0), 512
# As many jobs per device and second on a quarter of the devices: learnt speeds are fitted again for
# every shape on which a job is seen.
WRONG_ON, WRONG_RATE, WRONG_JOBS = "16x8:dgx-a100", 240.0, 128
# Replays of one cluster, rate of arrivals and seed are compared.
WHERE = ("cluster", "arrivals_every_s", "seed")
GOAL = (CLUSTERS[0], RATES[0], "max-min", "engine")
LEAST_GAINS = {"average_jct_s": 1.9, "makespan_s": 1.5}
Graphs = dict[str, list[est.OpGraph]]
Case = dict[str, Any]


@lru_cache(maxsize=1)
def traced(folder: Path) -> Graphs:
    """Every model, looked at once; graphs kept in the folder are read."""
    graphs: Graphs = {}
    for kind, names in scheduler_models.MODELS.items():
        for name in names:
            graph = kept_graph(folder / f"{name}.graph", partial(_traced, name))
            graphs.setdefault(kind, []).append(graph)
    return graphs


def _traced(name: str) -> est.OpGraph:
    return est.trace_model(*getattr(scheduler_models, name)(), target="cuda", name=name)


def replayed(
    cluster: str,
    jobs: list[Job],
    policy: str,
    true: Speeds,
    believed: Speeds,
    label: str,
    costs: Costs | None = None,
) -> Case:
    """One replay in numbers, with the CPU time it took."""
    begun = time.process_time()
    nodes = Nodes.parse(cluster)
    replay = Replay(jobs, nodes, load_policy(policy), true=true, believed=believed, costs=costs)
    ran = replay.run()
    took_s = time.process_time() - begun
    found = asdict(outcome(ran, nodes, true))
    about = {"cluster": cluster, "policy": policy, "believed": label, "took_s": took_s}
    hours = found["average_jct_s"] / 3600, found["makespan_s"] / 3600
    say(f"{cluster}: {policy} ({label}) JCT {hours[0]:.3f} h, makespan {hours[1]:.2f} h")
    return about | found


def policies(
    folder: Path, cluster: str, every_s: float, seed: int, count: int = JOBS
) -> Iterator[Case]:
    """Policies with the engine's speeds, max-min also with perfect ones.

    The folder keeps traced graphs.
    """
    graphs = traced(folder)
    jobs = drawn_jobs(graphs, Nodes.parse(cluster), jobs=count, arrivals_every_s=every_s, seed=seed)
    true, believed = TrueSpeeds(jobs, seed), EngineSpeeds()
    about = {"part": "policies", "arrivals_every_s": every_s, "seed": seed}
    for policy in POLICIES:
        yield about | replayed(cluster, jobs, policy, true, believed, "engine")
        if policy == "max-min":
            yield about | replayed(cluster, jobs, policy, true, true, "perfect")


def errors(folder: Path, seed: int) -> Iterator[Case]:
    """Elastic policies on speeds that are off by a known amount, or learnt in the replay."""
    cluster, about = WRONG_ON, {"part": "errors", "arrivals_every_s": WRONG_RATE, "seed": seed}
    how: Any = {"jobs": WRONG_JOBS, "arrivals_every_s": WRONG_RATE, "seed": seed}
    jobs = drawn_jobs(traced(folder), Nodes.parse(cluster), **how)
    true = TrueSpeeds(jobs, seed)
    for policy in ELASTIC:
        believed: dict[str, Speeds] = {
            f"off by {error:.0%}": MistakenSpeeds(true, error, jobs, seed) for error in ERRORS
        }
        believed |= {"engine": EngineSpeeds(), "calibrated": CalibratedSpeeds()}
        for label, speeds in believed.items():
            yield about | replayed(cluster, jobs, policy, true, speeds, label)


def gains(cases: Sequence[Case]) -> Iterator[Case]:
    """FIFO's completion time and makespan over those of each policy, in the mean of seeds."""
    here = {tuple(case[name] for name in (*WHERE, "policy", "believed")): case for case in cases}
    groups: dict[tuple[Any, ...], list[tuple[Case, Case]]] = {}
    for (cluster, every_s, seed, *policy), case in here.items():
        fifo = here.get((cluster, every_s, seed, "fifo", "engine"))
        if fifo is not None and case is not fifo:
            groups.setdefault((cluster, every_s, *policy), []).append((fifo, case))
    for (cluster, every_s, policy, believed), pairs in groups.items():
        name = f"{cluster}, a job every {every_s:g} s: {policy} ({believed})"
        for what, number in (("JCT", "average_jct_s"), ("makespan", "makespan_s")):
            by_seed = [fifo[number] / case[number] for fifo, case in pairs]
            is_goal = (cluster, every_s, policy, believed) == GOAL
            goal = LEAST_GAINS[number] if is_goal else None
            mean = {"value": sum(by_seed) / len(by_seed), "least": goal, "by_seed": by_seed}
            yield {"id": f"{name}: gain of {what} against FIFO", **mean}


def costs_of_errors(cases: Sequence[Case]) -> Iterator[Case]:
    """What each elastic policy keeps of the completion time that perfect knowledge gives."""
    for policy in dict.fromkeys(case["policy"] for case in cases):
        for label, ratio in kept_ratios(cases, policy).items():
            yield {"id": f"{policy}, speeds {label}: JCT kept of perfect ones", "value": ratio}


def kept_ratios(cases: Sequence[Case], policy: str) -> dict[str, float]:
    """Mean over seeds of (JCT without error) / JCT, by what was believed."""
    found: dict[str, list[float]] = {}
    mine = [case for case in cases if case["policy"] == policy]
    perfect = {c["seed"]: c["average_jct_s"] for c in mine if c["believed"] == "off by 0%"}
    for case in mine:
        ratio = perfect[case["seed"]] / case["average_jct_s"]
        found.setdefault(case["believed"], []).append(ratio)
    return {label: sum(values) / len(values) for label, values in found.items()}


def draw(cases: list[Case], path: Path) -> None:
    """What each policy keeps of the JCT of perfect estimates against the error of its speeds."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for policy in dict.fromkeys(case["policy"] for case in cases):
        kept = kept_ratios(cases, policy)
        points = [(100 * e, kept.get(f"off by {e:.0%}")) for e in ERRORS]
        known = [(error, 100 * ratio) for error, ratio in points if ratio is not None]
        (line,) = axes.plot(*zip(*known, strict=True), marker="o", label=policy)
        if "calibrated" in kept:
            axes.plot([-3], [100 * kept["calibrated"]], marker="*", color=line.get_color())
    axes.set_xlabel("error of believed speeds (%); stars: calibrated during the replay")
    axes.set_ylabel("JCT kept (% of perfect estimates')")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def in_processes(parts: Iterable[Callable[[], Iterable[Case]]]) -> Iterator[list[Case]]:
    """What each part finds, in as many processes as there are cores, in order.

    Fits of a few numbers take several threads of a linear algebra library more time than one.
    """
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(_cases, part) for part in parts]:
            yield future.result()


def _cases(part: Callable[[], Iterable[Case]]) -> list[Case]:
    return list(part())


def run(options: Options) -> list[Case]:
    """Replay every policy on both clusters; what error costs on a quarter of one; draw that."""
    traced(options.work)
    if options.quick:
        return [*gains([*policies(options.work, CLUSTERS[0], RATES[0], seed=0, count=128)])]
    where = product(CLUSTERS, RATES, SEEDS)
    parts = [
        *(partial(errors, options.work, seed) for seed in SEEDS),
        *(partial(policies, options.work, *place) for place in where),
    ]
    cases = list(chain.from_iterable(in_processes(parts)))
    wrong = [case for case in cases if case["part"] == "errors"]
    if find_spec("matplotlib"):
        draw(wrong, options.work / "schedulers.svg")
    plans = [case for case in cases if case["part"] == "policies"]
    return [*gains(plans), *costs_of_errors(wrong)]
