"""Plan and measure the parts of a probe of several nodes: links, collectives of every shape."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

from estimator.machines.profile import (
    CollectiveCost,
    CollectiveName,
    DeviceKind,
    LinkKind,
    MachineProfile,
)
from estimator.placement.mesh import carrier_of
from estimator.probe.cluster.findings import (
    ClusterFindings,
    Member,
    WorkerGroup,
    device_locality,
    slow_links,
    slow_nodes,
)
from estimator.probe.cluster.leader import RankTask, Slot, TaskOutcome
from estimator.probe.cluster.shapes import (
    OTHER_SIZES_BYTES,
    SIZES_BYTES,
    shape_costs,
    shape_words,
    shapes,
)
from estimator.probe.links.copies import MESSAGE_SIZES_BYTES, typical_link
from estimator.probe.links.network import (
    CELL_SIZES_BYTES,
    FLOW_SIZES_BYTES,
    flow_link,
    grouped,
    network_kind,
    pair_link,
    pair_matrix,
)
from estimator.probe.links.overlap import overlap_cost
from estimator.units import MIB

_PAIRS_PER_CLASS = 3
# A pair this much slower than the middle one of its reach is timed once more, for this share of the
# time again: most such pairs were only disturbed.
_SLOW_RATIO = 0.9
_AGAIN_SHARE = 0.3


class LinkParts:
    """The parts that time messages; each adds what it found to `findings`."""

    def __init__(self, findings: ClusterFindings, base: MachineProfile | None) -> None:
        self.findings, self.base = findings, base

    def between_nodes(self, slot: Slot) -> str:
        """A few pairs of nodes of one rack, and of unlike ones; the middle pair stands for all."""
        workers = slot.workers
        chosen: list[tuple[str, str]] = []
        for locality in ("rack", "cluster"):
            near = [
                pair
                for pair in permutations(workers.nodes, 2)
                if workers.locality(*pair) == locality
            ]
            chosen += _spread_out(near, _PAIRS_PER_CLASS)
        outcome = self._time_pairs(chosen, MESSAGE_SIZES_BYTES, slot, slot.measuring_s)
        kind = network_kind(workers.members[0].device.kind)
        for locality in ("rack", "cluster"):
            links = [
                pair_link(kind, locality, message, note=f"{source} to {target}")
                for (source, target), message in _sent(workers, outcome).items()
                if workers.locality(source, target) == locality
            ]
            if links:
                self.findings.network.append(typical_link(links))
        return outcome.failure

    def every_pair(self, slot: Slot) -> str:
        """Every node to every other, by a cheaper measurement."""
        hosts = tuple(slot.workers.nodes)
        # By distance in the list, so that a budget that ends early leaves no node out.
        chosen = [
            (hosts[i], hosts[(i + step) % len(hosts)])
            for step in range(1, len(hosts))
            for i in range(len(hosts))
        ]
        outcome = self._time_pairs(chosen, CELL_SIZES_BYTES, slot, slot.measuring_s)
        found = dict(_sent(slot.workers, outcome))
        if not found:
            return outcome.failure or "the budget was over"
        if (slow := _slow_pairs(slot.workers, found)) and not outcome.failures:
            again_s = _AGAIN_SHARE * slot.measuring_s
            outcome = self._time_pairs(slow, CELL_SIZES_BYTES, slot, again_s)
            for pair, message in _sent(slot.workers, outcome).items():
                # What else runs on a machine makes messages slower, never faster.
                found[pair] = max(found[pair], message, key=_rate_bytes_per_s)
        self.findings.pairs = pair_matrix(hosts, found, at=self.findings.at)
        if len(found) < len(chosen) and not outcome.failures:
            return f"{len(chosen) - len(found)} of {len(chosen)}: the budget was over"
        return outcome.failure

    def _time_pairs(
        self,
        chosen: Sequence[tuple[str, str]],
        sizes_bytes: Sequence[int],
        slot: Slot,
        budget_s: float,
    ) -> TaskOutcome:
        """Time messages between the first ranks of pairs of nodes, apart where they may meet."""
        workers = slot.workers
        hosts = [host for host in workers.nodes if any(host in pair for pair in chosen)]
        place = {host: position for position, host in enumerate(hosts)}
        links = {(place[a], place[b]): workers.links_between(a, b) for a, b in chosen}
        task = RankTask(
            ranks=tuple(workers.nodes[host][0].rank for host in hosts),
            function="time_pairs",
            arguments={
                "pairs": grouped(links, links),
                "sizes_bytes": list(sizes_bytes),
                "budget_s": budget_s,
            },
        )
        return slot.run(task)

    def shared_nics(self, slot: Slot) -> str:
        """As many flows as devices, and two, from one node to another and to several."""
        workers = slot.workers
        kind = network_kind(workers.members[0].device.kind)
        cases = list(_flow_cases(workers.densest_first))
        for ranks, note in cases:
            count = len(ranks) // 2
            task = RankTask(
                ranks=ranks,
                function="time_flows",
                arguments={
                    "flows": [[position, position + count] for position in range(count)],
                    "sizes_bytes": list(FLOW_SIZES_BYTES),
                    "budget_s": slot.measuring_s / len(cases),
                },
            )
            outcome = slot.run(task)
            messages = [message for reports in outcome.by_position() for message in reports]
            if len(messages) == count:
                locality = workers.locality(*workers.hosts((ranks[0], ranks[-1])))
                self.findings.network.append(flow_link(kind, locality, messages, note=note))
            if outcome.failures:
                return outcome.failure
        return ""

    def inside_a_node(self, slot: Slot) -> str:
        """One pair of devices of one node for each way in which two of them are near."""
        members = slot.workers.densest_first[0]
        kind: LinkKind = "d2d" if members[0].device.kind == "cuda" else "loopback"
        known = {(link.kind, link.locality) for link in (self.base.links if self.base else ())}
        pairs: dict[Any, tuple[int, int]] = {}
        for (a, one), (b, two) in permutations(enumerate(members), 2):
            locality = device_locality(one.device, two.device)
            if (kind, locality) not in known:
                pairs.setdefault(locality, (a, b))
        if not pairs:
            return ""
        task = RankTask(
            ranks=tuple(member.rank for member in members),
            function="time_pairs",
            arguments={
                "pairs": [[pair] for pair in pairs.values()],
                "sizes_bytes": list(MESSAGE_SIZES_BYTES),
                "budget_s": slot.measuring_s,
            },
        )
        outcome = slot.run(task)
        locality_of = {pair: locality for locality, pair in pairs.items()}
        for reports in outcome.by_position():
            for message in reports:
                locality = locality_of[message["from"], message["to"]]
                self.findings.links.append(pair_link(kind, locality, message))
        return outcome.failure


def _flow_cases(nodes: Sequence[Sequence[Member]]) -> Iterator[tuple[tuple[int, ...], str]]:
    """(ranks, what they do): senders on the first of `nodes`, then as many receivers elsewhere."""
    senders = nodes[0]
    for count in sorted({len(senders), 2}, reverse=True):
        sending = tuple(member.rank for member in senders[:count])
        if len(sending) == count and len(nodes[1]) >= count:
            receiving = tuple(member.rank for member in nodes[1][:count])
            yield sending + receiving, f"{count} flows to node {nodes[1][0].host}"
        if len(sending) == count > 1 and len(nodes) > count:
            receiving = tuple(node[0].rank for node in nodes[1 : count + 1])
            yield sending + receiving, f"{count} flows to {count} nodes"


def _slow_pairs(
    workers: WorkerGroup, found: Mapping[tuple[str, str], Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """The pairs that look slow among those of the same locality."""
    rates = {pair: _rate_bytes_per_s(message) for pair, message in found.items()}
    usual: dict[str, float] = {}
    for locality in ("rack", "cluster"):
        near = [rate for pair, rate in rates.items() if workers.locality(*pair) == locality]
        usual[locality] = statistics.median(near) if near else 0.0
    return [
        pair for pair, rate in rates.items() if rate < _SLOW_RATIO * usual[workers.locality(*pair)]
    ]


def _rate_bytes_per_s(message: Mapping[str, Any]) -> float:
    return pair_link("tcp", "rack", message).bandwidth_bytes_per_s


def _sent(workers: WorkerGroup, outcome: TaskOutcome) -> dict[tuple[str, str], Mapping[str, Any]]:
    """What senders reported, by nodes (from, to)."""
    hosts = workers.hosts(outcome.task.ranks)
    return {
        (hosts[message["from"]], hosts[message["to"]]): message
        for reports in outcome.by_position()
        for message in reports
    }


def _spread_out(pairs: Iterable[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """Up to `count` pairs that use every node as rarely as can be."""
    used: dict[str, int] = {}
    left = list(pairs)
    chosen: list[tuple[str, str]] = []
    while left and len(chosen) < count:
        best = min(left, key=lambda pair: used.get(pair[0], 0) + used.get(pair[1], 0))
        left.remove(best)
        chosen.append(best)
        for host in best:
            used[host] = used.get(host, 0) + 1
    return chosen


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
    ) -> TaskOutcome:
        task = RankTask(
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
            task = RankTask(
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


# Above this many nodes every pair is measured only if asked for.
FEW_NODES = 16


@dataclass(frozen=True, slots=True)
class ProbePart:
    """A part of the probe, its share of the time, and how to measure it.

    `measure` returns why it failed, or "".
    """

    name: str
    share: float
    measure: Callable[[Slot], str]


class ClusterParts:
    """The parts of one probe; each adds what it found to `findings`."""

    def __init__(
        self, findings: ClusterFindings, base: MachineProfile | None, all_pairs: bool | None
    ) -> None:
        self.findings, self.all_pairs = findings, all_pairs
        self._links = LinkParts(findings, base)
        self._collectives = CollectiveParts(findings)
        self._canaries_s: dict[str, float] = {}

    def plan(self, workers: WorkerGroup) -> list[ProbePart]:
        """In order of importance; only what these nodes and devices have."""
        links, collectives = self._links, self._collectives
        several, dense = len(workers.nodes) > 1, len(workers.densest_first[0]) > 1
        few = len(workers.nodes) <= FEW_NODES
        pairs = several and (few if self.all_pairs is None else self.all_pairs)
        wanted = (
            (several, ProbePart("speed of each node", 0.02, self._speeds)),
            (several, ProbePart("links between nodes", 0.16, links.between_nodes)),
            (
                True,
                ProbePart("all-reduce over everything", 0.26, collectives.all_reduce_everywhere),
            ),
            (
                True,
                ProbePart("all-reduce over smaller groups", 0.16, collectives.all_reduce_in_groups),
            ),
            (several and dense, ProbePart("flows that share a NIC", 0.06, links.shared_nics)),
            (pairs, ProbePart("every pair of nodes", 0.09, links.every_pair)),
            (True, ProbePart("other collectives", 0.08, collectives.other_collectives)),
            (several, ProbePart("sharding in groups", 0.10, collectives.sharding_in_groups)),
            (several, ProbePart("communication beside compute", 0.11, collectives.beside_compute)),
            (dense, ProbePart("links inside a node", 0.03, links.inside_a_node)),
        )
        return [part for is_wanted, part in wanted if is_wanted]

    def remarks(self) -> list[str]:
        """Sentences on nodes that are unlike the others."""
        sentences = slow_nodes(self._canaries_s)
        if self.findings.pairs is not None:
            sentences += slow_links(self.findings.pairs)
        return sentences

    def _speeds(self, slot: Slot) -> str:
        """How long one device of each node takes for the same matmul."""
        nodes = slot.workers.nodes
        task = RankTask(
            ranks=tuple(members[0].rank for members in nodes.values()),
            function="time_canary",
        )
        outcome = slot.run(task)
        for host, reports in zip(nodes, outcome.by_position(), strict=True):
            if reports:
                self._canaries_s[host] = reports[0]
        return outcome.failure
