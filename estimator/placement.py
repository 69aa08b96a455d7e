"""Put an allocation onto machines: the profile, the node and the network of each group of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from estimator.allocation import Allocation, DeviceGroup
from estimator.errors import AllocationError
from estimator.profile import MachineProfile, load_profile
from estimator.topology import Cluster


@dataclass(frozen=True, slots=True)
class Site:
    """`nodes` equal nodes in rank order with `per_node` ranks each.

    `host` names the node of a cluster file (then `nodes` is 1). `nic_bytes_per_s` is the payload
    rate of a node's network, each way; None where nothing is known of it.
    """

    profile: MachineProfile
    nodes: int
    per_node: int
    nic_bytes_per_s: float | None
    host: str | None = None
    devices: tuple[int, ...] = ()
    slowdown_ratio: float = 1.0

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True, slots=True)
class Placement:
    """The sites of an allocation in rank order; one host may come more than once."""

    allocation: Allocation
    sites: tuple[Site, ...]
    cluster: Cluster | None
    ranks: int
    nodes: int
    busy: tuple[int, ...]
    """For each site, the ranks of the whole allocation on one of its nodes."""


def place(
    allocation: str | Allocation,
    *,
    cluster: Cluster | None = None,
    profile: MachineProfile | None = None,
) -> Placement:
    """Resolve every group of an allocation; `profile` stands in for the one machine it names.

    With a cluster, counted groups take the first free nodes of their machine type in the order of
    the cluster file. Raises AllocationError, UnknownMachineError, ProfileError.
    """
    parsed = Allocation.parse(allocation)
    if profile is not None and len({group.machine for group in parsed.groups} - {None}) > 1:
        raise AllocationError(
            f"'{parsed}' names several machine types, but one profile was given; leave it out"
        )
    if cluster is None:
        sites = [_counted(group, profile) for group in parsed.groups]
    else:
        sites = list(_in_cluster(parsed, cluster, profile))
    return placement_of(parsed, sites, cluster)


def placement_of(
    allocation: Allocation, sites: Sequence[Site], cluster: Cluster | None
) -> Placement:
    """Check that no node gives more devices than it has, and that nodes can reach each other."""
    on_host: dict[str, int] = {}
    for site in sites:
        if site.host is not None:
            on_host[site.host] = on_host.get(site.host, 0) + site.per_node
    busy = []
    for site in sites:
        used = site.per_node if site.host is None else on_host[site.host]
        if used > len(site.profile.devices):
            raise AllocationError(
                f"'{allocation}' asks for {used} devices of '{site.host or site.profile.name}', "
                f"which has {len(site.profile.devices)}; ask for at most "
                f"{len(site.profile.devices)}"
            )
        busy.append(used)
    nodes = len(on_host) + sum(site.nodes for site in sites if site.host is None)
    if nodes > 1:
        _check_network(allocation, sites)
    ranks = sum(site.ranks for site in sites)
    return Placement(allocation, tuple(sites), cluster, ranks, nodes, tuple(busy))


def _check_network(allocation: Allocation, sites: Sequence[Site]) -> None:
    for site in sites:
        if site.nic_bytes_per_s is None:
            name = site.host or site.profile.name
            raise AllocationError(
                f"'{allocation}' spans several nodes, but no network of '{name}' has been "
                "measured; run 'torchrun -m estimator.probe' on two nodes or give --cluster FILE "
                "with uplinks"
            )


def _counted(group: DeviceGroup, profile: MachineProfile | None) -> Site:
    if group.machine is None:
        raise AllocationError(
            f"'{group}' names a host, which only a cluster file describes; give --cluster FILE or "
            f"write 1x{group.devices_per_node}:MACHINE"
        )
    machine = profile or load_profile(group.machine)
    return Site(machine, group.nodes, group.devices_per_node, nic_of(machine))


def nic_of(profile: MachineProfile) -> float | None:
    """Payload rate of a node's network by its profile: the fastest single flow measured."""
    rates = [link.bandwidth_bytes_per_s for link in profile.network if link.streams == 1]
    return max(rates, default=None)


def _in_cluster(
    allocation: Allocation, cluster: Cluster, profile: MachineProfile | None
) -> list[Site]:
    taken = {group.host for group in allocation.groups if group.host is not None}
    sites: list[Site] = []
    for group in allocation.groups:
        if group.host is not None:
            sites.append(site_of(group.host, group.devices, cluster, profile))
            continue
        free = [name for name in cluster.hosts_of(group.machine or "") if name not in taken]
        if len(free) < group.nodes:
            raise AllocationError(
                f"'{group}' asks for {group.nodes} free nodes of '{group.machine}', of which the "
                f"cluster has {len(free)}; ask for at most {len(free)}"
            )
        for host in free[: group.nodes]:
            taken.add(host)
            devices = tuple(range(group.devices_per_node))
            sites.append(site_of(host, devices, cluster, profile))
    return sites


def site_of(
    host: str, devices: tuple[int, ...], cluster: Cluster, profile: MachineProfile | None = None
) -> Site:
    """Some devices of one named node of a cluster; raises AllocationError for unknown ones."""
    node = cluster.nodes.get(host)
    if node is None:
        some = ", ".join(list(cluster.nodes)[:5])
        raise AllocationError(f"the cluster has no node '{host}'; it has {some}")
    machine = profile or load_profile(node.machine)
    unknown = [index for index in devices if index >= len(machine.devices)]
    if unknown:
        raise AllocationError(
            f"node '{host}' has no device {unknown[0]}; it has {len(machine.devices)}, counted "
            "from 0"
        )
    nic = (
        nic_of(machine)
        if node.uplink_bytes_per_s is None
        else cluster.payload_bytes_per_s(node.uplink_bytes_per_s)
    )
    return Site(machine, 1, len(devices), nic, host, devices, node.slowdown_ratio)
