"""Orders of ranks: against every order of few hosts, and against the racks of many."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from estimator.advise.rank_order import hop_seconds, rank_order, ring_seconds
from estimator.errors import ProfileError
from estimator.placement import place
from estimator.profile import PairMatrix
from estimator.timeline.rings import ring_of
from estimator.topology import Cluster, Node, Switch
from tests.synthetic import CHOSEN, Machine

SIZE = 25 * 2**20


def matrix(
    rates: np.ndarray, latency_s: float = 1e-4, hosts: list[str] | None = None
) -> PairMatrix:
    names = hosts or [f"h{index}" for index in range(len(rates))]

    def rows(values: np.ndarray) -> tuple[tuple[float | None, ...], ...]:
        return tuple(
            tuple(None if i == j else float(value) for j, value in enumerate(row))
            for i, row in enumerate(values)
        )

    return PairMatrix(
        hosts=tuple(names),
        latency_s=rows(np.full(rates.shape, latency_s)),
        bandwidth_bytes_per_s=rows(rates),
        provenance=CHOSEN,
    )


@pytest.mark.parametrize("seed", range(5))
def test_eight_hosts_are_ordered_within_5_percent_of_the_best_of_all_orders(seed: int) -> None:
    rates = 10 ** np.random.default_rng(seed).uniform(7, 9, (8, 8))
    rates = np.minimum(rates, rates.T)
    pairs = matrix(rates)
    hops = hop_seconds(pairs, SIZE)
    best = min(ring_seconds(hops, np.array([0, *rest])) for rest in permutations(range(1, 8)))
    assert rank_order(pairs, size_bytes=SIZE, limit_s=0.5).ring_s <= 1.05 * best


def test_a_hidden_fast_ring_of_64_hosts_is_found() -> None:
    generator = np.random.default_rng(1)
    rates = generator.uniform(1e7, 2e7, (64, 64))
    ring = generator.permutation(64)
    rates[ring, np.roll(ring, -1)] = rates[np.roll(ring, -1), ring] = 1e9
    found = rank_order(matrix(rates), size_bytes=SIZE, limit_s=3.0)
    # The slowest hop of the hidden ring, worked out: 126 rounds of latency and the bytes.
    assert found.ring_s <= 1.05 * (126 * 1e-4 + 2 * 63 / 64 * SIZE / 1e9)
    assert found.given_s > 10 * found.ring_s


def test_racks_are_visited_one_after_the_other_and_beat_random_orders_by_two() -> None:
    # 4 racks of 4 nodes; uplinks carry a quarter of what their nodes send: oversubscribed 4:1.
    rate = 1e9 / 8
    switches = {f"r{r}": Switch(parent="spine", uplink_bytes_per_s=rate) for r in range(4)}
    nodes = {
        f"r{r}n{n}": Node(machine="m", switch=f"r{r}", uplink_bytes_per_s=rate)
        for r in range(4)
        for n in range(4)
    }
    cluster = Cluster(nodes=nodes, switches={"spine": Switch(), **switches})
    hosts = list(np.random.default_rng(3).permutation(list(nodes)))
    racks = np.array([host[:2] for host in hosts])
    near = racks[:, None] == racks[None, :]
    pairs = matrix(np.where(near, 1.1e8, 1.0e8), hosts=hosts)

    def pace(order: list[str]) -> float:
        placed = place("+".join(f"{h}[0]" for h in order), cluster=cluster, profile=profile)
        return ring_of(placed).bytes_per_s

    profile = Machine(devices=1).profile()
    found = rank_order(pairs, limit_s=0.5)
    generator = np.random.default_rng(4)
    random = [pace(list(generator.permutation(hosts))) for _ in range(20)]
    assert pace(list(found.hosts)) >= 2 * float(np.median(random))


def test_a_pair_that_was_not_measured_is_named() -> None:
    rates = np.full((3, 3), 1e8)
    rates[0, 1] = rates[1, 0] = np.nan
    rows = tuple(
        tuple(None if i == j or np.isnan(v) else float(v) for j, v in enumerate(row))
        for i, row in enumerate(rates)
    )
    pairs = PairMatrix(
        hosts=("a", "b", "c"), latency_s=rows, bandwidth_bytes_per_s=rows, provenance=CHOSEN
    )
    with pytest.raises(ProfileError, match="between 'a' and 'b'"):
        rank_order(pairs)
