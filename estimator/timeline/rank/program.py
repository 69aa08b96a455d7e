"""Compile one rank's step into a compact program: lane times, buckets, update, errors.

A program belongs to a graph at one batch size, a machine type, a number of busy devices and a
strategy. It holds no allocation: what the network costs is added where the step is answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from estimator.cache import Cache
from estimator.elementwise import Array
from estimator.graph.costs.utilization import StepFlops, step_flops
from estimator.graph.ir.op_graph import BoundGraph
from estimator.graph.memory.peak import ShardedMemory
from estimator.graph.memory.sizes import StepTensors
from estimator.graph.memory.step import MemoryOverStep
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
from estimator.timeline.rank.lanes import MicroBatches
from estimator.timeline.rank.layer_collectives import LayerCollectives, LayerCollectiveSeconds
from estimator.timeline.rank.rules import Bucket, RankRequest, Rules, StepShape
from estimator.timeline.rank.updates import (
    added_to_update,
    trained_of,
    unscale_s,
    update_cost,
    update_lanes,
)
from estimator.workload import Strategy
from estimator.workload.precision import peak_dtype

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
        """The device's dense peak in the dtypes that the model computes in, each by its FLOPs.

        An fp32 model's convolutions run in TF32 where a GPU has it.
        """
        precision, peaks = self.bound.graph.precision, self.profile.devices[0].peak_flops_per_s
        peak, tf32 = peaks.get(peak_dtype(precision)), peaks.get("tfloat32")
        if precision != "fp32" or peak is None or tf32 is None or not self.flops.hardware:
            return peak
        share = self.flops.tf32_by_default / self.flops.hardware
        return 1.0 / (share / tf32 + (1.0 - share) / peak)


def step_program(
    rules: Rules[Any],
    shape: StepShape,
    profile: MachineProfile,
    *,
    batch: int | None,
    devices_busy: int,
    merging: bool,
    cache: Cache,
) -> StepProgram:
    """The program of a rank on a node where `devices_busy` ranks compute.

    `merging` says whether there are other ranks to synchronise gradients with. Raises ProfileError,
    WorkloadError.
    """
    graph, strategy = rules.graph, shape.strategy

    def compiled() -> StepProgram:
        bound = bound_of(graph, batch, cache)
        shards = merging and strategy.keeps.parameters == "shard"
        request = RankRequest(
            bound=bound,
            profile=costed(profile, cache),
            devices_busy=devices_busy,
            merging=merging,
            accumulation_steps=shape.accumulation_steps,
            trained=trained_of(bound, cache),
            updated=trained_of(bound, cache, sharded=shards),
            cache=cache,
        )
        return _compile(request, rules, shape.layer_collectives)

    return cache.get(
        "program",
        (graph, profile),
        compiled,
        *(batch, devices_busy, merging),
        *(strategy, shape.accumulation_steps, shape.layer_collectives),
    )


def _compile(
    request: RankRequest, rules: Rules[Any], layer_collectives: LayerCollectives | None
) -> StepProgram:
    bound, count = request.bound, request.accumulation_steps
    kernels_alone = durations = _durations(request)
    if layer_collectives:
        exchanged = layer_collectives.seconds(bound, durations, count)
        request = replace(request, exchanged=exchanged)
    if layer_collectives_s := request.exchanged.total_s * count:
        durations = request.exchanged.beside(durations)
    lane = rules.lane(request, durations)
    lanes, update_s, launch_s, update = _update(request, rules.strategy, lane.lanes)
    end = lanes.ends_s(lanes.count - 1)
    lane_s = lanes.end_s * lane.repeats + lane.beside_s
    is_forward = structure_of(request.graph, request.cache).is_forward
    forward_s = float(kernels_alone.device_s[is_forward].sum()) * count
    backward_s = float(kernels_alone.device_s[~is_forward].sum()) * count
    host_s = lane_s - lane.copies_s - forward_s - backward_s - layer_collectives_s
    kernels = _kernel_seconds(request, kernels_alone)
    kernels_s = float(kernels_alone.device_s.sum()) or 1.0
    variance_s2 = _variance(request, kernels, durations.shared_error * kernels_s)
    return StepProgram(
        bound=bound,
        profile=request.profile,
        strategy=rules.strategy,
        buckets=lane.buckets,
        ready_s=end[[bucket.ready_after for bucket in lane.buckets]] + lane.accumulate_s,
        segments_s=lane.segments_s,
        lane_s=lane_s,
        sharded_lane_s=lane.accumulate_s if lane.sums_shards else 0.0,
        forward_s=forward_s,
        backward_s=backward_s,
        # What is left of sums in another order is no time of the host.
        host_s=host_s if host_s > _ROUNDING * lane_s else 0.0,
        copies_s=lane.copies_s,
        layer_collectives_s=layer_collectives_s,
        exchanged=request.exchanged,
        copy_back_s=lane.copy_back_s,
        update_s=update_s,
        # A host that is ahead has issued the update already: then it is all the device's.
        update_launch_s=min(launch_s, update_s),
        update_error=_UPDATE_ERROR if update.relative_error is None else update.relative_error,
        update_source=update.source,
        kernels_variance_s2=variance_s2 + _hidden_host_s2(request, lanes, host_s),
        kernels=kernels,
        memory=_memory(request, rules, lane.buckets),
        flops=request.cache.get("flops", (bound,), lambda: step_flops(bound)),
        in_grid_ratio=float(kernels_alone.device_s[durations.in_grid].sum()) / kernels_s,
        durations=durations,
        lanes=lanes,
        accumulate_s=lane.accumulate_s,
        merging=request.merging,
        micro_batches=count,
    )


def _update(
    request: RankRequest, strategy: Strategy, lanes: MicroBatches
) -> tuple[MicroBatches, float, float, Provenance]:
    """(lanes, seconds of the update behind them, those that no sharding shortens, their source)."""
    graph, profile, trained = request.graph, request.profile, request.updated
    sharding = request.merging and strategy.keeps.parameters == "shard"
    stored_ratio = strategy.shard_dtypes(graph.precision).stored_ratio
    stored_ratio *= strategy.master_ratio(graph.precision)
    kind: DeviceKind | None = "cpu" if strategy.updates_on_host else None
    update_s, launch_s, source = update_cost(
        trained, graph, profile, request.devices_busy, sharding, stored_ratio, kind
    )
    added = added_to_update(trained, graph, strategy, request.machine)
    update_s, launch_s = update_s + added.seconds, launch_s + added.fixed_s
    if graph.grad_scaler:
        update_s += unscale_s(trained, graph, *request.machine)
    elif not (sharding or strategy.updates_on_host) and (
        both := update_lanes(trained, graph, profile, stored_ratio)
    ):
        host_s, device_s = both
        lanes, update_s = lanes.looped(host_s + added.host_s, device_s + added.device_s)
    return lanes, update_s, launch_s, source


def _durations(request: RankRequest) -> Durations:
    bound, graph, profile = request.bound, request.graph, request.profile
    if not graph.has_step_times:
        return op_durations(bound, profile, devices_busy=request.devices_busy, cache=request.cache)
    alone_s = update_cost(request.trained, graph, profile, 1, False)[0]
    return part_durations(bound, profile, devices_busy=request.devices_busy, update_s=alone_s)


def _memory(request: RankRequest, rules: Rules[Any], buckets: tuple[Bucket, ...]) -> ShardedMemory:
    bound, threads = request.bound, request.profile.devices[0].threads

    def made() -> ShardedMemory:
        tensors = StepTensors(bound, structure_of(bound.graph, request.cache), threads)
        holding = rules.holding(tensors, buckets, merging=request.merging)
        return MemoryOverStep(tensors, holding).peaks()

    details = request.merging, rules.strategy, request.accumulation_steps, threads
    return request.cache.get("memory", (bound,), made, *details)


def memory_over_step(program: StepProgram, rules: Rules[Any]) -> MemoryOverStep:
    """What a rank holds over the whole step of a program, of which `program.memory` is the peak."""
    structure = structure_of(program.bound.graph, rules.cache)
    tensors = StepTensors(program.bound, structure, program.profile.devices[0].threads)
    holding = rules.holding(tensors, program.buckets, merging=program.merging)
    return MemoryOverStep(tensors, holding)


def _kernel_seconds(
    request: RankRequest, durations: Durations
) -> dict[tuple[str, str], tuple[float, float]]:
    """(family, source) → seconds of one micro-batch and the error on them, in seconds."""
    structure = structure_of(request.graph, request.cache)
    groups = request.cache.get(
        "kernel groups",
        (request.bound, request.profile),
        lambda: kernel_groups(structure, durations.sources),
    )
    return groups.seconds(durations.device_s, durations.relative_errors)


def _variance(
    request: RankRequest, kernels: Mapping[tuple[str, str], tuple[float, float]], shared_s: float
) -> float:
    """Families, and what ranks exchange, err independently, ops of one family together."""
    errors_s = [*(error_s for _, error_s in kernels.values()), request.exchanged.error_s]
    each_s2 = sum((MEDIAN_TO_SIGMA * error_s) ** 2 for error_s in errors_s)
    return (each_s2 + shared_s**2) * request.accumulation_steps**2


def _hidden_host_s2(request: RankRequest, lanes: MicroBatches, exposed_s: float) -> float:
    """What a slower host adds beyond the error of what is exposed of it, squared."""
    host = request.profile.host
    error = (host and host.provenance.relative_error) or 0.0
    more_s = lanes.slower_host_s(error) * request.accumulation_steps / lanes.count
    return MEDIAN_TO_SIGMA**2 * max(more_s**2 - (error * exposed_s) ** 2, 0.0)
