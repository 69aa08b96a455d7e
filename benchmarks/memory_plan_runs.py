"""Run plans of memory on this CPU and set the measured peak and time beside what was planned.

    python benchmarks/memory_plan_runs.py [--only MODEL ...] [--saving 0.2] [--steps 5] [--json]

A plan for the models of `local_models.py` moves activations to a second arena over a paced link, or
computes them again, so that the peak of live tensors falls by the share asked for. The peak is read
off torch's allocator over one step; gradients are compared bit for bit with those without a plan.
Times are those of the forward and backward pass: planned from operators timed on this machine,
measured as medians over steps taken in turns with and without the plan.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import local_models
import torch
from swap.checker import plan_flaws
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import estimator as est
from estimator.advise.swap.problem import swap_problem
from estimator.advise.swap.search import Means, plan_within
from estimator.api import trace_model
from estimator.errors import EstimatorError
from estimator.graph.trace.training_call import TrainingCall
from estimator.integrations.swap.apply_plan import MemoryPlan, apply_plan
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import Link, LinkKind, Provenance
from estimator.probe.devices.backend import keep_memory_resident, touch_memory
from estimator.units import format_bytes, format_ratio, format_seconds

PEAK_BOUND_RATIO, TIME_BOUND_RATIO = 0.05, 0.15
MODELS_WANTED = 6
LINK_BYTES_PER_S = 1e9
TOUCHED_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One model: what was planned, and what was measured with and without the plan."""

    model: str
    vanilla_bytes: int
    planned_bytes: int
    measured_vanilla_bytes: int
    measured_bytes: int
    planned_plain_s: float
    measured_plain_s: float
    planned_s: float
    measured_s: float
    swaps: int
    recomputes: int
    flaws: int
    same_gradients: bool

    @property
    def peak_error_ratio(self) -> float:
        return self.planned_bytes / self.measured_bytes - 1

    @property
    def time_error_ratio(self) -> float:
        return self.planned_s / self.measured_s - 1


def link(kind: LinkKind) -> Link:
    """A link that a copy thread can keep up with."""
    source = Provenance(source="measured", note="paced to this rate")
    return Link(kind=kind, latency_s=0.0, bandwidth_bytes_per_s=LINK_BYTES_PER_S, provenance=source)


def run_model(build: Callable[[], Any], saving: float, machine: str, steps: int) -> Run:
    """Plan, then run one model."""
    torch.manual_seed(0)
    model, batch, *rest = build()
    loss = rest[0] if rest else None
    profile = load_profile(machine)
    graph = trace_model(model, batch, loss, optimizer="adamw", measure=True, profile=profile)
    answer = est.estimate(graph, "1x1:local", profile=profile)
    problem = swap_problem(answer, d2h=link("d2h"), h2d=link("h2d"))
    # Gradients are compared, parameters not updated: the peak counts up to the update.
    budget = int((1 - saving) * problem.vanilla_bytes)
    found = plan_within(problem, budget, means=Means(kinds=("activation",)))
    plan = MemoryPlan(graph=graph, problem=problem, plan=found.plan)
    other, call = copy.deepcopy(model), TrainingCall.of(model, batch, loss)
    standing = _standing_bytes(model, batch) + _state_bytes(model)

    def step(which: nn.Module) -> None:
        torch.manual_seed(1)
        which.zero_grad(set_to_none=True)
        call.run(which, call.batch).backward()

    plain_s, planned_s = [], []
    with apply_plan(plan, other):
        step(other)
    step(model)
    same = all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
        if a.grad is not None and b.grad is not None
    ) and all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))
    for _ in range(steps):
        plain_s.append(_seconds(lambda: step(model)))
        with apply_plan(plan, other):
            step(other)  # the arena takes its memory
            planned_s.append(_seconds(lambda: step(other)))
    # The update is not run.
    last = max(place for place, op in enumerate(problem.order) if op >= 0)
    measured_vanilla = standing + _live_peak(lambda: step(model), model)
    with apply_plan(plan, other):
        measured = standing + _live_peak(lambda: step(other), other)
    return Run(
        model=build.__name__,
        vanilla_bytes=problem.vanilla_bytes,
        planned_bytes=found.played.peak_bytes,
        measured_vanilla_bytes=measured_vanilla,
        measured_bytes=measured,
        planned_plain_s=float(problem.op_s[: last + 1].sum()),
        measured_plain_s=statistics.median(plain_s),
        planned_s=float(found.played.ends_s[last]),
        measured_s=statistics.median(planned_s),
        swaps=len(found.plan.swaps),
        recomputes=len(found.plan.recomputes),
        flaws=len(plan_flaws(problem, found.plan, found.played)),
        same_gradients=same,
    )


