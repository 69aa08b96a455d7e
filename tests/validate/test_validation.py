"""Predictions are paired with runs made after them, in turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from estimator.validate.training import Validation, validate


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


def test_a_prediction_is_compared_with_the_median_of_the_runs() -> None:
    case = Validation(predicted=prediction("one", 1.2), runs_s=(0.8, 1.0, 5.0))
    assert case.measured_s == 1.0
    # 10 % lies at 0.84, 90 % at 4.2.
    assert case.noise_ratio == pytest.approx((4.2 - 0.84) / 2)
    assert case.error_ratio == pytest.approx(0.2)
    assert case.is_within_interval
    assert not Validation(predicted=prediction("one"), runs_s=(2.0, 2.0, 2.0)).is_within_interval
