"""Put one data-parallel step together: micro-batches, buckets, all-reduces, update, stragglers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimator.coefficients import Coefficients
from estimator.errors import ProfileError
from estimator.graph.ops import BoundGraph
from estimator.profile import MachineProfile, OverlapCost, UpdateCost
from estimator.tensors import OpCall, TensorSpec
from estimator.timeline.buckets import Bucket, gradient_buckets
from estimator.timeline.collectives import CollectiveModel, collective_model
from estimator.timeline.durations import Durations, kernel_fits, op_durations, slowdown_ratio
from estimator.timeline.schedule import (
    ComputeLane,
    Flow,
    Overlap,
    expected_maximum,
    one_lane,
    simulate,
    two_lanes,
)
from estimator.timeline.spans import Span, Timeline
from estimator.workload import Strategy

Array = NDArray[np.float64]

# torch/csrc/distributed/c10d/ProcessGroupGloo.hpp: two threads take collectives off the queue;
# ProcessGroupNCCL runs one stream per communicator.
BACKEND_SLOTS = {"gloo": 2, "nccl": 1}
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_TABLE_GRADIENTS = ("embedding_dense_backward", "_embedding_bag_backward")
UPDATE_FORMS = {"cpu": "loop", "cuda": "foreach"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Exclusive parts of the step of the slowest rank, in seconds, with what they were made of."""

    forward_s: float
    backward_s: float
    host_exposed_s: float
    communication_exposed_s: float
    straggler_s: float
    update_s: float
    copies_exposed_s: float
    idle_s: float
    durations: Durations
    communication: CollectiveModel | None
    communication_s: float
    update_error: float
    timeline: Timeline

    @property
    def step_s(self) -> float:
        return (
            self.forward_s
            + self.backward_s
            + self.host_exposed_s
            + self.communication_exposed_s
            + self.straggler_s
            + self.update_s
            + self.copies_exposed_s
            + self.idle_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lane:
    """One rank's compute lane over all micro-batches; extras are DDP's own bucket copies."""

    start_s: Array
    end_s: Array
    ready_s: Array
    total_s: float
    kernels_s: Array
    copies_s: float


def simulate_step(
    bound: BoundGraph,
    profile: MachineProfile,
    *,
    ranks: int,
    strategy: Strategy,
    accumulation_steps: int,
    coefficients: Coefficients,
) -> StepParts:
    """Simulate a step on `ranks` equal devices of one machine. Raises ProfileError."""
    durations = op_durations(bound, profile, devices_busy=ranks)
    buckets = gradient_buckets(bound, strategy) if ranks > 1 else ()
    model = _all_reduce(profile, ranks) if ranks > 1 else None
    lane = _lane(bound, profile, durations, buckets, ranks, accumulation_steps, coefficients)
    ratio = coefficients.communication_ratio
    collective_s = [model.time_s(bucket.size_bytes) * ratio for bucket in buckets] if model else []
    flow = simulate(
        [ComputeLane(end_s=lane.end_s, ready_s=lane.ready_s, total_s=lane.total_s)],
        collective_s,
        slots=BACKEND_SLOTS[BACKENDS[bound.graph.target]],
        overlap=_overlap(profile, ranks),
    )
    sync_s = _buffer_broadcast_s(bound, profile, ranks) * ratio
    update_s, update_error = _update_s(bound, profile, ranks)
    update_s *= coefficients.update_ratio
    copy_back_s = _copy_back_s(bound, profile, buckets, strategy, ranks)
    forward_s, backward_s, host_s = _compute_parts(bound, lane, durations, accumulation_steps)
    straggler_s = lane.total_s * (profile.rank_spread_ratio or 0.0) * expected_maximum(ranks)
    waited_s = flow.end_s - lane.total_s
    return StepParts(
        forward_s=forward_s,
        backward_s=backward_s,
        host_exposed_s=host_s,
        communication_exposed_s=max(waited_s, 0.0) + sync_s,
        straggler_s=straggler_s,
        update_s=update_s,
        copies_exposed_s=lane.copies_s + copy_back_s,
        idle_s=0.0,
        durations=durations,
        communication=model,
        communication_s=sum(collective_s) + sync_s,
        update_error=update_error,
        timeline=_timeline(
            bound, lane, flow, buckets, ranks, sync_s, copy_back_s + straggler_s, update_s
        ),
    )


def _all_reduce(profile: MachineProfile, ranks: int) -> CollectiveModel:
    model = collective_model(profile, "all_reduce", ranks)
    if model is None:
        raise ProfileError(
            f"profile '{profile.name}' has no all-reduce costs; run 'estimator probe' with a "
            "larger --budget"
        )
    return model


def _lane(
    bound: BoundGraph,
    profile: MachineProfile,
    durations: Durations,
    buckets: tuple[Bucket, ...],
    ranks: int,
    accumulation_steps: int,
    coefficients: Coefficients,
) -> _Lane:
    ratio = coefficients.compute_ratio
    device_s, host_s = durations.device_s * ratio, durations.host_s * ratio
    copies_s, merging_s = _ddp_costs(bound, profile, buckets, ranks)
    # Only the last micro-batch merges gradients.
    before = accumulation_steps - 1
    all_device = np.concatenate([device_s] * before + [device_s + copies_s])
    all_host = np.concatenate([host_s] * before + [host_s + merging_s])
    join = one_lane if bound.graph.target == "cpu" else two_lanes
    end = join(all_host, all_device)
    offset = before * len(device_s)
    ready = np.array([end[offset + bucket.ready_after] for bucket in buckets])
    accumulate_s = before * _accumulate_s(bound, profile, ranks)
    return _Lane(
        start_s=end - all_device,
        end_s=end,
        ready_s=ready + accumulate_s,
        total_s=(float(end[-1]) if len(end) else 0.0) + accumulate_s,
        kernels_s=device_s,
        copies_s=float(copies_s.sum()) + accumulate_s,
    )


def _ddp_costs(
    bound: BoundGraph, profile: MachineProfile, buckets: tuple[Bucket, ...], ranks: int
) -> tuple[Array, Array]:
    """Seconds that DDP adds to each op: copies into buckets, and its own host work."""
    copies_s, host_s = np.zeros(len(bound.calls)), np.zeros(len(bound.calls))
    host = profile.host
    if not buckets or host is None:
        return copies_s, host_s
    host_s[0] = host.ddp_step_s
    for bucket in buckets:
        copies_s[bucket.ready_after] += _copy_s(profile, bucket.size_bytes, ranks)
        host_s[bucket.ready_after] += host.ddp_bucket_s + bucket.tensors * host.backward_op_s
    return copies_s, host_s


def _compute_parts(
    bound: BoundGraph, lane: _Lane, durations: Durations, accumulation_steps: int
) -> tuple[float, float, float]:
    forward = np.array([op.phase == "forward" for op in bound.graph.ops], dtype=bool)
    forward_s = float(lane.kernels_s[forward].sum()) * accumulation_steps
    backward_s = float(lane.kernels_s[~forward].sum()) * accumulation_steps
    host_s = lane.total_s - lane.copies_s - forward_s - backward_s
    return forward_s, backward_s, max(host_s, 0.0)


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


def _copy_back_s(
    bound: BoundGraph,
    profile: MachineProfile,
    buckets: tuple[Bucket, ...],
    strategy: Strategy,
    ranks: int,
) -> float:
    """Copying reduced buckets back into the gradients, after the last all-reduce."""
    if ranks <= 1 or strategy.gradient_as_bucket_view:
        return 0.0
    return sum(_copy_s(profile, bucket.size_bytes, ranks) for bucket in buckets)


def _buffer_broadcast_s(bound: BoundGraph, profile: MachineProfile, ranks: int) -> float:
    """DDP broadcasts the buffers of rank 0 before a forward pass that will synchronise."""
    if ranks <= 1 or not bound.graph.buffer_bytes:
        return 0.0
    model = collective_model(profile, "broadcast", ranks)
    return model.time_s(bound.graph.buffer_bytes) if model else 0.0


def _overlap(profile: MachineProfile, ranks: int) -> Overlap:
    """Mean of the measured overlaps of the nearest group size."""
    if not profile.overlaps or ranks <= 1:
        return Overlap()
    sizes = {item.group_size for item in profile.overlaps}
    nearest = min(sizes, key=lambda size: abs(size - ranks))
    measured: list[OverlapCost] = [o for o in profile.overlaps if o.group_size == nearest]
    return Overlap(
        exposed_ratio=float(np.median([item.exposed_ratio for item in measured])),
        collective_slowdown_ratio=float(
            np.median([item.collective_slowdown_ratio for item in measured])
        ),
    )


def _update_s(bound: BoundGraph, profile: MachineProfile, ranks: int) -> tuple[float, float]:
    """(seconds, relative error) of the optimizer step over the trained parameters."""
    graph = bound.graph
    trained = [p for p in graph.parameters if p.gradient is not None]
    cost = _update_cost(profile, graph.optimizer, UPDATE_FORMS[graph.target], graph.target)
    seconds = cost.update_time_s(
        tensors=len(trained),
        parameters=sum(p.spec.numel for p in trained),
        idle=_idle_parameters(bound),
    )
    moved = sum(p.spec.nbytes for p in trained)
    error = cost.provenance.relative_error
    return (
        seconds * slowdown_ratio(profile, "update", ranks, float(moved)),
        0.2 if error is None else error,
    )


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


def _timeline(
    bound: BoundGraph,
    lane: _Lane,
    flow: Flow,
    buckets: tuple[Bucket, ...],
    ranks: int,
    before_s: float,
    after_s: float,
    update_s: float,
) -> Timeline:
    """Spans of one rank, which all ranks share: equal devices run equal steps."""
    spans = []
    if before_s:
        spans.append(Span("broadcast buffers", 0, "network", 0.0, before_s))
    lane_times, wall_times = flow.wall_at[0]
    starts = np.interp(lane.start_s, lane_times, wall_times) + before_s
    ends = np.interp(lane.end_s, lane_times, wall_times) + before_s
    ops = bound.graph.ops
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        op = ops[index % len(ops)]
        spans.append(
            Span(op.call.target, 0, "compute", start, max(end - start, 0.0), op.module, op.phase)
        )
    for number, (start, end) in enumerate(flow.collectives):
        name = f"all-reduce bucket {number} ({buckets[number].size_bytes} B)"
        spans.append(Span(name, 0, "network", start + before_s, end - start))
    finished = flow.end_s + before_s + after_s
    if after_s:
        spans.append(Span("wait, copy back", 0, "compute", flow.end_s + before_s, after_s))
    spans.append(Span("update", 0, "compute", finished, update_s, "", "update"))
    return Timeline(step_time_s=finished + update_s, spans=tuple(spans), ranks_like=(0,) * ranks)
