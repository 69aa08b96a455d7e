"""Cost one collective over any group of devices: measured points, carried over by formulas.

A formula gives rounds of latency and bytes over the busiest link. Where the profile has measured
the same collective over some group, the ratio of what was measured to what the formula says of that
group, size by size, corrects the formula for every other group. What ranks of gloo wait for over a
network is told apart from what links are busy for, since other groups have slower links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add, mul
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from estimator.cache import Cache
from estimator.elementwise import Array, Indices, log, maximum, minimum, taken, where
from estimator.machines.profile import (
    CollectiveCost,
    CollectiveName,
    DeviceKind,
    Link,
    MachineProfile,
)
from estimator.machines.typical import is_known_by_datasheet
from estimator.placement.mesh import ProcessGroup, carrier_of, ring_between
from estimator.placement.placement import hop_locality, network_latency_s, nic_of
from estimator.placement.topology import Cluster
from estimator.timeline.collectives.algorithms import (
    PIPELINING,
    RING_ROUNDS,
    RING_SHARE,
    START_S,
    USUAL_HOP_S,
    Algorithm,
    InnerLinks,
    Line,
    Lines,
    LinksByDevices,
    algorithms_of,
    expert_dispatch,
    fastest_s,
    hop_latency_s,
    links_over,
    nccl_lines,
    network_traits,
    pace_of,
    powers,
    widest_link,
)

Shape = TypeVar("Shape", bound=Hashable)


class Nearest(Generic[Shape]):
    """Which of some measured things is nearest to a group, among those of the group's pool.

    A pool is one profile's groups on one node (2 · profile) or over nodes (2 · profile + 1).
    """

    def __init__(self, found: Sequence[tuple[int, Shape]], pools: int) -> None:
        self._shapes = list(dict.fromkeys(shape for _, shape in found))
        numbers = np.full((len(self._shapes), pools), -1, dtype=np.intp)
        for number, (pool, shape) in enumerate(found):
            row = self._shapes.index(shape)
            if numbers[row, pool] < 0:
                numbers[row, pool] = number
        self._numbers = numbers
        self._of_pool: list[list[tuple[int, Shape]]] = [
            [(n, shape) for n, shape in zip(column, self._shapes, strict=True) if n >= 0]
            for column in numbers.T.tolist()
        ]

    def to(self, pool: Any, distance: Callable[[Shape], Any]) -> tuple[Any, Any]:
        """(number of the first nearest, or -1; its distance) for one group or for each row."""
        # Among equals the first listed wins, whatever the order of the shapes.
        if isinstance(pool, int):
            found = [(distance(shape), number) for number, shape in self._of_pool[pool]]
            away, number = min(found, default=(math.inf, -1))
            return number, away
        best = np.full(len(pool), math.inf)
        chosen = np.full(len(pool), -1, dtype=np.intp)
        for shape, numbers in zip(self._shapes, self._numbers, strict=True):
            number = numbers[pool]
            away = np.where(number >= 0, distance(shape), math.inf)
            nearer = (away < best) | ((away == best) & (number < chosen))
            chosen = np.where(nearer, number, chosen)
            best = np.minimum(best, away)
        return chosen, best


def pool_of(group: ProcessGroup) -> Any:
    """The pool of a group or of each row: see `Nearest`."""
    return 2 * group.network + (group.nodes > 1)


class Lookup:
    """Values by number: plain ones for a plain number, arrays for an array of numbers.

    A value may be a tuple: an array of numbers then gives an array for each of its items.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._plain = list(values)
        columns = np.array(self._plain, dtype=np.float64).T
        self._columns = [column.copy() for column in columns] if columns.ndim > 1 else columns

    def __getitem__(self, number: Any) -> Any:
        if type(number) is int:
            return self._plain[number]
        if isinstance(self._columns, list):
            return [column[number] for column in self._columns]
        return self._columns[number]


