"""Compile one rank's step into a compact program: lane times, buckets, update, errors.

Source: torch/csrc/distributed/c10d/reducer.cpp, `compute_bucket_assignment_by_size` and
`Reducer::rebuild_buckets`: after the first step buckets follow the order in which gradients became
ready, one chain of buckets for each dtype, each closed once its size reaches the cap; the first
bucket of a chain has a cap of its own.

A program belongs to a graph at one batch size, a machine type, a number of busy devices and a
strategy. It holds no allocation: what the network costs is added where the step is answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from estimator.cache import Cache
from estimator.graph.costs.utilization import StepFlops, step_flops
from estimator.graph.ir.op_graph import BoundGraph, OpGraph
from estimator.graph.memory.peak import ShardedMemory
from estimator.graph.memory.step import Reduction, step_memory
from estimator.kernels.durations import (
    Durations,
    bound_of,
    costed,
    kernel_groups,
    op_durations,
    part_durations,
    structure_of,
)
from estimator.machines.profile import DeviceKind, MachineProfile, Provenance
from estimator.timeline.rank.lanes import (
    MicroBatches,
    copies_of_one_rank_s,
    hook_seconds,
    segment_seconds,
    sharded_passes,
    unit_copies_s,
)
from estimator.timeline.rank.layer_collectives import (
    NO_LAYER_COLLECTIVES,
    LayerCollectives,
    LayerCollectiveSeconds,
)
from estimator.timeline.rank.updates import (
    Trained,
    accumulate_s,
    added_to_update,
    cast_passes,
    copies_s,
    trained_of,
    unscale_s,
    update_cost,
    update_lanes,
)
from estimator.workload import Strategy
from estimator.workload.precision import peak_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that one all-reduce carries; ready once op `ready_after` has run."""

    size_bytes: int
    tensors: int
    ready_after: int


def gradient_buckets(
    graph: OpGraph, strategy: Strategy, *, tensor_dtype: str | None = None
) -> tuple[Bucket, ...]:
    """The buckets of a graph, in the order in which DDP launches them."""
    last_op = len(graph.ops) - 1
    closed: list[Bucket] = []
    open_buckets: dict[str, Bucket] = {}
    first_done: set[str] = set()
    for parameter in graph.parameters:
        if parameter.is_expert:
            continue
        dtype = tensor_dtype or parameter.spec.dtype
        ready = last_op if parameter.ready_after is None else parameter.ready_after
        grown = open_buckets.pop(dtype, Bucket(size_bytes=0, tensors=0, ready_after=-1))
        grown = Bucket(
            size_bytes=grown.size_bytes + parameter.spec.nbytes,
            tensors=grown.tensors + 1,
            ready_after=max(grown.ready_after, ready),
        )
        cap = strategy.bucket_cap_bytes if dtype in first_done else strategy.first_cap_bytes
        if not strategy.bucketed or grown.size_bytes >= cap:
            closed.append(grown)
            first_done.add(dtype)
        else:
            open_buckets[dtype] = grown
    closed.extend(open_buckets.values())
    # The reducer launches bucket k only after every bucket before it is ready.
    launched, ready = [], -1
    for bucket in closed:
        ready = max(ready, bucket.ready_after)
        launched.append(
            Bucket(size_bytes=bucket.size_bytes, tensors=bucket.tensors, ready_after=ready)
        )
    return tuple(launched)


Array = NDArray[np.float64]

