"""Adaptive conformal inference asks for more after misses, for less after hits."""

from __future__ import annotations

import numpy as np
import pytest

from estimator.calibrate.intervals import adapted_coverage
from estimator.calibrate.regressor import StepTimeRegressor


def test_hits_lower_the_coverage_and_misses_raise_it_four_times_as_much() -> None:
    assert adapted_coverage(np.empty(0), 0.8) == pytest.approx(0.8)
    # Each of ten hits adds 0.02 · 0.2 to the misses that are allowed.
    assert adapted_coverage(np.zeros(10), 0.8) == pytest.approx(0.76)
    # Each of ten misses, all further out than any before, takes 0.02 · 0.8 from them.
    assert adapted_coverage(np.arange(100.0, 110.0), 0.8) == pytest.approx(0.96)
    assert adapted_coverage(np.arange(100.0, 150.0), 0.8) == 0.99


def test_a_miss_that_is_nothing_new_is_a_hit() -> None:
    # Of 100 scores that are alike, the first few are misses; then they are what is expected.
    assert adapted_coverage(np.full(100, 50.0), 0.8) < 0.8


def covered(log_times: np.ndarray) -> float:
    """How many of the later steps lie in the interval of those before them."""
    rows, times_s = np.tile([2.0, 1.0, 32.0, 1.0, 2.0], (len(log_times), 1)), np.exp(log_times)
    inside = []
    for seen in range(20, len(times_s), 2):
        fitted = StepTimeRegressor().fit(rows[:seen], times_s[:seen])
        low, high = fitted.predict_interval(rows[:1])
        inside.append(low[0] <= times_s[seen] <= high[0])
    return float(np.mean(inside))


def test_intervals_of_a_repeated_step_hold_what_they_state() -> None:
    # Four fifths of 40 steps, within two standard errors of 6 %.
    steady = np.random.default_rng(0).normal(0, 0.02, 100)
    assert covered(steady) == pytest.approx(0.8, abs=0.13)


def test_intervals_hold_what_they_state_while_steps_become_slower() -> None:
    # Half a percent slower each time: from the 60th on the mean of all is 15 % behind, beside 2 %
    # of noise, and intervals by the noise alone would hold next to none.
    noise = np.random.default_rng(0).normal(0, 0.02, 100)
    assert covered(noise + 0.005 * np.arange(100)) == pytest.approx(0.8, abs=0.13)
