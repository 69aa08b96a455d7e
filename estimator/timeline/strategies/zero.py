"""ZeRO stages 1 and 2: the optimizer's state, and gradients, are sharded; parameters are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, TypeVar

import numpy as np

from estimator.elementwise import Array
from estimator.graph.memory.peak import Bytes
from estimator.graph.memory.sizes import StepTensors
from estimator.graph.memory.step import (
    COPY_IN,
    RAN,
    REDUCE,
    RESHARD,
    RUN,
    Holding,
    Ledger,
    MicroBatchMemory,
    Update,
    at,
)
from estimator.machines.profile import CollectiveName
from estimator.timeline.rank.rules import Bucket, rules_for
from estimator.timeline.strategies.ddp import BucketedRules
from estimator.workload.strategies import Bucketed, DistributedOptimizer, ZeRO1, ZeRO2

B = TypeVar("B", bound=Bucketed)


class SharedOptimizer(BucketedRules[B]):
    """A rank updates its share; what it has updated is sent to all others."""

    def updates(self, tensors: StepTensors) -> tuple[Update, ...]:
        """Even shares.

        A loop has the temporaries of one tensor at a time, on some rank those of the largest one.
        """
        shared = self.optimizer(tensors, sharded=True)
        even = Bytes(self.optimizer(tensors).single_bytes, shared.together_bytes)
        return (Update(Bytes(0, shared.state_bytes), even),)


@rules_for(ZeRO1)
class ZeroRedundancyOptimizer(SharedOptimizer[ZeRO1]):
    """DDP, whose ranks update whole tensors each and broadcast every one."""

    after_op: ClassVar[CollectiveName | None] = "broadcast"
    waits_for = "reducing gradients and broadcasting parameters"

    def bytes_after(self) -> Array:
        trained = (p for p in self.graph.parameters if p.gradient is not None)
        return np.array([float(parameter.spec.nbytes) for parameter in trained])

    def updates(self, tensors: StepTensors) -> tuple[Update, ...]:
        """ZeroRedundancyOptimizer gives whole tensors to ranks, the largest first, each to the rank
        that has the least so far (torch/distributed/optim/zero_redundancy_optimizer.py, torch
        2.13). Some rank has no less than an even share, and one has the largest tensor; of many
        tensors the fullest rank has little more than that.
        """
        own = self.optimizer(tensors)
        largest = Bytes(own.single_bytes + own.largest_together_bytes)
        return (
            *super().updates(tensors),
            Update(Bytes(own.largest_state_bytes), largest),
        )


class ScatteredGradients(SharedOptimizer[B]):
    """Buckets are reduce-scattered, updated parameters gathered likewise."""

    reduce_op = "reduce_scatter"
    after_op = "all_gather"
    reduced_by = "reduce-scatter"
    norm_op = "all_reduce"
    waits_for = "reducing gradients and gathering parameters"

    def bytes_after(self) -> Array:
        return self.gradient_bytes


@rules_for(DistributedOptimizer)
class BufferedGradients(ScatteredGradients[DistributedOptimizer]):
    """Whole gradients stay on every rank until the update, in the buffer that is reduced."""

    @property
    def in_buckets(self) -> bool:
        return True

    @property
    def cast_copies(self) -> float:
        """Megatron's buffer has the dtype of its reduction: gradients are cast as they are copied
        there.
        """
        return (self.reduced_ratio - 1) / 2

    def held_bucket_bytes(self, gradients_bytes: int) -> int:
        return int(gradients_bytes * self.reduced_ratio)


@rules_for(ZeRO2)
class ZeroStage2(ScatteredGradients[ZeRO2]):
    """Gradients are reduce-scattered bucket by bucket; a rank keeps its shard of each."""

    def holding(self, tensors: StepTensors, buckets: Sequence[Bucket], *, merging: bool) -> Holding:
        if not merging:
            return super().holding(tensors, buckets, merging=merging)
        reductions = [
            Reduction(
                bucket.ready_after, int(bucket.size_bytes * self.reduced_ratio), bucket.size_bytes
            )
            for bucket in buckets
        ]
        ops = tensors.ops
        afters = [
            next(
                (reduction.after for reduction in reductions if reduction.after >= gradient.final),
                ops,
            )
            for gradient in tensors.gradients
        ]
        return Holding(
            parameters=Bytes(tensors.parameters_bytes()),
            updated=Bytes(0, tensors.trained_bytes()),
            updates=(Update.of(self.optimizer(tensors), sharded=True),),
            micro_batches=[
                reduced(tensors, Ledger(ops), afters, reductions, micro)
                for micro in unlike_micro_batches(self.shape.accumulation_steps)
            ],
        )


class Reduction(NamedTuple):
    """Gradients that one reduce-scatter carries, issued once op `after` has run.

    `after` is the number of ops where it follows the whole backward pass. Of the buffer's
    `size_bytes` all ranks together keep `kept_bytes`.
    """

    after: int
    size_bytes: int
    kept_bytes: int


class GradientsBefore(NamedTuple):
    """Which gradients there are before a micro-batch, and whether it reduces its own."""

    held: Literal["nothing", "shards", "whole"]
    reduces: bool


def unlike_micro_batches(micro_batches: int, gradient_sync: bool = True) -> list[GradientsBefore]:
    """The micro-batches of a step, among which is the one with the peak."""
    if micro_batches == 1:
        return [GradientsBefore("nothing", reduces=True)]
    if gradient_sync:
        return [GradientsBefore("shards", reduces=True)]
    before = GradientsBefore("whole" if micro_batches > 2 else "nothing", reduces=False)
    return [before, GradientsBefore("whole", reduces=True)]


def reduced(
    tensors: StepTensors,
    buffers: Ledger,
    afters: Sequence[int],
    reductions: Sequence[Reduction],
    micro: GradientsBefore,
    reduced_ratio: float = 1.0,
) -> MicroBatchMemory:
    """A micro-batch whose gradients are reduced; gradient k goes after op `afters[k]`.

    Inputs of reductions stand in `buffers` beside what is there already.

    Gradients that are kept whole are added up in the dtype of the reduction, in which an element
    takes `reduced_ratio` times as many bytes.
    """
    unsharded, shards = Ledger(tensors.ops), Ledger(tensors.ops)
    for gradient, after in zip(tensors.gradients, afters, strict=True):
        size, kept = gradient.size_bytes, int(gradient.size_bytes * reduced_ratio)
        gone = at(after, REDUCE) if micro.reduces else unsharded.end
        if micro.held == "whole":
            unsharded.hold(0, gone, kept)
            # In one dtype added in place as it is made, else when its unit has them all.
            gone = at(gradient.final, RAN) if kept == size else at(after, RESHARD)
        elif not micro.reduces and kept != size:
            unsharded.hold(at(after, RAN), gone, kept)
            gone = at(after, RESHARD)
        unsharded.hold(at(gradient.born, RUN), gone, size)
    if micro.held == "shards":
        shards.hold(0, shards.end, sum(reduction.kept_bytes for reduction in reductions))
    # One reduce-scatter is in flight: its input is freed when the next one's is allocated.
    freed = [*(at(reduction.after, RESHARD) for reduction in reductions[1:]), buffers.end]
    for reduction, end in zip(reductions, freed, strict=False) if micro.reduces else ():
        after, size = reduction.after, reduction.size_bytes
        if (start := at(after, COPY_IN)) < end:
            buffers.hold(start, end, size)
        if tensors.graph.target == "cpu":
            # gloo reduces a copy of its input (ProcessGroupGloo.cpp, torch 2.13).
            buffers.hold(at(after, REDUCE), at(after, REDUCE) + 1, size)
        if micro.held != "shards":
            shards.hold(at(after, REDUCE), shards.end, reduction.kept_bytes)
    return MicroBatchMemory(
        buffers=buffers.levels(), gradients=unsharded.levels(), gradient_shards=shards.levels()
    )
