"""Answer: how long a step takes on an allocation, why, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from estimator.coefficients import Z_80
from estimator.elementwise import exp, maximum, sqrt, where
from estimator.errors import WorkloadError
from estimator.estimates.request import EstimateRequest
from estimator.graph.memory.peak import PeakMemory
from estimator.machines.typical import DeviceMemory, is_known_by_datasheet
from estimator.placement.allocation import Allocation
from estimator.timeline.assumptions import plan_assumptions, split_assumptions
from estimator.timeline.pipelines.stage_plans import PipelinedStep
from estimator.timeline.plan import Breakdown, StepAnswer, StepPlan
from estimator.timeline.rank.lanes import input_costs
from estimator.timeline.rank.program import (
    COPIES_ERROR,
    MEDIAN_TO_SIGMA,
    LaneCosts,
    RankClass,
    at_peak_s,
)
from estimator.timeline.simulated import timeline_of
from estimator.timeline.simulator.tasks import Timeline
from estimator.units import format_bandwidth, format_count, format_interval, format_ratio
from estimator.workload.loader import Loader

# Workers are whole; a period that equals the step to rounding is hidden.
_ROUNDING = 1e-9


def workers_needed(loader: Loader, *, samples: float, step_s: float) -> int:
    """The least workers that make `samples` samples in a step of `step_s` seconds, at least one."""
    return max(math.ceil(loader.made_s(samples) / step_s * (1 - _ROUNDING)), 1)


def remedy_of(plan: StepPlan, parts: Breakdown[Any]) -> str:
    """What would hide the input stall of a step, by its slowest rank's loader, in words."""
    loader = plan.members.table.shape.loader
    assert loader is not None
    kind = max(plan.kinds, key=lambda kind: max(kind.input.period_s, kind.input.own_s))
    return _remedy(loader, kind, plan, float(parts.total_s - parts.input_stall_s))


def _remedy(loader: Loader, kind: RankClass, plan: StepPlan, without_s: float) -> str:
    batches = plan.members.table.shape.accumulation_steps
    samples = batches * (kind.program.bound.batch or 1)
    ranks = max(kind.ranks_per_node for kind in plan.placement.kinds)
    profile = kind.program.profile

    def own_s(workers: int) -> float:
        changed = replace(loader, workers=workers)
        costs = input_costs(
            changed, profile, samples=samples, batches=batches, ranks_per_node=ranks
        )
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


Value = TypeVar("Value")

