"""Outliers are told from good observations by the others of their workload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from estimator.calibrate.store import Observation, ObservationStore


def outliers_of(path: Path, *rows: tuple[float, dict[str, Any]]) -> list[float]:
    """The step times that are outliers once all are kept, one by one."""
    given = {"workload": "gpt2", "allocation": "1x2:t4", "batch_per_gpu": 8}
    with ObservationStore(path / "observations.db") as store:
        for step_time_s, fields in rows:
            store.add(Observation(step_time_s=step_time_s, **{**given, **fields}))
        return [one.step_time_s for one in store if one.outlier_reason]


@pytest.mark.parametrize("outlier_s", [400.0, 0.0004])
def test_a_thousand_times_off_the_same_pair_is_an_outlier(tmp_path: Path, outlier_s: float) -> None:
    assert outliers_of(tmp_path, (0.4, {}), (0.41, {}), (outlier_s, {}), (0.39, {})) == [outlier_s]


@pytest.mark.parametrize("outlier_s", [2000.0, 0.0004])
def test_a_thousand_times_off_other_allocations_is_an_outlier(
    tmp_path: Path, outlier_s: float
) -> None:
    others = [(0.4, {"allocation": f"{nodes}x2:t4"}) for nodes in (2, 3, 4)]
    assert outliers_of(tmp_path, *others, (outlier_s, {})) == [outlier_s]


def test_a_first_observation_may_turn_out_to_be_an_outlier(tmp_path: Path) -> None:
    assert outliers_of(tmp_path, (400.0, {}), (0.4, {}), (0.4, {})) == [400.0]


def test_of_two_observations_the_later_is_an_outlier(tmp_path: Path) -> None:
    assert outliers_of(tmp_path, (400.0, {}), (0.4, {})) == [0.4]


def test_a_large_batch_may_take_a_thousand_times_longer(tmp_path: Path) -> None:
    rows = [(0.01 * batch, {"batch_per_gpu": batch}) for batch in (1, 8, 64, 4096)]
    assert outliers_of(tmp_path, *rows) == []


def test_a_large_batch_may_take_no_longer_than_a_small_one(tmp_path: Path) -> None:
    rows = [(0.01, {"batch_per_gpu": batch}) for batch in (1, 8, 64, 4096)]
    assert outliers_of(tmp_path, *rows) == []


def test_other_machines_and_workloads_are_not_compared(tmp_path: Path) -> None:
    slow: dict[str, Any] = {"allocation": "1x1:local-cpu"}
    other: dict[str, Any] = {"workload": "bert"}
    rows = ((0.4, {}), (0.4, {}), (900.0, slow), (910.0, slow), (920.0, other))
    assert outliers_of(tmp_path, *rows) == []


def test_the_reason_says_what_it_was_compared_with(tmp_path: Path) -> None:
    with ObservationStore(tmp_path / "observations.db") as store:
        for step_time_s in (0.4, 0.4, 400.0):
            store.add(
                Observation(
                    workload="gpt2", allocation="1x2:t4", batch_per_gpu=8, step_time_s=step_time_s
                )
            )
        (reason,) = [one.outlier_reason for one in store if one.outlier_reason]
    assert reason == (
        "6.67 min is 1000 times longer than the 400 ms of 2 others of this workload, allocation "
        "and batch"
    )
