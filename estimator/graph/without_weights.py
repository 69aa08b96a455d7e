"""Build models without the memory of their weights, which tracing does not need."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


class WithoutWeights(TorchFunctionMode):
    """Makes large tensors without memory (on the meta device), small ones for real.

    Constructors read values of small ones (drop-path rates), and forward those of buffers.
    """

    _FACTORIES = frozenset(
        (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
    )
    _MOST_ELEMENTS = 1 << 14

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._FACTORIES and kwargs.get("device") is None:
            listed = bool(args) and isinstance(args[0], (tuple, list))
            size = kwargs.get("size", args[0] if listed else args)
            if math.prod(size) > self._MOST_ELEMENTS:
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


class WeightsTooLarge(BaseException):
    """Ends a constructor; no `except Exception` of its own keeps it."""


@dataclass(slots=True)
class Weights:
    """Parameters that modules have registered: bytes held, and with those that take no memory."""

    held_bytes: int = 0
    total_bytes: int = 0


@contextmanager
def counting_weights(most_bytes: float = math.inf) -> Iterator[Weights]:
    """Count the parameters of modules made within.

    Raises WeightsTooLarge as soon as they hold more than `most_bytes`.
    """
    weights = Weights()
    seen: set[int] = set()

    def count(_module: Any, _name: str, parameter: Any) -> None:
        if parameter is not None and id(parameter) not in seen:
            seen.add(id(parameter))
            weights.total_bytes += parameter.nbytes
            weights.held_bytes += 0 if parameter.is_meta else parameter.nbytes
        if weights.held_bytes > most_bytes:
            raise WeightsTooLarge

    handle = register_module_parameter_registration_hook(count)
    try:
        yield weights
    finally:
        handle.remove()


def with_values(batch: Any) -> Any:
    """The batch with zeros where `WithoutWeights` left tensors without values."""

    def filled(item: Any) -> Any:
        is_empty = isinstance(item, torch.Tensor) and item.is_meta
        return torch.zeros(item.shape, dtype=item.dtype) if is_empty else item

    return pytree.tree_map(filled, batch)
