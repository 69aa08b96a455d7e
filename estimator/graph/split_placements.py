"""Say which part of a tensor a rank holds: all, a shard of one dimension, or a term of a sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from estimator.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class Shard:
    """An equal part of each rank along `dim`.

    A dimension may be several merged ones (a view of tokens of all samples as rows): what is
    divided has `size` elements, which stand `inner` apart. Plain ones have all elements, 1 apart.
    """

    dim: int
    size: int
    inner: int = 1

    @classmethod
    def along(cls, spec: TensorSpec, dim: int) -> Shard:
        """All of one dimension, which may be counted from the end."""
        dim %= len(spec.shape)
        return cls(dim, spec.shape[dim])

    def at(self, dim: int) -> Shard:
        """The same shard where its dimension has another place."""
        return Shard(dim, self.size, self.inner)


@dataclass(frozen=True, slots=True)
class Routed:
    """Rows along `dim` that are with their experts: `load` times as many on the busiest rank."""

    dim: int
    load: float = 1.0


# A term of a sum over all ranks; a mean of equal parts counts as one.
PARTIAL: Literal["partial"] = "partial"
# None: every rank holds all of it.
Placement = Shard | Routed | Literal["partial"] | None


def local_spec(spec: TensorSpec, placement: Placement, degree: int) -> TensorSpec:
    """What one of `degree` ranks holds of a tensor."""
    if isinstance(placement, Routed):
        shape = list(spec.shape)
        shape[placement.dim] = math.ceil(shape[placement.dim] * placement.load)
        return TensorSpec(tuple(shape), spec.dtype)
    if not isinstance(placement, Shard):
        return spec
    dim = placement.dim
    shape = list(spec.shape)
    shape[dim] = -(-shape[dim] // degree)
    strides = spec.strides
    if strides is not None:
        # What lies outside the divided dimension moves closer together.
        own = strides[dim]
        strides = tuple(
            stride // degree if own < stride and stride % degree == 0 else stride
            for stride in strides
        )
    return TensorSpec(tuple(shape), spec.dtype, strides)


def viewed(shard: Shard, old: Sequence[int], new: Sequence[int], degree: int) -> Shard | None:
    """Where a shard is after a view of shape `old` as `new`; None where no dimension holds it.

    >>> viewed(Shard(1, 8), (4, 8, 6), (32, 6), 2)
    Shard(dim=0, size=8, inner=1)
    >>> viewed(Shard(0, 8), (32, 6), (4, 8, 6), 2)
    Shard(dim=1, size=8, inner=1)
    >>> viewed(Shard(2, 64), (4, 8, 64), (4, 8, 16, 4), 2)
    Shard(dim=2, size=16, inner=1)
    """
    # Elements of the whole tensor between neighbours of the divided part, and past all of it.
    step = shard.inner * math.prod(old[shard.dim + 1 :])
    end = step * shard.size
    behind = 1
    found: tuple[int, int, int] | None = None
    for dim in range(len(new) - 1, -1, -1):
        first, behind = behind, behind * new[dim]
        # The outermost dimension that holds some of it is the one that is divided.
        if first < end and behind > step and new[dim] > 1:
            start = max(step, first)
            found = dim, min(end, behind) // start, start // first
    if found is None:
        return None
    dim, size, inner = found
    if size % degree or new[dim] % (inner * size):
        return None
    # The outermost part of a dimension divides it as the whole would be.
    return Shard(dim, new[dim]) if inner * size == new[dim] else Shard(dim, size, inner)
