"""Hold what was measured of links, and of the collectives that run over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from estimator.machines.provenance import (
    LEAST,
    MOST,
    Provenance,
    check_not_negative,
    check_points,
    check_positive,
)

LinkKind = Literal[
    "h2d",
    "d2h",
    "d2d",
    "pcie",
    "nvlink",
    "infinity_fabric",
    "roce",
    "infiniband",
    "efa",
    "tcp",
    "loopback",
]
CollectiveName = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]
# How far apart the two ends of a link are, nearest first.
Locality = Literal["device_switch", "socket", "node", "rack", "cluster"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of one connection; n bytes take latency_s + n / bandwidth_bytes_per_s.

    `locality` says how far apart its ends are: behind one device switch, on one socket, in one
    node, in nodes of one rack, in other racks. `flows` were concurrent when it was measured
    (between nodes: those through one NIC), and the rate is what one of them got. `points` are the
    measured (bytes, seconds), kept beside the fit.

    Between devices of a node, the rate is what one device of a ring sends over all its links of the
    kind where the ring joins at most `ring_devices` devices in the order of their indices, None for
    all: a bridge joins 2, a socket's switches half of a node. Without `peer_to_peer` devices reach
    each other through host memory alone. `reduces` says that the switch between them adds and
    multicasts (NVLS). `achieved_ratio` is the share of a datasheet's rate that collectives get, if
    it is not the usual one of the kind.
    """

    kind: LinkKind
    locality: Locality = "node"
    latency_s: float
    bandwidth_bytes_per_s: float
    pinned: bool = False
    flows: int = 1
    points: tuple[tuple[float, float], ...] = ()
    ring_devices: int | None = None
    peer_to_peer: bool = True
    reduces: bool = False
    achieved_ratio: float | None = None
    provenance: Provenance

    def __post_init__(self) -> None:
        check_not_negative(self, "latency_s")
        check_positive(self, "bandwidth_bytes_per_s", "flows", "ring_devices", "achieved_ratio")
        check_points(self, self.points)

    def transfer_time_s(self, size_bytes: float) -> float:
        """Seconds for `size_bytes` bytes one way."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Measured size → time of one collective over one group shape.

    `size_bytes` follows nccl-tests: the whole buffer of one rank (for all-gather and
    reduce-scatter the gathered size). The group has `group_size` ranks on `nodes` nodes; `hosts`
    names the node of every rank, in rank order, where it was measured on a cluster. `pair_ratio`
    are (bytes, seconds of two such collectives at once / seconds of one). `blocking` are (seconds
    that each rank computes before, bytes, seconds) of one that ranks wait for before they go on, by
    the mean rank's entry; `points` may be of many in a row, some of which pass beside others.
    """

    op: CollectiveName
    backend: str
    group_size: int
    nodes: int = 1
    hosts: tuple[str, ...] = ()
    points: tuple[tuple[float, float], ...]
    latency_s: float
    bandwidth_bytes_per_s: float
    pair_ratio: tuple[tuple[float, float], ...] = ()
    blocking: tuple[tuple[float, float, float], ...] = ()
    provenance: Provenance

    def __post_init__(self) -> None:
        check_points(self, self.points)
        check_points(self, self.pair_ratio)
        check_points(self, [(size, seconds) for _, size, seconds in self.blocking])
        check_points(self, [(window_s, seconds) for window_s, _, seconds in self.blocking])
        check_not_negative(self, "latency_s")
        check_positive(self, "bandwidth_bytes_per_s", "group_size", "nodes")
        if self.nodes > self.group_size:
            raise ValueError(
                f"CollectiveCost of {self.group_size} ranks cannot span {self.nodes} nodes"
            )
        if self.hosts and len(self.hosts) != self.group_size:
            raise ValueError(
                f"CollectiveCost.hosts names {len(self.hosts)} nodes for {self.group_size} ranks"
            )

    @property
    def spans_nodes(self) -> bool:
        """Whether the group crosses the network."""
        return self.nodes > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMatrix:
    """Latency and bandwidth between every two nodes, one flow at a time.

    Row i, column j is what node `hosts[i]` sends to node `hosts[j]`; None where it was not measured
    and on the diagonal.
    """

    hosts: tuple[str, ...]
    latency_s: tuple[tuple[float | None, ...], ...]
    bandwidth_bytes_per_s: tuple[tuple[float | None, ...], ...]
    provenance: Provenance

    def __post_init__(self) -> None:
        for name in ("latency_s", "bandwidth_bytes_per_s"):
            rows = getattr(self, name)
            if len(rows) != len(self.hosts) or any(len(row) != len(self.hosts) for row in rows):
                raise ValueError(f"PairMatrix.{name} must be square, one row per host")
            for value in (cell for row in rows for cell in row if cell is not None):
                if not LEAST <= value <= MOST:
                    raise ValueError(f"PairMatrix.{name} must be positive, found {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapCost:
    """What an all-reduce costs compute that runs beside it on the same devices, and the reverse.

    `exposed_ratio` = (compute and collective together − compute alone) / collective alone: 0 is
    perfect overlap, 1 is none, above 1 they get in each other's way; where both run on the same
    cores (gloo), the work that the collective is to them is part of it. `collective_slowdown_ratio`
    = time of a collective beside compute / alone (≥ 0). The group spans `nodes` nodes.
    `size_bytes` are those of all `in_flight` all-reduces that ran at once.
    """

    compute: Literal["compute_bound", "memory_bound"]
    backend: str
    group_size: int
    nodes: int = 1
    size_bytes: int
    in_flight: int = 1
    exposed_ratio: float
    collective_slowdown_ratio: float
    provenance: Provenance

    def __post_init__(self) -> None:
        check_not_negative(self, "exposed_ratio", "collective_slowdown_ratio")
        check_positive(self, "group_size", "nodes", "size_bytes", "in_flight")
