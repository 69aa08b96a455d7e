"""Measure what DTensor costs the host: calls of divided modules, and its collectives."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from estimator.probe.backend import Backend
from estimator.probe.cooling import COOLING_BYTES, cooling_backward

_RANKS, _WIDTH = 2, 16
_MODULES, _ROUNDS, _WARMUP = 12, 21, 3
# A tensor of fp32 and its states are more than the private caches of a core hold.
_UPDATED, _UPDATED_ELEMENTS = 4, 1 << 19


def dtensor_costs(backend: Backend) -> dict[str, float]:
    """The fields of HostCost that begin with `dtensor`, of one rank of two whose other is not
    there: collectives end at once.

    Linear layers divided by columns and by rows are timed beside whole ones of a rank's size.
    Columns are summed over ranks backward, rows forward. On CPUs each comes after a pass over more
    memory than the core's private caches hold: between two of them a layer's products evict the
    host's code, as the update of a large tensor does.
    """
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    device = backend.device
    x = torch.ones(2, 2, _WIDTH, device=device, requires_grad=True)
    with _ranks_not_there():
        mesh = init_device_mesh(device.type, (_RANKS,))

        streamed = torch.zeros(COOLING_BYTES // 4 if backend.kind == "cpu" else 1)
        cool = cooling_backward(streamed)

        class Cooling(nn.Module):
            def forward(self, x: Any) -> Any:
                streamed.add_(1.0)
                return cool(x)

        def model(taken: int, given: int, style: Any) -> Any:
            layers = [nn.Linear(taken, given, bias=False, device=device) for _ in range(_MODULES)]
            if style is not None:
                for layer in layers:
                    parallelize_module(layer, mesh, style)
            return nn.Sequential(*[each for layer in layers for each in (Cooling(), layer)])

        forms = {
            "whole": model(_WIDTH, _WIDTH, None),
            "columns": model(_WIDTH, _RANKS * _WIDTH, ColwiseParallel()),
            "rows": model(_RANKS * _WIDTH, _WIDTH, RowwiseParallel()),
        }
        rounds = _passes(backend, forms, x)
        update = {"dtensor_update_tensor_s": _update_s(mesh)} if backend.kind == "cpu" else {}

    def more_s(of: str, than: str, backward: bool) -> float:
        """What a layer of one form takes longer."""
        one_s, other_s = (
            _quicker_s([each[form][backward] for each in rounds]) for form in (of, than)
        )
        return max(0.0, one_s - other_s) / _MODULES

    sums_s = more_s("rows", "columns", False), more_s("columns", "rows", True)
    return {
        "dtensor_forward_s": more_s("columns", "whole", False),
        "dtensor_backward_s": more_s("rows", "whole", True),
        "dtensor_exchange_s": statistics.fmean(sums_s),
        **update,
    }


@contextmanager
def _ranks_not_there() -> Iterator[None]:
    """A process group of more ranks than this process, in which collectives do nothing."""
    import torch.distributed as torch_distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist: Any = torch_distributed
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _passes(
    backend: Backend, forms: dict[str, Any], x: Any
) -> list[dict[str, tuple[float, float]]]:
    """Host seconds of forward and of backward of each form, by turns."""
    rounds: list[dict[str, tuple[float, float]]] = []
    for _ in range(_WARMUP + _ROUNDS):
        rounds.append({})
        for name, form in forms.items():
            form.zero_grad()
            backend.synchronize()
            begin = time.perf_counter()
            loss = form(x).sum()
            middle = time.perf_counter()
            loss.backward()
            rounds[-1][name] = middle - begin, time.perf_counter() - middle
    return rounds[_WARMUP:]


def _update_s(mesh: Any) -> float:
    """What DTensor adds to AdamW's update of a tensor."""
    import torch
    from torch import nn
    from torch.distributed.tensor import DTensor, Shard

    def optimizer(is_dtensor: bool) -> Any:
        own = []
        for _ in range(_UPDATED):
            value, gradient = (torch.full((_UPDATED_ELEMENTS,), 0.5) for _ in range(2))
            if is_dtensor:
                value, gradient = (
                    DTensor.from_local(each, mesh, [Shard(0)]) for each in (value, gradient)
                )
            own.append(nn.Parameter(value))
            own[-1].grad = gradient
        return torch.optim.AdamW(own)

    forms = optimizer(False), optimizer(True)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(_WARMUP + _ROUNDS):
        for form, own_s in zip(forms, seconds, strict=True):
            begin = time.perf_counter()
            form.step()
            own_s.append(time.perf_counter() - begin)
    plain_s, dtensor_s = (_quicker_s(own_s[_WARMUP:]) for own_s in seconds)
    return max(0.0, dtensor_s - plain_s) / _UPDATED


def _quicker_s(seconds: Sequence[float]) -> float:
    """The first quartile: what disturbs a pass makes it longer."""
    return statistics.quantiles(seconds, n=4)[0]
