"""ZeRO stages 1 and 2: the optimizer's state, and gradients, are sharded; parameters are not."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from estimator.machines.profile import CollectiveName
from estimator.timeline.rank.rules import strategy
from estimator.timeline.strategies.ddp import DistributedDataParallel

Array = NDArray[np.float64]


@strategy("zero1")
class ZeroRedundancyOptimizer(DistributedDataParallel):
    """DDP, whose ranks update a share each and broadcast every tensor that they have updated."""

    after_op: ClassVar[CollectiveName | None] = "broadcast"

    def shards(self, ranks: Any) -> Any:
        return ranks

    def update_share(self, ranks: Any) -> Any:
        return 1.0 / ranks

    def bytes_after(self) -> Array:
        trained = (p for p in self.graph.parameters if p.gradient is not None)
        return np.array([float(parameter.spec.nbytes) for parameter in trained])

    def words(self, ranks: int) -> str:
        return f"reducing gradients and broadcasting parameters of {ranks} ranks"


@strategy("zero2")
class ZeroStage2(ZeroRedundancyOptimizer):
    """Gradients are reduce-scattered bucket by bucket, updated parameters gathered likewise."""

    reduce_op = "reduce_scatter"
    after_op = "all_gather"
    reduced_by = "reduce-scatter"
    norm_op = "all_reduce"

    def bytes_after(self) -> Array:
        return self.gradient_bytes

    def words(self, ranks: int) -> str:
        return f"reducing gradients and gathering parameters of {ranks} ranks"


@strategy("distributed-optimizer")
class DistributedOptimizer(ZeroStage2):
    """The same traffic as of stage 2; the whole gradients stay on every rank until the update."""
