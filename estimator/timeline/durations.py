"""Give every op of a graph its host and device seconds on one machine type."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimator.cache import Cache
from estimator.errors import ProfileError
from estimator.graph.costs import features_of
from estimator.graph.ops import BoundGraph, Op, OpTiming
from estimator.profile import Contention, HostCost, MachineProfile
from estimator.tensors import OpCall, TensorSpec
from estimator.timeline.caches import cold_ratios
from estimator.timeline.compiled_host import compiled_host_seconds
from estimator.timeline.kernel_fits import KernelFits, Prediction
from estimator.timeline.roofline import Roofline
from estimator.typical import is_known_by_datasheet

Array = NDArray[np.float64]

# Flops per byte from which a kernel is limited by arithmetic rather than by memory, for choosing
# between the two measured contentions: a core computes some tens of flops per byte it streams.
_COMPUTE_BOUND_FLOPS_PER_BYTE = 20.0
# For a profile that says nothing of memory: slower than any machine that trains models.
_SLOW_MEMORY_BYTES_PER_S = 5e9
# Step times that are proportional to a model's FLOPs miss by 44 % (median of 650 vision models, AMP
# training on RTX 3090, results/benchmark-train of huggingface/pytorch-image-models).
_FLOPS_ERROR = 0.44
# What an op without any formula or probed relative is assumed to miss by.
_UNKNOWN_ERROR = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds per op of a graph, and where each came from.

    `host_s` is issuing work, `device_s` the kernel; on CPUs both run on the same cores. `sources`
    are "measured" (this exact call was timed), "fitted", "datasheet" (by the kernel law),
    "assumed" (no formula: charged as a copy of its bytes) or "view". `in_grid` marks calls whose
    exact shape is in the probe's grid. `shared_error` is one standard deviation of what all kernels
    of a step are off together, by a chip that is not quite its datasheet.
    """

    host_s: Array
    device_s: Array
    sources: tuple[str, ...]
    relative_errors: Array
    in_grid: NDArray[np.bool_]
    shared_error: float = 0.0


def kernel_fits(
    profile: MachineProfile, precision: str = "fp32", *, cache: Cache
) -> KernelFits | Roofline:
    """The fits of a profile; they depend on the `precision` of the graph: fp32 or tf32 products."""
    kind = Roofline if is_known_by_datasheet(profile) else KernelFits
    return cache.get(
        "kernels",
        (profile,),
        lambda: kind(profile, precision=precision),
        "tf32" if precision == "tf32" else "",
    )


def op_durations(
    bound: BoundGraph, profile: MachineProfile, *, devices_busy: int = 1, cache: Cache
) -> Durations:
    """Host and device seconds of every op when `devices_busy` devices of the machine compute.

    Raises ProfileError if the profile has no kernels or no host costs.
    """
    if profile.host is None or not (profile.kernels or is_known_by_datasheet(profile)):
        raise ProfileError(
            f"profile '{profile.name}' has no kernel or host costs; run 'estimator probe' with a "
            "larger --budget"
        )
    timer = _Timer(bound, profile, devices_busy, cache)
    count = len(bound.calls)
    device_s, errors = np.zeros(count), np.zeros(count)
    in_grid = np.zeros(count, dtype=bool)
    sources = []
    for index, (op, call) in enumerate(zip(bound.graph.ops, bound.calls, strict=True)):
        if op.is_view:
            sources.append("view")
            continue
        device_s[index], errors[index], source = timer.device(index, op, call)
        in_grid[index] = call in timer.fits.exact
        sources.append(source)
    if bound.graph.is_summary:
        errors = np.maximum(errors, _FLOPS_ERROR)
    return Durations(
        host_s=_host_seconds(bound, profile.host),
        device_s=device_s,
        sources=tuple(sources),
        relative_errors=errors,
        in_grid=in_grid,
        shared_error=timer.fits.shared_error,
    )


