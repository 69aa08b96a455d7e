"""Read the pasted matrix of ``nvidia-smi topo -m``: how devices and NICs of a node are joined."""

from __future__ import annotations

import re

from estimator.errors import ImportedFileError
from estimator.probe.imports.findings import Imported, Route, routes_fact

FORMAT = "nvidia-smi topo"
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
    """Paths between devices, their NICs and NUMA nodes; raises ImportedFileError if cut off."""
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
    facts: dict[int, dict[str, str | int | float | bool | None]] = {}
    numa_nodes = {}
    routes: dict[int, dict[int, Route]] = {}
    for name in devices:
        index = int(name[3:])
        cells = rows[name]
        ends = dict(zip(columns, cells, strict=False))
        paths = {end: _path(cell) for end, cell in ends.items() if end != name}
        routes[index] = {int(end[3:]): path for end, path in paths.items() if end.startswith("GPU")}
        nics = {end: path for end, path in paths.items() if not end.startswith("GPU")}
        facts[index] = {"peer_links": routes_fact(routes[index])}
        if nics:
            facts[index]["nics"] = routes_fact(nics)
        numa = cells[len(columns) + 1 : len(columns) + 2]
        if numa and numa[0].isdigit():
            numa_nodes[index] = int(numa[0])
    return Imported(formats=(FORMAT,), device_facts=facts, numa_nodes=numa_nodes, routes=routes)


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
