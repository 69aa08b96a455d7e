"""Conformal quantiles have the stated coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from estimator.calibrate.intervals import (
    ENGINE_SPREAD_PRIOR,
    Spread,
    away_from_others,
    extrapolates,
    half_width,
    prior_scores,
    score_quantile,
)


def test_without_observations_the_prior_scores_are_covered() -> None:
    quantile = score_quantile(np.empty(0))
    # The conformal correction: one more observation beside the eighteen of the prior scores.
    assert np.mean(prior_scores() <= quantile) == pytest.approx(0.8 * 19 / 18, abs=0.01)


def test_many_observations_outweigh_the_prior_scores() -> None:
    scores = np.abs(np.random.default_rng(0).normal(scale=3.0, size=2000))
    quantile = score_quantile(scores)
    # Four fifths of |normal| lie within 1.2816.
    assert quantile == pytest.approx(3 * 1.2816, rel=0.05)


def test_four_times_the_largest_observed_is_no_extrapolation() -> None:
    observed = np.array([(1.0, 8.0), (4.0, 64.0)])
    asked = np.array([(16.0, 8.0), (17.0, 8.0), (2.0, 2.0), (2.0, 1.9)])
    assert extrapolates(asked, observed, np.zeros(4)).tolist() == [False, True, False, True]
    assert extrapolates(asked[:1], observed, np.array([0.5])).tolist() == [True]


def spread_sigma(spread: Spread, predicted: float) -> float:
    """The standard deviation of a step's error, of which 0.7 predicted ones are expected."""
    variance = predicted**2 * spread.inflation_variance + spread.scatter_variance
    return 0.7 * math.sqrt(variance)


def test_the_spread_of_a_job_is_that_of_its_errors() -> None:
    rng, predicted = np.random.default_rng(0), np.full(200, 0.05**2)
    quiet = Spread(rng.normal(0, 0.035, 200), predicted)
    assert spread_sigma(quiet, 0.05) == pytest.approx(0.035, rel=0.2)
    loud = Spread(rng.normal(0, 0.3, 200), predicted)
    assert spread_sigma(loud, 0.05) == pytest.approx(0.3, rel=0.1)


def test_scatter_does_not_grow_with_what_is_predicted_and_inflation_does() -> None:
    rng = np.random.default_rng(1)
    predicted = np.tile([0.02, 0.2], 100)
    scattered = Spread(rng.normal(0, 0.2, 200), predicted**2)
    inflated = Spread(rng.normal(0, 0.7 * 2 * predicted), predicted**2)
    assert spread_sigma(scattered, 0.0) > 0.1
    assert spread_sigma(inflated, 0.0) < 0.03
    # A t distribution of six degrees of freedom has 0.87 of the sigma of normal errors; the grid
    # has 1.4 and 2.
    assert 1.4**2 <= inflated.inflation_variance <= 2**2


def test_a_few_errors_are_pooled_with_most_jobs() -> None:
    one, many = (Spread(np.full(count, 0.3), np.full(count, 0.05**2)) for count in (1, 50))
    none = Spread(np.empty(0), np.empty(0))
    assert spread_sigma(none, 0.05) < spread_sigma(one, 0.05) < spread_sigma(many, 0.05)
    # One wild error among many that are small is an outlier, not scatter.
    outlier = Spread(np.append(np.full(30, 0.02), 1.1), np.full(31, 0.05**2))
    assert spread_sigma(outlier, 0.05) < 0.06


def test_a_job_with_few_observations_is_taken_to_be_like_others_on_its_machines() -> None:
    rng, predicted = np.random.default_rng(0), np.full(40, 0.05**2)
    quiet, loud = (
        [Spread(rng.normal(0, sigma, 40), predicted).posterior for _ in range(3)]
        for sigma in (0.02, 0.3)
    )
    errors = np.full(2, 0.05)
    beside_quiet, alone, beside_loud = (
        spread_sigma(Spread(errors, predicted[:2], peers), 0.05) for peers in (quiet, (), loud)
    )
    assert beside_quiet < alone < beside_loud
    # What the job itself has shown often outweighs the others.
    own = Spread(rng.normal(0, 0.02, 200), np.full(200, 0.05**2), loud)
    assert spread_sigma(own, 0.05) < 0.04


def test_no_interval_is_wider_than_one_that_says_nothing() -> None:
    found = half_width(np.ones(2), np.array([0.01, 9.0]))
    assert found == pytest.approx([0.1, 1.2])


def test_a_run_is_judged_by_the_other_runs_of_its_step() -> None:
    away, has_others = away_from_others(np.array([1.0, 2.0, 6.0, 9.0]), np.array([0, 0, 0, 1]))
    # From the mean of the others, 4, 3.5 and 1.5, whose difference from a run has a variance of
    # 1 + 1/2 runs.
    expected = np.array([3.0, 1.5, 4.5]) / math.sqrt(1.5)
    assert away[has_others] == pytest.approx(expected)
    assert has_others.tolist() == [True, True, True, False]


@pytest.mark.parametrize("peers", [(), [Spread(np.empty(0), np.empty(0)).posterior]])
@pytest.mark.parametrize("error", [1e-6, 1.0, math.log(50), math.log(1e6)])
def test_errors_of_any_size_have_a_spread(error: float, peers: list[np.ndarray]) -> None:
    found = Spread(np.full(300, error), np.full(300, 0.05**2), peers, prior=ENGINE_SPREAD_PRIOR)
    assert np.isfinite([found.inflation_variance, found.scatter_variance]).all()
    assert found.posterior.sum() == pytest.approx(1.0)
