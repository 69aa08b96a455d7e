"""Decisions made by comparing estimates: layouts, batches, rank order, strategies, what to rent."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from estimator.advise.scaling import best_batch, next_gpu

_HOMES = {
    "best_batch": "estimator.advise.scaling",
    "next_gpu": "estimator.advise.scaling",
}

__all__ = ["best_batch", "next_gpu"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'estimator.advise' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
