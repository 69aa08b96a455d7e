"""Order nodes for a fast all-reduce: for its ring a bottleneck travelling-salesman problem.

A ring is as fast as its slowest hop, each in its own direction. Links are measured with one flow at
a time, so the matrix does not show the contention of hops that leave a rack on its uplink: the
cluster file gives that. Rings of few hosts are exact (Held and Karp 1962). Of more, three
heuristics share the time: Hamiltonian cycles of hops below a bound that is bisected, by rotations
(Pósa 1976); cycles of a cheapest assignment, patched (Karp 1979); and insertion of segments (Or
1976) on hop costs raised to rising powers, which approach the maximum, for shared uplinks and for
the total of all hops. Trees and halving-doubling are improved by exchanges.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np

from estimator.elementwise import Array, Flags, Indices
from estimator.errors import ProfileError, WorkloadError, quoted
from estimator.files import read_csv
from estimator.machines.profile import PairMatrix, Provenance
from estimator.placement.topology import Cluster
from estimator.timeline.collectives.algorithms import RING_ROUNDS, RING_SHARE
from estimator.units import parse_bandwidth_bytes_per_s, parse_seconds

Tour = Indices
ALGORITHMS = ("ring", "tree", "halving-doubling")
_POWERS = (1.0, 4.0, 16.0)
# Hosts of which every ring is compared: 2 ** 11 sets of the others.
_MOST_EXACT = 12
_MOST_SEGMENT = 12
_MOST_HOSTS = 1024
# What a link without one is given.
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Uplink:
    """A switch's uplink: the hosts below it, and the seconds of an all-reduce by a single flow."""

    below: Flags
    flow_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """Hosts in rank order, and the seconds of an all-reduce in this order and in the given one."""

    hosts: tuple[str, ...]
    ring_s: float
    given_s: float
    algorithm: str = "ring"


def rank_order(
    pairs: PairMatrix,
    *,
    size_bytes: float = 25 * 2**20,
    cluster: Cluster | None = None,
    algorithm: str = "ring",
    limit_s: float = 2.0,
    seed: int = 0,
) -> RankOrder:
    """The best order found within `limit_s` seconds for an all-reduce of `size_bytes`.

    `algorithm` is ``ring``, ``tree`` (NCCL's two) or ``halving-doubling``. Pairs measured one way
    only count both ways; `cluster` has the uplinks that hops of a ring share. Raises ProfileError
    where a pair was not measured, WorkloadError for another algorithm.
    """
    if algorithm not in ALGORITHMS:
        raise WorkloadError(
            f"algorithm {quoted(algorithm)} is unknown; write one of {', '.join(ALGORITHMS)}"
        )
    generator, end = np.random.default_rng(seed), time.monotonic() + limit_s
    given = np.arange(len(pairs.hosts))
    if algorithm == "ring":
        hops = hop_seconds(pairs, size_bytes)
        uplinks = shared_uplinks(pairs.hosts, size_bytes, cluster) if cluster else ()
        best = _ring_order(hops, uplinks, generator, end)
        seconds = [ring_seconds(hops, tour, uplinks) for tour in (best, given)]
    else:
        rounds = _rounds(pairs, size_bytes, algorithm)
        best = _exchanged(rounds, len(given), generator, end)
        seconds = _rounds_seconds(rounds, np.stack([best, given])).tolist()
    hosts = tuple(pairs.hosts[index] for index in best)
    return RankOrder(hosts=hosts, ring_s=seconds[0], given_s=seconds[1], algorithm=algorithm)


def read_pairs(path: str | os.PathLike[str]) -> PairMatrix:
    """The links of a CSV with the columns ``from,to,bandwidth`` and, if known, ``latency``.

    Cells are written as ``10GB/s`` and ``5us``. Raises ProfileError, naming the line.
    """
    cells: dict[tuple[str, str], tuple[float, float]] = {}
    try:
        rows = read_csv(path, most_rows=_MOST_HOSTS**2)
        columns = next(rows, [])
        if not {"from", "to", "bandwidth"} <= {*columns}:
            raise ProfileError(f"{path} has no links; begin it with from,to,bandwidth,latency")
        for number, row in enumerate(rows, start=2):
            if not row:
                continue
            try:
                cell = dict(zip(columns, row, strict=True))
                latency_s = max(parse_seconds(cell.get("latency") or "0s"), _LEAST_S)
                link = latency_s, parse_bandwidth_bytes_per_s(cell["bandwidth"])
                if not link[1] > 0:
                    raise ValueError("a link without bandwidth is none; leave its line out")
            except ValueError as error:
                raise ProfileError(f"{path}, line {number}: {error}") from None
            cells[cell["from"], cell["to"]] = link
    except OSError as error:
        raise ProfileError(f"cannot read {path} ({error.strerror}); check the path") from None
    hosts = tuple(dict.fromkeys(host for pair in cells for host in pair))

    def rows_of(part: int) -> tuple[tuple[float | None, ...], ...]:
        unlinked = (None, None)
        links = cells | {(host, host): unlinked for host in hosts}
        return tuple(
            tuple(links.get((one, other), unlinked)[part] for other in hosts) for one in hosts
        )

    return PairMatrix(
        hosts=hosts,
        latency_s=rows_of(0),
        bandwidth_bytes_per_s=rows_of(1),
        provenance=Provenance(source="imported"),
    )


