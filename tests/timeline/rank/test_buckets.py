"""DDP's buckets: caps, order, dtypes."""

from __future__ import annotations

from estimator.graph.ir.op_graph import BoundGraph, OpGraph
from estimator.graph.ir.ops import Parameter
from estimator.tensors import TensorSpec
from estimator.timeline.strategies.ddp import gradient_buckets
from estimator.units import MIB
from estimator.workload.strategies import DDP, Strategy


def _bound(*sizes_mib: float, dtypes: tuple[str, ...] = ()) -> BoundGraph:
    """A graph of parameters alone; gradient k is ready after op k."""
    parameters = tuple(
        Parameter(
            name=f"p{number}",
            spec=TensorSpec((round(size * MIB) // 4,), dtypes[number] if dtypes else "float32"),
            gradient=number,
            ready_after=number,
        )
        for number, size in enumerate(sizes_mib)
    )
    graph = OpGraph(
        name="g",
        target="cpu",
        precision="fp32",
        optimizer="sgd",
        batch=1,
        other_batch=None,
        ops=(),
        values=(),
        parameters=parameters,
    )
    return BoundGraph(graph=graph, batch=1, calls=(), specs=())


def test_the_first_bucket_closes_at_one_mebibyte_and_later_ones_at_twenty_five() -> None:
    buckets = gradient_buckets(_bound(0.5, 0.75, 20, 4, 2, 7).graph, DDP())
    # 0.5 + 0.75 reaches 1 MiB; 20 + 4 is short of 25, + 2 reaches it; 7 is left over.
    assert [bucket.size_bytes / MIB for bucket in buckets] == [1.25, 26, 7]
    assert [bucket.ready_after for bucket in buckets] == [1, 4, 5]
    assert [bucket.tensors for bucket in buckets] == [2, 3, 1]


def test_an_explicit_cap_applies_to_the_first_bucket_too() -> None:
    buckets = gradient_buckets(_bound(2, 2, 2, 2).graph, Strategy.parse("ddp:bucket=4MiB"))
    assert [bucket.size_bytes / MIB for bucket in buckets] == [4, 4]


def test_unbucketed_reduces_every_gradient_by_itself() -> None:
    buckets = gradient_buckets(_bound(1, 2, 3).graph, Strategy.parse("ddp:unbucketed"))
    assert [bucket.size_bytes / MIB for bucket in buckets] == [1, 2, 3]


def test_gradients_of_unlike_dtypes_never_share_a_bucket() -> None:
    mixed = _bound(4, 4, 4, 4, dtypes=("float32", "bfloat16", "float32", "bfloat16"))
    buckets = gradient_buckets(mixed.graph, Strategy.parse("ddp:bucket=5MiB"))
    # 4 MiB / 4 elements: 4 MiB of float32, 2 MiB of bfloat16.
    assert sorted(bucket.size_bytes / MIB for bucket in buckets) == [4, 8]


def test_a_bucket_never_starts_before_the_one_ahead_of_it_is_ready() -> None:
    bound = _bound(4, 4, 4, dtypes=("bfloat16", "float32", "float32"))
    buckets = gradient_buckets(bound.graph, Strategy.parse("ddp:bucket=8MiB"))
    ready = [bucket.ready_after for bucket in buckets]
    # fp32 is full after op 2; the bfloat16 of op 0 is left over, and goes after it.
    assert ready == [2, 2]
