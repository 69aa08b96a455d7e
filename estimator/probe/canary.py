"""Time the canary: a fixed matmul that tells two states of a machine apart."""

from __future__ import annotations

import os
import statistics

from estimator.machines.profile import MachineProfile
from estimator.probe.backend import Backend, CpuBackend
from estimator.probe.inventory import read_cpu

_CANARY_SIDE = 512


def canary_s(backend: Backend, *, repeats: int = 21) -> float:
    """Median seconds of a 512 × 512 × 512 float32 matmul."""
    import torch

    side = (_CANARY_SIDE, _CANARY_SIDE)
    left = torch.randn(side, device=backend.device)
    right = torch.randn(side, device=backend.device)
    out = torch.empty(side, device=backend.device)
    backend.time_calls(lambda _: torch.mm(left, right, out=out), repeats=3)
    return statistics.median(
        backend.time_calls(lambda _: torch.mm(left, right, out=out), repeats=repeats)
    )


def slowdown_ratio(profile: MachineProfile) -> float | None:
    """How many times as long the canary takes here and now as when `profile` was probed.

    None where this process cannot tell: the profile is of GPUs or of another machine, or has no
    canary.
    """
    import torch

    cores, cpu = profile.devices[0].cores, read_cpu()
    is_here = profile.hardware.get("cpu") == cpu.model and set(cores) <= set(cpu.cores)
    if not hasattr(os, "sched_setaffinity") or profile.canary_s is None or not cores or not is_here:
        return None
    usable, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
        return canary_s(CpuBackend()) / profile.canary_s
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, usable)
