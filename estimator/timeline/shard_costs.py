"""Cost what FSDP adds to a rank's compute, and cut that at its collectives.

Source of the order: torch.distributed.fsdp.fully_shard (torch 2.13), _fsdp_param_group.py. The
parameters of a block are gathered before each of its passes and copied out of the buffer; its
gradients are copied into a buffer and reduce-scattered after its backward pass. The root, which is
the rest of the model, is gathered once in a micro-batch and reduced at the end of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from estimator.cache import Cache
from estimator.elementwise import maximum, where
from estimator.graph.op_graph import BoundGraph, OpGraph
from estimator.graph.shards import UnitRun, frozen_unit_bytes, parameter_unit, unit_runs
from estimator.machines.profile import MachineProfile
from estimator.placement.process_groups import ProcessGroup
from estimator.timeline.collectives import CollectiveCosts, SizedCollective
from estimator.timeline.lanes import MicroBatches
from estimator.timeline.passes import copies_s
from estimator.workload import ShardDtypes, Strategy

Array = NDArray[np.float64]

ROOT = ""
_AS_THEY_ARE = ShardDtypes()


class ExpertBytes(NamedTuple):
    """What of each unit is of experts that ranks divide: gathered, and reduced.

    The ranks that shard all else have `parts` unlike ones.
    """

    gathered: Array
    reduced: Array
    parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedPasses:
    """The passes of a micro-batch through the units of a graph, in order, by number of unit.

    Unit 0 is the root. `gathered_bytes` are the parameters of each unit, `gradient_bytes` those of
    them that are trained, `reduced_bytes` the same in the dtype of reductions. `forward_ends` and
    `backward_ends` are the ops up to which the segments between passes go: one before the first
    pass, one for each, and one behind the last. `regathers` says whether a backward pass gathers
    what a forward pass has gathered before; shards are `stored_ratio` times as wide. `experts` are
    gathered and reduced apart, right after the rest of their unit.
    """

    gathered_bytes: Array
    gradient_bytes: Array
    reduced_bytes: Array
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    forward_ends: tuple[int, ...]
    backward_ends: tuple[int, ...]
    regathers: bool = True
    stored_ratio: int = 1
    experts: ExpertBytes | None = None

    @classmethod
    def of(
        cls, graph: OpGraph, dtypes: ShardDtypes = _AS_THEY_ARE, *, regathers: bool = True
    ) -> ShardedPasses:
        """The units of a graph: every repeated block that has parameters, and the root."""
        gathered = {ROOT: 0, **dict.fromkeys(map(parameter_unit, graph.parameters), 0)}
        reduced = dict(gathered)
        for parameter in graph.parameters:
            unit = parameter_unit(parameter)
            gathered[unit] += parameter.spec.nbytes
            reduced[unit] += parameter.spec.nbytes if parameter.gradient is not None else 0
        for unit, size in frozen_unit_bytes(graph).items():
            gathered[unit] = gathered.get(unit, 0) + size
            reduced.setdefault(unit, 0)
        number = {unit: place for place, unit in enumerate(gathered)}
        blocks = {unit for unit, size in gathered.items() if size and unit != ROOT}
        forward = unit_runs(graph, blocks, "forward")
        backward = unit_runs(graph, blocks, "backward")
        turn = sum(op.phase == "forward" for op in graph.ops)
        gradients = np.array([reduced[unit] for unit in gathered], dtype=np.float64)
        return cls(
            gathered_bytes=np.array(list(gathered.values()), dtype=np.float64),
            gradient_bytes=gradients,
            reduced_bytes=gradients * dtypes.reduced_ratio,
            forward=tuple(number[run.path] for run in forward),
            backward=tuple(number[run.path] for run in backward),
            forward_ends=_ends(forward, 0, turn),
            backward_ends=_ends(backward, turn, len(graph.ops)),
            regathers=regathers,
            stored_ratio=dtypes.stored_ratio,
            experts=_experts(graph, number, dtypes.reduced_ratio),
        )

    @property
    def gathered(self) -> tuple[int, ...]:
        """The units that a micro-batch gathers, each as often as it does, the root first."""
        return (0, *self.forward, *(self.backward if self.regathers else ()))

    @property
    def reduced(self) -> tuple[int, ...]:
        """The units that a backward pass reduces, each with its last pass, the root apart."""
        seen: dict[int, None] = {}
        for unit in reversed(self.backward):
            seen.setdefault(unit)
        return tuple(reversed(seen))


def _experts(graph: OpGraph, number: Mapping[str, int], reduced_ratio: float) -> ExpertBytes | None:
    own = [parameter for parameter in graph.parameters if parameter.is_expert]
    if not own:
        return None
    gathered, reduced = np.zeros(len(number)), np.zeros(len(number))
    for parameter in own:
        unit = number[parameter_unit(parameter)]
        gathered[unit] += parameter.spec.nbytes
        reduced[unit] += parameter.spec.nbytes * reduced_ratio
    return ExpertBytes(gathered, reduced, own[0].expert_parts)


def sharded_passes(graph: OpGraph, strategy: Strategy, cache: Cache) -> ShardedPasses:
    """The passes of a graph, worked out once. Raises StrategyError, see `Strategy.shard_dtypes`."""
    dtypes, regathers = strategy.shard_dtypes(graph.precision), strategy.reshard_after_forward
    return cache.get(
        "sharded passes",
        (graph,),
        lambda: ShardedPasses.of(graph, dtypes, regathers=regathers),
        *(dtypes, regathers),
    )


def _ends(runs: Sequence[UnitRun], start: int, end: int) -> tuple[int, ...]:
    """Where the segments of a phase end, as numbers of ops; `runs` is what they lie between."""
    if not runs:
        return (end, end)
    return (max(runs[0].first, start), *(run.first for run in runs[1:]), runs[-1].last + 1, end)


def hook_seconds(bound: BoundGraph, passes: ShardedPasses, profile: MachineProfile) -> Array:
    """Seconds of FSDP's hooks on the host, for each op."""
    host_s = np.zeros(len(bound.calls))
    if profile.host is None or not len(host_s):
        return host_s
    for end in (0, *passes.forward_ends[: len(passes.forward)]):
        host_s[min(end, len(host_s) - 1)] += profile.host.shard_unit_s
    return host_s


