"""Answer: how long a step takes on an allocation, why, and how sure that is."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from estimator.allocation import Allocation
from estimator.coefficients import UNCALIBRATED, Calibration
from estimator.errors import WorkloadError
from estimator.graph.memory import PeakMemory
from estimator.graph.ops import OpGraph
from estimator.placement import Placement, place
from estimator.profile import MachineProfile
from estimator.timeline.fastpath import StepParts, StepPlan, step_parts, step_plan
from estimator.timeline.program import COPIES_ERROR, MEDIAN_TO_SIGMA, StepProgram, step_program
from estimator.timeline.sharding import sharded_memory
from estimator.timeline.spans import Timeline
from estimator.timeline.step import timeline_of
from estimator.topology import Cluster
from estimator.units import format_bytes, format_ratio
from estimator.workload import Strategy

# The stated interval holds the truth in 8 of 10 cases.
INTERVAL_COVERAGE = 0.80
Z_80 = 1.2816
# What the physical model itself misses even with perfect kernel times: caches, allocator, overlap.
# One standard deviation of log(measured / predicted), from benchmarks/local_accuracy.py.
MODEL_ERROR = 0.05
# How far the exposed part of an all-reduce is off: two threads, one core and a scheduler between.
OVERLAP_ERROR = 0.3
NOT_FIT_MARGIN_RATIO = 0.05
_MOST_NAMED_OPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Exclusive parts of the step of the slowest rank; they add up to the step time."""

    forward_s: float
    backward_s: float
    host_exposed_s: float
    communication_exposed_s: float
    straggler_s: float
    update_s: float
    copies_exposed_s: float
    idle_s: float

    @property
    def total_s(self) -> float:
        return float(sum(getattr(self, item.name) for item in fields(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A predicted training step: what it takes, between which bounds, and where that comes from.

    The interval [low_s, high_s] is meant to hold the true step time in 8 of 10 cases.
    """

    model: str
    allocation: Allocation
    ranks: int
    batch_per_gpu: int | None
    global_batch: int | None
    accumulation_steps: int
    strategy: str
    precision: str
    optimizer: str
    step_time_s: float
    low_s: float
    high_s: float
    samples_per_s: float | None
    tokens_per_s: float | None
    mfu_ratio: float | None
    peak_memory_bytes: int
    memory: PeakMemory
    fits: Literal["yes", "no", "uncertain"]
    breakdown: Breakdown
    bottleneck: str
    op_time_in_grid_ratio: float
    plan: StepPlan

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the answer takes for granted, one sentence each."""
        return _assumptions(self.plan, self.ranks)

    @property
    def provenance(self) -> tuple[tuple[str, str, float, float | None], ...]:
        """(part, source, share of the step, relative error) of every part; the shares add to 1."""
        return _provenance(self.plan, self.breakdown)

    @property
    def timeline(self) -> Timeline:
        """The spans of the step, played as events."""
        return timeline_of(self.plan)

    def duration_s(self, *, samples: float | None = None, tokens: float | None = None) -> float:
        """Seconds to train on a number of samples or of tokens; raises WorkloadError."""
        if samples is not None and self.samples_per_s:
            return samples / self.samples_per_s
        if tokens is not None and self.tokens_per_s:
            return tokens / self.tokens_per_s
        raise WorkloadError(
            f"{self.model} has no {'tokens' if samples is None else 'samples'} to count; "
            "trace it with a batch whose first dimension is the sample"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units, without the timeline."""
        plain = {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name not in ("plan", "allocation", "breakdown", "memory")
        }
        plain["allocation"] = str(self.allocation)
        plain["breakdown"] = asdict(self.breakdown)
        plain["memory"] = asdict(self.memory)
        plain["provenance"] = [
            {"part": part, "source": source, "share_ratio": share, "relative_error": error}
            for part, source, share, error in self.provenance
        ]
        plain["assumptions"] = list(self.assumptions)
        return plain


def estimate_graph(
    graph: OpGraph,
    allocation: str | Allocation,
    *,
    batch_per_gpu: int | None = None,
    global_batch: int | None = None,
    accumulation_steps: int = 1,
    strategy: str | Strategy = "ddp",
    cluster: Cluster | None = None,
    calibration: Calibration | None = None,
    profile: MachineProfile | None = None,
) -> Estimate:
    """Predict the step of a traced graph on an allocation; see `estimator.estimate`."""
    placement = place(allocation, cluster=cluster, profile=profile)
    plan = Strategy.parse(strategy)
    for site in placement.sites:
        if graph.target != site.profile.kind:
            raise WorkloadError(
                f"{graph.name} was traced for {graph.target} but '{placement.allocation}' has "
                f"{site.profile.kind} devices; trace it with target='{site.profile.kind}'"
            )
    if accumulation_steps < 1:
        raise WorkloadError(f"accumulation steps must be at least 1, found {accumulation_steps}")
    wanted = _batch_per_gpu(graph, placement.ranks, batch_per_gpu, global_batch, accumulation_steps)
    programs = [
        step_program(
            graph,
            site.profile,
            batch=wanted,
            busy=busy,
            merging=placement.ranks > 1,
            strategy=plan,
            accumulation_steps=accumulation_steps,
        )
        for site, busy in zip(placement.sites, placement.busy, strict=True)
    ]
    coefficients = (
        calibration.coefficients_for(graph.name, placement.allocation)
        if calibration
        else UNCALIBRATED
    )
    return _answer(
        step_plan(placement, programs, coefficients),
        placement,
        plan,
        accumulation_steps,
        coefficients.relative_error,
    )


def _batch_per_gpu(
    graph: OpGraph,
    ranks: int,
    batch_per_gpu: int | None,
    global_batch: int | None,
    accumulation_steps: int,
) -> int | None:
    if batch_per_gpu is not None and global_batch is not None:
        raise WorkloadError("give either the batch per device or the global batch, not both")
    if global_batch is None:
        if batch_per_gpu is not None and batch_per_gpu < 1:
            raise WorkloadError(f"batch size must be at least 1, found {batch_per_gpu}")
        return batch_per_gpu if batch_per_gpu is not None else graph.batch
    shares = ranks * accumulation_steps
    if global_batch < 1 or global_batch % shares:
        raise WorkloadError(
            f"global batch {global_batch} cannot be split evenly over {ranks} ranks and "
            f"{accumulation_steps} accumulation steps; use a multiple of {shares}"
        )
    return global_batch // shares


def _answer(
    plan: StepPlan,
    placement: Placement,
    strategy: Strategy,
    accumulation_steps: int,
    relative_error: float | None,
) -> Estimate:
    parts = step_parts(plan)
    program, ranks = parts.slowest.program, placement.ranks
    graph, step = program.bound.graph, parts.step_s
    breakdown = Breakdown(
        forward_s=parts.forward_s,
        backward_s=parts.backward_s,
        host_exposed_s=parts.host_exposed_s,
        communication_exposed_s=parts.communication_exposed_s,
        straggler_s=parts.straggler_s,
        update_s=parts.update_s,
        copies_exposed_s=parts.copies_exposed_s,
        idle_s=parts.idle_s,
    )
    memory = sharded_memory(program, ranks)
    spread = math.exp(Z_80 * (relative_error or _relative_error(plan, parts, step)))
    batch = program.bound.batch
    global_batch = batch * ranks * accumulation_steps if batch is not None else None
    samples_per_s = global_batch / step if global_batch is not None else None
    tokens = graph.tokens_per_sample
    return Estimate(
        model=graph.name,
        allocation=placement.allocation,
        ranks=ranks,
        batch_per_gpu=batch,
        global_batch=global_batch,
        accumulation_steps=accumulation_steps,
        strategy=str(strategy),
        precision=graph.precision,
        optimizer=graph.optimizer,
        step_time_s=step,
        low_s=step / spread,
        high_s=step * spread,
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s * tokens if samples_per_s and tokens else None,
        mfu_ratio=_mfu(program, accumulation_steps, step),
        peak_memory_bytes=memory.total_bytes,
        memory=memory,
        fits=_fits(plan),
        breakdown=breakdown,
        bottleneck=_bottleneck(breakdown, plan),
        op_time_in_grid_ratio=program.in_grid_ratio,
        plan=plan,
    )


def _provenance(
    plan: StepPlan, breakdown: Breakdown
) -> tuple[tuple[str, str, float, float | None], ...]:
    """Shares of the step by where their numbers come from; they add up to 1."""
    program = step_parts(plan).slowest.program
    step = breakdown.total_s
    kernels_s = sum(seconds for seconds, _ in program.kernels.values())
    scale = (breakdown.forward_s + breakdown.backward_s) / kernels_s if kernels_s else 0.0
    rows: list[tuple[str, str, float, float | None]] = [
        (family, source, seconds * scale / step, error_s / seconds if seconds else None)
        for (family, source), (seconds, error_s) in program.kernels.items()
    ]
    host, reduce = program.profile.host, plan.reduce
    waiting_s = breakdown.communication_exposed_s + breakdown.straggler_s + breakdown.idle_s
    rows += [
        (
            "host",
            "measured",
            breakdown.host_exposed_s / step,
            host.provenance.relative_error if host else None,
        ),
        ("update", "measured", breakdown.update_s / step, program.update_error),
        ("bucket copies", "fitted", breakdown.copies_exposed_s / step, COPIES_ERROR),
        (
            "communication",
            reduce.source if reduce else "measured",
            waiting_s / step,
            max(reduce.relative_error, OVERLAP_ERROR) if reduce else None,
        ),
    ]
    return tuple(sorted((row for row in rows if row[2] > 0), key=lambda row: -row[2]))


def _relative_error(plan: StepPlan, parts: StepParts, step: float) -> float:
    """One standard deviation of log(measured / predicted): parts err independently."""
    slowest, reduce = parts.slowest, plan.reduce
    program = slowest.program
    host = program.profile.host
    host_error = (host.provenance.relative_error or 0.0) if host else 0.0
    waiting_s = parts.communication_exposed_s + parts.straggler_s + parts.idle_s
    waiting_error = max(reduce.relative_error, OVERLAP_ERROR) if reduce else 0.0
    squares = (
        (host_error * parts.host_exposed_s) ** 2
        + (program.update_error * parts.update_s) ** 2
        + (COPIES_ERROR * parts.copies_exposed_s) ** 2
        + (waiting_error * waiting_s) ** 2
    )
    scale = slowest.slowdown_ratio * plan.compute_ratio
    variance_s2 = program.kernels_variance_s2 * scale**2 + MEDIAN_TO_SIGMA**2 * squares
    return math.sqrt(variance_s2 / step**2 + MODEL_ERROR**2)


def _mfu(program: StepProgram, accumulation_steps: int, step: float) -> float | None:
    """Model flops of forward and backward over what the devices could do at their dense peak."""
    peak = program.peak_flops_per_s
    return program.flops * accumulation_steps / (peak * step) if peak else None


def _fits(plan: StepPlan) -> Literal["yes", "no", "uncertain"]:
    """Whether every class of ranks has the memory it needs."""
    used = max(
        sharded_memory(each.program, plan.ring.ranks).total_bytes
        / each.program.profile.devices[0].memory_bytes
        for each in plan.classes
    )
    if used <= 1 - 2 * NOT_FIT_MARGIN_RATIO:
        return "yes"
    return "no" if used > 1 + NOT_FIT_MARGIN_RATIO else "uncertain"


def _bottleneck(breakdown: Breakdown, plan: StepPlan) -> str:
    step, ring = breakdown.total_s, plan.ring
    over = f" over {ring.link}" if ring.link else ""
    seconds, text = max(
        (
            breakdown.forward_s + breakdown.backward_s,
            f"computing on the {plan.classes[0].program.profile.kind} device",
        ),
        (breakdown.host_exposed_s, "issuing operators from the host"),
        (
            breakdown.communication_exposed_s + breakdown.copies_exposed_s,
            f"merging gradients of {ring.ranks} ranks{over}",
        ),
        (breakdown.update_s, "the optimizer's update"),
        (breakdown.straggler_s + breakdown.idle_s, "waiting for the slowest rank"),
    )
    return f"{text} ({format_ratio(seconds / step)} of the step)"


def _assumptions(plan: StepPlan, ranks: int) -> tuple[str, ...]:
    found: list[str] = []
    for number, each in enumerate(plan.classes):
        rows = _class_assumptions(each.program, graph_too=number == 0)
        found.extend(row for row in rows if row not in found)
    profiles = [each.program.profile for each in plan.classes]
    if ranks > 1 and not any(profile.overlaps for profile in profiles):
        found.append("communication is assumed to overlap compute perfectly: not probed")
    if plan.ring.nodes > 1 and plan.reduce is not None and plan.reduce.source != "measured":
        found.append(
            f"all-reduce over {plan.ring.ranks} ranks on {plan.ring.nodes} nodes was not measured: "
            "a ring over the slowest link, corrected by the nearest measured group if there is one"
        )
    if plan.ring.nodes > 1 and len({profile.name for profile in profiles}) > 1:
        found.append(f"unlike machines are joined at {plan.ring.link or 'the slower network'}")
    return tuple(found)


def _class_assumptions(program: StepProgram, *, graph_too: bool) -> list[str]:
    graph, machine = program.bound.graph, program.profile
    found = list(graph.assumptions) if graph_too else []
    durations = program.durations
    total = float(durations.device_s.sum()) or 1.0
    assumed: dict[str, float] = defaultdict(float)
    for index, op in enumerate(graph.ops):
        if durations.sources[index] == "assumed":
            assumed[op.call.target] += float(durations.device_s[index])
    worst = sorted(assumed.items(), key=lambda item: -item[1])
    for target, seconds in worst[:_MOST_NAMED_OPS]:
        found.append(
            f"{target} has no cost formula or probed relative: charged as a copy of its bytes, "
            f"{format_ratio(seconds / total)} of the kernel time"
        )
    if rest := worst[_MOST_NAMED_OPS:]:
        share = sum(seconds for _, seconds in rest) / total
        found.append(
            f"{len(rest)} more operators likewise, {format_ratio(share)} of the kernel time"
        )
    device = machine.devices[0]
    if device.kind == "cpu":
        cores = len(device.cores)
        plural = "s" if cores > 1 else ""
        found.append(f"a device is {cores} CPU core{plural}, pinned, with as many threads")
        found.append(_memory_assumption(machine))
    batch = program.bound.batch
    if graph.timings and batch != graph.batch:
        found.append(f"ops were timed at batch {graph.batch} and scaled to batch {batch}")
    found.extend(f"not probed: {part}" for part in machine.missing)
    return found


def _memory_assumption(machine: MachineProfile) -> str:
    text = "the process keeps freed memory (MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_ high)"
    touch = machine.memory.first_touch_s_per_byte if machine.memory else 0.0
    if not touch:
        return text
    per_gib = touch * 2**30
    return (
        f"{text}; glibc's defaults return memory to the system and pay {per_gib:.2g} s for each "
        f"{format_bytes(2**30)} touched again"
    )
