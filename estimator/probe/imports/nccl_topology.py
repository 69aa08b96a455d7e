"""Read the XML that NCCL writes to ``NCCL_TOPO_DUMP_FILE``: devices, NVLinks, PCIe tree and NICs.

Its rates are line rates, so links from it count as datasheet figures.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from estimator.errors import ImportedFileError, printable, quoted
from estimator.machines.profile import Link, LinkKind, Locality, Provenance
from estimator.placement.topology import PAYLOAD_RATIOS, Transport
from estimator.probe.imports.findings import Fact, Imported, Route, Routes, routes_fact
from estimator.probe.imports.rings import rings_of

FORMAT = "NCCL topology"
# Bytes per second of one NVLink, one way, by the lowest compute capability that has it
# (NVIDIA/nccl, src/graph/topo.h, SM60_NVLINK_BW and following).
_NVLINK_BYTES_PER_S = {60: 18e9, 70: 20e9, 80: 20e9, 86: 12e9, 90: 20.6e9, 100: 40.1e9}
_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
# PCI class codes: bridge of another kind (an NVSwitch), InfiniBand controller.
_SWITCH_CLASS, _INFINIBAND_CLASS = "0x0680", "0x0207"
# A system, its CPUs, PCIe switches below each other, their devices: a dozen at most.
_MOST_LEVELS = 64
_MOST_DEVICES = 256


@dataclass(frozen=True, slots=True)
class _Part:
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
    """Facts and line rates of one node; raises ImportedFileError if the XML is cut off."""
    if "<!" in text.replace("<!--", ""):
        raise ImportedFileError(
            "the XML defines entities or types of its own, which NCCL never does; let NCCL write "
            "it again"
        )
    try:
        root = ElementTree.fromstring(text)
        parts = list(_parts(root, ()))
        gpus = [part for part in parts if part.element.tag == "gpu"]
        nets = [part for part in parts if part.element.tag == "net"]
        _check_one_node(root, gpus)
        if not all(part.above for part in parts):
            raise ValueError("a device stands on top")
        facts = {gpu.index: _facts(gpu, gpus, nets) for gpu in gpus}
        numa_nodes = {
            gpu.index: int(gpu.above[1].get("numaid", "0"), 0)
            for gpu in gpus
            if len(gpu.above) > 1 and gpu.above[1].tag == "cpu"
        }
        links = (*_links(gpus),)
        network = (*_network(nets),)
    except (ElementTree.ParseError, ValueError, LookupError, OverflowError) as error:
        if isinstance(error, ImportedFileError):
            raise
        raise ImportedFileError(
            f"the NCCL topology is cut off or damaged ({printable(str(error))}); let NCCL write it "
            "again"
        ) from None
    return Imported(
        formats=(FORMAT,),
        device_facts=facts,
        numa_nodes=numa_nodes,
        routes=_routes(gpus),
        links=links,
        network=network,
        hardware={"network_cards": len({net.element.get("name") for net in nets})} if nets else {},
    )


def _parts(element: Element, above: tuple[Element, ...]) -> Iterator[_Part]:
    if len(above) > _MOST_LEVELS:
        raise ValueError(f"more than {_MOST_LEVELS} levels")
    if element.tag in ("gpu", "net"):
        yield _Part(element, above)
    for child in element:
        yield from _parts(child, (*above, element))


def _check_one_node(root: Element, gpus: Sequence[_Part]) -> None:
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


def _facts(gpu: _Part, gpus: Sequence[_Part], nets: Sequence[_Part]) -> dict[str, Fact]:
    peers: dict[int | str, Route] = {
        other.index: _peer_path(gpu, other) for other in gpus if other is not gpu
    }
    near: dict[int | str, Route] = {
        net.element.get("name", "nic"): _pcie_path(gpu, net) for net in nets
    }
    capability = gpu.element.get("sm", "")
    facts: dict[str, Fact] = {
        "compute_capability": f"{capability[:-1]}.{capability[-1:]}" if capability else None,
        "peer_links": routes_fact(peers),
        "nics": routes_fact(near),
        "nvlink_links": sum(int(link.get("count", "1")) for link in gpu.element.iter("nvlink")),
    }
    width, speed = int(gpu.above[-1].get("link_width", "0")), _transfers(gpu.above[-1])
    if width and speed:
        facts |= {"pcie_width": width, "pcie_generation": _GENERATIONS.get(speed)}
    return {name: value for name, value in facts.items() if value not in (None, "")}


def _transfers(pci: Element) -> float:
    found = re.match(r"([\d.]+) GT/s", pci.get("link_speed", ""))
    return float(found[1]) if found else 0.0


def _peer_path(gpu: _Part, other: _Part) -> Route:
    direct = {link.get("target"): link for link in gpu.element.iter("nvlink")}
    if other.busid in direct:
        count = int(direct[other.busid].get("count", "1"))
        return Route("nvlink", "device_switch", count)
    switched = [_to_switch(part) for part in (gpu, other)]
    if all(switched):
        return Route("nvlink", "device_switch", min(switched))
    return _pcie_path(gpu, other)


def _to_switch(gpu: _Part) -> int:
    return sum(
        int(link.get("count", "1"))
        for link in gpu.element.iter("nvlink")
        if link.get("tclass", "").startswith(_SWITCH_CLASS)
    )


def _pcie_path(first: _Part, second: _Part) -> Route:
    shared = [a for a, b in zip(first.above, second.above, strict=False) if a is b]
    if any(element.tag == "pci" for element in shared):
        return Route("pcie", "device_switch")
    if any(element.tag == "cpu" for element in shared):
        return Route("pcie", "socket")
    return Route("pcie", "node")


def _routes(gpus: Sequence[_Part]) -> Routes:
    return {
        gpu.index: {other.index: _peer_path(gpu, other) for other in gpus if other is not gpu}
        for gpu in gpus
    }


def _links(gpus: Sequence[_Part]) -> Iterator[Link]:
    for route, devices in rings_of(_routes(gpus), links_to_switch=any(map(_to_switch, gpus))):
        if route.kind == "nvlink":
            rate = route.links * min(map(_nvlink_bytes_per_s, gpus))
        else:
            rate = min(_pcie_bytes_per_s(gpu.above[-1]) for gpu in gpus)
        yield _line_rate(route.kind, route.locality, rate, devices)


def _nvlink_bytes_per_s(gpu: _Part) -> float:
    known = [sm for sm in _NVLINK_BYTES_PER_S if sm <= int(gpu.element.get("sm", "60"))]
    return _NVLINK_BYTES_PER_S[max(known, default=60)]


def _pcie_bytes_per_s(pci: Element) -> float:
    # NCCL takes 3.0 x16 for what a virtual machine does not say (src/graph/topo.cc); of 130 bits
    # 128 are data (PCI-SIG).
    width = int(pci.get("link_width", "0")) or 16
    return (_transfers(pci) or 8.0) * 1e9 * width * 128 / 130 / 8


def _line_rate(kind: LinkKind, locality: Locality, rate: float, ring_devices: int | None) -> Link:
    return Link(
        kind=kind,
        locality=locality,
        latency_s=0.0,
        bandwidth_bytes_per_s=rate,
        ring_devices=ring_devices,
        provenance=Provenance(source="datasheet", note=f"{FORMAT}: line rate, latency not known"),
    )


def _network(nets: Sequence[_Part]) -> Iterator[Link]:
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
                provenance=Provenance(
                    source="datasheet", note=f"{FORMAT}: line rate, latency not known"
                ),
            )


def _transport(net: _Part) -> Transport:
    # NCCL's socket transport has no hardware address to give.
    if int(net.element.get("guid", "0"), 0) == 0:
        return "tcp"
    pci = next((element for element in reversed(net.above) if element.tag == "pci"), None)
    is_infiniband = pci is not None and pci.get("class", "").startswith(_INFINIBAND_CLASS)
    return "infiniband" if is_infiniband else "roce"