def hop_seconds(pairs: PairMatrix, size_bytes: float) -> Array:
    """Seconds that an all-reduce takes if every hop is like this one; inf on the diagonal."""
    rounds, share = (tables["all_reduce"](len(pairs.hosts)) for tables in (RING_ROUNDS, RING_SHARE))
    return _link_seconds(pairs, rounds, share * size_bytes)


def _link_seconds(pairs: PairMatrix, rounds: float, sent_bytes: float) -> Array:
    """Seconds of so many messages over each link, and of what they send together."""
    count = len(pairs.hosts)
    if count < 2:
        raise ProfileError("an order needs at least two hosts; probe a cluster with --pairs all")
    hops = rounds * _filled(pairs.latency_s) + sent_bytes / _filled(pairs.bandwidth_bytes_per_s)
    off = ~np.eye(count, dtype=bool)
    if not np.isfinite(hops[off]).all():
        row, column = np.argwhere(~np.isfinite(hops) & off)[0]
        raise ProfileError(
            f"the link between '{pairs.hosts[row]}' and '{pairs.hosts[column]}' was not measured; "
            "probe the cluster again with --pairs all"
        )
    hops[~off] = np.inf
    return np.asarray(hops)


def _filled(rows: tuple[tuple[float | None, ...], ...]) -> Array:
    values = np.array([[np.nan if cell is None else cell for cell in row] for row in rows])
    return np.where(np.isnan(values), values.T, values)


def shared_uplinks(hosts: Sequence[str], size_bytes: float, cluster: Cluster) -> tuple[Uplink, ...]:
    """The uplinks of switches above some, not all, of the hosts, and the seconds of one flow."""
    share = RING_SHARE["all_reduce"](len(hosts))
    shared = []
    for name, switch in cluster.switches.items():
        below = np.array([name in cluster.switches_above(host) for host in hosts])
        if switch.uplink_bytes_per_s is not None and below.any() and not below.all():
            rate = cluster.payload_bytes_per_s(switch.uplink_bytes_per_s)
            shared.append(Uplink(below, share * size_bytes / rate))
    return tuple(shared)


def ring_seconds(hops: Array, tour: Tour, uplinks: Sequence[Uplink] = ()) -> float:
    """The slowest hop of the ring, or the uplink that most hops share: each round waits for it."""
    following = np.roll(tour, -1)
    shared_s = [
        uplink.flow_s * np.count_nonzero(uplink.below[tour] & ~uplink.below[following])
        for uplink in uplinks
    ]
    return float(max(hops[tour, following].max(), *shared_s, 0.0))


def _ring_order(
    hops: Array, uplinks: Sequence[Uplink], generator: np.random.Generator, end: float
) -> Tour:
    """The ring with the fastest bottleneck that was found; of equal ones, the least sum of hops."""
    if len(hops) <= _MOST_EXACT and not uplinks:
        bottleneck_s = ring_seconds(hops, _exact_tour(hops, np.maximum))
        return _exact_tour(np.where(hops <= bottleneck_s, hops, np.inf), np.add)

    def key(tour: Tour) -> tuple[float, float]:
        return ring_seconds(hops, tour, uplinks), float(hops[tour, np.roll(tour, -1)].sum())

    # Every host sends on a hop and receives on one.
    least_s = max(hops.min(axis=0).max(), hops.min(axis=1).max())
    best = np.arange(len(hops))
    bounded = _bounded_tours(hops, generator, end - (end - time.monotonic()) / 2)
    for tour in chain(bounded, _local_search_tours(hops, uplinks, generator, key)):
        best = min(best, tour, tour[::-1], key=key)
        if time.monotonic() > end or key(best)[0] <= least_s:
            break
    return best


