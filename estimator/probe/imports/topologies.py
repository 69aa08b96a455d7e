"""Read how devices and nodes are joined: NCCL's XML, ``nvidia-smi topo -m``, Slurm's switches.

Rates in NCCL's XML are line rates, so links from it count as datasheet figures.

Link speeds of Slurm's files are in arbitrary units that it does not use itself (topology.conf(5)),
so the cluster has no rates; they can be added to its file.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

from estimator.errors import ImportedFileError, TopologyError, printable, quoted
from estimator.machines.profile import Link, LinkKind, Locality, Provenance
from estimator.placement.topology import (
    MOST_NODES,
    PAYLOAD_RATIOS,
    Cluster,
    Node,
    Switch,
    Transport,
    expand_hosts,
)
from estimator.probe.imports.findings import Imported, Route, Routes, rings_of

NCCL_TOPOLOGY = "NCCL topology"
_LINE_RATE = Provenance(source="datasheet", note=f"{NCCL_TOPOLOGY}: line rate, latency not known")
# Bytes per second of one NVLink, one way, by the lowest compute capability that has it
# (NVIDIA/nccl, src/graph/topo.h, SM60_NVLINK_BW and following).
_NVLINK_BYTES_PER_S = {60: 18e9, 70: 20e9, 80: 20e9, 86: 12e9, 90: 20.6e9, 100: 40.1e9}
# PCI class codes: bridge of another kind (an NVSwitch), InfiniBand controller.
_SWITCH_CLASS, _INFINIBAND_CLASS = "0x0680", "0x0207"
# A system, its CPUs, PCIe switches below each other, their devices: a dozen at most.
_MOST_LEVELS = 64
_MOST_DEVICES = 256


@dataclass(frozen=True, slots=True)
class _Device:
    """A GPU or a NIC with the elements above it, outermost first."""

    element: Element
    above: tuple[Element, ...]

    @property
    def busid(self) -> str:
        return self.above[-1].get("busid", "")

    @property
    def index(self) -> int:
        return int(self.element.get("dev", ""))


def read_nccl_topology(text: str) -> Imported:
    """Paths and line rates of one node; raises ImportedFileError if the XML is cut off."""
    if "<!" in text.replace("<!--", ""):
        raise ImportedFileError(
            "the XML defines entities or types of its own, which NCCL never does; let NCCL write "
            "it again"
        )
    root = ElementTree.fromstring(text)
    parts = list(_parts(root, ()))
    gpus = [part for part in parts if part.element.tag == "gpu"]
    nets = [part for part in parts if part.element.tag == "net"]
    _check_one_node(root, gpus)
    if not all(part.above for part in parts):
        raise ValueError("a device stands on top")
    return Imported(
        formats=(NCCL_TOPOLOGY,),
        routes=_routes(gpus),
        links=tuple(_links(gpus)),
        network=tuple(_network(nets)),
    )


def _parts(element: Element, above: tuple[Element, ...]) -> Iterator[_Device]:
    if len(above) > _MOST_LEVELS:
        raise ValueError(f"more than {_MOST_LEVELS} levels")
    if element.tag in ("gpu", "net"):
        yield _Device(element, above)
    for child in element:
        yield from _parts(child, (*above, element))


def _check_one_node(root: Element, gpus: Sequence[_Device]) -> None:
    if root.tag != "system" or not gpus:
        raise ImportedFileError(
            f"the XML describes no GPU ({quoted(root.tag)} on top); give what "
            f"NCCL_TOPO_DUMP_FILE wrote"
        )
    if len(gpus) > _MOST_DEVICES:
        raise ValueError(f"more than {_MOST_DEVICES} devices")
    hosts = {cpu.get("host_hash") for cpu in root.iter("cpu")}
    if len(hosts) > 1 or len({gpu.index for gpu in gpus}) < len(gpus):
        raise ImportedFileError(
            "the NCCL topology describes several nodes; let NCCL write it in a run on one node"
        )


def _peer_path(gpu: _Device, other: _Device) -> Route:
    direct = {link.get("target"): link for link in gpu.element.iter("nvlink")}
    if other.busid in direct:
        count = int(direct[other.busid].get("count", "1"))
        return Route("nvlink", "device_switch", count)
    switched = [_to_switch(part) for part in (gpu, other)]
    if all(switched):
        return Route("nvlink", "device_switch", min(switched))
    return _pcie_path(gpu, other)


def _to_switch(gpu: _Device) -> int:
    return sum(
        int(link.get("count", "1"))
        for link in gpu.element.iter("nvlink")
        if link.get("tclass", "").startswith(_SWITCH_CLASS)
    )


def _pcie_path(first: _Device, second: _Device) -> Route:
    shared = [a for a, b in zip(first.above, second.above, strict=False) if a is b]
    if any(element.tag == "pci" for element in shared):
        return Route("pcie", "device_switch")
    if any(element.tag == "cpu" for element in shared):
        return Route("pcie", "socket")
    return Route("pcie", "node")


def _routes(gpus: Sequence[_Device]) -> Routes:
    return {
        gpu.index: {other.index: _peer_path(gpu, other) for other in gpus if other is not gpu}
        for gpu in gpus
    }


def _links(gpus: Sequence[_Device]) -> Iterator[Link]:
    for route, devices in rings_of(_routes(gpus), links_to_switch=any(map(_to_switch, gpus))):
        if route.kind == "nvlink":
            rate = route.links * min(map(_nvlink_bytes_per_s, gpus))
        else:
            rate = min(_pcie_bytes_per_s(gpu.above[-1]) for gpu in gpus)
        yield _line_rate(route.kind, route.locality, rate, devices)


def _nvlink_bytes_per_s(gpu: _Device) -> float:
    known = [sm for sm in _NVLINK_BYTES_PER_S if sm <= int(gpu.element.get("sm", "60"))]
    return _NVLINK_BYTES_PER_S[max(known, default=60)]


def _pcie_bytes_per_s(pci: Element) -> float:
    # NCCL takes 3.0 x16 for what a virtual machine does not say (src/graph/topo.cc); of 130 bits
    # 128 are data (PCI-SIG).
    width = int(pci.get("link_width", "0")) or 16
    speed = re.match(r"([\d.]+) GT/s", pci.get("link_speed", ""))
    return (float(speed[1] if speed else 0) or 8.0) * 1e9 * width * 128 / 130 / 8


def _line_rate(kind: LinkKind, locality: Locality, rate: float, ring_devices: int | None) -> Link:
    return Link(
        kind=kind,
        locality=locality,
        latency_s=0.0,
        bandwidth_bytes_per_s=rate,
        ring_devices=ring_devices,
        provenance=_LINE_RATE,
    )


def _network(nets: Sequence[_Device]) -> Iterator[Link]:
    """The fastest NIC of each kind, one flow through it."""
    best: dict[Transport, float] = {}
    for net in nets:
        # Megabits per second, as in /sys/class/net/NAME/speed.
        rate = float(net.element.get("speed", "0")) * 1e6 / 8
        kind = _transport(net)
        best[kind] = max(best.get(kind, 0.0), rate * PAYLOAD_RATIOS[kind])
    for kind, rate in best.items():
        if rate > 0:
            yield Link(
                kind=kind,
                locality="rack",
                latency_s=0.0,
                bandwidth_bytes_per_s=rate,
                provenance=_LINE_RATE,
            )


def _transport(net: _Device) -> Transport:
    # NCCL's socket transport has no hardware address to give.
    if int(net.element.get("guid", "0"), 0) == 0:
        return "tcp"
    pci = next((element for element in reversed(net.above) if element.tag == "pci"), None)
    is_infiniband = pci is not None and pci.get("class", "").startswith(_INFINIBAND_CLASS)
    return "infiniband" if is_infiniband else "roce"


SMI_TOPOLOGY = "nvidia-smi topo"
HEADER = re.compile(r"^[ \t#]*GPU0\s.*$", re.M)
_PEER = re.compile(r"(GPU\d+|NIC\d+|mlx\d+_\w+|\w+_re\d+|\w*roce\w*)")
_NVLINK = re.compile(r"NV(\d+)")
# The legend that nvidia-smi prints: PIX and PXB stay below a host bridge, PHB and NODE on a NUMA
# node, SYS crosses sockets.
_PCIE = {
    "PIX": Route("pcie", "device_switch"),
    "PXB": Route("pcie", "device_switch"),
    "PHB": Route("pcie", "socket"),
    "NODE": Route("pcie", "socket"),
    "SYS": Route("pcie", "node"),
    "SOC": Route("pcie", "node"),
}


def read_smi_topology(text: str) -> Imported:
    """Paths between devices; raises ImportedFileError if cut off."""
    header = HEADER.search(text)
    if header is None:
        raise ImportedFileError("there is no matrix of nvidia-smi topo -m; paste its header too")
    columns = _columns(header[0])
    rows = _rows(text[header.end() :], columns)
    devices = [name for name in columns if name.startswith("GPU")]
    lacking = [name for name in devices if name not in rows]
    if lacking:
        raise ImportedFileError(
            f"the matrix of nvidia-smi topo -m is cut off: '{lacking[0]}' has a column and no "
            "whole row; paste all of it"
        )
    routes = {
        int(name[3:]): {
            int(end[3:]): _path(cell)
            for end, cell in zip(columns, rows[name], strict=False)
            if end.startswith("GPU") and end != name
        }
        for name in devices
    }
    return Imported(formats=(SMI_TOPOLOGY,), routes=routes)


def _columns(header: str) -> list[str]:
    names = []
    for name in header.replace("#", " ").split():
        if not _PEER.fullmatch(name):
            break
        names.append(name)
    return names


def _rows(body: str, columns: list[str]) -> dict[str, list[str]]:
    rows = {}
    for line in body.splitlines():
        label, *cells = line.replace("#", " ").split() or [""]
        if label in columns and len(cells) >= len(columns):
            rows[label] = cells
    return rows


def _path(cell: str) -> Route:
    nvlink = _NVLINK.fullmatch(cell)
    if nvlink:
        return Route("nvlink", "device_switch", int(nvlink[1]))
    if cell not in _PCIE:
        raise ImportedFileError(
            f"'{cell}' is no path of nvidia-smi topo -m; paste the matrix unchanged"
        )
    return _PCIE[cell]


CONF_FORMAT, YAML_FORMAT = "Slurm topology.conf", "Slurm topology.yaml"
CONF_LINE = re.compile(r"^[^\S\n]*(SwitchName|BlockName|RingName)\s*=\s*\S+", re.M | re.I)
YAML_LINE = re.compile(r"^[^\S\n]*-\s+topology:\s*\S+", re.M)
_YES = ("true", "yes", "on", "y")
# A list of topologies, each with a tree, its switches, their entries.
_MOST_SWITCH_LEVELS = 16
_ASSIGNMENT = re.compile(r"(\w+)\s*=\s*(\S+)")
_BETWEEN_HOSTS = re.compile(r",(?![^\[]*\])")


@dataclass(frozen=True, slots=True)
class _Switch:
    """One switch or block: the nodes and the switches below it."""

    name: str
    nodes: tuple[str, ...]
    switches: tuple[str, ...]


def read_topology_conf(text: str, *, machine: str) -> Imported:
    """The cluster of a ``topology.conf``; every node is of type `machine`."""
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        values = {key.lower(): value for key, value in _ASSIGNMENT.findall(content)}
        if "ringname" in values:
            raise ImportedFileError(
                f"line {number} describes a ring, and only trees of switches are supported; write "
                "a cluster file by hand"
            )
        name = values.get("switchname", values.get("blockname"))
        if name is None:
            if "blocksizes" in values:
                continue
            raise ImportedFileError(
                f"line {number} of the topology names no switch ({quoted(content)}); write "
                "SwitchName=s0 Nodes=n[0-5]"
            )
        if "nodes" not in values and "switches" not in values:
            raise ImportedFileError(
                f"line {number} of the topology is cut off: {quoted(name)} has neither Nodes nor "
                "Switches; give the whole file"
            )
        entries.append(_entry(name, values.get("nodes"), values.get("switches")))
    return Imported(formats=(CONF_FORMAT,), cluster=_cluster(entries, machine))


def read_topology_yaml(text: str, *, machine: str) -> Imported:
    """The cluster of the default topology in a ``topology.yaml``, or else of the first."""
    chosen = _chosen(_yaml(text))
    if isinstance(chosen.get("tree"), Mapping):
        listed, key = chosen["tree"].get("switches"), "switch"
    elif isinstance(chosen.get("block"), Mapping):
        listed, key = chosen["block"].get("blocks"), "block"
    else:
        raise ImportedFileError(
            f"the topology {quoted(chosen.get('topology'))} has neither a tree nor "
            f"blocks, so it says "
            "nothing of switches; write a cluster file by hand"
        )
    entries = [_entry(each[key], each.get("nodes"), each.get("children")) for each in listed]
    return Imported(formats=(YAML_FORMAT,), cluster=_cluster(entries, machine))


def _yaml(text: str) -> Any:
    """The values of a YAML text, all of them as text; raises ImportedFileError."""
    import yaml

    # libyaml's, where it is there: the one in Python takes seconds for what a cluster has.
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.AliasEvent):
                raise ImportedFileError(
                    "the topology has aliases, which may stand for any amount; write each entry out"
                )
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _MOST_SWITCH_LEVELS:
                raise ImportedFileError("the topology is nested too deeply; give the whole file")
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        reason = printable(" ".join(str(error).split()))
        raise ImportedFileError(
            f"the topology is not YAML ({reason}); give the whole file"
        ) from None


def _chosen(content: Any) -> Mapping[str, Any]:
    topologies = [entry for entry in content if isinstance(entry, Mapping)]
    if not topologies:
        raise ImportedFileError("the YAML lists no topology; give the whole topology.yaml")
    defaults = [entry for entry in topologies if str(entry.get("cluster_default")).lower() in _YES]
    return (defaults or topologies)[0]


def _entry(name: str, nodes: Any, switches: Any) -> _Switch:
    return _Switch(name, tuple(_hosts(nodes)), tuple(_hosts(switches)))


def _hosts(listed: Any) -> Iterator[str]:
    """Names of a host list such as ``a[1-3],b7``."""
    count = 0
    try:
        for pattern in filter(None, _BETWEEN_HOSTS.split(listed or "")):
            for name in expand_hosts(pattern):
                count += 1
                if count > MOST_NODES:
                    raise TopologyError(f"there are more than {MOST_NODES} nodes")
                yield name
    except TopologyError as error:
        raise ImportedFileError(f"the topology cannot be read: {error}") from None


def _cluster(entries: Sequence[_Switch], machine: str) -> Cluster:
    parents: dict[str, str] = {}
    plugged: dict[str, str] = {}
    for entry in entries:
        for child, above in ((entry.switches, parents), (entry.nodes, plugged)):
            for name in child:
                if name in above:
                    raise ImportedFileError(
                        f"{quoted(name)} hangs on both {quoted(above[name])} and "
                        f"{quoted(entry.name)}, and only "
                        "trees of switches are supported; write a cluster file by hand"
                    )
                above[name] = entry.name
    known = {entry.name for entry in entries}
    lacking = sorted(set(parents) - known)
    if lacking:
        raise ImportedFileError(
            f"the topology is cut off: switch {quoted(lacking[0])} is used and not "
            "described; give the whole file"
        )
    try:
        return Cluster(
            nodes={name: Node(machine=machine, switch=switch) for name, switch in plugged.items()},
            switches={entry.name: Switch(parent=parents.get(entry.name)) for entry in entries},
        )
    except TopologyError as error:
        raise ImportedFileError(f"the topology cannot be used: {error}") from None
