"""Evict a core's private caches between two pieces of the host's work, as kernels of a step do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# More than the private caches of a core hold.
COOLING_BYTES = 4 << 20


def cooling_backward(streamed: Any) -> Callable[[Any], Any]:
    """A function of autograd that passes its argument on; its backward pass goes through a tensor.

    The caller goes through it in the forward pass (``streamed.add_(1.0)``).
    """
    import torch

    class Cool(torch.autograd.Function):
        """Passes its argument on, and evicts the private caches in the backward pass."""

        @staticmethod
        def forward(_: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(_: Any, gradient: Any) -> Any:
            streamed.add_(1.0)
            return gradient

    apply: Callable[[Any], Any] = Cool.apply
    return apply
