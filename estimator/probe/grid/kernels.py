"""Time every call of the probe's fixed grid on one device: inputs in cache, and in main memory.

A family is a list of calls that vary size and layout; the grid interleaves the families and spreads
each one, so that any prefix of it covers every family from small to large.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from estimator.errors import ProbeError
from estimator.machines.profile import DeviceKind, KernelPoint
from estimator.probe.devices.backend import Backend
from estimator.probe.devices.calls import (
    GridCall,
    TensorSource,
    find_operator,
    in_dtype,
    interleave,
    output_tensors,
    real_arguments,
    spec_of,
    thinned,
    torch_dtype,
)
from estimator.probe.devices.jobs import Emit
from estimator.probe.grid.tables import families
from estimator.tensors import OpCall, TensorSpec


@cache
def kernel_grid(kind: DeviceKind, *, thorough: bool = False) -> list[GridCall]:
    """Every call of the probe, the most informative first; bfloat16 where `thorough` or on GPUs."""
    own = families("cpu")
    # Attention and LSTMs are other operators on a GPU.
    small = [family for name, family in own.items() if name not in ("attention", "recurrent")]
    if kind == "cuda":
        return _cuda_grid(small, thorough=thorough)
    grid = interleave(own.values())
    if not thorough:
        return grid
    return grid + interleave([in_dtype(family, "bfloat16") for family in small[:_IN_BFLOAT16]])


# Matmuls, convolutions, and what goes element by element.
_IN_BFLOAT16 = 8


# Of each operator every so many calls on a GPU. Sizes that fill it are timed in bfloat16 above all;
# small ones, of the grid for CPUs, take as long as their launch, which is alike for all of them.
_FLOAT32, _TF32, _FLOAT16, _SMALL, _SMALL_LOW = 2, 3, 6, 6, 9


def _cuda_grid(small: list[list[GridCall]], *, thorough: bool) -> list[GridCall]:
    """The sizes that fill a GPU in every dtype that its matmuls take, among them small ones.

    Where `thorough`, all of them in all dtypes.
    """

    def some(family: Iterable[GridCall], step: int) -> list[GridCall]:
        return thinned(family, 1 if thorough else step)

    def low(family: list[GridCall], dtype: str = "bfloat16") -> list[GridCall]:
        return in_dtype(family, dtype, on_cuda=True)

    own = families("cuda")
    matmuls = [*own.pop("matmuls"), *own.pop("batched matmuls")]
    special = ("float8 matmuls", "attention", "recurrent", "batch norms")
    float8, attention, recurrent, batch_norms = (own.pop(name) for name in special)
    large = [matmuls, *own.values()]
    others = [
        some((replace(call, math="tf32") for call in matmuls), _TF32),
        some(float8, _FLOAT32),
        attention,
        recurrent,
        batch_norms,
        low(some(matmuls, _FLOAT16), "float16"),
    ]
    return interleave(
        [
            interleave([low(family) for family in (*large, recurrent)]),
            interleave([*(some(family, _FLOAT32) for family in large), *others]),
            interleave([some(family, _SMALL) for family in small]),
            interleave([low(some(family, _SMALL_LOW)) for family in small]),
        ]
    )


# Calls of a CUDA device are timed in flights, and disturbed far less.
_LEAST_REPEATS, _MOST_REPEATS = 5, {"cpu": 200, "cuda": 24}
# A long call is long compared with what disturbs it: fewer repeats agree as well.
_FEW_REPEATS, _LONG_CALL_S = 3, 0.004
# What the host takes for a call does not grow with it; a longer one keeps the device too long.
_ISSUED_S = 1e-4
# Cold calls take several times as long as warm ones, and their inputs are cut anew for each.
_WARM_S, _COLD_S = {"cpu": 0.004, "cuda": 0.002}, {"cpu": 0.002, "cuda": 0.001}
# Below this a call is all dispatch; below that share of its time, reading its bytes from main
# memory (no device takes longer than this for one, most a third) is lost in the noise.
_NO_COLD_BELOW_BYTES = 16 << 10
_COLD_S_PER_BYTE, _COLD_SHARE = 1e-10, 0.10
# These make blocked copies of their tensors in memory of their own, which a training step has used
# for something else meanwhile: the caches are flushed before each call.
_WITH_SCRATCH = (
    *("aten.convolution", "aten._scaled_dot_product", "aten.mkldnn_rnn", "aten._cudnn_rnn"),
)
# Results and scratch lie in what a step has freed some kernels ago, since allocators hand out first
# what was freed last: so much traffic lies between, however large the last cache is. Emptying an L3
# of 480 MiB each time took 50 ms of the 90 of a call, and outputs were written 1 % slower for it.
_FREED_AGO_BYTES = 128 << 20
# Argument sets that must be made beforehand: integers, masks, tensors to be written to.
_MOST_SETS = 6
# Outputs kept beyond the repeats: a CUDA device is called once more.
_SPARE_OUTPUTS = 2
# The ring of outputs stays within memory that was touched when the process began.
_RING_BYTES = 192 << 20
# A repeat that took this much longer than the quickest quarter was held up by others.
_HELD_UP_RATIO = 1.5


def measure_kernels(
    backend: Backend, emit: Emit, *, budget_s: float, thorough: bool = False, first: int = 0
) -> None:
    """Emit a point for each call of the grid from number `first` on until the budget is over.

    Then how many are done, which do not run here, and whether the device is lost.
    """
    grid, source = kernel_grid(backend.kind, thorough=thorough), _source_of(backend)
    end = time.monotonic() + budget_s
    lacking: dict[str, None] = {}
    done, is_lost = first, False
    for done in range(first + 1, len(grid) + 1):
        grid_call = grid[done - 1]
        try:
            emit(_measured(backend, source, grid_call))
        # An operator that this build or device does not have, or calls otherwise.
        except (ProbeError, RuntimeError, TypeError, IndexError, ValueError) as error:
            reason = str(error).splitlines()[0][:120]
            lacking[f"{grid_call.call.target}: {reason}"] = None
            is_lost = backend.is_lost()
        if is_lost or time.monotonic() >= end:
            break
    emit({"done": done, "lacking": list(lacking), "is_lost": is_lost})


# Its blocks of memory last as long as the process.
_source_of = cache(TensorSource)


def _measured(backend: Backend, source: TensorSource, grid_call: GridCall) -> dict[str, Any]:
    with float32_matmuls(on_tensor_cores=grid_call.math == "tf32"):
        point = measure_call(backend, source, grid_call)
    return {**asdict(point), "call": point.call.encode(), "math": grid_call.math}


@contextlib.contextmanager
def float32_matmuls(*, on_tensor_cores: bool) -> Iterator[None]:
    """Let float32 matmuls round to TF32 within, if asked for."""
    import torch

    if not on_tensor_cores:
        yield
        return
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def measure_call(backend: Backend, source: TensorSource, grid_call: GridCall) -> KernelPoint:
    """Time one call of the grid warm and, where it makes a difference, cold."""
    import torch

    # Grad mode is on as in training (oneDNN's LSTM runs another primitive without it), but no input
    # requires a gradient, so nothing is recorded.
    with torch.enable_grad():
        operator = find_operator(grid_call.call.target)
        grid_call, workspace = _with_workspace(source, grid_call)

        def arguments() -> tuple[list[Any], dict[str, Any]]:
            tensors = source.arguments(grid_call)
            if workspace is not None:
                tensors[-1] = workspace
            return real_arguments(grid_call.call, iter(tensors), device=backend.device)

        positional, keywords = arguments()
        outputs = [spec_of(t) for t in output_tensors(operator(*positional, **keywords))]
        wanted_s = _WARM_S[backend.kind]
        warm = _repeat(backend, lambda _: operator(*positional, **keywords), wanted_s)
        warm_s = agreed_s(warm)
        written = sum(spec.storage_bytes for spec in outputs)
        cold_s = None
        if _cold_matters(grid_call, written, warm_s):
            if grid_call.read_bytes + written >= source.block_bytes:
                cold_s = warm_s  # it does not fit the cache: warm is as cold as it gets
            else:
                cold_s = _cold_s(backend, source, grid_call, operator, arguments, outputs, warm_s)
        host_s = None
        if warm_s <= _ISSUED_S:
            host_s = backend.issue_s(lambda _: operator(*positional, **keywords))
    return KernelPoint(
        call=replace(grid_call.call, outputs=tuple(outputs)),
        warm_s=warm_s,
        cold_s=cold_s,
        noise_ratio=noise_ratio(warm),
        host_s=host_s,
    )


def agreed_s(seconds: list[float]) -> float:
    """The median of repeats, without those that others held up: up to three quarters of them.

    >>> agreed_s([1.0, 1.1, 1.2, 5.0, 5.0, 9.0])
    1.1
    """
    quickest = sorted(seconds)[: max(1, (len(seconds) + 3) // 4)][-1]
    return statistics.median(second for second in seconds if second <= _HELD_UP_RATIO * quickest)


def noise_ratio(seconds: Sequence[float]) -> float:
    """Half the 10–90 % range of repeats over their median."""
    if len(seconds) < 2:
        return 0.0
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return (tenths[-1] - tenths[0]) / 2 / statistics.median(seconds)


def _cold_matters(grid_call: GridCall, written_bytes: int, warm_s: float) -> bool:
    moved = grid_call.read_bytes + written_bytes
    if grid_call.call.target.startswith(_WITH_SCRATCH):
        return warm_s < _LONG_CALL_S
    return moved >= _NO_COLD_BELOW_BYTES and moved * _COLD_S_PER_BYTE > _COLD_SHARE * warm_s


def _repeat(backend: Backend, call: Callable[[int], object], wanted_s: float) -> list[float]:
    first = backend.time_calls(call, repeats=1)
    repeats = _repeats(backend, max(first[0], 1e-7), wanted_s)
    if repeats > _FEW_REPEATS:
        return backend.time_calls(call, repeats=repeats)
    # The first of a long call counts: the operator has run before.
    return first + backend.time_calls(call, repeats=repeats - 1)


def _repeats(backend: Backend, one_s: float, wanted_s: float) -> int:
    least = _LEAST_REPEATS if one_s <= _LONG_CALL_S else _FEW_REPEATS
    return min(_MOST_REPEATS[backend.kind], max(least, math.ceil(wanted_s / one_s)))


def _cold_s(
    backend: Backend,
    source: TensorSource,
    grid_call: GridCall,
    operator: Callable[..., Any],
    arguments: Callable[[], tuple[list[Any], dict[str, Any]]],
    outputs: list[TensorSpec],
    warm_s: float,
) -> float:
    """Median with every input read from main memory and outputs in memory left alone for a while.

    A ring of outputs is kept; the oldest is dropped just before a call, which gets its memory. The
    caches are flushed once all are made; from then on each call meets inputs and outputs that were
    not touched since. Results that are views or in-place hold no memory of their own.
    """
    repeats = _repeats(backend, warm_s, _COLD_S[backend.kind])
    sets = None
    has_scratch = grid_call.call.target.startswith(_WITH_SCRATCH)
    if has_scratch:
        repeats = _FEW_REPEATS
    written = max(1, sum(spec.storage_bytes for spec in outputs))
    repeats = max(_FEW_REPEATS, min(repeats, _RING_BYTES // written - _SPARE_OUTPUTS))
    if not source.is_cheap(grid_call):
        repeats = min(repeats, _MOST_SETS)
        sets = [arguments() for _ in range(repeats)]
    ring = repeats + _SPARE_OUTPUTS
    kept: deque[Any] = deque(_touched_like(outputs, backend) for _ in range(ring))
    ready: list[tuple[list[Any], dict[str, Any]]] = [([], {})]

    def before(number: int) -> None:
        if has_scratch:
            source.flush(_FREED_AGO_BYTES)
        kept.popleft()
        ready[0] = sets[number] if sets else arguments()

    def call(_: int) -> None:
        positional, keywords = ready[0]
        kept.append(operator(*positional, **keywords))

    source.flush(_FREED_AGO_BYTES)
    return agreed_s(backend.time_calls(call, repeats=repeats, before=before))


def _touched_like(specs: list[TensorSpec], backend: Backend) -> list[Any]:
    import torch

    # Written once, or the first call to get this memory would pay for fresh pages.
    return [
        torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device=backend.device)
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
    made = output_tensors(find_operator(forward.target)(*positional, **keywords))
    workspace, call = made[grid_call.handed], grid_call.call
    last = max(n for n, value in enumerate(call.arguments) if isinstance(value, TensorSpec))
    described = OpCall(
        target=call.target,
        arguments=(*call.arguments[:last], spec_of(workspace), *call.arguments[last + 1 :]),
        keywords=call.keywords,
    )
    return replace(grid_call, call=described), workspace
