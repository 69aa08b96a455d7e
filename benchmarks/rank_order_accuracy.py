"""Judge the orders of ranks that `advise.rank_order` finds: on paper, then on a real network.

``python benchmarks/rank_order_accuracy.py`` first sets orders of 8 to 64 hosts beside the best
known and beside random ones, from made-up pair matrices. Then (as root) it builds two racks of four
nodes whose uplinks are oversubscribed 4:1, measures all pairs with ``python -m estimator.probe
--pairs all``, and predicts and measures an all-reduce and a paced DDP step in the order found and
in random ones (TARGETS A15).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np
from numpy.typing import NDArray
from records import Progress, Record, say
from summary import format_table
from testbed.description import TestbedDescription
from testbed.measure import measure
from testbed.network import Testbed, testbed
from testbed.orders import all_reduce_seconds
from testbed.paced import paced_graph, paced_machine
from testbed_runs import MACHINE, add_options, open_work, probe_network

from estimator.advise.rank_order import (
    Uplink,
    hop_seconds,
    rank_order,
    ring_seconds,
    shared_uplinks,
)
from estimator.engine import estimate_graph
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import MachineProfile, PairMatrix, Provenance
from estimator.placement.placement import place
from estimator.placement.process_groups import whole_group
from estimator.placement.topology import Cluster, Node, Switch
from estimator.timeline.collectives import GroupCollective

SIZE_BYTES = 16 * 10**6
MODEL, STRATEGY = "few_big", "ddp:view"
RANDOM_ORDERS = 200
# TARGETS A15.
ABOVE_BEST_RATIO, GAIN_ERROR_RATIO = 0.05, 0.15
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


def paper_report(cases: Sequence[Record]) -> Iterator[str]:
    """One line a kind and number of hosts, the worst of its matrices."""
    lines = [["links", "hosts", "best known by", "above it", "random / ours", "search"]]
    groups: dict[tuple[str, int, str], list[Record]] = {}
    for case in cases:
        groups.setdefault((case["kind"], case["hosts"], case["best_known_by"]), []).append(case)
    for (kind, hosts, known), members in sorted(groups.items()):
        above = max(case["found_s"] / case["best_s"] - 1 for case in members)
        gain = min(case["random_s"] / case["found_s"] for case in members)
        search_s = max(case["search_s"] for case in members)
        texts = [f"{100 * above:+.1f} %", f"{gain:.2f}", f"{search_s:.1f} s"]
        lines.append([kind, str(hosts), known, *texts])
    yield format_table(lines)
    right = sum(case["found_s"] <= (1 + ABOVE_BEST_RATIO) * case["best_s"] for case in cases)
    yield f"{right} of {len(cases)} matrices within 5 % of the best known"


class Network:
    """Two oversubscribed racks: what is probed, predicted and measured there."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.description = TestbedDescription.uniform(
            nodes=options.nodes,
            devices=1,
            uplink=options.uplink,
            racks=2,
            rack_uplink=options.rack_uplink,
        )
        self.profile_path = options.work / f"racks{options.nodes}.json"
        self.cluster_path = options.work / f"racks{options.nodes}.toml"

    def cases(self) -> list[Record]:
        """One row an order: predicted, then measured."""
        self.cluster_path.write_text(self.description.cluster_toml(MACHINE))
        with testbed(self.description) as bed:
            if not self.profile_path.exists():
                self._probe(bed)
            rows = [self._predicted(kind, hosts) for kind, hosts in self._orders()]
            self._measure(bed, rows)
        return rows

    def _probe(self, bed: Testbed) -> None:
        # In no order of racks, as a launcher may number the nodes.
        names = np.random.default_rng(1).permutation([node.name for node in self.description.nodes])
        probe_network(
            bed,
            "+".join(f"{name}[0]" for name in names),
            self.options,
            self.profile_path,
            cluster=self.cluster_path,
            all_pairs=True,
        )

    def _orders(self) -> list[tuple[str, tuple[str, ...]]]:
        pairs, cluster = self._profile().pairs, Cluster.load(self.cluster_path)
        if pairs is None:
            raise SystemExit("the probe measured no pairs; use a larger --probe-budget")
        ours = rank_order(pairs, size_bytes=SIZE_BYTES, cluster=cluster).hosts
        alone = rank_order(pairs, size_bytes=SIZE_BYTES).hosts
        generator = np.random.default_rng(self.options.seed)
        random = [
            ("random", tuple(generator.permutation(pairs.hosts).tolist()))
            for _ in range(self.options.orders)
        ]
        return [("ours", ours), ("ours, from the pairs alone", alone), *random]

    def _profile(self) -> MachineProfile:
        return load_profile(self.profile_path)

    def _predicted(self, kind: str, hosts: Sequence[str]) -> Record:
        cluster, profile = Cluster.load(self.cluster_path), self._profile()
        allocation = "+".join(f"{host}[0]" for host in hosts)
        ring = whole_group(place(allocation, cluster=cluster, profile=profile))
        model = GroupCollective.of(profile, "all_reduce", ring, cluster=cluster)
        if model is None or profile.pairs is None:
            raise SystemExit("the probe measured no all-reduce; use a larger --probe-budget")
        tour = np.array([profile.pairs.hosts.index(host) for host in hosts])
        answer = estimate_graph(
            paced_graph(MODEL),
            allocation,
            strategy=STRATEGY,
            cluster=cluster,
            profile=paced_machine(profile, 1),
        )
        return {
            "kind": kind,
            "hosts": list(hosts),
            "allocation": allocation,
            "link": ring.link,
            "all_reduce_s": model.time_s(SIZE_BYTES),
            "pairs_alone_s": ring_seconds(hop_seconds(profile.pairs, SIZE_BYTES), tour),
            "step_s": answer.step_time_s,
        }

    def _measure(self, bed: Testbed, rows: list[Record]) -> None:
        orders = [row["hosts"] for row in rows]
        say("measuring all-reduces")
        found = all_reduce_seconds(bed, orders, size_bytes=SIZE_BYTES, repeats=self.options.repeats)
        progress = Progress("trained", len(rows))
        for row, seconds in zip(rows, found, strict=True):
            row["measured_all_reduce_s"] = seconds
            run = measure(
                bed,
                f"paced:{MODEL}",
                row["allocation"],
                strategy=STRATEGY,
                steps=self.options.steps,
                warmup_steps=2,
            )
            row["measured_step_s"] = run.step_s
            progress.advance(f"{row['allocation']} {1e3 * run.step_s:.0f} ms")


