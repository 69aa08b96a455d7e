"""Group gradients into the buckets in which DDP reduces them.

Source: torch/csrc/distributed/c10d/reducer.cpp, `compute_bucket_assignment_by_size` and
`Reducer::rebuild_buckets`: after the first step buckets follow the order in which gradients became
ready, one chain of buckets for each dtype, each closed once its size reaches the cap; the first
bucket of a chain has a cap of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from estimator.graph.op_graph import OpGraph
from estimator.workload import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that one all-reduce carries; ready once op `ready_after` has run."""

    size_bytes: int
    tensors: int
    ready_after: int


def gradient_buckets(
    graph: OpGraph, strategy: Strategy, *, tensor_dtype: str | None = None
) -> tuple[Bucket, ...]:
    """The buckets of a graph, in the order in which DDP launches them."""
    last_op = len(graph.ops) - 1
    closed: list[Bucket] = []
    open_buckets: dict[str, Bucket] = {}
    first_done: set[str] = set()
    for parameter in graph.parameters:
        if parameter.is_expert:
            continue
        dtype = tensor_dtype or parameter.spec.dtype
        ready = last_op if parameter.ready_after is None else parameter.ready_after
        grown = open_buckets.pop(dtype, Bucket(size_bytes=0, tensors=0, ready_after=-1))
        grown = Bucket(
            size_bytes=grown.size_bytes + parameter.spec.nbytes,
            tensors=grown.tensors + 1,
            ready_after=max(grown.ready_after, ready),
        )
        cap = strategy.bucket_cap_bytes if dtype in first_done else strategy.first_cap_bytes
        if not strategy.bucketed or grown.size_bytes >= cap:
            closed.append(grown)
            first_done.add(dtype)
        else:
            open_buckets[dtype] = grown
    closed.extend(open_buckets.values())
    # The reducer launches bucket k only after every bucket before it is ready.
    launched, ready = [], -1
    for bucket in closed:
        ready = max(ready, bucket.ready_after)
        launched.append(
            Bucket(size_bytes=bucket.size_bytes, tensors=bucket.tensors, ready_after=ready)
        )
    return tuple(launched)
