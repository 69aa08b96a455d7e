"""Cost what strategies add to the steps of many rows: `sharding`, as columns."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from estimator.graph.ops import OpGraph
from estimator.graph.sharded_memory import held_bytes
from estimator.profile import CollectiveName
from estimator.timeline.class_table import ClassTable
from estimator.timeline.collective_columns import (
    CollectiveColumns,
    CollectiveTable,
    ServerTable,
    Sizes,
)
from estimator.timeline.ring_columns import RingColumns, RingTable
from estimator.timeline.sharding import REDUCE_OPS, last_share
from estimator.workload import Strategy

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Indices = NDArray[np.intp]


def update_share(strategy: Strategy, classes: ClassTable, ranks: Indices) -> Array | float:
    """The part of an update that one rank does or waits for, its launch apart."""
    if strategy.kind == "ddp":
        return 1.0
    share = 1.0 / np.maximum(ranks, 1)
    if strategy.kind == "ps":
        sizes = classes.bucket_bytes
        share = np.full(len(ranks), last_share(strategy, sizes[-1:].sum(), sizes.sum()))
    return np.where(ranks > 1, share, 1.0)


def reduce_table(
    strategy: Strategy, sites: RingTable, graph: OpGraph
) -> CollectiveTable | ServerTable:
    """What merges one bucket of gradients; see `sharding.reduce_model`."""
    if strategy.kind == "ps":
        return ServerTable(sites, strategy)
    return CollectiveTable(sites, REDUCE_OPS[strategy.kind], graph.target)


class ShardingTable:
    """What a strategy adds to the exposed communication of rows; see `sharding.sharding_of`."""

    def __init__(
        self,
        graph: OpGraph,
        sites: RingTable,
        classes: ClassTable,
        strategy: Strategy,
    ) -> None:
        self._classes = classes
        sharding = strategy.kind == "fsdp" and len(classes.unit_bytes) > 0
        # Whether units are gathered while others compute; else all is exposed.
        self._prefetching = sharding and graph.target == "cuda"
        self._parts: list[tuple[CollectiveTable | ServerTable, Sizes]] = []

        def add(table: CollectiveTable | ServerTable, sizes: Array, weights: Array | float) -> None:
            self._parts.append((table, Sizes(table, sizes, weights)))

        def table(op: CollectiveName) -> CollectiveTable:
            return CollectiveTable(sites, op, graph.target)

        if strategy.kind == "zero1":
            trained = [p.spec.nbytes for p in graph.parameters if p.gradient is not None]
            add(table("broadcast"), np.array(trained, dtype=np.float64), 1.0)
        elif strategy.kind == "zero2":
            add(table("all_gather"), classes.bucket_bytes, 1.0)
        elif strategy.kind == "ps":
            add(reduce_table(strategy, sites, graph), classes.bucket_bytes[-1:], 1.0)
        elif sharding:
            # The first unit is gathered once, all others in either phase.
            twice = np.where(np.arange(len(classes.unit_bytes)) > 0, 2.0, 1.0)
            gatherings = 1.0 if self._prefetching else twice
            add(table("all_gather"), classes.unit_bytes, gatherings)
            add(table("reduce_scatter"), classes.unit_bytes, 1.0)

    def waiting_s(
        self, rings: RingColumns, first: Indices, learnt: Array | float
    ) -> tuple[Array | float, Flags | bool]:
        """(seconds added, whether their cost is unknown) by the ring and the first class of rows.

        `learnt` scales the collectives.
        """
        found = [(table.columns(rings), sizes) for table, sizes in self._parts]
        unknown: Flags | bool = False
        for columns, _ in found:
            unknown = unknown | columns.unknown
        if self._prefetching:
            (gather, gathered), (scatter, scattered) = found
            units_s = self._classes.units_s[:, :, first]
            return _prefetching_s(units_s, gather, gathered, scatter, scattered, learnt), unknown
        total: Array | float = 0.0
        for columns, sizes in found:
            total = total + sizes.times_s(columns) * learnt
        return total, unknown


def _prefetching_s(
    units_s: Array,
    gather: CollectiveColumns,
    gathered: Sizes,
    scatter: CollectiveColumns,
    scattered: Sizes,
    learnt: Array | float,
) -> Array:
    """`sharding.prefetching_s` of every row; `units_s` is (forward or backward, units, rows)."""
    forward_s, backward_s = units_s
    count = len(forward_s)
    compute = network = started = gathered.time_s(gather, 0) * learnt
    for index in range(count):
        if index:
            network = np.maximum(network, started) + gathered.time_s(gather, index) * learnt
            compute = np.maximum(compute, network)
        started = compute
        compute = compute + forward_s[index]
    ready = compute
    for index in reversed(range(count)):
        if index == count - 1 and index:
            ready = np.maximum(network, compute) + gathered.time_s(gather, index) * learnt
            network = ready
        if index:
            compute = np.maximum(compute, ready)
        started = compute
        if index > 1:
            ready = np.maximum(network, started) + gathered.time_s(gather, index - 1) * learnt
            network = ready
        compute = compute + backward_s[index]
        network = np.maximum(network, compute) + scattered.time_s(scatter, index) * learnt
    return np.asarray(np.maximum(compute, network) - forward_s.sum(0) - backward_s.sum(0))


def sharded_bytes(classes: ClassTable, index: Indices, ranks: Indices) -> Array:
    """Peak memory of classes by their number on `ranks` ranks; see `ShardedMemory.total_bytes`."""
    levels = [
        held_bytes(fixed[index], sharded[index], np.maximum(ranks, 1))
        for fixed, sharded in classes.memory_lines
    ]
    return np.asarray(np.maximum.reduce(levels), dtype=np.float64)
