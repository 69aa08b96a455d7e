"""Describe a testbed: its nodes with their devices, link rates and speeds, and its racks."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from estimator.errors import AllocationError, TopologyError
from estimator.placement.allocation import Allocation
from estimator.units import parse_bandwidth_bytes_per_s

SPINE = "spine"
# Names become host names, and names of network interfaces, which hold 15 characters.
_NAME = re.compile(r"[a-z][a-z0-9\-]{0,11}")
# tbf sends nothing below this, and two cores forward no more than this through a few links.
_SLOWEST_BYTES_PER_S, _FASTEST_BYTES_PER_S = 1e5, 5e9


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

    def __post_init__(self) -> None:
        _check_name(self.name)
        _check_rate(self.uplink_bytes_per_s, self.name)
        if self.devices < 1 or not 1.0 <= self.slowdown_ratio <= 20.0:
            raise TopologyError(
                f"node '{self.name}' has {self.devices} devices and slowdown "
                f"{self.slowdown_ratio}; give it at least one device and a slowdown from 1 to 20"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TestbedRack:
    """A switch whose uplink to the spine has one line rate in each direction."""

    __test__: ClassVar[bool] = False

    name: str
    uplink_bytes_per_s: float

    def __post_init__(self) -> None:
        _check_name(self.name)
        _check_rate(self.uplink_bytes_per_s, self.name)


@dataclass(frozen=True, kw_only=True)
class TestbedDescription:
    """Nodes and racks; nodes without a rack hang on the spine itself.

    >>> bed = TestbedDescription.parse('''
    ... [racks.r1]
    ... uplink = "1 Gbit/s"
    ... [nodes.n0]
    ... devices = 2
    ... uplink = "500 Mbit/s"
    ... rack = "r1"
    ... ''')
    >>> bed.nodes[0].uplink_bytes_per_s, bed.racks[0].uplink_bytes_per_s
    (62500000.0, 125000000.0)
    """

    __test__: ClassVar[bool] = False

    nodes: tuple[TestbedNode, ...]
    racks: tuple[TestbedRack, ...] = field(default=())

    def __post_init__(self) -> None:
        names = [SPINE, *(rack.name for rack in self.racks), *(node.name for node in self.nodes)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or not self.nodes:
            found = f"'{twice[0]}' twice" if twice else "no node"
            raise TopologyError(f"the testbed names {found}; name each node and rack once")
        known = {rack.name for rack in self.racks}
        for node in self.nodes:
            if node.rack is not None and node.rack not in known:
                raise TopologyError(
                    f"node '{node.name}' is in rack '{node.rack}', which is not described; add "
                    f"[racks.{node.rack}]"
                )

    @classmethod
    def parse(cls, text: str, *, origin: str = "the testbed file") -> TestbedDescription:
        """Read the TOML of a testbed; raises TopologyError naming `origin`.

        A node has `devices`, `uplink` (as in "500 Mbit/s"), and if need be `rack` and `slowdown`; a
        rack has `uplink`.
        """
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise TopologyError(f"{origin} is not TOML ({error}); correct that line") from None
        _check_keys(data, {"nodes", "racks"}, origin)
        try:
            racks = tuple(_rack(*entry) for entry in data.get("racks", {}).items())
            nodes = tuple(_node(*entry) for entry in data.get("nodes", {}).items())
            return cls(nodes=nodes, racks=racks)
        except (TopologyError, ValueError, TypeError, AttributeError) as error:
            raise TopologyError(f"{origin}: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> TestbedDescription:
        """Read a testbed file; raises TopologyError."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise TopologyError(f"cannot read testbed file {path} ({error})") from None
        return cls.parse(text, origin=str(path))

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
            racks=tuple(
                TestbedRack(
                    name=f"r{number}", uplink_bytes_per_s=parse_bandwidth_bytes_per_s(rack_uplink)
                )
                for number in range(racks)
            ),
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

    def to_toml(self) -> str:
        """The text that `parse` reads back."""
        lines = []
        for rack in self.racks:
            lines += [f"[racks.{rack.name}]", f'uplink = "{_rate_text(rack.uplink_bytes_per_s)}"']
        for node in self.nodes:
            lines += [f"[nodes.{node.name}]", f"devices = {node.devices}", *_node_lines(node)]
            if node.rack is not None:
                lines.append(f'rack = "{node.rack}"')
        return "\n".join(lines) + "\n"

    def cluster_toml(self, machine: str | Mapping[str, str] = "testbed") -> str:
        """The engine's cluster file; `machine` is the machine type of all nodes, or by node."""
        lines = [f"[switches.{SPINE}]"]
        for rack in self.racks:
            lines += [f"[switches.{rack.name}]", f'parent = "{SPINE}"']
            lines.append(f'uplink = "{_rate_text(rack.uplink_bytes_per_s)}"')
        for node in self.nodes:
            name = machine if isinstance(machine, str) else machine[node.name]
            lines += [f"[nodes.{node.name}]", f'machine = "{name}"']
            lines += [f'switch = "{node.rack or SPINE}"', *_node_lines(node)]
        return "\n".join(lines) + "\n"


def _node(name: str, entry: Mapping[str, Any]) -> TestbedNode:
    _check_keys(entry, {"devices", "uplink", "rack", "slowdown"}, f"node '{name}'")
    return TestbedNode(
        name=name,
        devices=int(entry.get("devices", 1)),
        uplink_bytes_per_s=_rate(name, entry),
        rack=entry.get("rack"),
        slowdown_ratio=float(entry.get("slowdown", 1.0)),
    )


def _rack(name: str, entry: Mapping[str, Any]) -> TestbedRack:
    _check_keys(entry, {"uplink"}, f"rack '{name}'")
    return TestbedRack(name=name, uplink_bytes_per_s=_rate(name, entry))


def _rate(name: str, entry: Mapping[str, Any]) -> float:
    if "uplink" not in entry:
        raise TopologyError(f"'{name}' has no uplink; write uplink = \"500 Mbit/s\"")
    return parse_bandwidth_bytes_per_s(str(entry["uplink"]))


def _rate_text(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / 1e6:.10g} Mbit/s"


def _node_lines(node: TestbedNode) -> list[str]:
    lines = [f'uplink = "{_rate_text(node.uplink_bytes_per_s)}"']
    return lines + ([f"slowdown = {node.slowdown_ratio}"] if node.slowdown_ratio != 1.0 else [])


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise TopologyError(
            f"'{name}' is no name for a node or rack here; use up to 12 small letters, digits, '-'"
        )


def _check_rate(rate: float, name: str) -> None:
    if not _SLOWEST_BYTES_PER_S <= rate <= _FASTEST_BYTES_PER_S:
        raise TopologyError(
            f"the uplink of '{name}' runs at {_rate_text(rate)}; give it 1 Mbit/s to 40 Gbit/s"
        )


def _check_keys(entry: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(set(entry) - known)
    if unknown:
        raise TopologyError(f"'{unknown[0]}' is no key of {where}; use {', '.join(sorted(known))}")
