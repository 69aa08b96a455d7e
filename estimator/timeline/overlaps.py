"""Say how compute and collectives of a group disturb each other, by what a profile has measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from estimator.cache import Cache
from estimator.elementwise import maximum, minimum
from estimator.machines.profile import MachineProfile
from estimator.machines.typical import typical_overlaps
from estimator.placement.process_groups import ProcessGroup
from estimator.timeline.collectives import GroupCollective
from estimator.timeline.nearest import Lookup, Nearest, pool_of


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
    """The overlap measured on groups of one size.

    Where it was measured on one node and is carried over to the network, `local` is the all-reduce
    that it was measured beside: over a slower link the same seconds of work are a smaller share.
    """

    group_size: int
    exposed_ratio: float
    slowdown_ratio: float
    local: GroupCollective | None

    def local_s(self, size_bytes: float) -> float:
        """Seconds of that all-reduce for `size_bytes`; inf where the overlap holds as it is."""
        if self.local is None or size_bytes <= 0:
            return math.inf
        return self.local.time_s(size_bytes)


def group_overlaps(
    profile: MachineProfile, cache: Cache, *, across: bool
) -> tuple[GroupOverlap, ...]:
    """The overlaps to choose from for groups on one node or `across` nodes, by group size.

    Those of the same locality where the profile has any, else those of the other.
    """
    return cache.get("overlaps", (profile,), lambda: _grouped(profile, cache, across), across)


def _grouped(profile: MachineProfile, cache: Cache, across: bool) -> tuple[GroupOverlap, ...]:
    known = profile.overlaps or typical_overlaps(profile)
    measured = [item for item in known if (item.nodes > 1) == across]
    found = measured or known
    groups = []
    for size in sorted({item.group_size for item in found}):
        near = [item for item in found if item.group_size == size]
        alone = ProcessGroup(ranks=size, nodes=1, per_node=size)
        carried = (
            None if measured else GroupCollective.of(profile, "all_reduce", alone, cache=cache)
        )
        groups.append(
            GroupOverlap(
                group_size=size,
                exposed_ratio=median(item.exposed_ratio for item in near),
                slowdown_ratio=median(item.collective_slowdown_ratio for item in near),
                local=carried,
            )
        )
    return tuple(groups)


class OverlapCosts:
    """How compute and collectives of `size_bytes` bytes disturb each other on some profiles."""

    def __init__(self, profiles: Sequence[MachineProfile], size_bytes: float, cache: Cache) -> None:
        found = [
            (2 * number + across, group)
            for number, profile in enumerate(profiles)
            for across in (False, True)
            for group in group_overlaps(profile, cache, across=across)
        ]
        self._nearest = Nearest(
            [(pool, group.group_size) for pool, group in found], 2 * len(profiles)
        )
        groups = [group for _, group in found]
        # The last value stands for groups of which nothing was measured: perfect overlap.
        known = [(g.exposed_ratio, g.slowdown_ratio, g.local_s(size_bytes)) for g in groups]
        self._known = Lookup([*known, (0.0, 1.0, math.inf)])

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
