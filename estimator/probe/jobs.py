"""Run parts of the probe in one fresh process pinned to a device, and pass on what they find.

Each finding reaches the parent as soon as it is made, so that whatever was measured before an
interruption, a crash or the end of the budget is kept.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from estimator.errors import ProbeError
from estimator.machines.profile import Device
from estimator.probe.backend import Backend, open_backend

Emit = Callable[[dict[str, Any]], None]
# The last thing that is heard of a job, failed or not.
FINISHED: dict[str, Any] = {"finished": True}

_START_ALLOWANCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One function to call there: ``function(backend, emit, budget_s=…, **arguments)``."""

    part: str
    function: str
    budget_s: float
    arguments: dict[str, Any] = field(default_factory=dict)


def run_jobs(
    device: Device, jobs: Sequence[Job], on_finding: Callable[[str, dict[str, Any]], None]
) -> None:
    """Run `jobs` in order in one process pinned to `device`; `on_finding(part, what)` as it comes.

    A job that fails is a finding ``{"failed": reason}``, and the next one goes on; the last finding
    of every job is FINISHED. Raises ProbeError if the process itself dies.
    """
    from estimator.probe.ranks import run_on_devices

    def receive(_rank: int, message: dict[str, Any]) -> None:
        on_finding(message.pop("part"), message)

    run_on_devices(
        [device],
        f"{__name__}:work",
        {"kind": device.kind, "index": device.index, "jobs": [asdict(job) for job in jobs]},
        timeout_s=_START_ALLOWANCE_S + 2.0 * sum(job.budget_s for job in jobs),
        on_report=receive,
    )


def work(_rank: int, _world_size: int, arguments: Mapping[str, Any]) -> None:
    """Run every job of the plan and report what it emits; called in the pinned process."""
    from estimator.probe.ranks import report

    backend = open_backend(arguments["kind"], arguments["index"])
    for job in arguments["jobs"]:

        def emit(message: dict[str, Any], part: str = job["part"]) -> None:
            report({"part": part, **message})

        _call(job, backend, emit)
        emit(FINISHED)


def _call(job: Mapping[str, Any], backend: Backend, emit: Emit) -> None:
    module, _, name = job["function"].partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        function(backend, emit, budget_s=job["budget_s"], **job["arguments"])
    # One part that this torch or this machine cannot measure must not end the others; torch
    # reports what it lacks with these.
    except (ProbeError, RuntimeError, ImportError, AttributeError, ValueError, TypeError) as error:
        words = str(error).strip().splitlines()
        emit({"failed": f"{type(error).__name__}: {words[0] if words else ''}"[:300]})
