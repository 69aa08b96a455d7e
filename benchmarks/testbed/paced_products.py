"""Let torch's own matrix products and attention wait a set time instead of computing.

An ordinary model then trains under torch's own parallelism on ranks that leave the cores alone: a
product waits as long as its flops take on a device of a declared rate, and gives zeros. All other
operators compute for real, hidden behind that. To the engine such a model is a graph whose products
were timed (`timed`) on `paced.paced_machine`.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import OpTiming
from estimator.tensors import OpCall

from . import paced

_PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm")
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_FREE_S = 1e-9


def flops(name: str, shapes: Sequence[Sequence[int]]) -> int:
    """What an operator of this bare name counts on inputs of these shapes; 0 if it does not wait.

    >>> flops("mm", [(8, 4), (4, 2)]), flops("addmm", [(2,), (8, 4), (4, 2)]), flops("add", [(2,)])
    (128, 128, 0)
    """
    if name in _PRODUCTS:
        left, right = shapes[1:3] if name == "addmm" else shapes[:2]
        return 2 * math.prod(left) * right[-1]
    if name.startswith(_ATTENTION):
        is_backward = name.endswith("_backward")
        query, key = shapes[1:3] if is_backward else shapes[:2]
        # Two products of queries by keys forward, five backward.
        return (5 if is_backward else 2) * 2 * math.prod(query) * key[-2]
    return 0


def flops_of(call: OpCall) -> int:
    """The same of a traced call."""
    return flops(call.target.split(".")[1], [spec.shape for spec in call.inputs])


def timed(graph: OpGraph, calls: Iterable[OpCall], flops_per_s: float) -> OpGraph:
    """A graph of which some calls, its own or those of one rank, were timed: all else is free."""
    timings = {call: OpTiming(seconds=flops_of(call) / flops_per_s or _FREE_S) for call in calls}
    return dataclasses.replace(graph, timings=timings, timed_on="paced")


_EXCHANGES = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
)
_EAGER = torch._C.DispatchKey.CompositeExplicitAutograd
_kept: list[Any] = []
# When the exchanges began that no product has followed yet.
_begun: list[float] = []


def install(flops_per_s: float) -> None:
    """From now on products of this process wait, and exchanges that block defer what is due."""

    def waits(name: str, result: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            _begun.clear()
            tensors = [each for each in args if isinstance(each, Tensor)]
            paced.pace.wait(flops(name, [each.shape for each in tensors]) / flops_per_s)
            return result(*args, **kwargs)

        return run

    kernels = torch.library.Library("aten", "IMPL")
    waiting = {
        **dict.fromkeys(_PRODUCTS[:3], _product),
        "_grouped_mm": _grouped,
        _ATTENTION: _attended,
        f"{_ATTENTION}_backward": _attended_backward,
    }
    for name, result in waiting.items():
        kernels.impl(name, waits(name, result), "CPU", allow_override=True)
    # Zeros would send every token to the same experts.
    kernels.impl("topk", _evenly, "CPU", allow_override=True)
    exchanges = torch.library.Library("_c10d_functional", "IMPL")
    for name in _EXCHANGES:
        exchanges.impl(name, _beginning(name), "CPU")
    exchanges.impl("wait_tensor", _waited, "CPU")
    _kept.extend((kernels, exchanges))


def _product(*args: Any, **_: Any) -> Tensor:
    left, right = args[-2:]
    return left.new_zeros((*left.shape[:-1], right.shape[-1]))


def _grouped(left: Tensor, right: Tensor, ends: Tensor, *_: Any, **__: Any) -> Tensor:
    """Rows by the weights of their group, or the gradient of these weights."""
    groups = (len(ends),) if right.dim() == 2 else ()
    return left.new_zeros((*groups, left.shape[0], right.shape[-1]))


def _evenly(scores: Tensor, count: int, *_: Any) -> tuple[Tensor, Tensor]:
    """What the best of each row are where all are taken equally often."""
    shape = (*scores.shape[:-1], count)
    chosen = torch.arange(math.prod(shape)) % scores.shape[-1]
    return scores.new_full(shape, 1.0 / count), chosen.view(shape)


def _attended(query: Tensor, _key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
    return out, query.new_zeros(query.shape[:-1])


def _attended_backward(
    _gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, ...]:
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


def _beginning(name: str) -> Callable[..., Any]:
    operator = getattr(torch.ops._c10d_functional, name).default

    def begin(*args: Any, **kwargs: Any) -> Any:
        _begun.append(time.perf_counter())
        return operator._op_dk(_EAGER, *args, **kwargs)

    return begin


def _waited(tensor: Tensor) -> Tensor:
    """What is due ends later by as long as nothing but the exchange was under way."""
    began = _begun[0] if _begun else time.perf_counter()
    found: Tensor = torch.ops._c10d_functional.wait_tensor.default._op_dk(_EAGER, tensor)
    _begun.clear()
    paced.pace.defer(time.perf_counter() - began)
    return found
