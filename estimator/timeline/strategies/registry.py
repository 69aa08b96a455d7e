"""Say what a data-parallel strategy has to answer, and find the rules of one by its name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from estimator.cache import Cache
from estimator.errors import ProfileError
from estimator.graph.op_graph import OpGraph
from estimator.machines.profile import CollectiveName, MachineProfile
from estimator.placement.process_groups import ProcessGroup
from estimator.placement.topology import Cluster
from estimator.timeline.bucket_queue import Ready
from estimator.timeline.overlaps import Overlap
from estimator.timeline.ranks import RankKind, StepShape
from estimator.timeline.tasks import TaskList
from estimator.workload import StrategyKind

Array = NDArray[np.float64]

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

    `exposed_s` is what the step is longer than the slowest rank's compute; `relative_error` is that
    of what reduces gradients, and `slower_s` how much longer it is if that is slower by as much:
    what hides behind compute may not, where it takes longer. `unknown` says that nothing tells
    what one of the collectives costs.
    """

    exposed_s: Any
    relative_error: Any
    overlap: Overlap
    unknown: Any
    slower_s: Any = 0.0


class Network(ABC):
    """What a strategy's collectives cost by some profiles; a group names one by its number."""

    @abstractmethod
    def communication(self, ranks: Ranks) -> Communication:
        """What the ranks of a step, or of a step in each row, wait for."""

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
        """Add the collectives that follow the update."""


class Rules(ABC):
    """How a strategy divides the work of a graph's step, whatever the ranks and machines."""

    kind: ClassVar[StrategyKind]
    axes: ClassVar[tuple[str, ...]] = (DP,)
    # Those of them along which it exchanges experts that ranks divide.
    expert_axes: ClassVar[tuple[str, ...]] = ()
    unmeasured: ClassVar[str] = (
        "a ring over the slowest link, corrected by the nearest measured group if there is one"
    )
    """What stands for a collective that was not measured, in words."""

    def __init__(self, graph: OpGraph, shape: StepShape, cache: Cache) -> None:
        self.graph, self.shape, self.cache = graph, shape, cache

    @property
    def segments(self) -> int:
        """How many numbers say what a rank computes between collectives that it waits for."""
        return 0

    @abstractmethod
    def network(self, profiles: Sequence[MachineProfile], cluster: Cluster | None) -> Network:
        """What its collectives cost by some profiles."""

    @abstractmethod
    def shards(self, ranks: Any) -> Any:
        """Over how many of a step's ranks the strategy shards: a number, or one for each row."""

    def update_share(self, ranks: Any) -> Any:
        """The part of the update that one rank does or waits for, its launch apart."""
        return 1.0 / self.shards(ranks)

    def op_ends_s(self, ranks: Ranks, kind: RankKind) -> Iterator[tuple[Array, Array]]:
        """(end of each op in compute alone, its device's seconds unscaled) of some micro-batches.

        Of many micro-batches the first and the last ones are told. Ends count what the rank has
        computed by then, whatever it waited for.
        """
        program = kind.program
        scale = ranks.compute_ratio * kind.slowdown_ratio
        last = program.lanes.count - 1
        for number in listed(program.lanes.count):
            end_s = program.lanes.ends_s(number) + (program.accumulate_s if number == last else 0.0)
            device_s = program.lanes.last_device_s if number == last else program.lanes.device_s
            yield end_s * scale, device_s

    @abstractmethod
    def words(self, ranks: int) -> str:
        """What a step that is bound by communication waits for."""


# More micro-batches than a timeline lists one by one.
_MOST_LISTED = 8


def listed(count: int) -> tuple[int, ...]:
    """The micro-batches that a timeline lists: all, or of many the first two and the last."""
    return tuple(range(count)) if count <= _MOST_LISTED else (0, 1, count - 1)


_Registered = type[Rules]
_RULES: dict[str, _Registered] = {}


def strategy(kind: StrategyKind) -> Callable[[_Registered], _Registered]:
    """Register the rules of a strategy by its name."""

    def register(rules: _Registered) -> _Registered:
        rules.kind = kind
        _RULES[kind] = rules
        return rules

    return register


def rules_of(graph: OpGraph, shape: StepShape, cache: Cache) -> Rules:
    """The rules of a step's strategy, kept from one estimate to the next."""
    return cache.get(
        "strategy",
        (graph, shape.strategy),
        lambda: _RULES[shape.strategy.kind](graph, shape, cache),
        shape.accumulation_steps,
    )


def without_cost(profile: MachineProfile, op: CollectiveName) -> ProfileError:
    """A profile that says nothing of a collective which a strategy needs."""
    return ProfileError(
        f"profile '{profile.name}' has no {op.replace('_', '-')} costs; run 'estimator probe' "
        "with a larger --budget"
    )
