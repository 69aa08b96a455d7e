"""Judge the orders of ranks that `advise.rank_order` finds for made-up pair matrices.

Orders of 8 to 64 hosts stand beside the best known and beside random ones; ``testbed_accuracy.py
orders`` does so on a real network.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import permutations

import numpy as np
from numpy.typing import NDArray
from options import Options
from records import Record

from estimator.advise.rank_order import (
    Uplink,
    hop_seconds,
    rank_order,
    ring_seconds,
    shared_uplinks,
)
from estimator.machines.profile import PairMatrix, Provenance
from estimator.placement.topology import Cluster, Node, Switch

SIZE_BYTES = 16 * 10**6
RANDOM_ORDERS = 200
SEEDS, SEARCH_S = 3, 5.0
# What an order may cost above the best known.
ABOVE_BEST_RATIO = 0.05
Array = NDArray[np.float64]
# A pair of hosts measured twice differs by about this much.
_NOISE_RATIO = 0.03
_CHOSEN = Provenance(source="measured", samples=1, relative_error=0.0)


def matrix(rates: Array, latency_s: float = 5e-5) -> PairMatrix:
    """Hosts h0, h1, … with these bytes per second between them."""

    def rows(values: Array) -> tuple[tuple[float | None, ...], ...]:
        return tuple(
            tuple(None if i == j else float(value) for j, value in enumerate(row))
            for i, row in enumerate(values)
        )

    return PairMatrix(
        hosts=tuple(f"h{number}" for number in range(len(rates))),
        latency_s=rows(np.full(rates.shape, latency_s)),
        bandwidth_bytes_per_s=rows(rates),
        provenance=_CHOSEN,
    )


def unlike(count: int, generator: np.random.Generator) -> Array:
    """Rates between 10 MB/s and 1 GB/s, the same both ways."""
    rates = 10 ** generator.uniform(7, 9, (count, count))
    return np.asarray(np.minimum(rates, rates.T))


def hidden_ring(count: int, generator: np.random.Generator) -> tuple[Array, Array]:
    """A ring of links of 1 GB/s, among others up to half of that and decoys as fast; its tour."""
    rates = unlike(count, generator) / 2
    decoys = generator.random((count, count)) < 1 / count
    rates[decoys | decoys.T] = 1e9
    tour = generator.permutation(count)
    following = np.roll(tour, -1)
    rates[tour, following] = rates[following, tour] = 1e9
    return rates, tour


def racks(count: int, per_rack: int, generator: np.random.Generator) -> tuple[Array, Cluster]:
    """Hosts dealt over racks at random; an uplink carries a quarter of what its hosts send."""
    line = 1.25e9
    rack_of = generator.permutation(np.arange(count) // per_rack)
    uplink = line * per_rack / 4
    cluster = Cluster(
        nodes={
            f"h{number}": Node(machine="m", switch=f"r{rack}", uplink_bytes_per_s=line)
            for number, rack in enumerate(rack_of)
        },
        switches={"spine": Switch()}
        | {
            f"r{rack}": Switch(parent="spine", uplink_bytes_per_s=uplink)
            for rack in range(count // per_rack)
        },
    )
    one_flow = cluster.payload_bytes_per_s(min(line, uplink))
    rates = one_flow * (1 + _NOISE_RATIO * generator.standard_normal((count, count)))
    return np.minimum(rates, rates.T), cluster


def least_seconds(hops: Array) -> float:
    """No ring is faster: every host has two neighbours, so the slower of its two best hops."""
    both = np.sort(np.minimum(hops, hops.T), axis=1)
    return float(both[:, 1].max())


def paper_cases(seeds: int) -> Iterator[Record]:
    """Our order, the best known and the mean random one of every made-up matrix."""
    for seed in range(seeds):
        generator = np.random.default_rng(seed)
        for count in (8, 9):
            rates = unlike(count, generator)
            hops = hop_seconds(matrix(rates), SIZE_BYTES)
            best_s = min(
                ring_seconds(hops, np.array([0, *rest])) for rest in permutations(range(1, count))
            )
            yield _paper_case("unlike links", "all orders", rates, best_s)
        for count in (16, 32, 64):
            rates = unlike(count, generator)
            best_s = least_seconds(hop_seconds(matrix(rates), SIZE_BYTES))
            yield _paper_case("unlike links", "bound", rates, best_s)
            rates, tour = hidden_ring(count, generator)
            best_s = ring_seconds(hop_seconds(matrix(rates), SIZE_BYTES), tour)
            yield _paper_case("hidden ring", "the ring", rates, best_s)
        for count, per_rack in ((8, 4), (16, 4), (32, 8), (64, 8)):
            rates, cluster = racks(count, per_rack, generator)
            hosts = matrix(rates).hosts
            tour = np.argsort([cluster.nodes[host].switch for host in hosts], kind="stable")
            hops = hop_seconds(matrix(rates), SIZE_BYTES)
            best_s = ring_seconds(hops, tour, shared_uplinks(hosts, SIZE_BYTES, cluster))
            yield _paper_case(f"racks of {per_rack}, 4:1", "by racks", rates, best_s, cluster)


def _paper_case(
    kind: str, known: str, rates: Array, best_s: float, cluster: Cluster | None = None
) -> Record:
    pairs = matrix(rates)
    began = time.perf_counter()
    found = rank_order(pairs, size_bytes=SIZE_BYTES, cluster=cluster)
    taken_s = time.perf_counter() - began
    hops = hop_seconds(pairs, SIZE_BYTES)
    uplinks: tuple[Uplink, ...] = ()
    if cluster is not None:
        uplinks = shared_uplinks(pairs.hosts, SIZE_BYTES, cluster)
    generator = np.random.default_rng(0)
    random_s = [
        ring_seconds(hops, generator.permutation(len(rates)), uplinks) for _ in range(RANDOM_ORDERS)
    ]
    return {
        "kind": kind,
        "hosts": len(rates),
        "best_known_by": known,
        "best_s": best_s,
        "found_s": found.ring_s,
        "random_s": statistics.mean(random_s),
        "search_s": taken_s,
    }


def run(options: Options) -> Iterator[Record]:
    """The worst of the matrices of each kind and number of hosts."""
    groups: dict[tuple[str, int, str], list[Record]] = {}
    for case in paper_cases(1 if options.quick else SEEDS):
        groups.setdefault((case["kind"], case["hosts"], case["best_known_by"]), []).append(case)
    for (kind, hosts, known), members in sorted(groups.items()):
        name = f"{kind}, {hosts} hosts"
        above = max(case["found_s"] / case["best_s"] - 1 for case in members)
        yield {"id": f"{name}: above {known}", "value": above, "bound": ABOVE_BEST_RATIO}
        gain = min(case["random_s"] / case["found_s"] for case in members)
        yield {"id": f"{name}: random orders / ours", "value": gain}
        search_s = max(case["search_s"] for case in members)
        yield {"id": f"{name}: search", "value": search_s, "unit": "s", "bound": SEARCH_S}
