"""Set a traced graph's operators beside those of a real step, and the kernels that each launched.

Operators are counted below autograd, where the tracer stands; kernels come from torch's profiler,
which says which operator launched them.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from records import Record, Records, say
from summary import format_table
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from zoo.gpu import BY_NAME

from estimator.errors import EstimatorError
from estimator.graph.costs.call_costs import family_of
from estimator.graph.ir.op_graph import OpGraph
from estimator.kernels.durations import op_durations
from estimator.machines.catalogue import load_profile
from gpu.cases import Case, tiny_cases
from gpu.predictions import graph_path, trace_missing
from gpu.steps import RealTraining, release

MODELS = ("resnet50", "bert_base", "gpt2")
WARM_UP_STEPS = 3


class _Counted(TorchDispatchMode):
    """Counts every operator that is dispatched within."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Autograd's own detached views and the profiler's marks are no part of a graph.
        if func.namespace == "aten" and str(func) != "aten.detach.default":
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def dispatched(training: RealTraining) -> Counter[str]:
    """Operators of forward and backward of one real step; the optimizer is no part of the graph."""
    update, training.optimizer.step = training.optimizer.step, lambda: None
    counted = _Counted()
    try:
        with counted:
            training.step()
    finally:
        training.optimizer.step = update
    return counted.counts


def launched(training: RealTraining) -> list[Record]:
    """Kernels of one real step by launching operator: {"op", "kernel", "count", "seconds"}."""
    activities = [ProfilerActivity.CPU]
    if training.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    training.synchronize()
    with profile(activities=activities) as profiled:
        training.step()
        training.synchronize()
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in profiled.events() or ():
        for kernel in event.kernels:
            found[event.name, kernel.name].append(kernel.duration * 1e-6)
    return [
        {"op": op, "kernel": name, "count": len(seconds), "seconds": sum(seconds)}
        for (op, name), seconds in sorted(found.items(), key=lambda item: -sum(item[1]))
    ]


def planned(graph: OpGraph) -> Counter[str]:
    """Operators of the graph."""
    return Counter(op.call.target for op in graph.ops)


def family_seconds(graph: OpGraph, batch: int, machine: str) -> dict[str, float]:
    """Predicted device seconds by family of operators."""
    profile_ = load_profile(machine)
    bound = graph.at(batch)
    seconds: dict[str, float] = defaultdict(float)
    predicted = op_durations(bound, profile_).device_s
    for op, each in zip(graph.ops, predicted, strict=True):
        if not op.is_view:
            seconds[family_of(op.call.target)] += float(each)
    return dict(seconds)


def measured_seconds(kernels: Sequence[Record]) -> dict[str, float]:
    """Measured kernel seconds by the family of the launching operator; the optimizer's apart."""
    seconds: dict[str, float] = defaultdict(float)
    for row in kernels:
        name = row["op"].replace("::", ".")
        updating = "_foreach" in name or "_fused_adam" in name or "Optimizer" in name
        seconds["update" if updating else family_of(name)] += row["seconds"]
    return dict(seconds)


def compare(case: Case, folder: Path, device: str, machine: str | None) -> Record:
    """One model: what the graph has, what a real step dispatched, what ran on the device."""
    graph = OpGraph.load(graph_path(folder, case))
    training = RealTraining(case, device)
    try:
        for _ in range(WARM_UP_STEPS):
            training.step()
        kernels = launched(training)
        real = dispatched(training)
    finally:
        del training
        release(device)
    plan = planned(graph)
    return {
        "case": case.key,
        "graph": dict(plan),
        "dispatched": dict(real),
        "only_in_graph": dict(plan - real),
        "only_dispatched": dict(real - plan),
        "kernels": kernels,
        "kernel_s": sum(row["seconds"] for row in kernels),
        "unknown_families": sorted(
            {row["op"] for row in kernels if family_of(row["op"].replace("::", ".")) == "other"}
        ),
        "predicted_family_s": family_seconds(graph, case.batch, machine) if machine else {},
        "measured_family_s": measured_seconds(kernels),
    }


def lines_of(found: Mapping[str, Any]) -> str:
    """One model as people read it."""
    planned_count, real_count = sum(found["graph"].values()), sum(found["dispatched"].values())
    families = sorted({*found["predicted_family_s"], *found["measured_family_s"]})
    table = [["family", "predicted", "measured"]]
    for family in families:
        row = [found[side].get(family, 0.0) for side in ("predicted_family_s", "measured_family_s")]
        table.append([family, *(f"{1e3 * seconds:.3f} ms" for seconds in row)])
    return "\n".join(
        [
            f"{found['case']}: {planned_count} operators in the graph, {real_count} dispatched, "
            f"{sum(row['count'] for row in found['kernels'])} kernels",
            f"  only in the graph: {found['only_in_graph'] or 'none'}",
            f"  only dispatched: {found['only_dispatched'] or 'none'}",
            format_table(table),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("build/gpu_accuracy"))
    parser.add_argument("--profile", help="a profile, for the predicted seconds beside")
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [
        Case(workload=name, batch=BY_NAME[name].batches[1], precision="bf16-amp") for name in MODELS
    ]
    if options.target == "cpu":
        cases = tiny_cases()
    notes = Records(options.work / "records.jsonl")
    trace_missing(cases, options.work / "graphs", options.target, notes)
    found = []
    for case in cases:
        try:
            found.append(compare(case, options.work / "graphs", options.target, options.profile))
        except (EstimatorError, RuntimeError, OSError, ValueError) as error:
            found.append({"case": case.key, "failed": f"{type(error).__name__}: {error}"[:400]})
            say(f"{case.key}: {found[-1]['failed']}")
            continue
        print(lines_of(found[-1]), flush=True)
        options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
