"""Predict published collectives from the catalogue alone, each system by a fit to the others.

A system is asked for as the machine of the catalogue that it is. What the formula takes from
measurements inside a node is one k for each kind of link (`PIPELINING` of
`timeline/collectives/algorithms.py`): it is fitted to all other systems of the kind and judged on
buckets of 1 to 64 MiB of the one left out. Between nodes nothing is fitted: NCCL's own table says
what its protocols take. There a second split, ``ends``, takes the latency of the network from the
system's smallest messages and its rate from the largest, as a probe would.
"""

from __future__ import annotations

import csv
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from records import say

from estimator.machines.catalogue import load_profile
from estimator.machines.profile import CollectiveName, MachineProfile
from estimator.machines.typical import STREAMED_RATIO
from estimator.placement.mesh import ProcessGroup, whole_group
from estimator.placement.placement import place
from estimator.probe.links.copies import fit_line
from estimator.timeline.collectives.algorithms import (
    RING_SHARE,
    Algorithm,
    InnerLinks,
    algorithms_of,
    fastest_s,
    links_over,
    nccl_lines,
    pace_of,
    powers,
    widest_link,
)

# The same cluster goes by a name for each of its groups.
_GROUP_IN_NAME = re.compile(r"^\d+x (?=DGX A100$|AWS)|^\d+ node x \d+ GPU | \(\d+ GPUs\)$")
SMALLEST, LARGEST = 1 << 20, 64 << 20
# What each published system is in the catalogue; boards of four NVLink GPUs are not there.
with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as _table:
    MACHINES = {row["system"]: row["machine"] for row in csv.DictReader(_table)}
# Aceso's communication profiler (microsoft/SuperScaler) times calls of torch.distributed by the
# host's clock, from one synchronisation to the next: beside NCCL's kernel the work of the host and,
# where a call takes lists, a copy of the buffer on the device. No k is learnt from it. What a call
# costs is learnt from the profiler's other systems: where two devices send least, the rest is host.
TIMES_CALLS = "Sailor (Aceso profiler)"
COPIES_LISTS = ("all_gather", "reduce_scatter")
_SMALL_BYTES = 16 << 20
# The same cluster under several builds is one system to leave out.
CLUSTERS = {system: system.partition(" (CUDA")[0] for system in MACHINES}
# Between nodes: the fabric is not stated.
UNSTATED = "DGX A100-style node (a100_dgx)"
# NCCL 2.7 and 2.8, with which the logs of two and four nodes were made, expect 0.53 of the bus of a
# ring and 0.45 of a tree, so that buckets went around the ring (tuning.cc of 2020).
NO_TREE = ("DGX A100", "2x DGX-1 V100-32GB RoCE", "AWS p4d.24xlarge")
# Inside a node k is fitted. With the best chunks it is 2; what is far above is no pipeline.
FITTED = ("catalogue, quick", "catalogue, hopper", "catalogue, slow")
GRID = np.arange(0.0, 3.01, 0.1)
# Messages so small tell latency.
_LATENCY_BYTES = 1 << 16
GOALS = {
    "catalogue, quick": 0.15,
    "catalogue, hopper": 0.15,
    "catalogue, slow": 0.30,
    "catalogue, network": 0.25,
    "ends": 0.25,
}


