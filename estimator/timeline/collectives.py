"""Cost one collective over any group of devices: measured points, carried over by formulas.

A formula gives α·rounds + bytes over the busiest link. Where the profile has measured the same
collective over some group, the ratio of what was measured to what the formula says of that group,
size by size, corrects the formula for every other group.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.placement import nic_of
from estimator.profile import CollectiveCost, CollectiveName, DeviceKind, MachineProfile
from estimator.timeline.nccl import nccl_rounds
from estimator.timeline.rings import Ring, ring_between
from estimator.topology import Cluster
from estimator.typical import achieved_bytes_per_s, is_known_by_datasheet

Array = NDArray[np.float64]

# Bytes that cross the busiest link of a ring, as a share of the buffer, for n ranks; rounds of
# latency (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication in MPICH, 2005).
# gloo takes the ring for an all-reduce of any size (gloo/allreduce.cc, UNSPECIFIED → RING).
# Each holds for one n and for an array of them.
RING_SHARE: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "all_to_all": lambda n: (n - 1) / n,
}
RING_ROUNDS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "broadcast": lambda n: np.frexp(n - 1)[1],  # the logarithm to base 2, rounded up
    "all_to_all": lambda n: n - 1,
}
# What a formula misses by where nothing of its kind was measured, and per factor of e between the
# measured group and the one asked for.
FORMULA_ERROR = 0.3
# Points on a line beyond the largest measured, each four times the one before.
_FURTHER_POINTS = 5
ERROR_PER_E = 0.2
# Links that carry collectives between devices of a node.
_DEVICE_LINKS = ("d2d", "nvlink", "infinity_fabric", "pcie")


@dataclass(frozen=True, slots=True, eq=False)
class Corrections:
    """Measured over formula at the logarithms of the sizes that were measured, sizes rising.

    `line` is the (α, β) of the formula for the measured group. `latency_s` is the part of the
    measured times that passes beside the collective before, as far as that is not over half.
    """

    log_sizes: Array
    log_ratios: Array
    line: tuple[float, float] = (1.0, 0.0)
    latency_s: float = 0.0

    def at(self, sizes_bytes: Array) -> Array:
        """Interpolated on logarithms, constant beyond both ends."""
        logs = np.interp(np.log(sizes_bytes), self.log_sizes, self.log_ratios)
        return np.asarray(np.exp(logs))

    def latency_at(self, sizes_bytes: Array) -> Array:
        """The parts of the times of some sizes that pass beside the collective before."""
        alpha_s, beta = self.line
        measured_s = (alpha_s + beta * sizes_bytes) * self.at(sizes_bytes)
        return np.asarray(np.minimum(self.latency_s / measured_s, 0.5))


NO_CORRECTIONS = Corrections(np.zeros(1), np.zeros(1))


@dataclass(frozen=True, slots=True)
class CollectiveModel:
    """Seconds of one collective by size: a line, times a correction that depends on the size."""

    op: CollectiveName
    alpha_s: float
    beta_s_per_byte: float
    corrections: Corrections
    source: str
    relative_error: float

    def times_s(self, sizes_bytes: Array) -> Array:
        """Seconds for buffers of these sizes (positive bytes)."""
        lines_s = self.alpha_s + self.beta_s_per_byte * sizes_bytes
        return np.asarray(lines_s * self.corrections.at(sizes_bytes))

    def time_s(self, size_bytes: float) -> float:
        """Seconds for a buffer of `size_bytes` bytes; 0 for none."""
        return float(self.times_s(np.array([size_bytes]))[0]) if size_bytes > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Reference:
    """What one measured group says of a collective: how far the formula is off at each size."""

    cost: CollectiveCost
    corrections: Corrections
    relative_error: float


def monotone(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Measured points sorted by size, each lowered to at most the time of the larger ones.

    What disturbs a measurement makes it longer, and a larger message that took less shows it.
    """
    result: list[tuple[float, float]] = []
    for size, seconds in sorted(points, reverse=True):
        if size > 0:
            result.append((size, min(seconds, result[-1][1]) if result else seconds))
    return tuple(reversed(result))


def collective_model(
    profile: MachineProfile, op: CollectiveName, ring: Ring
) -> CollectiveModel | None:
    """The cost of `op` over the ranks of `ring`, by what `profile` has measured.

    None where the profile has no such collective and no network to derive it from.
    """
    if ring.ranks <= 1:
        return CollectiveModel(op, 0.0, 0.0, NO_CORRECTIONS, "none needed", 0.0)
    links, references = known_of(profile, op, ring.cluster)
    if links is None and ring.nodes == 1:
        return None
    alpha_s, beta = line(op, ring, links, profile.kind)
    # Groups on one node and groups across nodes do not stand in for each other.
    alike = [r for r in references if r.cost.spans_nodes == (ring.nodes > 1)]
    if not alike:
        source = "datasheet" if is_known_by_datasheet(profile) else "fitted"
        return CollectiveModel(op, alpha_s, beta, NO_CORRECTIONS, source, FORMULA_ERROR)
    factor, reference = min(
        ((_unlike_factor(r, ring), r) for r in alike), key=lambda candidate: candidate[0]
    )
    return CollectiveModel(
        op,
        alpha_s,
        beta,
        reference.corrections,
        reference.cost.provenance.source if factor == 1.0 else "fitted",
        reference.relative_error + ERROR_PER_E * math.log(factor),
    )


def _unlike_factor(reference: Reference, ring: Ring) -> float:
    """By what factor the ranks and the nodes of two groups differ, multiplied; 1 if alike."""
    ranks, nodes = reference.cost.group_size, reference.cost.nodes
    larger = max(ranks, ring.ranks) * max(nodes, ring.nodes)
    return larger / (min(ranks, ring.ranks) * min(nodes, ring.nodes))


