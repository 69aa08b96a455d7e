"""Answer many allocations at once: the closed form of `fastpath`, over rows instead of one plan.

Rows differ in the classes of their ranks and in their ring. The ready times of an allocation are
the largest of its classes' ready times, bucket by bucket. Bucket k takes (α + β · size_k) times a
correction of its own, so the backlog that the buckets from k on leave behind is linear in α, β and
1/drain: one small matrix product for all the rows that share their corrections.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimator.elementwise import expected_maximum
from estimator.graph.ops import OpGraph
from estimator.placed_columns import PlacedColumns, SiteTable
from estimator.timeline.ability import why_not_on
from estimator.timeline.class_table import ClassTable
from estimator.timeline.collective_columns import (
    CollectiveColumns,
    CollectiveTable,
    OverlapTable,
    Sizes,
)
from estimator.timeline.ring_columns import RingColumns, RingTable, largest
from estimator.timeline.sharding_columns import (
    ShardingTable,
    reduce_table,
    sharded_bytes,
    update_share,
)
from estimator.workload import Strategy

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

# Stands for a drain of nothing: any slack then clears the backlog, and no slack leaves all of it.
_NO_DRAIN = 1e-300
# Rows whose buckets are worked on at once, so that the arrays stay in a core's cache.
_ROWS_AT_ONCE = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """Calibration's factors, for all rows or for each; see `coefficients.Coefficients`."""

    compute_ratio: Array | float = 1.0
    update_ratio: Array | float = 1.0
    communication_ratio: Array | float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepColumns:
    """The parts of many steps (see `fastpath.StepParts`), and what their errors and memory are.

    Values named after a program's are those of the slowest class. `merging_error` is the relative
    error of the all-reduce, 0 for single ranks; `memory_ratio` the largest share of a device's
    memory in use; `model_peak_s` and `hardware_peak_s` the seconds that the flops of a micro-batch
    take at the device's peak. `unknown` marks rows over whose network nothing says what a
    collective that they need costs.
    """

    forward_s: Array
    backward_s: Array
    host_exposed_s: Array
    communication_exposed_s: Array
    straggler_s: Array
    update_s: Array
    copies_exposed_s: Array
    kernels_variance_s2: Array
    host_error: Array
    update_error: Array
    merging_error: Array
    memory_bytes: Array
    memory_ratio: Array
    model_peak_s: Array
    hardware_peak_s: Array
    unknown: NDArray[np.bool_]