@dataclass(frozen=True, slots=True)
class Group:
    """What was published of one collective over one group shape: seconds by bytes."""

    source: str
    system: str
    op: CollectiveName
    dtype: str
    nodes: int
    ranks: int
    points: dict[int, float]

    @property
    def per_node(self) -> int:
        return -(-self.ranks // self.nodes)

    @property
    def name(self) -> str:
        return f"{self.system}, {self.op} {self.dtype}, {self.nodes}x{self.per_node}"


def read_groups(path: Path) -> list[Group]:
    """Every group of the table whose collective a profile can hold."""
    points: dict[tuple[str, str, str, str, int, int], dict[int, float]] = defaultdict(dict)
    with path.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            if row["collective"] in RING_SHARE and float(row["time_us"]) > 0:
                system = _GROUP_IN_NAME.sub("", row["system"])
                shape = int(row["nodes"]), int(row["ranks"])
                key = (row["source"], system, row["collective"], row["dtype"], *shape)
                points[key][int(row["size_bytes"])] = float(row["time_us"]) * 1e-6
    return [Group(*key, found) for key, found in points.items()]  # type: ignore[arg-type]


def case_of(
    split: str, group: Group, size: int, predicted_s: float | None, *, method: str, **more: Any
) -> dict[str, Any]:
    """A prediction of a group at one size, in the form of all accuracy benchmarks."""
    known = predicted_s is not None and math.isfinite(predicted_s)
    return {
        "id": f"{split}: {group.name}, {size} B",
        "split": split,
        "system": group.system,
        "source": group.source,
        "model": group.op,
        "ranks": group.ranks,
        "nodes": group.nodes,
        "size_bytes": size,
        "method": method,
        "predicted_s": predicted_s,
        "measured_s": group.points[size],
        "status": "ok" if known else "no_prediction",
        **more,
    }


@dataclass(frozen=True, slots=True)
class Asked:
    """One group of a system on its machine: what it communicates over, and the sizes judged."""

    group: Group
    links: InnerLinks
    ring: ProcessGroup
    locality: str
    call_s: float = 0.0
    copy_s_per_byte: float = 0.0

    def seconds(self, pipelining: float | None) -> np.ndarray[Any, Any]:
        """What the formula says for each of the sizes, with some k inside a node."""
        group, links = self.group, self.links
        if pipelining is not None:
            links = links._replace(pipelining=pipelining)
        lines = nccl_lines(group.op, self.ring, links, algorithms=algorithms_for(group))
        sizes = np.array(self.sizes, dtype=np.float64)
        kernel_s = fastest_s(powers(sizes), np.array(lines))
        return kernel_s + self.call_s + self.copy_s_per_byte * sizes

    @property
    def sizes(self) -> list[int]:
        return [size for size in sorted(self.group.points) if SMALLEST <= size <= LARGEST]

    @property
    def measured_s(self) -> np.ndarray[Any, Any]:
        return np.array([self.group.points[size] for size in self.sizes])


@lru_cache
def machine(system: str) -> MachineProfile:
    """The catalogue's machine of a system, with the network that the system has."""
    profile = load_profile(MACHINES[system])
    if "RoCE" not in system:
        return profile
    (network,) = profile.network
    slower = replace(network, kind="roce", latency_s=3e-6, bandwidth_bytes_per_s=25e9)
    hardware = {**profile.hardware, "nic_count": 2, "nic_bit_per_s": 100_000_000_000}
    return replace(profile, network=(slower,), hardware=hardware)


def asked_of(groups: Sequence[Group]) -> Iterator[Asked]:
    """The groups of systems that the catalogue has, with some size that is judged."""
    for group in groups:
        if group.system not in MACHINES or (group.nodes > 1 and group.system == UNSTATED):
            continue
        profile = machine(group.system)
        link = widest_link(profile, group.per_node)
        if link is None:
            continue
        where = f"{group.nodes}x{group.per_node}:{profile.name}"
        ring = whole_group(place(where, profile=profile))
        locality = "network" if group.nodes > 1 else pace_of(profile, link)
        locality = f"catalogue, {locality}"
        asked = Asked(group, links_over(profile, link), ring, locality)
        if group.source == TIMES_CALLS:
            asked = called(asked, groups, profile)
        if asked.sizes:
            yield asked
            if group.nodes > 1 and min(group.points) < _LATENCY_BYTES:
                yield replace(asked, ring=by_its_ends(asked), locality="ends")


def called(asked: Asked, groups: Sequence[Group], profile: MachineProfile) -> Asked:
    """With what the profiler times beside the kernel, as its other systems tell."""
    group = asked.group
    starts = []
    for other in groups:
        alike = (other.source, other.op, other.dtype) == (group.source, group.op, group.dtype)
        if alike and other.system != group.system and (other.nodes, other.ranks) == (1, 2):
            sizes = [size for size in sorted(other.points) if SMALLEST <= size <= _SMALL_BYTES]
            starts.append(fit_line(sizes, [other.points[size] for size in sizes]).latency_s)
    pair = ProcessGroup(ranks=2, nodes=1, per_node=2)
    (kernel, *_) = nccl_lines(group.op, pair, asked.links)
    memory = profile.devices[0].memory_bandwidth_bytes_per_s
    copied = 2 if group.op in COPIES_LISTS else 0
    return replace(
        asked,
        call_s=max(median(starts) - float(kernel.alpha_s), 0.0) if starts else 0.0,
        copy_s_per_byte=copied / (STREAMED_RATIO * memory) if memory else 0.0,
    )


def by_its_ends(asked: Asked) -> ProcessGroup:
    """The ring with what the smallest messages say of latency, and the largest of the rate."""
    points, ring = asked.group.points, asked.ring
    ends = replace(ring, latency_s=0.0)
    lines = nccl_lines(asked.group.op, ends, asked.links, algorithms=algorithms_for(asked.group))
    rounds, share = ring_cost(asked.group)
    latency_s = max(min(points.values()) - min(line.alpha_s for line in lines), 0.0) / rounds
    rate = share * max(points) / points[max(points)]
    return replace(ring, latency_s=latency_s, bytes_per_s=rate)


def algorithms_for(group: Group) -> tuple[Algorithm, ...]:
    """Those that the system's NCCL chose between."""
    known = algorithms_of(group.op)
    return known[:1] if group.system in NO_TREE else known


def ring_cost(group: Group) -> tuple[float, float]:
    """(hops between nodes in a row, share of the buffer over the network) of a ring."""
    ring = algorithms_of(group.op)[0]
    ranks = ProcessGroup(ranks=group.ranks, nodes=group.nodes, per_node=group.per_node)
    return ring.rounds(ranks)[1], ring.share(ranks)[1]


def fitted(asked: Sequence[Asked]) -> float | None:
    """The k by least squares of logarithms; every system counts the same. None: nothing teaches."""
    systems: dict[str, list[Asked]] = {}
    for each in asked:
        if each.group.source != TIMES_CALLS:
            systems.setdefault(CLUSTERS[each.group.system], []).append(each)
    if not systems:
        return None

    def error(pipelining: float) -> float:
        return fmean(
            fmean(
                error**2
                for each in some
                for error in np.log(each.seconds(pipelining) / each.measured_s).tolist()
            )
            for some in systems.values()
        )

    return float(min(GRID, key=error))


def cases_of_systems(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Every size of every system beside what the catalogue and a fit to the others say."""
    asked = list(asked_of(groups))
    for locality in GOALS:
        some = [each for each in asked if each.locality == locality]
        for cluster in dict.fromkeys(CLUSTERS[each.group.system] for each in some):
            others = [each for each in some if CLUSTERS[each.group.system] != cluster]
            pipelining = fitted(others) if locality in FITTED else None
            if locality in FITTED and pipelining is None:
                say(f"{cluster}, {locality}: no other system among the tables to learn from")
                continue
            for each in some:
                if CLUSTERS[each.group.system] == cluster:
                    yield from _cases(each, pipelining)


def fitted_to_all(groups: Sequence[Group]) -> dict[str, float]:
    """The k of each kind of link by all systems: what `PIPELINING` holds."""
    asked = list(asked_of(groups))
    found = {name: fitted([each for each in asked if each.locality == name]) for name in FITTED}
    return {name: pipelining for name, pipelining in found.items() if pipelining is not None}


def _cases(asked: Asked, pipelining: float | None) -> Iterator[dict[str, Any]]:
    group = asked.group
    predicted_s = asked.seconds(pipelining).tolist()
    for size, seconds in zip(asked.sizes, predicted_s, strict=True):
        yield case_of(asked.locality, group, size, seconds, method="cold", pipelining=pipelining)
