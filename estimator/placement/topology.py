"""Describe a cluster: its nodes, the tree of switches between them, what ranks get of each NIC."""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from estimator.errors import TopologyError, first_fault, printable, quoted, unprintable
from estimator.files import read_text
from estimator.machines.profile import MachineProfile
from estimator.machines.typical import achieved_bytes_per_s
from estimator.units import MIB, parse_bandwidth_bytes_per_s, parse_whole

if TYPE_CHECKING:
    from estimator.elementwise import Array

Transport = Literal["tcp", "roce", "infiniband"]

# Payload of a full-sized packet over its bytes on the wire. TCP at MTU 1500: 1448 of 1514 bytes
# (20 IP, 32 TCP with timestamps, 14 Ethernet). RoCE v2 at MTU 4096: 4096 of 4168 (14 Ethernet, 20
# IP, 8 UDP, 12 BTH, 4 ICRC, plus 14 of VLAN tag, frame check and RETH on first packets). InfiniBand
# at MTU 4096: 4096 of 4126 (8 LRH, 12 BTH, 4 ICRC, 2 VCRC, rounded up).
PAYLOAD_RATIOS: dict[Transport, float] = {
    "tcp": 1448 / 1514,
    "roce": 4096 / 4168,
    "infiniband": 4096 / 4126,
}
_RANGE = re.compile(r"\[([\d,\-]+)\]")
_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*")
MOST_NODES = 1 << 20
_MOST_NUMBER = 9_999_999
# Fat trees have three or four.
MOST_LEVELS = 32
# A line for each of some ten thousand nodes, where host lists say the same in one.
_MOST_BYTES = 4 * MIB
# What people give in Gbit/s, and how many times slower a node may be.
_MOST_RATE, _MOST_SLOWDOWN = 1e15, 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A switch; `uplink_bytes_per_s` is the line rate to `parent`, each way (None: no limit)."""

    parent: str | None = None
    uplink_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        _check_rate(self.uplink_bytes_per_s, "a switch's uplink")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster: its machine type, where it is plugged in, and its own state.

    `uplink_bytes_per_s` is the line rate of all its NICs together, each way; None takes what the
    machine's profile says. A node with `slowdown_ratio` 1.2 computes 1.2 times as long.
    """

    machine: str
    switch: str | None = None
    uplink_bytes_per_s: float | None = None
    slowdown_ratio: float = 1.0

    def __post_init__(self) -> None:
        _check_rate(self.uplink_bytes_per_s, "a node's uplink")
        if not 1 / _MOST_SLOWDOWN <= self.slowdown_ratio <= _MOST_SLOWDOWN:
            raise TopologyError(
                f"a node's slowdown must be a positive number, from {1 / _MOST_SLOWDOWN:g} to "
                f"{_MOST_SLOWDOWN:g}, found {self.slowdown_ratio:g}; 1.0 is the speed of its "
                "profile"
            )


