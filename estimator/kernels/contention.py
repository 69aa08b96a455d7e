"""Say what slows a call beyond its own work: cold caches, and devices busy beside it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

import numpy as np

from estimator.elementwise import Array, Flags, Indices
from estimator.graph.ir.op_graph import BoundGraph
from estimator.graph.ir.structure import GraphStructure, Touches
from estimator.graph.memory.sizes import workspace_bytes
from estimator.machines.profile import MachineProfile, MemoryCost
from estimator.tensors import OpCall

# These work through copies of their own, of unknown size, in memory as cold as any new tensor's.
_UNSIZED_SCRATCH = ("aten._scaled_dot_product", "aten.mkldnn_rnn")


class Eviction(NamedTuple):
    """Shares (0 to 1) of what was touched that have left the caches, by reuse distance in bytes."""

    distances: tuple[float, ...]
    ratios: tuple[float, ...]

    @classmethod
    def of_size(cls, cache_bytes: float) -> Self:
        """0 up to half the cache, 1 from one and a half on: neither LRU nor its size is exact.

        Nothing leaves a cache of no known size.
        """
        if cache_bytes <= 0:
            return cls((0.0,), (0.0,))
        return cls((0.5 * cache_bytes, 1.5 * cache_bytes), (0.0, 1.0))

    @classmethod
    def measured(cls, memory: MemoryCost) -> Self | None:
        """By what reads cost after so many other bytes; None where that was not measured.

        Several levels of cache, what neighbours leave of a shared one, and the page tables that a
        TLB does not hold are all in it.
        """
        if not memory.reuse_points:
            return None
        distances, ratios = zip(*memory.reuse_points, strict=True)
        return cls((0.0, *distances), (0.0, *ratios))

    def at(self, distance_bytes: float | Array) -> Array:
        """The share that has left after so many other bytes were touched."""
        return np.asarray(np.interp(distance_bytes, self.distances, self.ratios))

    def beyond_repeated(self, cold: Array, moved_bytes: Array) -> Array:
        """`cold` shares of what ops move, from 0 where it is that of an op repeated at once to 1.

        Such an op evicts a part of its own tensors: that is in its time with warm caches.
        """
        repeated = self.at(moved_bytes)
        more = np.clip(cold - repeated, 0.0, None)
        return np.divide(more, 1 - repeated, out=cold.copy(), where=repeated < 1)


def cold_ratios(
    bound: BoundGraph,
    eviction: Eviction,
    *,
    threads: int = 1,
    structure: GraphStructure | None = None,
    blocks: Indices | None = None,
) -> Array:
    """For each op, the share (0–1) of the bytes it touches that must come from main memory.

    How much of an input is depends on what the ops since its last use have touched (Mattson et al.
    1970, stack distance, approximated by the bytes touched). The memory that a new tensor gets was
    last used up to a step ago; so was that of the blocked copies that a convolution on `threads`
    threads makes. `structure` is that of the graph where it is at hand. With `blocks`, the block of
    each op, the shares are at most those in a graph of any of the blocks: what another block
    touches too is warm, and only the ops of the same block stand between.
    """
    graph = bound.graph
    if not graph.ops:
        return np.zeros(0)
    known = structure or GraphStructure.of(graph)
    touches, ops = known.touches, len(graph.ops)
    size = known.storage_bytes(bound).astype(np.float64)[touches.storage]
    per_op = np.bincount(touches.op, weights=size, minlength=ops)
    owners, own_size = np.zeros(ops, dtype=np.intp), size
    if blocks is not None:
        is_shared = _touched_by_several(touches, blocks)
        owners, own_size = blocks, np.where(is_shared, 0.0, size)
    own: Array = np.bincount(touches.op, weights=own_size, minlength=ops).astype(np.float64)
    total = np.bincount(owners, weights=own)[owners]
    new_is_cold = eviction.at(total.astype(np.float64))
    # First use in the step: parameters, buffers and inputs were last used a step ago.
    is_first = touches.previous < 0
    before = _before(own, owners)
    between = before[touches.op] - before[touches.previous]
    distance = np.where(is_first, total[touches.op], between)
    written_cold = np.where(is_first, new_is_cold[touches.op], 0.0)
    is_cold = np.where(touches.is_read, eviction.at(distance + size), written_cold)
    calls = known.distinct_calls(bound)
    scratch = np.array([float(workspace_bytes(call, threads=threads)) for call in calls])
    scratch_bytes = np.where(known.columns.is_view, 0.0, scratch[known.columns.call_of])
    moved = per_op + scratch_bytes
    touched_cold = np.bincount(touches.op, weights=size * is_cold, minlength=ops)
    cold_bytes = touched_cold + scratch_bytes * new_is_cold
    ratios = np.divide(cold_bytes, moved, out=np.zeros(ops), where=moved > 0)
    if blocks is not None:
        ratios[touches.op[is_shared]] = 0.0
    unsized = np.array([_has_unsized_scratch(call, graph.target) for call in calls])
    return np.where(unsized[known.columns.call_of] & ~known.columns.is_view, new_is_cold, ratios)


def _before(per_op: Array, blocks: Indices) -> Array:
    """Bytes that ops of its block touch before each op, but for a sum of the block's own."""
    order = np.argsort(blocks, kind="stable")
    before = np.zeros(len(per_op))
    before[order] = np.concatenate([np.zeros(1), np.cumsum(per_op[order])[:-1]])
    return before


