"""Predictions are paired with runs made after them, in turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from estimator.validate.training import Validation, noise_of, validate


def prediction(name: str, step_time_s: float = 1.0) -> Any:
    return SimpleNamespace(name=name, step_time_s=step_time_s, low_s=0.9, high_s=1.1)


def test_repeats_of_all_predictions_are_interleaved() -> None:
    trained = []

    def train(predicted: Any) -> float:
        trained.append(predicted.name)
        return float(len(trained))

    reports: list[int] = []
    cases = validate(
        [prediction("one"), prediction("two")],
        train,
        repeats=3,
        report=lambda run, predicted, step_s: reports.append(run),
    )
    assert trained == ["one", "two"] * 3
    assert reports == [1, 2, 3, 4, 5, 6]
    assert [case.runs_s for case in cases] == [(1.0, 3.0, 5.0), (2.0, 4.0, 6.0)]


def test_noise_is_half_the_range_of_the_middle_four_fifths_over_the_median() -> None:
    # Eleven runs 1.0, 1.1 ... 2.0: 10 % lies at 1.1, 90 % at 1.9, the median at 1.5.
    runs = [1 + tenth / 10 for tenth in range(11)]
    assert noise_of(runs) == pytest.approx((1.9 - 1.1) / 2 / 1.5)


def test_a_prediction_is_compared_with_the_median_of_the_runs() -> None:
    case = Validation(predicted=prediction("one", 1.2), runs_s=(0.8, 1.0, 5.0))
    assert case.measured_s == 1.0
    assert case.error_ratio == pytest.approx(0.2)
    assert case.is_within_interval
    assert not Validation(predicted=prediction("one"), runs_s=(2.0, 2.0, 2.0)).is_within_interval
