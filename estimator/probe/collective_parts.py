"""Measure collectives over groups of every shape, alone and beside compute."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from estimator.machines.profile import CollectiveCost, CollectiveName, DeviceKind
from estimator.placement.process_groups import carrier_of
from estimator.probe.cluster_findings import ClusterFindings
from estimator.probe.leader import Outcome, Slot, Task
from estimator.probe.members import WorkerGroup
from estimator.probe.overlap import overlap_cost
from estimator.probe.shapes import (
    OTHER_SIZES_BYTES,
    SIZES_BYTES,
    shape_costs,
    shape_words,
    shapes,
)
from estimator.units import MIB

# The first groups are measured well: each may take one in so many of what is left.
_GROUPS_AT_MOST = 3
_LEAST_GROUP_RATIO = 0.1
_OVERLAP_SIZES_BYTES = (25 * MIB, 8 * MIB, 4 * MIB, 1 * MIB)
_COMPUTE_RATIO = 2.0
# Rounds of overlap.time_rank with its warm-up, each of two computes and three collectives, beside
# two kinds of compute.
_OVERLAP_FACTOR = 2 * 4.5 * (2 * _COMPUTE_RATIO + 3)


class CollectiveParts:
    """The parts that time collectives; each adds what it found to `findings`."""

    def __init__(self, findings: ClusterFindings) -> None:
        self.findings = findings

    def all_reduce_everywhere(self, slot: Slot) -> str:
        """The group that data-parallel training uses, also with two all-reduces at once."""
        return self._time_shape(next(shapes(slot.workers)), ["all_reduce"], slot, pairs=True)

    def all_reduce_in_groups(self, slot: Slot) -> str:
        """Smaller groups, as far as the time goes."""
        groups = list(shapes(slot.workers))[1:]
        planned_end = time.monotonic() + slot.planned_s
        for number, group in enumerate(groups):
            left_s = planned_end - time.monotonic()
            if left_s < _LEAST_GROUP_RATIO * slot.planned_s:
                words = ", ".join(shape_words(slot.workers, each) for each in groups[number:])
                self.findings.missing.append(f"all-reduce over {words}: the budget was over")
                return ""
            share = min(_GROUPS_AT_MOST, len(groups) - number)
            failed = self._time_shape(
                group, ["all_reduce"], replace(slot, planned_s=left_s / share)
            )
            if failed:
                return failed
        return ""

    def other_collectives(self, slot: Slot) -> str:
        """What sharded training and parameter servers use, over everything."""
        ops = [*_sharding_ops(slot.workers.members[0].device.kind), "broadcast"]
        return self._time_shape(
            next(shapes(slot.workers)), ops, slot, sizes_bytes=OTHER_SIZES_BYTES
        )

    def sharding_in_groups(self, slot: Slot) -> str:
        """What FSDP does where several groups hold a replica each: across two nodes, in a node."""
        workers = slot.workers
        ops = _sharding_ops(workers.members[0].device.kind)
        # Calls inside nodes are short, and as they share the cores of a node, uneven.
        pair, inside = (replace(slot, planned_s=share * slot.planned_s) for share in (0.4, 0.6))
        firsts = tuple(members[0].rank for members in workers.nodes.values())[:2]
        failed = self._time_shape(firsts, ops, pair, sizes_bytes=OTHER_SIZES_BYTES)
        if failed or workers.devices_per_node < 2:
            return failed
        return self._time_in_every_node(inside)

    def _time_in_every_node(self, slot: Slot) -> str:
        """Groups inside nodes, in all nodes at the same time, as HSDP shards a model."""
        workers, per_node = slot.workers, slot.workers.devices_per_node
        ranks = tuple(
            member.rank for members in workers.nodes.values() for member in members[:per_node]
        )
        starts = range(0, len(ranks), per_node)
        groups = [list(range(start, start + per_node)) for start in starts]
        ops = [*_sharding_ops(workers.members[0].device.kind), "all_reduce"]
        outcome = self._run(ranks, ops, slot, OTHER_SIZES_BYTES, groups=groups)
        costs, notes = shape_costs(outcome.by_position(), slot.backend, workers.hosts(ranks))
        self.findings.collectives += [
            replace(cost, group_size=per_node, nodes=1, hosts=cost.hosts[:per_node])
            for cost in costs
        ]
        self.findings.missing += notes
        return outcome.failure

    def _time_shape(
        self,
        group: tuple[int, ...],
        ops: list[str],
        slot: Slot,
        *,
        sizes_bytes: Sequence[int] = SIZES_BYTES,
        pairs: bool = False,
    ) -> str:
        outcome = self._run(group, ops, slot, sizes_bytes, pairs=pairs)
        hosts = slot.workers.hosts(group)
        costs, notes = shape_costs(outcome.by_position(), slot.backend, hosts)
        self.findings.collectives += costs
        self.findings.missing += notes
        return outcome.failure

    def _run(
        self,
        ranks: tuple[int, ...],
        ops: list[str],
        slot: Slot,
        sizes_bytes: Sequence[int],
        **more: Any,
    ) -> Outcome:
        task = Task(
            ranks=ranks,
            function="time_shape",
            arguments={
                "ops": ops,
                "sizes_bytes": list(sizes_bytes),
                "budget_s": slot.measuring_s,
                **more,
            },
        )
        return slot.run(task)

    def beside_compute(self, slot: Slot) -> str:
        """Two nodes first, then everything, at sizes that the links carry in time."""
        workers = slot.workers
        firsts = tuple(members[0].rank for members in workers.nodes.values())
        groups = list(dict.fromkeys((firsts[:2], next(shapes(workers)))))
        planned_s = slot.measuring_s / len(groups)
        for group in groups:
            cases = _overlap_cases(self._cost_of(workers, group), planned_s)
            if not cases:
                words = shape_words(workers, group)
                return f"{words}: the links are too slow to do it in time; use a larger --budget"
            task = Task(
                ranks=group,
                function="time_overlap",
                arguments={
                    "budget_s": planned_s,
                    "cases": cases,
                    "compute_ratio": _COMPUTE_RATIO,
                },
            )
            outcome = slot.run(task)
            for messages in zip(*outcome.by_position(), strict=False):
                first = messages[0]
                self.findings.overlaps.append(
                    overlap_cost(
                        first["compute"],
                        first["size_bytes"],
                        first["in_flight"],
                        slot.backend,
                        [message["rounds"] for message in messages],
                        nodes=len(set(workers.hosts(group))),
                    )
                )
            if outcome.failures:
                return outcome.failure
        return ""

    def _cost_of(self, workers: WorkerGroup, group: Sequence[int]) -> CollectiveCost | None:
        hosts = workers.hosts(group)
        costs = [cost for cost in self.findings.collectives if cost.op == "all_reduce"]
        return next((cost for cost in costs if cost.hosts == hosts), None)


def _sharding_ops(kind: DeviceKind) -> list[str]:
    """The collectives of FSDP, but those that another one is run for."""
    ops: tuple[CollectiveName, ...] = ("all_gather", "reduce_scatter")
    return [op for op in ops if carrier_of(op, kind) == op]


def _overlap_cases(cost: CollectiveCost | None, planned_s: float) -> list[tuple[int, int]]:
    """(bytes, all-reduces in flight) that fit: the largest size, then two of it, then 1 MiB."""
    if cost is None:
        return []

    def seconds(size: int) -> float:
        return _OVERLAP_FACTOR * (cost.latency_s + size / cost.bandwidth_bytes_per_s)

    largest = next((size for size in _OVERLAP_SIZES_BYTES if seconds(size) <= planned_s), None)
    cases: list[tuple[int, int]] = []
    if largest is not None:
        left_s = planned_s
        for size, flights in dict.fromkeys(((largest, 1), (largest, 2), (MIB, 1))):
            taken_s = seconds(size * flights)
            if taken_s <= left_s:
                cases.append((size, flights))
                left_s -= taken_s
    return cases
