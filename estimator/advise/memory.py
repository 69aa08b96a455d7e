"""Say where the memory of an estimated step goes, and what would make a step fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from estimator.advise.swap.problem import swap_problems
from estimator.advise.swap.search import Means, Planned, plan_within
from estimator.elementwise import Array
from estimator.errors import AllocationError, ProfileError, StrategyError, WorkloadError
from estimator.estimates.engine import DEFAULT
from estimator.estimates.estimate import NOT_FIT_MARGIN_RATIO, Estimate
from estimator.graph.compile.megatron import with_checkpoints
from estimator.graph.costs.call_costs import op_flops
from estimator.graph.ir.op_graph import BoundGraph
from estimator.graph.memory.peak import (
    LiveTensor,
    MemoryCurve,
    MemoryKind,
    PeakMemory,
    by_module,
    live_tensors,
    module_path,
    tensors_of,
)
from estimator.placement.allocation import Allocation
from estimator.timeline.plan import StepPlan
from estimator.timeline.rank.program import RankClass, memory_over_step
from estimator.timeline.simulated import op_times_s, simulate_plan
from estimator.workload.strategies import SAVING_MEMORY

_MOST_LISTED = 1000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryReport:
    """The memory of the rank of an estimate that needs most: over its step, and at the peak.

    `every_tensor` are those of the step, `bound` its graph at its batch, `kind` the rank; `peak_op`
    and `peak_module` name the op at the peak ("update" for it).
    """

    answer: Estimate
    bound: BoundGraph
    curve: MemoryCurve
    kind: RankClass
    every_tensor: tuple[LiveTensor, ...]
    device_bytes: int

    @property
    def times_s(self) -> Array:
        """When each op of the last micro-batch begins, the update last, and when the step ends.

        On the axis of the step's timeline, so that an op begins when the one before has ended.
        """
        plan = _fullest(self.answer)
        step = simulate_plan(plan)
        number = next(place for place, kind in enumerate(step.kinds) if kind is self.kind)
        *_, (starts_s, ends_s) = op_times_s(plan, step, number)
        is_only = self.answer.accumulation_steps == 1
        begin_s = [0.0] if is_only else starts_s[:1]
        return np.concatenate([begin_s, ends_s, [step.result.step_s]])

    @property
    def tensors(self) -> tuple[LiveTensor, ...]:
        """Those alive at the peak, the largest first."""
        return live_tensors(self.every_tensor, self.curve.peak_at)

    @property
    def peak_op(self) -> str:
        op = self._op
        return op.call.target if op else "update"

    @property
    def peak_module(self) -> str:
        op = self._op
        return op.module if op else ""

    @property
    def _op(self) -> Any:
        ops = self.bound.graph.ops
        place = self.curve.peak_at
        return ops[place] if place < len(ops) else None

    @property
    def modules(self) -> dict[str, int]:
        """Bytes alive at the peak by module, the most first."""
        return by_module(self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        return {
            "model": self.answer.model,
            "allocation": str(self.answer.allocation),
            "strategy": self.answer.strategy,
            "batch_per_gpu": self.answer.batch_per_gpu,
            "device_bytes": self.device_bytes,
            "fits": self.answer.fits,
            "peak_bytes": self.curve.peak_bytes,
            "peak_op": self.peak_op,
            "peak_module": self.peak_module,
            "at_peak_bytes": self.curve.at(self.curve.peak_at),
            "modules_bytes": self.modules,
            "tensors": [asdict(tensor) for tensor in self.tensors[:_MOST_LISTED]],
            "end_s": self.times_s[1:].tolist(),
            "levels_bytes": {kind: levels.tolist() for kind, levels in self.curve.levels.items()},
        }


def memory_of(answer: Estimate) -> MemoryReport:
    """The memory of an estimated step over time; raises WorkloadError for a summary.

    >>> # memory_of(est.estimate(graph, "1x1:rtx-2080-ti")).curve.peak_bytes
    """
    plan = _fullest(answer)
    if plan.members.table.graph.is_summary:
        raise WorkloadError(
            f"{answer.model} is a summary, whose tensors are not known; name the model itself"
        )
    kind = max(plan.kinds, key=lambda one: one.program.memory.peak(plan.shards).total_bytes)
    program = kind.program
    curve = memory_over_step(program, plan.rules).curve(plan.shards)
    if answer.pipeline:
        curve = _with_other_stages(curve, answer.memory, program.memory.peak(plan.shards))
    return MemoryReport(
        answer=answer,
        bound=program.bound,
        curve=curve,
        kind=kind,
        every_tensor=tensors_of(program.bound),
        device_bytes=kind.device.usable_bytes,
    )


def _fullest(answer: Estimate) -> StepPlan:
    """The plan of the ranks that hold most: of a pipeline, those of one stage."""
    return answer.pipeline.fullest if answer.pipeline else answer.plan


def _with_other_stages(curve: MemoryCurve, rank: PeakMemory, own: PeakMemory) -> MemoryCurve:
    """The curve of one stage with what its `rank` holds beside the stage's `own` peak.

    That is the other stages it has, and the activations of micro-batches that wait for their
    backward pass, of which none is left in the update.
    """
    beside: dict[MemoryKind, int] = {
        "parameters": rank.parameters_bytes - own.parameters_bytes,
        "optimizer state": rank.optimizer_state_bytes - own.optimizer_state_bytes,
        "buffers and inputs": rank.buffers_bytes
        + rank.inputs_bytes
        - own.buffers_bytes
        - own.inputs_bytes,
        "activations": rank.activations_bytes - own.activations_bytes,
        "communication buffers": rank.bucket_bytes - own.bucket_bytes,
        "gradients": rank.gradients_bytes - own.gradients_bytes,
    }
    # Kinds have their peaks at different times: of the last ones no more is held than is left.
    in_passes, in_update = (
        rank.total_bytes - int(part.max()) for part in (curve.total[:-1], curve.total[-1:])
    )
    levels = dict(curve.levels)
    for kind, size_bytes in beside.items():
        passes, update = min(size_bytes, in_passes), min(size_bytes, in_update)
        update *= kind != "activations"
        in_passes, in_update = in_passes - passes, in_update - update
        levels[kind] = levels[kind] + np.append(np.full(len(levels[kind]) - 1, passes), update)
    left_bytes = rank.total_bytes - MemoryCurve(levels=levels).peak_bytes
    levels["temporaries"] = levels["temporaries"] + max(left_bytes, 0)
    return MemoryCurve(levels=levels)


# Names of a path that are told apart, as in transformer.h.0.
_DEPTH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCost:
    """What a module, with those inside it, takes of a step of one rank.

    `time_s` is that of the rank's own lane, forward and backward, host included; `flops` those that
    the model needs; `memory_bytes` the parameters, gradients and activations at the step's peak.
    """

    module: str
    time_s: float
    flops: float
    memory_bytes: int


def costs_by_module(answer: Estimate) -> list[ModuleCost]:
    """The modules of an estimated step by time, the update last; raises WorkloadError.

    Where ranks differ, of one that needs the most memory. Times add up to its forward, backward,
    host, copies and update: communication, waiting and adding up the gradients of micro-batches
    belong to no module.
    """
    report = memory_of(answer)
    bound = report.bound
    seconds, flops = defaultdict[str, float](float), defaultdict[str, float](float)
    kind = report.kind
    each_s = np.diff(kind.program.lanes.ends_s(0) * kind.slowdown_ratio, prepend=0.0)
    update_s = float(kind.update.update_s(answer.plan.share))
    for op, call, op_s in zip(bound.graph.ops, bound.calls, each_s.tolist(), strict=True):
        path = module_path(op.module, _DEPTH)
        seconds[path] += op_s * answer.accumulation_steps
        flops[path] += 0.0 if op.is_repeated else op_flops(call)[0] * answer.accumulation_steps
    memory = by_module(report.tensors, _DEPTH)
    rows = [
        ModuleCost(
            module=path,
            time_s=seconds[path],
            flops=flops[path],
            memory_bytes=memory.get(path, 0),
        )
        for path in dict.fromkeys((*seconds, *memory))
    ]
    rows.sort(key=lambda row: -row.time_s)
    return [*rows, ModuleCost(module="update", time_s=update_s, flops=0.0, memory_bytes=0)]


_MOST_DEVICES_FACTOR = 64
# Ranks that share no layers.
_APART: dict[str, Any] = {"layout": None, "tp_plan": None}
_PLANS = (
    ("compute activations again", Means(swap=False, kinds=("activation",))),
    ("swap activations or compute them again", Means(kinds=("activation",))),
    ("swap optimizer state to the host", Means(recompute=False, kinds=("state",))),
    ("swap anything, compute activations again", Means()),
)
_AS_READY = "update each parameter as its gradient is ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change after which the step fits: its peak, and the seconds of the same global batch.

    `cost_ratio` is how much more device time that takes, devices times seconds, than the step that
    does not fit would: twice the devices for half as long cost nothing.
    """

    change: str
    peak_bytes: int
    step_time_s: float
    cost_ratio: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        return asdict(self)


