"""Cost one collective over any group of devices: measured points, carried over by formulas.

A formula gives rounds of latency and bytes over the busiest link. Where the profile has measured
the same collective over some group, the ratio of what was measured to what the formula says of that
group, size by size, corrects the formula for every other group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from estimator.cache import Cache
from estimator.elementwise import log, maximum, minimum, where
from estimator.machines.profile import (
    CollectiveCost,
    CollectiveName,
    DeviceKind,
    Link,
    MachineProfile,
)
from estimator.machines.typical import achieved_latency_s, is_known_by_datasheet
from estimator.placement.placement import nic_of
from estimator.placement.process_groups import ProcessGroup, carrier_of, ring_between
from estimator.placement.topology import Cluster
from estimator.timeline.corrections import NO_CORRECTIONS, Corrections
from estimator.timeline.inner_links import (
    NO_LINKS,
    PIPELINING,
    START_S,
    InnerLinks,
    LinksByDevices,
    keeps_order,
    links_over,
    pace_of,
    widest_link,
)
from estimator.timeline.lines import Line, as_array, fastest_s, powers
from estimator.timeline.nccl import USUAL_HOP_S, hop_latency_s, nccl_lines
from estimator.timeline.nearest import Lookup, Nearest, pool_of
from estimator.timeline.rings import RING_ROUNDS, RING_SHARE

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

# What a measured group is taken to be off by where the profile does not say, as of one size alone.
_UNSTATED_ERROR = 0.1
# What a formula misses by where nothing of its kind was measured, and per factor of e between the
# measured group and the one asked for.
FORMULA_ERROR = 0.3
ERROR_PER_E = 0.2
# NCCL's formula was judged on up to four nodes; beyond, congestion and stragglers of the fabric add
# to what it misses, for each factor of e.
JUDGED_NODES = 4
ERROR_PER_E_OF_NODES = 0.1


@dataclass(frozen=True, slots=True)
class Reference:
    """What one measured group says of a collective: how far the formula is off at each size.

    `blocking` are those of calls that ranks wait for, by seconds of computing before them, rising.
    """

    cost: CollectiveCost
    corrections: Corrections
    relative_error: float
    blocking: tuple[tuple[float, Corrections], ...] = ()


class CollectiveModel(NamedTuple):
    """Seconds of one collective by size, over one group or a row for each.

    The fastest of `lines`, one for each algorithm, times the corrections of a `reference`, which is
    a number among those of a `CollectiveCosts`. `unlike` is by what factor that reference's ranks
    and nodes differ from the group's. `unknown` says that nothing tells what the collective costs.
    """

    lines: tuple[Line, ...]
    reference: Any
    unlike: Any
    relative_error: Any
    unknown: Any

    def coefficients(self, ratio: Any = 1.0) -> Array:
        """The lines as an array, times a factor: (lines, 3) of one group, or (lines, 3, rows)."""
        return np.asarray(as_array(self.lines) * ratio)


class CollectiveCosts:
    """What some profiles say of one collective; a group names one of them by its number.

    Their devices are all of one kind, whose backend says how many rounds a collective takes. Groups
    measured on nodes of `cluster` are seen with its links.
    """

    def __init__(
        self,
        profiles: Sequence[MachineProfile],
        op: CollectiveName,
        kind: DeviceKind,
        cluster: Cluster | None,
        cache: Cache,
    ) -> None:
        self.op, self.kind, self.profiles = op, kind, profiles
        found: list[tuple[int, tuple[int, int]]] = []
        references: list[Reference] = []
        inner: list[tuple[InnerLinks | None, ...]] = []
        for number, profile in enumerate(profiles):
            links, known = known_of(profile, op, cluster, cache)
            inner.append(links)
            references += known
            found += [
                (2 * number + each.cost.spans_nodes, (each.cost.group_size, each.cost.nodes))
                for each in known
            ]
        self.references: tuple[Reference, ...] = tuple(references)
        # The last one stands for the formula, where nothing of the kind was measured.
        self.corrections = (*(each.corrections for each in references), NO_CORRECTIONS)
        self._errors = Lookup([*(each.relative_error for each in references), FORMULA_ERROR])
        self._nearest = Nearest(found, 2 * len(profiles))
        self._inner = LinksByDevices(inner)
        self._last: tuple[ProcessGroup, CollectiveModel] | None = None

    def model(self, group: ProcessGroup) -> CollectiveModel:
        """The collective's cost over a group of at least two ranks, or over that of each row."""
        # One answer asks of its group several times: the step, its reasons, its provenance.
        if (last := self._last) is not None and last[0] is group:
            return last[1]
        found = self._model(group)
        if isinstance(group.ranks, int):  # rows would be kept alive
            self._last = group, found
        return found

    def _model(self, group: ProcessGroup) -> CollectiveModel:
        links, unlinked = self._inner.at(group.network, group.per_node)
        reference, unlike = self._nearest.to(
            pool_of(group), lambda shape: _unlike_factor(shape, group)
        )
        known = reference >= 0
        farther = log(where(known, unlike, 1.0))
        return CollectiveModel(
            lines=lines_of(self.op, group, links, self.kind),
            reference=where(known, reference, len(self.references)),
            unlike=unlike,
            relative_error=self._errors[reference] + self._doubt(group, known, farther),
            unknown=(group.nodes == 1) & unlinked,
        )

    def _doubt(self, group: ProcessGroup, known: Any, farther: Any) -> Any:
        """What is missed far from the measured groups, or by a formula that none of them backs."""
        from_known = ERROR_PER_E * farther
        if self.kind == "cpu":
            return from_known
        beyond = log(maximum(group.nodes / JUDGED_NODES, 1.0))
        return where(known, from_known, ERROR_PER_E_OF_NODES * beyond)

    def source(self, group: ProcessGroup) -> str:
        """Where the numbers of one group's model come from."""
        model = self.model(group)
        if model.reference == len(self.references):
            known = is_known_by_datasheet(self.profiles[group.network])
            return "datasheet" if known else "fitted"
        exact = model.unlike == 1.0
        return self.references[model.reference].cost.provenance.source if exact else "fitted"


