"""Replay 512 jobs on 512 GPUs: what good estimates are worth to schedulers.

Jobs of traced CNN, RNN, GAN and Transformer models on two clusters, at two arrival
rates, three seeds: every policy, then max-min and greedy policies on speeds that are off by a known
amount or learnt in the replay. ``PYTHONPATH=. python benchmarks/schedulers.py``; ``--record`` keeps
every replay, ``--out`` writes the page, ``--picture`` draws what error costs.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import scheduler_models
from replay_speeds import EqualSpeeds, MistakenSpeeds

import estimator as est
from estimator.replay.job_files import drawn_jobs
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
Graphs = dict[str, list[est.OpGraph]]
Case = dict[str, Any]


def traced(folder: Path | None) -> Graphs:
    """Every model looked at once; with a folder, graphs kept there are read."""
    graphs: Graphs = {}
    for kind, names in scheduler_models.MODELS.items():
        for name in names:
            kept = folder / f"{name}.graph" if folder else None
            if kept and kept.exists():
                graph = est.OpGraph.load(kept)
            else:
                model, batch, loss = getattr(scheduler_models, name)()
                graph = est.trace_model(model, batch, loss, target="cuda", name=name)
                if kept:
                    graph.save(kept)
            graphs.setdefault(kind, []).append(graph)
    return graphs


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
    return {"cluster": cluster, "policy": policy, "believed": label, "took_s": took_s, **found}


def policies(
    graphs: Graphs, cluster: str, every_s: float, seed: int, count: int, chosen: Sequence[str]
) -> Iterator[Case]:
    """Policies with the engine's speeds, max-min also with perfect ones.

    On unlike machines it is also told that all are as fast as the first type.
    """
    jobs = drawn_jobs(graphs, Nodes.parse(cluster), jobs=count, arrivals_every_s=every_s, seed=seed)
    true, believed = TrueSpeeds(jobs, seed), EngineSpeeds()
    about = {"part": "policies", "arrivals_every_s": every_s, "seed": seed}
    for policy in chosen:
        yield about | replayed(cluster, jobs, policy, true, believed, "engine")
        if policy == "max-min":
            yield about | replayed(cluster, jobs, policy, true, true, "perfect")
            first, *others = Nodes.parse(cluster).machines
            if others:
                equal = EqualSpeeds(believed, first)
                yield about | replayed(cluster, jobs, policy, true, equal, "all equal")


def errors(graphs: Graphs, cluster: str, every_s: float, seed: int, count: int) -> Iterator[Case]:
    """Elastic policies on speeds that are off by a known amount, or learnt in the replay."""
    jobs = drawn_jobs(graphs, Nodes.parse(cluster), jobs=count, arrivals_every_s=every_s, seed=seed)
    true = TrueSpeeds(jobs, seed)
    about = {"part": "errors", "arrivals_every_s": every_s, "seed": seed}
    for policy in ELASTIC:
        believed: dict[str, Speeds] = {
            f"off by {error:.0%}": MistakenSpeeds(true, error, jobs, seed) for error in ERRORS
        }
        believed |= {"engine": EngineSpeeds(), "calibrated": CalibratedSpeeds()}
        for label, speeds in believed.items():
            yield about | replayed(cluster, jobs, policy, true, speeds, label)


def ratios(cases: list[Case], number: str, cluster: str, every_s: float, **which: str) -> list[str]:
    """By seed: the baseline's number over a policy's, with two decimals."""
    against = which["against"], which.get("against_believed", "engine")
    found = []
    for seed in sorted({case["seed"] for case in cases}):
        here = {
            (case["policy"], case["believed"]): case[number]
            for case in cases
            if (case["cluster"], case["arrivals_every_s"], case["seed"]) == (cluster, every_s, seed)
        }
        mine = which["policy"], which.get("believed", "engine")
        if mine in here and against in here:
            found.append(f"{here[against] / here[mine]:.3f}")
    return found


def policy_lines(cases: list[Case]) -> list[str]:
    """A table for each cluster and arrival rate: gains over FIFO, seed by seed."""
    lines = []
    for cluster, every_s in dict.fromkeys((c["cluster"], c["arrivals_every_s"]) for c in cases):
        here = [c for c in cases if (c["cluster"], c["arrivals_every_s"]) == (cluster, every_s)]
        lines += [
            "",
            f"## {cluster}, a job every {every_s:g} s",
            "",
            "| policy | average JCT (h) | JCT gain by seed | makespan (h) | makespan gain by seed "
            "| queue (h) | used | restarts a job | CPU (s) |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for policy, believed in dict.fromkeys((c["policy"], c["believed"]) for c in here):
            rows = [c for c in here if (c["policy"], c["believed"]) == (policy, believed)]

            def mean(number: str, rows: list[Case] = rows) -> float:
                return float(sum(row[number] for row in rows) / len(rows))

            which = {"policy": policy, "believed": believed, "against": "fifo"}
            jct = ratios(here, "average_jct_s", cluster, every_s, **which)
            makespan = ratios(here, "makespan_s", cluster, every_s, **which)
            lines.append(
                f"| {policy}{'' if believed == 'engine' else f', {believed}'} "
                f"| {mean('average_jct_s') / 3600:.2f} | {', '.join(jct)} "
                f"| {mean('makespan_s') / 3600:.1f} | {', '.join(makespan)} "
                f"| {mean('average_queue_s') / 3600:.2f} | {mean('utilization_ratio'):.0%} "
                f"| {mean('restarts_per_job'):.1f} | {mean('took_s'):.1f} |"
            )
    return lines


def seed_lines(cases: list[Case]) -> list[str]:
    """Max-min's gains over FIFO by the queue that FIFO leaves, where there are over three seeds."""
    lines = []
    for cluster, every_s in dict.fromkeys((c["cluster"], c["arrivals_every_s"]) for c in cases):
        here = {
            (c["policy"], c["seed"]): c
            for c in cases
            if (c["cluster"], c["arrivals_every_s"], c["believed"]) == (cluster, every_s, "engine")
        }
        pairs = [
            (c, here["max-min", s])
            for (p, s), c in here.items()
            if p == "fifo" and ("max-min", s) in here
        ]
        if len(pairs) <= 3:
            continue
        lines += ["", f"## Gain against the queue: {cluster}, a job every {every_s:g} s", ""]
        lines += ["| seed | queue of FIFO (h) | JCT gain | makespan gain |", "|---|---|---|---|"]
        for fifo, mine in sorted(pairs, key=lambda pair: float(pair[0]["average_queue_s"])):
            lines.append(
                f"| {fifo['seed']} | {fifo['average_queue_s'] / 3600:.2f} "
                f"| {fifo['average_jct_s'] / mine['average_jct_s']:.2f} "
                f"| {fifo['makespan_s'] / mine['makespan_s']:.2f} |"
            )
    return lines


