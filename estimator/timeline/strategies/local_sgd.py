"""Local SGD: ranks train by themselves and average their parameters every few steps.

torch/distributed/algorithms/model_averaging (torch 2.13), averagers.py and utils.py: parameters
that have a gradient are copied into one flat tensor, divided by the number of ranks, all-reduced
and copied back. A step is the mean over those from one average to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from estimator.elementwise import Array
from estimator.graph.memory.sizes import StepTensors
from estimator.graph.memory.step import Bytes, Update
from estimator.kernels.durations import Durations
from estimator.timeline.collectives.costs import CollectiveModel
from estimator.timeline.rank.rules import RankLane, RankRequest, Ranks, rules_for
from estimator.timeline.rank.updates import copies_s
from estimator.timeline.strategies.ddp import BucketedNetwork, ReplicaRules
from estimator.workload.strategies import LocalSGD

# Of the flat tensor: it is filled, divided, and copied back.
_PASSES = 3


class AveragingNetwork(BucketedNetwork):
    """One all-reduce of all parameters, of which each step has its part."""

    def _buffers_s(self, ranks: Ranks) -> Any:
        # Nothing wraps the model that would send its buffers.
        return 0.0

    def _after_s(self, ranks: Ranks, reduce: CollectiveModel) -> tuple[Any, Any]:
        seconds, unknown = super()._after_s(ranks, reduce)
        return seconds / self._rules.strategy.every, unknown


@rules_for(LocalSGD)
class PeriodicAveraging(ReplicaRules[LocalSGD]):
    """No gradient is sent; parameters are all-reduced after the update of some steps."""

    network_class = AveragingNetwork
    after_op = "all_reduce"

    def bytes_after(self) -> Array:
        return np.array([float(self._averaged_bytes())])

    def _averaged_bytes(self) -> int:
        return sum(p.spec.nbytes for p in self.graph.parameters if p.gradient is not None)

    def lane(self, request: RankRequest, durations: Durations) -> RankLane:
        own = super().lane(request, durations)
        if not request.merging:
            return own
        sizes = [self._averaged_bytes()]
        copy_s = copies_s(request.profile, sizes, request.devices_busy, request.cache)
        return replace(own, copy_back_s=_PASSES * float(copy_s.sum()) / self.strategy.every)

    def updates(self, tensors: StepTensors) -> tuple[Update, ...]:
        """Once the optimizer has updated there is the flat tensor beside its state."""
        (update,) = super().updates(tensors)
        return update, Update(update.state, Bytes(tensors.trained_bytes()))

    def held_bucket_bytes(self, gradients_bytes: int) -> int:
        return 0

    def assumptions(self) -> Iterator[str]:
        yield (
            f"parameters are averaged after every {self.strategy.every} steps, over which a step "
            "is the mean; that more steps may be needed is not counted"
        )

    def words(self, ranks: int) -> str:
        return f"averaging parameters of {ranks} ranks"
