"""Compile one rank's step into a compact program: lane times, buckets, update, and their errors.

A program belongs to a graph at one batch size, a machine type, a number of busy devices and a
strategy. It holds no allocation: what the network costs is added where the step is answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimator.cache import Cache
from estimator.graph.costs import family_of
from estimator.graph.ops import BoundGraph, OpGraph
from estimator.graph.shard_play import Reduction
from estimator.graph.sharded_memory import ShardedMemory
from estimator.graph.step_memory import step_memory
from estimator.graph.utilization import StepFlops, step_flops
from estimator.profile import MachineProfile
from estimator.timeline.buckets import Bucket, gradient_buckets
from estimator.timeline.durations import Durations, op_durations
from estimator.timeline.lanes import MicroBatches
from estimator.timeline.passes import accumulate_s, copy_s, unscale_s
from estimator.timeline.shard_costs import (
    hook_seconds,
    segment_seconds,
    sharded_passes,
    unit_copies_s,
)
from estimator.timeline.step_times import part_durations
from estimator.timeline.updates import update_cost, update_lanes
from estimator.typical import with_typical_costs
from estimator.workload import Strategy, peak_dtype

Array = NDArray[np.float64]

# What a copy costs is fitted from copies of other sizes.
COPIES_ERROR = 0.2
_ROUNDING = 1e-12
# A median absolute error is 0.6745 standard deviations of a normal error.
MEDIAN_TO_SIGMA = 1 / 0.6745


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """Seconds of one class of ranks: alone on its lane, and what comes after the last collective.

    `ready_s[k]` is the lane time at which bucket k may be reduced, `lane_s` the lane's end. The
    lane is `forward_s + backward_s + host_s + copies_s`, and `sharded_lane_s` over the number of
    shards. `update_launch_s` is the part of the update that sharding does not shorten;
    `segments_s` is what FSDP computes in a micro-batch: between passes through its units, forward
    then backward, copying each unit out of a buffer, each one's gradients into one, and adding up
    the gradients of all micro-batches. `kernels_variance_s2` is the sum of the squared errors (one
    standard deviation) of the kernel families, and of what they share, in s². `flops` are those of
    a micro-batch; `in_grid_ratio` is the share of kernel time whose exact call the probe has timed.
    """

    bound: BoundGraph
    profile: MachineProfile
    strategy: Strategy
    buckets: tuple[Bucket, ...]
    bucket_bytes: Array
    ready_s: Array
    segments_s: Array
    lane_s: float
    sharded_lane_s: float
    forward_s: float
    backward_s: float
    host_s: float
    copies_s: float
    copy_back_s: float
    update_s: float
    update_launch_s: float
    update_error: float
    update_source: str
    kernels_variance_s2: float
    kernels: Mapping[tuple[str, str], tuple[float, float]]
    memory: ShardedMemory
    flops: StepFlops
    in_grid_ratio: float
    durations: Durations
    lanes: MicroBatches
    accumulate_s: float

    @property
    def buckets_bytes(self) -> float:
        """Bytes of all buckets together."""
        return float(self.bucket_bytes.sum())

    @property
    def peak_flops_per_s(self) -> float | None:
        """The device's dense peak in the dtype that the model computes in."""
        dtype = peak_dtype(self.bound.graph.precision)
        return self.profile.devices[0].peak_flops_per_s.get(dtype)


def step_program(
    graph: OpGraph,
    profile: MachineProfile,
    *,
    batch: int | None,
    busy: int,
    merging: bool,
    strategy: Strategy,
    accumulation_steps: int = 1,
    cache: Cache,
) -> StepProgram:
    """The program of a rank on a node where `busy` ranks compute.

    `merging` says whether there are other ranks to synchronise gradients with. Raises ProfileError,
    WorkloadError.
    """

    def compiled() -> StepProgram:
        bound = cache.get("bound", (graph,), lambda: graph.at(batch), batch)
        known = cache.get("typical", (profile,), lambda: with_typical_costs(profile))
        return _compile(bound, known, busy, merging, strategy, accumulation_steps, cache)

    return cache.get(
        "program",
        (graph, profile),
        compiled,
        *(batch, busy, merging, strategy, accumulation_steps),
    )


