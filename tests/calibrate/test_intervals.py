"""Conformal factors cover as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from estimator.calibrate.intervals import (
    around,
    conformal_factors,
    extrapolates_far,
    shipped_scores,
)

ANY = np.array([0.5])


def test_without_observations_the_shipped_scores_are_covered() -> None:
    factor = conformal_factors(np.empty(0), np.empty(0), ANY, 0.8)[0]
    # The next observation is one more among the twelve that the shipped scores weigh.
    assert np.mean(shipped_scores() <= factor) == pytest.approx(0.8 * 13 / 12, abs=0.03)


def test_many_observations_outweigh_the_shipped_scores() -> None:
    scores = np.abs(np.random.default_rng(0).normal(scale=3.0, size=2000))
    factor = conformal_factors(scores, np.full(2000, 0.5), ANY, 0.8)[0]
    # Four fifths of |normal| lie within 1.2816.
    assert factor == pytest.approx(3 * 1.2816, rel=0.05)


def test_scores_count_most_where_they_lie() -> None:
    scores = np.concatenate([np.full(200, 0.5), np.full(200, 4.0)])
    places = np.concatenate([np.zeros(200), np.ones(200)])
    calm, rough = conformal_factors(scores, places, np.array([0.0, 1.0]), 0.7)
    assert calm == pytest.approx(0.5)
    assert rough == pytest.approx(4.0)


def test_an_interval_is_symmetric_in_ratio() -> None:
    low_s, high_s = around(np.array([2.0]), np.array([0.1]), np.array([3.0]))
    assert (low_s[0], high_s[0]) == pytest.approx((2 * np.exp(-0.3), 2 * np.exp(0.3)))


def test_four_times_the_largest_seen_is_still_near() -> None:
    seen = np.array([(1.0, 8.0), (4.0, 64.0)])
    asked = np.array([(16.0, 8.0), (17.0, 8.0), (2.0, 2.0), (2.0, 1.9)])
    assert extrapolates_far(asked, seen, np.zeros(4)).tolist() == [False, True, False, True]
    assert extrapolates_far(asked[:1], seen, np.array([0.5])).tolist() == [True]
