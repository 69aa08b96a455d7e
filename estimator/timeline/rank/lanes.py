"""Turn host and device seconds per op into the times at which ops end, with FSDP's additions.

Source of the order: torch.distributed.fsdp.fully_shard (torch 2.13), _fsdp_param_group.py. The
parameters of a block are gathered before each of its passes and copied out of the buffer; its
gradients are copied into a buffer and reduce-scattered after its backward pass. The root, which is
the rest of the model, is gathered once in a micro-batch and reduced at the end of it.

torch.distributed.fsdp's CPUOffloadPolicy (torch 2.13, _fsdp_param.py): a unit's shard is copied to
the device before it is gathered, on the stream of the gather, and the shard of its gradient back to
the host once it is reduced. Both are in the dtype of the shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from estimator.cache import Cache
from estimator.elementwise import Array, maximum, where
from estimator.errors import ProfileError, WorkloadError
from estimator.graph.ir.op_graph import (
    BoundGraph,
    OpGraph,
    frozen_unit_bytes,
    parameter_unit,
)
from estimator.graph.ir.ops import GraphColumns
from estimator.graph.ir.structure import UnitRun, unit_runs
from estimator.machines.profile import MachineProfile
from estimator.machines.typical import LINK_RATIOS
from estimator.placement.mesh import ProcessGroup
from estimator.timeline.collectives.costs import CollectiveCosts, Lookup, SizedCollective
from estimator.timeline.rank.updates import copies_s
from estimator.workload.loader import Loader
from estimator.workload.strategies import ShardDtypes

# Say what a loader adds to a step: its own work on the rank's cores, and waiting for batches.
#
# Workers make batches in turn, each whole ones, and may be some ahead. In the long run a step takes
# the longest of three periods, however many they are: the rank's own work; a worker's time for a
# batch over the number of workers; the time of the disk that all ranks of a node share, and of the
# cores that workers have.
# A core that works for a worker of a CPU rank does not compute meanwhile, as with gloo's
# collectives.
# `tests/timeline/rank/test_inputs.py` plays the queue by events, to the same period.


class InputCosts(NamedTuple):
    """What a rank's loader costs its step, of one rank or of one for each row.

    `own_s` is added to what the rank does itself, `period_s` is the least time from batch to batch.
    """

    own_s: Any = 0.0
    period_s: Any = 0.0

    def stall_s(self, step_s: Any) -> Any:
        """Seconds by which a step of `step_s` without a loader is longer with it."""
        return maximum(step_s + self.own_s, self.period_s) - step_s


NO_INPUT = InputCosts()


def with_rates(loader: Loader, profile: MachineProfile) -> Loader:
    """The loader at the machine's measured rates, where it names none itself.

    Preparing that was measured holds reading of the page cache. Raises WorkloadError where a rate
    is needed that was not measured.
    """
    rates = profile.input
    disk = loader.disk_bytes_per_s or (rates.disk_bytes_per_s if rates else None)
    if disk is None and loader.cached_ratio < 1.0:
        raise WorkloadError(
            f"a loader with {loader.cached_ratio:g} of its samples cached reads the rest of a disk "
            f"that '{profile.name}' does not describe; say how fast, as in disk=500MB/s"
        )
    cache = loader.cache_bytes_per_s
    if cache is None and rates is not None and loader.source == "assumed":
        cache = rates.cache_bytes_per_s
    prep_s = loader.prep_s
    for part, count in (("jpeg_pixels", loader.jpeg_pixels), ("tokens", loader.tokens)):
        rate = rates and getattr(rates, f"{part}_per_s")
        if count and not rate:
            raise WorkloadError(
                f"'{profile.name}' has no measured rate of {part.replace('_', ' ')}; probe it "
                "again, or give the seconds of a sample, as in prep=8ms"
            )
        prep_s += count / rate if rate else 0.0
    return replace(
        loader,
        disk_bytes_per_s=disk,
        cache_bytes_per_s=cache,
        prep_s=prep_s,
        jpeg_pixels=0.0,
        tokens=0.0,
    )


def input_costs(
    loader: Loader | None,
    profile: MachineProfile,
    *,
    samples: int,
    batches: int,
    ranks_per_node: int,
) -> InputCosts:
    """The costs of a rank that takes `batches` batches a step, `samples` in all."""
    if loader is None:
        return NO_INPUT
    loader = with_rates(loader, profile)
    own_s = input_copies_s(loader, profile, samples, batches)
    if not loader.workers:
        return InputCosts(own_s + loader.made_s(samples), 0.0)
    own_s += batches * loader.take_s
    cores = loader.cores
    if profile.kind == "cpu":
        own_s += loader.cpu_s(samples) / max(len(profile.devices[0].cores), 1)
    period_s = max(
        loader.made_s(samples) / loader.workers,
        loader.disk_s(samples) * ranks_per_node,
        loader.cpu_s(samples) / (cores or math.inf),
    )
    return InputCosts(own_s, period_s)


def input_copies_s(loader: Loader, profile: MachineProfile, samples: int, batches: int) -> float:
    """Copying a step's batches to an accelerator, in the stream that computes on them."""
    links = [link for link in profile.links if link.kind == "h2d"]
    if profile.kind == "cpu" or not links or not loader.sample_bytes:
        return 0.0
    # Of one device alone before all at once, and of the memory that the loader uses.
    links = [link for link in links if link.pinned == loader.pinned] or links
    link = max(links, key=lambda one: one.bandwidth_bytes_per_s)
    return batches * link.latency_s + samples * loader.sample_bytes / link.bandwidth_bytes_per_s


