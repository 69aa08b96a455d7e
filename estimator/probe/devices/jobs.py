"""Run parts of the probe in one process pinned to a device, and pass on what they find.

Each finding reaches the parent as soon as it is made, so that whatever was measured before an
interruption, a crash or the end of the budget is kept.
"""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from estimator.errors import ProbeError
from estimator.machines.profile import Device, MachineProfile
from estimator.probe.devices.backend import Backend, CpuBackend, open_backend, square_matmul
from estimator.probe.devices.interference import (
    InterferenceWatch,
    disturbed_canary_ratio,
    read_cpu_times,
)
from estimator.probe.devices.inventory import pinned, read_cpu

_CANARY_SIDE, _CANARY_WARM_UPS = 512, 3


def canary_s(backend: Backend, *, repeats: int = 21) -> float:
    """Median seconds of a 512 × 512 × 512 float32 matmul; on a GPU of a bfloat16 one to fill it."""
    matmul = square_matmul(backend, _CANARY_SIDE)
    backend.time_calls(matmul, repeats=_CANARY_WARM_UPS)
    return statistics.median(backend.time_calls(matmul, repeats=repeats))


def slowdown_ratio(profile: MachineProfile) -> float | None:
    """How many times as long the canary takes here and now as when `profile` was probed.

    None where this process cannot tell: the profile is of GPUs or of another machine, or has no
    canary.
    """
    cores, cpu = profile.devices[0].cores, read_cpu()
    is_here = profile.hardware.get("cpu") == cpu.model and set(cores) <= set(cpu.cores)
    if not hasattr(os, "sched_setaffinity") or profile.canary_s is None or not cores or not is_here:
        return None
    with pinned(cores, threads=len(cores)):
        return canary_s(CpuBackend()) / profile.canary_s


Emit = Callable[[dict[str, Any]], None]
# The last thing that is heard of a job, failed or not.
FINISHED: dict[str, Any] = {"finished": True}
# The part whose findings are what others took: {"waiting": their share now} or {"seen": …}.
WATCH = "watch"

_START_ALLOWANCE_S = 60.0
_CANARY_REPEATS = 5
# Of what a job was to take: so much it gets even where those before it took too long.
_LEAST_RATIO = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedJob:
    """One function to call there: ``function(backend, emit, budget_s=…, **arguments)``.

    One that measures `in_pieces` is also given ``watch=…``, to run each of them.
    """

    part: str
    function: str
    budget_s: float
    arguments: dict[str, Any] = field(default_factory=dict)
    in_pieces: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceSettings:
    """Whose CPU time on which hardware threads is not that of others, and how long to wait.

    The measurements need `cores` cores; `spare_cores` more are there.
    """

    pid: int
    threads: Sequence[int]
    cores: int
    spare_cores: int
    patience_s: float
    usual_canary_s: float | None = None


def run_jobs(
    device: Device,
    jobs: Sequence[PinnedJob],
    on_finding: Callable[[str, dict[str, Any]], None],
    watching: InterferenceSettings | None = None,
) -> None:
    """Run `jobs` in order in one process pinned to `device`; `on_finding(part, what)` as it comes.

    They share what the start of the process and those before them have left of their `budget_s`.
    A job that fails is a finding ``{"failed": reason}``, and the next one goes on; the last finding
    of every job is FINISHED. What others disturbed is measured again as `watching` says. Raises
    ProbeError if the process itself dies.
    """
    from estimator.probe.devices.ranks import run_on_devices

    def receive(_rank: int, message: dict[str, Any]) -> None:
        on_finding(message.pop("part"), message)

    run_on_devices(
        [device],
        f"{__name__}:work",
        {
            "kind": device.kind,
            "index": device.index,
            "jobs": [asdict(job) for job in jobs],
            "begun": time.monotonic(),
            "watching": asdict(watching) if watching else None,
        },
        timeout_s=_START_ALLOWANCE_S
        + 2.0 * sum(job.budget_s for job in jobs)
        + (watching.patience_s if watching else 0.0),
        on_report=receive,
    )


def work(_rank: int, _world_size: int, arguments: Mapping[str, Any]) -> None:
    """Run every job of the plan and report what it emits; called in the pinned process."""
    from estimator.probe.devices.ranks import report

    backend = open_backend(arguments["kind"], arguments["index"])

    def emit(part: str, message: dict[str, Any]) -> None:
        report({"part": part, **message})

    watch = _open_watch(arguments["watching"], backend, partial(emit, WATCH))
    jobs = arguments["jobs"]
    planned = [job["budget_s"] for job in jobs]
    for number, job in enumerate(jobs):
        used_s = time.monotonic() - arguments["begun"] - watch.seen.waited_s
        job["budget_s"] = _share_s(planned, number, used_s)
        own = partial(emit, job["part"])
        if job["in_pieces"]:
            _call(job, backend, own, watch=watch)
        else:
            watch.run(partial(_call, job, backend, own))
        own(FINISHED)
        emit(WATCH, {"seen": asdict(watch.seen)})


def _share_s(planned_s: Sequence[float], number: int, used_s: float) -> float:
    """Seconds for one of the jobs, after `used_s` of what was planned for all.

    >>> _share_s([2.0, 6.0, 2.0], 1, used_s=6.0)
    3.0
    """
    left_s = max(0.0, sum(planned_s) - used_s)
    own_s = left_s * planned_s[number] / (sum(planned_s[number:]) or 1.0)
    return max(own_s, _LEAST_RATIO * planned_s[number])


def _open_watch(
    arguments: Mapping[str, Any] | None, backend: Backend, emit: Emit
) -> InterferenceWatch:
    if arguments is None:
        return InterferenceWatch()
    return InterferenceWatch(
        patience_s=arguments["patience_s"],
        cores=arguments["cores"],
        spare_cores=arguments["spare_cores"],
        read=partial(read_cpu_times, arguments["pid"], arguments["threads"]),
        canary=partial(canary_s, backend, repeats=_CANARY_REPEATS),
        usual_canary_s=arguments["usual_canary_s"],
        disturbed_canary_ratio=disturbed_canary_ratio(backend.kind),
        say=lambda disturbance: emit({"waiting": disturbance}),
    )


def _call(job: Mapping[str, Any], backend: Backend, emit: Emit, **more: Any) -> None:
    module, _, name = job["function"].partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        function(backend, emit, budget_s=job["budget_s"], **job["arguments"], **more)
    # One part that this torch or this machine cannot measure must not end the others; torch
    # reports what it lacks with these.
    except (ProbeError, RuntimeError, ImportError, AttributeError, ValueError, TypeError) as error:
        words = str(error).strip().splitlines()
        emit({"failed": f"{type(error).__name__}: {words[0] if words else ''}"[:300]})
