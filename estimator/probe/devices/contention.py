"""Measure how much slower each device gets when others of the same machine are busy too."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from estimator.machines.profile import Contention, DeviceKind, Provenance
from estimator.probe.devices.backend import (
    Backend,
    filling_side,
    keep_memory_resident,
    open_backend,
    square_matmul,
)

Bound = Literal["compute", "memory", "update"]

# Streaming sums beyond any private cache first: if time runs out, those tell the most.
_ADDED_BYTES: dict[DeviceKind, tuple[int, ...]] = {
    "cpu": (64 << 20, 4 << 20, 16 << 20, 512 << 10, 192 << 20, 64 << 10),
    # A GPU has its memory to itself: one size, which takes the fastest of them a millisecond.
    "cuda": (6 << 30,),
}
_ADDED_FIRST = 3
_UPDATED_PARAMETERS: dict[DeviceKind, int] = {"cpu": 4_000_000, "cuda": 64_000_000}
_MATMUL_SIDE = 512
# Calls of a GPU that are timed at once.
_FLIGHT = 4
_LEAST_CALLS = 3
# Rounds of each case; of matmuls more, since they tell how unlike ranks run.
_ROUNDS, _MATMUL_ROUNDS = 3, 10
# Windows of several timer ticks and kernels, and no longer than a rank can wait for the others.
_SHORTEST_WINDOW_S, _LONGEST_WINDOW_S = 0.004, 0.08


def summarise(results: Sequence[Sequence[Mapping[str, Any]]], *, at: str = "") -> list[Contention]:
    """Contentions from what each rank measured: the mean over ranks of busy / alone.

    `results[rank]` lists ``{"bound", "bytes", "alone_s", "busy_s"}``; each rank is
    compared with itself alone.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    for cases in zip(*results, strict=True):
        ratio = statistics.fmean(case["busy_s"] / case["alone_s"] for case in cases)
        pairs.setdefault(cases[0]["bound"], []).append((float(cases[0]["bytes"]), ratio))
    return [
        Contention(
            bound=bound,  # type: ignore[arg-type]
            devices_busy=len(results),
            points=tuple(sorted(points)),
            provenance=Provenance(source="measured", at=at, samples=len(points)),
        )
        for bound, points in pairs.items()
    ]


def rank_jitter_ratio(results: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """One standard deviation of a rank's time beside the others, over many windows of matmuls.

    A step lasts as long as many windows, whose noise it averages; what it waits for are ranks that
    are slower for longer. So it is the part of the variance between ranks that the variance within
    each does not explain (one-way analysis of variance), of medians: those of n windows vary by
    pi / 2 / n of what windows do.
    """
    windows = [case["windows_s"] for cases in results for case in cases if case.get("windows_s")]
    if len(windows) < 2:
        return 0.0
    medians = [statistics.median(of_rank) for of_rank in windows]
    noise = [
        math.pi / 2 * statistics.variance(of_rank) / len(of_rank) if len(of_rank) > 1 else 0.0
        for of_rank in windows
    ]
    between = max(statistics.variance(medians) - statistics.fmean(noise), 0.0)
    return math.sqrt(between) / statistics.fmean(medians)


def time_contention(*, kind: DeviceKind, group: Any, budget_s: float) -> Iterator[dict[str, Any]]:
    """One rank's part: each case alone, one rank after the other, then all of `group` at once."""
    import torch
    import torch.distributed as torch_distributed

    dist: Any = torch_distributed
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    backend = open_backend(kind)
    if kind == "cpu":
        keep_memory_resident()
    rounds = _MATMUL_ROUNDS + (1 + len(_ADDED_BYTES[kind])) * _ROUNDS
    window_s = budget_s / (rounds * (world_size + 1))
    window_s = min(_LONGEST_WINDOW_S, max(_SHORTEST_WINDOW_S, window_s))
    end = time.monotonic() + budget_s
    for number, (bound, size, call) in enumerate(_cases(backend)):
        # All ranks stop at the same case.
        over = torch.tensor([float(number and time.monotonic() > end)], device=backend.device)
        dist.all_reduce(over, group=group)
        if over.item():
            return
        backend.time_calls(call, repeats=1)
        alone: list[float] = []
        busy: list[float] = []
        windows: list[float] = []
        for _ in range(_MATMUL_ROUNDS if bound == "compute" else _ROUNDS):
            for turn in range(world_size):
                dist.barrier(group)
                if turn == rank:
                    alone += _window(backend, call, window_s)
            dist.barrier(group)
            together = _window(backend, call, window_s)
            busy += together
            windows.append(statistics.fmean(together))
        entry = {
            "bound": bound,
            "bytes": size,
            "alone_s": statistics.median(alone),
            "busy_s": statistics.median(busy),
        }
        yield {**entry, "windows_s": windows} if bound == "compute" else entry


def _window(backend: Any, call: Callable[[int], object], window_s: float) -> list[float]:
    """Seconds of each call within a window of time, at least a few."""
    seconds: list[float] = []
    end = time.perf_counter() + window_s
    while len(seconds) < _LEAST_CALLS or time.perf_counter() < end:
        seconds += backend.time_calls(call, repeats=1 if backend.kind == "cpu" else _FLIGHT)
    return seconds


def _cases(backend: Backend) -> Iterator[tuple[Bound, int, Callable[[int], object]]]:
    """(bound, bytes touched, call): matmuls, streaming sums, optimizer steps."""
    import torch

    device, added_bytes = backend.device, _ADDED_BYTES[backend.kind]
    on_cuda, parameters = backend.kind == "cuda", _UPDATED_PARAMETERS[backend.kind]
    matmul_bytes = 6 * filling_side(backend) ** 2 if on_cuda else 12 * _MATMUL_SIDE**2
    left = torch.randn(_MATMUL_SIDE, _MATMUL_SIDE, device=device)
    matmul = torch.empty_like(left)
    weight = torch.nn.Parameter(torch.ones(parameters, device=device))
    weight.grad = torch.full_like(weight, 0.01)
    stepper = torch.optim.AdamW([weight], lr=1e-4)
    stepper.step()

    def sum_of(size: int) -> Callable[[int], object]:
        a, b, c = (torch.ones(size // 12, device=device) for _ in range(3))
        return lambda _: torch.add(a, b, out=c)

    # What most of a step runs at first, since a busy machine may not come to the end.
    filling = square_matmul(backend, _MATMUL_SIDE) if on_cuda else None
    yield "compute", matmul_bytes, filling or (lambda _: torch.mm(left, left, out=matmul))
    for size in added_bytes[:_ADDED_FIRST]:
        yield "memory", size, sum_of(size)
    # Weight, gradient and two moments in float32.
    yield "update", 16 * parameters, lambda _: stepper.step()
    for size in added_bytes[_ADDED_FIRST:]:
        yield "memory", size, sum_of(size)