# What a copy costs is fitted from copies of other sizes.
COPIES_ERROR = 0.2
# What an update is taken to be off by where the profile does not say: as for copies, the fit is of
# few sizes (`estimator probe` on an EPYC server: up to 15 %).
_UPDATE_ERROR = 0.2
_ROUNDING = 1e-12
# A median absolute error is 0.6745 standard deviations of a normal error.
MEDIAN_TO_SIGMA = 1 / 0.6745


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """Seconds of one class of ranks: alone on its lane, and what comes after the last collective.

    `ready_s[k]` is the lane time at which bucket k may be reduced, `lane_s` the lane's end. The
    lane is `forward_s + backward_s + host_s + copies_s + layer_collectives_s` (the last is what
    ranks that share layers exchange in micro-batches), and `sharded_lane_s` over the number of
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
    ready_s: Array
    segments_s: Array
    lane_s: float
    sharded_lane_s: float
    forward_s: float
    backward_s: float
    host_s: float
    copies_s: float
    layer_collectives_s: float
    exchanged: LayerCollectiveSeconds
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
    merging: bool
    micro_batches: int

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
    devices_busy: int,
    merging: bool,
    strategy: Strategy,
    accumulation_steps: int = 1,
    layer_collectives: LayerCollectives | None = None,
    cache: Cache,
) -> StepProgram:
    """The program of a rank on a node where `devices_busy` ranks compute.

    `merging` says whether there are other ranks to synchronise gradients with. Raises ProfileError,
    WorkloadError.
    """

    def compiled() -> StepProgram:
        bound = bound_of(graph, batch, cache)
        asked = _ProgramRequest(
            bound=bound,
            profile=costed(profile, cache),
            devices_busy=devices_busy,
            merging=merging,
            strategy=strategy,
            accumulation_steps=accumulation_steps,
            trained=trained_of(bound, cache),
            updated=trained_of(
                bound, cache, sharded=merging and strategy.keeps.parameters == "shard"
            ),
            cache=cache,
        )
        return _compile(asked, layer_collectives)

    return cache.get(
        "program",
        (graph, profile),
        compiled,
        *(batch, devices_busy, merging, strategy, accumulation_steps, layer_collectives),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProgramRequest:
    """What a program is compiled of."""

    bound: BoundGraph
    profile: MachineProfile
    devices_busy: int
    merging: bool
    strategy: Strategy
    accumulation_steps: int
    trained: Trained
    updated: Trained
    cache: Cache
    exchanged: LayerCollectiveSeconds = NO_LAYER_COLLECTIVES

    @property
    def graph(self) -> OpGraph:
        return self.bound.graph

    @property
    def machine(self) -> tuple[MachineProfile, int, Cache]:
        """The machine, how many of its devices are busy, and what is known of it."""
        return self.profile, self.devices_busy, self.cache


def _compile(asked: _ProgramRequest, layer_collectives: LayerCollectives | None) -> StepProgram:
    bound, strategy, accumulation_steps = asked.bound, asked.strategy, asked.accumulation_steps
    kernels_alone = durations = _durations(asked)
    if layer_collectives:
        exchanged = layer_collectives.seconds(bound, durations, accumulation_steps)
        asked = replace(asked, exchanged=exchanged)
    if layer_collectives_s := asked.exchanged.total_s * accumulation_steps:
        durations = asked.exchanged.beside(durations)
    sharding = asked.merging and strategy.keeps.parameters == "shard"
    accumulate = (accumulation_steps - 1) * accumulate_s(asked.trained, *asked.machine)
    if strategy.offload and not sharding:
        passes = sharded_passes(asked.graph, strategy, asked.cache)
        accumulate += accumulation_steps * copies_of_one_rank_s(asked.profile, passes)
    lane = (_sharded_lane if sharding else _bucketed_lane)(asked, durations)
    lanes, update_s, launch_s, update = _update(asked, lane.lanes, sharding)
    shared = sharding and strategy.gradient_sync
    copies_s = lane.copies_s + (0.0 if shared else accumulate)
    end = lanes.ends_s(lanes.count - 1)
    lane_s = lanes.end_s * (accumulation_steps if sharding else 1)
    lane_s += (lane.copies_s if sharding else 0.0) + (0.0 if shared else accumulate)
    is_forward = structure_of(asked.graph, asked.cache).is_forward
    forward_s = float(kernels_alone.device_s[is_forward].sum()) * accumulation_steps
    backward_s = float(kernels_alone.device_s[~is_forward].sum()) * accumulation_steps
    host_s = lane_s - copies_s - forward_s - backward_s - layer_collectives_s
    kernels = _kernel_seconds(asked, kernels_alone)
    kernels_s = float(kernels_alone.device_s.sum()) or 1.0
    variance_s2 = _variance(asked, kernels, durations.shared_error * kernels_s)
    return StepProgram(
        bound=bound,
        profile=asked.profile,
        strategy=strategy,
        buckets=lane.buckets,
        ready_s=end[[bucket.ready_after for bucket in lane.buckets]] + accumulate,
        segments_s=lane.segments_s,
        lane_s=lane_s,
        sharded_lane_s=accumulate if shared else 0.0,
        forward_s=forward_s,
        backward_s=backward_s,
        # What is left of sums in another order is no time of the host.
        host_s=host_s if host_s > _ROUNDING * lane_s else 0.0,
        copies_s=copies_s,
        layer_collectives_s=layer_collectives_s,
        exchanged=asked.exchanged,
        copy_back_s=lane.copy_back_s,
        update_s=update_s,
        # A host that is ahead has issued the update already: then it is all the device's.
        update_launch_s=min(launch_s, update_s),
        update_error=_UPDATE_ERROR if update.relative_error is None else update.relative_error,
        update_source=update.source,
        kernels_variance_s2=variance_s2 + _hidden_host_s2(asked, lanes, host_s),
        kernels=kernels,
        memory=_memory(asked, lane.buckets),
        flops=asked.cache.get("flops", (bound,), lambda: step_flops(bound)),
        in_grid_ratio=float(kernels_alone.device_s[durations.in_grid].sum()) / kernels_s,
        durations=durations,
        lanes=lanes,
        accumulate_s=accumulate,
        merging=asked.merging,
        micro_batches=accumulation_steps,
    )


def _update(
    asked: _ProgramRequest, lanes: MicroBatches, sharding: bool
) -> tuple[MicroBatches, float, float, Provenance]:
    """(lanes, seconds of the update behind them, those that no sharding shortens, their source)."""
    graph, profile, strategy, trained = asked.graph, asked.profile, asked.strategy, asked.updated
    stored_ratio = strategy.shard_dtypes(graph.precision).stored_ratio
    stored_ratio *= strategy.master_ratio(graph.precision)
    kind: DeviceKind | None = "cpu" if strategy.offload else None
    update_s, launch_s, source = update_cost(
        trained, graph, profile, asked.devices_busy, sharding, stored_ratio, kind
    )
    added = added_to_update(trained, graph, strategy, asked.machine)
    update_s, launch_s = update_s + added.seconds, launch_s + added.fixed_s
    if graph.grad_scaler:
        update_s += unscale_s(trained, graph, *asked.machine)
    elif not (sharding or strategy.offload) and (
        both := update_lanes(trained, graph, profile, stored_ratio)
    ):
        host_s, device_s = both
        lanes, update_s = lanes.looped(host_s + added.host_s, device_s + added.device_s)
    return lanes, update_s, launch_s, source


def _durations(asked: _ProgramRequest) -> Durations:
    bound, graph, profile = asked.bound, asked.graph, asked.profile
    if not graph.has_step_times:
        return op_durations(bound, profile, devices_busy=asked.devices_busy, cache=asked.cache)
    alone_s = update_cost(asked.trained, graph, profile, 1, False)[0]
    return part_durations(bound, profile, devices_busy=asked.devices_busy, update_s=alone_s)


def _memory(asked: _ProgramRequest, buckets: tuple[Bucket, ...]) -> ShardedMemory:
    bound, strategy = asked.bound, asked.strategy
    threads = asked.profile.devices[0].threads

    def made() -> ShardedMemory:
        return step_memory(
            bound,
            optimizer=bound.graph.optimizer,
            strategy=strategy,
            merging=asked.merging,
            buckets=[Reduction(after=b.ready_after, size_bytes=b.size_bytes) for b in buckets],
            micro_batches=asked.accumulation_steps,
            threads=threads,
            structure=structure_of(bound.graph, asked.cache),
        )

    details = asked.merging, strategy, asked.accumulation_steps, threads
    return asked.cache.get("memory", (bound,), made, *details)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankLane:
    """A rank's lane under a strategy, with what that adds to it."""

    lanes: MicroBatches
    copies_s: float
    buckets: tuple[Bucket, ...]
    copy_back_s: float
    segments_s: Array


