"""Which bytes of an op come from main memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from estimator.graph.partition.stages import Blocks, stage_graphs
from estimator.graph.trace.trace import trace_graph
from estimator.kernels.contention import Eviction, cold_ratios
from estimator.machines.profile import MemoryCost, Provenance
from tests.budgets import examples
from tests.graph.partition.test_stages import traced
from tests.synthetic import perceptron


def test_a_model_that_fits_the_cache_never_reads_main_memory() -> None:
    bound = perceptron([64, 64, 64], batch=8).at()
    assert cold_ratios(bound, Eviction.of_size(1e12)).max() == 0.0


def test_a_cache_that_holds_nothing_leaves_every_op_cold() -> None:
    bound = perceptron([256, 256, 256], batch=64).at()
    cold = cold_ratios(bound, Eviction.of_size(1.0))
    computing = [not op.is_view for op in bound.graph.ops]
    assert cold[computing].min() == pytest.approx(1.0)


def test_what_was_written_a_little_ago_is_partly_cold() -> None:
    # Tensors of 256 KiB. The first product reads what was last used a step ago and writes new
    # memory: three tensors. Then relu reads its output, four tensors with it, where four fit: half
    # of it is cold, and all of what it writes.
    bound = perceptron([256, 256], batch=256).at()
    cold = cold_ratios(bound, Eviction.of_size(4.0 * 256 * 256 * 4))
    assert cold[:2].tolist() == [1.0, 0.75]


MEASURED = MemoryCost(
    reuse_points=((1e6, 0.1), (3e6, 0.2), (7e6, 1.0)),
    provenance=Provenance(source="measured"),
)


def test_measured_shares_hold_between_and_beyond_their_distances() -> None:
    eviction = Eviction.measured(MEASURED)
    assert eviction.at(np.array([0.0, 5e5, 2e6, 5e6, 1e9])) == pytest.approx(
        [0, 0.05, 0.15, 0.6, 1]
    )
    # What an op evicts of its own does not count twice.
    # An op that moves 3 MB is a fifth cold when it is repeated: of four fifths that could be, half
    # is where 0.6 of it is cold. One as large as all caches has no time with warm ones.
    moved, cold = np.array([3e6, 3e6, 3e6, 1e9]), np.array([0.6, 0.1, 1.0, 0.7])
    assert eviction.beyond_repeated(cold, moved) == pytest.approx([0.5, 0.0, 1.0, 0.7])


@pytest.mark.parametrize(
    "points",
    [((1e6, 0.5), (1e6, 0.6)), ((1e6, 0.5), (2e6, 0.4)), ((1e6, 1.5),), ((1e6, float("nan")),)],
)
def test_shares_that_fall_or_are_none_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match=r"MemoryCost\.reuse_points must be \(bytes, share\)"):
        replace(MEASURED, reuse_points=points)


def test_a_smaller_cache_never_makes_an_op_warmer() -> None:
    bound = perceptron([512, 512, 512, 512], batch=128).at()
    large, small = (cold_ratios(bound, Eviction.of_size(size)) for size in (8e6, 2e6))
    assert (small >= large - 1e-12).all()
    assert small.sum() > large.sum()


def test_blocked_copies_are_cold_where_the_tensors_themselves_are_not() -> None:
    import torch

    # On one thread a batch of 8 runs as products without copies, on two it runs in blocks.
    layers = [torch.nn.Conv2d(16, 16, 1, bias=False) for _ in range(12)]
    bound = trace_graph(torch.nn.Sequential(*layers), torch.zeros(8, 16, 16, 16)).at()
    image_bytes = 8 * 16 * 16 * 16 * 4
    later = [op.call.target for op in bound.graph.ops].index("aten.convolution.default") + 1
    assert bound.calls[later].target == "aten.convolution.default"
    matmuls, blocked = (
        cold_ratios(bound, Eviction.of_size(8.0 * image_bytes), threads=n) for n in (1, 2)
    )
    # Its input was just written, its output is new: half the bytes, but for the small weight.
    assert matmuls[later] == pytest.approx(0.5, abs=0.01)
    # The copies are as new as the output, so a larger share is cold.
    assert blocked[later] > matmuls[later] + 0.1


@settings(max_examples=examples(30), deadline=None)
@given(st.floats(1e2, 1e6), st.sets(st.integers(1, 3), min_size=1), st.sampled_from([2, 8, 64]))
@example(21201.0, {1, 2}, 2)
def test_blocks_are_no_colder_than_in_any_stage(cache: float, cuts: set[int], batch: int) -> None:
    graph = traced()
    blocks = Blocks.of(graph)
    least = cold_ratios(graph.at(batch), Eviction.of_size(cache), blocks=blocks.owner)
    begins = [0, *sorted(cuts), len(blocks.points)]
    stages = stage_graphs(graph, [blocks.points[cut] for cut in sorted(cuts)])
    for stage, (begin, end) in zip(stages, pairwise(begins), strict=True):
        cold, ops = cold_ratios(stage.graph.at(batch), Eviction.of_size(cache)), list(stage.ops)
        # Masks that every stage makes for itself are of the first block.
        of_stage = (blocks.owner[ops] >= begin) & (blocks.owner[ops] < end)
        assert of_stage.sum() > len(ops) / 2
        assert (cold >= least[ops] - 1e-12)[of_stage].all()


def test_in_a_small_cache_blocks_are_as_cold_as_their_stages() -> None:
    # What a block alone touches has left a cache of a few bytes; what others touch counts as warm.
    graph = traced()
    least = cold_ratios(graph.at(8), Eviction.of_size(16.0), blocks=Blocks.of(graph).owner)
    assert 0.2 < least.mean() < cold_ratios(graph.at(8), Eviction.of_size(16.0)).mean()