# Points on a line beyond the largest measured, each four times the one before.
_FURTHER_POINTS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Corrections:
    """Measured over formula at the logarithms of the sizes that were measured, sizes rising.

    `lines` are those of the formula for the measured group. Over a network its latencies have
    ratios of their own, `start_ratios`. `latency_s` is the part of the measured times that passes
    beside the collective before, as far as that is not over half. `idle_ratio` is what large
    collectives take over the time that they keep their busiest link busy.
    """

    log_sizes: Array
    log_ratios: Array
    lines: tuple[Line, ...] = (Line(1.0, 0.0),)
    latency_s: float = 0.0
    start_ratios: Array | None = None
    idle_ratio: float = 1.0

    @classmethod
    def of(cls, cost: CollectiveCost, lines: tuple[Line, ...], kind: DeviceKind) -> Corrections:
        """Those of a measured group whose formula is `lines`."""
        measured_sizes, measured_s = np.array(monotone(cost.points)).T
        beta = min(line.beta_s_per_byte for line in lines)
        sizes, seconds = _extended(measured_sizes, measured_s, beta)
        over_network = kind == "cpu" and cost.spans_nodes and lines[0].alpha_s and beta
        formula_s = beta * sizes if over_network else fastest_s(powers(sizes), np.array(lines))
        ratios, start_ratios = seconds / formula_s, None
        idle_ratio = max(float(ratios[len(measured_s) - 1]), 1.0)
        if over_network:
            # What gloo takes beside sending, for its threads and its sums, takes no longer over a
            # slower link; of a large collective it passes while links are busy.
            ratios = np.minimum(ratios, 1.0)
            start_ratios = (seconds - ratios * formula_s) / lines[0].alpha_s
        latency_s = _latency_s(cost, kind)
        return cls(np.log(sizes), np.log(ratios), lines, latency_s, start_ratios, idle_ratio)

    def factors(self, sizes_bytes: Array) -> Array:
        """What the terms of a group's line are multiplied by for each size: (sizes, 3)."""
        found = self.at(sizes_bytes)[:, None] * powers(sizes_bytes)
        if self.start_ratios is not None:
            found[:, 0] = np.interp(sizes_bytes, np.exp(self.log_sizes), self.start_ratios)
        return found

    def at(self, sizes_bytes: Array) -> Array:
        """Interpolated on logarithms, constant beyond both ends."""
        logs = np.interp(np.log(sizes_bytes), self.log_sizes, self.log_ratios)
        return np.asarray(np.exp(logs))

    def latency_at(self, sizes_bytes: Array) -> Array:
        """The parts of the times of some sizes that pass beside the collective before."""
        measured_s = fastest_s(self.factors(sizes_bytes), np.array(self.lines))
        return np.asarray(np.minimum(self.latency_s / measured_s, 0.5))


NO_CORRECTIONS = Corrections(np.zeros(1), np.zeros(1))


