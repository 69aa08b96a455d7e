"""Train several jobs on one device at once: how long their steps take, what they hold together.

Processes that share a GPU are served in time slices, equal ones for all that have kernels ready,
and kernels of two processes do not run at once (NVIDIA's MPS documentation, of what is so without
MPS); each job's host goes on meanwhile. So steps interleave as their speeds are: the jobs are
played operator by operator, each on its share of the device. Nothing holds their steps in phase,
and sooner or later their peaks meet: together they need the sum. Where that does not fit, each job
gets a plan of swapping and recomputing so that the sum does, as TENSILE plans jobs together (Zhang
et al. 2021), but for steps in any phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from estimator.advise.swap.plan import SwapPlan, play
from estimator.advise.swap.problem import SwapProblem, host_link, swap_problem
from estimator.advise.swap.search import EVERYTHING, Means, Planned, pareto
from estimator.elementwise import Array, Sizes
from estimator.errors import ProfileError, WorkloadError
from estimator.estimates.estimate import FITS, NOT_FIT_MARGIN_RATIO, Estimate, fits_code
from estimator.machines.profile import Link, LinkKind

_MOST_JOBS = 4
# Parts of a step that are played, steps of the slowest job, and stretches in all.
_PARTS, _STEPS, _MOST_STRETCHES = 256, 6, 300_000
_BUDGETS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedJob:
    """One of the jobs: its step alone and beside the others, and its own peak.

    `plan_peak_bytes` and `plan_step_s` are under the plan with which all fit, None without one.
    """

    model: str
    batch_per_gpu: int | None
    alone_s: float
    step_time_s: float
    peak_bytes: int
    plan_peak_bytes: int | None = None
    plan_step_s: float | None = None
    swaps: int = 0
    recomputes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDevice:
    """Jobs that train on one device at once.

    `most_bytes` is what they hold where their peaks meet, of `usable_bytes`, less one more context
    for each further job; `played_bytes` the most while their steps were played, `over_ratio` the
    share of that time in which they held more than there is. `fits` goes by `most_bytes`; where
    plans make them fit, `plan_bytes` is the most under these.
    """

    allocation: str
    jobs: tuple[SharedJob, ...]
    usable_bytes: int
    most_bytes: int
    played_bytes: int
    over_ratio: float
    fits: str
    plan_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        return asdict(self)


def share_device(
    answers: Sequence[Estimate], *, report: Callable[[float], None] = lambda _done: None
) -> SharedDevice:
    """Play estimates of one device side by side, and plan their memory where it does not fit.

    Each is of one rank with one micro-batch. Raises WorkloadError.

    >>> # share_device([est.estimate(one, "1x1:t4-g4dn"), est.estimate(other, "1x1:t4-g4dn")])
    """
    places = {str(answer.allocation) for answer in answers}
    if not 2 <= len(answers) <= _MOST_JOBS or len(places) > 1:
        raise WorkloadError(
            f"{len(answers)} jobs on {' and '.join(sorted(places)) or 'nothing'} are to share a "
            f"device; give 2 to {_MOST_JOBS} on the same one"
        )
    sharing = [_job(answer, len(answers)) for answer in answers]
    device = answers[0].plan.kinds[0].device
    further = (len(answers) - 1) * (device.context_bytes + device.workspaces_bytes)
    usable = replace(device, capacity_bytes=device.capacity_bytes - further).usable_bytes
    nothing = SwapPlan()
    alone = [
        Planned(problem=one.problem, plan=nothing, played=play(one.problem, nothing))
        for one in sharing
    ]
    most = sum(planned.played.peak_bytes for planned in alone)
    side_by_side = _played(sharing, alone, usable)
    fits = FITS[int(fits_code(most / usable, True))]
    chosen = None if fits == "yes" else _plans(sharing, usable, report)
    planned = None if chosen is None else _played(sharing, chosen, usable)
    rows = []
    for number, answer in enumerate(answers):
        job = SharedJob(
            model=answer.model,
            batch_per_gpu=answer.batch_per_gpu,
            alone_s=sharing[number].problem.vanilla_s,
            step_time_s=side_by_side.steps_s[number],
            peak_bytes=alone[number].played.peak_bytes,
        )
        if chosen is not None and planned is not None:
            job = replace(
                job,
                plan_peak_bytes=chosen[number].played.peak_bytes,
                plan_step_s=planned.steps_s[number],
                swaps=len(chosen[number].plan.swaps),
                recomputes=len(chosen[number].plan.recomputes),
            )
        rows.append(job)
    return SharedDevice(
        allocation=next(iter(places)),
        jobs=tuple(rows),
        usable_bytes=usable,
        most_bytes=most,
        played_bytes=side_by_side.peak_bytes,
        over_ratio=side_by_side.over_ratio,
        fits=fits,
        plan_bytes=None if chosen is None else sum(one.played.peak_bytes for one in chosen),
    )


class _Job(NamedTuple):
    """A step to be planned, and the seconds of each of its ops that are the device's."""

    problem: SwapProblem
    device_s: Array
    means: Means