def _exact_tour(costs: Array, joined: np.ufunc) -> Tour:
    """The cheapest ring, whose hops' costs are `joined`: np.maximum, or np.add.

    Of every set of hosts that a path from host 0 has visited, and of its last one, only the
    cheapest path can be part of the cheapest ring.
    """
    others = len(costs) - 1
    least = np.full((1 << others, others), np.inf)
    before = np.zeros((1 << others, others), dtype=np.intp)
    bits = 1 << np.arange(others)
    least[bits, np.arange(others)] = costs[0, 1:]
    for visited in range(1, 1 << others):
        path = joined(least[visited][:, None], costs[1:, 1:])
        free = np.flatnonzero(~visited & bits)
        least[visited | bits[free], free] = path.min(axis=0)[free]
        before[visited | bits[free], free] = path.argmin(axis=0)[free]
    visited, tour = (1 << others) - 1, [0]
    last = int(joined(least[visited], costs[1:, 0]).argmin())
    while visited:
        tour.append(last + 1)
        visited, last = visited & ~(1 << last), int(before[visited, last])
    return np.array([0, *tour[:0:-1]])


def _bounded_tours(hops: Array, generator: np.random.Generator, end: float) -> Iterator[Tour]:
    """Tours below a bound on the slower direction of every hop, which is bisected until `end`."""
    both = np.maximum(hops, hops.T)
    bounds = np.unique(both[np.isfinite(both)])
    # Every host has two neighbours, so no ring is faster than the second-best hop of any host.
    low = int(np.searchsorted(bounds, np.sort(both, axis=1)[:, 1].max()))
    high, middle = len(bounds) - 1, low
    while low <= high and time.monotonic() < end:
        share_s = (end - time.monotonic()) / 4
        near = [np.flatnonzero(row <= bounds[middle]).tolist() for row in both]
        tour = _hamiltonian_cycle(near, generator, time.monotonic() + share_s)
        if tour is None:
            low = middle + 1
        else:
            yield tour
            high = middle - 1
        middle = (low + high) // 2


def _hamiltonian_cycle(
    near: Sequence[Sequence[int]], generator: np.random.Generator, end: float
) -> Tour | None:
    """A Hamiltonian cycle of the graph with these neighbours, if one is found before `end`.

    A path is extended to the unvisited neighbour with the fewest unvisited neighbours (Warnsdorff's
    rule); where there is none, a Pósa rotation reverses a part of the path, which gives it another
    end.
    """
    count = len(near)
    while time.monotonic() < end:
        path = [int(generator.integers(count))]
        left = set(range(count)) - set(path)
        draws = iter(generator.random(20 * count).tolist())
        for draw in draws:
            free = [host for host in near[path[-1]] if host in left]
            while free:
                path.append(min(free, key=lambda host: sum(other in left for other in near[host])))
                left.discard(path[-1])
                free = [host for host in near[path[-1]] if host in left]
            if not left and path[0] in near[path[-1]]:
                return np.array(path)
            choices = near[path[-1]]
            if not choices:
                return None
            turned = path.index(choices[int(draw * len(choices))]) + 1
            path[turned:] = path[turned:][::-1]
    return None


def _local_search_tours(
    hops: Array,
    uplinks: Sequence[Uplink],
    generator: np.random.Generator,
    key: Callable[[Tour], tuple[float, float]],
) -> Iterator[Tour]:
    """Tours that no move shortens, from several starts and then from the best one kicked."""
    costs = np.where(np.isfinite(hops), hops, 0.0)
    for uplink in uplinks:
        # A hop over the uplink delays the other hops over it by its own seconds there.
        costs = costs + uplink.flow_s * (uplink.below[:, None] & ~uplink.below[None, :])
    powered = [(costs / costs.max()) ** power for power in _POWERS]
    best = np.arange(len(costs))
    for start in chain(map(_assigned_tour, powered[::-1]), repeat(None)):
        tour = _kicked(best, generator) if start is None else start
        for each in powered:
            tour = _local_optimum(each, tour)
            yield tour
            best = min(best, tour, key=key)


def _kicked(tour: Tour, generator: np.random.Generator) -> Tour:
    """A double bridge: two neighbouring parts of the tour change places, each as it runs."""
    first, second, third = np.sort(generator.choice(len(tour) + 1, 3, replace=False))
    return np.concatenate([tour[:first], tour[second:third], tour[first:second], tour[third:]])


def _assigned_tour(costs: Array) -> Tour:
    """The cheapest successor of every host, whose cycles are joined where that costs least."""
    from scipy.optimize import linear_sum_assignment

    apart = costs + np.eye(len(costs)) * (1 + costs.sum())
    following = linear_sum_assignment(apart)[1]
    while True:
        cycle = [0]
        while following[cycle[-1]] != 0:
            cycle.append(int(following[cycle[-1]]))
        others = np.setdiff1d(np.arange(len(costs)), cycle)
        if not len(others):
            return np.array(cycle)
        now = costs[np.arange(len(costs)), following]
        added = costs[np.ix_(cycle, following[others])] + costs[np.ix_(others, following[cycle])].T
        added -= now[cycle][:, None] + now[others][None, :]
        one, other = np.unravel_index(int(added.argmin()), added.shape)
        swapped = [cycle[one], others[other]]
        following[swapped] = following[swapped[::-1]]


