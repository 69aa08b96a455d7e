"""Predict steps of two CPU ranks that share a model, then run them on gloo: layers or stages.

Tensor-parallel ranks divide layers by `parallelize_module`; pipeline ranks each hold half of the
blocks under torch's schedules, four micro-batches a step.
Every case is predicted before it is measured; a measurement is the median over fresh processes of
the slowest rank's step. What is found is appended to a file, from which a further run
continues.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

from layout_models import TRAINED as CASES
from layout_models import Case
from options import Options, local_machine
from records import Record, Records, now, say, times_of
from summary import noise_ratio, off

from estimator.estimates.estimate import Estimate
from estimator.graph.partition.plan import Plan
from estimator.graph.trace.trace import trace_graph
from estimator.machines.profile import MachineProfile
from estimator.probe.devices.ranks import run_on_devices
from estimator.workload.layouts import Layout

RANKS = 2
SCHEDULES, MICRO_BATCHES = ("1f1b", "gpipe", "zb"), 4


def train_rank(rank: int, world_size: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """One rank: a model divided by torch, its steps timed."""
    import torch
    from testbed.layouts import rank_step

    from estimator.probe.devices.backend import keep_memory_resident
    from estimator.validate.training import time_steps

    keep_memory_resident()
    torch.manual_seed(0)
    built = next(case for case in CASES if case.name == arguments["case"]).make()
    step = rank_step(
        world_size, built, arguments, lambda model: torch.optim.AdamW(model.parameters())
    )
    return time_steps(_Steps(step), arguments, world_size)  # type: ignore[arg-type]


class _Steps:
    """What `time_steps` asks of a training, whose steps are timed as a whole."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step
        self.marks: list[tuple[str, float]] = []

    def mark(self, what: str) -> None:
        """Phases are not told apart."""

    def synchronize(self) -> None:
        """Operators of CPUs have ended when they return."""

    def step_times_s(self) -> list[float]:
        return []


def predicted(case: Case, profile: MachineProfile, how: str) -> tuple[Plan | None, Estimate]:
    """The plan and the estimate of one case on two ranks."""
    from layout_oracle import plan_of

    from estimator.estimates.engine import DEFAULT
    from estimator.estimates.request import EstimateRequest

    model, batch = case.make()
    graph = trace_graph(model, batch, loss=case.loss)
    about: dict[str, Any] = {"profile": profile}
    plan = None
    if how in SCHEDULES:
        about |= {"accumulation_steps": MICRO_BATCHES}
    else:
        plan = plan_of(graph, sequence=how == "sp")
        about |= {"tp_plan": plan}
    where = f"1x{RANKS}:{profile.name}"
    answer = DEFAULT.estimate(EstimateRequest.of(graph, where, layout=_layout(model, how), **about))
    return plan, answer


def _layout(model: Any, how: str) -> str:
    """Ranks that divide layers, or stages of as many blocks each."""
    if how in SCHEDULES:
        return f"pp={RANKS},schedule={how},cut=blocks.{len(model.blocks) // RANKS},dp=1"
    return f"tp={RANKS},sp" if how == "sp" else f"tp={RANKS}"


def measured(
    case: Case, how: str, plan: Plan | None, profile: MachineProfile, *, steps: int, processes: int
) -> list[float]:
    """Seconds of the slowest rank's step in each of some runs."""
    layout = _layout(case.make()[0], how)
    arguments = {
        "case": case.name,
        "styles": plan.styles if plan else (),
        "layout": layout,
        "points": Layout.parse(layout).cut,
        "micro_batches": MICRO_BATCHES,
        "sharded": False,
        "kind": "cpu",
        "steps": steps,
        "warmup_steps": 3,
    }
    found = []
    for _ in range(processes):
        ranks = run_on_devices(
            profile.devices[:RANKS],
            "layout_accuracy:train_rank",
            arguments,
            timeout_s=300,
            world=True,
        )
        found.append(max(rank["step_s"] for rank in ranks))
    return found


def run(options: Options) -> Iterator[Record]:
    """Every case by layers, then by stages; a quick run takes the first, with fewer processes."""
    warnings.filterwarnings("ignore")
    records = Records(options.work / "records.jsonl")
    profile = local_machine(options.work)
    counts = {"steps": 8, "processes": 1} if options.quick else {"steps": 15, "processes": 3}
    for case, how in product(CASES[:1] if options.quick else CASES, ("tp", "sp", *SCHEDULES)):
        if not options.takes(case.name):
            continue
        if not records.of("layout", case.name, how=how):
            plan, answer = predicted(case, profile, how)
            at = now()
            runs = measured(case, how, plan, profile, **counts)
            records.add(_record(case, how, answer, runs, predicted_at=at))
            say(f"{case.name}, {how}: {off(answer.step_time_s, statistics.median(runs))}")
        yield records.of("layout", case.name, how=how)[-1]


def _record(
    case: Case, how: str, answer: Estimate, runs: list[float], *, predicted_at: str
) -> Record:
    """A case's prediction beside its measurement."""
    return {
        "kind": "layout",
        "key": case.name,
        "id": f"{case.name}, {answer.layout}",
        "how": how,
        "method": "pipeline" if how in SCHEDULES else "layers",
        "layout": answer.layout,
        "predicted_at": predicted_at,
        **times_of(answer),
        "layer_communication_s": answer.breakdown.layer_communication_s,
        "measured_s": statistics.median(runs),
        "noise_ratio": noise_ratio(runs),
        "runs_s": runs,
    }
