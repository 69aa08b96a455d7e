"""Run one part of the probe in a process pinned to a device, and pass on what it finds.

Each finding reaches the parent as soon as it is made, so that whatever was measured before an
interruption, a crash or the end of the budget is kept.
"""

from __future__ import annotations

import importlib
import os
import statistics
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from estimator.errors import ProbeError
from estimator.machines.profile import MachineProfile
from estimator.probe.devices.backend import (
    Backend,
    CpuBackend,
    keep_memory_resident,
    open_backend,
    square_matmul,
    touch_memory,
)
from estimator.probe.devices.inventory import pinned, read_cpu
from estimator.probe.devices.ranks import DeviceProcesses, report

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
    cores = profile.devices[0].cores
    can_pin = bool(cores) and hasattr(os, "sched_setaffinity")
    if not can_pin or profile.canary_s is None or not has_cores_of(profile):
        return None
    with pinned(cores, threads=len(cores)):
        return canary_s(CpuBackend()) / profile.canary_s


def has_cores_of(profile: MachineProfile) -> bool:
    """Whether the cores of a profile's first device are here, of the CPU that it describes."""
    cpu, cores = read_cpu(), profile.devices[0].cores
    return profile.hardware.get("cpu") == cpu.model and set(cores) <= set(cpu.cores)


Emit = Callable[[dict[str, Any]], None]

# Beyond what is planned: what the start of a process may take.
START_ALLOWANCE_S = 60.0
_CANARY_REPEATS = 5
# Until a GPU's clocks are those of work; cores need only threads and caches.
_WARM_UP_S = {"cpu": 0.1, "cuda": 1.0}
_TOUCHED_BYTES = 896 << 20


def run_job(
    processes: DeviceProcesses,
    function: str,
    on_finding: Callable[[dict[str, Any]], None],
    *,
    budget_s: float = 0.0,
    arguments: Mapping[str, Any] | None = None,
    prepares: bool = True,
) -> None:
    """Call ``function(backend, emit, budget_s=…, **arguments)`` on the one device of `processes`.

    `on_finding` gets what it emits as it comes; where it fails ``{"failed": reason}``. Where it
    `prepares`, the process times calls as a long-running step does from its first job on. Raises
    ProbeError if the process itself dies.
    """
    (device,) = processes.devices
    processes.run(
        f"{__name__}:work",
        {
            "kind": device.kind,
            "function": function,
            "arguments": {"budget_s": budget_s, **(arguments or {})},
            "prepares": prepares,
        },
        timeout_s=START_ALLOWANCE_S + 2.0 * budget_s,
        on_report=lambda _rank, message: on_finding(message),
    )


def work(_rank: int, _world_size: int, job: Mapping[str, Any]) -> None:
    """What the pinned process does of `run_job`."""
    backend = _opened(job["kind"])
    if job["prepares"]:
        _prepare_once(backend)
    _call(job["function"], backend, **job["arguments"])


def emit_canary(backend: Backend, emit: Emit, *, budget_s: float) -> None:
    """Emit how long the canary takes now."""
    emit({"canary_s": canary_s(backend, repeats=_CANARY_REPEATS)})


# A backend learns what timing costs; it and what it has learnt last as long as the process.
_opened = cache(open_backend)


@cache
def _prepare_once(backend: Backend) -> None:
    """Make this process time calls as a long-running step does: memory resident, clocks steady."""
    import torch

    # Kernels are timed on normal numbers; what long chains of them leave may be none.
    torch.set_flush_denormal(True)
    if backend.kind == "cpu":
        resident = keep_memory_resident()
        touch_memory(_TOUCHED_BYTES)
        report({"memory_resident": resident})
    backend.warm_up(_WARM_UP_S[backend.kind])


def _call(function: str, backend: Backend, **arguments: Any) -> None:
    module, _, name = function.partition(":")
    try:
        getattr(importlib.import_module(module), name)(backend, report, **arguments)
    # One part that this torch or this machine cannot measure must not end the others; torch
    # reports what it lacks with these.
    except (ProbeError, RuntimeError, ImportError, AttributeError, ValueError, TypeError) as error:
        words = str(error).strip().splitlines()
        report({"failed": f"{type(error).__name__}: {words[0] if words else ''}"[:300]})