def _standing_bytes(model: nn.Module, batch: Any) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [each for each in torch.utils._pytree.tree_leaves(batch) if isinstance(each, Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _state_bytes(model: nn.Module) -> int:
    """Two moments of every parameter, which a step of AdamW would hold."""
    return 2 * sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def _seconds(step: Callable[[], None]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def _live_peak(step: Callable[[], None], model: nn.Module) -> int:
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = profiled.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(size for _, size in changes))


def line_of(run: Run) -> str:
    """One run as people read it."""
    bits = "yes" if run.same_gradients else "NO"
    return (
        f"| {run.model} | {format_bytes(run.measured_vanilla_bytes)} "
        f"| {format_bytes(run.planned_bytes)} | {format_bytes(run.measured_bytes)} "
        f"| {format_ratio(run.peak_error_ratio)} | {format_seconds(run.planned_plain_s)} "
        f"| {format_seconds(run.measured_plain_s)} | {format_seconds(run.planned_s)} "
        f"| {format_seconds(run.measured_s)} | {format_ratio(run.time_error_ratio)} "
        f"| {run.swaps} | {run.recomputes} | {run.flaws} | {bits} |"
    )


HEAD = (
    "| model | peak without | planned | measured | error | time without, planned | measured "
    "| time planned | measured | error | swaps | recomputed | flaws | same bits |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="names of local_models.py")
    parser.add_argument("--saving", type=float, default=0.2, help="share of the peak to save")
    parser.add_argument("--steps", type=int, default=5, help="steps of which times are medians")
    parser.add_argument("--machine", default="local", help="profile that durations come from")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory_resident()
    touch_memory(TOUCHED_BYTES)
    torch.use_deterministic_algorithms(True)
    runs = []
    for build in local_models.ALL:
        if chosen.only and build.__name__ not in chosen.only:
            continue
        try:
            runs.append(run_model(build, chosen.saving, chosen.machine, chosen.steps))
        except EstimatorError as error:
            print(f"{build.__name__}: {error}", file=sys.stderr, flush=True)
            continue
        print(line_of(runs[-1]), file=sys.stderr, flush=True)
    if chosen.json:
        rows = [
            asdict(run)
            | {"peak_error_ratio": run.peak_error_ratio, "time_error_ratio": run.time_error_ratio}
            for run in runs
        ]
        print(json.dumps({"link_bytes_per_s": LINK_BYTES_PER_S, "cases": rows}))
    else:
        print("\n".join([HEAD, *map(line_of, runs)]))
    near = [
        run
        for run in runs
        if abs(run.peak_error_ratio) <= PEAK_BOUND_RATIO
        and abs(run.time_error_ratio) <= TIME_BOUND_RATIO
    ]
    print(
        f"{len(near)} of {len(runs)} within {format_ratio(PEAK_BOUND_RATIO)} of the planned peak "
        f"and {format_ratio(TIME_BOUND_RATIO)} of the planned time",
        file=sys.stderr,
    )
    return 0 if len(near) >= min(MODELS_WANTED, len(runs)) else 1


if __name__ == "__main__":
    sys.exit(main())
