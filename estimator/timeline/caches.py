"""Tell how much of what an op touches has left the cache since it was last touched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from estimator.graph.memory import Storage, storages
from estimator.graph.ops import BoundGraph
from estimator.graph.workspace import workspace_bytes
from estimator.tensors import OpCall

# These work through copies of their own, of unknown size, in memory as cold as any new tensor's.
_UNSIZED_SCRATCH = ("aten._scaled_dot_product", "aten.mkldnn_rnn")


def cold_ratios(bound: BoundGraph, cache_bytes: float, *, threads: int = 1) -> NDArray[np.float64]:
    """For each op, the share (0–1) of the bytes it touches that must come from main memory.

    A least-recently-used cache of `cache_bytes`: an input is cold once the ops since its last use
    have touched more than the cache holds (Mattson et al. 1970, stack distance, approximated by
    the bytes touched). The memory that a new tensor gets was last used up to a step ago; so was
    that of the blocked copies that a convolution on `threads` threads makes.
    """
    graph = bound.graph
    if cache_bytes <= 0 or not graph.ops:
        return np.zeros(len(graph.ops))
    size, root, touched = _touches(bound, storages(graph))
    total = float(touched[-1])
    new_is_cold = _evicted(total, cache_bytes)
    last_touch: dict[int, float] = {}
    cold = np.zeros(len(graph.ops))
    for index, op in enumerate(graph.ops):
        if op.is_view:
            continue
        now = float(touched[index])
        moved = cold_bytes = 0.0
        read = {root[value] for value in op.inputs}
        for storage in read:
            # First use in the step: parameters, buffers and inputs were last used a step ago.
            distance = now - last_touch.get(storage, now - total)
            moved += size[storage]
            cold_bytes += size[storage] * _evicted(distance + size[storage], cache_bytes)
            last_touch[storage] = now
        for storage in {root[value] for value in op.outputs} - read:
            moved += size[storage]
            if storage not in last_touch:
                cold_bytes += size[storage] * new_is_cold
            last_touch[storage] = now
        scratch_bytes = workspace_bytes(bound.calls[index], threads=threads)
        moved += scratch_bytes
        cold_bytes += scratch_bytes * new_is_cold
        unsized = _has_unsized_scratch(bound.calls[index], graph.target)
        cold[index] = new_is_cold if unsized else cold_bytes / moved if moved else 0.0
    return cold


def _has_unsized_scratch(call: OpCall, target: str) -> bool:
    if call.target.startswith("aten.convolution"):
        transposed = any(argument is True for argument in call.arguments[:10])
        return transposed or target != "cpu"
    return call.target.startswith(_UNSIZED_SCRATCH)


def _evicted(distance_bytes: float, cache_bytes: float) -> float:
    """0 up to half the cache, 1 from one and a half on: neither LRU nor its size is exact."""
    return min(max(distance_bytes / cache_bytes - 0.5, 0.0), 1.0)


def _touches(
    bound: BoundGraph, found: Sequence[Storage]
) -> tuple[dict[int, float], list[int], NDArray[np.float64]]:
    """Bytes per storage, the storage of each value, bytes touched before each op (cumulative)."""
    root = [0] * len(bound.specs)
    for number, storage in enumerate(found):
        for value in storage.values:
            root[value] = number
    size: dict[int, float] = {}
    for index, spec in enumerate(bound.specs):
        size[root[index]] = max(size.get(root[index], 0.0), float(spec.storage_bytes))
    per_op = np.zeros(len(bound.graph.ops) + 1)
    for index, op in enumerate(bound.graph.ops):
        if not op.is_view:
            storages_touched = {root[value] for value in (*op.inputs, *op.outputs)}
            per_op[index + 1] = sum(size[storage] for storage in storages_touched)
    return size, root, np.cumsum(per_op)
