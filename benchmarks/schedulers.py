"""Replay the poster's experiment: what good estimates are worth to schedulers.

512 jobs of traced CNN, RNN, GAN and Transformer models on 512 GPUs of two clusters, at two arrival
rates, three seeds: every policy, then max-min and greedy policies on speeds that are off by a known
amount or learnt in the replay. ``PYTHONPATH=. python benchmarks/schedulers.py``; ``--json`` prints
every replay, ``--out`` writes the page, ``--picture`` draws what error costs.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import scheduler_models

import estimator as est
from estimator.cluster.believed import CalibratedSpeeds, MistakenSpeeds
from estimator.cluster.experiment import drawn_jobs
from estimator.cluster.jobs import Job
from estimator.cluster.metrics import outcome
from estimator.cluster.nodes import Nodes
from estimator.cluster.policies import load_policy
from estimator.cluster.replay import Replay
from estimator.cluster.speeds import EngineSpeeds, Speeds, TrueSpeeds

CLUSTERS = ("64x8:dgx-a100", "128x4:gtx-1080-roce")
POLICIES = (
    *("fifo", "max-min", "max-min-uncapped", "afs", "srtf", "tiresias", "optimus"),
    *("gavel", "pollux"),
)
ELASTIC = ("max-min", "afs", "optimus", "pollux")
ERRORS = (0.0, 0.10, 0.25, 0.50)
Graphs = dict[str, list[est.OpGraph]]
Case = dict[str, Any]


def traced() -> Graphs:
    """Every model looked at once."""
    graphs: Graphs = {}
    for kind, names in scheduler_models.MODELS.items():
        for name in names:
            model, batch, loss = getattr(scheduler_models, name)()
            graph = est.trace_model(model, batch, loss, target="cuda", name=name)
            graphs.setdefault(kind, []).append(graph)
    return graphs


def replayed(
    cluster: str, jobs: list[Job], policy: str, true: Speeds, believed: Speeds, label: str
) -> Case:
    """One replay in numbers, with the time it took."""
    begun = time.perf_counter()
    nodes = Nodes.parse(cluster)
    ran = Replay(jobs, nodes, load_policy(policy), true=true, believed=believed).run()
    took_s = time.perf_counter() - begun
    found = asdict(outcome(ran, nodes, true))
    return {"cluster": cluster, "policy": policy, "believed": label, "took_s": took_s, **found}


def policies(graphs: Graphs, cluster: str, every_s: float, seed: int, count: int) -> list[Case]:
    """Every policy with the engine's speeds, max-min also with perfect ones."""
    nodes = Nodes.parse(cluster)
    jobs = drawn_jobs(graphs, nodes, jobs=count, arrivals_every_s=every_s, seed=seed)
    true, believed = TrueSpeeds(jobs, seed), EngineSpeeds()
    cases = [replayed(cluster, jobs, each, true, believed, "engine") for each in POLICIES]
    cases.append(replayed(cluster, jobs, "max-min", true, true, "perfect"))
    return [{**case, "arrivals_every_s": every_s, "seed": seed} for case in cases]


def errors(graphs: Graphs, cluster: str, every_s: float, seed: int, count: int) -> list[Case]:
    """Elastic policies on speeds that are off by a known amount, or learnt in the replay."""
    nodes = Nodes.parse(cluster)
    jobs = drawn_jobs(graphs, nodes, jobs=count, arrivals_every_s=every_s, seed=seed)
    true = TrueSpeeds(jobs, seed)
    cases = []
    for policy in ELASTIC:
        believed: dict[str, Speeds] = {
            f"off by {error:.0%}": MistakenSpeeds(true, error, jobs, seed) for error in ERRORS
        }
        believed |= {"engine": EngineSpeeds(), "calibrated": CalibratedSpeeds()}
        for label, speeds in believed.items():
            cases.append(replayed(cluster, jobs, policy, true, speeds, label))
    return [{**case, "arrivals_every_s": every_s, "seed": seed} for case in cases]


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
        mine = here[which["policy"], which.get("believed", "engine")]
        found.append(f"{here[against] / mine:.3f}")
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
            "| queue (h) | used | restarts a job | took (s) |",
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
                f"| {policy}{'' if believed == 'engine' else ', perfect estimates'} "
                f"| {mean('average_jct_s') / 3600:.2f} | {', '.join(jct)} "
                f"| {mean('makespan_s') / 3600:.1f} | {', '.join(makespan)} "
                f"| {mean('average_queue_s') / 3600:.2f} | {mean('utilization_ratio'):.0%} "
                f"| {mean('restarts_per_job'):.1f} | {mean('took_s'):.1f} |"
            )
    return lines


def error_lines(cases: list[Case]) -> list[str]:
    """What is kept of the JCT that perfect knowledge gives, by policy and belief."""
    labels = list(dict.fromkeys(case["believed"] for case in cases))
    lines = [
        "",
        "## What error costs: JCT of perfect estimates over JCT, mean of seeds",
        "",
        f"| policy | {' | '.join(labels)} |",
        "|---" * (len(labels) + 1) + "|",
    ]
    for policy in dict.fromkeys(case["policy"] for case in cases):
        kept = [f"{value:.3f}" for value in kept_ratios(cases, policy).values()]
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
        heights = [100 * kept[f"off by {error:.0%}"] for error in ERRORS]
        (line,) = axes.plot([100 * e for e in ERRORS], heights, marker="o", label=policy)
        axes.plot([-3], [100 * kept["calibrated"]], marker="*", color=line.get_color())
    axes.set_xlabel("error of believed speeds (%); stars: calibrated during the replay")
    axes.set_ylabel("JCT kept (% of perfect estimates')")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    """Replay, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=512)
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS))
    parser.add_argument("--every", nargs="+", type=float, default=[60.0, 20.0])
    parser.add_argument("--no-errors", action="store_true", help="leave out what error costs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    graphs, found, wrong = traced(), list[Case](), list[Case]()
    for cluster in options.clusters:
        for every_s in options.every:
            for seed in range(options.seeds):
                print(f"{cluster}, every {every_s:g} s, seed {seed}", file=sys.stderr)
                found += policies(graphs, cluster, every_s, seed, options.jobs)
    if not options.no_errors:
        for seed in range(options.seeds):
            print(f"errors, seed {seed}", file=sys.stderr)
            wrong += errors(graphs, options.clusters[0], options.every[0], seed, options.jobs)
    lines = policy_lines(found) + (error_lines(wrong) if wrong else [])
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    lines += ["", f"Highest memory of the process: {memory:.2f} GiB."]
    if options.out:
        options.out.write_text("\n".join(lines).lstrip() + "\n", encoding="utf-8")
    if options.picture and wrong:
        draw(wrong, options.picture)
    print(json.dumps({"policies": found, "errors": wrong}) if options.json else "\n".join(lines))


if __name__ == "__main__":
    main()
