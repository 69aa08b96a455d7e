"""Plan the memory of five convolutional networks as TENSILE did, beside the plans of others.

Batches of 16 and 2 at 224 px, 1000 classes, Adam, fp32, on the machine `rtx-2080-ti` with a host
link of 12.5 GB/s out and 13.4 GB/s back. Every parameter is updated by itself with a fused kernel:
at the end of the step, as soon as its gradient is ready, whole or in slices, or in slices that are
paced over the backward pass.
The peak without a plan is that of the step with all updates at its end, whatever a plan does with
them. Durations are predicted, nothing is run. Needs timm and torchvision,
unless a folder of traced graphs is given.

    python benchmarks/memory_plans.py --graphs DIR [--only MODEL ...] [--json]
    python benchmarks/memory_plans.py --graphs DIR --jobs resnet50:16 vgg16:2
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from swap.baselines import capuchin, chen, vdnn
from swap.checker import plan_flaws
from swap.least_peak import least_peak
from swap.tensile import tensile

import estimator as est
from estimator.advise.swap.problem import (
    SwapProblem,
    UpdateSchedule,
    host_link,
    joined,
    swap_problem,
)
from estimator.advise.swap.search import Planned, least_bytes, pareto
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.catalogue import load_profile
from estimator.units import MIB, format_ratio

MODELS = ("vgg16", "inception_v3", "inception_v4", "resnet50", "densenet121")
BATCHES = (16, 2)
# Planned peaks in MiB at batch 16 and 2, as the task states them of TENSILE's paper.
TENSILES_MIB = {
    "vgg16": (4099, 2642),
    "inception_v3": (2447, 1173),
    "inception_v4": (3789, 1444),
    "resnet50": (2212, 1273),
    "densenet121": (2334, 1130),
}
OUT_BYTES_PER_S, BACK_BYTES_PER_S = 12.5e9, 13.4e9
OVERHEADS = (0.0, 0.01, 0.05, 0.15)
UPDATES = {
    "end": UpdateSchedule(),
    "ready": UpdateSchedule(place="ready"),
    "ready, sliced": UpdateSchedule(place="ready", sub_group_bytes=16 * MIB),
    "paced": UpdateSchedule(place="paced", sub_group_bytes=8 * MIB),
}
JOBS_OVERHEAD = 0.05
CAPUCHIN_SAVINGS = (0.25, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One planner on one network and batch; `ours_mib` is our least peak within its time."""

    model: str
    batch: int
    planner: str
    updates: str
    vanilla_mib: float
    tensiles_mib: float
    peak_mib: float
    ours_mib: float
    saved_ratio: float
    overhead_ratio: float
    swaps: int
    recomputes: int
    flaws: int
    least_mib: float

    @property
    def benefit_ratio(self) -> float | None:
        """MSR / EOR (CBR); None where nothing is lost."""
        return self.saved_ratio / self.overhead_ratio if self.overhead_ratio > 1e-9 else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """One placement of updates: the step, what others plan for it, and our curve."""

    updates: str
    problem: SwapProblem
    others: dict[str, Planned]
    seeds: list[Planned]
    curve: list[Planned]

    def least(self, overhead_ratio: float, rounds: int = 0) -> Planned:
        """Our plan with the least peak within a slow-down, empty where there is none."""
        return least_peak(
            self.problem, overhead_ratio, curve=self.curve, rounds=rounds, seeds=self.seeds
        )


def traced(model: str, folder: Path) -> OpGraph:
    """The graph of a network, traced once into a folder."""
    path = folder / f"{model}.graph"
    if not path.exists():
        graph = _trace(model)
        folder.mkdir(parents=True, exist_ok=True)
        graph.save(path)
    return OpGraph.load(path)


