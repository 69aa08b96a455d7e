"""Judge the choice of where gradients are merged, parameters updated, and in which units.

``python benchmarks/strategy_accuracy.py`` (as root) builds a testbed of four workers and two
servers and probes the workers' network once. Then it sets the links of workers and servers to
every rate of a 5 × 5 grid; for each cell it predicts the step of a paced model under every strategy
from that one probe, writes the predictions down, and measures them for real: DDP, ZeRO-1 and
synchronous parameter servers over gloo, taking turns (TARGETS A16).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from records import Progress, Record, Records
from summary import format_table
from testbed.description import TestbedDescription
from testbed.network import Testbed, set_uplink, testbed
from testbed.paced import paced_graph, paced_machine
from testbed.strategies import step_seconds
from testbed_runs import MACHINE, add_options, open_work, probe_network

from estimator.advise.strategies import best_strategy
from estimator.graph.op_graph import OpGraph
from estimator.machines.catalogue import load_profile
from estimator.placement.topology import Cluster
from estimator.units import parse_bandwidth_bytes_per_s
from estimator.workload import Strategy

WORKERS, SERVERS = ("n0", "n1", "n2", "n3"), ("n4", "n5")
WORKER_RATES = ("200 Mbit/s", "300 Mbit/s", "400 Mbit/s", "600 Mbit/s", "800 Mbit/s")
SERVER_RATES = ("200 Mbit/s", "400 Mbit/s", "800 Mbit/s", "1600 Mbit/s", "2400 Mbit/s")
PROBED_RATE = "400 Mbit/s"
STRATEGIES = (
    "ddp:view",
    "ddp:bucket=2000000,view",
    "zero1:bucket=2000000,view",
    "ps:1",
    "ps:1,bucket=2000000",
    "ps:2,bucket=2000000",
)
MODEL = "eight_even"
# TARGETS A16: the choice is the best, or costs at most this much more.
TOLERATED_RATIO, WANTED_RATIO = 0.05, 0.90


class Grid:
    """One testbed whose links take every pair of rates in turn."""

    def __init__(self, options: argparse.Namespace, records: Records) -> None:
        self.options, self.records = options, records
        self.description = TestbedDescription.uniform(
            nodes=len(WORKERS) + len(SERVERS), devices=1, uplink=PROBED_RATE
        )
        self.profile_path = options.work / "workers.json"
        self.graph: OpGraph = paced_graph(MODEL)

    def run(self) -> None:
        """Probe, then predict and measure the cells that are not there yet."""
        cells = [(w, s) for w in self.options.workers for s in self.options.servers]
        with testbed(self.description) as bed:
            if not self.profile_path.exists():
                self._probe(bed)
            left = [cell for cell in cells if not self.records.of("measurement", _key(*cell))]
            progress = Progress("measured", len(left))
            for workers, servers in left:
                self._predict(workers, servers)
                self._measure(bed, workers, servers)
                progress.advance(_key(workers, servers))

    def _probe(self, bed: Testbed) -> None:
        workers = "+".join(f"{node}[0]" for node in WORKERS)
        probe_network(bed, workers, self.options, self.profile_path)

    def _predict(self, workers: str, servers: str) -> None:
        """Write down every strategy's step, from the one probe and the cell's line rates."""
        rate = parse_bandwidth_bytes_per_s(workers)
        nodes = tuple(replace(node, uplink_bytes_per_s=rate) for node in self.description.nodes)
        cell = replace(self.description, nodes=nodes)
        cluster = Cluster.from_dict(tomllib.loads(cell.cluster_toml(MACHINE)))
        # The pairs were measured at another rate than the cell's.
        network = replace(load_profile(self.profile_path), pairs=None)
        server_rate = cluster.payload_bytes_per_s(parse_bandwidth_bytes_per_s(servers))
        wanted = [Strategy.parse(text) for text in STRATEGIES]
        asked = [
            replace(each, server_bytes_per_s=server_rate) if each.kind == "ps" else each
            for each in wanted
        ]
        rows = best_strategy(
            self.graph,
            "+".join(f"{node}[0]" for node in WORKERS),
            asked,
            cluster=cluster,
            profile=paced_machine(network, 1, self.options.parameter_s),
        )
        step_s = {str(row.strategy): row.answer.step_time_s for row in rows if row.answer}
        self.records.add(
            {
                "kind": "prediction",
                "key": _key(workers, servers),
                "step_s": [step_s[str(each)] for each in asked],
            }
        )

    def _measure(self, bed: Testbed, workers: str, servers: str) -> None:
        for nodes, rate in ((WORKERS, workers), (SERVERS, servers)):
            for node in nodes:
                set_uplink(bed, node, parse_bandwidth_bytes_per_s(rate))
        step_s = step_seconds(
            bed,
            MODEL,
            WORKERS,
            SERVERS,
            STRATEGIES,
            parameter_s=self.options.parameter_s,
            rounds=self.options.rounds,
            steps=self.options.steps,
        )
        self.records.add({"kind": "measurement", "key": _key(workers, servers), "step_s": step_s})


def _key(workers: str, servers: str) -> str:
    return f"workers {workers}, servers {servers}"


def assemble(options: argparse.Namespace, records: Records) -> list[Record]:
    """One row a cell: what was predicted first and last measured, and what the choice costs."""
    rows = []
    for workers in options.workers:
        for servers in options.servers:
            key = _key(workers, servers)
            predicted = records.of("prediction", key)[-1]["step_s"]
            measured = records.of("measurement", key)[-1]["step_s"]
            choice, best = predicted.index(min(predicted)), measured.index(min(measured))
            rows.append(
                {
                    "workers": workers,
                    "servers": servers,
                    "strategies": list(STRATEGIES),
                    "predicted_s": predicted,
                    "measured_s": measured,
                    "chosen": STRATEGIES[choice],
                    "best": STRATEGIES[best],
                    "regret_ratio": measured[choice] / measured[best] - 1,
                }
            )
    return rows


def report(rows: Sequence[Record]) -> Iterator[str]:
    """Every cell, the error of each strategy, and the share of right choices."""
    lines = [["workers", "servers", *STRATEGIES, "chosen", "best", "costs"]]
    for row in rows:
        times = [
            f"{1e3 * predicted:.0f} | {1e3 * measured:.0f}"
            for predicted, measured in zip(row["predicted_s"], row["measured_s"], strict=True)
        ]
        cost = f"{100 * row['regret_ratio']:+.1f} %"
        lines.append([row["workers"], row["servers"], *times, row["chosen"], row["best"], cost])
    yield format_table(lines)
    yield "predicted | measured, ms"
    for number, strategy in enumerate(STRATEGIES):
        errors = [row["predicted_s"][number] / row["measured_s"][number] - 1 for row in rows]
        middle, worst = statistics.median(errors), max(errors, key=abs)
        yield f"{strategy}: median error {100 * middle:+.1f} %, worst {100 * worst:+.1f} %"
    right = sum(row["chosen"] == row["best"] for row in rows)
    near = sum(row["regret_ratio"] <= TOLERATED_RATIO for row in rows)
    yield (
        f"right in {right} of {len(rows)} cells, right or within 5 % of the best in {near} "
        f"({100 * near / len(rows):.0f} %, wanted {100 * WANTED_RATIO:.0f} %)"
    )


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; raises SystemExit with argparse's message."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser, "strategy_accuracy")
    add = parser.add_argument
    add("--workers", default=",".join(WORKER_RATES), help="rates of the workers' links")
    add("--servers", default=",".join(SERVER_RATES), help="rates of the servers' links")
    add("--parameter-s", type=float, default=2e-8, help="seconds to update a parameter")
    add("--rounds", type=int, default=1, help="turns of each strategy in a cell")
    add("--steps", type=int, default=3, help="timed steps in a turn")
    options = parser.parse_args(arguments)
    options.workers = options.workers.split(",")
    options.servers = options.servers.split(",")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Probe, predict, write down, measure, report."""
    options = parse_options(arguments)
    records = open_work(options)
    Grid(options, records).run()
    rows = assemble(options, records)
    if options.json:
        print(json.dumps({"cells": rows}, allow_nan=False))
    else:
        print("\n".join(report(rows)))


if __name__ == "__main__":
    main()
