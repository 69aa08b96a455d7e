"""Say how compute and all-reduces of a group disturb each other, by what a profile has measured."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from statistics import median

from estimator.profile import MachineProfile
from estimator.timeline.collectives import CollectiveModel, collective_model
from estimator.timeline.rings import Ring
from estimator.timeline.schedule import Overlap


@dataclass(frozen=True, slots=True, eq=False)
class GroupOverlap:
    """The overlap measured on groups of one size.

    Where it was measured on one node and is carried over to the network, `local` is the all-reduce
    that it was measured beside: over a slower link the same seconds of work are a smaller share.
    """

    group_size: int
    exposed_ratio: float
    slowdown_ratio: float
    carried_over: bool
    local: CollectiveModel | None

    def local_s(self, size_bytes: float) -> float:
        """Seconds of that all-reduce for `size_bytes`; inf where the overlap holds as it is."""
        if not self.carried_over or self.local is None or size_bytes <= 0:
            return math.inf
        return self.local.time_s(size_bytes)

    def scaled(self, share: float) -> Overlap:
        """The overlap with this share of the measured disturbance.

        An all-reduce that takes longer than the one measured disturbs by `local_s` over its time.
        """
        return Overlap(
            exposed_ratio=self.exposed_ratio * share,
            collective_slowdown_ratio=1.0 + max(self.slowdown_ratio - 1.0, 0.0) * share,
        )


_of_profile: OrderedDict[tuple[int, bool], tuple[MachineProfile, tuple[GroupOverlap, ...]]] = (
    OrderedDict()
)


def group_overlaps(profile: MachineProfile, *, across: bool) -> tuple[GroupOverlap, ...]:
    """The overlaps to choose from for groups on one node or `across` nodes, by group size.

    Those of the same reach where the profile has any, else those of the other.
    """
    key = (id(profile), across)
    if key not in _of_profile:
        _of_profile[key] = (profile, _grouped(profile, across))
        while len(_of_profile) > 128:
            _of_profile.popitem(last=False)
    return _of_profile[key][1]


def _grouped(profile: MachineProfile, across: bool) -> tuple[GroupOverlap, ...]:
    measured = [item for item in profile.overlaps if (item.nodes > 1) == across]
    found = measured or profile.overlaps
    groups = []
    for size in sorted({item.group_size for item in found}):
        near = [item for item in found if item.group_size == size]
        local = Ring(size, 1, size, math.inf, 0.0)
        groups.append(
            GroupOverlap(
                group_size=size,
                exposed_ratio=median(item.exposed_ratio for item in near),
                slowdown_ratio=median(item.collective_slowdown_ratio for item in near),
                carried_over=not measured,
                local=None if measured else collective_model(profile, "all_reduce", local),
            )
        )
    return tuple(groups)


def nearest_overlap(profile: MachineProfile, ring: Ring) -> GroupOverlap | None:
    """What was measured of the group of the nearest size; None where nothing was."""
    groups = group_overlaps(profile, across=ring.nodes > 1)
    if len(groups) <= 1:
        return groups[0] if groups else None
    return min(groups, key=lambda group: abs(group.group_size - ring.ranks))
