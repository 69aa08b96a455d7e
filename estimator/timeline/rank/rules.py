"""Say what a data-parallel strategy has to answer, and find the rules of one by its name.

The queue is work-conserving: however many are in flight, together they advance one second per
second alone, and 1/s beside compute, which meanwhile advances at 1 − e/s. So in lane time, work
arrives at the ready times and drains at 1/(s − e), and the backlog W when compute ends is Lindley's
recursion written as a maximum over buckets k,

    W = max(0, max_k(t_k + … + t_K − (lane − ready_k) / (s − e))),

and the step ends e seconds per second of drained work after the lane, plus W alone on the network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from estimator.cache import Cache
from estimator.elementwise import Array, Indices, maximum, minimum, taken
from estimator.errors import ProfileError
from estimator.graph.ir.collectives import adds_in_switch
from estimator.graph.ir.op_graph import BoundGraph, OpGraph
from estimator.graph.memory.sizes import StepTensors
from estimator.graph.memory.step import Holding
from estimator.kernels.durations import Durations
from estimator.machines.profile import CollectiveName, MachineProfile
from estimator.placement.mesh import ProcessGroup
from estimator.placement.topology import Cluster
from estimator.timeline.collectives.algorithms import fastest_s
from estimator.timeline.collectives.costs import (
    CollectiveCosts,
    CollectiveModel,
    Corrections,
    SizedCollective,
)
from estimator.timeline.collectives.overlap import Overlap
from estimator.timeline.rank.lanes import MicroBatches
from estimator.timeline.rank.layer_collectives import (
    NO_LAYER_COLLECTIVES,
    LayerCollectives,
    LayerCollectiveSeconds,
)
from estimator.timeline.rank.updates import Trained
from estimator.timeline.simulator.tasks import TaskList
from estimator.workload.loader import Loader
from estimator.workload.strategies import Strategy

# Stands for a drain of nothing: any slack then clears the backlog, and no slack leaves all of it.
_NO_DRAIN = 1e-300
# Rows worked on at once, so that their arrays stay in a core's cache.
_ROWS_AT_ONCE = 2048


class Ready(Protocol):
    """When the buckets of some steps are ready.

    `alike` tells rows apart that are to be asked for one after the other; None for one step.
    """

    @property
    def alike(self) -> Indices | None: ...

    def slack_s(self, rows: Indices | None) -> Array:
        """Seconds of the slowest lane that are left then: (buckets,) of one, (buckets, rows)."""
        ...


class BucketQueue:
    """The collectives of buckets of some sizes, sent in order as they get ready.

    Seconds of each bucket by one algorithm are linear in the terms of its line, by the reference of
    the collective: `sized` holds the factors.
    """

    def __init__(self, corrections: Sequence[Corrections], sizes_bytes: Array) -> None:
        self.sizes_bytes = sizes_bytes
        self.sized = SizedCollective(corrections, sizes_bytes)
        sizes = np.where(sizes_bytes > 0, sizes_bytes, 1.0)
        ratios = np.array([correction.latency_at(sizes) for correction in corrections])
        self.latency_ratio = ratios.reshape(len(corrections), len(sizes_bytes))
        # For bucket k, the factors of a line's terms in what the link has to do for k and all after
        # it, and in the part of the bucket's own time before that: (references, buckets, 3).
        factors, ratio = self.sized.factors, self.latency_ratio[:, :, None]
        self._behind = np.cumsum((factors * (1.0 - ratio))[:, ::-1], axis=1)[:, ::-1]
        self._latency = factors * ratio
        self._has_latency: list[bool] = [bool(ratio.any()) for ratio in self.latency_ratio]

    def exposed_s(
        self,
        ready: Ready,
        model: CollectiveModel,
        ratio: Any,
        overlap: Overlap,
        *,
        slower: Any = None,
        queued_s: QueuedSeconds | None = None,
    ) -> tuple[Any, Any]:
        """Seconds from the end of the undisturbed lane to the end of the last collective.

        They are those with collectives scaled by `ratio`, and by `slower` times that (None: the
        same again). Of one step, or a row for each. `queued_s` is what `queued` says of the model,
        where it is known already.
        """
        if not len(self.sizes_bytes):
            return 0.0, 0.0
        if isinstance(model.reference, int):
            queued_s = queued_s or self.queued(model, model.reference)
            both = _exposed_s(queued_s, ready.slack_s(None), overlap, ratio, slower)
            return float(both[0]), float(both[1])
        sums_s = np.zeros((2, len(model.reference)))
        for reference, rows in _alike(model.reference, ready.alike):
            sums_s[:, rows] = _exposed_s(
                self.queued(model, reference, rows),
                ready.slack_s(rows),
                Overlap(*(taken(each, rows) for each in overlap)),
                taken(ratio, rows),
                taken(slower, rows),
            )
        return sums_s[0], sums_s[1]

    def queued(
        self, model: CollectiveModel, reference: int, rows: Indices | None = None
    ) -> QueuedSeconds:
        """What the link has to do by one reference: of one group, or of some rows."""
        if self._has_latency[reference]:
            line = model.of(rows)[:1]
            apart = self._behind[reference], self._latency[reference]
            return QueuedSeconds(*(fastest_s(factors, line) for factors in apart))
        each_s = self.sized.each_s(model, reference, rows)
        if each_s.ndim == 1:
            return QueuedSeconds(np.add.accumulate(each_s[::-1])[::-1])
        for number in range(len(each_s) - 2, -1, -1):
            each_s[number] += each_s[number + 1]
        return QueuedSeconds(each_s)


class QueuedSeconds(NamedTuple):
    """What the link has to do for each bucket and all after it, and the latency of each.

    None where no latency passes beside the collective before.
    """

    behind_s: Array
    latency_s: Any = None

    def longer(self, ratio: Any) -> QueuedSeconds:
        """The same of collectives that take as many times as long."""
        latency_s = self.latency_s
        return QueuedSeconds(
            self.behind_s * ratio, None if latency_s is None else latency_s * ratio
        )


def _exposed_s(
    queued_s: QueuedSeconds, slack_s: Array, overlap: Overlap, ratio: Any, slower: Any
) -> tuple[Any, Any]:
    """The closed form of the module's docstring; `slack_s` is what is left of the lane."""
    if type(ratio) is not float or ratio != 1.0:
        queued_s = queued_s.longer(ratio)
    drain = maximum(overlap.drain, _NO_DRAIN)
    if queued_s.latency_s is None:
        slack_s /= drain
        after_s = _after_lane_s
    else:
        after_s = partial(_after_latency_s, drain=drain)
    first = after_s(queued_s, slack_s, overlap)
    return first, first if slower is None else after_s(queued_s.longer(slower), slack_s, overlap)


