"""Hold who takes part in a probe of several nodes, and how far apart they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from estimator.machines.profile import Device, Locality
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
