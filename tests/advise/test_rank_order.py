"""Orders of ranks: against every order of few hosts, and against the racks of many."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estimator.advise.rank_order import (
    hop_seconds,
    rank_order,
    ring_seconds,
    shared_uplinks,
)
from estimator.errors import ProfileError
from estimator.machines.profile import PairMatrix
from estimator.placement.mesh import whole_group
from estimator.placement.placement import place
from estimator.placement.topology import Cluster, Node, Switch
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


def test_eight_hosts_are_ordered_as_the_best_of_all_orders_for_each_algorithm() -> None:
    orders = np.array([[0, *rest] for rest in permutations(range(1, 8))])
    for seed in range(40):
        pairs = matrix(10 ** np.random.default_rng(seed).uniform(7, 9, (8, 8)))
        hops = hop_seconds(pairs, SIZE)
        assert not np.allclose(hops, hops.T)
        best = hops[orders, np.roll(orders, -1, axis=1)].max(axis=1).min()
        assert rank_order(pairs, size_bytes=SIZE).ring_s == best
    # Two rounds of halves: each rank and its neighbour, then the one after; both ways, there and
    # back. Only links within {a, c} and {b, d} are fast: these are to be neighbours.
    rates = np.full((4, 4), 1e8)
    rates[[0, 2, 1, 3], [2, 0, 3, 1]] = 1e9
    asked: dict[str, Any] = {"size_bytes": 8e8, "algorithm": "halving-doubling", "limit_s": 0.1}
    found = rank_order(matrix(rates, latency_s=1e-9, hosts=[*"abcd"]), **asked)
    # 2 * 4e8 bytes at 1e9, then 2 * 2e8 at 1e8; in the order given 8 s, then 0.4 s.
    assert (found.ring_s, found.given_s) == (pytest.approx(0.8 + 4.0), pytest.approx(8.0 + 0.4))
    tree = rank_order(pairs, size_bytes=SIZE, algorithm="tree", limit_s=0.5)
    assert tree.ring_s < tree.given_s


# Every host has two fast links on the ring; decoys are about two more that lead astray.
@pytest.mark.parametrize(("hosts", "most", "decoys"), [(64, 2e7, 0.0), (48, 4e8, 1 / 48)])
def test_a_fast_ring_hidden_among_many_hosts_is_found(
    hosts: int, most: float, decoys: float
) -> None:
    generator = np.random.default_rng(1)
    rates = generator.uniform(1e7, most, (hosts, hosts))
    fast = generator.random((hosts, hosts)) < decoys
    rates[fast | fast.T] = 1e9
    ring = generator.permutation(hosts)
    rates[ring, np.roll(ring, -1)] = rates[np.roll(ring, -1), ring] = 1e9
    found = rank_order(matrix(rates), size_bytes=SIZE, limit_s=4.0)
    # 2 (n - 1) rounds of latency, and the bytes.
    rounds = 2 * (hosts - 1)
    assert found.ring_s == pytest.approx(rounds * 1e-4 + rounds / hosts * SIZE / 1e9)
    assert found.given_s > (10 * found.ring_s if not decoys else found.ring_s)


def test_racks_are_visited_one_after_the_other_and_beat_random_orders_by_two() -> None:
    # 4 racks of 4 nodes; an uplink carries a quarter of what its nodes send: oversubscribed 4:1.
    # One flow at a time no link is slower than another: only the cluster file tells.
    rate = 1e9 / 8
    switches = {f"r{r}": Switch(parent="spine", uplink_bytes_per_s=rate) for r in range(4)}
    nodes = {
        f"r{r}n{n}": Node(machine="m", switch=f"r{r}", uplink_bytes_per_s=rate)
        for r in range(4)
        for n in range(4)
    }
    cluster = Cluster(nodes=nodes, switches={"spine": Switch(), **switches})
    hosts = list(np.random.default_rng(3).permutation(list(nodes)))
    pairs = matrix(np.full((16, 16), cluster.payload_bytes_per_s(rate)), hosts=hosts)

    def pace(order: list[str]) -> float:
        placed = place("+".join(f"{h}[0]" for h in order), cluster=cluster, profile=profile)
        return whole_group(placed).bytes_per_s

    profile = Machine(devices=1).profile()
    found = rank_order(pairs, cluster=cluster, limit_s=0.5)
    assert pace(list(found.hosts)) == pytest.approx(cluster.payload_bytes_per_s(rate))
    generator = np.random.default_rng(4)
    random = [pace(list(generator.permutation(hosts))) for _ in range(20)]
    assert pace(list(found.hosts)) >= 2 * float(np.median(random))


def test_flows_that_leave_a_rack_share_its_uplink_in_the_seconds_of_a_ring() -> None:
    switches = {"r0": Switch(parent="s", uplink_bytes_per_s=1e8), "s": Switch()}
    nodes = {f"h{n}": Node(machine="m", switch="r0" if n < 2 else "s") for n in range(4)}
    cluster = Cluster(nodes=nodes, switches=switches)
    pairs = matrix(np.full((4, 4), 1e8), latency_s=1e-9)
    hops = hop_seconds(pairs, SIZE)
    uplinks = shared_uplinks(pairs.hosts, SIZE, cluster)
    # 6/4 of the bytes over 1448/1514 of the line, for each of the flows out of r0.
    alone_s = 1.5 * SIZE / (1e8 * 1448 / 1514)
    assert ring_seconds(hops, np.array([0, 1, 2, 3]), uplinks) == pytest.approx(alone_s)
    assert ring_seconds(hops, np.array([0, 2, 1, 3]), uplinks) == pytest.approx(2 * alone_s)


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


def test_links_are_read_from_a_file_and_the_order_written(tmp_path: Path, command: Any) -> None:
    links = tmp_path / "links.csv"
    rates = {"ab": "1GB/s", "bc": "10GB/s", "ca": "10GB/s", "ac": "1GB/s", "cb": "10GB/s"}
    rows = [f"{one},{other},{rate},5us" for (one, other), rate in rates.items()]
    links.write_text("\n".join(["from,to,bandwidth,latency", *rows, "b,a,10GB/s,5us"]))
    hosts, ranks = tmp_path / "hosts", tmp_path / "ranks"
    asked = ("--size", "1GB", "--devices", 2, "--hostfile", hosts, "--rankfile", ranks, "--json")
    found = json.loads(command("order", links, *asked).out)
    # The ring a, c, b has a slow hop from a to c, a, b, c one from a to b: 4/3 of 1 GB at 1 GB/s.
    assert found["ring_s"] == pytest.approx(4 * 5e-6 + 4 / 3)
    order = found["hosts"]
    assert hosts.read_text() == "".join(f"{host} slots=2\n" for host in order)
    assert ranks.read_text().splitlines()[:3] == [
        f"rank 0={order[0]} slot=0",
        f"rank 1={order[0]} slot=1",
        f"rank 2={order[1]} slot=0",
    ]
    assert "as fast as in the order given" in command("order", links).out
    links.write_text("from,to,bandwidth\na,b,fast")
    assert "line 2: 'fast' is not a rate" in command("order", links).sentence