def remedies(answer: Estimate) -> list[Remedy]:
    """What would make an estimated step fit, cheapest first; each is the smallest of its kind."""
    listed = [*quick_remedies(answer), *_plans(answer)]
    return sorted(listed, key=lambda remedy: remedy.cost_ratio)


def quick_remedies(answer: Estimate) -> list[Remedy]:
    """Those of `remedies` that need no plan of what to swap and to compute again."""
    listed = [*_checkpoints(answer), *_smaller_batches(answer)]
    listed += [*_strategies(answer), *_more_devices(answer)]
    return sorted(listed, key=lambda remedy: remedy.cost_ratio)


def _remedy(change: str, other: Estimate, answer: Estimate) -> Remedy:
    return Remedy(
        change=change,
        peak_bytes=other.peak_memory_bytes,
        step_time_s=other.step_time_s,
        cost_ratio=other.ranks * other.step_time_s / (answer.ranks * answer.step_time_s) - 1,
    )


def _checkpoints(answer: Estimate) -> Iterator[Remedy]:
    """Every repeated block computed again in the backward pass, all else as it is."""
    checkpointed = with_checkpoints(answer.request.graph)
    if checkpointed is not None and (other := _fitting(answer, graph=checkpointed)):
        yield _remedy("activation checkpointing of every block (--checkpoint full)", other, answer)