class StepTables:
    """What the steps of one graph need of every site numbered so far.

    `runs` says of which sites the machine can run the graph's step.
    """

    def __init__(
        self, graph: OpGraph, table: SiteTable, strategy: Strategy, accumulation_steps: int
    ) -> None:
        self._rings = RingTable(table)
        self._classes = ClassTable(graph, table, strategy, accumulation_steps)
        self._graph, self._strategy = graph, strategy
        self._merging: _Merging | None = None
        able = [why_not_on(graph, site.profile) is None for site in table.sites]
        self.runs = np.array([*able, True])

    def columns(self, placed: PlacedColumns, batch: Indices | int, learnt: Learnt) -> StepColumns:
        """The steps of rows that can be placed; `batch` of all rows or of each, 0 as traced."""
        rings = self._rings.rings(placed)
        classes = self._classes.numbers(placed, batch)
        values = self._classes.values
        slowest, lane_s = _first_largest(classes, values["lane_s"][classes])
        copy_back_s, compute = values["copy_back_s"], learnt.compute_ratio
        after_s = copy_back_s[classes] * compute
        after_s = after_s + self._update_s(rings, classes) * learnt.update_ratio
        last, _ = _first_largest(classes, after_s)
        waiting_s, unknown, error = self._waiting(rings, classes, slowest, lane_s, learnt)
        memory_bytes, memory_ratio = self._memory(rings, classes)
        spread = np.where(rings.ranks > 1, largest(values["spread_ratio"], classes), 0.0)
        return StepColumns(
            forward_s=values["forward_s"][slowest] * compute,
            backward_s=values["backward_s"][slowest] * compute,
            host_exposed_s=values["host_s"][slowest] * compute,
            communication_exposed_s=waiting_s,
            straggler_s=lane_s * compute * spread * expected_maximum(rings.ranks),
            update_s=self._update_s(rings, last) * learnt.update_ratio,
            copies_exposed_s=values["copies_s"][slowest] * compute + copy_back_s[last] * compute,
            kernels_variance_s2=values["kernels_variance_s2"][slowest] * compute**2,
            host_error=values["host_error"][slowest],
            update_error=values["update_error"][slowest],
            merging_error=error,
            memory_bytes=memory_bytes,
            memory_ratio=memory_ratio,
            model_peak_s=values["model_peak_s"][slowest],
            hardware_peak_s=values["hardware_peak_s"][slowest],
            unknown=unknown,
        )

    def _update_s(self, rings: RingColumns, classes: Indices) -> Array:
        """Seconds of the update on each of some classes, as a rank of the row's ring does it."""
        values = self._classes.values
        launch_s, shared_s = values["update_launch_s"], values["update_shared_s"]
        share = update_share(self._strategy, self._classes, rings.ranks)
        if isinstance(share, float):
            return np.asarray((launch_s + shared_s * share)[classes])
        update_s = launch_s[classes] + shared_s[classes] * share
        return np.where(classes > 0, update_s, -math.inf)

    def _memory(self, rings: RingColumns, classes: Indices) -> tuple[Array, Array]:
        """(most bytes of a class, largest share of a device's memory in use) of each row."""
        values = self._classes.values
        if self._strategy.kind == "ddp":
            return largest(values["memory_bytes"], classes), largest(
                values["memory_ratio"], classes
            )
        held = sharded_bytes(self._classes, classes, rings.ranks)
        used = held / values["device_bytes"][classes]
        there = classes > 0
        most_bytes = np.where(there, held, -math.inf).max(axis=0)
        return most_bytes, np.where(there, used, -math.inf).max(axis=0)

    def _waiting(
        self,
        rings: RingColumns,
        classes: Indices,
        slowest: Indices,
        lane_s: Array,
        learnt: Learnt,
    ) -> tuple[Array, NDArray[np.bool_], Array]:
        """(exposed communication, whether its cost is unknown, its relative error) of each row."""
        several = rings.ranks > 1
        if not several.any():
            nothing = np.zeros(len(several))
            return nothing, np.zeros(len(several), dtype=bool), nothing
        if self._merging is None:
            self._merging = _Merging(self._graph, self._rings, self._classes, self._strategy)
        merging = self._merging
        reduce = merging.reduce.columns(rings)
        exposed, slowdown = merging.overlaps.columns(rings, merging.whole.times_s(reduce))
        drain = np.maximum(slowdown - exposed, _NO_DRAIN)
        total_s, left_s, after_s = merging.backlog(
            self._classes, classes, slowest, lane_s, drain, reduce, learnt
        )
        added_s, unknown = merging.added_s(rings, classes[0], learnt.communication_ratio)
        waiting_s = exposed * (total_s - left_s) + after_s + added_s
        return (
            np.where(several, waiting_s, 0.0),
            (reduce.unknown | unknown) & several,
            np.where(several, reduce.relative_error, 0.0),
        )


