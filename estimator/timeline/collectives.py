"""Cost one collective over any group of devices: measured points, carried over by formulas.

A formula gives α·rounds + bytes over the busiest link. Where the profile has measured the same
collective over some group, the ratio of what was measured to what the formula says of that group,
size by size, corrects the formula for every other group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from estimator.cache import Cache
from estimator.elementwise import log, maximum, minimum, where
from estimator.machines.profile import CollectiveCost, CollectiveName, DeviceKind, MachineProfile
from estimator.machines.typical import achieved_bytes_per_s, is_known_by_datasheet
from estimator.placement.placement import nic_of
from estimator.placement.process_groups import ProcessGroup, carrier_of, ring_between
from estimator.placement.topology import Cluster
from estimator.timeline.nccl import nccl_rounds
from estimator.timeline.nearest import Lookup, Nearest, pool_of
from estimator.timeline.rings import RING_ROUNDS, RING_SHARE

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

# What a measured group is taken to be off by where the profile does not say, as of one size alone.
_UNSTATED_ERROR = 0.1
# What a formula misses by where nothing of its kind was measured, and per factor of e between the
# measured group and the one asked for.
FORMULA_ERROR = 0.3
# Points on a line beyond the largest measured, each four times the one before.
_FURTHER_POINTS = 5
ERROR_PER_E = 0.2
# Links that carry collectives between devices of a node.
_DEVICE_LINKS = ("d2d", "nvlink", "infinity_fabric", "pcie")


@dataclass(frozen=True, slots=True, eq=False)
class Corrections:
    """Measured over formula at the logarithms of the sizes that were measured, sizes rising.

    `line` is the (α, β) of the formula for the measured group. `latency_s` is the part of the
    measured times that passes beside the collective before, as far as that is not over half.
    """

    log_sizes: Array
    log_ratios: Array
    line: tuple[float, float] = (1.0, 0.0)
    latency_s: float = 0.0

    def at(self, sizes_bytes: Array) -> Array:
        """Interpolated on logarithms, constant beyond both ends."""
        logs = np.interp(np.log(sizes_bytes), self.log_sizes, self.log_ratios)
        return np.asarray(np.exp(logs))

    def latency_at(self, sizes_bytes: Array) -> Array:
        """The parts of the times of some sizes that pass beside the collective before."""
        alpha_s, beta = self.line
        measured_s = (alpha_s + beta * sizes_bytes) * self.at(sizes_bytes)
        return np.asarray(np.minimum(self.latency_s / measured_s, 0.5))


NO_CORRECTIONS = Corrections(np.zeros(1), np.zeros(1))


@dataclass(frozen=True, slots=True)
class Reference:
    """What one measured group says of a collective: how far the formula is off at each size."""

    cost: CollectiveCost
    corrections: Corrections
    relative_error: float


def monotone(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Measured points sorted by size, each lowered to at most the time of the larger ones.

    What disturbs a measurement makes it longer, and a larger message that took less shows it.
    """
    result: list[tuple[float, float]] = []
    for size, seconds in sorted(points, reverse=True):
        if size > 0:
            result.append((size, min(seconds, result[-1][1]) if result else seconds))
    return tuple(reversed(result))


class InnerLinks(NamedTuple):
    """One hop of a ring within a node, or a row for each: its latency and rate."""

    latency_s: Any
    bytes_per_s: Any


NO_LINKS = InnerLinks(0.0, math.inf)


class CollectiveModel(NamedTuple):
    """Seconds of one collective by size, over one group or a row for each.

    A line, `alpha_s` + `beta_s_per_byte` · bytes, times the corrections of a `reference`, which is
    a number among those of a `CollectiveCosts`. `unlike` is by what factor that reference's ranks
    and nodes differ from the group's. `unknown` says that nothing tells what the collective costs.
    """

    alpha_s: Any
    beta_s_per_byte: Any
    reference: Any
    unlike: Any
    relative_error: Any
    unknown: Any

    def line(self, ratio: Any = 1.0) -> Array:
        """(α, β) as an array, times a factor: of one group, or (2, rows)."""
        return np.array([self.alpha_s * ratio, self.beta_s_per_byte * ratio])


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
        inner: list[InnerLinks | None] = []
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
        hops = [links or NO_LINKS for links in inner]
        self._inner = Lookup(
            [(*hop, links is None) for hop, links in zip(hops, inner, strict=True)]
        )

    def model(self, group: ProcessGroup) -> CollectiveModel:
        """The collective's cost over a group of at least two ranks, or over that of each row."""
        inner_s, inner_rate, unlinked = self._inner[group.network]
        alpha_s, beta = line(self.op, group, InnerLinks(inner_s, inner_rate), self.kind)
        reference, unlike = self._nearest.to(
            pool_of(group), lambda shape: _unlike_factor(shape, group)
        )
        known = reference >= 0
        farther = log(where(known, unlike, 1.0))
        return CollectiveModel(
            alpha_s=alpha_s,
            beta_s_per_byte=beta,
            reference=where(known, reference, len(self.references)),
            unlike=unlike,
            relative_error=self._errors[reference] + ERROR_PER_E * farther,
            unknown=(group.nodes == 1) & (unlinked != 0),
        )

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


def line(op: CollectiveName, group: ProcessGroup, inner: InnerLinks, kind: DeviceKind) -> Any:
    """(α, β) of a ring: seconds = α + β · bytes. The slowest hop sets the pace of every round."""
    inside = group.per_node > 1
    latency_s = maximum(group.latency_s, where(inside, inner.latency_s, 0.0))
    rate = minimum(group.bytes_per_s, where(inside, inner.bytes_per_s, math.inf))
    rounds = rounds_of(op, group.ranks, group.nodes, kind)
    return rounds * latency_s, share_of(op, group.ranks, kind) / rate


