"""Cost one collective over one group of devices, from measured points or from link rates."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from estimator.profile import CollectiveCost, CollectiveName, MachineProfile


@dataclass(frozen=True, slots=True)
class CollectiveModel:
    """Seconds of one collective by size, with where it comes from and how wrong it may be."""

    op: CollectiveName
    group_size: int
    points: tuple[tuple[float, float], ...]
    latency_s: float
    bandwidth_bytes_per_s: float
    source: str
    relative_error: float

    def time_s(self, size_bytes: float) -> float:
        """Log–log interpolation between measured sizes, the fitted rate beyond the largest."""
        if size_bytes <= 0:
            return 0.0
        if not self.points:
            return self.latency_s + size_bytes / self.bandwidth_bytes_per_s
        return _interpolate(self.points, size_bytes)


def _interpolate(points: Sequence[tuple[float, float]], size: float) -> float:
    sizes = [point[0] for point in points]
    if size <= sizes[0] or len(points) == 1:
        return points[0][1]
    index = min(bisect_right(sizes, size), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    slope = math.log(y1 / y0) / math.log(x1 / x0)
    if size > sizes[-1]:
        slope = min(max(slope, 0.0), 1.0) if slope < 0.5 else 1.0
        x0, y0 = x1, y1
    return y0 * math.exp(slope * math.log(size / x0))


def monotone(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Measured points sorted by size, each raised to at least the time of the smaller ones."""
    result: list[tuple[float, float]] = []
    for size, seconds in sorted(points):
        if size <= 0:
            continue
        floor = result[-1][1] if result else 0.0
        result.append((size, max(seconds, floor)))
    return tuple(result)


# Bytes that cross the busiest link of a ring, as a share of the buffer, for n ranks; rounds of
# latency (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication in MPICH, 2005).
_RING_SHARE: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "all_to_all": lambda n: (n - 1) / n,
}
_RING_ROUNDS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "broadcast": lambda n: math.ceil(math.log2(n)),
    "all_to_all": lambda n: n - 1,
}


def collective_model(
    profile: MachineProfile, op: CollectiveName, group_size: int
) -> CollectiveModel | None:
    """The cost of `op` over `group_size` devices of one node of `profile`.

    A measured group of that size wins; else the nearest measured group size is scaled by the
    ring's share of bytes and rounds. None where the profile has no such collective.
    """
    if group_size <= 1:
        return CollectiveModel(op, group_size, (), 0.0, math.inf, "none needed", 0.0)
    measured = [cost for cost in profile.collectives if cost.op == op and not cost.spans_nodes]
    if not measured:
        return None
    nearest = min(measured, key=lambda cost: abs(math.log(cost.group_size / group_size)))
    error = nearest.provenance.relative_error or 0.1
    if nearest.group_size == group_size:
        return CollectiveModel(
            op,
            group_size,
            monotone(nearest.points),
            nearest.latency_s,
            nearest.bandwidth_bytes_per_s,
            nearest.provenance.source,
            error,
        )
    return _scaled(nearest, group_size, error)


def _scaled(measured: CollectiveCost, group_size: int, error: float) -> CollectiveModel:
    share, rounds = _RING_SHARE[measured.op], _RING_ROUNDS[measured.op]
    bytes_ratio = share(group_size) / share(measured.group_size)
    rounds_ratio = rounds(group_size) / rounds(measured.group_size)
    points = tuple(
        (
            size,
            measured.latency_s * rounds_ratio
            + max(seconds - measured.latency_s, 0.1 * seconds) * bytes_ratio,
        )
        for size, seconds in measured.points
    )
    return CollectiveModel(
        measured.op,
        group_size,
        monotone(points),
        measured.latency_s * rounds_ratio,
        measured.bandwidth_bytes_per_s / bytes_ratio,
        "fitted",
        error + 0.2 * abs(math.log(group_size / measured.group_size)),
    )
