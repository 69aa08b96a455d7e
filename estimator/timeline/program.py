"""Compile one rank's step into a compact program: lane times, buckets, update, and their errors.

A program belongs to a graph at one batch size, a machine type, a number of busy devices and a
strategy. It holds no allocation: what the network costs is added where the step is answered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimator.errors import ProfileError
from estimator.graph.costs import family_of
from estimator.graph.ops import BoundGraph, OpGraph
from estimator.graph.shard_play import Reduction
from estimator.graph.sharded_memory import ShardedMemory
from estimator.graph.shards import shard_units, unit_path
from estimator.graph.step_memory import step_memory
from estimator.graph.utilization import StepFlops, step_flops
from estimator.profile import MachineProfile, Provenance, UpdateCost
from estimator.tensors import OpCall, TensorSpec
from estimator.timeline.buckets import Bucket, gradient_buckets
from estimator.timeline.durations import Durations, kernel_fits, op_durations, slowdown_ratio
from estimator.timeline.lanes import looped, one_lane, two_lanes
from estimator.timeline.step_times import part_durations
from estimator.typical import with_typical_costs
from estimator.workload import Strategy, peak_dtype

Array = NDArray[np.float64]

_TABLE_GRADIENTS = ("embedding_dense_backward", "_embedding_bag_backward")
UPDATE_FORMS = {"cpu": "loop", "cuda": "foreach"}
# What a copy costs is fitted from copies of other sizes.
COPIES_ERROR = 0.2
# A median absolute error is 0.6745 standard deviations of a normal error.
MEDIAN_TO_SIGMA = 1 / 0.6745
_MOST_PROGRAMS = 4096
# Scale the loss, find infinities, read that, update the scale, its tracker, the inverse scale.
_SCALER_OPS = 6


@dataclass(frozen=True, slots=True)
class LaneUnit:
    """One unit that FSDP gathers, with its seconds of compute in either phase."""

    parameter_bytes: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """Seconds of one class of ranks: alone on its lane, and what comes after the last collective.

    `ready_s[k]` is the lane time at which bucket k may be reduced, `lane_s` the lane's end. The
    lane is `forward_s + backward_s + host_s + copies_s`. `update_launch_s` is the part of the
    update that sharding does not shorten; `units` are those that FSDP gathers, the rest of the
    model first. `kernels_variance_s2` is the sum of the squared errors (one standard deviation) of
    the kernel families, and of what they share, in s². `flops` are those of a micro-batch;
    `in_grid_ratio` is the share of kernel time whose exact call the probe has timed.
    """

    bound: BoundGraph
    profile: MachineProfile
    strategy: Strategy
    units: tuple[LaneUnit, ...]
    buckets: tuple[Bucket, ...]
    bucket_bytes: Array
    ready_s: Array
    lane_s: float
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
    start_s: Array
    end_s: Array

    @property
    def buckets_bytes(self) -> float:
        """Bytes of all buckets together."""
        return float(self.bucket_bytes.sum())

    @property
    def peak_flops_per_s(self) -> float | None:
        """The device's dense peak in the dtype that the model computes in."""
        dtype = peak_dtype(self.bound.graph.precision)
        return self.profile.devices[0].peak_flops_per_s.get(dtype)


_programs: OrderedDict[tuple[object, ...], tuple[OpGraph, MachineProfile, StepProgram]] = (
    OrderedDict()
)
_bounds: OrderedDict[tuple[int, int | None], tuple[OpGraph, BoundGraph]] = OrderedDict()