def _compile(
    bound: BoundGraph,
    profile: MachineProfile,
    busy: int,
    merging: bool,
    strategy: Strategy,
    accumulation_steps: int,
    cache: Cache,
) -> StepProgram:
    graph = bound.graph
    if graph.has_step_times:
        alone_s = update_cost(bound, profile, 1, False)[0]
        durations = part_durations(bound, profile, devices_busy=busy, update_s=alone_s)
    else:
        durations = op_durations(bound, profile, devices_busy=busy, cache=cache)
    sharding = merging and strategy.kind == "fsdp"
    accumulate = (accumulation_steps - 1) * accumulate_s(bound, profile, busy, cache)
    make = _sharded_lane if sharding else _bucketed_lane
    lane = make(bound, profile, durations, busy, merging, strategy, accumulation_steps, cache)
    update_s, launch_s, update = update_cost(bound, profile, busy, sharding)
    lanes = lane.lanes
    if graph.grad_scaler:
        update_s += unscale_s(bound, profile, busy, cache)
    elif (both := None if sharding else update_lanes(bound, profile)) is not None:
        lanes, update_s = lanes.looped(*both)
    shared = sharding and strategy.gradient_sync
    copies_s = lane.copies_s + (0.0 if shared else accumulate)
    lane_s = lanes.end_s * (accumulation_steps if sharding else 1)
    lane_s += lane.copies_s if sharding else 0.0
    lane_s += 0.0 if shared else accumulate
    forward = np.array([op.phase == "forward" for op in graph.ops], dtype=bool)
    forward_s = float(durations.device_s[forward].sum()) * accumulation_steps
    backward_s = float(durations.device_s[~forward].sum()) * accumulation_steps
    host_s = lane_s - copies_s - forward_s - backward_s
    kernels = _kernel_seconds(bound, durations)
    kernels_s = float(durations.device_s.sum()) or 1.0
    variance_s2 = _variance(kernels) + (durations.shared_error * kernels_s) ** 2
    end = lanes.ends_s(lanes.count - 1)
    ready_s = [end[bucket.ready_after] for bucket in lane.buckets]
    view = strategy.gradient_as_bucket_view
    copied_back = () if view else lane.buckets
    return StepProgram(
        bound=bound,
        profile=profile,
        strategy=strategy,
        buckets=lane.buckets,
        bucket_bytes=np.array([float(bucket.size_bytes) for bucket in lane.buckets]),
        ready_s=np.array(ready_s) + accumulate,
        segments_s=lane.segments_s,
        lane_s=lane_s,
        sharded_lane_s=accumulate if shared else 0.0,
        forward_s=forward_s,
        backward_s=backward_s,
        # What is left of sums in another order is no time of the host.
        host_s=host_s if host_s > _ROUNDING * lane_s else 0.0,
        copies_s=copies_s,
        copy_back_s=sum(copy_s(profile, b.size_bytes, busy, cache) for b in copied_back),
        update_s=update_s,
        # A host that is ahead has issued the update already: then it is all the device's.
        update_launch_s=min(launch_s, update_s),
        update_error=0.2 if update.relative_error is None else update.relative_error,
        update_source=update.source,
        kernels_variance_s2=variance_s2 * accumulation_steps**2,
        kernels=kernels,
        memory=_memory(bound, merging, strategy, lane.buckets, accumulation_steps),
        flops=step_flops(bound),
        in_grid_ratio=float(durations.device_s[durations.in_grid].sum()) / kernels_s,
        durations=durations,
        lanes=lanes,
        accumulate_s=accumulate,
    )