def _check_rate(rate: float | None, what: str) -> None:
    if rate is not None and not 1 / _MOST_RATE <= rate <= _MOST_RATE:
        raise TopologyError(
            f"{what} must have a positive rate, found {rate:g} B/s; write '10 Gbit/s'"
        )


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes by name, in the order of the file, and the switches between them.

    >>> rack = {"r1": Switch()}
    >>> nodes = {"a1": Node(machine="h100", switch="r1"), "a2": Node(machine="h100", switch="r1")}
    >>> Cluster(nodes=nodes, switches=rack).hosts_of("h100")
    ('a1', 'a2')
    """

    nodes: Mapping[str, Node]
    switches: Mapping[str, Switch] = field(default_factory=dict)
    transport: Transport = "tcp"

    def __post_init__(self) -> None:
        if not self.nodes:
            raise TopologyError("the cluster has no nodes; add one such as [nodes.a1]")
        for name, switch in self.switches.items():
            if switch.parent is not None and switch.parent not in self.switches:
                raise TopologyError(
                    f"switch '{name}' hangs on '{switch.parent}', which is not in the file; add "
                    f"[switches.{switch.parent}]"
                )
        for name, node in self.nodes.items():
            if node.switch is not None and node.switch not in self.switches:
                raise TopologyError(
                    f"node '{name}' is plugged into '{node.switch}', which is not in the file; add "
                    f"[switches.{node.switch}]"
                )
        for name in self.switches:
            self._ancestors(name)
        if len(self.nodes) > MOST_NODES:
            raise TopologyError(
                f"the cluster has {len(self.nodes)} nodes; at most {MOST_NODES} are supported"
            )

    def hosts_of(self, machine: str) -> tuple[str, ...]:
        """Names of the nodes of one machine type, in the order of the file."""
        return self._by_machine.get(machine, ())

    def switches_above(self, host: str) -> tuple[str, ...]:
        """The switches from a node up to the root."""
        return self._above.get(host, ())

    def payload_bytes_per_s(self, line_rate_bytes_per_s: float) -> float:
        """What a line rate carries after packet headers."""
        return line_rate_bytes_per_s * PAYLOAD_RATIOS[self.transport]

    @cached_property
    def _by_machine(self) -> dict[str, tuple[str, ...]]:
        hosts: dict[str, list[str]] = {}
        for name, node in self.nodes.items():
            hosts.setdefault(node.machine, []).append(name)
        return {machine: tuple(names) for machine, names in hosts.items()}

    @cached_property
    def _above(self) -> dict[str, tuple[str, ...]]:
        above = {name: self._ancestors(name) for name in self.switches}
        return {
            host: above[node.switch] for host, node in self.nodes.items() if node.switch is not None
        }

    def _ancestors(self, name: str) -> tuple[str, ...]:
        path = [name]
        while (parent := self.switches[path[-1]].parent) is not None:
            if parent in path:
                raise TopologyError(
                    f"switches {' → '.join([*path, parent])} form a loop; the switches must be a "
                    "tree"
                )
            path.append(parent)
            if len(path) > MOST_LEVELS:
                raise TopologyError(
                    f"switch '{name}' is more than {MOST_LEVELS} levels below the root; no network "
                    "is as deep, correct the parents"
                )
        return tuple(path)

    @classmethod
    def from_dict(cls, data: Any, *, origin: str = "cluster file") -> Cluster:
        """Build a cluster from the values of its file; raises TopologyError naming `origin`."""
        from pydantic import ValidationError  # commands start without it

        if (text := unprintable(data)) is not None:
            raise TopologyError(f"{origin}: {quoted(text)} has unprintable characters; correct it")
        try:
            content = _cluster_file().model_validate(data)
            return cls(
                nodes={
                    name: Node(
                        machine=node.machine,
                        switch=node.switch,
                        uplink_bytes_per_s=_rate(node.uplink),
                        slowdown_ratio=node.slowdown,
                    )
                    for name, node in _described(content.nodes)
                },
                switches={
                    name: Switch(parent=switch.parent, uplink_bytes_per_s=_rate(switch.uplink))
                    for name, switch in _described(content.switches)
                },
                transport=content.transport,
            )
        except ValidationError as error:
            raise TopologyError(f"{origin}: {first_fault(error)[0]}; correct it") from None
        except ValueError as error:
            raise TopologyError(f"{origin}: {error}") from None

    @classmethod
    def given(cls, cluster: Cluster | str | os.PathLike[str] | None) -> Cluster | None:
        """A cluster, or that of a file; raises TopologyError."""
        return cls.load(cluster) if isinstance(cluster, str | os.PathLike) else cluster

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a cluster file (TOML); raises TopologyError.

        ``[nodes."a[1-4]"]`` describes four nodes alike; keys of a node are `machine`, `switch`,
        `uplink` (as in "25 Gbit/s") and `slowdown`, of a switch `parent` and `uplink`.
        """
        try:
            text = read_text(path, most_bytes=_MOST_BYTES)
        except OSError as error:
            raise TopologyError(
                f"cannot read cluster file {path} ({error.strerror}); check --cluster"
            ) from None
        try:
            data = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            reason = printable(str(error) or "nested too deeply")
            raise TopologyError(f"{path} is not TOML ({reason}); correct that line") from None
        return cls.from_dict(data, origin=str(path))


@lru_cache(maxsize=1)
def _cluster_file() -> Any:
    """What a cluster file may hold; host lists stand for several nodes or switches alike."""
    from pydantic import ConfigDict, create_model

    def table(name: str, **known: Any) -> Any:
        return create_model(name, __config__=ConfigDict(extra="forbid", strict=True), **known)

    text = (str | None, None)
    switch = table("SwitchTable", parent=text, uplink=text)
    node = table("NodeTable", machine=(str, ...), switch=text, uplink=text, slowdown=(float, 1.0))
    return table(
        "ClusterFile",
        nodes=(dict[str, node], {}),  # type: ignore[valid-type]
        switches=(dict[str, switch], {}),  # type: ignore[valid-type]
        transport=(Transport, "tcp"),
    )


