"""Machines and clusters whose every number is chosen, as the files that every version reads.

They are written as JSON and TOML rather than built from the package's classes, so that the same
bytes are estimated by any commit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Json = dict[str, Any]
CHOSEN: Json = {"source": "measured", "samples": 1, "relative_error": 0.0}
# What a kernel call costs beside its work, and the sides of the square matrices probed.
KERNEL_START_S = 1e-6
SIDES = (16, 64, 256, 1024, 2048)
# (inputs, whether a number follows them) of the probed elementwise operators.
ELEMENTWISE = {
    "aten.relu.default": (1, False),
    "aten.threshold_backward.default": (2, True),
    "aten.copy_.default": (2, False),
    "aten.add_.Tensor": (2, False),
}
ITEM_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The numbers of a machine; `groups` are the (ranks, nodes) of measured collectives."""

    name: str
    devices: int
    network_bytes_per_s: float
    groups: tuple[tuple[int, int], ...]
    flops_per_s: float = 5e10
    memory_bytes_per_s: float = 1e10
    memory_bytes: int = 64 << 30
    latency_s: float = 1e-4
    bandwidth_bytes_per_s: float = 1e9
    exposed_ratio: float | None = 0.8
    overlap_nodes: int = 1
    slowdown_ratio: float = 1.3
    two_at_once_ratio: float = 1.6
    memory_contention: float = 1.0
    rank_jitter_ratio: float | None = 0.01
    network_source: Literal["measured", "datasheet"] = "measured"

    def profile(self, kind: Literal["cpu", "cuda"]) -> Json:
        """The profile file of this machine with CPU cores or CUDA devices."""
        return {
            "schema_version": 1,
            "name": self.name if kind == "cpu" else f"{self.name}-gpu",
            "devices": [self._device(index, kind) for index in range(self.devices)],
            "network": self._network(),
            "collectives": self._collectives(),
            "overlaps": self._overlaps(),
            "kernels": [self._matmuls(), *map(self._elementwise, ELEMENTWISE)],
            "contentions": [
                {
                    "bound": "memory",
                    "devices_busy": 2,
                    "points": [[1e4, 1.0], [1e8, self.memory_contention]],
                    "provenance": CHOSEN,
                }
            ],
            "host": {
                "forward_op_s": 4e-6,
                "forward_view_s": 2e-6,
                "backward_op_s": 3e-6,
                "bare_op_s": 2e-6,
                "module_call_s": 3e-6,
                "step_s": 2e-5,
                "ddp_step_s": 2e-4,
                "ddp_bucket_s": 3e-5,
                "shard_unit_s": 6e-5,
                "shard_update_tensor_s": 5e-6,
                "provenance": CHOSEN | {"relative_error": 0.07},
            },
            "memory": {"shared_cache_bytes": 16 << 20, "provenance": CHOSEN},
            "updates": [
                {
                    "optimizer": optimizer,
                    "form": "loop",
                    "device": kind,
                    "launch_s": 1e-5,
                    "per_tensor_s": 2e-5,
                    "per_parameter_s": 1e-9 * tensors,
                    "provenance": CHOSEN,
                }
                for optimizer, tensors in (
                    ("sgd", 1),
                    ("sgd-momentum", 2),
                    ("adam", 3),
                    ("adamw", 3),
                )
            ],
            "rank_spread_ratio": self.rank_jitter_ratio,
            "provenance": CHOSEN,
        }

    def _device(self, index: int, kind: str) -> Json:
        return {
            "kind": kind,
            "index": index,
            "name": "device",
            "memory_bytes": self.memory_bytes,
            "peak_flops_per_s": {"float32": self.flops_per_s},
            "cores": [index] if kind == "cpu" else [],
        }

    def _network(self) -> list[Json]:
        rate, provenance = self.network_bytes_per_s, CHOSEN | {"source": self.network_source}
        return [
            {
                "kind": "tcp",
                "reach": locality,
                "latency_s": latency_s,
                "bandwidth_bytes_per_s": rate / slower,
                "provenance": provenance,
            }
            for locality, latency_s, slower in (
                ("rack", 1e-4 + 1e-2 / rate, 1),
                ("cluster", 3e-4, 2),
            )
        ]

    def _collectives(self) -> list[Json]:
        """A straight line within the node, measured groups whose times bend a little."""
        found = [self._straight(op) for op in ("all_reduce", "broadcast")]
        shapes = [
            (op, ranks, nodes, self.network_bytes_per_s / (1 + nodes / 10), 1e-5 * nodes)
            for op in ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
            for ranks, nodes in self.groups
        ]
        shapes += [
            (op, 2, 1, 2 * self.bandwidth_bytes_per_s, self.latency_s)
            for op in ("all_gather", "reduce_scatter")
        ]
        return found + [
            {
                "op": op,
                "backend": "gloo",
                "group_size": ranks,
                "nodes": nodes,
                "points": [
                    [4.0**k, (latency_s + 4.0**k / rate) * (1 + 0.1 * (k % 3))]
                    for k in range(5, 14)
                ],
                "latency_s": latency_s,
                "bandwidth_bytes_per_s": rate,
                "provenance": CHOSEN | {"relative_error": 0.02 * ranks},
            }
            for op, ranks, nodes, rate, latency_s in shapes
        ]

    def _straight(self, op: str) -> Json:
        return {
            "op": op,
            "backend": "gloo",
            "group_size": 2,
            "points": [
                [2.0**k, self.latency_s + 2.0**k / self.bandwidth_bytes_per_s]
                for k in range(10, 28, 2)
            ],
            "latency_s": self.latency_s,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "pair_ratio": [[2.0**10, self.two_at_once_ratio]],
            "provenance": CHOSEN,
        }

    def _overlaps(self) -> list[Json]:
        if self.exposed_ratio is None:
            return []
        return [
            {
                "compute": "compute_bound",
                "backend": "gloo",
                "group_size": 2,
                "nodes": self.overlap_nodes,
                "size_bytes": 1 << 24,
                "exposed_ratio": self.exposed_ratio,
                "collective_slowdown_ratio": self.slowdown_ratio,
                "provenance": CHOSEN,
            }
        ]

    def _matmuls(self) -> Json:
        points = [
            _point("aten.mm.default", side, 2, False, 2 * side**3 / self.flops_per_s)
            for side in SIDES
        ]
        return _kernel("aten.mm.default", points)

    def _elementwise(self, target: str) -> Json:
        inputs, numbered = ELEMENTWISE[target]
        # In-place writes return what they wrote to: as much is read as there are inputs.
        moved = (inputs + 1) * ITEM_BYTES
        points = [
            _point(target, side, inputs, numbered, moved * side**2 / self.memory_bytes_per_s)
            for side in SIDES
        ]
        return _kernel(target, points)