def _memory(
    bound: BoundGraph,
    merging: bool,
    strategy: Strategy,
    buckets: tuple[Bucket, ...],
    micro_batches: int,
) -> ShardedMemory:
    return step_memory(
        bound,
        optimizer=bound.graph.optimizer,
        strategy=strategy,
        merging=merging,
        buckets=[Reduction(after=b.ready_after, size_bytes=b.size_bytes) for b in buckets],
        micro_batches=micro_batches,
        gradient_sync=strategy.gradient_sync,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lane:
    """A rank's lane under a strategy, with what that adds to it."""

    lanes: MicroBatches
    copies_s: float
    buckets: tuple[Bucket, ...] = ()
    segments_s: Array


def _bucketed_lane(
    bound: BoundGraph,
    profile: MachineProfile,
    durations: Durations,
    busy: int,
    merging: bool,
    strategy: Strategy,
    accumulation_steps: int,
    cache: Cache,
) -> _Lane:
    """All micro-batches of DDP and its like; the last one alone synchronises gradients."""
    buckets = gradient_buckets(bound.graph, strategy) if merging else ()
    copies_s, host_s = _ddp_costs(bound, profile, buckets, busy, cache)
    lanes = MicroBatches(
        host_s=durations.host_s,
        device_s=durations.device_s,
        last_host_s=durations.host_s + host_s,
        last_device_s=durations.device_s + copies_s,
        count=accumulation_steps,
        is_shared=bound.graph.target == "cpu",
    )
    copied_s = float(copies_s.sum())
    return _Lane(lanes=lanes, copies_s=copied_s, buckets=buckets, segments_s=np.zeros(0))


def _sharded_lane(
    bound: BoundGraph,
    profile: MachineProfile,
    durations: Durations,
    busy: int,
    _merging: bool,
    strategy: Strategy,
    accumulation_steps: int,
    cache: Cache,
) -> _Lane:
    """One micro-batch of FSDP, and the copies of all: each ends when its gradients are reduced."""
    passes = sharded_passes(bound.graph, cache)
    host_s = durations.host_s + hook_seconds(bound, passes, profile)
    lanes = MicroBatches(
        host_s=host_s,
        device_s=durations.device_s,
        last_host_s=host_s,
        last_device_s=durations.device_s,
        count=1,
        is_shared=bound.graph.target == "cpu",
    )
    out_s, in_s = unit_copies_s(passes, profile, busy, cache)
    reducing = accumulation_steps if strategy.gradient_sync else 1
    copied_s = accumulation_steps * out_s[[0, *passes.forward, *passes.backward]].sum()
    copied_s += reducing * in_s[[0, *passes.reduced]].sum()
    sums_s = np.array([(accumulation_steps - 1) * accumulate_s(bound, profile, busy, cache)])
    segments_s = np.concatenate([segment_seconds(lanes, passes), out_s, in_s, sums_s])
    return _Lane(lanes=lanes, copies_s=float(copied_s), segments_s=segments_s)


def _kernel_seconds(
    bound: BoundGraph, durations: Durations
) -> dict[tuple[str, str], tuple[float, float]]:
    """(family, source) → seconds of one micro-batch and the error on them, in seconds."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for index, op in enumerate(bound.graph.ops):
        source = durations.sources[index]
        if source == "view":
            continue
        key = (family_of(op.call.target), source)
        seconds, error_s = found.get(key, (0.0, 0.0))
        spent = float(durations.device_s[index])
        found[key] = (seconds + spent, error_s + spent * float(durations.relative_errors[index]))
    return found


def _variance(kernels: Mapping[tuple[str, str], tuple[float, float]]) -> float:
    """Families err independently, ops of one family together."""
    return sum((MEDIAN_TO_SIGMA * error_s) ** 2 for _, error_s in kernels.values())


def _ddp_costs(
    bound: BoundGraph, profile: MachineProfile, buckets: tuple[Bucket, ...], busy: int, cache: Cache
) -> tuple[Array, Array]:
    """Seconds that DDP adds to each op: copies into buckets, and its own host work."""
    copies_s, host_s = np.zeros(len(bound.calls)), np.zeros(len(bound.calls))
    host = profile.host
    if not buckets or host is None:
        return copies_s, host_s
    host_s[0] = host.ddp_step_s
    for bucket in buckets:
        copies_s[bucket.ready_after] += copy_s(profile, bucket.size_bytes, busy, cache)
        host_s[bucket.ready_after] += host.ddp_bucket_s + bucket.tensors * host.backward_op_s
    return copies_s, host_s
