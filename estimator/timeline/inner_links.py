"""Find the links that a ring crosses inside a node, by how many of its devices take part.

Devices are taken in the order of their indices, which is that of NCCL on the machines of the
catalogue: neighbours first. A ring runs at the pace of its slowest hop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from estimator.machines.profile import Link, MachineProfile
from estimator.machines.typical import achieved_bytes_per_s

# Links that carry collectives between devices of a node.
DEVICE_LINKS = ("d2d", "nvlink", "infinity_fabric", "pcie")


# The start of one of NCCL's collectives: published all-reduce, all-gather and reduce-scatter of 512
# bytes over 2, 4 and 8 A100 (aiconfigurator's tables) lie on 7.9 µs + 1.05 µs per hop.
START_S = 7.9e-6
# k of α + βS + k·√(α·βS): fitted to published nccl-tests and profilers, and judged on systems that
# were left out (benchmarks/collective_accuracy.py). Over NVLink of A100 and later chunks are short
# beside a hop's latency; over PCIe, and the slower NVLink before, they hardly wait for it.
PIPELINING = {"quick": 1.9, "slow": 0.5}


class InnerLinks(NamedTuple):
    """One hop of a ring within a node, or a row for each: its latency, rate and pipelining.

    `reduces` says that the switch between devices adds what they send; `start_s` is what a
    collective takes before its first hop. `keeps_order` says that the node's network writes bytes
    in the order in which they were sent, on which NCCL's LL and LL128 protocols rely.
    """

    latency_s: Any
    bytes_per_s: Any
    pipelining: Any = 0.0
    reduces: Any = False
    start_s: Any = START_S
    keeps_order: Any = True


NO_LINKS = InnerLinks(0.0, math.inf)


def pace_of(profile: MachineProfile, link: Link | None) -> str:
    """Whether hops between devices are short or long beside NCCL's chunks: see `PIPELINING`."""
    capability = profile.devices[0].compute_capability
    is_quick = link is not None and link.kind in ("nvlink", "infinity_fabric")
    return "quick" if is_quick and (capability is None or capability >= 8) else "slow"


def links_over(profile: MachineProfile, link: Link) -> InnerLinks:
    """The hops over a link that some devices reach each other by."""
    return InnerLinks(
        latency_s=link.latency_s,
        bytes_per_s=achieved_bytes_per_s(link),
        pipelining=PIPELINING[pace_of(profile, link)],
        reduces=link.reduces,
        keeps_order=keeps_order(profile),
    )


def keeps_order(profile: MachineProfile) -> bool:
    """Whether NCCL may run its LL and LL128 protocols over a machine's network.

    EFA did not keep the order of bytes before P5 (aws/aws-ofi-nccl, issue 76 and pull request 280).
    """
    capability = profile.devices[0].compute_capability
    over_efa = any(link.kind == "efa" for link in profile.network)
    return not over_efa or capability is None or capability >= 9


def widest_link(profile: MachineProfile, devices: int) -> Link | None:
    """What the first `devices` devices of a node reach each other over.

    Of the links that join that many, those that join the fewest others: an NVLink bridge for two,
    the switch of a socket for its half of the node.
    """
    found = [link for link in profile.links if link.kind in DEVICE_LINKS]
    if not found:
        return None
    joined = [link.ring_devices or math.inf for link in found]
    enough = [number for number in joined if number >= devices]
    near = min(enough) if enough else max(joined)
    return max(
        (link for link, number in zip(found, joined, strict=True) if number == near),
        key=achieved_bytes_per_s,
    )


class LinksByDevices:
    """The inner links of some profiles, by the number of a profile and of devices in use."""

    def __init__(self, found: Sequence[Sequence[InnerLinks | None]]) -> None:
        most = max((len(row) for row in found), default=1)
        self._most = most - 1
        self._plain = [[*row, *[row[-1]] * (most - len(row))] for row in found]
        known = [[tuple(each or NO_LINKS) for each in row] for row in self._plain]
        self._columns = np.array(known, dtype=np.float64).transpose(2, 0, 1).copy()
        self._unknown = np.array([[each is None for each in row] for row in self._plain])

    def at(self, profile: Any, devices: Any) -> tuple[InnerLinks, Any]:
        """(links, whether nothing is known of them), of one group or of each row."""
        if type(profile) is int and type(devices) is int:
            found = self._plain[profile][min(devices, self._most)]
            return found or NO_LINKS, found is None
        used = np.minimum(devices, self._most)
        links = InnerLinks(*self._columns[:, profile, used])
        links = links._replace(reduces=links.reduces != 0, keeps_order=links.keeps_order != 0)
        return links, self._unknown[profile, used]