def _trace(name: str) -> OpGraph:
    import torch
    from torch import Tensor, nn
    from traced_models import build_timm, define_torchvision_schemas

    from estimator.graph.trace.trace import trace_graph

    class Classified(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.loss = model, nn.CrossEntropyLoss()

        def forward(self, images: Tensor, labels: Tensor) -> Tensor:
            found: Tensor = self.loss(self.model(images), labels)
            return found

    define_torchvision_schemas()
    batch = torch.randn(16, 3, 224, 224), torch.randint(0, 1000, (16,))
    return trace_graph(
        Classified(build_timm(name)),
        batch,
        loss=lambda value, _batch: value,
        optimizer="adam",
        target="cuda",
        name=name,
    )


def problem_for(graph: OpGraph, batch: int, updates: UpdateSchedule) -> SwapProblem:
    """The step to plan."""
    answer = est.estimate(graph, "1x1:rtx-2080-ti", batch_per_gpu=batch)
    profile = load_profile("rtx-2080-ti")
    out = replace(host_link(profile, "d2h"), bandwidth_bytes_per_s=OUT_BYTES_PER_S)
    back = replace(host_link(profile, "h2d"), bandwidth_bytes_per_s=BACK_BYTES_PER_S)
    return swap_problem(answer, d2h=out, h2d=back, updates=updates)


def candidates_for(
    graph: OpGraph, batch: int, updates: str, *, budgets: int, with_capuchin: bool
) -> Candidates:
    """Every planner on one network and batch with its updates in one place."""
    problem = problem_for(graph, batch, UPDATES[updates])
    convolutions = [
        op
        for op, number in enumerate(problem.order)
        if number >= 0
        and graph.ops[number].phase == "forward"
        and graph.ops[number].call.target == "aten.convolution.default"
    ]
    seeds = tensile(problem)
    others = {"TENSILE": seeds[-1], "vDNN": vdnn(problem, convolutions), "Chen √n": chen(problem)}
    # Capuchin moves nothing of the optimizer: where updates lie is nothing to it.
    for saving in CAPUCHIN_SAVINGS if with_capuchin and updates == "end" else ():
        budget = int((1 - saving) * problem.vanilla_bytes)
        others[f"Capuchin for {saving:.0%}"] = capuchin(problem, budget)
    curve = pareto(problem, budgets=budgets, seeds=seeds)
    return Candidates(updates=updates, problem=problem, others=others, seeds=seeds, curve=curve)


def rows_of(
    graph: OpGraph,
    batch: int,
    *,
    updates: Sequence[str],
    budgets: int,
    rounds: int,
    with_capuchin: bool,
) -> list[Row]:
    """Every planner on one network and batch; ours takes the best place for updates."""
    every = [
        candidates_for(graph, batch, name, budgets=budgets, with_capuchin=with_capuchin)
        for name in updates
    ]

    def ours(overhead_ratio: float, rounds: int = 0) -> tuple[Planned, Candidates]:
        """Of the best place for updates, with halvings there."""
        found = [(each.least(overhead_ratio), each) for each in every]
        best = min(found, key=lambda each: each[0].played.peak_bytes)[1]
        return best.least(overhead_ratio, rounds), best

    def row(planner: str, found: Planned, of: Candidates, ours_bytes: int) -> Row:
        played = found.played
        row = Row(
            model=graph.name,
            batch=batch,
            planner=planner,
            updates=of.updates,
            vanilla_mib=of.problem.vanilla_bytes / MIB,
            tensiles_mib=TENSILES_MIB[graph.name][BATCHES.index(batch)],
            peak_mib=played.peak_bytes / MIB,
            ours_mib=ours_bytes / MIB,
            saved_ratio=played.saved_ratio,
            overhead_ratio=played.overhead_ratio,
            swaps=len(found.plan.swaps),
            recomputes=len(found.plan.recomputes),
            flaws=len(plan_flaws(of.problem, found.plan, played)),
            least_mib=least_bytes(of.problem) / MIB,
        )
        print(line_of(row), file=sys.stderr, flush=True)
        return row

    rows = []
    for candidates in every:
        for name, other in candidates.others.items():
            best, _ = ours(max(other.played.overhead_ratio, 0.0))
            rows.append(row(name, other, candidates, best.played.peak_bytes))
    found, candidates = ours(0.0, rounds)
    for overhead in OVERHEADS:
        # What is within a smaller slow-down is within a larger one.
        tried = found, candidates
        found, candidates = min(
            tried, ours(overhead, rounds), key=lambda each: each[0].played.peak_bytes
        )
        name = f"ours at EOR ≤ {overhead:.0%}"
        rows.append(row(name, found, candidates, found.played.peak_bytes))
    return rows


def jobs_line(graphs: Sequence[OpGraph], batches: Sequence[int], budgets: int, rounds: int) -> str:
    """Jobs that take turns on one device: the peak of a plan for all beside plans for each."""
    problems = [
        problem_for(graph, batch, UPDATES["end"])
        for graph, batch in zip(graphs, batches, strict=True)
    ]

    def least(problem: SwapProblem) -> Planned:
        curve = pareto(problem, budgets=budgets)
        return least_peak(problem, JOBS_OVERHEAD, curve=curve, rounds=rounds)

    alone = sum(least(problem).played.peak_bytes for problem in problems)
    both = joined(problems)
    found = least(both)
    flaws = len(plan_flaws(both, found.plan, found.played))
    names = " + ".join(
        f"{graph.name} {batch}" for graph, batch in zip(graphs, batches, strict=True)
    )
    return (
        f"| {names} | {sum(p.vanilla_bytes for p in problems) / MIB:.0f} | {alone / MIB:.0f} "
        f"| {both.vanilla_bytes / MIB:.0f} | {found.played.peak_bytes / MIB:.0f} "
        f"| {format_ratio(found.played.overhead_ratio)} | {flaws} |"
    )


JOBS_HEAD = (
    "| jobs and batches | MiB apart | planned apart | MiB taking turns | planned together | EOR "
    "| flaws |\n|---|---:|---:|---:|---:|---:|---:|"
)


def line_of(row: Row) -> str:
    """One row as people read it."""
    benefit = "" if row.benefit_ratio is None else f"{row.benefit_ratio:.2f}"
    return (
        f"| {row.model} | {row.batch} | {row.planner} | {row.updates} | {row.vanilla_mib:.0f} "
        f"| {row.peak_mib:.0f} | {row.ours_mib:.0f} | {format_ratio(row.saved_ratio)} "
        f"| {format_ratio(row.overhead_ratio)} | {benefit} | {row.swaps} | {row.recomputes} "
        f"| {row.tensiles_mib:.0f} | {row.flaws} |"
    )


HEAD = (
    "| model | batch | planner | updates | MiB without | MiB planned | ours in that time, MiB "
    "| MSR | EOR | CBR | swaps | recomputed | TENSILE's paper, MiB | flaws |\n"
    "|---|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=Path, default=Path("graphs"), help="folder of graphs")
    parser.add_argument("--only", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, choices=BATCHES)
    parser.add_argument("--updates", nargs="+", default=list(UPDATES), choices=UPDATES)
    parser.add_argument("--budgets", type=int, default=20, help="points of the curve")
    parser.add_argument("--rounds", type=int, default=6, help="halvings between two of them")
    parser.add_argument(
        "--without-capuchin", action="store_true", help="leave out the slowest of the others"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--jobs", nargs="+", metavar="MODEL:BATCH", help="plan these for one device together"
    )
    chosen = parser.parse_args()
    if chosen.jobs:
        jobs = [job.split(":") for job in chosen.jobs]
        graphs = [traced(name, chosen.graphs) for name, _ in jobs]
        sizes = [int(size) for _, size in jobs]
        print(JOBS_HEAD, jobs_line(graphs, sizes, chosen.budgets, chosen.rounds), sep="\n")
        return 0
    rows: list[Row] = []
    for model in chosen.only:
        graph = traced(model, chosen.graphs)
        for batch in chosen.batches:
            rows += rows_of(
                graph,
                batch,
                updates=chosen.updates,
                budgets=chosen.budgets,
                rounds=chosen.rounds,
                with_capuchin=not chosen.without_capuchin,
            )
    if chosen.json:
        listed: list[dict[str, Any]] = [asdict(row) for row in rows]
        print(json.dumps({"machine": "rtx-2080-ti", "cases": listed}))
    else:
        print(HEAD)
        for row in rows:
            print(line_of(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
