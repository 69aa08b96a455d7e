"""Plan the memory of five convolutional networks beside the peaks that TENSILE's paper plans.

Batches of 16 and 2 at 224 px, 1000 classes, Adam, fp32, on the machine `rtx-2080-ti` with a host
link of 12.5 GB/s out and 13.4 GB/s back. Parameters are updated at the end of the step, or each as
soon as its gradient is ready, whole or in slices, or in slices paced over the backward pass: the
best of these counts. Durations are predicted, nothing is run. Needs timm and torchvision, unless
the folder has the traced graphs already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from options import Options
from records import Record, kept_graph, say
from swap.checker import plan_flaws
from swap.steps import UpdateSchedule

import estimator as est
from estimator.advise.swap.problem import SwapProblem, host_link, swap_problem
from estimator.advise.swap.search import Planned, least_bytes, pareto, plan_within
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.catalogue import load_profile
from estimator.units import MIB

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


def traced(name: str) -> OpGraph:
    """The graph of a network of timm under a loss, at a batch of 16."""
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


def least_peak(
    problem: SwapProblem, slowdown_ratio: float, *, curve: Sequence[Planned], rounds: int = 6
) -> Planned:
    """The plan with the least peak whose step takes at most 1 + `slowdown_ratio` times as long.

    `curve` is that of `pareto`; budgets between its plans are tried.
    """
    limit_s = problem.vanilla_s * (1 + slowdown_ratio) * (1 + 1e-9)
    best = min(
        (plan for plan in curve if plan.played.step_s <= limit_s),
        key=lambda plan: plan.played.peak_bytes,
    )
    beyond = [
        plan.played.peak_bytes for plan in curve if plan.played.peak_bytes < best.played.peak_bytes
    ]
    low, high = max(beyond, default=least_bytes(problem)), best.played.peak_bytes
    for _ in range(rounds):
        middle = (low + high) // 2
        tried = plan_within(problem, middle)
        fast = tried.played.step_s <= limit_s
        if fast and tried.played.peak_bytes < best.played.peak_bytes:
            best = tried
        if fast and tried.played.peak_bytes <= middle:
            high = middle
        else:
            low = middle
    return best


def cases_of(graph: OpGraph, batch: int) -> list[Record]:
    """The least peak within each slow-down, of the best place for updates."""
    problems = {name: problem_for(graph, batch, place) for name, place in UPDATES.items()}
    curves = {name: pareto(problem, budgets=20) for name, problem in problems.items()}
    cases: list[Record] = []
    for overhead in OVERHEADS:
        # The peak without a plan is that with all updates at the step's end, whatever a plan does.
        plans = {
            name: least_peak(problem, overhead, curve=curves[name], rounds=0)
            for name, problem in problems.items()
        }
        updates = min(plans, key=lambda name: plans[name].played.peak_bytes)
        problem = problems[updates]
        plan = least_peak(problem, overhead, curve=curves[updates])
        cases.append(
            {
                "id": f"{graph.name}, batch {batch}, at most {overhead:.0%} slower",
                "value": plan.played.peak_bytes / MIB,
                "unit": "MiB",
                "bound": TENSILES_MIB[graph.name][BATCHES.index(batch)],
                "without_mib": problem.vanilla_bytes / MIB,
                "updates": updates,
                "saved_ratio": plan.played.saved_ratio,
                "overhead_ratio": plan.played.overhead_ratio,
                "swaps": len(plan.plan.swaps),
                "recomputes": len(plan.plan.recomputes),
                "flaws": len(plan_flaws(problem, plan.plan, plan.played)),
            }
        )
        say(f"{cases[-1]['id']}: {cases[-1]['value']:.0f} MiB")
    return cases


def run(options: Options) -> Iterator[Record]:
    """Every network at both batches."""
    for model in filter(options.takes, MODELS):
        graph = kept_graph(options.work / f"{model}.graph", partial(traced, model))
        for batch in BATCHES:
            yield from cases_of(graph, batch)
