"""Find an order of nodes in which a ring of ranks runs fast, from the links measured between them.

A ring is as fast as its slowest hop, and hops that leave a rack share its uplink, so a good order
has no slow hop and few long ones: a tour that is short in seconds per hop. The search is 2-opt and
Or-opt (Croes 1958; Or 1976) from several starts, on hop costs raised to rising powers, which turns
the sum that these moves improve into the maximum that the ring waits for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimator.errors import ProfileError
from estimator.profile import PairMatrix
from estimator.timeline.collectives import RING_ROUNDS, RING_SHARE

Array = NDArray[np.float64]
Tour = NDArray[np.intp]
_POWERS = (1.0, 4.0, 16.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """Hosts in the order to number ranks by, with the ring's seconds in it and as given."""

    hosts: tuple[str, ...]
    ring_s: float
    given_s: float


def rank_order(
    pairs: PairMatrix,
    *,
    size_bytes: float = 25 * 2**20,
    limit_s: float = 2.0,
    seed: int = 0,
) -> RankOrder:
    """The best order found within `limit_s` seconds for an all-reduce of `size_bytes`.

    Pairs measured one way only count both ways. Raises ProfileError where a pair was not measured.
    """
    hops = hop_seconds(pairs, size_bytes)
    count = len(hops)
    given = np.arange(count)
    best = _cheapest(hops, _directions(given))
    if count > 3:
        end = time.monotonic() + limit_s
        finite = np.where(np.isfinite(hops), hops, 0.0)
        generator = np.random.default_rng(seed)
        for number in range(4 * count):
            start = _nearest_first(hops, number) if number < count else generator.permutation(count)
            for power in _POWERS:
                start = _improved((finite / finite.max()) ** power, start)
            best = _cheapest(hops, [best, *_directions(start)])
            if time.monotonic() > end:
                break
    return RankOrder(
        hosts=tuple(pairs.hosts[index] for index in best),
        ring_s=ring_seconds(hops, best),
        given_s=ring_seconds(hops, given),
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


def ring_seconds(hops: Array, tour: Tour) -> float:
    """The slowest hop of the ring: each round waits for it."""
    return float(hops[tour, np.roll(tour, -1)].max())


def _directions(tour: Tour) -> list[Tour]:
    return [tour, tour[::-1]]


def _cheapest(hops: Array, tours: list[Tour]) -> Tour:
    """The tour with the fastest slowest hop, then with the least seconds of hops in all."""
    return min(
        tours, key=lambda tour: (ring_seconds(hops, tour), hops[tour, np.roll(tour, -1)].sum())
    )


def _nearest_first(hops: Array, start: int) -> Tour:
    left = np.ones(len(hops), dtype=bool)
    tour = [start]
    left[start] = False
    while left.any():
        row = np.where(left, hops[tour[-1]], np.inf)
        tour.append(int(row.argmin()))
        left[tour[-1]] = False
    return np.array(tour)


def _improved(costs: Array, tour: Tour) -> Tour:
    """2-opt and Or-opt moves, the best one at a time, until none shortens the tour."""
    # A move may turn a part of the tour around: a hop costs what its slower direction costs.
    both = np.maximum(costs, costs.T)
    np.fill_diagonal(both, 0.0)
    for _ in range(20 * len(tour)):
        turned, turned_gain = _best_turn(both, tour)
        moved, moved_gain = _best_move(both, tour)
        if max(turned_gain, moved_gain) <= 1e-12:
            break
        tour = turned if turned_gain >= moved_gain else moved
    return tour


def _best_turn(costs: Array, tour: Tour) -> tuple[Tour, float]:
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


def _best_move(costs: Array, tour: Tour) -> tuple[Tour, float]:
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
