"""Order nodes for a fast ring all-reduce: a bottleneck travelling-salesman problem.

A ring is as fast as its slowest hop. Links are measured with one flow at a time, so the matrix does
not show the contention of hops that leave a rack on its uplink: the cluster file gives that. Two
heuristics share the time: Hamiltonian cycles of hops below a bound that is bisected, by rotations
(Pósa 1976), for the slowest hop; and 2-opt and Or-opt (Croes 1958; Or 1976) on hop costs raised to
rising powers, which approach the maximum, for shared uplinks and for the total of all hops.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from estimator.elementwise import Array, Flags, Indices
from estimator.errors import ProfileError
from estimator.machines.profile import PairMatrix
from estimator.placement.topology import Cluster
from estimator.timeline.collectives.algorithms import RING_ROUNDS, RING_SHARE

Tour = Indices
_POWERS = (1.0, 4.0, 16.0)


@dataclass(frozen=True, slots=True, eq=False)
class Uplink:
    """A switch's uplink: the hosts below it, and the seconds of an all-reduce by a single flow."""

    below: Flags
    flow_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """Hosts in rank order, with the seconds of the ring in this order and in the given one."""

    hosts: tuple[str, ...]
    ring_s: float
    given_s: float


def rank_order(
    pairs: PairMatrix,
    *,
    size_bytes: float = 25 * 2**20,
    cluster: Cluster | None = None,
    limit_s: float = 2.0,
    seed: int = 0,
) -> RankOrder:
    """The best order found within `limit_s` seconds for an all-reduce of `size_bytes`.

    Pairs measured one way only count both ways; `cluster` has the uplinks that hops share. Raises
    ProfileError where a pair was not measured.
    """
    hops = hop_seconds(pairs, size_bytes)
    uplinks = shared_uplinks(pairs.hosts, size_bytes, cluster) if cluster else ()
    count = len(hops)
    given = np.arange(count)
    best = _best_tour(hops, uplinks, _both_directions(given))
    if count > 3:
        generator = np.random.default_rng(seed)
        end = time.monotonic() + limit_s
        bounded = _bounded_tours(hops, generator, end - limit_s / 2)
        best = _best_tour(hops, uplinks, [best, *bounded])
        improved = _local_search_tours(hops, uplinks, generator, end)
        best = _best_tour(hops, uplinks, [best, *improved])
    return RankOrder(
        hosts=tuple(pairs.hosts[index] for index in best),
        ring_s=ring_seconds(hops, best, uplinks),
        given_s=ring_seconds(hops, given, uplinks),
    )


def hop_seconds(pairs: PairMatrix, size_bytes: float) -> Array:
    """Seconds that an all-reduce takes if every hop is like this one; inf on the diagonal."""
    count = len(pairs.hosts)
    if count < 2:
        raise ProfileError("an order needs at least two hosts; probe a cluster with --pairs all")
    latency, rate = _filled(pairs.latency_s), _filled(pairs.bandwidth_bytes_per_s)
    rounds, share = RING_ROUNDS["all_reduce"](count), RING_SHARE["all_reduce"](count)
    hops = rounds * latency + share * size_bytes / rate
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
    found = []
    for name, switch in cluster.switches.items():
        below = np.array([name in cluster.switches_above(host) for host in hosts])
        if switch.uplink_bytes_per_s is not None and below.any() and not below.all():
            rate = cluster.payload_bytes_per_s(switch.uplink_bytes_per_s)
            found.append(Uplink(below, share * size_bytes / rate))
    return tuple(found)


def ring_seconds(hops: Array, tour: Tour, uplinks: Sequence[Uplink] = ()) -> float:
    """The slowest hop of the ring, or the uplink that most hops share: each round waits for it."""
    following = np.roll(tour, -1)
    shared_s = [
        uplink.flow_s * np.count_nonzero(uplink.below[tour] & ~uplink.below[following])
        for uplink in uplinks
    ]
    return float(max(hops[tour, following].max(), *shared_s, 0.0))


def _both_directions(tour: Tour) -> list[Tour]:
    return [tour, tour[::-1]]


