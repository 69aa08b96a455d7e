"""Give every op of a graph its host and device seconds on one machine type."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from estimator.cache import Cache
from estimator.elementwise import Array, Flags, Indices
from estimator.errors import ProfileError
from estimator.graph.costs.call_costs import Features, StepPart, family_of, features_of, known_peak
from estimator.graph.ir.op_graph import BLOCK_TENSORS, BoundGraph, OpGraph
from estimator.graph.ir.ops import GraphColumns, Numbered, OpTiming, by_first, first_places
from estimator.graph.ir.structure import GraphStructure
from estimator.kernels.contention import Eviction, cold_ratios, slowdown_curve
from estimator.kernels.fits import KernelFits
from estimator.kernels.host import (
    awaited_ops,
    compiled_host_seconds,
    eager_host_seconds,
    issue_costs,
)
from estimator.kernels.roofline import KernelPrediction, Roofline
from estimator.machines.profile import MachineProfile
from estimator.machines.typical import is_known_by_datasheet, with_typical_costs
from estimator.tensors import OpCall, TensorSpec
from estimator.workload.strategies import Strategy

# torch/_inductor/exc.py, GPUTooOldForTriton: its compiler serves NVIDIA's chips from there on.
_COMPILED_CAPABILITY = 7.0


def why_not_on(graph: OpGraph, machine: MachineProfile) -> str | None:
    """Why a machine cannot run a graph's step and what to do, in one sentence; None if it can."""
    if graph.target != machine.kind:
        return (
            f"{graph.name} was traced for {graph.target} but '{machine.name}' has {machine.kind} "
            f"devices; trace it with target='{machine.kind}'"
        )
    if graph.execution == "eager":
        return None
    capability = machine.devices[0].compute_capability
    if capability is not None and capability < _COMPILED_CAPABILITY:
        return (
            f"'{machine.name}' has compute capability {capability}, and torch.compile needs "
            f"{_COMPILED_CAPABILITY} or more; trace {graph.name} without compiled (--compile, "
            "--cuda-graphs)"
        )
    return None


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
# Of the error of a fit, what is left at another batch once the call was measured at the traced one:
# the machine's share goes with the ratio measured over fitted, the share of the size stays.
_CARRIED_ERROR_RATIO = 0.5
# Bytes read and written for each fp32 element of a copy.
_COPIED_BYTES = 8
_NO_KERNEL = KernelPrediction(warm_s=0.0, cold_s=0.0, relative_error=0.0, source="view")


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds per op of a graph, and where each came from.

    `host_s` is issuing work, `device_s` the kernel; on CPUs both run on the same cores. `sources`
    are "measured" (this exact call was timed), "fitted", "datasheet" (by the kernel model),
    "assumed" (no formula: charged as a copy of its bytes) or "view". `in_grid` marks calls whose
    exact shape is in the probe's grid. `shared_error` is one standard deviation of what all kernels
    of a step are off together, by a chip that is not quite its datasheet. The host waits for the
    device after each `awaited` op.
    """

    host_s: Array
    device_s: Array
    sources: Sequence[str]
    relative_errors: Array
    in_grid: Flags
    shared_error: float = 0.0
    awaited: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallCosts:
    """The distinct calls of a graph at one batch size: what their time depends on, and their bytes.

    `compute_share` is 1 for a call that is limited by arithmetic, 0 for one that only moves bytes.
    `runs` says which calls any kernel runs for: those of views have no features.
    """

    calls: tuple[OpCall, ...]
    features: tuple[Features | None, ...]
    moved_bytes: Array
    compute_share: Array
    runs: Flags

    @classmethod
    def of(cls, bound: BoundGraph, structure: GraphStructure) -> CallCosts:
        calls = structure.distinct_calls(bound)
        runs = np.zeros(len(calls), dtype=np.bool_)
        runs[structure.columns.call_of[~structure.columns.is_view]] = True
        features = tuple(
            [features_of(call) if run else None for call, run in zip(calls, runs, strict=True)]
        )
        moved = np.array([_moved_bytes(call) for call in calls], dtype=np.float64)
        flops = np.array([feature.cost.flops if feature else 0.0 for feature in features])
        intensity = flops / np.maximum(moved, 1.0)
        share = np.minimum(intensity / _COMPUTE_BOUND_FLOPS_PER_BYTE, 1.0)
        return cls(
            calls=calls, features=features, moved_bytes=moved, compute_share=share, runs=runs
        )


def _moved_bytes(call: OpCall) -> int:
    return sum(spec.storage_bytes for spec in (*call.inputs, *call.outputs))


def costed(profile: MachineProfile, cache: Cache) -> MachineProfile:
    """The profile with the costs of typical machines where it has none of its own."""
    return cache.get("typical", (profile,), lambda: with_typical_costs(profile))


def structure_of(graph: OpGraph, cache: Cache) -> GraphStructure:
    """The structure of a graph, worked out once."""
    return cache.get(
        "structure", (graph,), lambda: GraphStructure.of(graph, columns_of(graph, cache))
    )


def bound_of(graph: OpGraph, batch: int | None, cache: Cache) -> BoundGraph:
    """A graph at a batch size, worked out once."""
    return cache.get("bound", (graph,), lambda: structure_of(graph, cache).at(batch), batch)


def columns_of(graph: OpGraph, cache: Cache) -> GraphColumns:
    """The operators and values of a graph in arrays, worked out once."""
    return cache.get("columns", (graph,), lambda: GraphColumns.of(graph))


def kernel_fits(
    profile: MachineProfile, precision: str = "fp32", *, compiled: bool = False, cache: Cache
) -> KernelFits | Roofline:
    """The fits of a profile; they depend on the `precision` of the graph, fp32 or tf32 matmuls, and
    on whether a compiler pads their factors.
    """
    is_tf32 = precision == "tf32"
    if is_known_by_datasheet(profile):
        chip = partial(Roofline, profile, precision=precision, pads_matmuls=compiled)
        return cache.get("kernels", (profile,), chip, is_tf32, compiled)
    return cache.get(
        "kernels", (profile,), lambda: KernelFits(profile, precision=precision), is_tf32
    )


def op_durations(
    bound: BoundGraph, profile: MachineProfile, *, devices_busy: int = 1, cache: Cache
) -> Durations:
    """Host and device seconds of every op when `devices_busy` devices of the machine compute.

    Raises ProfileError if the profile has no kernels or no host costs.
    """
    host = profile.host
    if host is None or not (profile.kernels or is_known_by_datasheet(profile)):
        raise ProfileError(
            f"profile '{profile.name}' has no kernel or host costs; run 'estimator probe' with a "
            "larger --budget"
        )
    structure = structure_of(bound.graph, cache)
    costs = _call_costs(bound, structure, cache)
    kernels, cached_bytes = cache.get(
        "kernel seconds", (bound, profile), lambda: _kernels_alone(bound, profile, cache)
    )
    private_bytes = profile.memory.private_cache_bytes if profile.memory else 0.0
    slowdown = _slowdowns(costs, profile, devices_busy, cached_bytes)
    return replace(
        kernels,
        host_s=cache.get(
            "host seconds",
            (bound, profile),
            lambda: (
                eager_host_seconds(
                    structure,
                    costs.calls,
                    costs.moved_bytes,
                    host,
                    private_bytes,
                    cache.get("issue costs", (profile,), lambda: issue_costs(profile)),
                )
                if bound.graph.execution == "eager"
                else compiled_host_seconds(bound.graph, host)
            ),
        ),
        device_s=kernels.device_s * slowdown[structure.columns.call_of],
        awaited=cache.get("awaited", (bound.graph,), lambda: awaited_ops(structure)),
    )


def least_device_s(
    bound: BoundGraph, profile: MachineProfile, *, blocks: Indices, cache: Cache
) -> Array:
    """What each op takes at least on one busy device in a graph of any of its `blocks`."""
    structure = structure_of(bound.graph, cache)
    kernels, cached_bytes = _kernels_alone(bound, profile, cache, blocks)
    slowdown = _slowdowns(_call_costs(bound, structure, cache), profile, 1, cached_bytes)
    return np.asarray(kernels.device_s * slowdown[structure.columns.call_of])


def _slowdowns(
    costs: CallCosts, profile: MachineProfile, devices_busy: int, cached_bytes: float
) -> Array:
    """How much slower each distinct call is beside other busy devices."""
    compute = slowdown_curve(profile, "compute", devices_busy)
    memory = slowdown_curve(profile, "memory", devices_busy).beyond(cached_bytes)
    share, moved = costs.compute_share, costs.moved_bytes
    return np.asarray(share * compute.at(moved) + (1.0 - share) * memory.at(moved))


def _call_costs(bound: BoundGraph, structure: GraphStructure, cache: Cache) -> CallCosts:
    return cache.get("call costs", (bound,), lambda: CallCosts.of(bound, structure))


def _kernels_alone(
    bound: BoundGraph, profile: MachineProfile, cache: Cache, blocks: Indices | None = None
) -> tuple[Durations, float]:
    """(seconds of kernels while no other device is busy, bytes of a cache that a device has).

    With `blocks` the least of graphs of any of the graph's blocks. The host's are left out.
    """
    graph, memory = bound.graph, profile.memory
    structure = structure_of(graph, cache)
    costs = _call_costs(bound, structure, cache)
    compiled = graph.execution != "eager"
    fits = kernel_fits(profile, graph.precision, compiled=compiled, cache=cache)
    call_of, is_view = structure.columns.call_of, structure.columns.is_view
    # CPUs' devices share the last-level cache, busy or not: virtual machines have neighbours.
    sharers = len(profile.devices) if profile.kind == "cpu" else 1
    cached_bytes = (memory.shared_cache_bytes if memory else 0) / sharers or fits.cache_bytes
    # Tensors leave the caches as measured, else as from one cache that forgets the oldest.
    eviction = (memory and Eviction.measured(memory)) or Eviction.of_size(cached_bytes)
    # How far each op is from its time with warm caches (0) to that with cold ones (1).
    cold = cold_ratios(bound, eviction, threads=fits.threads, structure=structure, blocks=blocks)
    if not isinstance(fits, Roofline):
        # What an op evicts of its own tensors is in a warm time that was measured.
        cold = eviction.beyond_repeated(cold, costs.moved_bytes[call_of])
    timed = _timed(graph, costs, fits, profile)
    seconds = _blend(timed, call_of, cold)
    errors = np.array([prediction.relative_error for prediction in timed])[call_of]
    if timings := graph.timings_on(profile.name):
        ratios, halves = _measured_ratios(structure, costs, timings, timed, fits, cold)
        seconds, errors = seconds * ratios, errors * halves
    errors = np.where(is_view, 0.0, errors)
    sources = ("view", *[prediction.source for prediction in timed])
    in_grid = np.array([call in fits.exact for call in costs.calls], dtype=np.bool_)
    durations = Durations(
        host_s=np.zeros(0),
        device_s=np.where(is_view, 0.0, seconds),
        relative_errors=np.maximum(errors, _FLOPS_ERROR) if graph.is_summary else errors,
        sources=Numbered(tuple(sources), np.where(is_view, 0, call_of + 1)).gathered(),
        in_grid=in_grid[call_of] & ~is_view,
        shared_error=fits.shared_error,
    )
    return durations, cached_bytes


def _blend(timed: Sequence[KernelPrediction], call_of: Indices, cold: Array) -> Array:
    """Seconds of each op, between its call's with inputs in cache and from memory."""
    warm_s = np.array([prediction.warm_s for prediction in timed])
    more_s = np.array([prediction.cold_s for prediction in timed]) - warm_s
    return np.asarray(warm_s[call_of] + cold * more_s[call_of])


