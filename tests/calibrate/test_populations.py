"""Two populations of machines are told by steps seen on both, and each is modelled."""

from __future__ import annotations

import math

import numpy as np
import pytest

from estimator.calibrate.regressor import StepTimeRegressor, TwoSpeeds, populations, two_speeds

# Steps that are 1 % up and down by turns; of three nodes the third is 1.4 times as slow.
NOISE = np.tile([0.01, -0.01, 0.005, -0.005], 6)
IS_SLOW = np.tile([False, False, True], 8)
SLOWER = np.where(IS_SLOW, math.log(1.4), 0.0)
ONE_NODE, SAME_ROW, ONES = np.ones(24), np.zeros(24, dtype=np.intp), np.ones(24)


def test_two_populations_are_found_among_many_steps() -> None:
    residuals = np.concatenate([math.log(1.4) + np.resize(NOISE, 4000), np.resize(NOISE, 8000)])
    found = populations("t4", residuals)
    assert found is not None
    assert (found.slower, found.steps) == (4000, 12000)
    assert found.ratio == pytest.approx(1.4, rel=1e-3)


def test_the_slower_steps_of_one_job_are_told_with_their_nodes() -> None:
    found = two_speeds(SLOWER + NOISE, SAME_ROW, ONE_NODE, ONES)
    assert found is not None
    assert found.is_slow.tolist() == IS_SLOW.tolist()
    assert found.log_ratio == pytest.approx(math.log(1.4), abs=0.01)
    assert found.node_ratio == pytest.approx(1 / 3)


def test_of_steps_on_two_nodes_each_is_slow_that_has_one_slow_node() -> None:
    # 1 − (1 − p)² = 1/3 for p = 1 − √(2/3) = 0.18.
    found = two_speeds(SLOWER + NOISE, SAME_ROW, 2 * ONE_NODE, ONES)
    assert found is not None
    assert found.node_ratio == pytest.approx(1 - math.sqrt(2 / 3))
    assert found.slow_probability(np.array([1.0, 2.0])) == pytest.approx([0.1835, 1 / 3], abs=1e-4)


def test_rows_that_the_model_does_not_know_are_no_population() -> None:
    row_of = IS_SLOW.astype(np.intp)
    assert two_speeds(SLOWER + NOISE, row_of, ONE_NODE, ONES) is None


def test_a_change_in_time_is_no_population() -> None:
    assert two_speeds(np.sort(SLOWER) + NOISE, SAME_ROW, ONE_NODE, ONES) is None


def test_the_answer_is_of_the_more_probable_speed_and_the_interval_reaches_a_likely_other() -> None:
    speeds = TwoSpeeds(log_ratio=0.4, node_ratio=0.3, is_slow=IS_SLOW)
    # Slow with 0.3, 1 − 0.7² = 0.51 and 1 − 0.7⁸ = 0.94.
    nodes = np.array([1.0, 2.0, 8.0])
    assert speeds.log_shift(nodes).tolist() == [0.0, 0.4, 0.4]
    assert speeds.wider(nodes, 0.8).tolist() == [0.4, 0.4, 0.0]


def test_slower_machines_do_not_slow_the_answer_for_others() -> None:
    # Two GPUs of one node at batches 8, 16 and 32: 50 ms + 10 ms a sample.
    rows = np.array([(2, 1, batch, 1, 2) for batch in (8, 16, 32)], dtype=float)
    place = np.arange(24) // 8
    clean_s = 0.05 + 0.01 * rows[:, 2]
    times_s = clean_s[place] * np.exp(SLOWER + NOISE)
    fitted = StepTimeRegressor().fit(rows[place], times_s)
    assert fitted.predict(rows) == pytest.approx(clean_s, rel=0.02)
    low, high = fitted.predict_interval(rows)
    # A third of the steps is slow: an interval for 80 % of them has to reach these.
    assert (high > 1.4 * clean_s).all()
    assert (low < clean_s).all()