@dataclass(frozen=True, slots=True)
class InnerLinks:
    """One hop of a ring within a node: its latency and rate."""

    latency_s: float
    bytes_per_s: float


def line(
    op: CollectiveName, ring: Ring, inner: InnerLinks | None, kind: DeviceKind
) -> tuple[float, float]:
    """(α, β) of a ring: seconds = α + β · bytes. The slowest hop sets the pace of every round."""
    latency_s, rate = ring.latency_s, ring.bytes_per_s
    if inner is not None and ring.per_node > 1:
        latency_s, rate = max(latency_s, inner.latency_s), min(rate, inner.bytes_per_s)
    rounds = rounds_of(op, ring.ranks, ring.nodes, kind)
    return float(rounds * latency_s), float(RING_SHARE[op](ring.ranks) / rate)


def rounds_of(op: CollectiveName, ranks: Any, nodes: Any, kind: DeviceKind) -> Any:
    """Rounds of latency of one group or of an array: gloo's (ring) on CPUs, NCCL's on GPUs."""
    return nccl_rounds(op, ranks, nodes) if kind == "cuda" else RING_ROUNDS[op](ranks)


_Known = tuple[InnerLinks | None, tuple[Reference, ...]]
# Beside what is known stand the profile and the cluster of the key, so that their ids stay theirs.
_of_profile: OrderedDict[tuple[int, str, int], tuple[_Known, MachineProfile, Cluster | None]] = (
    OrderedDict()
)


def known_of(profile: MachineProfile, op: CollectiveName, cluster: Cluster | None = None) -> _Known:
    """What a profile says of one collective, worked out once for the last profiles used.

    Groups measured on nodes of `cluster` are seen with its links.
    """
    key = (id(profile), op, id(cluster))
    found = _of_profile.get(key)
    if found is None:
        costs = [cost for cost in profile.collectives if cost.op == op and cost.points]
        inner = _inner_links(costs, profile)
        references = tuple(_reference(profile, cost, inner, cluster) for cost in costs)
        found = _of_profile[key] = ((inner, references), profile, cluster)
        while len(_of_profile) > 64:
            _of_profile.popitem(last=False)
    return found[0]


def _inner_links(costs: Sequence[CollectiveCost], profile: MachineProfile) -> InnerLinks | None:
    """Hops within a node, from the smallest measured group of one node, else from a d2d link."""
    local = [cost for cost in costs if not cost.spans_nodes and cost.group_size > 1]
    if local:
        cost = min(local, key=lambda item: item.group_size)
        return InnerLinks(
            latency_s=cost.latency_s / float(rounds_of(cost.op, cost.group_size, 1, profile.kind)),
            bytes_per_s=cost.bandwidth_bytes_per_s * RING_SHARE[cost.op](cost.group_size),
        )
    direct = [link for link in profile.links if link.kind in _DEVICE_LINKS]
    if not direct:
        return None
    best = max(direct, key=achieved_bytes_per_s)
    return InnerLinks(best.latency_s, achieved_bytes_per_s(best))


def _reference(
    profile: MachineProfile,
    cost: CollectiveCost,
    inner: InnerLinks | None,
    cluster: Cluster | None,
) -> Reference:
    """Measured over formula, size by size; the formula sees the links as the profile has them."""
    nic = nic_of(profile, math.ceil(cost.group_size / cost.nodes))
    ring = ring_between(cost, network_latency_s(profile), nic, profile, cluster)
    alpha_s, beta = line(cost.op, ring, inner, profile.kind)
    measured_sizes, measured_s = np.array(monotone(cost.points)).T
    sizes, seconds = _extended(measured_sizes, measured_s, beta)
    corrections = Corrections(
        np.log(sizes),
        np.log(seconds / (alpha_s + beta * sizes)),
        line=(alpha_s, beta),
        latency_s=_latency_s(cost, profile.kind),
    )
    return Reference(cost, corrections, cost.provenance.relative_error or 0.1)


def _latency_s(cost: CollectiveCost, kind: DeviceKind) -> float:
    """How long of a small collective the link waits for the ranks and can serve another one.

    Two threads of gloo run a collective each (ProcessGroupGloo.hpp), so one is sent while the
    other waits: two at once then take less than twice as long. NCCL runs one at a time.
    """
    if kind == "cuda" or not cost.pair_ratio:
        return 0.0
    size, ratio = min(cost.pair_ratio)
    sizes, seconds = np.array(monotone(cost.points)).T
    return float(max(2.0 - ratio, 0.0) * np.interp(size, sizes, seconds))


def _extended(sizes: Array, seconds: Array, beta: float) -> tuple[Array, Array]:
    """Points with some beyond the largest, on a line: a ratio to the formula would not hold there.

    A formula that is off in its latency is off by ever less as sizes rise. The line's slope is
    that of the points, as far as the largest of them is more than its latency, else the formula's.
    """
    first_s, last_s = seconds[0], seconds[-1]
    trust = max(0.0, 1.0 - 2.0 * first_s / last_s)
    measured = (last_s - first_s) / max(sizes[-1] - sizes[0], 1.0)
    slope = trust * measured + (1.0 - trust) * beta
    further = sizes[-1] * 4.0 ** np.arange(1, _FURTHER_POINTS + 1)
    line_s = last_s + slope * (further - sizes[-1])
    return np.append(sizes, further), np.append(seconds, line_s)


def network_latency_s(profile: MachineProfile) -> float:
    """One-way seconds between neighbouring nodes: the nearest reach measured; 0 if unknown."""
    return min((link.latency_s for link in profile.network if link.streams == 1), default=0.0)