def _after_lane_s(queued_s: QueuedSeconds, beside_s: Array, overlap: Overlap) -> Any:
    """What is behind each bucket, less what passes beside the lane after it is ready."""
    behind_s = queued_s.behind_s
    backlog_s = maximum(_most(behind_s - beside_s), 0.0)
    return overlap.exposed_ratio * (behind_s[0] - backlog_s) + backlog_s


def _after_latency_s(
    queued_s: QueuedSeconds, slack_s: Array, overlap: Overlap, *, drain: Any
) -> Any:
    """The same where latency passes beside the collective before: it uses up the lane's slack."""
    behind_s, latency_s = queued_s
    slack_s = slack_s - latency_s
    # A bucket that can be sent only after the lane's end has negative slack.
    beside_s = np.maximum(slack_s, 0.0)
    left_s = behind_s - beside_s / drain
    backlog_s = maximum(_most(left_s), 0.0)
    after_s = maximum(_most(left_s + (beside_s - slack_s)), 0.0)
    return overlap.exposed_ratio * (behind_s[0] - backlog_s) + after_s


def _most(values: Array) -> Any:
    """The most of some values, or of each row's."""
    return values[values.argmax()] if values.ndim == 1 else np.maximum.reduce(values)


def _alike(reference: Indices, others: Indices | None) -> Iterator[tuple[int, Indices]]:
    """(reference, some rows that have it and are alike), together all rows."""
    code = reference * 2 if others is None else reference * 2 + others
    order = np.argsort(code.astype(np.int16), kind="stable")
    in_order = code[order]
    ends = np.append(np.flatnonzero(np.diff(in_order)) + 1, len(order)).tolist()
    first = 0
    for end in ends:
        for start in range(first, end, _ROWS_AT_ONCE):
            yield int(in_order[first]) // 2, order[start : min(start + _ROWS_AT_ONCE, end)]
        first = end


# The axes of a mesh along which data-parallel ranks communicate: all of them, those that hold
# shards of one replica, and those that hold the same shard.
DP, DP_SHARD, DP_REPLICATE = "dp", "dp_shard", "dp_replicate"
# Of those that hold shards of one replica, the ranks with the same experts.
EXPERT_SHARD = "expert_shard"
Groups = Mapping[str, tuple[ProcessGroup, ...]]


class Ranks(NamedTuple):
    """What the ranks of one step bring to its collectives, or those of a step in each row.

    `groups` are the unlike process groups along each axis, `lane_s` the slowest rank's compute,
    `ready` when the buckets of all are, and `segments_s` what FSDP computes between its collectives
    (see `program`), its last axes those of `Task.cost_s`. `compute_ratio` is in these already;
    `ratio` scales all collectives.
    """

    groups: Groups
    ready: Ready
    segments_s: Any
    lane_s: Any
    compute_ratio: Any
    ratio: Any


