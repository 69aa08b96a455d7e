"""The nodes of a cluster, which of their devices are free, and how a job is packed onto them."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Literal, NamedTuple

from estimator.errors import AllocationError
from estimator.machines.catalogue import named_profile
from estimator.placement.allocation import Allocation
from estimator.placement.topology import Cluster, Node

# pack: as few nodes as can be, full ones first; even: as few, with as many devices each; spread:
# as many nodes as can be. Of equally few nodes, those below one switch; spread over switches first.
PlacementRule = Literal["pack", "even", "spread"]


class AllocationShape(NamedTuple):
    """Devices used on each node of one machine type: what a step's time depends on.

    Nodes come most devices first, in a described cluster as `hosts` names them, in rank order. The
    nodes of other machine types follow in `also`, a shape for each.
    """

    machine: str
    per_node: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    also: tuple[AllocationShape, ...] = ()

    @property
    def ranks(self) -> int:
        return sum(self.per_node) + sum(shape.ranks for shape in self.also)

    def __str__(self) -> str:
        if self.also:
            return "+".join(map(str, (self._replace(also=()), *self.also)))
        if self.hosts:
            used = zip(self.hosts, self.per_node, strict=True)
            return "+".join(f"{host}[0-{devices - 1}]" for host, devices in used)
        parts: list[str] = []
        for devices in dict.fromkeys(self.per_node):
            parts.append(f"{self.per_node.count(devices)}x{devices}:{self.machine}")
        return "+".join(parts)


class ReplayNode(NamedTuple):
    """A node of the cluster, by its name where a cluster file describes it."""

    machine: str
    devices: int
    host: str | None = None


class Nodes:
    """All nodes with their free devices.

    >>> nodes = Nodes.parse("2x8:dgx-a100")
    >>> given = nodes.take("job", 12, "dgx-a100")
    >>> str(nodes.shape(given)), nodes.free("dgx-a100")
    ('1x8:dgx-a100+1x4:dgx-a100', 4)
    """

    def __init__(
        self,
        nodes: tuple[ReplayNode, ...],
        rule: PlacementRule = "pack",
        cluster: Cluster | None = None,
    ) -> None:
        self.nodes, self.rule, self.cluster = nodes, rule, cluster
        self.machines = tuple(dict.fromkeys(node.machine for node in nodes))
        self.free_on = [node.devices for node in nodes]
        self.holders: list[dict[str, int]] = [{} for _ in nodes]
        self.is_down = [False] * len(nodes)
        self._of = {
            machine: [index for index, node in enumerate(nodes) if node.machine == machine]
            for machine in self.machines
        }
        devices_of = {m: [nodes[index].devices for index in self._of[m]] for m in self.machines}
        self._size = {machine: sum(devices) for machine, devices in devices_of.items()}
        self._largest = {machine: max(devices) for machine, devices in devices_of.items()}
        self._total = dict(self._size)
        # Switches above each node, the root first.
        self._switches = [
            cluster.switches_above(node.host)[::-1] if cluster and node.host else ()
            for node in nodes
        ]
        self._kinds = [
            cluster.nodes[node.host] if cluster and node.host else None for node in nodes
        ]
        self._alike: dict[object, list[str]] = {}
        for kind, node in zip(self._kinds, nodes, strict=True):
            self._alike.setdefault(kind, []).append(node.host or "")

    @classmethod
    def parse(
        cls, text: str, rule: PlacementRule = "pack", cluster: Cluster | None = None
    ) -> Nodes:
        """Nodes as an allocation of the whole cluster names them; raises AllocationError.

        With a cluster they are its first ones of each machine type.
        """
        nodes: list[ReplayNode] = []
        for group in Allocation.parse(text).groups:
            if group.machine is None:
                raise AllocationError(
                    f"'{group}' names a host; describe a cluster by machine types, as in "
                    "64x8:dgx-a100"
                )
            known = len(named_profile(group.machine).devices)
            if group.devices_per_node > known:
                raise AllocationError(
                    f"'{group}' asks for {group.devices_per_node} devices a node, and "
                    f"{group.machine} has {known}; use at most {known}"
                )
            hosts: list[str | None] = [None] * group.nodes
            if cluster is not None:
                taken = {node.host for node in nodes}
                hosts = [h for h in cluster.hosts_of(group.machine) if h not in taken]
                if len(hosts) < group.nodes:
                    raise AllocationError(
                        f"'{group}' asks for {group.nodes} nodes of {group.machine}, of which the "
                        f"cluster file has {len(hosts)} more; ask for as many, or describe others"
                    )
            nodes += [
                ReplayNode(group.machine, group.devices_per_node, host)
                for host in hosts[: group.nodes]
            ]
        return cls(tuple(nodes), rule, cluster)

    def total(self, machine: str | None = None) -> int:
        """Devices of nodes that are up."""
        return sum(self._total.values()) if machine is None else self._total.get(machine, 0)

    def size(self, machine: str) -> int:
        """Devices of all nodes of a machine type, those that are down too."""
        return self._size[machine]

    def set_down(self, index: int, is_down: bool) -> None:
        """Take a node out, or back in."""
        if self.is_down[index] != is_down:
            node = self.nodes[index]
            self.is_down[index] = is_down
            self._total[node.machine] += -node.devices if is_down else node.devices

    def free(self, machine: str | None = None) -> int:
        """Devices that no job holds, of nodes that are up."""
        indices = range(len(self.nodes)) if machine is None else self._of[machine]
        return sum(self.free_on[index] for index in indices if not self.is_down[index])

    def per_node(self, machine: str) -> int:
        """Devices of the largest node of a machine type."""
        return self._largest[machine]

    def packed(self, machine: str, count: int) -> AllocationShape:
        """The shape that `count` devices have by the rule on an empty cluster."""
        if self.cluster is not None:
            empty = Nodes(self.nodes, self.rule, self.cluster)
            return self.shape(empty.take("", count, machine))
        largest = self.per_node(machine)
        full, rest = divmod(count, largest)
        if self.rule == "pack":
            return AllocationShape(machine, (largest,) * full + ((rest,) if rest else ()))
        nodes = -(-count // largest) if self.rule == "even" else min(count, len(self._of[machine]))
        fewer, more = divmod(count, nodes)
        return AllocationShape(machine, (fewer + 1,) * more + (fewer,) * (nodes - more))

    def take(
        self,
        job: str,
        count: int,
        machine: str,
        on: tuple[tuple[int, int], ...] | None = None,
    ) -> dict[int, int]:
        """Give a job devices of the nodes named, else by the rule.

        Returns the devices of each node. Raises AllocationError where fewer are free.
        """
        open_nodes = [i for i in self._of[machine] if self.free_on[i] and not self.is_down[i]]
        if sum(self.free_on[index] for index in open_nodes) < count:
            raise AllocationError(
                f"job '{job}' was given {count} devices of {machine} and "
                f"{self.free(machine)} are free; the policy must plan within the cluster"
            )
        given = self._by_rule(open_nodes, count) if on is None else dict(on)
        wrong = [index for index in given if not 0 < given[index] <= self._free_of(index, machine)]
        if wrong or sum(given.values()) != count:
            raise AllocationError(
                f"job '{job}' was given {count} devices of {machine} as {on}, which are not free "
                "there; the policy must plan within each node"
            )
        for index, devices in given.items():
            self.free_on[index] -= devices
            self.holders[index][job] = devices
        return given

    def _free_of(self, index: int, machine: str) -> int:
        """Free devices of a node that is up and of a machine type."""
        known = 0 <= index < len(self.nodes) and self.nodes[index].machine == machine
        return self.free_on[index] if known and not self.is_down[index] else 0

    def _by_rule(self, open_nodes: list[int], count: int) -> dict[int, int]:
        if self.rule == "spread":
            return self._evenly(self._over_switches(open_nodes)[:count], count)
        near = self._below_one_switch(open_nodes, count)
        given = self._packed(near, count)
        if self.rule == "pack" or len(given) == 1:
            return given
        freest_first = sorted(near, key=lambda index: (-self.free_on[index], index))
        return self._evenly(freest_first[: len(given)], count)

    def _below_one_switch(self, open_nodes: list[int], count: int) -> list[int]:
        """The nodes of a switch that has `count` devices free on the fewest nodes.

        Of several such switches the lowest, then the one with least free. All nodes where none is
        as good.
        """
        below: dict[tuple[str, ...], list[int]] = {}
        for index in open_nodes:
            for level in range(len(self._switches[index]) + 1):
                below.setdefault(self._switches[index][:level], []).append(index)
        best = open_nodes, (math.inf, 0.0, 0.0)
        for switches, nodes in below.items():
            free = list(itertools.accumulate(sorted(map(self.free_on.__getitem__, nodes))[::-1]))
            score = 1.0 + bisect.bisect_left(free, count), -len(switches), free[-1]
            if free[-1] >= count and score < best[1]:
                best = nodes, score
        return best[0]

    def _over_switches(self, open_nodes: list[int]) -> list[int]:
        """Nodes with most free first; of equals, one of each switch in turn."""
        met = Counter[tuple[tuple[str, ...], int]]()
        turns = {}
        for index in open_nodes:
            alike = self._switches[index], self.free_on[index]
            turns[index] = -self.free_on[index], met[alike], index
            met[alike] += 1
        return sorted(open_nodes, key=turns.__getitem__)

    def _packed(self, among: list[int], count: int) -> dict[int, int]:
        """Devices of the fullest node that has them all, else of as few nodes as can be."""
        open_nodes, given, left = list(among), dict[int, int](), count
        while left:
            enough = [index for index in open_nodes if self.free_on[index] >= left]
            if enough:
                chosen = min(enough, key=lambda index: (self.free_on[index], index))
            else:
                chosen = max(open_nodes, key=lambda index: (self.free_on[index], -index))
            given[chosen] = min(left, self.free_on[chosen])
            left -= given[chosen]
            open_nodes.remove(chosen)
        return given

    def _evenly(self, among: list[int], count: int) -> dict[int, int]:
        """As many devices of each node as the others have, where they are free."""
        given, left = dict[int, int](), count
        for position, index in enumerate(sorted(among, key=self.free_on.__getitem__)):
            share = min(left // (len(among) - position), self.free_on[index])
            if share:
                given[index] = share
                left -= share
        return given

    def release(self, job: str, given: Mapping[int, int]) -> None:
        """Take a job's devices back."""
        for index, devices in given.items():
            self.free_on[index] += devices
            del self.holders[index][job]

    def most_free_on_a_node(self, machine: str) -> int:
        """Free devices of the node that has most."""
        return max(
            [self.free_on[index] for index in self._of[machine] if not self.is_down[index]],
            default=0,
        )

    def in_the_way(self, count: int, machine: str, settled: frozenset[str]) -> list[str]:
        """The fewest smaller jobs whose moving makes room for `count` devices on one node.

        None are named where no node can be cleared without moving one of `settled` or one as large.
        """
        best: list[str] | None = None
        for index in self._of[machine]:
            if self.is_down[index] or self.nodes[index].devices < count:
                continue
            free, moved = self.free_on[index], list[str]()
            for job, devices in sorted(self.holders[index].items(), key=lambda held: -held[1]):
                if free >= count:
                    break
                if devices < count and job not in settled:
                    free += devices
                    moved.append(job)
            if free >= count and (best is None or len(moved) < len(best)):
                best = moved
        return best or []

    def shape(self, given: Mapping[int, int]) -> AllocationShape:
        """What the step time of devices on these nodes depends on.

        Ranks go through the tree of switches depth first, so that a ring crosses each uplink once
        each way. Nodes alike below one switch are named by the first of them.
        """
        by_machine: dict[str, dict[int, int]] = {}
        for index in sorted(given):
            by_machine.setdefault(self.nodes[index].machine, {})[index] = given[index]
        first, *others = (self._shape_of_one(*group) for group in by_machine.items())
        return first._replace(also=tuple(others))

    def allocation(self, given: Mapping[int, int]) -> str:
        """The hosts of devices on these nodes of a described cluster, in rank order."""
        order = sorted(given, key=lambda index: (self._switches[index], -given[index], index))
        return "+".join(f"{self.nodes[index].host}[0-{given[index] - 1}]" for index in order)

    def described(self) -> Nodes:
        """The same nodes as hosts of a cluster, of one switch where none is described."""
        if self.cluster is not None:
            return self
        named = [node._replace(host=f"node{number}") for number, node in enumerate(self.nodes)]
        hosts = {node.host or "": Node(machine=node.machine) for node in named}
        return Nodes(tuple(named), self.rule, Cluster(nodes=hosts))

    def _shape_of_one(self, machine: str, given: Mapping[int, int]) -> AllocationShape:
        if self.cluster is None:
            return AllocationShape(machine, tuple(sorted(given.values(), reverse=True)))
        order = sorted(given, key=lambda index: (self._switches[index], -given[index], index))
        unused = {kind: iter(hosts) for kind, hosts in self._alike.items()}
        hosts = tuple(next(unused[self._kinds[index]]) for index in order)
        return AllocationShape(machine, tuple(given[index] for index in order), hosts)
