"""Conformal quantiles have the stated coverage."""

from __future__ import annotations

import numpy as np
import pytest

from estimator.calibrate.intervals import (
    extrapolates,
    interpolated,
    prior_scores,
    quantiles_on_grid,
    replicate_variance,
    scatter_variance,
)

ANY = np.array([0.5])


def test_without_observations_the_prior_scores_are_covered() -> None:
    quantile = interpolated(quantiles_on_grid(np.empty(0), np.empty(0), 0.8), ANY)[0]
    # The conformal correction: one more observation beside the eighteen of the prior scores.
    assert np.mean(prior_scores() <= quantile) == pytest.approx(0.8 * 19 / 18, abs=0.01)


def test_many_observations_outweigh_the_prior_scores() -> None:
    scores = np.abs(np.random.default_rng(0).normal(scale=3.0, size=2000))
    quantile = interpolated(quantiles_on_grid(scores, np.full(2000, 0.5), 0.8), ANY)[0]
    # Four fifths of |normal| lie within 1.2816.
    assert quantile == pytest.approx(3 * 1.2816, rel=0.05)


def test_scores_count_most_for_steps_with_a_similar_share_of_synchronisation() -> None:
    scores = np.concatenate([np.full(200, 0.5), np.full(200, 4.0)])
    sync_share = np.concatenate([np.zeros(200), np.ones(200)])
    narrow, wide = interpolated(quantiles_on_grid(scores, sync_share, 0.7), np.array([0.0, 1.0]))
    assert narrow == pytest.approx(0.5)
    assert wide == pytest.approx(4.0)


def test_scores_of_single_devices_do_not_narrow_intervals_of_steps_bound_by_a_network() -> None:
    single = quantiles_on_grid(np.full(200, 0.1), np.zeros(200), 0.8)
    none = quantiles_on_grid(np.empty(0), np.empty(0), 0.8)
    alone, together = interpolated(single, np.array([0.0, 1.0]))
    assert alone == pytest.approx(0.1)
    assert together > 0.8 * none[-1]


def test_four_times_the_largest_observed_is_no_extrapolation() -> None:
    observed = np.array([(1.0, 8.0), (4.0, 64.0)])
    asked = np.array([(16.0, 8.0), (17.0, 8.0), (2.0, 2.0), (2.0, 1.9)])
    assert extrapolates(asked, observed, np.zeros(4)).tolist() == [False, True, False, True]
    assert extrapolates(asked[:1], observed, np.array([0.5])).tolist() == [True]


def test_the_scatter_of_a_job_is_what_its_errors_have_beyond_the_predicted_variance() -> None:
    rng = np.random.default_rng(0)
    predicted = np.full(200, 0.05**2)
    quiet = scatter_variance(rng.normal(0, 0.035, 200), predicted)
    assert quiet < 0.02**2
    # Errors of 0.3: with so many, what is estimated is that, in units of scores (0.7 sigma).
    loud = scatter_variance(rng.normal(0, 0.3, 200), predicted)
    assert 0.7 * loud**0.5 == pytest.approx(0.3, rel=0.1)


def test_a_few_observations_are_pooled_with_most_jobs() -> None:
    predicted = np.full(1, 0.05**2)
    none = scatter_variance(np.empty(0), np.empty(0))
    one = scatter_variance(np.array([0.3]), predicted)
    many = scatter_variance(np.full(50, 0.3), np.full(50, 0.05**2))
    assert none < one < many
    # One wild error among many that are small is an outlier, not scatter.
    outlier = np.append(np.full(30, 0.02), 1.1)
    assert scatter_variance(outlier, np.full(31, 0.05**2)) < 0.1**2


def test_runs_of_one_step_that_differ_widen_it() -> None:
    # Two steps of two runs each, 20 % to either side: 4 · 0.2² / 2 degrees of freedom beside 8 runs
    # of the usual noise of 3 %.
    log_times, row_of = np.array([0.2, -0.2, 1.2, 0.8]), np.array([0, 0, 1, 1])
    found = replicate_variance(log_times, np.ones(4), row_of, 0.03**2)
    assert found == pytest.approx((4 * 0.04 + 8 * 0.0009) / 10 - 0.0009)
    assert replicate_variance(log_times, np.ones(4), np.arange(4), 0.03**2) == 0.0