def _touched_by_several(touches: Touches, blocks: Indices) -> Flags:
    """For each touch whether ops of several blocks touch the same."""
    owners = blocks[touches.op]
    count = int(touches.storage.max(initial=-1)) + 1
    first, last = np.full(count, len(blocks)), np.full(count, -1)
    np.minimum.at(first, touches.storage, owners)
    np.maximum.at(last, touches.storage, owners)
    return np.asarray((first != last)[touches.storage])


def _has_unsized_scratch(call: OpCall, target: str) -> bool:
    if call.target.startswith("aten.convolution"):
        transposed = any(argument is True for argument in call.arguments[:10])
        return transposed or target != "cpu"
    return call.target.startswith(_UNSIZED_SCRATCH)


class SlowdownCurve(NamedTuple):
    """Seconds busy over seconds alone, by the bytes that work moves; 1 where nothing is known."""

    log_bytes: tuple[float, ...]
    ratios: tuple[float, ...]

    def at(self, moved_bytes: Any) -> Any:
        """The ratio for a number of bytes, or for each of an array."""
        if not self.ratios:
            return 1.0
        return np.interp(np.log(np.maximum(moved_bytes, 1.0)), self.log_bytes, self.ratios)

    def beyond(self, cached_bytes: float) -> SlowdownCurve:
        """The same for work on memory: what stays in a cache of that size does not wait for it."""
        if not self.ratios or not cached_bytes or math.log(cached_bytes) >= self.log_bytes[0]:
            return self
        return SlowdownCurve((math.log(cached_bytes), *self.log_bytes), (1.0, *self.ratios))


def slowdown_curve(profile: MachineProfile, bound: str, devices_busy: int) -> SlowdownCurve:
    """What was measured of work bound by `bound` with the nearest number of busy devices.

    One busy device is slowed only where neighbours outside the job were measured.
    """
    measured = [
        item
        for item in profile.contentions
        if item.bound == bound and item.points and (item.devices_busy == 1 or devices_busy > 1)
    ]
    if not measured:
        return SlowdownCurve((), ())
    nearest = min(measured, key=lambda item: abs(item.devices_busy - devices_busy))
    from scipy.optimize import isotonic_regression

    sizes, ratios = zip(*sorted(nearest.points))
    # More bytes share more of what is shared: what falls with size is noise of the measurement.
    rising = np.maximum(isotonic_regression(ratios).x, 1.0)
    return SlowdownCurve(tuple(math.log(max(size, 1.0)) for size in sizes), tuple(rising.tolist()))


def slowdown_ratio(
    profile: MachineProfile, bound: str, devices_busy: int, moved_bytes: float
) -> float:
    """How much slower work bound by `bound` runs with `devices_busy` devices busy."""
    return float(slowdown_curve(profile, bound, devices_busy).at(moved_bytes))
