"""The order of ranks found for two oversubscribed racks, beside random ones.

All pairs are measured with ``python -m estimator.probe --pairs all``; then an all-reduce and a
paced DDP step in each order are predicted and measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import cached_property, partial

import numpy as np
from records import Record, Records
from testbed.measure import measure
from testbed.network import Testbed
from testbed.orders import all_reduce_s
from testbed.paced import paced_graph, paced_machine
from testbed_cases import OURS, PAIRS_ALONE, Order
from testbed_runs import Bench, Trial, probe_network

import estimator as est
from estimator.advise.rank_order import hop_seconds, rank_order, ring_seconds
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import MachineProfile
from estimator.placement.mesh import whole_group
from estimator.placement.placement import place
from estimator.placement.topology import Cluster
from estimator.timeline.collectives.costs import GroupCollective

SIZE_BYTES = 16 * 10**6
MODEL, STRATEGY = "few_big", "ddp:view"
ALL_REDUCES = 5
# Of the predicted gain over the mean random order.
GAIN_ERROR_RATIO = 0.15


class OrderBench(Bench):
    """Two oversubscribed racks: what is probed, predicted and measured there."""

    def probe(self, bed: Testbed) -> None:
        # In no order of racks, as a launcher may number the nodes.
        names = np.random.default_rng(1).permutation([node.name for node in self.description.nodes])
        probe_network(
            bed,
            "+".join(f"{name}[0]" for name in names),
            self.plan,
            self.network_path,
            cluster=self.cluster_path,
            all_pairs=True,
        )

    @cached_property
    def _profile(self) -> MachineProfile:
        return load_profile(self.network_path)

    def _hosts(self, how: str) -> tuple[str, ...]:
        pairs = self._profile.pairs
        if pairs is None:
            raise SystemExit("the probe measured no pairs; use a larger probe")
        if how == OURS:
            cluster = Cluster.load(self.cluster_path)
            return rank_order(pairs, size_bytes=SIZE_BYTES, cluster=cluster).hosts
        if how == PAIRS_ALONE:
            return rank_order(pairs, size_bytes=SIZE_BYTES).hosts
        generator = np.random.default_rng(int(how.removeprefix("random ")))
        return tuple(generator.permutation(pairs.hosts).tolist())

    def predict(self, case: Order) -> Record:
        hosts = self._hosts(case.how)
        cluster, profile = Cluster.load(self.cluster_path), self._profile
        allocation = "+".join(f"{host}[0]" for host in hosts)
        ring = whole_group(place(allocation, cluster=cluster, profile=profile))
        model = GroupCollective.of(profile, "all_reduce", ring, cluster=cluster)
        if model is None or profile.pairs is None:
            raise SystemExit("the probe measured no all-reduce; use a larger probe")
        tour = np.array([profile.pairs.hosts.index(host) for host in hosts])
        answer = est.estimate(
            paced_graph(MODEL),
            allocation,
            strategy=STRATEGY,
            cluster=cluster,
            profile=paced_machine(profile, 1),
        )
        return {
            "order": case.how,
            "hosts": list(hosts),
            "allocation": allocation,
            "link": ring.link,
            "all_reduce_s": model.time_s(SIZE_BYTES),
            "pairs_alone_s": ring_seconds(hop_seconds(profile.pairs, SIZE_BYTES), tour),
            "step_s": answer.step_time_s,
        }

    def trials(self, case: Order, prediction: Record) -> Iterator[Trial]:
        yield Trial(key=case.key, run=partial(self._measured, row=prediction))

    def _measured(self, bed: Testbed, row: Record) -> Record:
        seconds = all_reduce_s(bed, row["hosts"], size_bytes=SIZE_BYTES, repeats=ALL_REDUCES)
        step_s = measure(
            bed,
            f"paced:{MODEL}",
            row["allocation"],
            strategy=STRATEGY,
            steps=self.plan.steps,
            warmup_steps=2,
        )
        return {"all_reduce_s": seconds, "step_s": step_s}


def assemble(cases: Sequence[Order], records: Records) -> list[Record]:
    """One row a measured order: what was predicted, and the medians of what was measured."""
    rows = []
    for case in cases:
        predictions, runs = records.of("prediction", case.key), records.of("measurement", case.key)
        if predictions and runs:
            medians = {
                f"measured_{name}": statistics.median(run[name] for run in runs)
                for name in ("all_reduce_s", "step_s")
            }
            off = abs(predictions[-1]["step_s"] / medians["measured_step_s"] - 1)
            about = {"id": f"{case.key}: step off by", "value": off}
            rows.append({**predictions[-1], **medians, **about})
    return rows


def gains(rows: Sequence[Record]) -> dict[str, tuple[float, float]]:
    """(predicted, measured) mean time in random orders over that in ours, where both are there."""
    ours = [row for row in rows if row["order"] == OURS]
    random = [row for row in rows if row["order"].startswith("random")]
    if not ours or not random:
        return {}

    def gain(key: str) -> float:
        return statistics.mean(row[key] for row in random) / float(ours[0][key])

    return {
        what: (gain(name), gain(f"measured_{name}"))
        for what, name in (("all-reduce", "all_reduce_s"), ("step", "step_s"))
    }


def figures(rows: Sequence[Record]) -> Iterator[Record]:
    """How much faster our order is than random ones, and how far that is off."""
    for what, (predicted, measured) in gains(rows).items():
        yield {"id": f"{what}: mean random order / ours", "value": measured, "predicted": predicted}
        off = abs(predicted / measured - 1)
        yield {"id": f"{what}: gain off by", "value": off, "bound": GAIN_ERROR_RATIO}