def _rate(text: str | None) -> float | None:
    return None if text is None else parse_bandwidth_bytes_per_s(text)


def _described(tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every name of the host lists with its table; raises TopologyError."""
    seen: set[str] = set()
    for pattern, table in tables.items():
        for name in expand_hosts(pattern):
            if name in seen:
                raise TopologyError(f"'{name}' is described twice; describe each once")
            seen.add(name)
            yield name, table
        if len(seen) > MOST_NODES:
            raise TopologyError(f"more than {MOST_NODES} nodes or switches; no cluster has as many")


def expand_hosts(pattern: str) -> Iterator[str]:
    """Names in a host list such as ``a[1-3,7]``, as Slurm writes them; raises TopologyError.

    >>> list(expand_hosts("a[1-3,7]"))
    ['a1', 'a2', 'a3', 'a7']
    """
    pieces = _RANGE.split(pattern)
    ranges = [list(_ranges(piece, pattern)) for piece in pieces[1::2]]
    # Counted before they are listed.
    count = math.prod(sum(end - first + 1 for first, end, _ in parts) for parts in ranges)
    if count > MOST_NODES:
        raise TopologyError(
            f"{quoted(pattern)} names more nodes than are supported ({MOST_NODES}); write a[1-4]"
        )
    choices: list[list[str]] = []
    for number, piece in enumerate(pieces):
        choices.append(_numbers(ranges[number // 2]) if number % 2 else [piece])
    for parts in product(*choices):
        name = "".join(parts)
        if not _NAME.fullmatch(name):
            raise TopologyError(
                f"{quoted(name)} is no node name; use letters, digits, '.', '-', '_'"
            )
        yield name


def _ranges(text: str, pattern: str) -> Iterator[tuple[int, int, int]]:
    """(first, last, digits) of every part of what stands in brackets."""
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            begin = parse_whole(first, most=_MOST_NUMBER)
            end = parse_whole(last, most=_MOST_NUMBER) if dash else begin
        except ValueError:
            raise TopologyError(
                f"{quoted(pattern)} is no host list; write a[1-4] or a[1,3]"
            ) from None
        if end < begin:
            raise TopologyError(f"{quoted(pattern)} counts from {begin} to {end}; write a[1-4]")
        yield begin, end, len(first)


def _numbers(parts: list[tuple[int, int, int]]) -> list[str]:
    return [
        str(number).zfill(digits)
        for first, end, digits in parts
        for number in range(first, end + 1)
    ]


def cluster_toml(cluster: Cluster) -> str:
    """The cluster as the text of its file; `Cluster.from_dict` of what TOML reads is the inverse.

    >>> print(cluster_toml(Cluster(nodes={f"a{i}": Node(machine="h100") for i in (1, 2)})))
    transport = "tcp"
    <BLANKLINE>
    [nodes."a[1-2]"]
    machine = "h100"
    <BLANKLINE>
    """
    lines = [f'transport = "{cluster.transport}"', ""]
    for name, switch in cluster.switches.items():
        lines.append(f'[switches."{name}"]')
        if switch.parent is not None:
            lines.append(f'parent = "{switch.parent}"')
        lines += [*_uplink_lines(switch.uplink_bytes_per_s), ""]
    for names, node in _runs_of_alike(cluster):
        lines += [f'[nodes."{_host_list(names)}"]', f'machine = "{node.machine}"']
        if node.switch is not None:
            lines.append(f'switch = "{node.switch}"')
        lines += _uplink_lines(node.uplink_bytes_per_s)
        if node.slowdown_ratio != 1.0:
            lines.append(f"slowdown = {node.slowdown_ratio!r}")
        lines.append("")
    return "\n".join(lines)


def _uplink_lines(rate: float | None) -> list[str]:
    if rate is None:
        return []
    gigabits = f"{rate * 8 / 1e9:f}".rstrip("0").rstrip(".")
    exact = float(gigabits) * 1e9 / 8 == rate
    return [f'uplink = "{gigabits} Gbit/s"' if exact else f'uplink = "{rate:.6f} B/s"']


def _runs_of_alike(cluster: Cluster) -> Iterator[tuple[list[str], Node]]:
    """Nodes alike whose names count upwards, in the order of the file."""
    run: list[str] = []
    for name, node in cluster.nodes.items():
        if run and not (node == cluster.nodes[run[-1]] and _follows(run[-1], name)):
            yield run, cluster.nodes[run[-1]]
            run = []
        run.append(name)
    yield run, cluster.nodes[run[-1]]


def _follows(name: str, following: str) -> bool:
    (stem, digits), (next_stem, next_digits) = _numbered(name), _numbered(following)
    if stem != next_stem or not digits or not next_digits:
        return False
    return next_digits == str(int(digits) + 1).zfill(len(digits))


def _numbered(name: str) -> tuple[str, str]:
    """A name and the number at its end, short enough for a host list."""
    stem = name.rstrip("0123456789")
    return (stem, name[len(stem) :]) if len(name) - len(stem) <= 7 else (name, "")


def _host_list(names: list[str]) -> str:
    (stem, first), (_, last) = _numbered(names[0]), _numbered(names[-1])
    return names[0] if len(names) == 1 else f"{stem}[{first}-{last}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNetwork:
    """Payload rates, each way, of all network cards of a node and of one card.

    The cards are spread evenly over the node's devices.
    """

    bytes_per_s: float
    card_bytes_per_s: float
    cards: int
    devices: int

    def cards_near(self, ranks: int) -> int:
        """How many cards the first `ranks` devices of the node send over.

        NCCL gives each GPU the cards nearest to it, an equal part of them where several GPUs are as
        near (NVIDIA/nccl, src/graph/topo.cc, ncclTopoGetLocalNet: local cards over local GPUs,
        rounded up), and enters and leaves a node over the cards of the GPUs that take part
        (search.cc, ncclTopoSelectNets). To fill several they need NVLink or its like between them
        (NVIDIA/nccl#412), as all machines of the catalogue with several cards have.
        """
        return -(-ranks * self.cards // self.devices)

    def sent_bytes_per_s(self, ranks: int) -> float:
        """What the first `ranks` devices of the node get together."""
        return min(self.bytes_per_s, self.cards_near(ranks) * self.card_bytes_per_s)


def network_of(profile: MachineProfile) -> NodeNetwork | None:
    """The network of a node by its profile; None where nothing is known of it.

    The fastest single flow measured is what any number of ranks gets. A datasheet's line rate is
    that of all cards together, and counts with what collectives usually get of it.
    """
    links = [link for link in profile.network if link.flows == 1]
    if not links:
        return None
    best = max(links, key=achieved_bytes_per_s)
    rate = achieved_bytes_per_s(best)
    cards = _cards(profile)[0] if best.provenance.source == "datasheet" else 1
    return NodeNetwork(
        bytes_per_s=rate,
        card_bytes_per_s=rate / cards,
        cards=cards,
        devices=len(profile.devices),
    )


def network_in_cluster(profile: MachineProfile, cluster: Cluster, host: str) -> NodeNetwork | None:
    """The network of a named node: the uplink that its cluster file gives, else its profile's.

    Where the machine's datasheet gives the rate of a card, some ranks get no more than their cards.
    """
    uplink = cluster.nodes[host].uplink_bytes_per_s
    if uplink is None:
        return network_of(profile)
    cards, card_bytes_per_s = _cards(profile)
    return NodeNetwork(
        bytes_per_s=cluster.payload_bytes_per_s(uplink),
        card_bytes_per_s=cluster.payload_bytes_per_s(max(card_bytes_per_s, uplink / cards)),
        cards=cards,
        devices=len(profile.devices),
    )


def _cards(profile: MachineProfile) -> tuple[int, float]:
    """(network cards of a node, line rate of one in bytes per second); (1, 0.0) if unknown."""
    cards, rate = profile.hardware.get("nic_count"), profile.hardware.get("nic_bit_per_s")
    if not isinstance(cards, int) or cards < 1 or not isinstance(rate, int | float):
        return 1, 0.0
    return cards, rate / 8


def rates_by_ranks(networks: Sequence[NodeNetwork | None], most: int) -> Array:
    """For each network and for none, what 0 to `most` ranks of a node get of it; inf if unknown."""
    import numpy as np  # commands start without it

    unknown = [math.inf] * (most + 1)
    rows: dict[NodeNetwork | None, list[float]] = {
        network: [math.inf, *map(network.sent_bytes_per_s, range(1, most + 1))]
        for network in dict.fromkeys(networks)
        if network is not None
    }
    return np.array([*(rows.get(network, unknown) for network in networks), unknown])
