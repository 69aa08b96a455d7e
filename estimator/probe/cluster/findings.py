"""Collect what a probe of several nodes finds, and merge it with one machine's own profile."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from estimator.machines.profile import (
    CollectiveCost,
    Device,
    Link,
    Locality,
    MachineProfile,
    OverlapCost,
    PairMatrix,
    Provenance,
)
from estimator.placement.mesh import carrier_of
from estimator.placement.topology import Cluster

DeviceLocality = Literal["device_switch", "socket", "node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank: its node, the device it holds there, and what it runs.

    `machine` describes the node's hardware in words; nodes with the same words are of one type.
    """

    rank: int
    host: str
    address: str
    local_rank: int
    device: Device
    machine: str
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Member:
        """Build a member from the values of `to_dict`."""
        device = {**data["device"], "cores": tuple(data["device"]["cores"])}
        return cls(**{**data, "device": Device(**device)})


@dataclass(frozen=True, kw_only=True)
class WorkerGroup:
    """The members that take part, in rank order, and the racks of their nodes."""

    members: tuple[Member, ...]
    cluster: Cluster | None = None

    def without(self, ranks: set[int]) -> WorkerGroup:
        """Those that are left."""
        left = tuple(member for member in self.members if member.rank not in ranks)
        return WorkerGroup(members=left, cluster=self.cluster)

    @property
    def nodes(self) -> dict[str, tuple[Member, ...]]:
        """Members by node, nodes in rank order."""
        found: dict[str, list[Member]] = {}
        for member in self.members:
            found.setdefault(member.host, []).append(member)
        return {host: tuple(members) for host, members in found.items()}

    @property
    def nodes_by_rack(self) -> dict[str, tuple[Member, ...]]:
        """Members by node, so ordered that a ring leaves each rack once; within it in rank order.

        In any other order flows of a ring meet on the uplinks of racks.
        """
        nodes = self.nodes
        hosts = sorted(nodes, key=lambda host: self._switches_above(host)[::-1])
        return {host: nodes[host] for host in hosts}

    @property
    def devices_per_node(self) -> int:
        """The number of devices that every node has at least."""
        return min((len(members) for members in self.nodes.values()), default=0)

    @property
    def densest_first(self) -> tuple[tuple[Member, ...], ...]:
        """The members of each node, those with the most devices first, else in rank order."""
        return tuple(sorted(self.nodes.values(), key=len, reverse=True))

    def of(self, rank: int) -> Member:
        """The member that is `rank`."""
        return next(member for member in self.members if member.rank == rank)

    def hosts(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """The node of each rank."""
        host_of = {member.rank: member.host for member in self.members}
        return tuple(host_of[rank] for rank in ranks)

    def rack_of(self, host: str) -> str:
        """The switch that a node hangs on; without a cluster file all hang on one."""
        above = self._switches_above(host)
        return above[0] if above else ""

    def unknown_hosts(self) -> tuple[str, ...]:
        """Nodes that the cluster file does not name."""
        if self.cluster is None:
            return ()
        return tuple(host for host in self.nodes if self._name_of(host) is None)

    def locality(self, host: str, other: str) -> Locality:
        """How far apart two nodes are."""
        return "rack" if self.rack_of(host) == self.rack_of(other) else "cluster"

    def links_between(self, host: str, other: str) -> frozenset[str]:
        """The cables that a flow from one node to another goes through.

        Both ways of a cable count as one: receipts of one way would wait behind the messages of the
        other in its queues. Without a cluster file everything may go through one cable, so that is
        what is said.
        """
        if self.cluster is None or {host, other} & set(self.unknown_hosts()):
            return frozenset({"the network"})
        ups, downs = set(self._switches_above(host)), set(self._switches_above(other))
        return frozenset({host, other} | {f"switch {name}" for name in ups ^ downs})

    def _name_of(self, host: str) -> str | None:
        """What the cluster file calls a node: its host name, with or without its domain."""
        nodes = self.cluster.nodes if self.cluster is not None else {}
        return next((name for name in (host, host.split(".")[0]) if name in nodes), None)

    def _switches_above(self, host: str) -> tuple[str, ...]:
        name = self._name_of(host)
        if self.cluster is None or name is None:
            return ()
        return self.cluster.switches_above(name)


def device_locality(device: Device, other: Device) -> DeviceLocality:
    """How far apart two devices of one node are: a switch of their own (NVLink), or NUMA nodes."""
    peers = str(device.details.get("peer_access") or "").split()
    if f"{other.index}:nvlink" in peers:
        return "device_switch"
    return "socket" if device.numa_node == other.numa_node else "node"


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
