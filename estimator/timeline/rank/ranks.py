"""Keep what a rank of one graph's step costs, by the kind of node that it is on."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from estimator.cache import Cache
from estimator.elementwise import Array, Flags, Indices
from estimator.errors import WorkloadError
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.memory.peak import Envelope, PeakMemory, held_bytes
from estimator.kernels.durations import why_not_on
from estimator.machines.profile import MachineProfile
from estimator.machines.typical import DeviceMemory, device_memory
from estimator.placement.placement import NodeKind
from estimator.timeline.rank.inputs import NO_INPUT, InputCosts, input_costs
from estimator.timeline.rank.program import StepProgram, step_program
from estimator.timeline.rank.rules import Rules, StepShape


class LaneCosts(NamedTuple):
    """A rank's compute in a step, in seconds: of one rank, or of one for each row.

    It takes `lane_s` + `sharded_lane_s` / shards, and that is what its forward and backward
    kernels, host, copies and the collectives inside its micro-batches (`layer_collectives_s`) take.
    `kernels_variance_s2`, `host_error` and `update_error` are what they and the update are off,
    `interference_error` what a disturbed probe is; `model_peak_s` and `hardware_peak_s` are what
    the flops of a micro-batch take at the device's peak.
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

    def length_s(self, shards: Any) -> Any:
        """The whole lane where that many ranks share what is sharded."""
        return self.lane_s + self.sharded_lane_s / shards


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
    peak_flops_per_s: float
    device: DeviceMemory
    ready_s: Array
    segments_s: Array
    input: InputCosts = NO_INPUT

    @classmethod
    def of(
        cls,
        program: StepProgram,
        slowdown_ratio: float,
        communicators: int,
        costs: InputCosts = NO_INPUT,
    ) -> RankClass:
        profile, slow = program.profile, slowdown_ratio
        peak = program.peak_flops_per_s or math.nan
        host, whole = profile.host, program.memory.peak(1)
        interference = profile.interference
        device = device_memory(profile, communicators)
        lane = LaneCosts(
            lane_s=program.lane_s * slow,
            sharded_lane_s=program.sharded_lane_s * slow,
            forward_s=program.forward_s * slow,
            backward_s=program.backward_s * slow,
            host_s=program.host_s * slow,
            copies_s=program.copies_s * slow,
            layer_collectives_s=program.layer_collectives_s * slow,
            update_error=program.update_error,
            host_error=(host.provenance.relative_error or 0.0) if host else 0.0,
            interference_error=interference.relative_error if interference else 0.0,
            kernels_variance_s2=program.kernels_variance_s2 * slow**2,
            model_peak_s=program.flops.model / peak or math.nan,
            hardware_peak_s=program.flops.hardware / peak or math.nan,
        )
        return cls(
            program=program,
            slowdown_ratio=slow,
            lane=lane,
            update=UpdateCosts(
                copy_back_s=program.copy_back_s * slow,
                launch_s=program.update_launch_s * slow,
                shared_s=(program.update_s - program.update_launch_s) * slow,
            ),
            whole_memory=whole,
            whole_ratio=whole.total_bytes / device.usable_bytes,
            jitter_ratio=profile.rank_jitter_ratio or 0.0,
            peak_flops_per_s=peak,
            device=device,
            ready_s=program.ready_s * slow,
            segments_s=program.segments_s * slow,
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
    peak = sum([ranks * kind.peak_flops_per_s for kind, ranks in devices])
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
        self._of_node: dict[NodeKind, RankClass] = {}
        self._shared: dict[tuple[int, int, float], RankClass] = {}

    def __getitem__(self, node: NodeKind) -> RankClass:
        found = self._of_node.get(node)
        if found is None:
            found = self.kind(node.profile, node.ranks_per_node, node.slowdown_ratio)
            if len(self._of_node) >= _MOST_NODES:
                self._of_node.clear()
            self._of_node[node] = found
        return found

    def kind(
        self, profile: MachineProfile, ranks_per_node: int, slowdown_ratio: float
    ) -> RankClass:
        """The ranks of a node of a machine, by their number and how slow the node is."""
        # Nodes that differ in their network alone run the same program at the same speed.
        key = (id(profile), ranks_per_node, slowdown_ratio)
        found = self._shared.get(key)
        if found is None:
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
            found = RankClass.of(program, slowdown_ratio, self._communicators, costs)
            # The table keeps it, also when the cache forgets the program as such.
            owners, details = step_key(self.graph, self.shape, self._batch, self._merging)
            self._cache.grown(program, STEP, owners, *details)
            if len(self._shared) >= _MOST_NODES:
                self._shared.clear()
            self._shared[key] = found
        return found


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
        self.covers = self._covers()
        self._lines = _lines([kind.program.memory.total for kind in kinds])
        # What no kind shards is the same for any number of ranks.
        self._whole_bytes: Array | None = None
        if not any(sharded.any() for _, sharded in self._lines):
            whole = np.maximum.reduce([fixed for fixed, _ in self._lines]).astype(np.float64)
            whole[0] = -math.inf
            self._whole_bytes = whole

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
        each = [
            held_bytes(fixed[numbers], sharded[numbers], shards) for fixed, sharded in self._lines
        ]
        held = np.where(numbers > 0, np.maximum.reduce(each), -math.inf)
        return held.max(axis=0), (held / self.usable_bytes[numbers]).max(axis=0)

    def _covers(self) -> Flags:
        count = len(self.ready_s)
        if count > _MOST_COMPARED:
            return np.asarray(np.eye(count, dtype=np.bool_) | (np.arange(count) == 0))
        return np.array([(ready_s >= self.ready_s).all(axis=1) for ready_s in self.ready_s])


def largest(values: Array, index: Indices) -> Array:
    """The largest of `values` among each column of `index`; negative numbers count from the end."""
    found = values[index[0]]
    for each in index[1:]:
        np.maximum(found, values[each], out=found)
    return np.asarray(found)


# Every kind is compared with every other only while that is quick.
_MOST_COMPARED = 1024


def _columns(rows: Sequence[Sequence[float]], width: int) -> Array:
    """Rows of numbers as columns, before them a row that is less than any."""
    return np.array([[-math.inf] * width, *rows], dtype=np.float64).T


def _lines(envelopes: Sequence[Envelope]) -> list[tuple[Indices, Indices]]:
    """(fixed bytes, sharded bytes) of each kind, as often as the envelope with most lines has."""
    most = max((len(each.lines) for each in envelopes), default=1)
    padded = [each.lines + each.lines[-1:] * (most - len(each.lines)) for each in envelopes]
    lines = np.array([((0, 0),) * most, *padded], dtype=np.int64)
    return [(line[:, 0].copy(), line[:, 1].copy()) for line in lines.transpose(1, 0, 2)]