def _smaller_batches(answer: Estimate) -> Iterator[Remedy]:
    """The largest micro-batch that fits, accumulated to the same global batch."""
    request, batch = answer.request, answer.batch_per_gpu
    if request.graph.batch is None or batch is None:
        return
    for parts in range(2, batch + 1):
        if batch % parts:
            continue
        steps = answer.accumulation_steps * parts
        smaller = {"batch_per_gpu": batch // parts, "global_batch": None}
        if other := _fitting(answer, **smaller, accumulation_steps=steps):
            yield _remedy(f"micro-batches of {batch // parts}, {steps} accumulated", other, answer)
            return


def _strategies(answer: Estimate) -> Iterator[Remedy]:
    """Every strategy that shards something, on the same ranks."""
    if answer.ranks == 1:
        return
    for strategy in SAVING_MEMORY:
        if strategy == answer.strategy:
            continue
        if other := _fitting(answer, strategy=strategy, **_APART):
            yield _remedy(f"strategy {strategy}", other, answer)


def _more_devices(answer: Estimate) -> Iterator[Remedy]:
    """Twice the devices as often as needed, for the same global batch: replicas, then sharded."""
    groups = answer.allocation.groups
    if len(groups) > 1 or groups[0].machine is None:
        return
    for strategy in (answer.strategy, SAVING_MEMORY[-1]):
        tried = (
            _fitting(answer, allocation=wider, strategy=strategy, **_APART)
            for power in range(1, _MOST_DEVICES_FACTOR.bit_length())
            for wider in _wider(answer.allocation, 1 << power)
        )
        if other := next(filter(None, tried), None):
            yield _remedy(f"{other.allocation} with {strategy}", other, answer)


def _wider(allocation: Allocation, factor: int) -> Iterator[Allocation]:
    """The same machine with `factor` times the devices, on as few nodes as have them first."""
    group, more_nodes = allocation.groups[0], 1
    while more_nodes <= factor:
        devices = group.devices_per_node * (factor // more_nodes)
        named = () if more_nodes < factor else group.devices
        wider = replace(group, devices_per_node=devices, devices=named)
        yield Allocation((replace(wider, nodes=group.nodes * more_nodes),))
        more_nodes *= 2


def _fitting(answer: Estimate, **changes: Any) -> Estimate | None:
    """The same global batch otherwise, where that is possible, known, and surely fits."""
    same = {"batch_per_gpu": None, "global_batch": answer.global_batch}
    try:
        other = DEFAULT.estimate(answer.request.changed(**same | changes))
    except (AllocationError, ProfileError, StrategyError, WorkloadError):
        return None
    return other if other.fits == "yes" else None


def _plans(answer: Estimate) -> Iterator[Remedy]:
    """Plans that move tensors to the host or compute them again, for one rank."""
    if answer.ranks > 1 or answer.accumulation_steps > 1:
        return
    device_bytes = answer.plan.kinds[0].device.usable_bytes
    budget = int(device_bytes * (1 - 2 * NOT_FIT_MARGIN_RATIO))
    try:
        problems = swap_problems(answer)
    except (ProfileError, WorkloadError):
        return
    each = [(change, means, problems[0]) for change, means in _PLANS]
    each += [(f"{_AS_READY}, {_PLANS[-1][0]}", _PLANS[-1][1], ready) for ready in problems[1:]]
    for change, means, problem in each:
        planned = plan_within(problem, budget, means=means)
        if planned.played.peak_bytes <= budget and (planned.plan.swaps or planned.plan.recomputes):
            yield _planned_remedy(change, planned)


def _planned_remedy(change: str, planned: Planned) -> Remedy:
    played = planned.played
    plan = planned.plan
    moved = {"swapped": len(plan.swaps), "computed again": len(plan.recomputes)}
    words = " and ".join(f"{count} {how}" for how, count in moved.items() if count)
    return Remedy(
        change=f"{change} ({words})",
        peak_bytes=played.peak_bytes,
        step_time_s=played.step_s,
        cost_ratio=played.overhead_ratio,
    )