# What the physical model itself misses even with perfect kernel times: caches, allocator, overlap.
# One standard deviation of log(measured / predicted), from benchmarks/local_accuracy.py.
MODEL_ERROR = 0.05
# How far the exposed part of an all-reduce is off: two threads, one core and a scheduler between.
OVERLAP_ERROR = 0.3
NOT_FIT_MARGIN_RATIO = 0.05
# Whether a step fits into memory, by its code.
FITS: tuple[Literal["no", "uncertain", "yes"], ...] = ("no", "uncertain", "yes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A predicted training step: what it takes, between which bounds, and where that comes from.

    The interval [low_s, high_s] is meant to hold the true step time in 8 of 10 cases. `batches`
    are samples per rank and micro-batch, one for each group of the allocation; `batch_per_gpu` is
    the same if all groups have the same, else None. Both are None for a fixed-batch graph.
    `layout` is that of ranks which share layers; None where all are data-parallel.

    >>> import estimator as est, torch
    >>> graph = est.trace_model(torch.nn.Linear(8, 8), torch.randn(4, 8), target="cuda")
    >>> answer = est.estimate(graph, "1x4:t4-g4dn")
    >>> answer.ranks, answer.fits, answer.samples_per_s == 16 / answer.step_time_s
    (4, 'yes', True)
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
    samples_per_s: float | None
    tokens_per_s: float | None
    peak_memory_bytes: int
    memory: PeakMemory
    fits: Literal["yes", "no", "uncertain"]
    breakdown: Breakdown[float]
    op_time_in_grid_ratio: float
    # What the rest is worked out from, much of it when it is read.
    plan: StepPlan = field(compare=False)
    answer: StepAnswer = field(compare=False)
    # Where ranks hold stages, the passes of all; `plan` is then that of the longest stage.
    pipeline: PipelinedStep | None = field(default=None, compare=False)
    layout: str | None = None
    # What it answers; of an estimate that was pickled, as little as of its plan.
    request: EstimateRequest = field(compare=False)

    def __eq__(self, other: object) -> bool:
        # Answers that say the same are equal.
        return isinstance(other, Estimate) and self.to_dict() == other.to_dict()

    def __repr__(self) -> str:
        # The generated one would print every operator of the plan.
        step = format_interval(self.step_time_s, self.low_s, self.high_s)
        speed = format_count(self.samples_per_s or 0).strip()
        rate = f", {speed} samples/s" if self.samples_per_s else ""
        return f"Estimate({self.model} on {self.allocation}: {step}{rate})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The plan holds the graph and all that was compiled of it: a pickle takes what it says.
        # Not by __getstate__: CPython before 3.11.4 replaces that of frozen classes with slots
        # (python/cpython#104035).
        facts = self.plan if isinstance(self.plan, PlanFacts) else PlanFacts.of(self)
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        left = {"plan": facts, "request": facts, "answer": None, "pipeline": None}
        return partial(Estimate, **(own | left)), ()

    @property
    def low_s(self) -> float:
        """The lower bound of the step time."""
        return self.step_time_s / self.interval_ratio

    @property
    def high_s(self) -> float:
        """The upper bound of the step time."""
        return self.step_time_s * self.interval_ratio

    @property
    def interval_ratio(self) -> float:
        """What the bounds are off by, as a factor."""
        return self._told("interval_ratio", _interval_ratio)

    @property
    def mfu_ratio(self) -> float | None:
        """The share of the devices' dense peak that goes into the model's FLOPs."""
        return self.utilization[0]

    @property
    def hfu_ratio(self) -> float | None:
        """The same with what is computed again."""
        return self.utilization[1]

    @property
    def utilization(self) -> tuple[float, float] | tuple[None, None]:
        """(MFU, HFU), None where no peak is known; `graph.utilization` says what is counted."""
        return self._told("utilization", _utilization)

    @property
    def bottleneck(self) -> str:
        """What the step spends most of its time on, in words."""
        return self._told("bottleneck", _bottleneck)

    @property
    def bottleneck_link(self) -> str | None:
        """The slowest link of the ranks, where communication takes most of the step; else None."""
        return self._told("bottleneck_link", _bottleneck_link)

    def bottleneck_dict(self) -> dict[str, Any]:
        """The part (one of `BOTTLENECKS`), its share and link, for programs, and the sentence."""
        part, share_ratio = self.breakdown.largest_share
        facts = {"part": part, "share_ratio": share_ratio, "link": self.bottleneck_link}
        return {"bottleneck": facts, "bottleneck_text": self.bottleneck}

    @property
    def loader(self) -> Loader | None:
        """What feeds the ranks, None where batches are taken to be on the device."""
        return self._told("loader", lambda self: self.plan.members.table.shape.loader)

    @property
    def input_remedy(self) -> str:
        """What would hide the input stall, in words; empty where there is next to none."""
        return self._told("input_remedy", _input_remedy)

    @property
    def device_memory(self) -> DeviceMemory:
        """What the driver and libraries keep of the memory of the devices that are fullest."""
        return self._told("device_memory", lambda self: self.plan.fullest_device()[0])

    @property
    def spare_memory_bytes(self) -> int:
        """How much more live tensors could take on these devices; negative where they lack it."""
        return self._told("spare_memory_bytes", _spare_memory_bytes)

    @property
    def mode(self) -> str:
        """How the step is run, in words: precision, compiled or not, layout of images."""
        return self._told("mode", lambda self: self.plan.members.table.graph.mode)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the answer takes for granted, one sentence each."""
        return self._told("assumptions", _assumptions)

    @property
    def provenance(self) -> tuple[tuple[str, str, float, float | None], ...]:
        """(part, source, share of the step, relative error) of every part; the shares add to 1."""
        return self._told("provenance", _provenance)

    def _told(self, name: str, fact: Callable[[Estimate], Value]) -> Value:
        plan: Any = self.plan
        return getattr(plan, name) if isinstance(plan, PlanFacts) else fact(self)

    @property
    def timeline(self) -> Timeline:
        """The spans of the step, played as events."""
        return self.pipeline.timeline() if self.pipeline else timeline_of(self.plan)

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
        plain = {name: getattr(self, name) for name in _PLAIN}
        plain |= {"allocation": str(self.allocation), "breakdown": _plain(self.breakdown)}
        plain["loader"] = self.loader.to_dict() if self.loader else None
        plain |= self.bottleneck_dict()
        plain |= {"memory": _plain(self.memory), "device_memory": _plain(self.device_memory)}
        plain["provenance"] = [
            {"part": part, "source": source, "share_ratio": share, "relative_error": error}
            for part, source, share, error in self.provenance
        ]
        plain["assumptions"] = list(self.assumptions)
        return plain


_NOT_PLAIN = {"plan", "answer", "pipeline", "request", "allocation", "breakdown", "memory"}
_PLAIN = [item.name for item in fields(Estimate) if item.name not in _NOT_PLAIN]
_PLAIN += ["low_s", "high_s", "mfu_ratio", "hfu_ratio"]
_PLAIN += ["mode", "input_remedy", "spare_memory_bytes"]


def _plain(numbers: Breakdown[float] | PeakMemory | DeviceMemory) -> dict[str, Any]:
    # `dataclasses.asdict` would copy each number.
    return {item.name: getattr(numbers, item.name) for item in fields(numbers)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """What is said of a plan in an estimate that was pickled without it."""

    interval_ratio: float
    utilization: tuple[float, float] | tuple[None, None]
    bottleneck: str
    bottleneck_link: str | None
    device_memory: DeviceMemory
    spare_memory_bytes: int
    mode: str
    loader: Loader | None
    assumptions: tuple[str, ...]
    provenance: tuple[tuple[str, str, float, float | None], ...]
    input_remedy: str

    @classmethod
    def of(cls, answer: Estimate) -> PlanFacts:
        """What the plan of an estimate says."""
        return cls(**{item.name: getattr(answer, item.name) for item in fields(cls)})

    def __getattr__(self, name: str) -> Any:
        # Python looks for methods of its own by such names.
        if name.startswith("__"):
            raise AttributeError(name)
        raise WorkloadError(
            "an estimate that was pickled has no timeline, request or plan; estimate again where "
            "they are needed"
        )


def _interval_ratio(answer: Estimate) -> float:
    coefficients, loader = answer.plan.coefficients, answer.request.loader
    error = coefficients.relative_error
    if error is None:
        error = engine_error(answer.plan, answer.answer, loader)
    return float(interval_ratio(error))


def _input_remedy(answer: Estimate) -> str:
    if answer.breakdown.input_stall_s < 0.005 * answer.step_time_s:
        return ""
    return remedy_of(answer.plan, answer.breakdown)


def _spare_memory_bytes(answer: Estimate) -> int:
    device, held = answer.plan.fullest_device()
    return device.usable_bytes - (answer.peak_memory_bytes if answer.pipeline else held)


def _assumptions(answer: Estimate) -> tuple[str, ...]:
    assumptions = plan_assumptions(answer.plan, answer.ranks)
    remark = answer.plan.coefficients.remark
    assumptions = (remark, *assumptions) if remark else assumptions
    if answer.request.neighbours:
        assumptions = (_neighbours_assumption(answer), *assumptions)
    if answer.pipeline is not None:
        assumptions = (*answer.pipeline.assumptions(), *assumptions)
    if answer.batches is None or answer.global_batch is None:
        return assumptions
    padding = answer.plan.mesh.global_batch(answer.batches) - answer.global_batch
    return (*split_assumptions(answer.batches, padding), *assumptions)


def _neighbours_assumption(answer: Estimate) -> str:
    """What other jobs leave of the links, and how that was found."""
    jobs, ratio = len(answer.request.neighbours), answer.plan.mesh.link_ratio
    others, them = ("1 other job", "it") if jobs == 1 else (f"{jobs} other jobs", "they")
    same = "" if answer.request.cluster else "; the n-th nodes of all are taken to be the same"
    leaves = "leaves" if jobs == 1 else "leave"
    return (
        f"{others} on the same links {leaves} {format_ratio(ratio)} of them while ranks send: "
        f"max-min fair shares while {them} send{'s' * (jobs == 1)} too, at times that are "
        f"independent{same}"
    )


def _provenance(estimate: Estimate) -> tuple[tuple[str, str, float, float | None], ...]:
    """Shares of the step by where their numbers come from; they add up to 1."""
    plan, breakdown, waited = estimate.plan, estimate.breakdown, estimate.plan.communication()
    program, step = estimate.answer.slowest.program, breakdown.total_s
    kernels_s = sum(seconds for seconds, _ in program.kernels.values())
    scale = (breakdown.forward_s + breakdown.backward_s) / kernels_s if kernels_s else 0.0
    rows: list[tuple[str, str, float, float | None]] = [
        (family, source, seconds * scale / step, error_s / seconds if seconds else None)
        for (family, source), (seconds, error_s) in program.kernels.items()
    ]
    host = program.profile.host
    copies = "datasheet" if is_known_by_datasheet(program.profile) else "fitted"
    rows += [
        (
            "host",
            host.provenance.source if host else "measured",
            breakdown.host_exposed_s / step,
            host.provenance.relative_error if host else None,
        ),
        ("update", program.update_source, breakdown.update_s / step, program.lane.update_error),
        ("bucket copies", copies, breakdown.copies_exposed_s / step, COPIES_ERROR),
        (
            "layer communication",
            program.exchanged.source,
            breakdown.layer_communication_s / step,
            program.exchanged.relative_error,
        ),
        (
            "communication",
            next((source for _, _, source in plan.reductions if source != "measured"), "measured"),
            breakdown.waiting_s / step,
            max(waited.relative_error, OVERLAP_ERROR) if waited else None,
        ),
    ]
    loader = plan.members.table.shape.loader
    if loader is not None:
        rows.append(("input", loader.source, breakdown.input_stall_s / step, loader.relative_error))
    return tuple(sorted((row for row in rows if row[2] > 0), key=lambda row: -row[2]))


def relative_error(
    parts: Breakdown[Any],
    lane: LaneCosts,
    compute_ratio: Any,
    communication_error: Any,
    slower_s: Any,
    step_s: Any,
    input_error: float = 0.0,
) -> Any:
    """One standard deviation of log(measured / predicted): parts err independently.

    `lane` is that of the slowest rank, `communication_error` the relative error of what reduces
    gradients, 0 where nothing does, and `slower_s` what the step adds if that is slower by as
    much; `input_error` is that of what a loader adds. Of one step, or a row for each.
    """
    waiting_error = maximum(communication_error, OVERLAP_ERROR)
    waiting_error_s = maximum(waiting_error * parts.waiting_s, slower_s)
    squares = (
        (lane.host_error * parts.host_exposed_s) ** 2
        + (lane.update_error * parts.update_s) ** 2
        + (COPIES_ERROR * parts.copies_exposed_s) ** 2
        + waiting_error_s**2
        + (input_error * parts.input_stall_s) ** 2
    )
    variance_s2 = lane.kernels_variance_s2 * compute_ratio**2 + MEDIAN_TO_SIGMA**2 * squares
    # What disturbed a probe disturbed all of it.
    probed_ratio = 1 - parts.input_stall_s / step_s
    return sqrt(
        variance_s2 / step_s**2 + MODEL_ERROR**2 + (lane.interference_error * probed_ratio) ** 2
    )


def engine_error(plan: StepPlan, answer: StepAnswer, loader: Loader | None) -> float:
    """The relative error of a step by those of what the engine made it of."""
    parts, slowest, _ = answer
    waited = plan.communication()
    return float(
        relative_error(
            parts,
            slowest.lane,
            plan.coefficients.compute_ratio,
            waited.relative_error if waited else 0.0,
            waited.slower_s if waited else 0.0,
            parts.total_s,
            loader.relative_error if loader else 0.0,
        )
    )


def interval_ratio(error: Any) -> Any:
    """What the bounds of the 80 % interval are off by, as a factor."""
    return exp(Z_80 * error)


def fits_code(used_ratio: Any, knows_all: bool) -> Any:
    """Index into `FITS` by the largest share in use of what tensors can have of a device.

    It is never that of "yes" where not all memory is known.
    """
    surely = (used_ratio <= 1 - 2 * NOT_FIT_MARGIN_RATIO) & knows_all
    perhaps = used_ratio <= 1 + NOT_FIT_MARGIN_RATIO
    return _ONE * perhaps + surely


# Codes of a million rows are small numbers.
_ONE = np.uint8(1)


def bottleneck_code(parts: Breakdown[Any]) -> Any:
    """Index into `BOTTLENECKS` of what takes most of the step."""
    most, *others = parts.by_bottleneck
    code: Any = 0 * _ONE
    for number, seconds in enumerate(others, start=1):
        code = where(seconds > most, number, code)
        most = maximum(most, seconds)
    return code


def _utilization(answer: Estimate) -> tuple[float, float] | tuple[None, None]:
    """FLOPs of all ranks' forward and backward passes over the step and the sum of their devices'
    dense peaks, whatever their batches.
    """
    plan, kinds = answer.plan, answer.plan.kinds
    if answer.pipeline or len(kinds) == 1:
        lane = answer.answer.slowest.lane
        peak_s = lane.model_peak_s, lane.hardware_peak_s
    else:
        ranks = [0] * len(kinds)
        for number, count in zip(plan.members.kind_of, plan.placement.ranks_of, strict=True):
            ranks[number] += count
        of_kinds = list(zip(kinds, ranks, strict=True))
        peak_s = at_peak_s(of_kinds, of_kinds)
    if math.isnan(peak_s[0]):
        return None, None
    per_s = answer.accumulation_steps / answer.step_time_s
    return peak_s[0] * per_s, peak_s[1] * per_s


def _bottleneck_link(answer: Estimate) -> str | None:
    if answer.breakdown.largest_share[0] != "communication":
        return None
    return answer.plan.slowest_group.link or None


def _bottleneck(answer: Estimate) -> str:
    kind, share_ratio = answer.breakdown.largest_share
    plan, link = answer.plan, answer.plan.slowest_group.link
    over = f" over {link}" if link else ""
    words = {
        "compute": f"computing on the {plan.kinds[0].program.profile.kind} device",
        "host": "issuing operators from the host",
        "communication": plan.rules.words(plan.placement.ranks) + over,
        "update": "the optimizer's update",
        "stragglers": "waiting for the slowest rank",
        "input": "",
    }
    if kind == "input":
        words[kind] = "waiting for data: " + remedy_of(plan, answer.breakdown)
    return f"{words[kind]} ({format_ratio(share_ratio)} of the step)"