class Communication(NamedTuple):
    """What ranks wait for in one step, or in a step of each row.

    `exposed_s` is what the step is longer than the slowest rank's compute; `unknown` says that
    nothing tells what one of the collectives costs. `relative_error` is that of what reduces
    gradients, and `slower_s` how much longer the step is if that is slower by as much: what hides
    behind compute may not, where it takes longer; None and 0 where errors were not asked for.
    """

    exposed_s: Any
    overlap: Overlap
    unknown: Any
    relative_error: Any = None
    slower_s: Any = 0.0


class Network(ABC):
    """What a strategy's collectives cost by some profiles; a group names one by its number."""

    def __init__(
        self, rules: Any, profiles: Sequence[MachineProfile], cluster: Cluster | None
    ) -> None:
        self._rules, self._profiles, self._cluster = rules, profiles, cluster

    def _sized(
        self, op: CollectiveName, sizes_bytes: Array
    ) -> tuple[CollectiveCosts, SizedCollective]:
        """A collective of buffers of some sizes."""
        costs = self._costs_of(op)
        return costs, SizedCollective(costs.corrections, sizes_bytes)

    def _costs_of(self, op: CollectiveName) -> CollectiveCosts:
        graph, cache = self._rules.graph, self._rules.cache
        of = graph.target, self._cluster, cache
        return CollectiveCosts(self._profiles, op, *of, in_switch=adds_in_switch(graph))

    @cached_property
    def known(self) -> dict[Hashable, tuple[Any, Communication]]:
        """What ranks were found to wait for, by their kinds, groups and coefficients."""
        return {}

    @abstractmethod
    def communication(self, ranks: Ranks, *, errors: bool = True) -> Communication:
        """What the ranks of a step, or of a step in each row, wait for, and its `errors`."""

    @abstractmethod
    def alone_s(self, ranks: Ranks) -> Any:
        """Seconds of all collectives of a step one after the other, as if nothing overlapped."""

    @abstractmethod
    def reductions(self, groups: Groups) -> Iterator[tuple[str, ProcessGroup, str]]:
        """(what reduces gradients, over which group, where its cost comes from) of one step."""

    @abstractmethod
    def missing(self, groups: Groups) -> ProfileError:
        """Why the collectives of one step have no cost."""

    @abstractmethod
    def add_tasks(self, tasks: TaskList, ranks: Ranks, overlap: Overlap) -> None:
        """Add one step's compute and collectives up to the update, the last task their end."""

    @abstractmethod
    def add_after_update(self, tasks: TaskList, ranks: Ranks) -> None:
        """Add the collectives that follow the update, if any do."""