def _point(target: str, side: int, inputs: int, numbered: bool, work_s: float) -> Json:
    square = {"t": [side, side], "d": "float32"}
    call = {
        "target": target,
        "arguments": [square] * inputs + [0] * numbered,
        "keywords": {},
        "outputs": [square],
    }
    return {"call": call, "warm_s": KERNEL_START_S + work_s}


def _kernel(target: str, points: Sequence[Json]) -> Json:
    return {"target": target, "dtype": "float32", "points": points, "provenance": CHOSEN}


# Machines that differ in everything that a step depends on.
MACHINES = (
    Machine(
        name="slow",
        devices=4,
        network_bytes_per_s=1e8,
        groups=((4, 2), (8, 4)),
        rank_jitter_ratio=0.03,
    ),
    Machine(
        name="fast",
        devices=8,
        network_bytes_per_s=1.25e9,
        groups=((16, 2),),
        flops_per_s=3e11,
        memory_bytes_per_s=6e10,
        memory_contention=1.7,
        exposed_ratio=0.2,
        bandwidth_bytes_per_s=1e10,
    ),
    # Collectives that compute cannot overlap with at all, measured over the network only.
    Machine(
        name="jammed",
        devices=2,
        network_bytes_per_s=1.25e9,
        groups=((4, 4),),
        exposed_ratio=3.0,
        overlap_nodes=2,
        slowdown_ratio=1.0,
    ),
    # Nothing measured of collectives over nodes, nor of overlap; small memory.
    Machine(
        name="bare",
        devices=3,
        network_bytes_per_s=5e8,
        groups=(),
        flops_per_s=2e10,
        memory_bytes=3 << 20,
        exposed_ratio=None,
        rank_jitter_ratio=None,
    ),
    # No network, and no collectives but those of a ring within the node.
    Machine(name="lone", devices=2, network_bytes_per_s=1e8, groups=()),
    # Known by its datasheet to have several network cards, each near one or two devices.
    Machine(
        name="railed",
        devices=6,
        network_bytes_per_s=1e9,
        groups=((6, 2),),
        network_source="datasheet",
    ),
)
PAIRS: Json = {
    "hosts": ["a6", "a7", "a1"],
    "latency_s": [[None, 1e-4, 1e-4], [1e-4, None, 1e-4], [1e-4, 1e-4, None]],
    "bandwidth_bytes_per_s": [[None, 3e7, 9e8], [4e8, None, 2e7], [1e9, 5e7, None]],
    "provenance": CHOSEN,
}


