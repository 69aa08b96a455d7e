"""Count the samples of a batch, and make a batch with twice as many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from estimator.errors import ModelError, quoted
from estimator.graph.fake_tensors import map_tensors

# A mapping of lists of mappings, as detection models take, has three.
_MOST_LEVELS = 16


def checked_dim(dim: Any) -> int:
    """The dimension of the samples, by default the first; raises ModelError."""
    if dim is None:
        return 0
    if not isinstance(dim, int) or isinstance(dim, bool) or dim < 0:
        raise ModelError(
            f"batch_dim is the number of the dimension of the samples, found {quoted(dim)}; write "
            "one from 0"
        )
    return dim


def sample_count(batch: Any, dim: int) -> int | None:
    """The size along `dim` that most inputs share; a list counts as one entry per sample."""
    sizes = Counter(_sizes(batch, dim))
    if not sizes:
        return None
    samples, times = sizes.most_common(1)[0]
    return None if times == 1 and len(sizes) > 1 else samples


def check_batch(batch: Any) -> None:
    """Raise ModelError for a batch that no step can be traced with."""
    left = [(batch, 0)]
    while left:
        item, depth = left.pop()
        if depth > _MOST_LEVELS:
            raise ModelError(
                f"the batch is nested more than {_MOST_LEVELS} levels deep, or holds itself; give "
                "tensors in lists or mappings"
            )
        if isinstance(item, Mapping):
            left += [(each, depth + 1) for each in item.values()]
        elif isinstance(item, (list, tuple)):
            left += [(each, depth + 1) for each in item]
        elif isinstance(item, Tensor):
            _check_tensor(item)


def _check_tensor(tensor: Tensor) -> None:
    kind = None
    if tensor.is_quantized:
        kind = "a quantised tensor"
    elif tensor.is_nested or tensor.layout is not torch.strided:
        kind = "a sparse or nested tensor"
    if kind is not None:
        raise ModelError(f"the batch holds {kind}, which cannot be traced; give a dense one")


def _sizes(batch: Any, dim: int) -> Iterator[int]:
    for item in _arguments(batch):
        if isinstance(item, Tensor):
            if item.dim() > dim:
                yield item.shape[dim]
        elif isinstance(item, Mapping):
            yield from _sizes(item, dim)
        elif isinstance(item, (list, tuple)) and item:
            yield len(item)


def _arguments(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return batch.values()
    return batch if isinstance(batch, (tuple, list)) else (batch,)


def with_samples(batch: Any, dim: int, samples: int, *, packed: bool = False) -> Any:
    """The batch with every sample twice.

    With `packed`, inputs hold several rows per sample (the patches of all images in one list): any
    whose size is a multiple of the samples is doubled.
    """

    def double(item: Any) -> Any:
        if isinstance(item, Mapping):
            return {key: double(value) for key, value in item.items()}
        if isinstance(item, (list, tuple)):
            if hasattr(item, "_fields"):
                return type(item)(*map(double, item))
            return type(item)((*item, *item)) if len(item) == samples else item
        if not isinstance(item, Tensor) or item.dim() <= dim:
            return item
        rows = item.shape[dim]
        if rows % samples or not rows or (rows != samples and not packed):
            return item
        if item.device.type == "meta" or item.requires_grad:
            shape = list(item.shape)
            shape[dim] *= 2
            return torch.empty(shape, dtype=item.dtype, device="meta")
        return torch.cat((item, item), dim=dim)

    if isinstance(batch, (tuple, list)):
        doubled = [double(item) for item in batch]
        return type(batch)(*doubled) if hasattr(batch, "_fields") else type(batch)(doubled)
    return double(batch)


def value_range(tensor: Tensor) -> tuple[int | None, int | None]:
    """The smallest and largest value of an integer tensor, None of any other."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.device.type == "meta":
        return None, None
    if tensor.dtype == torch.bool or not tensor.numel():
        return None, None
    low, high = tensor.aminmax()
    return int(low), int(high)


def tokens_per_sample(batch: Any, samples: int | None) -> int | None:
    """The length of the first integer input of shape (samples, length)."""
    found: list[int] = []

    def check(_path: str, tensor: Tensor) -> Tensor:
        if tensor.dim() == 2 and tensor.shape[0] == samples and tensor.dtype == torch.int64:
            found.append(tensor.shape[1])
        return tensor

    map_tensors(batch, check)
    return found[0] if found else None