def _timed(
    graph: OpGraph, costs: CallCosts, fits: KernelFits | Roofline, profile: MachineProfile
) -> list[KernelPrediction]:
    """What each distinct call takes: as measured, as predicted, or as a copy of its bytes."""
    kept = []
    predictions = fits.predict_each(costs.calls, costs.features)
    timings = graph.timings_on(profile.name)
    for call, predicted, runs in zip(costs.calls, predictions, costs.runs, strict=True):
        timing = timings.get(call) if timings else None
        if timing is not None:
            seconds = timing.seconds
            kept.append(
                KernelPrediction(
                    warm_s=seconds,
                    cold_s=seconds,
                    relative_error=timing.noise_ratio,
                    source="measured",
                )
            )
        elif predicted is None and not runs:
            kept.append(_NO_KERNEL)
        else:
            kept.append(predicted or _as_copy(call, fits, profile))
    return kept


def _as_copy(
    call: OpCall, fits: KernelFits | Roofline, profile: MachineProfile
) -> KernelPrediction:
    """An op without a formula, charged as an elementwise pass over all its bytes."""
    elements = max(_moved_bytes(call) // _COPIED_BYTES, 1)
    spec = TensorSpec((elements,))
    copied = fits.predict(OpCall("aten.clone.default", (spec,), (), (spec,)))
    if copied is not None:
        return replace(copied, relative_error=_UNKNOWN_ERROR, source="assumed")
    rate = profile.devices[0].memory_bandwidth_bytes_per_s
    seconds = float(_COPIED_BYTES) * elements / (rate or _SLOW_MEMORY_BYTES_PER_S)
    return KernelPrediction(
        warm_s=seconds, cold_s=seconds, relative_error=_UNKNOWN_ERROR, source="assumed"
    )


def _measured_ratios(
    structure: GraphStructure,
    costs: CallCosts,
    timings: Mapping[OpCall, OpTiming],
    timed: Sequence[KernelPrediction],
    fits: KernelFits | Roofline,
    cold: Array,
) -> tuple[Array, Array]:
    """For each op measured at the traced batch: measured over fitted, and the error left of it."""
    traced: list[KernelPrediction] = []
    measured_s, left = np.ones(len(timed)), np.ones(len(timed))
    for number, (call, _) in enumerate(structure.columns.calls):
        fitted = None
        if (
            call in timings
            and costs.calls[number] not in timings
            and timed[number].source not in ("assumed", "view")
        ):
            left[number] = _CARRIED_ERROR_RATIO
            fitted = fits.predict(call)
        measured_s[number] = timings[call].seconds if fitted else 1.0
        traced.append(
            fitted or KernelPrediction(warm_s=1.0, cold_s=1.0, relative_error=0.0, source="")
        )
    call_of = structure.columns.call_of
    return measured_s[call_of] / _blend(traced, call_of, cold), left[call_of]


class KernelGroups(NamedTuple):
    """(family, source) of kernels, and the number of its group for each op: 0 for views."""

    keys: tuple[tuple[str, str], ...]
    of: Indices

    def seconds(
        self, device_s: Array, relative_errors: Array
    ) -> dict[tuple[str, str], tuple[float, float]]:
        """(family, source) → seconds of all its ops and the error on them, in seconds."""
        count = len(self.keys) + 1
        seconds, errors_s = (
            np.bincount(self.of, weights=weights, minlength=count)[1:].tolist()
            for weights in (device_s, device_s * relative_errors)
        )
        return dict(zip(self.keys, zip(seconds, errors_s, strict=True), strict=True))


def kernel_groups(structure: GraphStructure, sources: Sequence[str]) -> KernelGroups:
    families = [family_of(call.target) for call, _ in structure.columns.calls]
    numbers: dict[tuple[str, str], int] = {}
    # Ops of a call are views all or none, and their seconds come from one source.
    columns = structure.columns
    kinds, kind_of = by_first(2 * columns.call_of + columns.is_view, 2 * len(families))
    firsts = first_places(kind_of, len(kinds)).tolist()
    group_of = [
        0
        if source == "view"
        else numbers.setdefault((families[kind // 2], source), len(numbers) + 1)
        for kind, source in zip(kinds.tolist(), [sources[op] for op in firsts], strict=True)
    ]
    return KernelGroups(tuple(numbers), np.array(group_of, dtype=np.intp)[kind_of])


# Forward passes of BERT, GPT-2 and OPT on P4, P100, T4, V100 and A100, carried from one to another
# by their fp32 peaks (43 pairs; NeuSight, ASPLOS 2025, artifact), are off by 36 % (median).
_OTHER_MACHINE_ERROR = 0.36


def part_durations(
    bound: BoundGraph, profile: MachineProfile, *, devices_busy: int, update_s: float
) -> Durations:
    """Seconds of the parts of a step that was timed as a whole, its host's work included.

    `update_s` is what the update takes on one device alone: the rest of the step is the parts'. On
    another machine than the one it was timed on a step takes as much less time as the peak is
    higher. Raises ProfileError where a peak is not known.
    """
    parts = [StepPart.of(call) for call in bound.calls]
    line, batch = parts[0].line, parts[0].batch
    step_s = line.step_s(batch) * _peak_ratio(bound.graph, profile)
    error, source = line.error_at(batch), "fitted"
    if profile.name != bound.graph.timed_on:
        error, source = math.hypot(error, _OTHER_MACHINE_ERROR), "datasheet"
    elif line.low_batch <= batch <= line.high_batch:
        source = "measured"
    shares = np.array([part.share_ratio for part in parts])
    # Half of a part is arithmetic, half memory.
    moved = np.array([_moved_bytes(call) for call in bound.calls])
    curves = [slowdown_curve(profile, by, devices_busy) for by in ("compute", "memory")]
    slowdown = sum(curve.at(moved) for curve in curves) / 2
    return Durations(
        host_s=np.zeros(len(parts)),
        device_s=shares * slowdown * max(step_s - update_s, 0.0),
        sources=(source,) * len(parts),
        relative_errors=np.full(len(parts), error),
        in_grid=np.zeros(len(parts), dtype=bool),
    )


def _peak_ratio(graph: OpGraph, profile: MachineProfile) -> float:
    """Seconds on a machine over seconds on the one where the steps were timed."""
    if profile.name == graph.timed_on:
        return 1.0
    timed = StepPart.of(graph.ops[0].call).line.peak_flops_per_s
    own = known_peak(profile.devices[0], graph.precision)
    if timed is None or own is None:
        unknown = graph.timed_on if timed is None else profile.name
        raise ProfileError(
            f"step times of {graph.name} were measured on '{graph.timed_on}' and cannot be carried "
            f"to '{profile.name}', since the peak of '{unknown}' is not known; give step times of "
            f"'{profile.name}', or flops_per_sample alone"
        )
    return timed / own


def summary_assumptions(
    bound: BoundGraph, profile: MachineProfile, strategy: Strategy
) -> list[str]:
    """What a summary's graph takes for granted on this machine, batch and strategy."""
    graph, batch = bound.graph, bound.batch
    listed = []
    if strategy.keeps.parameters == "shard":
        listed.append(f"FSDP gathers {BLOCK_TENSORS} parameter tensors at a time")
    if not graph.has_step_times or batch is None:
        return listed
    line = StepPart.of(graph.ops[0].call).line
    if not line.low_batch <= batch <= line.high_batch:
        timed = dict.fromkeys((line.low_batch, line.high_batch))
        listed.append(
            f"steps were timed at batch {' to '.join(map(str, timed))} and are taken to follow the "
            f"same line at batch {batch}"
        )
    if profile.name != graph.timed_on:
        listed.append(
            f"steps were timed on '{graph.timed_on}' and take {_peak_ratio(graph, profile):.3g} "
            f"times as long on '{profile.name}', by the ratio of the devices' peaks"
        )
    return listed