def _best_tour(hops: Array, uplinks: Sequence[Uplink], tours: Sequence[Tour]) -> Tour:
    """The tour with the fastest bottleneck; of equal ones, the least sum of hops."""
    return min(
        tours,
        key=lambda tour: (
            ring_seconds(hops, tour, uplinks),
            hops[tour, np.roll(tour, -1)].sum(),
        ),
    )


def _bounded_tours(hops: Array, generator: np.random.Generator, end: float) -> Iterator[Tour]:
    """Tours below a bound on the slowest hop, which is bisected until `end`."""
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
            yield from _both_directions(tour)
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
    hops: Array, uplinks: Sequence[Uplink], generator: np.random.Generator, end: float
) -> Iterator[Tour]:
    """Tours that no 2-opt or Or-opt move shortens, from several starts, until `end`."""
    count = len(hops)
    costs = np.where(np.isfinite(hops), hops, 0.0)
    for uplink in uplinks:
        # A hop over the uplink delays the other hops over it by its own seconds there.
        costs = costs + uplink.flow_s * (uplink.below[:, None] & ~uplink.below[None, :])
    for number in range(4 * count):
        tour = (
            _nearest_neighbour_tour(costs, number)
            if number < count
            else generator.permutation(count)
        )
        for power in _POWERS:
            tour = _local_optimum((costs / costs.max()) ** power, tour)
            yield from _both_directions(tour)
        if time.monotonic() > end:
            return


def _nearest_neighbour_tour(costs: Array, start: int) -> Tour:
    left = np.ones(len(costs), dtype=bool)
    tour = [start]
    left[start] = False
    while left.any():
        row = np.where(left, costs[tour[-1]], np.inf)
        tour.append(int(row.argmin()))
        left[tour[-1]] = False
    return np.array(tour)


def _local_optimum(costs: Array, tour: Tour) -> Tour:
    """2-opt and Or-opt moves, the best one at a time, until none shortens the tour."""
    # A move may reverse a part of the tour: a hop costs as much as its slower direction.
    both = np.maximum(costs, costs.T)
    np.fill_diagonal(both, 0.0)
    for _ in range(20 * len(tour)):
        reversed_tour, two_opt_gain = _best_two_opt(both, tour)
        moved_tour, or_opt_gain = _best_or_opt(both, tour)
        if max(two_opt_gain, or_opt_gain) <= 1e-12:
            break
        tour = reversed_tour if two_opt_gain >= or_opt_gain else moved_tour
    return tour


def _best_two_opt(costs: Array, tour: Tour) -> tuple[Tour, float]:
    """2-opt: replace hops (a, b) and (c, d) by (a, c) and (b, d)."""
    following = np.roll(tour, -1)
    hop = costs[tour, following]
    gain = (
        hop[:, None]
        + hop[None, :]
        - costs[tour[:, None], tour[None, :]]
        - costs[following[:, None], following[None, :]]
    )
    np.fill_diagonal(gain, -np.inf)
    first, second = sorted(np.unravel_index(int(gain.argmax()), gain.shape))
    turned = tour.copy()
    turned[first + 1 : second + 1] = tour[first + 1 : second + 1][::-1]
    return turned, float(gain[first, second])


def _best_or_opt(costs: Array, tour: Tour) -> tuple[Tour, float]:
    """Or-opt: take one host out of the tour and put it between two neighbours elsewhere."""
    before, after = np.roll(tour, 1), np.roll(tour, -1)
    freed = costs[before, tour] + costs[tour, after] - costs[before, after]
    added = costs[tour[:, None], tour[None, :]] + costs[tour[:, None], after[None, :]]
    gain = freed[:, None] - (added - costs[tour, after][None, :])
    positions = np.arange(len(tour))
    gain[positions, positions] = -np.inf
    gain[positions, positions - 1] = -np.inf
    host, place = np.unravel_index(int(gain.argmax()), gain.shape)
    rest = np.delete(tour, host)
    target = int(np.flatnonzero(rest == tour[place])[0])
    return np.insert(rest, target + 1, tour[host]), float(gain[host, place])
