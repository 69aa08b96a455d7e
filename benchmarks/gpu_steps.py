"""Train a workload for real on one device: seconds per step, of the host alone, peak memory."""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from zoo.gpu import BY_NAME
from zoo.inputs import Workload

from estimator.graph.trace.training_call import TrainingCall
from estimator.machines.profile import DeviceKind
from estimator.probe.grid.kernels import float32_matmuls

WARM_UP_STEPS, TIMED_STEPS = 4, 20
# Each of these waits for the device, which the steps of a training loop do not.
AWAITED_STEPS = 5
LEARNING_RATE = 1e-5


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


class RealTraining:
    """A workload with its optimizer and batch on a device, ready to step."""

    def __init__(self, case: Case, device: str) -> None:
        workload: Workload = BY_NAME[case.workload]
        torch.manual_seed(0)
        self.device, self.precision = device, case.precision
        with torch.device(device):
            self.model: Any = workload.build()
            self.batch = workload.inputs(case.batch)
        self.call = TrainingCall.of(self.model, self.batch, workload.loss)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        if case.execution == "compiled":
            self.model = torch.compile(self.model)

    def step(self) -> None:
        """zero_grad, forward, loss, backward, update."""
        for _ in self.phases():
            pass

    def phases(self) -> Iterator[None]:
        """The same; stops after each of its phases has been issued."""
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            loss = self.call.run(self.model, self.call.batch)
        yield
        loss.backward()
        del loss
        yield
        self.optimizer.step()
        yield

    def _autocast(self) -> Any:
        if self.precision != "bf16-amp":
            return contextlib.nullcontext()
        return torch.autocast(self.device, dtype=torch.bfloat16)

    def synchronize(self) -> None:
        """Wait for the device; a CPU is never behind."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def mark(self) -> Any:
        """Now: in the device's stream, or on the CPU's clock."""
        if self.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_s(self, one: Any, two: Any) -> float:
        """Seconds between two marks that have passed."""
        # Event.elapsed_time is in milliseconds.
        return float(one.elapsed_time(two) * 1e-3 if self.device == "cuda" else two - one)


def run_for_real(case: Case, device: str) -> dict[str, Any]:
    """Build, warm up and time a case; everything it held is let go before it returns."""
    torch.set_num_threads(1)
    before_bytes = allocated_bytes(device)
    with float32_matmuls(on_tensor_cores=case.precision == "tf32"):
        training = RealTraining(case, device)
        try:
            found = time_training(training)
        finally:
            del training
            release(device)
    return {**found, "allocated_before_bytes": before_bytes}


def time_training(training: RealTraining) -> dict[str, Any]:
    """Steps as a training loop runs them, then some that are awaited, for the host's own time."""
    for _ in range(WARM_UP_STEPS):
        training.step()
    training.synchronize()
    if training.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    marks = [training.mark()]
    begin = time.perf_counter()
    for _ in range(TIMED_STEPS):
        training.step()
        marks.append(training.mark())
    training.synchronize()
    wall_s = (time.perf_counter() - begin) / TIMED_STEPS
    steps_s = [training.between_s(one, two) for one, two in itertools.pairwise(marks)]
    return {
        "step_s": training.between_s(marks[0], marks[-1]) / TIMED_STEPS,
        "wall_s": wall_s,
        "steps_s": steps_s,
        "host_s": statistics.median(host_s(training) for _ in range(AWAITED_STEPS)),
        "peak_bytes": torch.cuda.max_memory_allocated() if training.device == "cuda" else None,
    }


def host_s(training: RealTraining) -> float:
    """Seconds until the host has issued a step, the device being idle before each phase."""
    issued_s, before = 0.0, time.perf_counter()
    for _ in training.phases():
        issued_s += time.perf_counter() - before
        training.synchronize()
        before = time.perf_counter()
    return issued_s


def allocated_bytes(device: str) -> int:
    """What torch holds on the device now; 0 on a CPU, where nobody counts."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def release(device: str) -> None:
    """Give back what nothing holds any more, so that the next case finds the memory empty."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


_backends: dict[str, Any] = {}


def device_backend(kind: DeviceKind) -> Any:
    """The backend of this process, its device warm."""
    from estimator.probe.devices.backend import open_backend

    if kind not in _backends:
        _backends[kind] = open_backend(kind, 0)
        _backends[kind].warm_up(1.0 if kind == "cuda" else 0.1)
    return _backends[kind]
