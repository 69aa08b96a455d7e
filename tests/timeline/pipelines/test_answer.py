"""What the ranks of a pipeline hold, and the step that their plans make."""

from __future__ import annotations

import pytest

from estimator.timeline.pipelines.answer import most_in_flight
from estimator.timeline.pipelines.schedules import Schedule


@pytest.mark.parametrize(("rank", "held"), [(0, 4), (1, 3), (2, 2), (3, 1)])
def test_1f1b_holds_p_minus_s_micro_batches(rank: int, held: int) -> None:
    assert most_in_flight(Schedule.parse("1f1b"), 4, rank, 16) == {rank: held}


def test_gpipe_holds_all_and_interleaving_more_than_1f1b() -> None:
    assert most_in_flight(Schedule.parse("gpipe"), 4, 2, 16) == {2: 16}
    # (v − 1)·p + 2(p − 1) forward passes come before the first backward one, and one with it.
    held = most_in_flight(Schedule.parse("interleaved:2"), 4, 0, 16)
    assert sum(held.values()) == 4 + 2 * 3 + 1


def test_zb_h1_holds_what_1f1b_holds() -> None:
    # Qi et al. 2023, section 3.1: the memory of 1F1B's first rank, on every rank.
    for rank in range(4):
        held = most_in_flight(Schedule.parse("zb"), 4, rank, 16)
        assert held[rank] <= 4