def segment_seconds(lanes: MicroBatches, passes: ShardedPasses) -> Array:
    """Seconds that the lane advances in each segment of a micro-batch, forward then backward.

    That is less than its host's and its device's seconds together where these overlap.
    """
    ends_s = np.concatenate([np.zeros(1), lanes.ends_s(0)])
    marks = (0, *passes.forward_ends, *passes.backward_ends)
    return np.maximum(np.diff(ends_s[list(marks)]), 0.0)


def unit_copies_s(
    passes: ShardedPasses, profile: MachineProfile, devices_busy: int, cache: Cache
) -> tuple[Array, Array]:
    """Seconds of copying each unit's parameters out of a buffer, and its gradients into one.

    A copy into another dtype reads and writes as much as one of the mean size.
    """

    def seconds(sizes_bytes: Array) -> Array:
        sizes = [int(size) for size in sizes_bytes]
        return np.where(sizes_bytes > 0, copies_s(profile, sizes, devices_busy, cache), 0.0)

    copied_in = (passes.gradient_bytes + passes.reduced_bytes) / 2
    return seconds(passes.gathered_bytes), seconds(copied_in)


class SlowestGroup(NamedTuple):
    """A collective of each unit over the slowest of some groups; the largest error of any."""

    times_s: Any
    relative_error: Any
    unknown: Any


def slowest_of(
    sized: tuple[CollectiveCosts, SizedCollective], groups: Sequence[ProcessGroup], ratio: Any
) -> SlowestGroup:
    """A collective over the slowest of some groups; `ratio` scales its seconds."""
    costs, sizes = sized
    found: Any = np.zeros(len(sizes.factors[0]))
    relative_error: Any = 0.0
    unknown: Any = False
    for group in groups:
        model, several = costs.model(group), np.greater(group.ranks, 1)
        times_s = np.where(several, sizes.times_s(model), 0.0)
        found = np.maximum(found if times_s.ndim == 1 else found.reshape(len(found), -1), times_s)
        relative_error = maximum(relative_error, where(several, model.relative_error, 0.0))
        unknown = unknown | (model.unknown & several)
    return SlowestGroup(found * ratio if groups else found, relative_error, unknown)