def _local_optimum(costs: Array, tour: Tour) -> Tour:
    """Insertions of segments, the best one at a time, until none shortens the tour."""
    for _ in range(20 * len(tour)):
        lengths = range(1, min(_MOST_SEGMENT, len(tour) - 2) + 1)
        moves = (_best_insertion(costs, tour, length) for length in lengths)
        gain, moved = max(moves, key=lambda move: move[0], default=(0.0, tour))
        if gain <= 1e-12:
            break
        tour = moved
    return tour


def _best_insertion(costs: Array, tour: Tour, length: int) -> tuple[float, Tour]:
    """Or-opt: take some hosts in a row out of the tour and put them between two elsewhere."""
    positions = np.arange(len(tour))
    before, last, after = (np.roll(tour, shift) for shift in (1, 1 - length, -length))
    following = np.roll(tour, -1)
    freed = costs[before, tour] + costs[last, after] - costs[before, after]
    added = costs[tour[None, :], tour[:, None]] + costs[last[:, None], following[None, :]]
    gain = freed[:, None] - (added - costs[tour, following][None, :])
    for offset in range(-1, length):
        gain[positions, (positions + offset) % len(tour)] = -np.inf
    first, place = np.unravel_index(int(gain.argmax()), gain.shape)
    turned = np.roll(tour, -first)
    target = length + (place - first - length) % len(tour) + 1
    moved = np.concatenate([turned[length:target], turned[:length], turned[target:]])
    return float(gain[first, place]), moved


@dataclass(frozen=True, slots=True, eq=False)
class _Round:
    """Ranks that send at once, to whom, and the seconds of that between any two hosts."""

    senders: Indices
    receivers: Indices
    seconds: Array


def _rounds(pairs: PairMatrix, size_bytes: float, algorithm: str) -> list[_Round]:
    """What ranks send, by their number, in an all-reduce other than a ring."""
    count = len(pairs.hosts)
    ranks = np.arange(count)
    if algorithm == "tree":
        # Each of two trees has half of the bytes, up and down at once, one of them shifted.
        parents = np.array([_parent(rank, count) for rank in range(1, count)])
        children, parents = (
            np.concatenate([ends, (ends + 1) % count]) for ends in (ranks[1:], parents)
        )
        ends = np.concatenate([children, parents]), np.concatenate([parents, children])
        levels = 2 * math.ceil(math.log2(count))
        return [_Round(*ends, _link_seconds(pairs, levels, size_bytes / 2))]
    # Ranks beyond a power of two give theirs to one of the others first (MPICH).
    power = 1 << (count.bit_length() - 1)
    spare, rounds = np.arange(power, count), []
    if len(spare):
        seconds = _link_seconds(pairs, 1, size_bytes)
        rounds = [_Round(spare, spare - power, seconds), _Round(spare - power, spare, seconds)]
    for level in range(power.bit_length() - 1):
        # Halves are reduced at a distance that doubles, and gathered the same way back.
        half = _link_seconds(pairs, 2, 2 * size_bytes / (2 << level))
        rounds.append(_Round(ranks[:power], ranks[:power] ^ (1 << level), half))
    return rounds


def _parent(rank: int, count: int) -> int:
    """The parent of a rank in NCCL's binary tree, whose root is rank 0."""
    bit = rank & -rank
    up = (rank ^ bit) | (bit << 1)
    return up if up < count else rank ^ bit


def _rounds_seconds(rounds: Sequence[_Round], orders: Indices) -> Array:
    """Seconds of each order of hosts: every round waits for its slowest link."""
    sent = [one.seconds[orders[:, one.senders], orders[:, one.receivers]] for one in rounds]
    return np.asarray(np.sum([seconds.max(axis=1) for seconds in sent], axis=0))


def _exchanged(
    rounds: Sequence[_Round], count: int, generator: np.random.Generator, end: float
) -> Tour:
    """The best order that no exchange of two hosts improves, from several starts until `end`."""
    one, other = np.triu_indices(count, 1)
    rows = np.arange(len(one))
    best, best_s, order = np.arange(count), math.inf, np.arange(count)
    while True:
        order_s = float(_rounds_seconds(rounds, order[None])[0])
        while True:
            orders = np.tile(order, (len(one), 1))
            orders[rows, one], orders[rows, other] = order[other], order[one]
            seconds = _rounds_seconds(rounds, orders)
            if seconds.min() >= order_s or time.monotonic() > end:
                break
            order, order_s = orders[seconds.argmin()], float(seconds.min())
        if order_s < best_s:
            best, best_s = order, order_s
        if time.monotonic() > end or count < 3:
            return best
        order = generator.permutation(count)