def _waits(host_s: Array, device_s: Array) -> Array:
    """How long the device would idle before each op if it waited for that op alone."""
    done = np.cumsum(device_s)
    return np.asarray(np.cumsum(host_s) - (done - device_s))


def _ends_s(host_s: Array, device_s: Array, awaited: Sequence[int]) -> Array:
    """End of each op where the host issues nothing more before each `awaited` one has ended."""
    ends_s = np.empty(len(host_s))
    begin_s, bounds = 0.0, [0, *(op + 1 for op in awaited), len(host_s)]
    for start, stop in pairwise(bounds):
        if start < stop:
            host, device = host_s[start:stop], device_s[start:stop]
            run_s = np.maximum.accumulate(_waits(host, device)) + np.cumsum(device)
            ends_s[start:stop] = begin_s + run_s
            begin_s = float(ends_s[stop - 1])
    return ends_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatches:
    """The ops of `count` micro-batches, one after the other; the last one does something more.

    An op ends at max(end of the one before, issued by the host) + its time on the device, written
    as a running maximum; where `is_shared` says that host and device are the same cores, both add
    up. Ends do not depend on how many there are but for a sum: those in the middle advance by the
    period of the slower lane. `lead_s` is how much earlier ops end than in a step that is begun on
    an idle device. The host waits for the device after each `awaited` op of a micro-batch: from
    there on both begin together again.
    """

    host_s: Array
    device_s: Array
    last_host_s: Array
    last_device_s: Array
    count: int
    is_shared: bool
    lead_s: float = 0.0
    awaited: tuple[int, ...] = ()

    def ends_s(self, number: int) -> Array:
        """End of each op in one of the micro-batches, counted from 0."""
        host_s, device_s = self._spent_s(number)
        host, device = float(self.host_s.sum()), float(self.device_s.sum())
        if self.is_shared or not len(host_s):
            return np.cumsum(host_s + device_s) + number * (host + device)
        if self.awaited:
            return self._ends_with_waits_s(number)
        done = np.cumsum(device_s) + number * device
        waits = _waits(host_s, device_s) + number * (host - device)
        if number:
            longest = float(_waits(self.host_s, self.device_s).max())
            waits[0] = max(waits[0], longest + max((number - 1) * (host - device), 0.0))
        end = np.maximum.accumulate(waits) + done
        return np.asarray(np.maximum(end - self.lead_s, done) if self.lead_s else end)

    def _spent_s(self, number: int) -> tuple[Array, Array]:
        """Seconds of host and device per op of one of the micro-batches."""
        if number == self.count - 1:
            return self.last_host_s, self.last_device_s
        return self.host_s, self.device_s

    def _ends_with_waits_s(self, number: int) -> Array:
        """Ends where the host waits: a micro-batch is felt no further than in the next one.

        The lead is felt up to the first wait, and all that comes later is earlier by what the wait
        ends earlier.
        """
        ops, first, last = len(self.host_s), self.awaited[0], self.awaited[-1]
        begun_s = _ends_s(*self._spent_s(0), self.awaited)
        done_s = np.cumsum(self._spent_s(0)[1])
        led_s = np.maximum(begun_s - self.lead_s, done_s)
        earlier_s = float(begun_s[first] - led_s[first])
        if not number:
            return np.concatenate([led_s[:first], begun_s[first:] - earlier_s])
        both = self.awaited + tuple(ops + op for op in self.awaited)
        host_s, device_s = (
            np.concatenate(two) for two in zip(self._spent_s(0), self._spent_s(number), strict=True)
        )
        ends_s = _ends_s(host_s, device_s, both)[ops:]
        if number > 1:
            twice = _ends_s(np.tile(self.host_s, 2), np.tile(self.device_s, 2), both)
            ends_s += (number - 1) * float(twice[ops + last] - twice[last])
        return ends_s - earlier_s

    @property
    def end_s(self) -> float:
        """When the last op of all ends."""
        return float(self.ends_s(self.count - 1)[-1]) if len(self.host_s) else 0.0

    def slower_host_s(self, error: float) -> float:
        """How much later the last op ends if the host takes longer by that share of its time."""
        times = 1.0 + error
        slower = replace(self, host_s=times * self.host_s, last_host_s=times * self.last_host_s)
        return slower.end_s - self.end_s

    def looped(self, update_host_s: float, update_device_s: float) -> tuple[MicroBatches, float]:
        """(the same, seconds of the update behind them) where step follows step unawaited.

        In a loop the host issues the next step while the device still works on this one, so that a
        step takes what the busier of the two has to do in it, and ops end earlier by the lead that
        the host then has, if the device can keep up.
        """
        before = self.count - 1
        host_s = before * float(self.host_s.sum()) + float(self.last_host_s.sum())
        device_s = before * float(self.device_s.sum()) + float(self.last_device_s.sum())
        step_s = max(host_s + update_host_s, device_s + update_device_s)
        if not len(self.host_s):
            return self, step_s
        if self.awaited and not self.is_shared:
            lead_s, step_s = self._loop_with_waits(update_host_s, update_device_s)
        else:
            lead_s = float(self.ends_s(before)[-1]) + update_device_s - step_s
        lane = replace(self, lead_s=max(lead_s, 0.0))
        return lane, step_s - float(lane.ends_s(before)[-1])

    def _loop_with_waits(self, update_host_s: float, update_device_s: float) -> tuple[float, float]:
        """(lead of the host where a step begins, seconds from a step to the next).

        From its last wait on, a step is simulated with the update and what the next one does up to
        its first wait. The update is ready when both lanes are through with it.
        """
        first, rest = self.awaited[0] + 1, self.awaited[-1] + 1
        (head_host_s, head_device_s), (host_s, device_s) = map(self._spent_s, (0, self.count - 1))
        tail = len(host_s) - rest + 2
        both_s = _ends_s(
            np.concatenate([host_s[rest:], [0.0, update_host_s], head_host_s[:first]]),
            np.concatenate([device_s[rest:], [update_device_s, 0.0], head_device_s[:first]]),
            (),
        )
        lead_s = float(both_s[tail - 1] - host_s[rest:].sum()) - update_host_s
        awaited_s = self.ends_s(self.count - 1)[rest - 1] - self.ends_s(0)[first - 1]
        return lead_s, float(awaited_s + both_s[-1])


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

    `forward_runs` and `backward_runs` are the ops of each.

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
    forward_runs: tuple[UnitRun, ...] = ()
    backward_runs: tuple[UnitRun, ...] = ()

    @classmethod
    def of(
        cls,
        graph: OpGraph,
        dtypes: ShardDtypes = _AS_THEY_ARE,
        *,
        regathers: bool = True,
        columns: GraphColumns | None = None,
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
        columns = columns or GraphColumns.of(graph)
        is_forward = columns.is_forward
        forward, backward = (unit_runs(columns, blocks, own) for own in (is_forward, ~is_forward))
        turn = int(is_forward.sum())
        gradients = np.array([reduced[unit] for unit in gathered], dtype=np.float64)
        return cls(
            gathered_bytes=np.array(list(gathered.values()), dtype=np.float64),
            gradient_bytes=gradients,
            reduced_bytes=gradients * dtypes.reduced_ratio,
            forward=tuple(number[run.path] for run in forward),
            backward=tuple(number[run.path] for run in backward),
            forward_runs=tuple(forward),
            backward_runs=tuple(backward),
            forward_ends=_ends(forward, 0, turn),
            backward_ends=_ends(backward, turn, len(is_forward)),
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
    slowest_s: Any = np.zeros(len(sizes.factors[0]))
    relative_error: Any = 0.0
    unknown: Any = False
    for group in groups:
        model, several = costs.model(group), np.greater(group.ranks, 1)
        times_s = np.where(several, sizes.times_s(model), 0.0)
        slowest_s = np.maximum(
            slowest_s if times_s.ndim == 1 else slowest_s.reshape(len(slowest_s), -1), times_s
        )
        relative_error = maximum(
            relative_error, where(several, costs.relative_error(group, model), 0.0)
        )
        unknown = unknown | (model.unknown & several)
    return SlowestGroup(slowest_s * ratio if groups else slowest_s, relative_error, unknown)


class HostCopies(NamedTuple):
    """What each unit's shards take over the link from a device to its host, or back, by machine."""

    sizes_bytes: Array
    latency_s: Lookup
    rate: Lookup

    def slowest_s(self, groups: Sequence[ProcessGroup]) -> Any:
        """Seconds of each unit on the slowest group's devices, which have a shard each."""
        slowest_s: Any = np.zeros(len(self.sizes_bytes))
        for group in groups:
            per_byte_s = 1.0 / (self.rate[group.network] * group.ranks)
            rows = np.ndim(per_byte_s) > 0
            sizes = self.sizes_bytes[:, None] if rows else self.sizes_bytes
            latency_s = self.latency_s[group.network]
            seconds = np.where(sizes > 0, latency_s + sizes * per_byte_s, 0.0)
            slowest_s = maximum(
                slowest_s[:, None] if rows and slowest_s.ndim == 1 else slowest_s, seconds
            )
        return slowest_s


def host_copies(
    profiles: Sequence[MachineProfile], passes: ShardedPasses
) -> tuple[HostCopies, HostCopies]:
    """Those of parameters to the device before they are gathered, and of reduced gradients back."""
    gathered, reduced = passes.gathered_bytes, passes.gradient_bytes
    return (
        HostCopies(gathered * passes.stored_ratio, *host_links(profiles, "h2d")),
        HostCopies(reduced * passes.stored_ratio, *host_links(profiles, "d2h")),
    )


def copies_of_one_rank_s(profile: MachineProfile, passes: ShardedPasses) -> float:
    """Seconds of a micro-batch's copies on a rank that holds everything, one after the other."""
    alone = [ProcessGroup(ranks=1, nodes=1, per_node=1)]
    in_s, out_s = (copies.slowest_s(alone) for copies in host_copies([profile], passes))
    return float(in_s[list(passes.gathered)].sum() + out_s[[0, *passes.reduced]].sum())


def host_links(
    profiles: Sequence[MachineProfile], kind: Literal["h2d", "d2h"]
) -> tuple[Lookup, Lookup]:
    """(latency, bytes a second) of each machine's pinned copies."""
    latencies_s, rates = [], []
    for profile in profiles:
        alike = [link for link in profile.links if link.kind == kind]
        if not alike:
            raise ProfileError(
                f"profile '{profile.name}' has no {kind} link, over which tensors reach the host; "
                "run 'estimator probe' on a machine with GPUs"
            )
        link = max(alike, key=lambda one: one.pinned)
        datasheet = link.provenance.source == "datasheet"
        latencies_s.append(link.latency_s)
        rates.append(link.bandwidth_bytes_per_s * (LINK_RATIOS["pcie"] if datasheet else 1.0))
    return Lookup(latencies_s), Lookup(rates)