def monotone(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Measured points sorted by size, each lowered to at most the time of the larger ones.

    What disturbs a measurement makes it longer, and a larger message that took less shows it.
    """
    result: list[tuple[float, float]] = []
    for size, seconds in sorted(points, reverse=True):
        if size > 0:
            result.append((size, min(seconds, result[-1][1]) if result else seconds))
    return tuple(reversed(result))


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


_MOST_SHAPES = 1 << 12
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
class MeasuredReference:
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
    unknown: Any

    def of(self, rows: Indices | None) -> Lines:
        """The lines of some rows; None for one group."""
        if rows is None:
            return np.array([*map(tuple, self.lines)])
        return [Line(*(taken(term, rows) for term in line)) for line in self.lines]


class CollectiveCosts:
    """What some profiles say of one collective; a group names one of them by its number.

    Their devices are all of one kind, whose backend says how many rounds a collective takes. Groups
    measured on nodes of `cluster` are seen with its links. With `copies` it is what DeepEP does of
    an all-to-all of tokens, of which no group was measured; `in_switch` says whether switches add.
    """

    def __init__(
        self,
        profiles: Sequence[MachineProfile],
        op: CollectiveName,
        kind: DeviceKind,
        cluster: Cluster | None,
        cache: Cache,
        copies: int = 0,
        in_switch: bool = True,
    ) -> None:
        self.op, self.kind, self.profiles = op, kind, profiles
        self._algorithms = algorithms_of(op, in_switch=in_switch)
        if copies:
            self._algorithms = (expert_dispatch(copies),)
        found: list[tuple[int, tuple[int, int]]] = []
        references: list[MeasuredReference] = []
        inner: list[tuple[InnerLinks, ...]] = []
        for number, profile in enumerate(profiles):
            made = partial(_known, profile, op, cluster)
            links, known = cache.get("collective", (profile, cluster), made, op)
            inner.append(links)
            known = () if copies else known
            references += known
            found += [
                (2 * number + each.cost.spans_nodes, (each.cost.group_size, each.cost.nodes))
                for each in known
            ]
        self.references: tuple[MeasuredReference, ...] = tuple(references)
        # The last one stands for the formula, where nothing of the kind was measured.
        self.corrections = (*(each.corrections for each in references), NO_CORRECTIONS)
        self._errors = Lookup([*(each.relative_error for each in references), FORMULA_ERROR])
        self._idle = Lookup([each.idle_ratio for each in self.corrections])
        self._nearest = Nearest(found, 2 * len(profiles))
        self._inner = LinksByDevices(inner)
        # Other jobs ask of groups of the same shapes.
        self._models: dict[ProcessGroup, CollectiveModel] = cache.get(
            "models", (cluster, *profiles), dict, op, kind, copies, in_switch
        )

    def model(self, group: ProcessGroup) -> CollectiveModel:
        """The collective's cost over a group of at least two ranks, or over that of each row."""
        if not isinstance(group.ranks, int):
            return self._model(group)
        found = self._models.get(group)
        if found is None:
            if len(self._models) >= _MOST_SHAPES:
                self._models.clear()
            found = self._models[group] = self._model(group)
        return found

    def _model(self, group: ProcessGroup) -> CollectiveModel:
        links = self._inner.at(group.network, group.per_node)
        reference, unlike = self._nearest.to(
            pool_of(group), lambda shape: _unlike_factor(shape, group)
        )
        if self.kind == "cpu":
            # Groups along an axis that share a link fill what one of them leaves of it.
            filled = minimum(group.sharing_ratio, self._idle[reference])
            group = replace(group, bytes_per_s=group.bytes_per_s * filled)
        return CollectiveModel(
            lines=lines_of(self.op, group, links, self.kind, self._algorithms),
            reference=where(reference >= 0, reference, len(self.references)),
            unlike=unlike,
            unknown=(group.nodes == 1) & (links.bytes_per_s == math.inf),
        )

    def relative_error(self, group: ProcessGroup, model: CollectiveModel) -> Any:
        """What the reference is off, and what is missed far from it, or by a formula alone."""
        known = model.reference < len(self.references)
        missed = ERROR_PER_E * log(where(known, model.unlike, 1.0))
        if self.kind == "cuda":
            beyond = log(maximum(group.nodes / JUDGED_NODES, 1.0))
            missed = where(known, missed, ERROR_PER_E_OF_NODES * beyond)
        return self._errors[model.reference] + missed

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
    op: CollectiveName,
    group: ProcessGroup,
    links: InnerLinks,
    kind: DeviceKind,
    algorithms: Sequence[Algorithm] | None = None,
) -> tuple[Line, ...]:
    """What each algorithm of the backend takes: NCCL's on GPUs, gloo's ring on CPUs.

    In a ring the slowest hop sets the pace of every round.
    """
    if kind == "cuda":
        return nccl_lines(op, group, links, algorithms=algorithms)
    inside = group.per_node > 1
    latency_s = maximum(group.latency_s, where(inside, links.latency_s, 0.0))
    rate = minimum(group.bytes_per_s, where(inside, links.bytes_per_s, math.inf))
    carrier = carrier_of(op, kind)
    rounds, share = RING_ROUNDS[carrier](group.ranks), RING_SHARE[carrier](group.ranks)
    return (Line(rounds * latency_s, share / rate),)


