"""Answer: how long a step takes on an allocation, why, and how sure that is."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from estimator.allocation import Allocation
from estimator.coefficients import UNCALIBRATED, Calibration, Coefficients
from estimator.errors import AllocationError, WorkloadError
from estimator.graph.memory import PeakMemory, peak_memory
from estimator.graph.ops import BoundGraph, OpGraph
from estimator.profile import MachineProfile, load_profile
from estimator.timeline.spans import Timeline
from estimator.timeline.step import StepParts, simulate_step
from estimator.units import format_bytes, format_ratio
from estimator.workload import Strategy

# The stated interval holds the truth in 8 of 10 cases.
INTERVAL_COVERAGE = 0.80
_Z_80 = 1.2816
# What the physical model itself misses even with perfect kernel times: caches, allocator, overlap.
# One standard deviation of log(measured / predicted), from benchmarks/local_accuracy.py.
_MODEL_ERROR = 0.05
# How far the exposed part of an all-reduce is off: two threads, one core and a scheduler between.
_OVERLAP_ERROR = 0.3
_NOT_FIT_MARGIN_RATIO = 0.05
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

    The interval [low_s, high_s] is meant to hold the true step time in 8 of 10 cases. `provenance`
    lists (part, source, share of the step, relative error); the shares add up to 1.
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
    assumptions: tuple[str, ...]
    provenance: tuple[tuple[str, str, float, float | None], ...]
    op_time_in_grid_ratio: float
    timeline: Timeline

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
            if item.name not in ("timeline", "allocation", "breakdown", "memory")
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
    calibration: Calibration | None = None,
    profile: MachineProfile | None = None,
) -> Estimate:
    """Predict the step of a traced graph on an allocation; see `estimator.estimate`."""
    parsed = Allocation.parse(allocation)
    plan = Strategy.parse(strategy)
    machine = machine_of(parsed, profile)
    if graph.target != machine.kind:
        raise WorkloadError(
            f"{graph.name} was traced for {graph.target} but '{parsed}' has {machine.kind} "
            f"devices; trace it with target='{machine.kind}'"
        )
    if accumulation_steps < 1:
        raise WorkloadError(f"accumulation steps must be at least 1, found {accumulation_steps}")
    wanted = _batch_per_gpu(graph, parsed.ranks, batch_per_gpu, global_batch, accumulation_steps)
    bound = graph.at(wanted)
    coefficients = calibration.coefficients_for(graph.name, parsed) if calibration else UNCALIBRATED
    parts = simulate_step(
        bound,
        machine,
        ranks=parsed.ranks,
        strategy=plan,
        accumulation_steps=accumulation_steps,
        coefficients=coefficients,
    )
    memory = peak_memory(bound, optimizer=graph.optimizer, strategy=plan, ranks=parsed.ranks)
    return _answer(bound, machine, parsed, plan, accumulation_steps, parts, memory, coefficients)


def machine_of(allocation: Allocation, profile: MachineProfile | None = None) -> MachineProfile:
    """The one machine of the allocation, checked to have the devices asked for.

    `profile` stands in for the one that the allocation names. Raises AllocationError,
    UnknownMachineError, ProfileError.
    """
    if allocation.nodes > 1:
        raise AllocationError(
            f"'{allocation}' spans {allocation.nodes} nodes, but no network between nodes has been "
            "measured; ask for devices of one node, as in 1x2:local"
        )
    group = allocation.groups[0]
    if profile is None:
        if group.machine is None:
            raise AllocationError(
                f"'{group}' names a host, whose machine type is not known; write "
                f"1x{group.devices_per_node}:MACHINE"
            )
        profile = load_profile(group.machine)
    if group.devices_per_node > len(profile.devices):
        raise AllocationError(
            f"'{allocation}' asks for {group.devices_per_node} devices of '{profile.name}', which "
            f"has {len(profile.devices)}; ask for at most {len(profile.devices)}"
        )
    return profile


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
    bound: BoundGraph,
    machine: MachineProfile,
    allocation: Allocation,
    strategy: Strategy,
    accumulation_steps: int,
    parts: StepParts,
    memory: PeakMemory,
    coefficients: Coefficients,
) -> Estimate:
    graph, ranks = bound.graph, allocation.ranks
    names = [item.name for item in fields(Breakdown)]
    breakdown = Breakdown(**{name: getattr(parts, name) for name in names})
    step = breakdown.total_s
    provenance = _provenance(bound, machine, parts, step)
    spread = math.exp(_Z_80 * (coefficients.relative_error or _relative_error(provenance)))
    batch = bound.batch
    global_batch = batch * ranks * accumulation_steps if batch is not None else None
    samples_per_s = global_batch / step if global_batch is not None else None
    tokens = graph.tokens_per_sample
    return Estimate(
        model=graph.name,
        allocation=allocation,
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
        mfu_ratio=_mfu(bound, machine, accumulation_steps, step),
        peak_memory_bytes=memory.total_bytes,
        memory=memory,
        fits=_fits(memory.total_bytes, machine.devices[0].memory_bytes),
        breakdown=breakdown,
        bottleneck=_bottleneck(breakdown, machine, ranks),
        assumptions=_assumptions(bound, machine, parts, ranks),
        provenance=provenance,
        op_time_in_grid_ratio=_in_grid_ratio(parts),
        timeline=parts.timeline,
    )


def _in_grid_ratio(parts: StepParts) -> float:
    device_s = parts.durations.device_s
    total = float(device_s.sum())
    return float(device_s[parts.durations.in_grid].sum()) / total if total else 0.0


def _provenance(
    bound: BoundGraph, machine: MachineProfile, parts: StepParts, step: float
) -> tuple[tuple[str, str, float, float | None], ...]:
    """Shares of the step by where their numbers come from; they add up to 1."""
    from estimator.graph.costs import family_of

    seconds: dict[tuple[str, str], float] = defaultdict(float)
    errors: dict[tuple[str, str], float] = defaultdict(float)
    durations = parts.durations
    kernels = parts.forward_s + parts.backward_s
    scale = kernels / float(durations.device_s.sum()) if kernels else 0.0
    for index, op in enumerate(bound.graph.ops):
        source = durations.sources[index]
        if source == "view":
            continue
        key = (family_of(op.call.target), source)
        seconds[key] += float(durations.device_s[index]) * scale
        errors[key] += float(durations.device_s[index] * durations.relative_errors[index]) * scale
    rows: list[tuple[str, str, float, float | None]] = [
        (family, source, spent / step, errors[family, source] / spent if spent else None)
        for (family, source), spent in seconds.items()
    ]
    model = parts.communication
    host_error = machine.host.provenance.relative_error if machine.host else None
    rows += [
        ("host", "measured", parts.host_exposed_s / step, host_error),
        ("update", "measured", parts.update_s / step, parts.update_error),
        ("bucket copies", "fitted", parts.copies_exposed_s / step, 0.2),
        (
            "communication",
            model.source if model else "measured",
            (parts.communication_exposed_s + parts.straggler_s + parts.idle_s) / step,
            max(model.relative_error, _OVERLAP_ERROR) if model else None,
        ),
    ]
    return tuple(sorted((row for row in rows if row[2] > 0), key=lambda row: -row[2]))


def _relative_error(provenance: tuple[tuple[str, str, float, float | None], ...]) -> float:
    """One standard deviation of log(measured / predicted): parts err independently."""
    # A median absolute error is 0.6745 standard deviations of a normal error.
    squares = sum((share * (error or 0.0) / 0.6745) ** 2 for _, _, share, error in provenance)
    return math.sqrt(squares + _MODEL_ERROR**2)


def _mfu(
    bound: BoundGraph, machine: MachineProfile, accumulation_steps: int, step: float
) -> float | None:
    """Model flops of forward and backward over what the devices could do at their dense peak."""
    from estimator.graph.costs import op_cost

    dtype = {"fp32": "float32", "tf32": "tfloat32"}.get(bound.graph.precision)
    if dtype is None:
        dtype = "bfloat16" if bound.graph.precision.startswith("bf16") else "float16"
    peak = machine.devices[0].peak_flops_per_s.get(dtype)
    if not peak:
        return None
    costs = (op_cost(call) for call in bound.calls)
    flops = sum(cost.flops for cost in costs if cost is not None)
    return flops * accumulation_steps / (peak * step)


def _fits(needed_bytes: int, memory_bytes: int) -> Literal["yes", "no", "uncertain"]:
    if needed_bytes <= memory_bytes * (1 - 2 * _NOT_FIT_MARGIN_RATIO):
        return "yes"
    return "no" if needed_bytes > memory_bytes * (1 + _NOT_FIT_MARGIN_RATIO) else "uncertain"


def _bottleneck(breakdown: Breakdown, machine: MachineProfile, ranks: int) -> str:
    step = breakdown.total_s
    words: Mapping[str, tuple[float, str]] = {
        "compute": (
            breakdown.forward_s + breakdown.backward_s,
            f"computing on the {machine.kind} device",
        ),
        "host": (breakdown.host_exposed_s, "issuing operators from the host"),
        "communication": (
            breakdown.communication_exposed_s + breakdown.copies_exposed_s,
            f"merging gradients of {ranks} ranks",
        ),
        "update": (breakdown.update_s, "the optimizer's update"),
        "stragglers": (breakdown.straggler_s + breakdown.idle_s, "waiting for the slowest rank"),
    }
    seconds, text = max(words.values())
    return f"{text} ({format_ratio(seconds / step)} of the step)"


def _assumptions(
    bound: BoundGraph, machine: MachineProfile, parts: StepParts, ranks: int
) -> tuple[str, ...]:
    graph = bound.graph
    found = list(graph.assumptions)
    total = float(parts.durations.device_s.sum()) or 1.0
    assumed: dict[str, float] = defaultdict(float)
    for index, op in enumerate(graph.ops):
        if parts.durations.sources[index] == "assumed":
            assumed[op.call.target] += float(parts.durations.device_s[index])
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
    if ranks > 1 and not machine.overlaps:
        found.append("communication is assumed to overlap compute perfectly: not probed")
    if graph.timings and bound.batch != graph.batch:
        found.append(f"ops were timed at batch {graph.batch} and scaled to batch {bound.batch}")
    found.extend(f"not probed: {part}" for part in machine.missing)
    return tuple(found)


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