def gains(rows: Sequence[Record]) -> dict[str, tuple[float, float]]:
    """(predicted, measured) mean time in random orders over that in ours."""
    ours = next(row for row in rows if row["kind"] == "ours")
    random = [row for row in rows if row["kind"] == "random"]
    found = {}
    for what, name in (("all-reduce", "all_reduce_s"), ("step", "step_s")):
        found[what] = tuple(
            statistics.mean(row[key] for row in random) / ours[key]
            for key in (name, f"measured_{name}")
        )
    return found


def network_report(rows: Sequence[Record]) -> Iterator[str]:
    """A line an order, and the gains."""
    lines = [
        [
            *("order", "hosts", "all-reduce: pairs alone", "predicted", "measured", "error"),
            *("step: predicted", "measured", "error", "slowest link"),
        ]
    ]
    for row in rows:
        reduce = [row["pairs_alone_s"], row["all_reduce_s"], row["measured_all_reduce_s"]]
        step = [row["step_s"], row["measured_step_s"]]
        lines.append(
            [row["kind"], " ".join(row["hosts"])]
            + [f"{1e3 * seconds:.0f} ms" for seconds in reduce]
            + [f"{100 * (reduce[1] / reduce[2] - 1):+.1f} %"]
            + [f"{1e3 * seconds:.0f} ms" for seconds in step]
            + [f"{100 * (step[0] / step[1] - 1):+.1f} %", row["link"]]
        )
    yield format_table(lines)
    for what, (predicted, measured) in gains(rows).items():
        yield (
            f"{what}: ours beats the mean random order {measured:.2f} times, predicted "
            f"{predicted:.2f} ({100 * (predicted / measured - 1):+.1f} %, allowed "
            f"{100 * GAIN_ERROR_RATIO:.0f} %)"
        )


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; raises SystemExit with argparse's message."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser, "rank_order_accuracy", probe_budget_s=60.0)
    add = parser.add_argument
    add("--only", choices=["paper", "network"], help="one of the two parts")
    add("--seeds", type=int, default=3, help="made-up matrices of each kind")
    add("--nodes", type=int, default=8, help="nodes of the testbed, half in either rack")
    add("--uplink", default="500 Mbit/s", help="of a node")
    add("--rack-uplink", default="500 Mbit/s", help="of a rack")
    add("--orders", type=int, default=4, help="random orders")
    add("--seed", type=int, default=0, help="of the random orders")
    add("--repeats", type=int, default=5, help="all-reduces timed in each order")
    add("--steps", type=int, default=6, help="steps timed in each order")
    options = parser.parse_args(arguments)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Search, probe, predict, measure, report."""
    options = parse_options(arguments)
    paper = [] if options.only == "network" else list(paper_cases(options.seeds))
    if paper and not options.json:
        print("\n".join(paper_report(paper)), flush=True)
    rows: list[Record] = []
    if options.only != "paper":
        open_work(options)
        rows = Network(options).cases()
        if not options.json:
            print("\n".join(network_report(rows)))
    if options.json:
        found = gains(rows) if rows else None
        print(json.dumps({"paper": paper, "network": rows, "gains": found}, allow_nan=False))


if __name__ == "__main__":
    main()