_FEW_SIZES = 8


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
        # For every reference and size, the factors of a line's three terms.
        self.factors = np.array([each.factors(sizes) for each in corrections]) * scale[:, None]
        # Equal buffers, as those of equal blocks, take as long as each other.
        _, first, place = np.unique(sizes + 1j * scale, return_index=True, return_inverse=True)
        self._place: Indices | None = place if len(first) < len(sizes) else None
        self._distinct = self.factors[:, first] if len(first) < len(sizes) else self.factors
        self._of_one: list[list[float]] = self.factors[:, 0].tolist() if len(sizes) == 1 else []
        # Of one group few sizes are worked out sooner as plain numbers.
        few = self._distinct.shape[1] <= _FEW_SIZES
        self._plain: list[list[list[float]]] | None = self._distinct.tolist() if few else None

    def time_s(self, model: CollectiveModel) -> Any:
        """Seconds for all the sizes one after the other; nothing takes no time."""
        if self._of_one:
            # Lines of many rows as they are: to copy them into one array takes longer.
            reference, factors = model.reference, self.factors[:, 0]
            some = self._of_one[reference] if type(reference) is int else factors[reference].T
            seconds = [sum(map(mul, line, some)) for line in model.lines]
            return reduce(minimum, seconds)
        # One group's are added in the order of many groups', where numpy would add them pairwise.
        return reduce(add, self.times_s(model), 0.0)

    def times_s(self, model: CollectiveModel) -> Array:
        """Seconds for each of the sizes: (sizes,), or (sizes, rows)."""
        reference = model.reference
        if isinstance(reference, int):
            return self.each_s(model, reference)
        seconds = np.empty((self.factors.shape[1], len(reference)))
        for number in range(len(self.factors)):
            rows = np.flatnonzero(reference == number)
            if len(rows):
                seconds[:, rows] = self.each_s(model, number, rows)
        return seconds

    def each_s(self, model: CollectiveModel, reference: int, rows: Indices | None = None) -> Array:
        """Seconds for each of the sizes by one reference: of one group, or of some rows."""
        if rows is None and self._plain is not None:
            sizes, lines = self._plain[reference], model.lines
            fastest = [min([a * x + b * y + c * z for a, b, c in lines]) for x, y, z in sizes]
            seconds = np.array(fastest)
        else:
            seconds = fastest_s(self._distinct[reference], model.of(rows))
        return seconds if self._place is None else seconds[self._place]


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


def _known(
    profile: MachineProfile, op: CollectiveName, cluster: Cluster | None
) -> tuple[tuple[InnerLinks, ...], tuple[MeasuredReference, ...]]:
    """What a profile says of one collective: hops within a node, and the groups measured."""
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
) -> tuple[InnerLinks, ...]:
    """Hops within a node by how many devices take part.

    From the smallest measured group of one node, else from the links between devices.
    """
    local = [cost for cost in costs if not cost.spans_nodes and cost.group_size > 1]
    direct = [widest_link(profile, used) for used in range(len(profile.devices) + 1)]
    if local:
        cost = min(local, key=lambda item: item.group_size)
        return (_measured_links(cost, profile, direct[-1]),)
    return tuple(links_over(profile, link) for link in direct)


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
            over_nvlink=link is not None and link.kind == "nvlink",
            **network_traits(profile),
        )
    carrier = carrier_of(op, profile.kind)
    return InnerLinks(
        latency_s=cost.latency_s / float(RING_ROUNDS[carrier](ranks)),
        bytes_per_s=cost.bandwidth_bytes_per_s * RING_SHARE[carrier](ranks),
    )


def _reference(
    profile: MachineProfile,
    cost: CollectiveCost,
    inner: Sequence[InnerLinks],
    cluster: Cluster | None,
) -> MeasuredReference:
    """Measured over formula, size by size; the formula sees the links as the profile has them."""
    nic = nic_of(profile, math.ceil(cost.group_size / cost.nodes))
    # Its hops are as long as those of other groups there.
    is_there = cluster is not None and cluster.nodes.keys() >= set(cost.hosts)
    locality = hop_locality(cluster if is_there else None)
    ring = ring_between(cost, network_latency_s(profile, locality), nic, profile, cluster)
    links = inner[min(ring.per_node, len(inner) - 1)]
    lines = lines_of(cost.op, ring, links, profile.kind)
    corrections = Corrections.of(cost, lines, profile.kind)
    blocking: dict[float, list[tuple[float, float]]] = {}
    for window_s, size, seconds in cost.blocking:
        if size > 0:
            blocking.setdefault(window_s, []).append((size, seconds))
    return MeasuredReference(
        cost,
        corrections,
        cost.provenance.relative_error or _UNSTATED_ERROR,
        tuple(
            (window_s, Corrections.of(replace(cost, points=tuple(points)), lines, profile.kind))
            for window_s, points in sorted(blocking.items())
        ),
    )
