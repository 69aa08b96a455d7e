"""Put an allocation onto machines: the profile, the node and the network of each group of ranks."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from estimator.cache import Cache
from estimator.errors import AllocationError, ProfileError, TopologyError, quoted
from estimator.machines.catalogue import named_profile, read_at
from estimator.machines.profile import MachineProfile
from estimator.machines.typical import achieved_latency_s
from estimator.placement.allocation import Allocation, DeviceGroup
from estimator.placement.topology import Cluster, NodeNetwork, network_in_cluster, network_of

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """`nodes` equal nodes in rank order with `per_node` ranks each.

    `host` names the node of a cluster file (then `nodes` is 1).
    """

    profile: MachineProfile
    nodes: int
    per_node: int
    host: str | None = None
    devices: tuple[int, ...] = ()
    slowdown_ratio: float = 1.0

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeKind:
    """Nodes that are alike for a step: one object for one machine, load, speed and network.

    `nic_bytes_per_s` is the payload rate that the ranks of a node get of its network, each way;
    None where nothing is known of it. `hop_latency_s` is that of a hop to the next node.
    `by_network` sorts by network: the slowest first, then the one with most ranks.
    """

    profile: MachineProfile
    ranks_per_node: int
    slowdown_ratio: float
    nic_bytes_per_s: float | None
    hop_latency_s: float
    by_network: tuple[float, int] = field(init=False)

    def __post_init__(self) -> None:
        rate = math.inf if self.nic_bytes_per_s is None else self.nic_bytes_per_s
        object.__setattr__(self, "by_network", (rate, -self.ranks_per_node))

    @property
    def rate_bytes_per_s(self) -> float:
        """What its ranks get of the node's network; inf where nothing is known of it."""
        return self.by_network[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """An allocation on its machines: groups of nodes in rank order; a host may come more than once.

    `kinds` are the unlike kinds of its nodes in the order in which ranks meet them, `kind_of` is
    that of each group. `machines` are the types that it names, without a cluster.
    """

    allocation: Allocation
    cluster: Cluster | None
    kinds: tuple[NodeKind, ...]
    kind_of: tuple[int, ...]
    ranks: int
    nodes: int
    hosted: tuple[NodeGroup, ...] = ()
    machines: tuple[tuple[str, MachineProfile], ...] = ()

    @property
    def node_groups(self) -> tuple[NodeGroup, ...]:
        """In a cluster its hosts, else equal nodes for each of its groups."""
        if self.cluster is not None:
            return self.hosted
        kinds = [self.kinds[number] for number in self.kind_of]
        return tuple(
            NodeGroup(profile=kind.profile, nodes=group.nodes, per_node=group.devices_per_node)
            for group, kind in zip(self.allocation.groups, kinds, strict=True)
        )

    @property
    def ranks_of(self) -> list[int]:
        """How many ranks each of `node_groups` has."""
        if self.cluster is not None:
            return [group.ranks for group in self.hosted]
        return [group.nodes * group.devices_per_node for group in self.allocation.groups]

    @property
    def ranks_per_node(self) -> tuple[int, ...]:
        """For each group of nodes, the ranks of the whole allocation on one of its nodes."""
        return tuple(self.kinds[number].ranks_per_node for number in self.kind_of)

    @property
    def is_mixed(self) -> bool:
        """Whether devices differ in machine or speed, so that some wait under equal batches."""
        return len({(id(kind.profile), kind.slowdown_ratio) for kind in self.kinds}) > 1

    def by_node_group(self, values: Sequence[Value]) -> list[Value]:
        """Values given one for each group of the allocation, as one for each `NodeGroup`."""
        # In a cluster each node of a counted group is a `NodeGroup` of its own.
        node_groups = [group.nodes if self.cluster else 1 for group in self.allocation.groups]
        return [
            value for value, count in zip(values, node_groups, strict=True) for _ in range(count)
        ]


def check_kinds(*, cluster: Any = None, profile: Any = None) -> None:
    """Raise TopologyError or ProfileError for arguments of another kind."""
    if cluster is not None and not isinstance(cluster, Cluster):
        raise TopologyError(
            f"cluster is a Cluster or the path of its file, found {quoted(cluster)}; give one"
        )
    if profile is not None and not isinstance(profile, MachineProfile):
        raise ProfileError(
            f"profile is a MachineProfile, found {quoted(profile)}; load_profile gives one by name"
        )


def place(
    allocation: str | Allocation,
    *,
    cluster: Cluster | None = None,
    profile: MachineProfile | None = None,
    cache: Cache | None = None,
) -> Placement:
    """Resolve every group of an allocation; `profile` stands in for the one machine it names.

    With a cluster, counted groups take the first free nodes of their machine type in the order of
    the cluster file. `cache` keeps kinds of nodes, so that they are the same objects in other
    placements. Raises AllocationError, UnknownMachineError, ProfileError.
    """
    parsed = Allocation.parse(allocation)
    known: _KnownNodes = {} if cache is None else cache.get("nodes", (), dict)
    if profile is not None and len({group.machine for group in parsed.groups} - {None}) > 1:
        raise AllocationError(
            f"'{parsed}' names several machine types, but one profile was given; leave it out"
        )
    if cluster is None:
        return _on_machines(parsed, profile, known)
    return _on_hosts(parsed, _in_cluster(parsed, cluster, profile), cluster, known)


def _on_machines(
    allocation: Allocation, profile: MachineProfile | None, known: _KnownNodes
) -> Placement:
    """Nodes of machine types on one switch; only unlike groups cost more than counting."""
    numbers: dict[tuple[str | None, int], int] = {}
    kinds: list[NodeKind] = []
    kind_of: list[int] = []
    machines: dict[str | None, _NodesByCount] = {}
    locality = hop_locality(None)
    ranks = nodes = 0
    now = None if profile else read_at()
    for group in allocation.groups:
        count, devices, name = group.nodes, group.devices_per_node, group.machine
        number = numbers.get((name, devices))
        if number is None:
            number = numbers[name, devices] = len(kinds)
            if name not in machines:
                machine = profile or named_profile(_machine_name(group), now)
                machines[name] = _nodes_of(known, machine, locality)
            loads = machines[name]
            if devices > loads.most:
                raise _too_many(allocation, loads.profile, devices)
            kinds.append(loads[devices])
        kind_of.append(number)
        nodes += count
        ranks += count * devices
    if nodes > 1:
        for kind in kinds:
            if kind.nic_bytes_per_s is None:
                raise _no_network(allocation, kind.profile.name)
    return Placement(
        allocation=allocation,
        cluster=None,
        kinds=tuple(kinds),
        kind_of=tuple(kind_of),
        ranks=ranks,
        nodes=nodes,
        machines=tuple([(name, loads.profile) for name, loads in machines.items() if name]),
    )


def _machine_name(group: DeviceGroup) -> str:
    if group.machine is None:
        raise AllocationError(
            f"'{group}' names a host, which only a cluster file describes; give --cluster FILE or "
            f"write 1x{group.devices_per_node}:MACHINE"
        )
    return group.machine


def _on_hosts(
    allocation: Allocation, node_groups: Sequence[NodeGroup], cluster: Cluster, known: _KnownNodes
) -> Placement:
    """Check that no host gives more devices than it has, and that hosts can reach each other."""
    on_host: dict[str | None, int] = {}
    for node_group in node_groups:
        on_host[node_group.host] = on_host.get(node_group.host, 0) + node_group.per_node
    for node_group in node_groups:
        if on_host[node_group.host] > len(node_group.profile.devices):
            raise _too_many(
                allocation, node_group.profile, on_host[node_group.host], node_group.host
            )
    locality = hop_locality(cluster)
    kinds = []
    unlike: dict[tuple[int, float | None, float], _NodesByCount] = {}
    for node_group in node_groups:
        host, profile = node_group.host or "", node_group.profile
        key = id(profile), cluster.nodes[host].uplink_bytes_per_s, node_group.slowdown_ratio
        if key not in unlike:
            network = network_in_cluster(profile, cluster, host)
            unlike[key] = _nodes_of(known, profile, locality, network, node_group.slowdown_ratio)
        kind = unlike[key][on_host[node_group.host]]
        if kind.nic_bytes_per_s is None and len(on_host) > 1:
            raise _no_network(allocation, node_group.host)
        kinds.append(kind)
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    kind_of = tuple(numbers[kind] for kind in kinds)
    ranks = sum(on_host.values())
    return Placement(
        allocation=allocation,
        cluster=cluster,
        kinds=tuple(numbers),
        kind_of=kind_of,
        ranks=ranks,
        nodes=len(on_host),
        hosted=tuple(node_groups),
    )


def _too_many(
    allocation: Allocation, machine: MachineProfile, used: int, host: str | None = None
) -> AllocationError:
    return AllocationError(
        f"'{allocation}' asks for {used} devices of '{host or machine.name}', which has "
        f"{len(machine.devices)}; ask for at most {len(machine.devices)}"
    )


def _no_network(allocation: Allocation, name: str | None) -> AllocationError:
    return AllocationError(
        f"'{allocation}' spans several nodes, but no network of '{name}' has been measured; run "
        "'torchrun -m estimator.probe' on two nodes or give --network RATE or --cluster FILE"
    )


class _NodesByCount(dict[int, NodeKind]):
    """Nodes of one machine, network and speed, by how many ranks work on each."""

    def __init__(
        self,
        profile: MachineProfile,
        locality: str,
        network: NodeNetwork | None,
        slowdown_ratio: float,
    ) -> None:
        self.profile, self.most = profile, len(profile.devices)
        self._network = network or network_of(profile)
        self._slowdown_ratio = slowdown_ratio
        self._hop_latency_s = network_latency_s(profile, locality)

    def __missing__(self, ranks_per_node: int) -> NodeKind:
        network = self._network
        kind = self[ranks_per_node] = NodeKind(
            profile=self.profile,
            ranks_per_node=ranks_per_node,
            slowdown_ratio=self._slowdown_ratio,
            nic_bytes_per_s=None if network is None else network.sent_bytes_per_s(ranks_per_node),
            hop_latency_s=self._hop_latency_s,
        )
        return kind


_KnownNodes = dict[tuple[Hashable, ...], _NodesByCount]
# Kinds of machines, networks and speeds of which nodes are kept: more than any catalogue has.
_MOST_KNOWN = 1024


def _nodes_of(
    known: _KnownNodes,
    profile: MachineProfile,
    locality: str,
    network: NodeNetwork | None = None,
    slowdown_ratio: float = 1.0,
) -> _NodesByCount:
    """The nodes of that kind, kept from one placement to the next; by default as the profile is."""
    key = id(profile), locality, network, slowdown_ratio
    nodes = known.get(key)
    if nodes is None:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        # Threads that ask at once get one object.
        nodes = known.setdefault(key, _NodesByCount(profile, locality, network, slowdown_ratio))
    return nodes


def hop_locality(cluster: Cluster | None) -> str:
    """How far a hop goes: racks count as soon as the cluster has more than one switch."""
    return "cluster" if cluster is not None and len(cluster.switches) > 1 else "rack"


def network_latency_s(profile: MachineProfile, locality: str) -> float:
    """One-way seconds of a hop between nodes; that of any locality where this one is unknown."""
    singles = [link for link in profile.network if link.flows == 1]
    near = [link for link in singles if link.locality == locality] or singles
    return max((achieved_latency_s(link, profile.kind) for link in near), default=0.0)


def nic_of(profile: MachineProfile, ranks: int) -> float | None:
    """Payload rate that some ranks of a node get of its network by its profile; None if unknown."""
    network = network_of(profile)
    return None if network is None else network.sent_bytes_per_s(ranks)


def _in_cluster(
    allocation: Allocation, cluster: Cluster, profile: MachineProfile | None
) -> list[NodeGroup]:
    """The nodes of an allocation: those named, and for counted groups the first free ones."""
    taken = {group.host for group in allocation.groups if group.host is not None}
    machines: dict[str, MachineProfile] = {}
    node_groups: list[NodeGroup] = []
    for group in allocation.groups:
        hosts, devices = [group.host or ""], group.devices
        if group.host is None:
            free = [name for name in cluster.hosts_of(group.machine or "") if name not in taken]
            if len(free) < group.nodes:
                raise AllocationError(
                    f"'{group}' asks for {group.nodes} free nodes of '{group.machine}', of which "
                    f"the cluster has {len(free)}; ask for at most {len(free)}"
                )
            hosts, devices = free[: group.nodes], tuple(range(group.devices_per_node))
            taken.update(hosts)
        for host in hosts:
            node = cluster.nodes.get(host)
            if node is None:
                some = ", ".join(list(cluster.nodes)[:5])
                raise AllocationError(f"the cluster has no node '{host}'; it has {some}")
            machine = profile or machines.get(node.machine)
            if machine is None:
                machine = machines[node.machine] = named_profile(node.machine)
            _check_devices(host, devices, len(machine.devices))
            node_groups.append(
                NodeGroup(machine, 1, len(devices), host, devices, node.slowdown_ratio)
            )
    return node_groups


def _check_devices(host: str, devices: tuple[int, ...], count: int) -> None:
    if max(devices) >= count:
        unknown = next(index for index in devices if index >= count)
        raise AllocationError(
            f"node '{host}' has no device {unknown}; it has {count}, counted from 0"
        )
