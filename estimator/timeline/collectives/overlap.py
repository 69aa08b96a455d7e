"""Say how compute and collectives of a group disturb each other, by what a profile has measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from estimator.cache import Cache
from estimator.elementwise import Array, maximum, minimum
from estimator.machines.profile import MachineProfile, OverlapCost
from estimator.machines.typical import typical_overlaps
from estimator.placement.mesh import ProcessGroup
from estimator.timeline.collectives.costs import GroupCollective, Lookup, Nearest, pool_of


class Overlap(NamedTuple):
    """How compute and collectives slow each other while both run: one step's, or a row for each.

    With e the `exposed_ratio` and s the `slowdown`, a collective beside compute advances at 1/s of
    its own rate, and compute at 1 − e/s of its own.
    """

    exposed_ratio: Any = 0.0
    slowdown: Any = 1.0

    @classmethod
    def of(cls, exposed_ratio: Any, collective_slowdown_ratio: Any) -> Overlap:
        """The overlap of a measured pair: compute does not run backwards beside a collective."""
        slowdown = maximum(maximum(collective_slowdown_ratio, exposed_ratio), 1.0)
        return cls(exposed_ratio, slowdown)

    @property
    def compute_rate(self) -> Any:
        return maximum(1.0 - self.exposed_ratio / self.slowdown, 0.0)

    @property
    def drain(self) -> Any:
        """Seconds of compute alone in which one second of collectives passes beside it."""
        return self.slowdown - self.exposed_ratio

    @property
    def is_free(self) -> bool:
        """Whether neither slows the other, in any row."""
        return not (np.any(self.exposed_ratio) or np.any(np.greater(self.slowdown, 1.0)))


NO_OVERLAP = Overlap()


@dataclass(frozen=True, slots=True, eq=False)
class GroupOverlap:
    """The overlap measured on groups of one size, beside all-reduces of some sizes, rising.

    `alone` is that all-reduce. Where the overlap was measured on one node and `is_carried` over to
    the network, the same seconds of work are a smaller share of a slower link's time.
    """

    group_size: int
    sizes_bytes: Array
    exposed_ratios: Array
    slowdown_ratios: Array
    alone: GroupCollective | None
    is_carried: bool

    def beside(self, sizes_bytes: Array) -> tuple[float, float, float]:
        """(exposed ratio, slowdown ratio, seconds that hold for) all-reduces of some sizes.

        Those between two measured sizes are between their ratios, by the logarithms of the sizes,
        and each counts by its time. The seconds are inf where the overlap holds as it is.
        """
        sizes = sizes_bytes[sizes_bytes > 0]
        weights = np.ones(len(sizes)) if self.alone is None else self.alone.times_s(sizes)
        if not weights.sum():
            return float(self.exposed_ratios[-1]), float(self.slowdown_ratios[-1]), math.inf
        places = np.log(sizes), np.log(self.sizes_bytes)
        exposed, slowdown = (
            float(np.average(np.interp(*places, ratios), weights=weights))
            for ratios in (self.exposed_ratios, self.slowdown_ratios)
        )
        if self.alone is None or not self.is_carried:
            return exposed, slowdown, math.inf
        return exposed, slowdown, self.alone.time_s(float(sizes.sum()))


def _groups(profile: MachineProfile, cache: Cache, across: bool) -> tuple[GroupOverlap, ...]:
    """The overlaps to choose from for groups on one node or `across` nodes, by group size.

    Those of the same locality where the profile has any, else those of the other.
    """
    known = profile.overlaps or typical_overlaps(profile)
    measured = [item for item in known if (item.nodes > 1) == across]
    groups: dict[int, list[OverlapCost]] = {}
    for item in sorted(measured or known, key=lambda item: item.group_size):
        groups.setdefault(item.group_size, []).append(item)
    return tuple(_of_group(profile, cache, some, not measured) for some in groups.values())


def _of_group(
    profile: MachineProfile, cache: Cache, costs: Sequence[OverlapCost], is_carried: bool
) -> GroupOverlap:
    ranks = costs[0].group_size
    by_size: dict[float, list[OverlapCost]] = {}
    for cost in sorted(costs, key=lambda cost: cost.size_bytes / cost.in_flight):
        by_size.setdefault(cost.size_bytes / cost.in_flight, []).append(cost)
    alone = ProcessGroup(ranks=ranks, nodes=1, per_node=ranks)
    return GroupOverlap(
        group_size=ranks,
        sizes_bytes=np.array(list(by_size)),
        exposed_ratios=np.array([median(c.exposed_ratio for c in s) for s in by_size.values()]),
        slowdown_ratios=np.array(
            [median(c.collective_slowdown_ratio for c in s) for s in by_size.values()]
        ),
        alone=GroupCollective.of(profile, "all_reduce", alone, cache=cache),
        is_carried=is_carried,
    )


class OverlapCosts:
    """How compute and collectives of `sizes_bytes` disturb each other on some profiles."""

    def __init__(
        self, profiles: Sequence[MachineProfile], sizes_bytes: Array, cache: Cache
    ) -> None:
        lines = [
            (2 * number + across, group)
            for number, profile in enumerate(profiles)
            for across in (False, True)
            for group in cache.get(
                "overlaps", (profile,), partial(_groups, profile, cache, across), across
            )
        ]
        self._nearest = Nearest(
            [(pool, group.group_size) for pool, group in lines], 2 * len(profiles)
        )
        groups = [group for _, group in lines]
        # The last value stands for groups of which nothing was measured: perfect overlap.
        self._known = Lookup([*(g.beside(sizes_bytes) for g in groups), (0.0, 1.0, math.inf)])

    def overlap(self, group: ProcessGroup, collective_s: Any) -> Overlap:
        """The overlap with collectives that take `collective_s` together.

        Collectives that take longer than the one measured disturb by its seconds over theirs.
        """
        nearest, _ = self._nearest.to(pool_of(group), lambda size: abs(group.ranks - size))
        exposed, slowdown, local_s = self._known[nearest]
        share = minimum(local_s / maximum(collective_s, _SHORTEST_S), 1.0)
        return Overlap.of(exposed * share, 1.0 + maximum(slowdown - 1.0, 0.0) * share)


# Shorter than any collective, so that none of no length divides by nothing.
_SHORTEST_S = 1e-300
