"""Conformal factors cover as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from estimator.calibrate.intervals import (
    extrapolates_far,
    factors_at,
    knot_factors,
    shipped_scores,
)

ANY = np.array([0.5])


def test_without_observations_the_shipped_scores_are_covered() -> None:
    factor = factors_at(knot_factors(np.empty(0), np.empty(0), 0.8), ANY)[0]
    # The next observation is one more among the eighteen that the shipped scores weigh.
    assert np.mean(shipped_scores() <= factor) == pytest.approx(0.8 * 19 / 18, abs=0.01)


def test_many_observations_outweigh_the_shipped_scores() -> None:
    scores = np.abs(np.random.default_rng(0).normal(scale=3.0, size=2000))
    factor = factors_at(knot_factors(scores, np.full(2000, 0.5), 0.8), ANY)[0]
    # Four fifths of |normal| lie within 1.2816.
    assert factor == pytest.approx(3 * 1.2816, rel=0.05)


def test_scores_count_most_where_they_lie() -> None:
    scores = np.concatenate([np.full(200, 0.5), np.full(200, 4.0)])
    places = np.concatenate([np.zeros(200), np.ones(200)])
    calm, rough = factors_at(knot_factors(scores, places, 0.7), np.array([0.0, 1.0]))
    assert calm == pytest.approx(0.5)
    assert rough == pytest.approx(4.0)


def test_many_calm_steps_on_one_device_do_not_narrow_those_that_a_network_rules() -> None:
    calm = knot_factors(np.full(200, 0.1), np.zeros(200), 0.8)
    unseen = knot_factors(np.empty(0), np.empty(0), 0.8)
    alone, together = factors_at(calm, np.array([0.0, 1.0]))
    assert alone == pytest.approx(0.1)
    assert together > 0.8 * unseen[-1]


def test_four_times_the_largest_seen_is_still_near() -> None:
    seen = np.array([(1.0, 8.0), (4.0, 64.0)])
    asked = np.array([(16.0, 8.0), (17.0, 8.0), (2.0, 2.0), (2.0, 1.9)])
    assert extrapolates_far(asked, seen, np.zeros(4)).tolist() == [False, True, False, True]
    assert extrapolates_far(asked[:1], seen, np.array([0.5])).tolist() == [True]