def write_machines(home: Path) -> None:
    """Fill a user's store with every machine, on CPU cores and on CUDA devices."""
    folder = home / "machines"
    folder.mkdir(parents=True)
    for machine in MACHINES:
        for kind in ("cpu", "cuda"):
            profile = machine.profile(kind)  # type: ignore[arg-type]
            if machine.name == "jammed":
                profile["pairs"] = PAIRS
            if machine.name == "lone":
                profile |= {"network": [], "collectives": profile["collectives"][:2]}
            if machine.name == "railed":
                profile["hardware"] = {"nic_count": 4, "nic_bit_per_s": 2_000_000_000}
            (folder / f"{profile['name']}.json").write_text(json.dumps(profile))


# Racks with oversubscribed uplinks, slow and fast nodes; {x} stands for the kind of devices.
RACKS = """\
[switches.spine]
[switches.half]
parent = "spine"
uplink = "640 Mbit/s"
[switches.r1]
parent = "half"
uplink = "1.6 Gbit/s"
[switches.r2]
parent = "half"
uplink = "1.2 Gbit/s"
[switches.r3]
parent = "spine"
[nodes.a1]
machine = "fast{x}"
switch = "r1"
uplink = "8 Gbit/s"
[nodes.a2]
machine = "slow{x}"
switch = "r1"
[nodes.a3]
machine = "slow{x}"
switch = "r2"
slowdown = 1.6
[nodes.a4]
machine = "fast{x}"
switch = "r2"
slowdown = 0.9
[nodes.a5]
machine = "slow{x}"
switch = "r3"
uplink = "400 Mbit/s"
[nodes.a6]
machine = "jammed{x}"
switch = "r3"
[nodes.a7]
machine = "jammed{x}"
[nodes.a8]
machine = "railed{x}"
switch = "r3"
uplink = "5.6 Gbit/s"
[nodes.a9]
machine = "railed{x}"
"""
# Machines of the catalogue in two halls, one node of each slow.
HALLS = """\
transport = "roce"
[switches.core]
[switches.h1]
parent = "core"
uplink = "800 Gbit/s"
[switches.h2]
parent = "core"
uplink = "100 Gbit/s"
[nodes."b[1-3]"]
machine = "h100-sxm"
switch = "h1"
[nodes.b4]
machine = "h100-sxm"
switch = "h1"
uplink = "400 Gbit/s"
slowdown = 1.3
[nodes."c[1-2]"]
machine = "a100-sxm-80gb"
switch = "h2"
uplink = "200 Gbit/s"
[nodes."d[1-4]"]
machine = "t4-g4dn"
switch = "h2"
[nodes.d5]
machine = "t4-g4dn"
switch = "h1"
slowdown = 1.1
"""


def write_clusters(folder: Path) -> dict[str, Path]:
    """The cluster files by name."""
    texts = {
        "racks": RACKS.format(x=""),
        "racks-gpu": RACKS.format(x="-gpu"),
        "halls": HALLS,
    }
    paths = {name: folder / f"{name}.toml" for name in texts}
    for name, path in paths.items():
        path.write_text(texts[name])
    return paths