class _Timer:
    """Seconds of single calls in the context of their graph."""

    def __init__(
        self, bound: BoundGraph, profile: MachineProfile, devices_busy: int, cache: Cache
    ) -> None:
        self.bound = bound
        self.profile = profile
        self.fits = kernel_fits(profile, bound.graph.precision, cache=cache)
        # CPUs' devices share the last-level cache, busy or not: virtual machines have neighbours.
        shared = profile.memory.shared_cache_bytes if profile.memory else 0
        sharers = len(profile.devices) if profile.kind == "cpu" else 1
        cached = shared / sharers or self.fits.cache_bytes
        self.cold = cold_ratios(bound, cached, threads=self.fits.threads)
        memory = _contention(profile.contentions, "memory", devices_busy)
        if memory and memory[0][0] > cached > 0:
            # What stays in a device's part of the cache does not wait for memory.
            memory = ((cached, 1.0), *memory)
        compute = _contention(profile.contentions, "compute", devices_busy)
        self.contentions = {"compute": compute, "memory": memory}
        self.seen: dict[OpCall, Prediction | None] = {}

    def device(self, index: int, op: Op, call: OpCall) -> tuple[float, float, str]:
        """(seconds, relative error, source) of op `index`."""
        timings = self.bound.graph.timings
        if call in timings:
            timing = timings[call]
            return timing.seconds * self.slowdown(call), timing.spread_ratio, "measured"
        prediction = self.predict(call)
        if prediction is None:
            seconds = self.as_copy(call, self.cold[index])
            return seconds * self.slowdown(call), _UNKNOWN_ERROR, "assumed"
        seconds = self.blend(prediction, self.cold[index])
        error, source = prediction.relative_error, prediction.source
        if op.call in timings:
            ratio = self.measured_ratio(index, op, timings[op.call])
            seconds, error = seconds * ratio, 0.5 * error
        return seconds * self.slowdown(call), error, source

    def predict(self, call: OpCall) -> Prediction | None:
        if call not in self.seen:
            self.seen[call] = self.fits.predict(call)
        return self.seen[call]

    def blend(self, prediction: Prediction, cold: float) -> float:
        return prediction.warm_s + cold * (prediction.cold_s - prediction.warm_s)

    def measured_ratio(self, index: int, op: Op, timing: OpTiming) -> float:
        """Measured over fitted at the traced batch, to correct the fit at another batch."""
        fitted = self.predict(op.call)
        return timing.seconds / self.blend(fitted, self.cold[index]) if fitted else 1.0

    def as_copy(self, call: OpCall, cold: float) -> float:
        """An op without a formula, charged as an elementwise pass over all its bytes."""
        tensors = (*call.inputs, *call.outputs)
        elements = max(sum(spec.storage_bytes for spec in tensors) // 8, 1)
        spec = TensorSpec((elements,))
        prediction = self.predict(OpCall("aten.clone.default", (spec,), (), (spec,)))
        if prediction is None:
            rate = self.profile.devices[0].memory_bandwidth_bytes_per_s
            return 8.0 * elements / (rate or _SLOW_MEMORY_BYTES_PER_S)
        return self.blend(prediction, cold)

    def slowdown(self, call: OpCall) -> float:
        """How much slower the call runs because other devices of the machine are busy too."""
        compute, memory = self.contentions["compute"], self.contentions["memory"]
        if not compute and not memory:
            return 1.0
        features = features_of(call)
        tensors = (*call.inputs, *call.outputs)
        moved = float(sum(spec.storage_bytes for spec in tensors))
        intensity = features.cost.flops / max(moved, 1.0) if features else 0.0
        share = min(intensity / _COMPUTE_BOUND_FLOPS_PER_BYTE, 1.0)
        return share * _at(compute, moved) + (1.0 - share) * _at(memory, moved)


def slowdown_ratio(
    profile: MachineProfile, bound: str, devices_busy: int, moved_bytes: float
) -> float:
    """How much slower work bound by `bound` runs with `devices_busy` devices busy."""
    return _at(_contention(profile.contentions, bound, devices_busy), moved_bytes)


def _contention(
    contentions: Sequence[Contention], bound: str, devices_busy: int
) -> tuple[tuple[float, float], ...]:
    """(bytes, slowdown) points for the nearest measured number of busy devices.

    One busy device is slowed only where neighbours outside the job were measured.
    """
    measured = [
        item
        for item in contentions
        if item.bound == bound and item.points and (item.devices_busy == 1 or devices_busy > 1)
    ]
    if not measured:
        return ()
    nearest = min(measured, key=lambda item: abs(item.devices_busy - devices_busy))
    return tuple(sorted((size, max(ratio, 1.0)) for size, ratio in nearest.points))


def _at(points: Sequence[tuple[float, float]], moved_bytes: float) -> float:
    if not points:
        return 1.0
    sizes = [math.log(max(size, 1.0)) for size, _ in points]
    ratios = [ratio for _, ratio in points]
    return float(np.interp(math.log(max(moved_bytes, 1.0)), sizes, ratios))


def _host_seconds(bound: BoundGraph, host: HostCost) -> Array:
    """Python, dispatch and autograd seconds per op; on CUDA also the launch.

    The forward pass pays Python and module calls, the backward pass only C++. A CPU kernel's own
    time includes its bare call; a CUDA kernel's does not.
    """
    graph = bound.graph
    if graph.execution != "eager":
        return compiled_host_seconds(graph, host)
    launch = host.bare_op_s if graph.target == "cuda" else 0.0
    seconds = {
        ("forward", False): host.forward_op_s + launch,
        ("forward", True): host.forward_view_s,
        ("backward", False): host.backward_op_s + launch,
        ("backward", True): 0.5 * host.forward_view_s,
    }
    per_op = np.array([seconds[op.phase, op.is_view] for op in graph.ops])
    for parameter in graph.parameters:
        if parameter.ready_after is not None:  # autograd hands the gradient to the parameter
            per_op[parameter.ready_after] += host.backward_op_s
    if len(per_op):
        per_op[0] += host.step_s + graph.module_calls * host.module_call_s
    return per_op
