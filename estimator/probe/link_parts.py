"""Measure the links of a cluster: between nodes, through shared NICs, of every pair, in a node."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

from estimator.machines.profile import LinkKind, MachineProfile
from estimator.probe.cluster_findings import ClusterFindings
from estimator.probe.copies import MESSAGE_SIZES_BYTES
from estimator.probe.leader import Outcome, Slot, Task
from estimator.probe.members import Member, WorkerGroup, device_locality
from estimator.probe.network import (
    CELL_SIZES_BYTES,
    FLOW_SIZES_BYTES,
    flow_link,
    grouped,
    network_kind,
    pair_link,
    pair_matrix,
    typical_link,
)

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
    ) -> Outcome:
        """Time messages between the first ranks of pairs of nodes, apart where they may meet."""
        workers = slot.workers
        hosts = [host for host in workers.nodes if any(host in pair for pair in chosen)]
        place = {host: position for position, host in enumerate(hosts)}
        links = {(place[a], place[b]): workers.links_between(a, b) for a, b in chosen}
        task = Task(
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
            task = Task(
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
        task = Task(
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


def _sent(workers: WorkerGroup, outcome: Outcome) -> dict[tuple[str, str], Mapping[str, Any]]:
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
