"""Run plans of memory on this CPU and set the measured peak and time beside what was planned.

A plan for the models of `local_models.py` moves activations to a second arena over a paced link, or
computes them again, so that the peak of live tensors falls by a fifth. The peak is read
off torch's allocator over one step; gradients are compared bit for bit with those without a plan.
Times are those of the forward and backward pass: planned from operators timed on this machine,
measured as medians over steps taken in turns with and without the plan.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch
from local_cases import model_functions
from memory_steps import changes_of, events_of, storage_bytes
from options import Options, local_machine
from plan_flaws import plan_flaws
from records import Record, say
from summary import noise_ratio
from torch import nn

import estimator as est
from estimator.advise.swap.problem import swap_problem
from estimator.advise.swap.search import Means, plan_within
from estimator.api import trace_model
from estimator.errors import EstimatorError
from estimator.graph.trace.training_call import TrainingCall
from estimator.integrations.swap.apply_plan import MemoryPlan, apply_plan
from estimator.machines.profile import Link, LinkKind, MachineProfile, Provenance
from estimator.probe.devices.backend import keep_memory_resident, touch_memory

PEAK_BOUND_RATIO, SAVING_RATIO, STEPS = 0.05, 0.2, 5
LINK_BYTES_PER_S = 1e9
TOUCHED_BYTES = 1 << 30


def link(kind: LinkKind) -> Link:
    """A link that a copy thread can keep up with."""
    source = Provenance(source="measured", note="paced to this rate")
    return Link(kind=kind, latency_s=0.0, bandwidth_bytes_per_s=LINK_BYTES_PER_S, provenance=source)


def run_model(build: Callable[[], Any], machine: MachineProfile) -> Iterator[Record]:
    """Plan, then run one model."""
    torch.manual_seed(0)
    model, batch, *rest = build()
    loss = rest[0] if rest else None
    graph = trace_model(model, batch, loss, optimizer="adamw", measure=True, profile=machine)
    answer = est.estimate(graph, f"1x1:{machine.name}", profile=machine)
    problem = swap_problem(answer, d2h=link("d2h"), h2d=link("h2d"))
    # Gradients are compared, parameters not updated: the peak counts up to the update.
    budget = int((1 - SAVING_RATIO) * problem.vanilla_bytes)
    found = plan_within(problem, budget, means=Means(kinds=("activation",)))
    plan = MemoryPlan(graph=graph, problem=problem, plan=found.plan)
    other, call = copy.deepcopy(model), TrainingCall.of(model, batch, loss)
    held = storage_bytes([*model.parameters(), *model.buffers()]) | storage_bytes(batch)
    # Two moments of every parameter, which a step of AdamW would hold.
    moments = 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad)
    standing = sum(held.values()) + moments

    def step(which: nn.Module) -> None:
        torch.manual_seed(1)
        which.zero_grad(set_to_none=True)
        call.run(which, call.batch).backward()

    plain_s, planned_s = [], []
    with apply_plan(plan, other):
        step(other)
    step(model)
    same = _are_equal(model, other)
    for _ in range(STEPS):
        plain_s.append(_seconds(lambda: step(model)))
        with apply_plan(plan, other):
            step(other)  # the arena takes its memory
            planned_s.append(_seconds(lambda: step(other)))
    # The update is not run.
    last = max(place for place, op in enumerate(problem.order) if op >= 0)
    measured_vanilla = standing + _live_peak(lambda: step(model), model)
    with apply_plan(plan, other):
        measured = standing + _live_peak(lambda: step(other), other)
    found_ratio = found.played.peak_bytes / measured - 1
    about = {
        "model": build.__name__,
        "method": "planned",
        "vanilla_bytes": problem.vanilla_bytes,
        "measured_vanilla_bytes": measured_vanilla,
        "planned_plain_s": float(problem.op_s[: last + 1].sum()),
        "measured_plain_s": statistics.median(plain_s),
        "swaps": len(found.plan.swaps),
        "recomputes": len(found.plan.recomputes),
    }
    flaws = len(plan_flaws(problem, found.plan, found.played)) + (not same)
    yield {
        **about,
        "id": f"{build.__name__}: time",
        "predicted_s": float(found.played.ends_s[last]),
        "measured_s": statistics.median(planned_s),
        "noise_ratio": noise_ratio(planned_s),
    }
    peak = {"value": abs(found_ratio), "bound": PEAK_BOUND_RATIO}
    yield {"id": f"{build.__name__}: peak is off by", **peak}
    yield {"id": f"{build.__name__}: flaws, other gradients", "value": flaws, "bound": 0}


def _are_equal(one: nn.Module, two: nn.Module) -> bool:
    """Whether the gradients and buffers of two models are the same to the last bit."""
    return all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(one.parameters(), two.parameters(), strict=True)
        if a.grad is not None and b.grad is not None
    ) and all(torch.equal(a, b) for a, b in zip(one.buffers(), two.buffers(), strict=True))


def _seconds(step: Callable[[], None]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def _live_peak(step: Callable[[], None], model: nn.Module) -> int:
    model.zero_grad(set_to_none=True)
    return max(accumulate(size for _, size in changes_of(events_of(step))))


def run(options: Options) -> Iterator[Record]:
    """Every model of `local_models.py` or of a file; a quick run takes one."""
    torch.set_num_threads(1)
    keep_memory_resident()
    touch_memory(TOUCHED_BYTES)
    torch.use_deterministic_algorithms(True)
    machine = local_machine(options.work)
    for build in model_functions(options, "resnet"):
        try:
            yield from run_model(build, machine)
        except EstimatorError as error:
            say(f"{build.__name__}: {error}")
