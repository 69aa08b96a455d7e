"""The nodes of a cluster, which of their devices are free, and how a job is packed onto them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from estimator.errors import AllocationError
from estimator.machines.catalogue import load_profile
from estimator.placement.allocation import Allocation


class Shape(NamedTuple):
    """Devices used on each node of one machine type, most first: what a step's time depends on."""

    machine: str
    per_node: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return sum(self.per_node)

    def __str__(self) -> str:
        parts: list[str] = []
        for devices in dict.fromkeys(self.per_node):
            parts.append(f"{self.per_node.count(devices)}x{devices}:{self.machine}")
        return "+".join(parts)


class Node(NamedTuple):
    """A node of the cluster."""

    machine: str
    devices: int


class Nodes:
    """All nodes with their free devices.

    >>> nodes = Nodes.parse("2x8:dgx-a100")
    >>> given = nodes.take("job", 12, "dgx-a100")
    >>> str(nodes.shape(given)), nodes.free("dgx-a100")
    ('1x8:dgx-a100+1x4:dgx-a100', 4)
    """

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self.nodes = nodes
        self.machines = tuple(dict.fromkeys(node.machine for node in nodes))
        self.free_on = [node.devices for node in nodes]
        self.holders: list[dict[str, int]] = [{} for _ in nodes]
        self.is_down = [False] * len(nodes)
        self._total: dict[str, int] = {}
        for node in nodes:
            self._total[node.machine] = self._total.get(node.machine, 0) + node.devices
        self._of = {
            machine: [index for index, node in enumerate(nodes) if node.machine == machine]
            for machine in self.machines
        }

    @classmethod
    def parse(cls, text: str) -> Nodes:
        """Nodes as an allocation of the whole cluster names them; raises AllocationError."""
        nodes: list[Node] = []
        for group in Allocation.parse(text).groups:
            if group.machine is None:
                raise AllocationError(
                    f"'{group}' names a host; describe a cluster by machine types, as in "
                    "64x8:dgx-a100"
                )
            known = len(load_profile(group.machine).devices)
            if group.devices_per_node > known:
                raise AllocationError(
                    f"'{group}' asks for {group.devices_per_node} devices a node, and "
                    f"{group.machine} has {known}; use at most {known}"
                )
            nodes += [Node(group.machine, group.devices_per_node)] * group.nodes
        return cls(tuple(nodes))

    def total(self, machine: str | None = None) -> int:
        """Devices of nodes that are up."""
        return sum(self._total.values()) if machine is None else self._total.get(machine, 0)

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
        return max(self.nodes[index].devices for index in self._of[machine])

    def packed(self, machine: str, count: int) -> Shape:
        """The shape of `count` devices on as few nodes as can be."""
        largest = self.per_node(machine)
        full, rest = divmod(count, largest)
        return Shape(machine, (largest,) * full + ((rest,) if rest else ()))

    def take(self, job: str, count: int, machine: str) -> dict[int, int]:
        """Give a job devices: the fullest node that has them all, else as few nodes as can be.

        Returns the devices of each node. Raises AllocationError where fewer are free.
        """
        open_nodes = [i for i in self._of[machine] if self.free_on[i] and not self.is_down[i]]
        if sum(self.free_on[index] for index in open_nodes) < count:
            raise AllocationError(
                f"job '{job}' was given {count} devices of {machine} and "
                f"{self.free(machine)} are free; the policy must plan within the cluster"
            )
        given: dict[int, int] = {}
        left = count
        while left:
            enough = [index for index in open_nodes if self.free_on[index] >= left]
            if enough:
                chosen = min(enough, key=lambda index: (self.free_on[index], index))
            else:
                chosen = max(open_nodes, key=lambda index: (self.free_on[index], -index))
            given[chosen] = min(left, self.free_on[chosen])
            left -= given[chosen]
            open_nodes.remove(chosen)
        for index, devices in given.items():
            self.free_on[index] -= devices
            self.holders[index][job] = devices
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

    def shape(self, given: Mapping[int, int]) -> Shape:
        """What the step time of devices on these nodes depends on."""
        machine = self.nodes[next(iter(given))].machine
        return Shape(machine, tuple(sorted(given.values(), reverse=True)))