class StepShape(NamedTuple):
    """What is asked of a graph's step beside its batch.

    `layer_collectives` are the groups of the ranks that share the layers of a micro-batch, if any.
    """

    strategy: Strategy
    accumulation_steps: int
    loader: Loader | None = None
    layer_collectives: LayerCollectives | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that one collective carries; ready once op `ready_after` has run."""

    size_bytes: int
    tensors: int
    ready_after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """A rank whose step is compiled: on a node where `devices_busy` ranks compute.

    `merging` says whether there are other ranks to merge gradients with. `trained` are the
    parameters of the rank, `updated` those of all ranks that it shards them with.
    """

    bound: BoundGraph
    profile: MachineProfile
    devices_busy: int
    merging: bool
    accumulation_steps: int
    trained: Trained
    updated: Trained
    cache: Cache
    exchanged: LayerCollectiveSeconds = NO_LAYER_COLLECTIVES

    @property
    def graph(self) -> OpGraph:
        return self.bound.graph

    def lanes(
        self,
        durations: Durations,
        *,
        count: int,
        host_s: Array,
        added_s: tuple[Any, Any] = (0.0, 0.0),
    ) -> MicroBatches:
        """So many micro-batches with these seconds of the host; the last adds `added_s`."""
        return MicroBatches(
            host_s=host_s,
            device_s=durations.device_s,
            last_host_s=host_s + added_s[0],
            last_device_s=durations.device_s + added_s[1],
            count=count,
            is_shared=self.graph.target == "cpu",
            awaited=durations.awaited,
        )

    @property
    def machine(self) -> tuple[MachineProfile, int, Cache]:
        """The machine, how many of its devices are busy, and what is known of it."""
        return self.profile, self.devices_busy, self.cache


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLane:
    """A rank's compute in a step under a strategy, with what that adds to it.

    `lanes` run `repeats` times. `copies_s` are all copies, of which `beside_s` are not in the
    lanes; what adds up the gradients of micro-batches takes `accumulate_s`, and is in neither where
    each rank does a shard of it (`sums_shards`). `segments_s` are what the strategy computes
    between collectives that it waits for, if there are any.
    """

    lanes: MicroBatches
    copies_s: float
    beside_s: float
    accumulate_s: float
    repeats: int = 1
    sums_shards: bool = False
    buckets: tuple[Bucket, ...] = ()
    copy_back_s: float = 0.0
    segments_s: Array = field(default_factory=lambda: np.zeros(0))


S = TypeVar("S", bound=Strategy)


class Rules(ABC, Generic[S]):
    """How a strategy divides the work of a graph's step, whatever the ranks and machines."""

    axes: ClassVar[tuple[str, ...]] = (DP,)
    # Those of them along which it exchanges experts that ranks divide.
    expert_axes: ClassVar[tuple[str, ...]] = ()
    network_class: ClassVar[type[Network]]
    """What its collectives cost."""
    unmeasured: ClassVar[str] = (
        "a ring over the slowest link, corrected by the nearest measured group if there is one"
    )
    """What stands for a collective that was not measured, in words."""
    waits_for: ClassVar[str] = "reducing gradients"
    """What ranks send each other, in words."""

    def __init__(self, graph: OpGraph, shape: StepShape, cache: Cache) -> None:
        self.graph, self.shape, self.cache = graph, shape, cache
        self.strategy: S = shape.strategy  # type: ignore[assignment]

    @property
    def segments(self) -> int:
        """How many numbers say what a rank computes between collectives that it waits for."""
        return 0

    @abstractmethod
    def lane(self, request: RankRequest, durations: Durations) -> RankLane:
        """What a rank computes in a step."""

    @abstractmethod
    def holding(self, tensors: StepTensors, buckets: Sequence[Bucket], *, merging: bool) -> Holding:
        """What a rank holds during a step; see `RankRequest` for `merging`."""

    def network(self, profiles: Sequence[MachineProfile], cluster: Cluster | None) -> Network:
        """What its collectives cost by some profiles."""
        return self.network_class(self, profiles, cluster)

    def shards(self, ranks: Any) -> Any:
        """Over how many of a step's ranks the strategy shards: a number, or one for each row."""
        if self.strategy.keeps.state != "shard":
            return 1
        most = self.strategy.shard_ranks
        return ranks if most is None else minimum(ranks, most)

    def update_share(self, ranks: Any) -> Any:
        """The part of the update that one rank does or waits for, its launch apart."""
        return 1.0 / self.shards(ranks)

    def op_ends_s(
        self, lanes: MicroBatches, accumulate_s: float, segments_s: Array, scale: float
    ) -> Iterator[tuple[Array, Array]]:
        """(end of each op in compute alone, its device's seconds unscaled) of some micro-batches.

        Of many micro-batches the first and the last ones are told. Ends count what the rank has
        computed by then, whatever it waited for; seconds are `scale` times those of the lanes.
        """
        last = lanes.count - 1
        for number in listed(lanes.count):
            end_s = lanes.ends_s(number) + (accumulate_s if number == last else 0.0)
            yield end_s * scale, lanes.last_device_s if number == last else lanes.device_s

    def assumptions(self) -> Iterator[str]:
        """What the strategy's costs take for granted, in words."""
        yield from ()

    def words(self, ranks: int) -> str:
        """What a step that is bound by communication waits for."""
        return f"{self.waits_for} of {ranks} ranks"


# More micro-batches than a timeline lists one by one.
_MOST_LISTED = 8


def listed(count: int) -> tuple[int, ...]:
    """The micro-batches that a timeline lists: all, or of many the first two and the last."""
    return tuple(range(count)) if count <= _MOST_LISTED else (0, 1, count - 1)


_RULES: dict[type[Strategy], type[Rules[Any]]] = {}
R = TypeVar("R", bound=Rules[Any])


def rules_for(strategy: type[Strategy]) -> Callable[[type[R]], type[R]]:
    """Register the rules of a strategy."""

    def register(rules: type[R]) -> type[R]:
        _RULES[strategy] = rules
        return rules

    return register


def rules_of(graph: OpGraph, shape: StepShape, cache: Cache) -> Rules[Any]:
    """The rules of a step's strategy, kept from one estimate to the next."""
    return cache.get(
        "strategy",
        (graph, shape.strategy),
        lambda: _RULES[type(shape.strategy)](graph, shape, cache),
        shape.accumulation_steps,
    )


def without_cost(profile: MachineProfile, op: CollectiveName) -> ProfileError:
    """A profile that says nothing of a collective which a strategy needs."""
    return ProfileError(
        f"profile '{profile.name}' has no {op.replace('_', '-')} costs; run 'estimator probe' "
        "with a larger --budget"
    )