def rounds_of(op: CollectiveName, ranks: Any, nodes: Any, kind: DeviceKind) -> Any:
    """Rounds of latency of one group or of an array: gloo's (ring) on CPUs, NCCL's on GPUs."""
    if kind == "cuda":
        return nccl_rounds(op, ranks, nodes)
    return RING_ROUNDS[carrier_of(op, kind)](ranks)


def share_of(op: CollectiveName, ranks: Any, kind: DeviceKind) -> Any:
    """What crosses the busiest link, as a share of the buffer."""
    return RING_SHARE[carrier_of(op, kind)](ranks)


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
        # For every reference and size, the factors of α and of β.
        self.factors = np.stack([at_sizes, at_sizes * sizes_bytes], axis=2)
        self._sums = self.factors.sum(axis=1)
        self._plain: list[list[float]] = self._sums.tolist()

    def time_s(self, model: CollectiveModel) -> Any:
        """Seconds for all the sizes one after the other; nothing takes no time."""
        reference = model.reference
        if isinstance(reference, int):
            of_alpha, of_beta = self._plain[reference]
        else:
            of_alpha, of_beta = self._sums[reference].T
        return model.alpha_s * of_alpha + model.beta_s_per_byte * of_beta

    def times_s(self, model: CollectiveModel) -> Array:
        """Seconds for each of the sizes: (sizes,), or (sizes, rows)."""
        factors = self.factors[model.reference]
        if isinstance(model.reference, int):
            return np.asarray(factors @ model.line())
        of_alpha, of_beta = factors.transpose(2, 1, 0)
        return np.asarray(model.alpha_s * of_alpha + model.beta_s_per_byte * of_beta)


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
        sized = SizedCollective(self._costs.corrections, np.array([size_bytes]))
        return float(sized.time_s(self.model))


_Known = tuple[InnerLinks | None, tuple[Reference, ...]]


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


def _inner_links(costs: Sequence[CollectiveCost], profile: MachineProfile) -> InnerLinks | None:
    """Hops within a node, from the smallest measured group of one node, else from a d2d link."""
    local = [cost for cost in costs if not cost.spans_nodes and cost.group_size > 1]
    if local:
        cost = min(local, key=lambda item: item.group_size)
        return InnerLinks(
            latency_s=cost.latency_s / float(rounds_of(cost.op, cost.group_size, 1, profile.kind)),
            bytes_per_s=cost.bandwidth_bytes_per_s
            * share_of(cost.op, cost.group_size, profile.kind),
        )
    direct = [link for link in profile.links if link.kind in _DEVICE_LINKS]
    if not direct:
        return None
    best = max(direct, key=achieved_bytes_per_s)
    return InnerLinks(best.latency_s, achieved_bytes_per_s(best))


def _reference(
    profile: MachineProfile,
    cost: CollectiveCost,
    inner: InnerLinks | None,
    cluster: Cluster | None,
) -> Reference:
    """Measured over formula, size by size; the formula sees the links as the profile has them."""
    nic = nic_of(profile, math.ceil(cost.group_size / cost.nodes))
    ring = ring_between(cost, network_latency_s(profile), nic, profile, cluster)
    alpha_s, beta = line(cost.op, ring, inner or NO_LINKS, profile.kind)
    measured_sizes, measured_s = np.array(monotone(cost.points)).T
    sizes, seconds = _extended(measured_sizes, measured_s, beta)
    corrections = Corrections(
        np.log(sizes),
        np.log(seconds / (alpha_s + beta * sizes)),
        line=(alpha_s, beta),
        latency_s=_latency_s(cost, profile.kind),
    )
    return Reference(cost, corrections, cost.provenance.relative_error or _UNSTATED_ERROR)


def _latency_s(cost: CollectiveCost, kind: DeviceKind) -> float:
    """How long of a small collective the link waits for the ranks and can serve another one.

    Two threads of gloo run a collective each (ProcessGroupGloo.hpp), so one is sent while the
    other waits: two at once then take less than twice as long. NCCL runs one at a time.
    """
    if kind == "cuda" or not cost.pair_ratio:
        return 0.0
    size, ratio = min(cost.pair_ratio)
    sizes, seconds = np.array(monotone(cost.points)).T
    return float(max(2.0 - ratio, 0.0) * np.interp(size, sizes, seconds))


def _extended(sizes: Array, seconds: Array, beta: float) -> tuple[Array, Array]:
    """Points with some beyond the largest, on a line: a ratio to the formula would not hold there.

    A formula that is off in its latency is off by ever less as sizes rise. The line's slope is
    that of the points, as far as the largest of them is more than its latency, else the formula's.
    """
    first_s, last_s = seconds[0], seconds[-1]
    trust = max(0.0, 1.0 - 2.0 * first_s / last_s)
    measured = (last_s - first_s) / max(sizes[-1] - sizes[0], 1.0)
    slope = trust * measured + (1.0 - trust) * beta
    further = sizes[-1] * 4.0 ** np.arange(1, _FURTHER_POINTS + 1)
    line_s = last_s + slope * (further - sizes[-1])
    return np.append(sizes, further), np.append(seconds, line_s)


def network_latency_s(profile: MachineProfile) -> float:
    """One-way seconds between neighbouring nodes: the nearest reach measured; 0 if unknown."""
    return min((link.latency_s for link in profile.network if link.streams == 1), default=0.0)