def _unlike_factor(shape: tuple[int, int], group: ProcessGroup) -> Any:
    """By what factor the ranks and the nodes of two groups differ, multiplied; 1 if alike."""
    size, nodes = shape
    larger = maximum(group.ranks, size) * maximum(group.nodes, nodes)
    return larger / (minimum(group.ranks, size) * minimum(group.nodes, nodes))


def lines_of(
    op: CollectiveName, group: ProcessGroup, links: InnerLinks, kind: DeviceKind
) -> tuple[Line, ...]:
    """What each algorithm of the backend takes: NCCL's on GPUs, gloo's ring on CPUs.

    In a ring the slowest hop sets the pace of every round.
    """
    if kind == "cuda":
        return nccl_lines(op, group, links)
    inside = group.per_node > 1
    latency_s = maximum(group.latency_s, where(inside, links.latency_s, 0.0))
    rate = minimum(group.bytes_per_s, where(inside, links.bytes_per_s, math.inf))
    carrier = carrier_of(op, kind)
    rounds, share = RING_ROUNDS[carrier](group.ranks), RING_SHARE[carrier](group.ranks)
    return (Line(rounds * latency_s, share / rate),)


class SizedCollective:
    """One collective for buffers of given sizes: each is a line times a correction.

    So is their weighted sum. `costs` says what corrections there are.
    """

    def __init__(
        self,
        corrections: Sequence[Corrections],
        sizes_bytes: Array,
        weights: Array | float = 1.0,
    ) -> None:
        some = sizes_bytes > 0
        sizes = np.where(some, sizes_bytes, 1.0)
        scale = np.broadcast_to(weights, some.shape) * some
        found = np.array([each.at(sizes) for each in corrections])
        at_sizes = found.reshape(len(corrections), len(sizes)) * scale
        # For every reference and size, the factors of a line's three terms.
        self.factors = at_sizes[:, :, None] * powers(sizes)
        self._sums = self.factors.sum(axis=1)
        self._plain: list[list[float]] = self._sums.tolist()

    def time_s(self, model: CollectiveModel) -> Any:
        """Seconds for all the sizes one after the other; nothing takes no time."""
        if len(model.lines) > 1 and self.factors.shape[1] > 1:
            # Each size may have a fastest algorithm of its own.
            return self.times_s(model).sum(axis=0)
        reference = model.reference
        if isinstance(reference, int):
            factors: Any = self._plain[reference]
        else:
            factors = self._sums[reference].T
        seconds = [_sum_of(line, factors) for line in model.lines]
        return reduce(minimum, seconds)

    def times_s(self, model: CollectiveModel) -> Array:
        """Seconds for each of the sizes: (sizes,), or (sizes, rows)."""
        return fastest_s(self.factors[model.reference], model.coefficients())


def _sum_of(line: Line, factors: Any) -> Any:
    of_start, of_bytes, of_root = factors
    return line.alpha_s * of_start + line.beta_s_per_byte * of_bytes + line.root_s * of_root