def step_program(
    graph: OpGraph,
    profile: MachineProfile,
    *,
    batch: int | None,
    busy: int,
    merging: bool,
    strategy: Strategy,
    accumulation_steps: int = 1,
) -> StepProgram:
    """The program of a rank on a node where `busy` ranks compute, compiled once and kept.

    `merging` says whether there are other ranks to merge gradients with. Raises ProfileError,
    WorkloadError.
    """
    key = (id(graph), id(profile), batch, busy, merging, strategy, accumulation_steps)
    found = _programs.get(key)
    if found is not None:
        return found[2]
    bound = _bound(graph, batch)
    known = with_typical_costs(profile)
    program = _compile(bound, known, busy, merging, strategy, accumulation_steps)
    _programs[key] = (graph, profile, program)
    while len(_programs) > _MOST_PROGRAMS:
        _programs.popitem(last=False)
    return program


def _bound(graph: OpGraph, batch: int | None) -> BoundGraph:
    key = (id(graph), batch)
    if key not in _bounds:
        _bounds[key] = (graph, graph.at(batch))
        while len(_bounds) > 32:
            _bounds.popitem(last=False)
    return _bounds[key][1]


def _compile(
    bound: BoundGraph,
    profile: MachineProfile,
    busy: int,
    merging: bool,
    strategy: Strategy,
    accumulation_steps: int,
) -> StepProgram:
    if bound.graph.has_step_times:
        alone_s = _update(bound, profile, 1, False)[0]
        durations = part_durations(bound, profile, devices_busy=busy, update_s=alone_s)
    else:
        durations = op_durations(bound, profile, devices_busy=busy)
    sharding = merging and strategy.kind == "fsdp"
    buckets = gradient_buckets(bound, strategy) if merging and not sharding else ()
    copies_s, merging_s = _ddp_costs(bound, profile, buckets, busy)
    if sharding:
        copies_s, merging_s = _shard_costs(bound, profile, busy)
    # Only the last micro-batch merges gradients; the ones before add theirs up.
    before = accumulation_steps - 1
    device_s = np.concatenate([durations.device_s] * before + [durations.device_s + copies_s])
    host_s = np.concatenate([durations.host_s] * before + [durations.host_s + merging_s])
    end = (one_lane if bound.graph.target == "cpu" else two_lanes)(host_s, device_s)
    update_s, launch_s, update = _update(bound, profile, busy, sharding)
    if bound.graph.grad_scaler:
        update_s += _unscale_s(bound, profile, busy)
    elif (lanes := None if sharding else _update_lanes(bound, profile)) is not None:
        end, update_s = looped(end, host_s, device_s, *lanes)
    accumulate_s = before * _accumulate_s(bound, profile, busy)
    offset = before * len(bound.calls)
    lane_s = (float(end[-1]) if len(end) else 0.0) + accumulate_s
    forward = np.array([op.phase == "forward" for op in bound.graph.ops], dtype=bool)
    forward_s = float(durations.device_s[forward].sum()) * accumulation_steps
    backward_s = float(durations.device_s[~forward].sum()) * accumulation_steps
    kernels = _kernel_seconds(bound, durations)
    kernels_s = float(durations.device_s.sum()) or 1.0
    variance_s2 = _variance(kernels) + (durations.shared_error * kernels_s) ** 2
    copied_s = float(copies_s.sum()) + accumulate_s
    view = strategy.gradient_as_bucket_view
    copy_back_s = 0.0 if view else sum(_copy_s(profile, b.size_bytes, busy) for b in buckets)
    return StepProgram(
        bound=bound,
        profile=profile,
        strategy=strategy,
        units=_lane_units(bound, durations) if sharding else (),
        buckets=buckets,
        bucket_bytes=np.array([float(bucket.size_bytes) for bucket in buckets]),
        ready_s=np.array([end[offset + b.ready_after] for b in buckets]) + accumulate_s,
        lane_s=lane_s,
        forward_s=forward_s,
        backward_s=backward_s,
        host_s=max(lane_s - copied_s - forward_s - backward_s, 0.0),
        copies_s=copied_s,
        copy_back_s=copy_back_s,
        update_s=update_s,
        # A host that is ahead has issued the update already: then it is all the device's.
        update_launch_s=min(launch_s, update_s),
        update_error=0.2 if update.relative_error is None else update.relative_error,
        update_source=update.source,
        kernels_variance_s2=variance_s2 * accumulation_steps**2,
        kernels=kernels,
        memory=step_memory(
            bound,
            optimizer=bound.graph.optimizer,
            strategy=strategy,
            merging=merging,
            buckets=[Reduction(bucket.ready_after, bucket.size_bytes) for bucket in buckets],
            micro_batches=accumulation_steps,
        ),
        flops=step_flops(bound),
        in_grid_ratio=float(durations.device_s[durations.in_grid].sum()) / kernels_s,
        durations=durations,
        start_s=end - device_s,
        end_s=end,
    )


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
    bound: BoundGraph, profile: MachineProfile, buckets: tuple[Bucket, ...], busy: int
) -> tuple[Array, Array]:
    """Seconds that DDP adds to each op: copies into buckets, and its own host work."""
    copies_s, host_s = np.zeros(len(bound.calls)), np.zeros(len(bound.calls))
    host = profile.host
    if not buckets or host is None:
        return copies_s, host_s
    host_s[0] = host.ddp_step_s
    for bucket in buckets:
        copies_s[bucket.ready_after] += _copy_s(profile, bucket.size_bytes, busy)
        host_s[bucket.ready_after] += host.ddp_bucket_s + bucket.tensors * host.backward_op_s
    return copies_s, host_s


