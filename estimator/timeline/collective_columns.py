"""Cost one collective over the rings of many rows at once: `collectives`, as columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from estimator.network import network_of
from estimator.placed_columns import rates_by_ranks
from estimator.profile import CollectiveName, DeviceKind, MachineProfile
from estimator.timeline.collectives import (
    ERROR_PER_E,
    FORMULA_ERROR,
    NO_CORRECTIONS,
    RING_SHARE,
    Corrections,
    known_of,
    network_latency_s,
    rounds_of,
)
from estimator.timeline.overlaps import group_overlaps
from estimator.timeline.ring_columns import RingColumns, RingTable
from estimator.workload import Strategy

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Shape = TypeVar("Shape")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveColumns:
    """Seconds of one collective by size, row by row; see `collectives.CollectiveModel`.

    A row's correction is that of `reference`, a number in its `CollectiveTable`; `unknown` marks
    rows for which nothing says what the collective costs.
    """

    alpha_s: Array
    beta_s_per_byte: Array
    reference: Indices
    relative_error: Array
    unknown: NDArray[np.bool_]


class _Candidates(Generic[Shape]):
    """What rows choose from, by the shape of its group; a row's `pool` says which are its own.

    A pool is one profile's groups on one node (2 · profile) or over nodes (2 · profile + 1).
    """

    def __init__(self, found: Sequence[tuple[int, Shape]], pools: int) -> None:
        self.shapes = list(dict.fromkeys(shape for _, shape in found))
        self._numbers = np.full((len(self.shapes), pools), -1, dtype=np.intp)
        for number, (pool, shape) in enumerate(found):
            row = self.shapes.index(shape)
            if self._numbers[row, pool] < 0:
                self._numbers[row, pool] = number

    def nearest(self, pool: Indices, distance: Callable[[Shape], Array]) -> tuple[Indices, Array]:
        """(number of the first nearest candidate, or −1; its distance) of each row."""
        best = np.full(len(pool), math.inf)
        chosen = np.full(len(pool), -1, dtype=np.intp)
        for shape, numbers in zip(self.shapes, self._numbers, strict=True):
            number = numbers[pool]
            away = np.where(number >= 0, distance(shape), math.inf)
            # Among equals the first listed wins, whatever the order of the shapes.
            nearer = (away < best) | ((away == best) & (number < chosen))
            chosen = np.where(nearer, number, chosen)
            best = np.minimum(best, away)
        return chosen, best


class CollectiveTable:
    """What the profiles of some sites say of one collective, by the profile's number.

    Their devices are all of one kind, whose backend says how many rounds a collective takes.
    """

    def __init__(self, sites: RingTable, op: CollectiveName, kind: DeviceKind) -> None:
        self.op, self._kind = op, kind
        found: list[tuple[int, tuple[int, int]]] = []
        self._corrections: list[Corrections] = []
        errors, inner_latency, inner_rate, linked = [], [], [], []
        for number, profile in enumerate(sites.profiles):
            inner, references = known_of(profile, op, sites.cluster)
            linked.append(inner is not None)
            inner_latency.append(inner.latency_s if inner else 0.0)
            inner_rate.append(inner.bytes_per_s if inner else math.inf)
            for reference in references:
                cost = reference.cost
                found.append((2 * number + cost.spans_nodes, (cost.group_size, cost.nodes)))
                self._corrections.append(reference.corrections)
                errors.append(reference.relative_error)
        # The last reference stands for the formula, where nothing of the kind was measured.
        self._corrections.append(NO_CORRECTIONS)
        self._errors = np.array([*errors, FORMULA_ERROR])
        self._candidates = _Candidates(found, 2 * len(sites.profiles))
        self._linked = np.array(linked)
        self._inner_latency = np.array(inner_latency)
        self._inner_rate = np.array(inner_rate)

    def columns(self, rings: RingColumns) -> CollectiveColumns:
        """The collective's cost on each ring of at least two ranks."""
        reference, factor = self._candidates.nearest(
            rings.pool, lambda shape: _unlike_factor(shape, rings)
        )
        inside = rings.per_node > 1
        inner_latency = self._inner_latency[rings.profile]
        inner_rate = self._inner_rate[rings.profile]
        latency = np.where(inside, np.maximum(rings.latency_s, inner_latency), rings.latency_s)
        rate = np.where(inside, np.minimum(rings.bytes_per_s, inner_rate), rings.bytes_per_s)
        distance = np.where(reference < 0, 0.0, np.log(factor))
        return CollectiveColumns(
            alpha_s=rounds_of(self.op, rings.ranks, rings.nodes, self._kind) * latency,
            beta_s_per_byte=RING_SHARE[self.op](rings.ranks) / rate,
            reference=np.where(reference < 0, len(self._errors) - 1, reference),
            relative_error=self._errors[reference] + ERROR_PER_E * distance,
            unknown=(rings.nodes == 1) & ~self._linked[rings.profile],
        )

    def corrections(self, sizes_bytes: Array) -> Array:
        """Measured over formula, in an array (references, sizes)."""
        found = [corrections.at(sizes_bytes) for corrections in self._corrections]
        return np.array(found).reshape(len(found), len(sizes_bytes))

    def latency_ratios(self, sizes_bytes: Array) -> Array:
        """See `Corrections.latency_at`, in an array (references, sizes)."""
        found = [corrections.latency_at(sizes_bytes) for corrections in self._corrections]
        return np.array(found).reshape(len(found), len(sizes_bytes))


