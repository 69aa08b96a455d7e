"""Give every rank of a placement its coordinates, and every axis its process groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from estimator.errors import StrategyError
from estimator.placement.placement import NodeKind, Placement
from estimator.placement.process_groups import (
    ProcessGroup,
    groups_along,
    slowest_network,
    whole_group,
)
from estimator.workload import Parallelism, Strategy
from estimator.workload.layout import DATA_PARALLEL, Layout

Indices = NDArray[np.intp]

# In the order in which ranks count, the last one fastest; torchtitan's.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# Ranks that differ in data alone are one axis more: those that reduce gradients over all replicas.
DP = "dp"


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of a placement as coordinates along the axes of a parallelism.

    Raises StrategyError where the axes do not multiply to the ranks.
    """

    placement: Placement
    parallelism: Parallelism

    def __post_init__(self) -> None:
        if self.parallelism.world_size != self.placement.ranks:
            raise StrategyError(
                f"the axes of the mesh multiply to {self.parallelism.world_size} ranks, but "
                f"'{self.placement.allocation}' has {self.placement.ranks}; change one of the axes"
            )

    @classmethod
    def data_parallel(
        cls, placement: Placement, strategy: Strategy, *, micro_batches: int = 1
    ) -> Mesh:
        """All ranks along the data-parallel axes; raises StrategyError."""
        shard = None if strategy.kind != "fsdp" else strategy.shard or placement.ranks
        return cls(placement, _data_parallel(placement.ranks, shard, micro_batches))

    @classmethod
    def laid_out(
        cls, placement: Placement, layout: Layout, strategy: Strategy, *, micro_batches: int = 1
    ) -> Mesh:
        """All ranks along the axes of a layout; raises StrategyError."""
        if layout is DATA_PARALLEL:
            return cls.data_parallel(placement, strategy, micro_batches=micro_batches)
        return cls(placement, _laid_out(layout, placement.ranks, strategy, micro_batches))

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks along each of `AXES`."""
        return tuple(getattr(self.parallelism, axis) for axis in AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands along each axis."""
        place = np.unravel_index(rank, self.shape)
        return {axis: int(number) for axis, number in zip(AXES, place, strict=True)}

    def members(self, axis: str) -> Indices:
        """The ranks of every group along an axis, in order of their coordinate: (groups, ranks)."""
        ranks = np.arange(self.placement.ranks).reshape(self.shape)
        if axis == DP:
            return ranks.transpose(0, 4, 1, 2, 3).reshape(-1, self.parallelism.replicas)
        if axis == "dp_shard":
            # Ranks that share the tokens of samples hold the same weights: they shard them too.
            merged = ranks.transpose(0, 1, 4, 2, 3)
            return merged.reshape(-1, self.parallelism.shards)
        if axis in ("ep", "expert_dp", "expert_shard"):
            return self._experts(ranks, axis)
        place = AXES.index(axis)
        return np.moveaxis(ranks, place, -1).reshape(-1, self.shape[place])

    def _experts(self, ranks: Indices, axis: str) -> Indices:
        """Ranks that share experts are neighbours, those that share tokens among them."""
        pp, replicate, *_ = self.shape
        shared = ranks.reshape(pp, replicate, -1, self.parallelism.ep)
        if axis == "ep":
            return shared.reshape(-1, self.parallelism.ep)
        if axis == "expert_shard":
            return shared.swapaxes(2, 3).reshape(-1, shared.shape[2])
        return shared.transpose(0, 3, 1, 2).reshape(pp * self.parallelism.ep, -1)

    def groups(self, axis: str) -> tuple[tuple[ProcessGroup, NodeKind], ...]:
        """The unlike process groups along an axis, each with the kind of node that costs it."""
        members = self.members(axis)
        size = members.shape[1]
        if size == self.placement.ranks:
            return ((whole_group(self.placement), slowest_network(self.placement)),)
        if size == 1:
            return ()
        return groups_along(self.placement, members)

    def global_batch(self, batches: Sequence[int]) -> int:
        """Samples of a step, by those of a rank and micro-batch in each group of the allocation."""
        if batches.count(batches[0]) == len(batches):
            return batches[0] * self.parallelism.dp * self.parallelism.micro_batches
        per_rank = zip(self.placement.allocation.groups, batches, strict=True)
        samples = sum(group.ranks * batch for group, batch in per_rank)
        return samples * self.parallelism.micro_batches


@lru_cache(maxsize=4096)
def _data_parallel(ranks: int, shard: int | None, micro_batches: int) -> Parallelism:
    return Parallelism.data_parallel(ranks, shard=shard, micro_batches=micro_batches)


@lru_cache(maxsize=4096)
def _laid_out(layout: Layout, ranks: int, strategy: Strategy, micro_batches: int) -> Parallelism:
    return layout.parallelism(ranks, strategy, micro_batches=micro_batches)
