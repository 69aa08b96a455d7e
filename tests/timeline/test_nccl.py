"""NCCL's collectives cost a start and a hop per round, over a ring or a tree."""

from __future__ import annotations

import numpy as np
import pytest

from estimator.timeline.nccl import levels, nccl_rounds

# The kernel's start in hops: 7.9 of 1.05 µs (aiconfigurator's tables of A100).
START = 7.5


def test_small_messages_on_one_node_grow_as_published() -> None:
    # aiconfigurator, a100_sxm, fp16, 512 bytes, µs over 2, 4 and 8 GPUs.
    for op, times in (("all_reduce", (10.0, 14.5, 22.6)), ("all_gather", (9.0, 10.8, 15.6))):
        for ranks, time_us in zip((4, 8), times[1:], strict=True):
            predicted = times[0] * nccl_rounds(op, ranks, 1) / nccl_rounds(op, 2, 1)
            assert predicted == pytest.approx(time_us, rel=0.1)


def test_across_many_nodes_an_all_reduce_takes_the_tree() -> None:
    # 64 nodes of 8: up and down 7 hops in a node and 6 between nodes; the ring would take 1022.
    assert nccl_rounds("all_reduce", 512, 64) == START + 2 * (7 + 6)
    # 4 nodes of 1: the tree's 4 hops against the ring's 6.
    assert nccl_rounds("all_reduce", 4, 4) == START + 4


def test_other_collectives_go_around_the_ring() -> None:
    assert nccl_rounds("all_gather", 16, 2) == START + 15


def test_a_broadcast_goes_down_a_tree() -> None:
    # 8 ranks: three levels; a ninth needs a fourth.
    assert nccl_rounds("broadcast", 8, 1) == START + 3
    assert nccl_rounds("broadcast", 9, 2) == START + 4


def test_levels_of_arrays_are_those_of_numbers() -> None:
    counts = [1, 2, 3, 4, 5, 8, 9, 1024, 1025]
    assert levels(np.array(counts)).tolist() == [0, 1, 2, 2, 3, 3, 4, 10, 11]
    assert [levels(count) for count in counts] == [0, 1, 2, 2, 3, 3, 4, 10, 11]