def _job(answer: Estimate, jobs: int) -> _Job:
    """Copies of all jobs share the host link; where none is known, nothing is swapped."""
    program = answer.plan.kinds[0].program
    links: dict[LinkKind, Link] = {}
    means = EVERYTHING
    kinds: tuple[LinkKind, ...] = ("d2h", "h2d")
    for kind in kinds:
        try:
            link = host_link(program.profile, kind)
        except ProfileError:
            link = Link(
                kind=kind,
                latency_s=0.0,
                bandwidth_bytes_per_s=1.0,
                provenance=program.profile.provenance,
            )
            means = Means(swap=False)
        shared = link.bandwidth_bytes_per_s / jobs
        links[kind] = replace(link, bandwidth_bytes_per_s=shared)
    problem = swap_problem(answer, d2h=links["d2h"], h2d=links["h2d"])
    order = np.array(problem.order)
    # The update is the device's; cores that are host and device are one.
    device_s = problem.op_s.copy()
    if not program.lanes.is_shared:
        of_ops = program.lanes.last_device_s
        device_s[order >= 0] = np.minimum(of_ops[order[order >= 0]], device_s[order >= 0])
    return _Job(problem, device_s, means)


class SharedStep(NamedTuple):
    """Stretches of one job's step: seconds of the device, those beside it, and bytes held."""

    device_s: Array
    beside_s: Array
    held_bytes: Sizes


def _shared_step(job: _Job, planned: Planned) -> SharedStep:
    """A step under a plan, in few stretches; what waits for copies leaves the device to others."""
    problem, played = job.problem, planned.played
    again_s = np.zeros(problem.ops)
    for recompute in planned.plan.recomputes:
        again_s[recompute.before] += problem.op_s[list(recompute.ops)].sum()
    device_s = job.device_s + again_s
    beside_s = np.maximum(np.diff(played.ends_s, prepend=0.0) - device_s, 0.0)
    starts = np.unique(np.linspace(0, problem.ops, min(_PARTS, problem.ops), False).astype(int))
    return SharedStep(
        device_s=np.add.reduceat(device_s, starts),
        beside_s=np.add.reduceat(beside_s, starts),
        held_bytes=np.maximum.reduceat(played.levels, starts),
    )


class Interleaved(NamedTuple):
    """Steps that were played side by side: mean seconds of each, the most held, how long too much.

    `over_ratio` is the share of the time in which more than a limit was held.
    """

    steps_s: list[float]
    peak_bytes: int
    over_ratio: float


def _played(jobs: Sequence[_Job], planned: Sequence[Planned], usable: int) -> Interleaved:
    steps = [_shared_step(job, one) for job, one in zip(jobs, planned, strict=True)]
    return interleaved(steps, usable)


def interleaved(steps: Sequence[SharedStep], limit_bytes: int) -> Interleaved:
    """Play jobs that share a device: those with work for it get equal shares, others go on.

    Until every job has trained some steps after its first, in which all begin together.
    """
    # In turns what a stretch does beside the device, and what it does on it.
    times_s = [np.stack([one.beside_s, one.device_s], axis=1).ravel().tolist() for one in steps]
    held = [one.held_bytes.tolist() for one in steps]
    at = [-1] * len(steps)
    left_s = [0.0] * len(steps)
    ends_s: list[list[float]] = [[] for _ in steps]
    now_s = over_s = 0.0
    peak = 0
    for stretch in range(_MOST_STRETCHES):
        for job, times in enumerate(times_s):
            while left_s[job] <= 0.0:
                if at[job] + 1 == len(times):
                    ends_s[job].append(now_s)
                at[job] = (at[job] + 1) % len(times)
                left_s[job] = times[at[job]]
                if len(ends_s[job]) > stretch + 1:
                    raise WorkloadError("a job's step takes no time; give one that has operators")
        if all(len(ends) > _STEPS for ends in ends_s):
            break
        on_device = sum(place % 2 for place in at)
        rates = [1 / on_device if place % 2 else 1.0 for place in at]
        step_s = min(left / rate for left, rate in zip(left_s, rates, strict=True))
        total = sum(each[place // 2] for each, place in zip(held, at, strict=True))
        peak = max(peak, total)
        over_s += step_s if total > limit_bytes else 0.0
        now_s += step_s
        left_s = [
            0.0 if left - step_s * rate <= 1e-12 else left - step_s * rate
            for left, rate in zip(left_s, rates, strict=True)
        ]
    return Interleaved(
        steps_s=[_mean_s(ends, now_s) for ends in ends_s],
        peak_bytes=int(peak),
        over_ratio=over_s / now_s,
    )


def _mean_s(ends_s: Sequence[float], now_s: float) -> float:
    """The mean of a job's steps after the first, as far as it came."""
    if len(ends_s) > 1:
        return (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)
    return ends_s[0] if ends_s else now_s


def _plans(
    jobs: Sequence[_Job], usable: int, report: Callable[[float], None]
) -> list[Planned] | None:
    """The plan of each with which the sum of peaks fits, all steps together the least longer."""
    budget = usable * (1 - 2 * NOT_FIT_MARGIN_RATIO)
    fronts = []
    for number, job in enumerate(jobs):
        fronts.append(pareto(job.problem, means=job.means, budgets=_BUDGETS))
        report((number + 1) / len(jobs))
    fitting = (
        chosen
        for chosen in product(*fronts)
        if sum(planned.played.peak_bytes for planned in chosen) <= budget
    )
    best = min(
        fitting,
        key=lambda chosen: math.prod(1 + planned.played.overhead_ratio for planned in chosen),
        default=None,
    )
    return None if best is None else list(best)