def _unlike_factor(shape: tuple[int, int], rings: RingColumns) -> Array:
    """See `collectives._unlike_factor`."""
    size, nodes = shape
    larger = np.maximum(rings.ranks, size) * np.maximum(rings.nodes, nodes)
    return np.asarray(larger / (np.minimum(rings.ranks, size) * np.minimum(rings.nodes, nodes)))


class ServerTable:
    """Parameter servers instead of a collective: `sharding.server_model`, as columns."""

    def __init__(self, sites: RingTable, strategy: Strategy) -> None:
        self._strategy = strategy
        # What workers of one node reach the servers over, which their ring does not cross.
        most = max([len(profile.devices) for profile in sites.profiles], default=0)
        self._nic = rates_by_ranks([network_of(profile) for profile in sites.profiles], most)
        self._latency = np.array([network_latency_s(profile) for profile in sites.profiles])

    def columns(self, rings: RingColumns) -> CollectiveColumns:
        """What a bucket costs on its way to the servers and back."""
        alone, rows = rings.nodes == 1, len(rings.ranks)
        own_rate = self._nic[rings.profile, np.where(alone, rings.per_node, 0)]
        node_rate = np.where(alone, own_rate, rings.bytes_per_s)
        latency = np.where(alone, self._latency[rings.profile], rings.latency_s)
        together = 1 if self._strategy.asynchronous else rings.ranks
        server_rate = self._strategy.servers * (self._strategy.server_bytes_per_s or node_rate)
        return CollectiveColumns(
            alpha_s=2 * latency,
            beta_s_per_byte=np.maximum(rings.per_node / node_rate, together / server_rate),
            reference=np.zeros(rows, dtype=np.intp),
            relative_error=np.full(rows, FORMULA_ERROR),
            unknown=np.isinf(node_rate),
        )

    def corrections(self, sizes_bytes: Array) -> Array:
        """None: there is one reference, the formula."""
        return np.ones((1, len(sizes_bytes)))

    def latency_ratios(self, sizes_bytes: Array) -> Array:
        """None, as with every formula."""
        return np.zeros((1, len(sizes_bytes)))


class Sizes:
    """Collectives of given sizes: each is a line times a correction, their weighted sum is too."""

    def __init__(
        self,
        table: CollectiveTable | ServerTable,
        sizes_bytes: Array,
        weights: Array | float = 1.0,
    ) -> None:
        some = sizes_bytes > 0
        weights = np.broadcast_to(weights, some.shape) * some
        corrections = table.corrections(np.where(some, sizes_bytes, 1.0)) * weights
        # For every reference and size, the factors of α and of β.
        self.factors = np.stack([corrections, corrections * sizes_bytes], axis=2)
        self._sums = self.factors.sum(axis=1)

    def times_s(self, columns: CollectiveColumns) -> Array:
        """Seconds of each row for all the sizes one after the other; nothing takes no time."""
        of_alpha, of_beta = self._sums[columns.reference].T
        return np.asarray(columns.alpha_s * of_alpha + columns.beta_s_per_byte * of_beta)

    def time_s(self, columns: CollectiveColumns, size: int) -> Array:
        """Seconds of each row for one of the sizes, by its number."""
        of_alpha, of_beta = self.factors[columns.reference, size].T
        return np.asarray(columns.alpha_s * of_alpha + columns.beta_s_per_byte * of_beta)


class OverlapTable:
    """How compute and all-reduces disturb each other; see `overlaps.overlap_of`."""

    def __init__(self, profiles: Sequence[MachineProfile], size_bytes: float) -> None:
        found = [
            (2 * number + across, group)
            for number, profile in enumerate(profiles)
            for across in (False, True)
            for group in group_overlaps(profile, across=across)
        ]
        groups = [group for _, group in found]
        sizes = [(pool, group.group_size) for pool, group in found]
        self._candidates = _Candidates(sizes, 2 * len(profiles))
        # The last value stands for rows of which nothing was measured: perfect overlap.
        self._exposed = np.array([group.exposed_ratio for group in groups] + [0.0])
        self._slowdown = np.array([group.slowdown_ratio for group in groups] + [1.0])
        self._local_s = np.array([group.local_s(size_bytes) for group in groups] + [math.inf])

    def columns(self, rings: RingColumns, reduce_s: Array) -> tuple[Array, Array]:
        """(exposed ratio, slowdown) of rows whose all-reduces take `reduce_s` as one."""
        nearest, _ = self._candidates.nearest(
            rings.pool, lambda size: np.abs(rings.ranks - size).astype(np.float64)
        )
        share = np.minimum(self._local_s[nearest] / reduce_s, 1.0)
        exposed = self._exposed[nearest] * share
        slowdown = 1.0 + np.maximum(self._slowdown[nearest] - 1.0, 0.0) * share
        return exposed, np.maximum(np.maximum(slowdown, exposed), 1.0)
