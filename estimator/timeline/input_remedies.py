"""Say what would hide the loading of data behind a step."""

from __future__ import annotations

import math

from estimator.timeline.inputs import input_costs
from estimator.timeline.plan import StepPlan
from estimator.timeline.ranks import RankKind
from estimator.timeline.step import Breakdown
from estimator.units import format_bandwidth, format_ratio
from estimator.workload.loader import Loader

# Workers are whole; a period that equals the step to rounding is hidden.
_ROUNDING = 1e-9


def workers_needed(loader: Loader, *, samples: float, step_s: float) -> int:
    """The least workers that make `samples` samples in a step of `step_s` seconds, at least one."""
    return max(math.ceil(loader.made_s(samples) / step_s * (1 - _ROUNDING)), 1)


def remedy_of(plan: StepPlan, parts: Breakdown) -> str:
    """What would hide the input stall of a step, by its slowest rank's loader, in words."""
    loader = plan.members.table.shape.loader
    assert loader is not None
    kind = max(plan.kinds, key=lambda each: max(each.input.period_s, each.input.own_s))
    return _remedy(loader, kind, plan, float(parts.total_s - parts.input_stall_s))


def _remedy(loader: Loader, kind: RankKind, plan: StepPlan, without_s: float) -> str:
    batches = plan.members.table.shape.accumulation_steps
    samples = batches * (kind.program.bound.batch or 1)
    ranks = max(each.ranks_per_node for each in plan.placement.kinds)
    profile = kind.program.profile

    def own_s(workers: int) -> float:
        asked = loader.with_workers(workers)
        costs = input_costs(asked, profile, samples=samples, batches=batches, ranks_per_node=ranks)
        return float(costs.own_s)

    step_s = without_s + own_s(max(loader.workers, 1))
    disk_s = loader.disk_s(samples) * ranks
    if disk_s > step_s * (1 + _ROUNDING):
        needed = (loader.disk_bytes_per_s or 0.0) * disk_s / step_s
        return f"a disk of {format_bandwidth(needed)} would hide it"
    cores_s = loader.cpu_s(samples) / (loader.cores or math.inf)
    if cores_s > step_s * (1 + _ROUNDING):
        cores = math.ceil(loader.cpu_s(samples) / step_s)
        return f"{cores} cores for each rank's workers would hide it"
    more = workers_needed(loader, samples=samples, step_s=step_s) - loader.workers
    if more > 0:
        left_s = step_s - without_s
        hide = "hide it" if left_s <= 0.01 * without_s else f"hide all but {_share(left_s, step_s)}"
        return f"{more} more worker{'s' if more > 1 else ''} would {hide}"
    return "the workers take the cores that compute" if profile.kind == "cpu" else "copying it"


def _share(left_s: float, step_s: float) -> str:
    return f"{format_ratio(left_s / step_s)} of the step"
