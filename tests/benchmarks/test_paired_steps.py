"""What is made of rounds in which steps and their replay take turns."""

from __future__ import annotations

import pytest
from paired_steps import apart, describe


def one(step: float, control: float, clocked: float, replay: float) -> dict[str, dict[str, float]]:
    """A round with half of each kind's seconds forward and half backward."""
    kinds = {"step": step, "control": control, "clocked": clocked, "replay": replay}
    return {kind: {"forward": each / 2, "backward": each / 2} for kind, each in kinds.items()}


ROUNDS = [one(1.0, 1.2, 0.8, 0.8), one(2.0, 1.8, 1.6, 2.0), one(1.0, 1.0, 1.0, 1.1)]


def test_pairs_are_compared_within_their_round() -> None:
    # Control beside step: +20, -10 and 0 %; replay beside clocked operators: 0, +25 and +10 %.
    assert apart(ROUNDS, "control", "step") == pytest.approx((0.0, 0.1))
    assert apart(ROUNDS, "replay", "clocked") == pytest.approx((0.1, 0.1))


def test_the_table_has_each_kind_by_phase_and_each_pair() -> None:
    lines = [line.split() for line in describe(ROUNDS).splitlines()]
    assert ["replay", "550.0", "550.0"] in lines  # halves of 0.8, 2.0 and 1.1 s
    # Replay beside step: -20, 0 and +10 %.
    assert ["replay", "beside", "step", "+0.0", "%", "10.0", "%"] in lines