def error_lines(cases: list[Case]) -> list[str]:
    """What is kept of the JCT that perfect knowledge gives, by policy and belief."""
    labels = list(dict.fromkeys(case["believed"] for case in cases))
    first = cases[0]
    where = f"{first['jobs']} jobs on {first['cluster']}, one every {first['arrivals_every_s']:g} s"
    lines = [
        "",
        "## What error costs: JCT of perfect estimates over JCT, mean of seeds",
        "",
        f"{where}.",
        "",
        f"| policy | {' | '.join(labels)} |",
        "|---" * (len(labels) + 1) + "|",
    ]
    for policy in dict.fromkeys(case["policy"] for case in cases):
        ratios = kept_ratios(cases, policy)
        kept = [f"{ratios[label]:.3f}" if label in ratios else "" for label in labels]
        lines.append(f"| {policy} | {' | '.join(kept)} |")
    return lines


def kept_ratios(cases: list[Case], policy: str) -> dict[str, float]:
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


def main() -> None:
    """Replay, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=512)
    parser.add_argument("--clusters", nargs="*", default=list(CLUSTERS))
    parser.add_argument("--every", nargs="+", type=float, default=[60.0, 20.0])
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--only", choices=("policies", "errors"))
    parser.add_argument("--graphs", type=Path, help="folder of traced models, to keep and read")
    parser.add_argument("--record", type=Path, help="file of replays, a line each, to add to")
    parser.add_argument("--out", type=Path, help="page to write")
    parser.add_argument("--picture", type=Path, help="what error costs, as .svg or .png")
    options = parser.parse_args()
    graphs = traced(options.graphs) if options.clusters else {}
    found: list[Case] = []
    for cluster, every_s, seed in product(options.clusters, options.every, options.seeds):
        asked = graphs, cluster, every_s, seed, options.jobs
        if options.only != "errors":
            found += told(policies(*asked, options.policies), options.record)
        # What error costs is asked of one cluster and rate.
        first = cluster == options.clusters[0] and every_s == options.every[0]
        if options.only == "errors" or (options.only is None and first):
            found += told(errors(*asked), options.record)
    if options.record and options.record.exists():
        found = [json.loads(line) for line in options.record.read_text().splitlines()]
    wrong = [case for case in found if case["part"] == "errors"]
    planned = [case for case in found if case["part"] == "policies"]
    lines = policy_lines(planned) + seed_lines(planned)
    lines += error_lines(wrong) if wrong else []
    memory = max(case["highest_memory_bytes"] for case in found) / 2**30
    lines += ["", f"Highest memory of a process: {memory:.2f} GiB."]
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines).lstrip() + "\n", encoding="utf-8")
    if options.picture and wrong:
        draw(wrong, options.picture)


def told(cases: Iterator[Case], record: Path | None) -> Iterator[Case]:
    """The cases, each said on stderr and added to the record as it comes."""
    for case in cases:
        print(
            f"{case['cluster']} every {case['arrivals_every_s']:g} s, seed {case['seed']}: "
            f"{case['policy']} ({case['believed']}) JCT {case['average_jct_s'] / 3600:.3f} h, "
            f"makespan {case['makespan_s'] / 3600:.2f} h, {case['took_s']:.1f} s of CPU",
            file=sys.stderr,
        )
        case["highest_memory_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if record:
            with record.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(case) + "\n")
        yield case


if __name__ == "__main__":
    main()
