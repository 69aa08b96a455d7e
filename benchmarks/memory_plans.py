"""Plan the memory of five convolutional networks beside the peaks that TENSILE's paper plans.

Batches of 16 and 2 at 224 px, 1000 classes, Adam, fp32, on the machine `rtx-2080-ti` with a host
link of 12.5 GB/s out and 13.4 GB/s back. Plans are those of `estimator memory --plans`, for that
link. Durations are predicted, nothing is run. Needs timm and torchvision, unless the folder has the
traced graphs already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from options import Options
from plan_flaws import plan_flaws
from records import Record, kept_graph, say

import estimator as est
from estimator.advise.swap.problem import host_link, swap_problems
from estimator.advise.swap.search import pareto
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


def traced(name: str) -> OpGraph:
    """The graph of a network of timm under a loss, at a batch of 16."""
    import torch
    from traced_models import build_timm, define_torchvision_schemas
    from zoo.convolutional import Labelled
    from zoo.inputs import own_loss

    from estimator.graph.trace.trace import trace_graph

    define_torchvision_schemas()
    batch = torch.randn(16, 3, 224, 224), torch.randint(0, 1000, (16,))
    return trace_graph(
        Labelled(build_timm(name)),
        batch,
        loss=own_loss,
        optimizer="adam",
        target="cuda",
        name=name,
    )


def cases_of(graph: OpGraph, batch: int) -> list[Record]:
    """The least peak of a network at a batch within each slow-down."""
    answer = est.estimate(graph, "1x1:rtx-2080-ti", batch_per_gpu=batch)
    profile = load_profile("rtx-2080-ti")
    out = replace(host_link(profile, "d2h"), bandwidth_bytes_per_s=OUT_BYTES_PER_S)
    back = replace(host_link(profile, "h2d"), bandwidth_bytes_per_s=BACK_BYTES_PER_S)
    plans = pareto(*swap_problems(answer, d2h=out, h2d=back))
    cases: list[Record] = []
    for overhead in OVERHEADS:
        within = [plan for plan in plans if plan.played.overhead_ratio <= overhead + 1e-9]
        plan = min(within, key=lambda plan: plan.played.peak_bytes)
        played = plan.played
        cases.append(
            {
                "id": f"{graph.name}, batch {batch}, at most {overhead:.0%} slower",
                "value": played.peak_bytes / MIB,
                "unit": "MiB",
                "bound": TENSILES_MIB[graph.name][BATCHES.index(batch)],
                "without_mib": played.vanilla_bytes / MIB,
                "updates": plan.problem.updates,
                "saved_ratio": played.saved_ratio,
                "overhead_ratio": played.overhead_ratio,
                "swaps": len(plan.plan.swaps),
                "recomputes": len(plan.plan.recomputes),
                "flaws": len(plan_flaws(plan.problem, plan.plan, played)),
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
