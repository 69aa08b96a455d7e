"""Time the canary: a fixed matmul that tells two states of a machine apart."""

from __future__ import annotations

import statistics

from estimator.probe.backend import Backend

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