def _bucketed_lane(asked: _ProgramRequest, durations: Durations) -> _RankLane:
    """All micro-batches of DDP and its like; the last one alone synchronises gradients."""
    graph, strategy = asked.graph, asked.strategy
    buckets: tuple[Bucket, ...] = ()
    if asked.merging:
        buckets = asked.cache.get(
            "buckets", (graph,), lambda: gradient_buckets(graph, strategy), strategy
        )
    sizes = [bucket.size_bytes for bucket in buckets]
    back_s = copies_s(asked.profile, sizes, asked.devices_busy, asked.cache)
    each_s = back_s * (1 + cast_passes(strategy, graph.precision))
    last_host_s, last_device_s = _ddp_costs(asked, durations, buckets, each_s)
    return _RankLane(
        lanes=MicroBatches(
            host_s=durations.host_s,
            device_s=durations.device_s,
            last_host_s=last_host_s,
            last_device_s=last_device_s,
            count=asked.accumulation_steps,
            is_shared=graph.target == "cpu",
            awaited=durations.awaited,
        ),
        copies_s=float(each_s.sum()) if asked.profile.host else 0.0,
        buckets=buckets,
        copy_back_s=0.0 if strategy.holds_gradients_in_buckets else float(back_s.sum()),
        segments_s=np.zeros(0),
    )


