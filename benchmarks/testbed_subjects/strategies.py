"""The choice of where gradients are reduced, parameters updated, and in which units.

The network of four workers is probed once. Then the links of workers and of two servers take every
rate of a grid; for each cell the step of a paced model under every strategy is predicted from that
one probe, and measured: DDP, ZeRO-1 and synchronous parameter servers over gloo, taking turns.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from records import Record, Records
from testbed.network import Testbed, set_uplink
from testbed.paced import paced_graph, paced_machine
from testbed.strategies import step_seconds
from testbed_cases import STRATEGIES, Cell
from testbed_runs import MACHINE, Bench, Trial, probe_network

import estimator as est
from estimator.advise.scaling import rank_strategies
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.catalogue import load_profile
from estimator.placement.topology import Cluster
from estimator.units import parse_bandwidth_bytes_per_s
from estimator.workload.strategies import ParameterServers, Strategy

WORKERS, SERVERS = ("n0", "n1", "n2", "n3"), ("n4", "n5")
ALLOCATION = "+".join(f"{node}[0]" for node in WORKERS)
PARAMETER_S = 2e-8
MODEL = "eight_even"
# The choice is the best, or costs at most this much more.
TOLERATED_RATIO, WANTED_RATIO = 0.05, 0.90


class GridBench(Bench):
    """One testbed whose links take every pair of rates in turn."""

    def probe(self, bed: Testbed) -> None:
        probe_network(bed, ALLOCATION, self.plan, self.network_path)

    def predict(self, case: Cell) -> Record:
        """Every strategy's step, from the one probe and the cell's line rates."""
        workers = parse_bandwidth_bytes_per_s(case.workers)
        servers = parse_bandwidth_bytes_per_s(case.servers)
        nodes = tuple(replace(node, uplink_bytes_per_s=workers) for node in self.description.nodes)
        cell = replace(self.description, nodes=nodes)
        cluster = Cluster.from_dict(tomllib.loads(cell.cluster_toml(MACHINE)))
        # The pairs were measured at another rate than the cell's.
        network = replace(load_profile(self.network_path), pairs=None)
        server_rate = cluster.payload_bytes_per_s(servers)
        wanted = [Strategy.parse(text) for text in STRATEGIES]
        asked = [
            replace(each, server_bytes_per_s=server_rate)
            if isinstance(each, ParameterServers)
            else each
            for each in wanted
        ]
        graph: OpGraph = paced_graph(MODEL)
        options: Any = {"cluster": cluster, "profile": paced_machine(network, 1, PARAMETER_S)}
        rows = rank_strategies(
            ALLOCATION,
            asked,
            lambda each: est.estimate(graph, ALLOCATION, strategy=each, **options),
        )
        step_s = {str(row.strategy): row.answer.step_time_s for row in rows if row.answer}
        return {"step_s": [step_s[str(each)] for each in asked]}

    def trials(self, case: Cell, prediction: Record) -> Iterator[Trial]:
        yield Trial(key=case.key, run=partial(self._measured, case=case))

    def _measured(self, bed: Testbed, case: Cell) -> Record:
        for nodes, rate in ((WORKERS, case.workers), (SERVERS, case.servers)):
            for node in nodes:
                set_uplink(bed, node, parse_bandwidth_bytes_per_s(rate))
        step_s = step_seconds(
            bed,
            MODEL,
            WORKERS,
            SERVERS,
            STRATEGIES,
            parameter_s=PARAMETER_S,
            steps=self.plan.steps,
        )
        return {"step_s": step_s}


def assemble(cases: Sequence[Cell], records: Records) -> list[Record]:
    """One row a measured cell: what was predicted, the median measured, what the choice costs."""
    rows = []
    for case in cases:
        predictions, runs = records.of("prediction", case.key), records.of("measurement", case.key)
        if not predictions or not runs:
            continue
        predicted = predictions[-1]["step_s"]
        measured = [
            statistics.median(times) for times in zip(*(run["step_s"] for run in runs), strict=True)
        ]
        choice, best = predicted.index(min(predicted)), measured.index(min(measured))
        rows.append(
            {
                "id": f"{case.key}: {STRATEGIES[choice]}, best {STRATEGIES[best]}: costs more",
                "value": measured[choice] / measured[best] - 1,
                "workers": case.workers,
                "servers": case.servers,
                "strategies": list(STRATEGIES),
                "predicted_s": predicted,
                "measured_s": measured,
                "chosen": STRATEGIES[choice],
                "best": STRATEGIES[best],
                "regret_ratio": measured[choice] / measured[best] - 1,
            }
        )
    return rows


def figures(rows: Sequence[Record]) -> Iterator[Record]:
    """The median error of each strategy, and the share of right choices."""
    for number, strategy in enumerate(STRATEGIES if rows else ()):
        errors = [abs(row["predicted_s"][number] / row["measured_s"][number] - 1) for row in rows]
        yield {"id": f"{strategy}: median error", "value": statistics.median(errors)}
    if rows:
        near = sum(row["regret_ratio"] <= TOLERATED_RATIO for row in rows) / len(rows)
        name = f"right or within 5 % of the best, of {len(rows)} cells"
        yield {"id": name, "value": near, "least": WANTED_RATIO}
