"""Measure what DTensor costs the host: calls of divided modules, and its collectives."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from estimator.probe.shard_costs import world_of_one

_MODULES, _ROUNDS, _WARMUP, _CALLS = 12, 15, 3, 20


def dtensor_costs() -> dict[str, float]:
    """The fields of HostCost that begin with `dtensor`, in a world of one rank over gloo.

    Linear layers divided by columns are timed beside whole ones; those divided by rows add up
    partial sums. Among one rank DTensor leaves the collective itself out, so what the functional
    form of it adds to a plain one is timed beside it.
    """
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    x = torch.ones(2, 2, 16, requires_grad=True)
    with world_of_one():
        mesh = init_device_mesh("cpu", (1,))

        def seconds(style: Any) -> tuple[float, float]:
            model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(_MODULES)])
            if style is not None:
                parallelize_module(model, mesh, {"*": style})
            return _passes(model, x)

        whole, column, row = map(seconds, (None, ColwiseParallel(), RowwiseParallel()))
        more_s = [max(0.0, one - two) / _MODULES for one, two in zip(column, whole, strict=True)]
        sums_s = [max(0.0, one - two) / _MODULES for one, two in zip(row, column, strict=True)]
        return {
            "dtensor_forward_s": more_s[0],
            "dtensor_backward_s": more_s[1],
            "dtensor_exchange_s": statistics.fmean(sums_s) + _functional_s(mesh),
        }


def _passes(model: Any, x: Any) -> tuple[float, float]:
    """Seconds of forward and of backward."""
    forward, backward = [], []
    for _ in range(_WARMUP + _ROUNDS):
        model.zero_grad()
        begin = time.perf_counter()
        loss = model(x).sum()
        middle = time.perf_counter()
        loss.backward()
        backward.append(time.perf_counter() - middle)
        forward.append(middle - begin)
    return statistics.median(forward[_WARMUP:]), statistics.median(backward[_WARMUP:])


def _functional_s(mesh: Any) -> float:
    """What a functional all-reduce costs beyond the plain one that the collectives' probe times."""
    import torch
    import torch.distributed as torch_distributed
    import torch.distributed._functional_collectives as functional

    dist: Any = torch_distributed
    x = torch.ones(16)
    group = (mesh, 0)

    def made() -> None:
        functional.wait_tensor(functional.all_reduce(x, "sum", group))

    return max(0.0, _median_s(made) - _median_s(lambda: dist.all_reduce(x)))


def _median_s(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_WARMUP + _ROUNDS):
        begin = time.perf_counter()
        for _ in range(_CALLS):
            call()
        seconds.append((time.perf_counter() - begin) / _CALLS)
    return statistics.median(seconds[_WARMUP:])