def _sharded_lane(asked: _ProgramRequest, durations: Durations) -> _RankLane:
    """One micro-batch of FSDP, and the copies of all: each ends when its gradients are reduced."""
    accumulation_steps = asked.accumulation_steps
    passes = sharded_passes(asked.graph, asked.strategy, asked.cache)
    host_s = durations.host_s + hook_seconds(asked.bound, passes, asked.profile)
    lanes = MicroBatches(
        host_s=host_s,
        device_s=durations.device_s,
        last_host_s=host_s,
        last_device_s=durations.device_s,
        count=1,
        is_shared=asked.graph.target == "cpu",
        awaited=durations.awaited,
    )
    out_s, in_s = unit_copies_s(passes, *asked.machine)
    reducing = accumulation_steps if asked.strategy.gradient_sync else 1
    copied_s = accumulation_steps * out_s[list(passes.gathered)].sum()
    copied_s += reducing * in_s[[0, *passes.reduced]].sum()
    summed = asked.updated if asked.strategy.gradient_sync else asked.trained
    sums_s = np.array([(accumulation_steps - 1) * accumulate_s(summed, *asked.machine)])
    segments_s = np.concatenate([segment_seconds(lanes, passes), out_s, in_s, sums_s])
    return _RankLane(
        lanes=lanes,
        copies_s=float(copied_s),
        buckets=(),
        copy_back_s=0.0,
        segments_s=segments_s,
    )


def _kernel_seconds(
    asked: _ProgramRequest, durations: Durations
) -> dict[tuple[str, str], tuple[float, float]]:
    """(family, source) → seconds of one micro-batch and the error on them, in seconds."""
    structure = structure_of(asked.graph, asked.cache)
    groups = asked.cache.get(
        "kernel groups",
        (asked.bound, asked.profile),
        lambda: kernel_groups(structure, durations.sources),
    )
    return groups.seconds(durations.device_s, durations.relative_errors)


def _variance(
    asked: _ProgramRequest, kernels: Mapping[tuple[str, str], tuple[float, float]], shared_s: float
) -> float:
    """Families, and what ranks exchange, err independently, ops of one family together."""
    errors_s = [*(error_s for _, error_s in kernels.values()), asked.exchanged.error_s]
    each_s2 = sum((MEDIAN_TO_SIGMA * error_s) ** 2 for error_s in errors_s)
    return (each_s2 + shared_s**2) * asked.accumulation_steps**2


def _hidden_host_s2(asked: _ProgramRequest, lanes: MicroBatches, exposed_s: float) -> float:
    """What a slower host adds beyond the error of what is exposed of it, squared."""
    host = asked.profile.host
    error = (host and host.provenance.relative_error) or 0.0
    more_s = lanes.slower_host_s(error) * asked.accumulation_steps / lanes.count
    return MEDIAN_TO_SIGMA**2 * max(more_s**2 - (error * exposed_s) ** 2, 0.0)


def _ddp_costs(
    asked: _ProgramRequest, durations: Durations, buckets: tuple[Bucket, ...], each_s: Array
) -> tuple[Array, Array]:
    """Seconds of host and device with what DDP adds to each op: copies and its own host work."""
    host = asked.profile.host
    if not buckets or host is None:
        return durations.host_s, durations.device_s
    host_s, device_s = np.zeros(len(durations.host_s)), np.zeros(len(durations.host_s))
    host_s[0] = host.ddp_step_s
    ready = [bucket.ready_after for bucket in buckets]
    tensors = np.array([bucket.tensors for bucket in buckets])
    np.add.at(device_s, ready, each_s)
    np.add.at(host_s, ready, host.ddp_bucket_s + tensors * host.backward_op_s)
    return durations.host_s + host_s, durations.device_s + device_s
