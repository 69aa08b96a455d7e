"""Measure what sharding costs the host: FSDP's hooks per unit, and updating sharded tensors."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from estimator.probe.backend import Backend

_UNITS, _ROUNDS, _WARMUP = 12, 15, 3


def shard_costs(backend: Backend) -> tuple[float, float]:
    """Host seconds per unit of a step, and per tensor of an update, in a world of one rank.

    The unit's figure contains its three collectives among one rank, which move next to nothing.
    """
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    def model() -> nn.Module:
        layers = [nn.Linear(16, 16, bias=False) for _ in range(_UNITS)]
        return nn.Sequential(*layers).to(backend.device)

    x = torch.ones(1, 16, device=backend.device)
    with world_of_one(backend):
        whole, sharded = model(), model()
        for layer in list(sharded.children()):
            fully_shard(layer)
        fully_shard(sharded)
        forms = (whole, sharded)
        optimizers = [torch.optim.AdamW(form.parameters(), lr=0.0) for form in forms]
        steps = [
            _medians(backend, form, x, o.step) for form, o in zip(forms, optimizers, strict=True)
        ]
    (whole_s, whole_update_s), (sharded_s, sharded_update_s) = steps
    return (
        max(0.0, sharded_s - whole_s) / _UNITS,
        max(0.0, sharded_update_s - whole_update_s) / _UNITS,
    )


@contextmanager
def world_of_one(backend: Backend) -> Iterator[None]:
    """A process group of this process alone, over what ranks on such a device talk over."""
    import torch.distributed as torch_distributed

    dist: Any = torch_distributed
    # As ranks.py does: gloo otherwise looks up the host's own name.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    over = "nccl" if backend.kind == "cuda" else "gloo"
    dist.init_process_group(over, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _medians(
    backend: Backend, form: Any, x: Any, update: Callable[[], object]
) -> tuple[float, float]:
    """Host seconds of forward and backward, and of the update; the device is idle before each."""
    passes, updates = [], []
    for _ in range(_WARMUP + _ROUNDS):
        form.zero_grad()
        backend.synchronize()
        begin = time.perf_counter()
        form(x).sum().backward()
        passes.append(time.perf_counter() - begin)
        backend.synchronize()
        begin = time.perf_counter()
        update()
        updates.append(time.perf_counter() - begin)
    return statistics.median(passes[_WARMUP:]), statistics.median(updates[_WARMUP:])
