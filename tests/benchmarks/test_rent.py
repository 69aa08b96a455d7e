"""The figure for choices of what to rent: right choices count, dear and late ones do not."""

from __future__ import annotations

import pytest
from rent import Configuration, judged


def row(ranks: int, time_s: float, predicted_s: float, noise: float = 0.0) -> Configuration:
    """A configuration at 3,600 USD an hour and rank; linear in the ranks from 100 s."""
    return Configuration(
        ranks=ranks,
        batch_per_gpu=8,
        noise_ratio=noise,
        time_s=time_s,
        usd=ranks * time_s,
        predicted_s=predicted_s,
        predicted_usd=ranks * predicted_s,
        linear_s=100 / ranks,
        linear_usd=100.0,
    )


def test_exact_predictions_choose_as_brute_force_does() -> None:
    found = judged([row(1, 100, 100), row(2, 60, 60), row(4, 40, 40)])["calibrated"]
    assert found == (1.0, 0.0, 0.0, 0.0, 0.0)


def test_a_choice_that_ends_late_is_none() -> None:
    # Two ranks are thought to take 50 s and take 60: wrong where a budget lies between, that is for
    # log(60/50) of log(100/40) of the budgets, one of fifty apart.
    found = judged([row(1, 100, 100), row(2, 60, 50), row(4, 40, 40)])["calibrated"]
    assert found.same_ratio == pytest.approx(1 - 0.199, abs=0.03)
    assert found.late_ratio == pytest.approx(0.199, abs=0.03)


def test_a_dearer_choice_counts_by_what_it_costs_more() -> None:
    # Two ranks are thought to take 99 s: for a budget below that four are taken, at 160 instead of
    # 120 USD where two would end in time.
    slow = [row(1, 100, 100), row(2, 60, 99), row(4, 40, 40)]
    found = judged(slow)["calibrated"]
    share = 0.546  # log(99/60) of log(100/40): budgets for which four ranks are taken instead
    assert found.same_ratio == pytest.approx(1 - share, abs=0.03)
    assert found.regret == pytest.approx(share * (160 / 120 - 1), abs=0.01)
    assert found.best_thought_late_ratio == pytest.approx(share, abs=0.03)


def test_a_choice_that_was_thought_cheaper_is_told_from_one_within_the_budget() -> None:
    # Four ranks are thought to take 20 s, 80 USD, and cost 160: wrong from 60 s on, where two do.
    found = judged([row(1, 100, 100), row(2, 60, 60), row(4, 40, 20)])["calibrated"]
    assert found.best_thought_late_ratio == found.late_ratio == 0.0
    assert found.best_thought_dear_ratio == pytest.approx(0.557, abs=0.03)  # log(100/60)/log(2.5)


def test_a_second_measurement_without_noise_chooses_the_same() -> None:
    assert judged([row(1, 100, 50), row(2, 60, 99), row(4, 40, 7)])["again"].same_ratio == 1.0


def test_what_differs_by_less_than_the_noise_is_the_same() -> None:
    slow = [row(1, 100, 100, 0.4), row(2, 60, 99, 0.4), row(4, 40, 40, 0.4)]
    assert judged(slow)["calibrated"].same_ratio == 1.0
