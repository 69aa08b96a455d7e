"""Train a model for real on one device: seconds per step, of the host alone, peak memory."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from estimator.machines.profile import DeviceKind
from estimator.probe.devices.backend import open_backend
from estimator.probe.grid.kernels import float32_matmuls
from estimator.validate.training import Training, time_steps

MODELS = Path(__file__).with_name("gpu_models.py")
WARM_UP_STEPS, TIMED_STEPS = 4, 20
# Each of these waits for the device, which the steps of a training loop do not.
AWAITED_STEPS = 5
OPTIMIZER = "adamw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model at one batch size in one precision, eager or compiled."""

    workload: str
    batch: int
    precision: str
    execution: str = "eager"

    @property
    def key(self) -> str:
        how = "" if self.execution == "eager" else f"-{self.execution}"
        return f"{self.workload}-b{self.batch}-{self.precision}{how}"


def run_for_real(case: Case, kind: DeviceKind) -> dict[str, Any]:
    """Build, warm up and time a case; everything it held is let go before it returns."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # On a CPU nobody counts.
    before_bytes = torch.cuda.memory_allocated() if kind == "cuda" else 0
    try:
        with float32_matmuls(on_tensor_cores=case.precision == "tf32"):
            return {**_timed(case, kind), "allocated_before_bytes": before_bytes}
    finally:
        release(kind)


def _timed(case: Case, kind: DeviceKind) -> dict[str, Any]:
    """Steps as a training loop runs them, then some that are awaited, for the host's own time."""
    asked = {"model": f"{MODELS}:{case.workload}", "batch": case.batch, "seq_len": None}
    how = {"optimizer": OPTIMIZER, "precision": case.precision, "strategy": "ddp", "kind": kind}
    steps = {"steps": TIMED_STEPS, "warmup_steps": 0, "accumulation_steps": 1}
    with torch.device(kind):
        training = Training(asked | how | steps, 1)
    if case.execution == "compiled":
        training.model = torch.compile(training.model)
    for _ in range(WARM_UP_STEPS):
        training.step()
    training.synchronize()
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = time_steps(training, how | steps, 1)
    return {
        "step_s": statistics.fmean(found["step_times_s"]),
        "wall_s": found["step_s"],
        "steps_s": found["step_times_s"],
        "host_s": statistics.median(host_s(training, case, kind) for _ in range(AWAITED_STEPS)),
        "peak_bytes": found["peak_memory_bytes"] if kind == "cuda" else None,
    }


def host_s(training: Training, case: Case, kind: DeviceKind) -> float:
    """Seconds until the host has issued a step, the device being idle before each phase."""
    began = time.perf_counter()
    training.optimizer.zero_grad(set_to_none=True)
    with torch.autocast(kind, dtype=torch.bfloat16, enabled=case.precision == "bf16-amp"):
        loss = training.call.run(training.model, training.batch)
    issued_s = time.perf_counter() - began
    for phase in (loss.backward, training.optimizer.step):
        training.synchronize()
        began = time.perf_counter()
        phase()
        issued_s += time.perf_counter() - began
    training.synchronize()
    return issued_s


def release(kind: DeviceKind) -> None:
    """Give back what nothing holds any more, so that the next case finds the memory empty."""
    gc.collect()
    if kind == "cuda":
        torch.cuda.empty_cache()


@lru_cache
def device_backend(kind: DeviceKind) -> Any:
    """The backend of this process, its device warm."""
    backend = open_backend(kind, 0)
    backend.warm_up(1.0 if kind == "cuda" else 0.1)
    return backend
