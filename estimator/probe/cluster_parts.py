"""Plan the parts of a probe of several nodes: which there are, in which order, how long each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from estimator.machines.profile import MachineProfile
from estimator.probe.cluster_findings import ClusterFindings, slow_links, slow_nodes
from estimator.probe.collective_parts import CollectiveParts
from estimator.probe.leader import Slot, Task
from estimator.probe.link_parts import LinkParts
from estimator.probe.members import WorkerGroup

# Above this many nodes every pair is measured only if asked for.
FEW_NODES = 16


@dataclass(frozen=True, slots=True)
class Part:
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

    def plan(self, workers: WorkerGroup) -> list[Part]:
        """In order of importance; only what these nodes and devices have."""
        links, collectives = self._links, self._collectives
        several, dense = len(workers.nodes) > 1, len(workers.densest_first[0]) > 1
        few = len(workers.nodes) <= FEW_NODES
        pairs = several and (few if self.all_pairs is None else self.all_pairs)
        wanted = (
            (several, Part("speed of each node", 0.02, self._speeds)),
            (several, Part("links between nodes", 0.16, links.between_nodes)),
            (True, Part("all-reduce over everything", 0.26, collectives.all_reduce_everywhere)),
            (True, Part("all-reduce over smaller groups", 0.16, collectives.all_reduce_in_groups)),
            (several and dense, Part("flows that share a NIC", 0.06, links.shared_nics)),
            (pairs, Part("every pair of nodes", 0.09, links.every_pair)),
            (True, Part("other collectives", 0.08, collectives.other_collectives)),
            (several, Part("sharding in groups", 0.10, collectives.sharding_in_groups)),
            (several, Part("communication beside compute", 0.11, collectives.beside_compute)),
            (dense, Part("links inside a node", 0.03, links.inside_a_node)),
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
        task = Task(
            ranks=tuple(members[0].rank for members in nodes.values()),
            function="time_canary",
        )
        outcome = slot.run(task)
        for host, reports in zip(nodes, outcome.by_position(), strict=True):
            if reports:
                self._canaries_s[host] = reports[0]
        return outcome.failure
