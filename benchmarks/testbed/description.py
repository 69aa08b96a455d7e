"""Describe a testbed: its nodes with their devices, link rates and speeds, and its racks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from estimator.errors import AllocationError
from estimator.placement.allocation import Allocation
from estimator.units import parse_bandwidth_bytes_per_s

SPINE = "spine"


@dataclass(frozen=True, slots=True, kw_only=True)
class TestbedNode:
    """A node with `devices` devices; its uplink's line rate holds in each direction.

    A node with `slowdown_ratio` 1.5 computes 1.5 times as long as the others.
    """

    # Not a test, whatever pytest makes of its name.
    __test__: ClassVar[bool] = False

    name: str
    devices: int
    uplink_bytes_per_s: float
    rack: str | None = None
    slowdown_ratio: float = 1.0


@dataclass(frozen=True, kw_only=True)
class TestbedDescription:
    """Nodes and racks; nodes without a rack hang on the spine itself.

    A rack is a switch whose uplink to the spine has one line rate in each direction: bytes per
    second by its name.

    >>> bed = TestbedDescription.uniform(nodes=2, devices=2, uplink="500 Mbit/s")
    >>> bed.all_devices(), bed.nodes[0].uplink_bytes_per_s
    ('n0[0,1]+n1[0,1]', 62500000.0)
    """

    __test__: ClassVar[bool] = False

    nodes: tuple[TestbedNode, ...]
    racks: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def uniform(
        cls, *, nodes: int, devices: int, uplink: str, racks: int = 0, rack_uplink: str = ""
    ) -> TestbedDescription:
        """`nodes` equal nodes n0, n1, …, dealt in order over `racks` equal racks r0, r1, …"""
        rate = parse_bandwidth_bytes_per_s(uplink)
        return cls(
            nodes=tuple(
                TestbedNode(
                    name=f"n{number}",
                    devices=devices,
                    uplink_bytes_per_s=rate,
                    rack=f"r{number * racks // nodes}" if racks else None,
                )
                for number in range(nodes)
            ),
            racks={
                f"r{number}": parse_bandwidth_bytes_per_s(rack_uplink) for number in range(racks)
            },
        )

    @cached_property
    def by_name(self) -> Mapping[str, TestbedNode]:
        """The nodes by name."""
        return {node.name: node for node in self.nodes}

    def placement(self, allocation: str | Allocation) -> tuple[tuple[TestbedNode, int], ...]:
        """(node, device index) of every rank, in rank order; raises AllocationError."""
        ranks = []
        for group in Allocation.parse(allocation).groups:
            node = self.by_name.get(group.host or "")
            if node is None or max(group.devices) >= node.devices:
                has = f"{node.devices} devices" if node else f"nodes {', '.join(self.by_name)}"
                raise AllocationError(
                    f"'{group}' is not on this testbed, which there has {has}; name devices that "
                    "exist, as in n0[0]+n1[0]"
                )
            ranks += [(node, device) for device in group.devices]
        return tuple(ranks)

    def all_devices(self) -> str:
        """The allocation of every device, node by node."""
        return "+".join(
            f"{node.name}[{','.join(map(str, range(node.devices)))}]" for node in self.nodes
        )

    def cluster_toml(self, machine: str | Mapping[str, str] = "testbed") -> str:
        """The engine's cluster file; `machine` is the machine type of all nodes, or by node."""
        lines = [f"[switches.{SPINE}]"]
        for rack, uplink in self.racks.items():
            lines += [f"[switches.{rack}]", f'parent = "{SPINE}"']
            lines.append(f'uplink = "{_rate_text(uplink)}"')
        for node in self.nodes:
            name = machine if isinstance(machine, str) else machine[node.name]
            lines += [f"[nodes.{node.name}]", f'machine = "{name}"']
            lines += [f'switch = "{node.rack or SPINE}"', *_node_lines(node)]
        return "\n".join(lines) + "\n"


def _rate_text(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / 1e6:.10g} Mbit/s"


def _node_lines(node: TestbedNode) -> list[str]:
    lines = [f'uplink = "{_rate_text(node.uplink_bytes_per_s)}"']
    return lines + ([f"slowdown = {node.slowdown_ratio}"] if node.slowdown_ratio != 1.0 else [])
