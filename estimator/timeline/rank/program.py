"""Compile one rank's step into a compact program: lane times, buckets, update, errors.

A program belongs to a graph at one batch size, a machine type, a number of busy devices and a
strategy. It holds no allocation: what the network costs is added where the step is answered.
`RankTable` keeps what a rank costs by the kind of its node, `RankColumns` that of many in arrays.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from estimator.cache import Cache
from estimator.elementwise import Array, Flags, Indices
from estimator.errors import WorkloadError
from estimator.graph.costs.call_costs import StepFlops, step_flops
from estimator.graph.ir.op_graph import BoundGraph, OpGraph
from estimator.graph.memory.peak import Envelope, PeakMemory, ShardedMemory
from estimator.graph.memory.sizes import StepTensors
from estimator.graph.memory.step import MemoryOverStep
from estimator.kernels.durations import (
    Durations,
    bound_of,
    columns_of,
    costed,
    kernel_groups,
    op_durations,
    part_durations,
    structure_of,
    why_not_on,
)
from estimator.machines.profile import DeviceKind, MachineProfile, Provenance
from estimator.machines.typical import DeviceMemory, device_memory
from estimator.placement.placement import NodeKind
from estimator.timeline.rank.lanes import InputCosts, MicroBatches, input_costs
from estimator.timeline.rank.layer_collectives import LayerCollectives, LayerCollectiveSeconds
from estimator.timeline.rank.rules import Bucket, RankLane, RankRequest, Rules, StepShape
from estimator.timeline.rank.updates import (
    added_to_update,
    trained_of,
    unscale_s,
    update_cost,
    update_lanes,
)
from estimator.workload.recipe import peak_dtype
from estimator.workload.strategies import Strategy

# What a copy costs is fitted from copies of other sizes.
COPIES_ERROR = 0.2
# What an update is taken to be off by where the profile does not say: as for copies, the fit is of
# few sizes (`estimator probe` on an EPYC server: up to 15 %).
_UPDATE_ERROR = 0.2
_ROUNDING = 1e-12
# A median absolute error is 0.6745 standard deviations of a normal error.
MEDIAN_TO_SIGMA = 1 / 0.6745


class LaneCosts(NamedTuple):
    """A rank's compute in a step, in seconds: of one rank, or of one for each row.

    It takes `lane_s` + `sharded_lane_s` / shards, and that is what its forward and backward
    kernels, host, copies and the collectives inside its micro-batches (`layer_collectives_s`) take.
    `kernels_variance_s2` is the sum of the squared errors (one standard deviation) of the kernel
    families, and of what they share, in s²; `host_error` and `update_error` are what the host and
    the update are off, `interference_error` what a disturbed probe is; `model_peak_s` and
    `hardware_peak_s` are what the flops of a micro-batch take at the device's peak.
    """

    lane_s: Any
    sharded_lane_s: Any
    forward_s: Any
    backward_s: Any
    host_s: Any
    copies_s: Any
    layer_collectives_s: Any
    update_error: Any
    host_error: Any
    kernels_variance_s2: Any
    model_peak_s: Any
    hardware_peak_s: Any
    interference_error: Any = 0.0

    def slower(self, ratio: float) -> LaneCosts:
        """Those of a rank that takes as many times as long."""
        return self._replace(
            **{name: ratio * getattr(self, name) for name in _SLOWED},
            kernels_variance_s2=self.kernels_variance_s2 * ratio**2,
        )

    def length_s(self, shards: Any) -> Any:
        """The whole lane where that many ranks share what is sharded."""
        return self.lane_s + self.sharded_lane_s / shards


_SLOWED = LaneCosts._fields[:7]


class UpdateCosts(NamedTuple):
    """What a rank does after the last collective: of one rank, or of one for each row.

    Copying buckets back into gradients, and the update: a launch that sharding does not shorten and
    the rest, of which a rank does a share.
    """

    copy_back_s: Any
    launch_s: Any
    shared_s: Any

    def update_s(self, share: Any) -> Any:
        return self.launch_s + self.shared_s * share

    def slower(self, ratio: float) -> UpdateCosts:
        """Those of a rank that takes as many times as long."""
        return UpdateCosts(*(ratio * seconds for seconds in self))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """What one class of ranks computes: alone on its lane, and after the last collective.

    `ready_s[k]` is the lane time at which bucket k may be reduced; `segments_s` is what FSDP
    computes in a micro-batch: between passes through its units, forward then backward, copying each
    unit out of a buffer, each one's gradients into one, and adding up the gradients of all
    micro-batches. `flops` are those of a micro-batch; `in_grid_ratio` is the share of kernel time
    whose exact call the probe has timed.
    """

    bound: BoundGraph
    profile: MachineProfile
    strategy: Strategy
    buckets: tuple[Bucket, ...]
    ready_s: Array
    segments_s: Array
    lane: LaneCosts
    update: UpdateCosts
    update_source: str
    exchanged: LayerCollectiveSeconds
    kernels: Mapping[tuple[str, str], tuple[float, float]]
    memory: ShardedMemory
    flops: StepFlops
    peak_flops_per_s: float
    in_grid_ratio: float
    durations: Durations
    lanes: MicroBatches
    accumulate_s: float
    merging: bool
    micro_batches: int


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
        shards = merging and strategy.keeps.state == "shard"
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
        request = replace(request, exchanged=layer_collectives.seconds(bound, durations, count))
    if layer_collectives_s := request.exchanged.total_s * count:
        durations = request.exchanged.beside(durations)
    lane = rules.lane(request, durations)
    lanes, update, update_from = _update(request, rules.strategy, lane)
    ends_s = lanes.ends_s(lanes.count - 1)
    lane_s = lanes.end_s * lane.repeats + lane.beside_s
    columns, device_s = columns_of(request.graph, request.cache), kernels_alone.device_s
    forward_s = float(device_s[columns.is_forward].sum()) * count
    backward_s = float(device_s[~columns.is_forward].sum()) * count
    host_s = lane_s - lane.copies_s - forward_s - backward_s - layer_collectives_s
    kernels, kernels_s = _kernel_seconds(request, kernels_alone), float(device_s.sum()) or 1.0
    flops = request.cache.get("flops", (bound,), lambda: step_flops(bound, columns))
    peak = _peak_flops_per_s(request, flops)
    host, interference = request.profile.host, request.profile.interference
    return StepProgram(
        bound=bound,
        profile=request.profile,
        strategy=rules.strategy,
        buckets=lane.buckets,
        ready_s=ends_s[[bucket.ready_after for bucket in lane.buckets]] + lane.accumulate_s,
        segments_s=lane.segments_s,
        lane=LaneCosts(
            lane_s=lane_s,
            sharded_lane_s=lane.accumulate_s if lane.sums_shards else 0.0,
            forward_s=forward_s,
            backward_s=backward_s,
            # What is left of sums in another order is no time of the host.
            host_s=host_s if host_s > _ROUNDING * lane_s else 0.0,
            copies_s=lane.copies_s,
            layer_collectives_s=layer_collectives_s,
            update_error=_error_of(update_from),
            host_error=(host.provenance.relative_error or 0.0) if host else 0.0,
            kernels_variance_s2=_variance(request, kernels, durations.shared_error * kernels_s)
            + _hidden_host_s2(request, lanes, host_s),
            model_peak_s=flops.model / peak or math.nan,
            hardware_peak_s=flops.hardware / peak or math.nan,
            interference_error=interference.relative_error if interference else 0.0,
        ),
        update=update,
        update_source=update_from.source,
        exchanged=request.exchanged,
        kernels=kernels,
        memory=_memory(request, rules, lane.buckets),
        flops=flops,
        peak_flops_per_s=peak,
        in_grid_ratio=float(device_s[durations.in_grid].sum()) / kernels_s,
        durations=durations,
        lanes=lanes,
        accumulate_s=lane.accumulate_s,
        merging=request.merging,
        micro_batches=count,
    )


def _peak_flops_per_s(request: RankRequest, flops: StepFlops) -> float:
    """The device's dense peak in the dtypes that the model computes in, each by its FLOPs.

    An fp32 model's convolutions run in TF32 where a GPU has it. NaN if it is not known.
    """
    precision, peaks = request.graph.precision, request.profile.devices[0].peak_flops_per_s
    peak, tf32 = peaks.get(peak_dtype(precision)), peaks.get("tfloat32")
    if precision != "fp32" or peak is None or tf32 is None or not flops.hardware:
        return peak or math.nan
    share = flops.tf32_by_default / flops.hardware
    return 1.0 / (share / tf32 + (1.0 - share) / peak)


def _error_of(update: Provenance) -> float:
    return _UPDATE_ERROR if update.relative_error is None else update.relative_error


def _update(
    request: RankRequest, strategy: Strategy, lane: RankLane
) -> tuple[MicroBatches, UpdateCosts, Provenance]:
    """(lanes, what comes behind them, where its seconds come from)."""
    graph, profile, trained = request.graph, request.profile, request.updated
    lanes = lane.lanes
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
    # A host that is ahead has issued the update already: then it is all the device's.
    launch_s = min(launch_s, update_s)
    return lanes, UpdateCosts(lane.copy_back_s, launch_s, update_s - launch_s), source


def _durations(request: RankRequest) -> Durations:
    bound, graph, profile = request.bound, request.graph, request.profile
    if not graph.has_step_times:
        return op_durations(bound, profile, devices_busy=request.devices_busy, cache=request.cache)
    alone_s = update_cost(request.trained, graph, profile, 1, False)[0]
    return part_durations(bound, profile, devices_busy=request.devices_busy, update_s=alone_s)


def _memory(request: RankRequest, rules: Rules[Any], buckets: tuple[Bucket, ...]) -> ShardedMemory:
    bound, merging, threads = request.bound, request.merging, request.profile.devices[0].threads
    return request.cache.get(
        "memory",
        (bound,),
        lambda: _over_step(rules, bound, threads, buckets, merging).peaks(),
        *(merging, rules.strategy, request.accumulation_steps, threads),
    )


def memory_over_step(program: StepProgram, rules: Rules[Any]) -> MemoryOverStep:
    """What a rank holds over the whole step of a program, of which `program.memory` is the peak."""
    threads = program.profile.devices[0].threads
    return _over_step(rules, program.bound, threads, program.buckets, program.merging)


def _over_step(
    rules: Rules[Any], bound: BoundGraph, threads: int, buckets: Sequence[Bucket], merging: bool
) -> MemoryOverStep:
    tensors = StepTensors(bound, structure_of(bound.graph, rules.cache), threads)
    return MemoryOverStep(tensors, rules.holding(tensors, buckets, merging=merging))


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class RankClass:
    """Ranks that run the same program at the same speed: times are longer by `slowdown_ratio`.

    `ready_s` is when each bucket is; for `segments_s` see `program`. `whole_memory` is the peak of
    a rank that shards nothing, `whole_ratio` its share of what tensors can have of the device.
    """

    program: StepProgram
    slowdown_ratio: float
    lane: LaneCosts
    update: UpdateCosts
    whole_memory: PeakMemory
    whole_ratio: float
    jitter_ratio: float
    device: DeviceMemory
    ready_s: Array
    segments_s: Array
    input: InputCosts

    @classmethod
    def of(
        cls, program: StepProgram, slowdown_ratio: float, communicators: int, costs: InputCosts
    ) -> RankClass:
        device, fullest = device_memory(program.profile, communicators), program.memory.peak(1)
        return cls(
            program=program,
            slowdown_ratio=slowdown_ratio,
            lane=program.lane.slower(slowdown_ratio),
            update=program.update.slower(slowdown_ratio),
            whole_memory=fullest,
            whole_ratio=fullest.total_bytes / device.usable_bytes,
            jitter_ratio=program.profile.rank_jitter_ratio or 0.0,
            device=device,
            ready_s=program.ready_s * slowdown_ratio,
            segments_s=program.segments_s * slowdown_ratio,
            input=costs,
        )


def at_peak_s(
    work: Iterable[tuple[RankClass, float]], devices: Iterable[tuple[RankClass, float]]
) -> tuple[float, float]:
    """(seconds of the model's FLOPs, of all), were the devices at their peak all together.

    `work` says of how many ranks' micro-batches, `devices` of how many ranks; NaN if not known.
    """
    model = hardware = 0.0
    for kind, times in work:
        model += times * kind.program.flops.model
        hardware += times * kind.program.flops.hardware
    peak = sum([ranks * kind.program.peak_flops_per_s for kind, ranks in devices])
    return model / peak or math.nan, hardware / peak or math.nan


class RankTable:
    """The kinds of ranks of a graph's step at one batch, compiled when they are first met.

    `merging` says whether there are other ranks to synchronise with. Looking one up raises
    ProfileError or WorkloadError where it cannot be compiled.
    """

    def __init__(
        self,
        rules: Rules[Any],
        shape: StepShape,
        *,
        batch: int | None,
        merging: bool,
        cache: Cache,
    ) -> None:
        self.graph, self.rules, self.shape = rules.graph, rules, shape
        self.strategy_text = str(shape.strategy)
        self._batch, self._merging, self._cache = batch, merging, cache
        self._communicators = shape.strategy.communicators if merging else 0
        self._communicators += len(shape.layer_collectives.groups) if shape.layer_collectives else 0
        self._kinds: dict[tuple[int, int, float], RankClass] = {}

    def __getitem__(self, node: NodeKind) -> RankClass:
        return self.kind(node.profile, node.ranks_per_node, node.slowdown_ratio)

    def kind(
        self, profile: MachineProfile, ranks_per_node: int, slowdown_ratio: float
    ) -> RankClass:
        """The ranks of a node of a machine, by their number and how slow the node is."""
        # Nodes that differ in their network alone run the same program at the same speed.
        key = (id(profile), ranks_per_node, slowdown_ratio)
        kind = self._kinds.get(key)
        if kind is None:
            refusal = why_not_on(self.graph, profile)
            if refusal is not None:
                raise WorkloadError(refusal)
            program = step_program(
                self.rules,
                self.shape,
                profile,
                batch=self._batch,
                devices_busy=ranks_per_node,
                merging=self._merging,
                cache=self._cache,
            )
            batches = self.shape.accumulation_steps
            costs = input_costs(
                self.shape.loader,
                profile,
                samples=batches * (self._batch or self.graph.batch or 1),
                batches=batches,
                ranks_per_node=ranks_per_node,
            )
            kind = RankClass.of(program, slowdown_ratio, self._communicators, costs)
            # The table keeps it, also when the cache forgets the program as such.
            owners, details = step_key(self.graph, self.shape, self._batch, self._merging)
            self._cache.grown(program, STEP, owners, *details)
            if len(self._kinds) >= _MOST_NODES:
                self._kinds.clear()
            self._kinds[key] = kind
        return kind


STEP = "step"


def step_key(
    graph: OpGraph, shape: StepShape, batch: int | None, merging: bool
) -> tuple[tuple[object, ...], tuple[Hashable, ...]]:
    """(objects, details) by which the cache keeps a step: see `plan.compiled_step`."""
    more = (shape.accumulation_steps, batch, merging, shape.loader, shape.layer_collectives)
    return (graph, shape.strategy), more


# Kinds of nodes that one table keeps: more than any cluster has.
_MOST_NODES = 1024


class RankColumns:
    """Kinds of ranks in arrays, by a number each; kind 0 is no rank at all and takes no time.

    It stands behind the last node of a row, and its buckets are always ready. `ready_s` has a row
    a kind, `segments_s` a column; `covers` says in (kind, other) which kind has no bucket ready
    before the other has it.
    """

    def __init__(self, kinds: Sequence[RankClass]) -> None:
        self._lane = LaneCosts(*_columns([kind.lane for kind in kinds], len(LaneCosts._fields)))
        self._update = UpdateCosts(
            *_columns([kind.update for kind in kinds], len(UpdateCosts._fields))
        )
        self.input = InputCosts(*_columns([kind.input for kind in kinds], len(InputCosts._fields)))
        own = [(kind.jitter_ratio, float(kind.device.usable_bytes)) for kind in kinds]
        self.jitter_ratio, self.usable_bytes = _columns(own, 2)
        self.usable_bytes[0] = 1.0
        count = len(kinds) + 1
        buckets = max((len(kind.ready_s) for kind in kinds), default=0)
        self.ready_s = np.full((count, buckets), -math.inf)
        segments = max((len(kind.segments_s) for kind in kinds), default=0)
        self.segments_s = np.zeros((segments, count))
        for number, kind in enumerate(kinds, start=1):
            # Alone, a rank synchronises nothing.
            if len(kind.ready_s):
                self.ready_s[number] = kind.ready_s
            if len(kind.segments_s):
                self.segments_s[:, number] = kind.segments_s
        self.covers: Flags = np.eye(count, dtype=np.bool_) | (np.arange(count) == 0)
        if count <= _MOST_COMPARED:
            covers = [(ready_s >= self.ready_s).all(axis=1) for ready_s in self.ready_s]
            self.covers = np.array(covers)
        self._lines = _lines([kind.program.memory.total for kind in kinds])
        # What no kind shards is the same for any number of ranks.
        self._whole_bytes: Array | None = None
        if not any(sharded.any() for _, sharded in self._lines):
            fullest = np.maximum.reduce([fixed for fixed, _ in self._lines]).astype(np.float64)
            fullest[0] = -math.inf
            self._whole_bytes = fullest

    def lane(self, numbers: Indices) -> LaneCosts:
        """The compute of the kinds with these numbers."""
        return LaneCosts(*(column[numbers] for column in self._lane))

    def at_peak_s(self, numbers: Indices) -> tuple[Array, Array]:
        """(model, hardware): what a micro-batch of these kinds takes at its device's peak."""
        return self._lane.model_peak_s[numbers], self._lane.hardware_peak_s[numbers]

    def length_s(self, numbers: Indices, shards: Any) -> Array:
        """The lanes' lengths of the kinds with these numbers."""
        lane_s = self._lane.lane_s[numbers]
        if not self._lane.sharded_lane_s[1:].any():
            return np.asarray(lane_s)
        return np.asarray(lane_s + self._lane.sharded_lane_s[numbers] / shards)

    def update(self, numbers: Indices) -> UpdateCosts:
        """The updates of the kinds with these numbers."""
        return UpdateCosts(*(column[numbers] for column in self._update))

    def memory(self, numbers: Indices, shards: Any) -> tuple[Array, Array]:
        """(most bytes of a rank, largest share of a device's memory in use) of each column.

        The kinds have these numbers; what is sharded is divided by `shards` ranks.
        """
        if self._whole_bytes is not None:
            held: Array = self._whole_bytes
            return largest(held, numbers), largest(held / self.usable_bytes, numbers)
        # As `Bytes.at`, of each column.
        peaks = [fixed[numbers] - (-sharded[numbers] // shards) for fixed, sharded in self._lines]
        held = np.where(numbers > 0, np.maximum.reduce(peaks), -math.inf)
        return held.max(axis=0), (held / self.usable_bytes[numbers]).max(axis=0)


def largest(values: Array, index: Indices) -> Array:
    """The largest of `values` among each column of `index`; negative numbers count from the end."""
    most = values[index[0]]
    for place in index[1:]:
        np.maximum(most, values[place], out=most)
    return np.asarray(most)


# Every kind is compared with every other only while that is quick.
_MOST_COMPARED = 1024


def _columns(rows: Sequence[Sequence[float]], width: int) -> Array:
    """Rows of numbers as columns, before them a row that is less than any."""
    return np.array([[-math.inf] * width, *rows], dtype=np.float64).T


def _lines(envelopes: Sequence[Envelope]) -> list[tuple[Indices, Indices]]:
    """(fixed bytes, sharded bytes) of each kind, as often as the envelope with most lines has."""
    most = max((len(envelope.lines) for envelope in envelopes), default=1)
    padded = [
        envelope.lines + envelope.lines[-1:] * (most - len(envelope.lines))
        for envelope in envelopes
    ]
    lines = np.array([((0, 0),) * most, *padded], dtype=np.int64)
    return [(line[:, 0].copy(), line[:, 1].copy()) for line in lines.transpose(1, 0, 2)]
