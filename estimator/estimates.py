"""Answer: how long a step takes on an allocation, why, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from estimator.accuracy import Z_80
from estimator.allocation import Allocation
from estimator.coefficients import (
    UNCALIBRATED,
    Calibration,
    Coefficients,
    PredictedStep,
    StepQuestion,
)
from estimator.errors import WorkloadError
from estimator.graph.memory import PeakMemory
from estimator.graph.ops import OpGraph
from estimator.placement import Placement, place
from estimator.profile import MachineProfile
from estimator.timeline.ability import why_not_on
from estimator.timeline.assumptions import plan_assumptions, split_assumptions
from estimator.timeline.fastpath import (
    Members,
    StepParts,
    StepPlan,
    members_of,
    step_parts,
    step_plan,
)
from estimator.timeline.program import COPIES_ERROR, MEDIAN_TO_SIGMA
from estimator.timeline.rank_kinds import RankKind
from estimator.timeline.spans import Timeline
from estimator.timeline.step import timeline_of
from estimator.timeline.strategy_words import communication_words
from estimator.topology import Cluster
from estimator.typical import is_known_by_datasheet
from estimator.units import format_count, format_interval, format_ratio
from estimator.workload import Strategy

# What the physical model itself misses even with perfect kernel times: caches, allocator, overlap.
# One standard deviation of log(measured / predicted), from benchmarks/local_accuracy.py.
MODEL_ERROR = 0.05
# How far the exposed part of an all-reduce is off: two threads, one core and a scheduler between.
OVERLAP_ERROR = 0.3
NOT_FIT_MARGIN_RATIO = 0.05
# What a step may spend most of its time on.
BOTTLENECKS = ("compute", "host", "communication", "update", "stragglers")


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

    @property
    def largest_share(self) -> tuple[str, float]:
        """What takes most of the step, one of `BOTTLENECKS`, and its share."""
        seconds = (
            self.forward_s + self.backward_s,
            self.host_exposed_s,
            self.communication_exposed_s + self.copies_exposed_s,
            self.update_s,
            self.straggler_s + self.idle_s,
        )
        most = max(seconds)
        return BOTTLENECKS[seconds.index(most)], most / self.total_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A predicted training step: what it takes, between which bounds, and where that comes from.

    The interval [low_s, high_s] is meant to hold the true step time in 8 of 10 cases. `batches`
    are samples per rank and micro-batch, one for each group of the allocation; `batch_per_gpu` is
    the same if all groups have the same, else None. Both are None for a fixed-batch graph.
    `mfu_ratio` and `hfu_ratio` are the shares of the devices' dense peak that go into the model's
    FLOPs, and into these and those computed again; `graph.utilization` says what is counted.
    """

    model: str
    allocation: Allocation
    ranks: int
    batch_per_gpu: int | None
    batches: tuple[int, ...] | None
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
    hfu_ratio: float | None
    peak_memory_bytes: int
    memory: PeakMemory
    fits: Literal["yes", "no", "uncertain"]
    breakdown: Breakdown
    op_time_in_grid_ratio: float
    plan: StepPlan

    def __repr__(self) -> str:
        # The generated one would print every operator of the plan.
        step = format_interval(self.step_time_s, self.low_s, self.high_s)
        speed = format_count(self.samples_per_s or 0).strip()
        rate = f", {speed} samples/s" if self.samples_per_s else ""
        return f"Estimate({self.model} on {self.allocation}: {step}{rate})"

    @property
    def bottleneck(self) -> str:
        """What the step spends most of its time on, in words."""
        return _bottleneck(self)

    @property
    def mode(self) -> str:
        """How the step is run, in words: precision, compiled or not, layout of images."""
        return self.plan.members.table.graph.mode

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the answer takes for granted, one sentence each."""
        found = plan_assumptions(self.plan, self.ranks)
        remark = self.plan.coefficients.remark
        found = (remark, *found) if remark else found
        return found if self.batches is None else (*split_assumptions(self.batches), *found)

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
        plain["mode"] = self.mode
        plain["bottleneck"] = self.bottleneck
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
    batch_per_gpu: int | Sequence[int] | None = None,
    global_batch: int | None = None,
    accumulation_steps: int = 1,
    strategy: str | Strategy = "ddp",
    cluster: Cluster | None = None,
    calibration: Calibration | None = None,
    profile: MachineProfile | None = None,
) -> Estimate:
    """Predict the step of a traced graph on an allocation; see `estimator.estimate`.

    Here a global batch is split evenly whatever the devices; `advise.balance` splits it by speed.
    """
    step = _compiled(
        graph,
        place(allocation, cluster=cluster, profile=profile),
        batch_per_gpu=batch_per_gpu,
        global_batch=global_batch,
        accumulation_steps=accumulation_steps,
        strategy=strategy,
    )
    coefficients = UNCALIBRATED
    if calibration is not None:
        (coefficients,) = calibration.coefficients_for(
            [_question(graph, step, accumulation_steps)],
            [step.placement.allocation],
            StepEngine(graph=graph, cluster=cluster, profile=profile),
        )
    return _answer(
        step_plan(step.placement, step.members, coefficients),
        step.batches,
        step.strategy,
        accumulation_steps,
        coefficients.relative_error,
    )


class _Compiled(NamedTuple):
    """What an estimate is made of before the network and calibration are looked at."""

    placement: Placement
    strategy: Strategy
    batches: tuple[int, ...] | None
    members: Members


def _compiled(
    graph: OpGraph,
    placement: Placement,
    *,
    batch_per_gpu: int | Sequence[int] | None,
    global_batch: int | None,
    accumulation_steps: int,
    strategy: str | Strategy,
) -> _Compiled:
    """Check what is asked of a placement and compile its ranks; raises WorkloadError."""
    plan = Strategy.parse(strategy)
    for node in placement.kinds:
        refusal = why_not_on(graph, node.profile)
        if refusal is not None:
            raise WorkloadError(refusal)
    if accumulation_steps < 1:
        raise WorkloadError(f"accumulation steps must be at least 1, found {accumulation_steps}")
    batches = _batches(graph, placement, batch_per_gpu, global_batch, accumulation_steps)
    members = members_of(graph, placement, batches, plan, accumulation_steps)
    return _Compiled(placement, plan, batches, members)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepEngine:
    """Predicts steps of a graph under trial coefficients; see `coefficients.Engine`."""

    graph: OpGraph
    cluster: Cluster | None
    profile: MachineProfile | None

    @property
    def key(self) -> tuple[int, int, int]:
        return id(self.graph), id(self.cluster), id(self.profile)

    def predict(
        self,
        allocation: str | Allocation,
        *,
        batch_per_gpu: int | None,
        accumulation_steps: int,
        strategy: str | Strategy,
        coefficients: Coefficients,
    ) -> PredictedStep:
        """One step, all groups of the allocation with the same batch."""
        compiled = _compiled(
            self.graph,
            place(allocation, cluster=self.cluster, profile=self.profile),
            batch_per_gpu=batch_per_gpu,
            global_batch=None,
            accumulation_steps=accumulation_steps,
            strategy=strategy,
        )
        step = step_plan(compiled.placement, compiled.members, coefficients)
        parts = step_parts(step)
        lane_s = parts.forward_s + parts.backward_s + parts.host_exposed_s + parts.copies_exposed_s
        return PredictedStep(
            question=_question(self.graph, compiled, accumulation_steps),
            compute_s=lane_s / accumulation_steps + parts.update_s,
            sync_s=step.communication_s,
            step_s=parts.step_s,
        )


def _question(graph: OpGraph, step: _Compiled, accumulation_steps: int) -> StepQuestion:
    placement, batches = step.placement, step.batches
    groups = placement.allocation.groups
    samples = sum(g.ranks * b for g, b in zip(groups, batches or [0] * len(groups), strict=True))
    return StepQuestion(
        workload=graph.workload,
        machines="+".join(sorted({kind.profile.name for kind in placement.kinds})),
        ranks=placement.ranks,
        nodes=placement.nodes,
        most_on_node=max([kind.busy for kind in placement.kinds]),
        batch=samples / placement.ranks,
        accumulation_steps=accumulation_steps,
        strategy=step.strategy,
    )


def _batches(
    graph: OpGraph,
    placement: Placement,
    batch_per_gpu: int | Sequence[int] | None,
    global_batch: int | None,
    accumulation_steps: int,
) -> tuple[int, ...] | None:
    """Samples per rank and micro-batch of each group of the allocation; None for a fixed batch."""
    groups = len(placement.allocation.groups)
    if batch_per_gpu is not None and global_batch is not None:
        raise WorkloadError("give either the batch per device or the global batch, not both")
    if global_batch is not None:
        return (_even_batch(placement, global_batch, accumulation_steps),) * groups
    if batch_per_gpu is None:
        return None if graph.batch is None else (graph.batch,) * groups
    if isinstance(batch_per_gpu, Sequence):
        given = tuple(batch_per_gpu)
    else:
        given = (batch_per_gpu,) * groups
    if len(given) != groups:
        raise WorkloadError(
            f"{len(given)} batches were given for '{placement.allocation}', whose groups are "
            f"{groups}; give one for each group, or one number for all"
        )
    if min(given) < 1:
        raise WorkloadError(f"batch size must be at least 1, found {min(given)}")
    return given


def _even_batch(placement: Placement, global_batch: int, accumulation_steps: int) -> int:
    ranks = placement.ranks
    shares = ranks * accumulation_steps
    if global_batch < 1 or global_batch % shares:
        by_speed = ""
        if placement.is_mixed and global_batch >= shares:
            by_speed = ", or ask 'estimate', which splits by speed"
        raise WorkloadError(
            f"global batch {global_batch} cannot be split evenly over {ranks} ranks and "
            f"{accumulation_steps} accumulation steps; use a multiple of {shares}{by_speed}"
        )
    return global_batch // shares


def _answer(
    plan: StepPlan,
    batches: tuple[int, ...] | None,
    strategy: Strategy,
    accumulation_steps: int,
    relative_error: float | None,
) -> Estimate:
    parts = step_parts(plan)
    slowest, placement = parts.slowest, plan.placement
    graph, step = plan.members.table.graph, parts.step_s
    memory, used_ratio = _memory(plan)
    spread = math.exp(Z_80 * (relative_error or _relative_error(plan, parts, step)))
    even = batches[0] if batches and batches.count(batches[0]) == len(batches) else None
    global_batch = _global_batch(placement, batches, even, accumulation_steps)
    unlike = batches is not None and even is None
    mfu_ratio, hfu_ratio = _utilization(plan, None if unlike else slowest, accumulation_steps, step)
    samples_per_s = global_batch / step if global_batch is not None else None
    tokens = graph.tokens_per_sample
    return Estimate(
        model=graph.name,
        allocation=placement.allocation,
        ranks=placement.ranks,
        batch_per_gpu=even,
        batches=batches,
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
        mfu_ratio=mfu_ratio,
        hfu_ratio=hfu_ratio,
        peak_memory_bytes=memory.total_bytes,
        memory=memory,
        fits=_fits(used_ratio, graph.knows_activations),
        breakdown=Breakdown(
            forward_s=parts.forward_s,
            backward_s=parts.backward_s,
            host_exposed_s=parts.host_exposed_s,
            communication_exposed_s=parts.communication_exposed_s,
            straggler_s=parts.straggler_s,
            update_s=parts.update_s,
            copies_exposed_s=parts.copies_exposed_s,
            idle_s=parts.idle_s,
        ),
        op_time_in_grid_ratio=slowest.program.in_grid_ratio,
        plan=plan,
    )


def _global_batch(
    placement: Placement,
    batches: tuple[int, ...] | None,
    even: int | None,
    accumulation_steps: int,
) -> int | None:
    """Samples of a step, by the batches of the groups or the one that all have."""
    if batches is None:
        return None
    if even is not None:
        return even * placement.ranks * accumulation_steps
    per_rank = zip(placement.allocation.groups, batches, strict=True)
    return accumulation_steps * sum(group.ranks * batch for group, batch in per_rank)


def _memory(plan: StepPlan) -> tuple[PeakMemory, float]:
    """(what the ranks that need most need, largest share of a device's memory in use)."""
    kinds, ranks = plan.kinds, plan.ring.ranks
    if ranks == 1 or plan.members.table.strategy.kind == "ddp":
        fullest = max(kinds, key=_memory_bytes).program.memory.peak(1)
        return fullest, max([kind.memory_ratio for kind in kinds])
    needed = [kind.program.memory.total_bytes(ranks) for kind in kinds]
    used = [
        size / kind.program.profile.devices[0].memory_bytes
        for size, kind in zip(needed, kinds, strict=True)
    ]
    return kinds[needed.index(max(needed))].program.memory.peak(ranks), max(used)


_memory_bytes = attrgetter("memory_bytes")


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
    copies = "datasheet" if is_known_by_datasheet(program.profile) else "fitted"
    waiting_s = breakdown.communication_exposed_s + breakdown.straggler_s + breakdown.idle_s
    rows += [
        (
            "host",
            host.provenance.source if host else "measured",
            breakdown.host_exposed_s / step,
            host.provenance.relative_error if host else None,
        ),
        ("update", program.update_source, breakdown.update_s / step, program.update_error),
        ("bucket copies", copies, breakdown.copies_exposed_s / step, COPIES_ERROR),
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
    scale = slowest.slowdown_ratio * plan.coefficients.compute_ratio
    variance_s2 = program.kernels_variance_s2 * scale**2 + MEDIAN_TO_SIGMA**2 * squares
    return math.sqrt(variance_s2 / step**2 + MODEL_ERROR**2)


def _utilization(
    plan: StepPlan, slowest: RankKind | None, accumulation_steps: int, step: float
) -> tuple[float, float] | tuple[None, None]:
    """(MFU, HFU): flops of forward and backward over what the devices could do at their dense peak.

    Of the slowest class of ranks, or of all together (None), as where their batches differ.
    """
    if slowest is not None:
        weighed = [(1, slowest.program)]
    else:
        weighed = [(len(each.ranks), each.program) for each in plan.classes]
    model = hardware = peak_flops_per_s = 0.0
    for ranks, program in weighed:
        peak = program.peak_flops_per_s
        if not peak or not program.flops.model:
            return None, None
        model += ranks * program.flops.model
        hardware += ranks * program.flops.hardware
        peak_flops_per_s += ranks * peak
    per_flop = accumulation_steps / (peak_flops_per_s * step)
    return model * per_flop, hardware * per_flop


def _fits(used_ratio: float, knows_all: bool) -> Literal["yes", "no", "uncertain"]:
    """Whether every class of ranks has the memory it needs; unsure where not all of it is known."""
    if knows_all and used_ratio <= 1 - 2 * NOT_FIT_MARGIN_RATIO:
        return "yes"
    return "no" if used_ratio > 1 + NOT_FIT_MARGIN_RATIO else "uncertain"


def _bottleneck(answer: Estimate) -> str:
    kind, share_ratio = answer.breakdown.largest_share
    ring = answer.plan.ring
    over = f" over {ring.link}" if ring.link else ""
    words = {
        "compute": f"computing on the {answer.plan.kinds[0].program.profile.kind} device",
        "host": "issuing operators from the host",
        "communication": communication_words(answer.plan.members.table.strategy, ring.ranks) + over,
        "update": "the optimizer's update",
        "stragglers": "waiting for the slowest rank",
    }
    return f"{words[kind]} ({format_ratio(share_ratio)} of the step)"
