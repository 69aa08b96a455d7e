"""Collect what a probe of several nodes finds, and merge it with one machine's own profile."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from estimator.machines.profile import (
    CollectiveCost,
    Contention,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank: its node and address, the device it holds there, and what it runs.

    `machine` describes the node's hardware in words; nodes with the same words are of one type.
    """

    rank: int
    host: str
    device: Device
    machine: str
    address: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class World:
    """The members that take part, in the order of their ranks in the process group.

    Positions are those ranks. `switches` are those from each node up to the root, of nodes that a
    cluster file names.
    """

    members: tuple[Member, ...]
    switches: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, members: Sequence[Member], cluster: Cluster | None) -> World:
        """Members, given by rank, node by node, nodes so that a ring leaves a rack once.

        In any other order flows of a ring meet on the uplinks of racks. Within a rack, nodes are in
        the order of their first ranks.
        """
        first_rank = {member.host: member.rank for member in reversed(members)}
        switches: dict[str, Sequence[str]] = {}
        if cluster is not None:
            for host in first_rank:
                # What the file calls it: its host name, with or without its domain.
                for name in (host.split(".")[0], host):
                    if name in cluster.nodes:
                        switches[host] = cluster.switches_above(name)

        def place(member: Member) -> tuple[tuple[str, ...], int]:
            return tuple(reversed(switches.get(member.host, ()))), first_rank[member.host]

        return cls(members=tuple(sorted(members, key=place)), switches=switches)

    @cached_property
    def nodes(self) -> dict[str, tuple[int, ...]]:
        """Positions by node."""
        found: dict[str, list[int]] = {}
        for position, member in enumerate(self.members):
            found.setdefault(member.host, []).append(position)
        return {host: tuple(positions) for host, positions in found.items()}

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first position on each node."""
        return tuple(positions[0] for positions in self.nodes.values())

    @property
    def devices_per_node(self) -> int:
        """The number of devices that every node has at least."""
        return min(map(len, self.nodes.values()), default=0)

    @property
    def home(self) -> Member:
        """The launch's rank 0, where everything comes together."""
        return min(self.members, key=lambda member: member.rank)

    @property
    def own_devices(self) -> tuple[Device, ...]:
        """The devices of rank 0's node."""
        return tuple(self.members[position].device for position in self.nodes[self.home.host])

    @property
    def backend(self) -> str:
        """What the members' devices communicate with."""
        return "nccl" if self.home.device.kind == "cuda" else "gloo"

    def hosts(self, positions: Sequence[int]) -> tuple[str, ...]:
        """The node of each position."""
        return tuple(self.members[position].host for position in positions)

    def rack_of(self, host: str) -> str:
        """The switch that a node hangs on; without a cluster file all hang on one."""
        return (*self.switches.get(host, ()), "")[0]

    def locality(self, host: str, other: str) -> Locality:
        """How far apart two nodes are."""
        return "rack" if self.rack_of(host) == self.rack_of(other) else "cluster"

    def links_between(self, host: str, other: str) -> frozenset[str]:
        """The cables that a flow from one node to another goes through.

        Both ways of a cable count as one: receipts of one way would wait behind the messages of the
        other in its queues. Without a cluster file everything may go through one cable, so that is
        what is said.
        """
        if not {host, other} <= self.switches.keys():
            return frozenset({"the network"})
        ups, downs = set(self.switches[host]), set(self.switches[other])
        return frozenset({host, other} | {f"switch {name}" for name in ups ^ downs})


def shapes(world: World) -> Iterator[tuple[int, ...]]:
    """Groups of ranks worth measuring, the most telling first.

    Everything; one device on each of two, of all, and of three nodes; all devices of two nodes;
    then the powers of two between. Two nodes in one rack, and two in unlike ones.
    """
    nodes = list(world.nodes.values())
    per_node, count = world.devices_per_node, len(nodes)
    powers = [1 << power for power in range(2, count.bit_length()) if 1 << power < count]
    wanted = [(1, 2), (1, count), (per_node, 2), (1, 3), (per_node, 3)]
    wanted += [(devices, power) for power in powers for devices in (1, per_node)]
    blocks = [
        tuple(position for node in nodes[:number] for position in node[:devices])
        for devices, number in wanted
        if number <= count
    ]
    first_of = {world.rack_of(host): node[0] for host, node in reversed(world.nodes.items())}
    across_racks = tuple(sorted(first_of.values()))[:2]
    groups = dict.fromkeys((tuple(range(len(world.members))), *blocks, across_racks))
    return (group for group in groups if len(group) > 1)


def shape_words(world: World, group: Sequence[int]) -> str:
    """A group in words.

    >>> shape_words(World(members=()), ())
    '0 ranks'
    """
    hosts = world.hosts(group)
    counts = {hosts.count(host) for host in hosts}
    if len(counts) == 1:
        return f"{counts.pop()} × {len(set(hosts))} nodes"
    return f"{len(group)} ranks"


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
    contentions: list[Contention] = field(default_factory=list)
    rank_jitter_ratio: float | None = None
    missing: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def merged(
        self, base: MachineProfile, *, name: str, world: World, used_s: float
    ) -> MachineProfile:
        """The machine's own numbers with the network's; what was measured anew wins."""
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
            [f"{len(world.nodes)} nodes probed together for {used_s:.0f} s", *self.remarks]
        )
        return replace(
            base,
            name=name,
            network=tuple(self.network),
            pairs=self.pairs,
            collectives=(*collectives, *self.collectives),
            overlaps=(*(cost for cost in base.overlaps if cost.nodes == 1), *self.overlaps),
            software={**base.software, **unequal_versions(world)},
            missing=(*base.missing, *self.missing),
            provenance=Provenance(
                source="measured",
                at=self.at,
                samples=base.provenance.samples,
                relative_error=base.provenance.relative_error,
                note=note,
            ),
        )


def unequal_versions(world: World) -> dict[str, str]:
    """``{"torch on b, c": "2.12"}`` for what nodes run in another version than rank 0."""
    ours = world.home.versions
    others: dict[tuple[str, str], dict[str, None]] = {}
    for member in world.members:
        for package in sorted({*member.versions, *ours}):
            version = member.versions.get(package, "none")
            if version != ours.get(package, "none"):
                others.setdefault((package, version), {})[member.host] = None
    return {
        f"{package} on {', '.join(hosts)}": version for (package, version), hosts in others.items()
    }


def other_machines(world: World) -> list[str]:
    """A sentence on a node of every type of machine that is not rank 0's."""
    ours = world.home.machine
    hosts = {member.machine: member.host for member in reversed(world.members)}
    return [
        f"node {host} is another machine ({machine}) than rank 0's ({ours}); run 'estimator probe' "
        "there for a profile of it"
        for machine, host in hosts.items()
        if machine != ours
    ]


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
