"""Attention over the tokens of several ranks by torch's own ring, on CPUs.

``context_parallel`` replaces kernels of GPUs alone; its loop takes any attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any) -> Tensor:
        out, sums = _attention._templated_ring_attention(
            group, 2, _FORWARD, query, key, value, is_causal=True
        )
        ctx.group = group
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        found = _attention._templated_ring_attention_backward(
            ctx.group,
            2,
            _BACKWARD,
            gradient,
            "grad_out",
            query,
            key,
            value,
            out,
            sums,
            is_causal=True,
            dropout_p=0.0,
        )
        return *found[:3], None


def install(group: Any, *, is_ring: bool) -> None:
    """From now on attention of this process is over the tokens of a group."""
    _attention.set_rotate_method("alltoall" if is_ring else "allgather")

    def attend(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Any:
        return _Ring.apply(query, key, value, group)

    torch.nn.functional.scaled_dot_product_attention = attend