class GroupCollective:
    """One collective over one group, by what one profile says of it."""

    def __init__(self, costs: CollectiveCosts, group: ProcessGroup) -> None:
        self._costs, self._group = costs, group
        self.model = costs.model(group)

    @classmethod
    def of(
        cls,
        profile: MachineProfile,
        op: CollectiveName,
        group: ProcessGroup,
        *,
        cluster: Cluster | None = None,
        cache: Cache | None = None,
    ) -> GroupCollective | None:
        """None where nothing says what the collective costs over at least two ranks."""
        kept = cache or Cache(limit_bytes=0)
        found = cls(CollectiveCosts((profile,), op, profile.kind, cluster, kept), group)
        return None if found.model.unknown else found

    @property
    def corrections(self) -> Corrections:
        """Those of the nearest measured group."""
        corrections: Corrections = self._costs.corrections[self.model.reference]
        return corrections

    @property
    def source(self) -> str:
        """Where the numbers come from."""
        return self._costs.source(self._group)

    def time_s(self, size_bytes: float) -> float:
        """Seconds for a buffer of `size_bytes` bytes; 0 for none."""
        return float(self.times_s(np.array([size_bytes]))[0])

    def times_s(self, sizes_bytes: Array) -> Array:
        """Seconds for buffers of some sizes, each alone."""
        return np.asarray(SizedCollective(self._costs.corrections, sizes_bytes).times_s(self.model))


_Known = tuple[tuple[InnerLinks | None, ...], tuple[Reference, ...]]


def known_of(
    profile: MachineProfile, op: CollectiveName, cluster: Cluster | None, cache: Cache
) -> _Known:
    """What a profile says of one collective: hops within a node, and the groups measured."""
    return cache.get("collective", (profile, cluster), lambda: _known(profile, op, cluster), op)


def _known(profile: MachineProfile, op: CollectiveName, cluster: Cluster | None) -> _Known:
    costs = _costs_of(profile, op)
    inner = _inner_links(costs, profile)
    return inner, tuple(_reference(profile, cost, inner, cluster) for cost in costs)


def _costs_of(profile: MachineProfile, op: CollectiveName) -> list[CollectiveCost]:
    """Over every shape of group that was measured: itself, else the one that is run for it."""
    measured = [cost for cost in profile.collectives if cost.points]
    own = [cost for cost in measured if cost.op == op]
    carrier, shapes = carrier_of(op, profile.kind), {(cost.group_size, cost.nodes) for cost in own}
    if carrier != op:
        own += [
            cost
            for cost in measured
            if cost.op == carrier and (cost.group_size, cost.nodes) not in shapes
        ]
    return own


def _inner_links(
    costs: Sequence[CollectiveCost], profile: MachineProfile
) -> tuple[InnerLinks | None, ...]:
    """Hops within a node by how many devices take part.

    From the smallest measured group of one node, else from the links between devices.
    """
    local = [cost for cost in costs if not cost.spans_nodes and cost.group_size > 1]
    direct = [widest_link(profile, used) for used in range(len(profile.devices) + 1)]
    if local:
        cost = min(local, key=lambda item: item.group_size)
        return (_measured_links(cost, profile, direct[-1]),)
    return tuple(None if link is None else links_over(profile, link) for link in direct)


def _measured_links(cost: CollectiveCost, profile: MachineProfile, link: Link | None) -> InnerLinks:
    """The hops of a measured group whose devices are joined by a link."""
    op, ranks = cost.op, cost.group_size
    if profile.kind == "cuda":
        hop_s = hop_latency_s(op, ranks, cost.latency_s)
        return InnerLinks(
            latency_s=hop_s,
            bytes_per_s=cost.bandwidth_bytes_per_s * RING_SHARE[op](ranks),
            pipelining=PIPELINING[pace_of(profile, link)],
            start_s=hop_s * START_S / USUAL_HOP_S,
            keeps_order=keeps_order(profile),
        )
    carrier = carrier_of(op, profile.kind)
    return InnerLinks(
        latency_s=cost.latency_s / float(RING_ROUNDS[carrier](ranks)),
        bytes_per_s=cost.bandwidth_bytes_per_s * RING_SHARE[carrier](ranks),
    )


def _reference(
    profile: MachineProfile,
    cost: CollectiveCost,
    inner: Sequence[InnerLinks | None],
    cluster: Cluster | None,
) -> Reference:
    """Measured over formula, size by size; the formula sees the links as the profile has them."""
    nic = nic_of(profile, math.ceil(cost.group_size / cost.nodes))
    ring = ring_between(cost, network_latency_s(profile), nic, profile, cluster)
    links = inner[min(ring.per_node, len(inner) - 1)] or NO_LINKS
    lines = lines_of(cost.op, ring, links, profile.kind)
    corrections = Corrections.of(cost, lines, profile.kind)
    blocking: dict[float, list[tuple[float, float]]] = {}
    for window_s, size, seconds in cost.blocking:
        blocking.setdefault(window_s, []).append((size, seconds))
    return Reference(
        cost,
        corrections,
        cost.provenance.relative_error or _UNSTATED_ERROR,
        tuple(
            (window_s, Corrections.of(replace(cost, points=tuple(points)), lines, profile.kind))
            for window_s, points in sorted(blocking.items())
        ),
    )


def network_latency_s(profile: MachineProfile) -> float:
    """One-way seconds between neighbouring nodes: the nearest locality measured; 0 if unknown."""
    singles = [link for link in profile.network if link.flows == 1]
    return min((achieved_latency_s(link, profile.kind) for link in singles), default=0.0)
