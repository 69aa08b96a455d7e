"""Decisions made by comparing estimates: layouts, batches, rank order, strategies, what to rent."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from estimator.advise.batches import best_batch, next_gpu
    from estimator.advise.layouts.search import best_layout
    from estimator.advise.rent.offers import cheapest

_HOMES = {
    "best_batch": "estimator.advise.batches",
    "best_layout": "estimator.advise.layouts.search",
    "cheapest": "estimator.advise.rent.offers",
    "next_gpu": "estimator.advise.batches",
}

__all__ = ["best_batch", "best_layout", "cheapest", "next_gpu"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'estimator.advise' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