def _stream_s(profile: MachineProfile, target: str, elements: int, busy: int) -> float:
    """Seconds of one elementwise pass over cold float32 memory, with `busy` devices busy."""
    spec = TensorSpec((max(elements, 1),))
    prediction = kernel_fits(profile).predict(OpCall(target, (spec, spec), (), (spec,)))
    if prediction is None:
        return 0.0
    return prediction.cold_s * slowdown_ratio(profile, "memory", busy, 8.0 * elements)


def _copy_s(profile: MachineProfile, size_bytes: int, busy: int) -> float:
    """DDP scales gradients by 1/world while it copies them into their bucket, one pass."""
    return _stream_s(profile, "aten.copy_.default", size_bytes // 4, busy)


def _accumulate_s(bound: BoundGraph, profile: MachineProfile, busy: int) -> float:
    """Adding one micro-batch's gradients to those of the ones before it, in place."""
    elements = sum(p.spec.nbytes // 4 for p in bound.graph.parameters if p.gradient is not None)
    return _stream_s(profile, "aten.add_.Tensor", elements, busy) if elements else 0.0


def _unscale_s(bound: BoundGraph, profile: MachineProfile, busy: int) -> float:
    """What a GradScaler adds: every gradient unscaled and checked in place, some small operators.

    torch/amp/grad_scaler.py: the loss and the scale are multiplied, the check is read by the host,
    which then has nothing issued ahead.
    """
    elements = sum(p.spec.numel for p in bound.graph.parameters if p.gradient is not None)
    spec = TensorSpec((max(elements, 1),))
    call = OpCall("aten.mul.Scalar", (spec, 1.0), (), (spec,))
    prediction = kernel_fits(profile, bound.graph.precision).predict(call)
    if prediction is None or profile.host is None:
        return 0.0
    slowdown = slowdown_ratio(profile, "memory", busy, 8.0 * elements)
    return prediction.cold_s * slowdown + _SCALER_OPS * profile.host.bare_op_s


def _shard_costs(bound: BoundGraph, profile: MachineProfile, busy: int) -> tuple[Array, Array]:
    """Seconds that FSDP adds to each op: copies out of gathered and into scattered buffers, hooks.

    Every unit is copied out once per gathering (the rest, gathered once, is kept for the backward
    pass) and its gradients are copied in once.
    """
    copies_s, host_s = np.zeros(len(bound.calls)), np.zeros(len(bound.calls))
    for unit in shard_units(bound.graph):
        copy_s = _copy_s(profile, unit.parameter_bytes, busy)
        forward = unit.forward or 0
        backward = forward if unit.backward is None else unit.backward
        copies_s[forward] += copy_s
        copies_s[backward] += copy_s if unit.path == "" else 2 * copy_s
        if profile.host is not None:
            host_s[forward] += profile.host.shard_unit_s
    return copies_s, host_s


def _lane_units(bound: BoundGraph, durations: Durations) -> tuple[LaneUnit, ...]:
    """The units with the compute between their first op and that of the next unit."""
    lane_s = durations.device_s + durations.host_s
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    for op, seconds in zip(bound.graph.ops, lane_s.tolist(), strict=True):
        spent = forward if op.phase == "forward" else backward
        path = unit_path(op.module)
        spent[path] = spent.get(path, 0.0) + seconds
    return tuple(
        LaneUnit(unit.parameter_bytes, forward.get(unit.path, 0.0), backward.get(unit.path, 0.0))
        for unit in shard_units(bound.graph)
    )


def _update(
    bound: BoundGraph, profile: MachineProfile, busy: int, sharding: bool
) -> tuple[float, float, Provenance]:
    """(seconds, seconds that no sharding shortens, where they come from) of the optimizer step."""
    graph = bound.graph
    trained = [p for p in graph.parameters if p.gradient is not None]
    cost = _update_cost(profile, graph.optimizer, UPDATE_FORMS[graph.target], graph.target)
    seconds = cost.update_time_s(
        tensors=len(trained),
        parameters=sum(p.spec.numel for p in trained),
        idle=_idle_parameters(bound),
    )
    moved = sum(p.spec.nbytes for p in trained)
    slowdown = slowdown_ratio(profile, "update", busy, float(moved))
    fixed_s = cost.launch_s
    if sharding:
        # Every rank updates a part of each tensor; under ZeRO-1 and 2 it updates whole tensors.
        hooks_s = profile.host.shard_update_tensor_s if profile.host else 0.0
        fixed_s += len(trained) * (cost.per_tensor_s + hooks_s)
        seconds += len(trained) * hooks_s
    return seconds * slowdown, fixed_s * slowdown, cost.provenance


def _update_lanes(bound: BoundGraph, profile: MachineProfile) -> tuple[float, float] | None:
    """Seconds of host and device in an update whose two lanes were measured; None for others."""
    graph = bound.graph
    cost = _update_cost(profile, graph.optimizer, UPDATE_FORMS[graph.target], graph.target)
    if not cost.lanes or graph.is_summary:
        return None
    trained = [p.spec.numel for p in graph.parameters if p.gradient is not None]
    host_s = cost.launch_s + len(trained) * cost.per_tensor_s
    idle_s = _idle_parameters(bound) * cost.per_idle_parameter_s
    return host_s, sum(trained) * cost.per_parameter_s + idle_s


def _idle_parameters(bound: BoundGraph) -> float:
    """Elements of embedding tables in rows that a batch of uniformly drawn indices never picks."""
    made_by = {value: index for index, op in enumerate(bound.graph.ops) for value in op.outputs}
    idle = 0.0
    for parameter in bound.graph.parameters:
        if parameter.gradient not in made_by:
            continue
        call = bound.calls[made_by[parameter.gradient]]
        if call.target.split(".")[1] not in _TABLE_GRADIENTS:
            continue
        rows, picks = parameter.spec.shape[0], call.inputs[1].numel
        idle += parameter.spec.numel * (1.0 - 1.0 / rows) ** picks
    return idle


def _update_cost(profile: MachineProfile, optimizer: str, form: str, kind: str) -> UpdateCost:
    same = [u for u in profile.updates if u.optimizer == optimizer and u.device == kind]
    if not same:
        raise ProfileError(
            f"profile '{profile.name}' has no update cost of {optimizer}; run 'estimator probe' "
            "with a larger --budget"
        )
    return next((cost for cost in same if cost.form == form), same[0])
