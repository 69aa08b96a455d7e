"""Time every call of the grid on one device: inputs in cache, and inputs in main memory."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from estimator.errors import ProbeError
from estimator.probe.backend import Backend, keep_memory_resident, touch_memory
from estimator.probe.calls import find_operator, output_tensors, real_arguments, spec_of
from estimator.probe.grid import GridCall, kernel_grid
from estimator.probe.jobs import Emit
from estimator.probe.source import TensorSource
from estimator.profile import KernelPoint
from estimator.tensors import OpCall, TensorSpec

_LEAST_REPEATS, _MOST_REPEATS = 5, 300
_WARM_S, _COLD_S = 0.008, 0.008
_SLOW_CALL_S = 0.25
# Below this a call is all dispatch; above that ratio reading cold inputs is under 1 % of the work
# (a core that does 150 Gflop/s and reads 0.1 ns/byte: 15 flops in the time of one byte).
_NO_COLD_BELOW_BYTES = 16 << 10
_NO_COLD_ABOVE_FLOPS_PER_BYTE = 1000.0
_MOST_KEPT_OUTPUTS = 4096
_CANARY_SIDE = 512
_TOUCHED_BYTES = 704 << 20


def prepare(backend: Backend, emit: Emit, *, budget_s: float) -> None:
    """Make this process time calls as a long-running step does: memory resident, clocks steady."""
    if backend.kind == "cpu":
        resident = keep_memory_resident()
        touch_memory(_TOUCHED_BYTES)
        emit({"memory_resident": resident})
    backend.warm_up(min(1.0, budget_s) if backend.kind == "cuda" else 0.1)


def measure_canary(backend: Backend, emit: Emit, *, budget_s: float) -> None:
    """The fixed product that tells two states of a machine apart."""
    emit({"canary_s": canary_s(backend)})


def canary_s(backend: Backend) -> float:
    """Median seconds of a 512 × 512 × 512 float32 matrix product."""
    import torch

    side = (_CANARY_SIDE, _CANARY_SIDE)
    left = torch.randn(side, device=backend.device)
    right = torch.randn(side, device=backend.device)
    out = torch.empty(side, device=backend.device)
    backend.time_calls(lambda _: torch.mm(left, right, out=out), repeats=3)
    return statistics.median(
        backend.time_calls(lambda _: torch.mm(left, right, out=out), repeats=21)
    )


def measure_kernels(
    backend: Backend,
    emit: Emit,
    *,
    budget_s: float,
    thorough: bool = False,
    least_share: int = 1,
) -> None:
    """Emit a point for each call of the grid until the budget is over, then how many are left.

    `least_share` n keeps only every n-th call, for machines and tests that have little time.
    """
    grid = kernel_grid(backend.kind, thorough=thorough)[::least_share]
    source, end = TensorSource(backend), time.monotonic() + budget_s
    lacking: list[str] = []
    done = 0
    for grid_call in grid:
        if time.monotonic() >= end:
            break
        done += 1
        try:
            point = measure_call(backend, source, grid_call)
        # An operator that this build or device does not have, or calls otherwise; listed below.
        except (ProbeError, RuntimeError, TypeError, IndexError, ValueError) as error:
            lacking.append(f"{grid_call.call.target}: {str(error).splitlines()[0][:120]}")
            continue
        emit(
            {
                "call": dict(point.call),
                "warm_s": point.warm_s,
                "cold_s": point.cold_s,
                "spread_ratio": point.spread_ratio,
            }
        )
    emit({"done": done, "grid": len(grid), "lacking": lacking})


def measure_call(backend: Backend, source: TensorSource, grid_call: GridCall) -> KernelPoint:
    """Time one call of the grid warm and, where it makes a difference, cold."""
    import torch

    with torch.no_grad():
        operator = find_operator(grid_call.call.target)
        grid_call, workspace = _with_workspace(source, grid_call)

        def arguments() -> tuple[list[Any], dict[str, Any]]:
            tensors = source.arguments(grid_call)
            if workspace is not None:
                tensors[-1] = workspace
            return real_arguments(grid_call.call, iter(tensors), device=backend.device)

        positional, keywords = arguments()
        outputs = [spec_of(t) for t in output_tensors(operator(*positional, **keywords))]
        warm = _repeat(backend, lambda _: operator(*positional, **keywords), _WARM_S)
        warm_s = statistics.median(warm)
        written = sum(spec.storage_bytes for spec in outputs)
        cold_s = None
        if _cold_matters(grid_call, written):
            if grid_call.read_bytes + written >= source.block_bytes:
                cold_s = warm_s  # it does not fit the cache: warm is as cold as it gets
            else:
                cold_s = _cold_s(backend, source, grid_call, operator, arguments, outputs, warm_s)
    return KernelPoint(
        call=replace(grid_call.call, outputs=tuple(outputs)).encode(),
        warm_s=warm_s,
        cold_s=cold_s,
        spread_ratio=spread_ratio(warm),
    )


def spread_ratio(seconds: list[float]) -> float:
    """Half the 10–90 % range of repeats over their median."""
    if len(seconds) < 2:
        return 0.0
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return (tenths[-1] - tenths[0]) / 2 / statistics.median(seconds)


def _cold_matters(grid_call: GridCall, written_bytes: int) -> bool:
    moved = grid_call.read_bytes + written_bytes
    return (
        moved >= _NO_COLD_BELOW_BYTES and grid_call.flops / moved < _NO_COLD_ABOVE_FLOPS_PER_BYTE
    )


def _repeat(backend: Backend, call: Callable[[int], object], wanted_s: float) -> list[float]:
    one_s = max(backend.time_calls(call, repeats=1)[0], 1e-7)
    if one_s > _SLOW_CALL_S:
        return backend.time_calls(call, repeats=3)
    repeats = min(_MOST_REPEATS, max(_LEAST_REPEATS, math.ceil(wanted_s / one_s)))
    return backend.time_calls(call, repeats=repeats)


def _cold_s(
    backend: Backend,
    source: TensorSource,
    grid_call: GridCall,
    operator: Callable[..., Any],
    arguments: Callable[[], tuple[list[Any], dict[str, Any]]],
    outputs: list[TensorSpec],
    warm_s: float,
) -> float:
    """Median with every input read from main memory and outputs in memory long left alone.

    A ring of outputs as large as the source's block is kept; the oldest is dropped just before the
    call, which gets its memory. Results that are views or in-place hold no memory of their own.
    """
    written = max(1, sum(spec.storage_bytes for spec in outputs))
    kept: deque[Any] = deque(
        _empty_like(outputs, backend)
        for _ in range(min(_MOST_KEPT_OUTPUTS, 1 + source.block_bytes // written))
    )
    copies = source.copies(grid_call)
    repeats = min(_MOST_REPEATS, max(_LEAST_REPEATS, math.ceil(_COLD_S / warm_s)))
    # Where sets are dear to make they are made once and walked over; else cut afresh each time.
    sets = [arguments() for _ in range(copies)] if copies <= _LEAST_REPEATS + 1 else None
    ready: list[tuple[list[Any], dict[str, Any]]] = [([], {})]

    def before(number: int) -> None:
        kept.popleft()
        ready[0] = sets[number % copies] if sets else arguments()

    def call(_: int) -> None:
        positional, keywords = ready[0]
        kept.append(operator(*positional, **keywords))

    backend.time_calls(call, repeats=2, before=before)
    return statistics.median(backend.time_calls(call, repeats=repeats, before=before))


def _empty_like(specs: list[TensorSpec], backend: Backend) -> list[Any]:
    import torch

    from estimator.probe.calls import torch_dtype

    return [
        torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=backend.device)
        for spec in specs
    ]


def _with_workspace(source: TensorSource, grid_call: GridCall) -> tuple[GridCall, Any]:
    """The call with the workspace that only its forward call can make, and that workspace."""
    if grid_call.follows is None:
        return grid_call, None
    forward = grid_call.follows.call
    positional, keywords = real_arguments(
        forward, iter(source.arguments(grid_call.follows)), device=source.backend.device
    )
    workspace = output_tensors(find_operator(forward.target)(*positional, **keywords))[-1]
    call = grid_call.call
    described = OpCall(
        target=call.target,
        arguments=(*call.arguments[:-1], spec_of(workspace)),
        keywords=call.keywords,
    )
    return replace(grid_call, call=described), workspace
