"""Read the JSON that ``nvbandwidth --json`` prints: copies between host and devices.

Rates are in GB/s = 10⁹ bytes per second, latencies in ns (NVIDIA/nvbandwidth, README).
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from estimator.errors import ImportedFileError
from estimator.machines.profile import Link, LinkKind
from estimator.probe.imports.findings import Imported, imported

FORMAT = "nvbandwidth"
# Test cases by link: whether every device copies at once. Host memory is pinned in all of them.
# The copy engine moves what a training step copies, so its figures stand before the kernels'.
_HOST_COPIES: tuple[tuple[str, LinkKind, bool], ...] = (
    ("host_to_device_memcpy", "h2d", False),
    ("device_to_host_memcpy", "d2h", False),
    ("host_to_all_memcpy", "h2d", True),
    ("all_to_host_memcpy", "d2h", True),
)
_DEVICE_COPIES = ("device_to_device_memcpy_write", "device_to_device_memcpy_read")
_DEVICE = re.compile(r"(\d+): (.+?) \([0-9A-Fa-fPCI:.]+\)(?:: \((.*)\))?")


def read_nvbandwidth(report: Mapping[str, Any], *, at: str) -> Imported:
    """Links of a machine from the parsed report; raises ImportedFileError."""
    body = report.get("nvbandwidth")
    if not isinstance(body, Mapping) or not isinstance(body.get("testcases"), list):
        raise ImportedFileError("the nvbandwidth report has no testcases; run nvbandwidth again")
    if "error" in body:
        raise ImportedFileError(f"nvbandwidth reports an error ({body['error']}); run it again")
    names = _device_names(body)
    cases = {
        case["name"]: case
        for case in body["testcases"]
        if isinstance(case, Mapping) and case.get("status") == "Passed" and "name" in case
    }
    links = (*_host_links(cases, at), *_device_links(cases, at))
    if not links:
        raise ImportedFileError(
            "no copy between host and device passed in the nvbandwidth report; run nvbandwidth -t "
            "host_to_device_memcpy_ce --json"
        )
    return Imported(formats=(FORMAT,), device_names=names, links=links)


def _device_names(body: Mapping[str, Any]) -> dict[int, str]:
    listed = body.get("GPU Device list", body.get("GPU Device List", []))
    found = [_DEVICE.fullmatch(str(entry)) for entry in listed]
    names = {int(match[1]): match[2] for match in found if match}
    if len({match[3] for match in found if match}) > 1 or len(names) < len(found):
        raise ImportedFileError(
            "the nvbandwidth report lists devices of several hosts; run it on one node"
        )
    return names


def _host_links(cases: Mapping[str, Mapping[str, Any]], at: str) -> list[Link]:
    links = []
    latency_s = 0.0
    if "host_device_latency_sm" in cases:
        latency_s = 1e-9 * statistics.median(_cells(cases["host_device_latency_sm"]))
    for test, kind, at_once in _HOST_COPIES:
        case = cases.get(f"{test}_ce", cases.get(f"{test}_sm"))
        if case is None:
            continue
        rates = _cells(case)
        links.append(
            _link(kind, rates, latency_s, at, pinned=True, flows=len(rates) if at_once else 1)
        )
    return links


def _device_links(cases: Mapping[str, Mapping[str, Any]], at: str) -> list[Link]:
    latency_s = 0.0
    if "device_to_device_latency_sm" in cases:
        latency_s = 1e-9 * statistics.median(_cells(cases["device_to_device_latency_sm"]))
    for test in (f"{name}_{engine}" for engine in ("ce", "sm") for name in _DEVICE_COPIES):
        if test in cases:
            return [_link("d2d", _cells(cases[test]), latency_s, at)]
    return []


def _link(
    kind: LinkKind,
    rates: Sequence[float],
    latency_s: float,
    at: str,
    *,
    pinned: bool = False,
    flows: int = 1,
) -> Link:
    middle = statistics.median(rates)
    spread = statistics.median(abs(rate / middle - 1) for rate in rates)
    return Link(
        kind=kind,
        latency_s=latency_s,
        bandwidth_bytes_per_s=middle * 1e9,
        pinned=pinned,
        flows=flows,
        provenance=imported(
            at,
            samples=len(rates),
            relative_error=spread,
            note=f"{FORMAT}: {min(rates):.4g} to {max(rates):.4g} GB/s; latency is a memory read's",
        ),
    )


def _cells(case: Mapping[str, Any]) -> list[float]:
    """The measured cells of a matrix: not N/A, not the zeros of a device with itself."""
    rows = case.get("bandwidth_matrix")
    try:
        cells = [float(cell) for row in rows or () for cell in row if cell != "N/A"]
    except (TypeError, ValueError):
        cells = []
    cells = [cell for cell in cells if cell > 0]
    if not cells:
        raise ImportedFileError(
            f"the nvbandwidth test '{case['name']}' has no numbers; run nvbandwidth again"
        )
    return cells
