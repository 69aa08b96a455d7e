"""What the ranks of a pipeline hold, and the step that their plans make."""

from __future__ import annotations

import pytest

from estimator.timeline.pipelines.simulation import most_held_bytes
from estimator.workload.schedules import Schedule


@pytest.mark.parametrize(("rank", "held"), [(0, 4), (1, 3), (2, 2), (3, 1)])
def test_1f1b_holds_p_minus_s_micro_batches(rank: int, held: int) -> None:
    assert most_held_bytes(Schedule.parse("1f1b"), 4, rank, 16, {rank: 10}) == 10 * held


def test_gpipe_holds_all_and_interleaving_more_than_1f1b() -> None:
    assert most_held_bytes(Schedule.parse("gpipe"), 4, 2, 16, {2: 1}) == 16
    # (v − 1)·p + 2(p − 1) forward passes come before the first backward one, and one with it.
    held = most_held_bytes(Schedule.parse("interleaved:2"), 4, 0, 16, {0: 1, 4: 1})
    assert held == 4 + 2 * 3 + 1


def test_zb_h1_holds_no_more_than_1f1b_s_first_rank() -> None:
    # Qi et al. 2023, section 3.1.
    for rank in range(4):
        assert most_held_bytes(Schedule.parse("zb"), 4, rank, 16, {rank: 1}) <= 4
