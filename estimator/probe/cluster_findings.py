"""Collect what a probe of several nodes finds, and merge it with one machine's own profile."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from estimator.machines.profile import (
    CollectiveCost,
    Link,
    MachineProfile,
    OverlapCost,
    PairMatrix,
    Provenance,
)
from estimator.placement.process_groups import carrier_of
from estimator.probe.members import WorkerGroup

# A node is called slow if it takes this much longer than the middle one, links if they carry less.
_SLOW_COMPUTE_RATIO = 1.25
_SLOW_LINK_RATIO = 0.7


@dataclass(slots=True, kw_only=True)
class ClusterFindings:
    """Everything found so far; whole at any moment. `remarks` are sentences for people."""

    at: str
    links: list[Link] = field(default_factory=list)
    network: list[Link] = field(default_factory=list)
    pairs: PairMatrix | None = None
    collectives: list[CollectiveCost] = field(default_factory=list)
    overlaps: list[OverlapCost] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether nothing of the network was measured."""
        found = (self.links, self.network, self.pairs, self.collectives, self.overlaps)
        return not any(found)

    def merged(
        self, base: MachineProfile, *, name: str, workers: WorkerGroup, used_s: float
    ) -> MachineProfile:
        """The machine's own numbers with the network's; what was measured anew wins."""
        anew = {(link.kind, link.locality, link.flows) for link in self.links}
        kept = [link for link in base.links if (link.kind, link.locality, link.flows) not in anew]
        groups = {(cost.op, cost.group_size, cost.nodes) for cost in self.collectives}
        collectives = [
            cost
            for cost in base.collectives
            if not cost.spans_nodes
            and not any(
                (op, cost.group_size, cost.nodes) in groups
                for op in (cost.op, carrier_of(cost.op, base.kind))
            )
        ]
        note = "; ".join(
            [f"{len(workers.nodes)} nodes probed together for {used_s:.0f} s", *self.remarks]
        )
        return replace(
            base,
            name=name,
            links=(*kept, *self.links),
            network=tuple(self.network),
            pairs=self.pairs,
            collectives=(*collectives, *self.collectives),
            overlaps=(*(cost for cost in base.overlaps if cost.nodes == 1), *self.overlaps),
            software={**base.software, **unequal_versions(workers)},
            missing=(*base.missing, *self.missing),
            provenance=Provenance(
                source="measured",
                at=self.at,
                samples=base.provenance.samples,
                relative_error=base.provenance.relative_error,
                note=note,
            ),
        )


def unequal_versions(workers: WorkerGroup) -> dict[str, str]:
    """``{"torch on b, c": "2.12"}`` for what nodes run in another version than rank 0."""
    members = workers.members
    others: dict[tuple[str, str], list[str]] = {}
    for member in members:
        for package in sorted({*member.versions, *members[0].versions}):
            version = member.versions.get(package, "none")
            if version != members[0].versions.get(package, "none"):
                hosts = others.setdefault((package, version), [])
                if member.host not in hosts:
                    hosts.append(member.host)
    return {
        f"{package} on {', '.join(hosts)}": version for (package, version), hosts in others.items()
    }


def slow_nodes(canaries_s: Mapping[str, float]) -> list[str]:
    """A sentence on every node that computes markedly longer than the middle one."""
    middle_s = statistics.median_low(canaries_s.values()) if canaries_s else 0.0
    return [
        f"node {host} computes {taken_s / middle_s:.2g} times as long as the others; write "
        f"slowdown = {taken_s / middle_s:.2g} for it in the cluster file"
        for host, taken_s in canaries_s.items()
        if taken_s > _SLOW_COMPUTE_RATIO * middle_s
    ]


def slow_links(pairs: PairMatrix) -> list[str]:
    """A sentence on every node whose links carry markedly less than the middle one's."""
    rates: dict[str, float] = {}
    for number, host in enumerate(pairs.hosts):
        row = pairs.bandwidth_bytes_per_s[number]
        column = [others[number] for others in pairs.bandwidth_bytes_per_s]
        known = [rate for rate in (*row, *column) if rate is not None]
        if known:
            rates[host] = statistics.median(known)
    if len(rates) < 3:
        return []
    middle = statistics.median(rates.values())
    return [
        f"the links of node {host} carry {rate / 1e6:.3g} MB/s, those of the middle node "
        f"{middle / 1e6:.3g} MB/s"
        for host, rate in rates.items()
        if rate < _SLOW_LINK_RATIO * middle
    ]
