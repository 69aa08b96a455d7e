"""Drift of nodes, detected in synthetic residuals."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime, timedelta

import pytest

from estimator.calibrate.review import Residual, drifts

START = datetime(2026, 3, 2, tzinfo=UTC)  # a Monday
# Residuals that are 1 % up and down by turns.
NOISE = [0.01, -0.01, 0.005, -0.005] * 6


def _residual(hour: int, nodes: str, ratio: float) -> Residual:
    value = math.log(ratio) + NOISE[hour % len(NOISE)]
    return Residual(at=START + timedelta(hours=hour), nodes=frozenset(nodes.split()), value=value)


def test_a_node_that_became_slower_is_named_with_the_day() -> None:
    good = [_residual(hour, "a1 a2", 1.0) for hour in range(24)]
    bad = [_residual(24 + hour, "a2 a3", 1.18) for hour in range(8)]
    earlier = [_residual(hour, "a3 a4", 1.0) for hour in range(8)]
    later = [_residual(32 + hour, "a1 a2", 1.0) for hour in range(4)]
    (found,) = drifts([*good, *bad, *earlier, *later])
    assert (found.name, found.since, found.steps) == ("a3", START + timedelta(hours=24), 8)
    assert found.ratio == pytest.approx(1.18, rel=0.02)
    assert str(found) == "a3 is 18 % slower than expected since Tuesday 2026-03-03 00:00 (8 steps)"


def test_a_node_slow_from_the_first_step_on_is_told_from_the_others() -> None:
    others = [_residual(hour, "a1", 1.0) for hour in range(12)]
    slow = [_residual(hour, "a2", 1.3) for hour in range(4)]
    (found,) = drifts([*others, *slow])
    assert (found.name, found.since) == ("a2", None)


def test_noise_is_no_drift() -> None:
    assert drifts([_residual(hour, "a1 a2", 1.0) for hour in range(24)]) == []


def test_two_steps_are_too_few_for_drift() -> None:
    good = [_residual(hour, "a1", 1.0) for hour in range(12)]
    assert drifts([*good, _residual(12, "a2", 1.5), _residual(13, "a2", 1.5)]) == []


def test_steps_of_one_moment_are_on_one_side_of_a_change() -> None:
    """A table without times: its steps are sorted by something else."""
    rows = [*[_residual(0, "a1", 1.0)] * 12, *[_residual(0, "a1", 1.3)] * 6]
    assert [found.since for found in drifts(rows)] == [None] * len(drifts(rows))


def test_the_cost_grows_with_the_steps_and_not_with_their_square() -> None:
    """2,000 steps on each of 32 hosts, one of which became slower."""
    hosts = [f"a{number}" for number in range(32)]
    steps = [_residual(hour, host, 1.0) for hour in range(2000) for host in hosts]
    steps += [_residual(2000 + hour, "a7", 1.2) for hour in range(20)]
    start_s = time.process_time()
    (found,) = drifts(steps)
    assert time.process_time() - start_s < 5.0
    assert (found.name, found.steps) == ("a7", 20)