class _Merging:
    """What merging the gradients of a graph costs, by the profiles of the sites."""

    def __init__(
        self,
        graph: OpGraph,
        sites: RingTable,
        classes: ClassTable,
        strategy: Strategy,
    ) -> None:
        bucket_bytes = classes.bucket_bytes
        self.reduce = reduce_table(strategy, sites, graph)
        self.whole = Sizes(self.reduce, np.array([bucket_bytes.sum()]))
        self.overlaps = OverlapTable(sites.profiles, float(bucket_bytes.sum()))
        self._has_buffers = graph.buffer_bytes > 0
        self._broadcast = CollectiveTable(sites, "broadcast", graph.target)
        self._buffers = Sizes(self._broadcast, np.array([float(graph.buffer_bytes)]))
        self._sharding = ShardingTable(graph, sites, classes, strategy)
        factors = Sizes(self.reduce, bucket_bytes).factors
        latency_ratios = self.reduce.latency_ratios(bucket_bytes)[:, :, None]
        # For bucket k, the factors of α and of β in what the link has to do for k and all after
        # it, and in the part of the bucket's own time before that: (references, k, 2).
        sent = factors * (1.0 - latency_ratios)
        self._suffixes = np.cumsum(sent[:, ::-1], axis=1)[:, ::-1]
        self._latencies = factors * latency_ratios
        self._has_latency: list[bool] = [ratios.any() for ratios in latency_ratios]
        count = len(bucket_bytes)
        self._by_row = np.empty((2, _ROWS_AT_ONCE, count))
        self._by_bucket = np.empty((2, count, _ROWS_AT_ONCE))

    def added_s(
        self, rings: RingColumns, first: Indices, learnt: Array | float
    ) -> tuple[Array | float, NDArray[np.bool_] | bool]:
        """(seconds of all else that ranks wait for, whether that is unknown): see `sharding`.

        `first` are the first classes of the rows. DDP sends the buffers of rank 0 around; where
        nothing says what that takes, it takes nothing.
        """
        added_s, unknown = self._sharding.waiting_s(rings, first, learnt)
        if self._has_buffers:
            columns = self._broadcast.columns(rings)
            buffers_s = np.where(columns.unknown, 0.0, self._buffers.times_s(columns))
            added_s = added_s + buffers_s * learnt
        return added_s, unknown

    def backlog(
        self,
        table: ClassTable,
        classes: Indices,
        slowest: Indices,
        lane_s: Array,
        drain: Array,
        reduce: CollectiveColumns,
        learnt: Learnt,
    ) -> tuple[Array, Array, Array]:
        """(all to be sent, what of it is left when compute ends, how long it then takes): seconds.

        See `fastpath`.
        """
        total_s, left_s, after_s = np.zeros((3, len(lane_s)))
        if not self._suffixes.shape[1]:
            return total_s, left_s, after_s
        line = np.stack([reduce.alpha_s, reduce.beta_s_per_byte]) * learnt.communication_ratio
        compute_ratio = np.broadcast_to(learnt.compute_ratio, lane_s.shape)
        covered = np.ones(len(lane_s), dtype=np.bool_)
        for each in classes:
            covered &= table.covers[slowest, each]
        for code, rows in _alike(reduce.reference * 2 + covered):
            latest_s, other_s = self._by_row[:, : len(rows)]
            behind_s, merging_s = self._by_bucket[:, :, : len(rows)]
            reference, alone = divmod(code, 2)
            table.ready_s.take(slowest[rows], axis=0, out=latest_s, mode="clip")
            # Mostly the slowest class is behind the others with every bucket.
            for others in classes[:, rows] if not alone else ():
                table.ready_s.take(others, axis=0, out=other_s, mode="clip")
                np.maximum(latest_s, other_s, out=latest_s)
            latest_s -= lane_s[rows, None]
            np.multiply(latest_s.T, compute_ratio[rows], out=behind_s)
            if self._has_latency[reference]:
                behind_s += np.matmul(self._latencies[reference], line[:, rows], out=merging_s)
                idle_s = np.maximum(behind_s, 0.0)
                np.minimum(behind_s, 0.0, out=behind_s)
            behind_s /= drain[rows]
            behind_s += np.matmul(self._suffixes[reference], line[:, rows], out=merging_s)
            left_s[rows] = after_s[rows] = np.maximum(behind_s.max(axis=0), 0.0)
            if self._has_latency[reference]:
                behind_s += idle_s
                after_s[rows] = np.maximum(behind_s.max(axis=0), 0.0)
            total_s[rows] = merging_s[0]
        return total_s, left_s, after_s


def _alike(code: Indices) -> Iterator[tuple[int, Indices]]:
    """(code, some rows that have it), together all rows."""
    order = np.argsort(code.astype(np.int16), kind="stable")
    in_order = code[order]
    ends = np.append(np.flatnonzero(np.diff(in_order)) + 1, len(order)).tolist()
    first = 0
    for end in ends:
        for start in range(first, end, _ROWS_AT_ONCE):
            yield int(in_order[first]), order[start : min(start + _ROWS_AT_ONCE, end)]
        first = end


def _first_largest(index: Indices, keys: Array) -> tuple[Indices, Array]:
    """(index of the first largest key, that key) of each column."""
    largest_key, chosen = keys[0].copy(), index[0]
    for each, key in zip(index[1:], keys[1:], strict=True):
        larger = key > largest_key
        chosen = np.where(larger, each, chosen)
        np.maximum(largest_key, key, out=largest_key)
    return chosen, largest_key
