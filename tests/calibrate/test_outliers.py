"""Steps in another unit, milliseconds taken for seconds, are told from good observations."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from estimator.calibrate.observed import Observation
from estimator.calibrate.review import review


def doubted(*rows: tuple[float, dict[str, Any]]) -> list[float]:
    """The step times that the others contradict, seen hour by hour."""
    given = {"workload": "gpt2", "allocation": "1x2:t4", "batch_per_gpu": 8}
    start = datetime(2026, 3, 2, tzinfo=UTC)
    seen = [
        Observation(step_time_s=step_time_s, at=start + timedelta(hours=hour), **given | fields)
        for hour, (step_time_s, fields) in enumerate(rows)
    ]
    return [one.step_time_s for one, _ in review(seen).doubted]


@pytest.mark.parametrize("outlier_s", [400.0, 0.0004])
def test_a_thousand_times_off_the_same_pair_is_doubted(outlier_s: float) -> None:
    assert doubted((0.4, {}), (0.41, {}), (outlier_s, {}), (0.39, {})) == [outlier_s]


@pytest.mark.parametrize("outlier_s", [2000.0, 0.0004])
def test_a_thousand_times_off_other_allocations_is_doubted(outlier_s: float) -> None:
    others = [(0.4, {"allocation": f"{nodes}x2:t4"}) for nodes in (2, 3, 4)]
    assert doubted(*others, (outlier_s, {})) == [outlier_s]


def test_a_first_observation_may_turn_out_to_be_wrong() -> None:
    assert doubted((400.0, {}), (0.4, {}), (0.4, {})) == [400.0]


def test_other_machines_and_workloads_are_not_compared() -> None:
    slow: dict[str, Any] = {"allocation": "1x1:local-cpu"}
    rows = ((0.4, {}), (0.4, {}), (900.0, slow), (910.0, slow), (920.0, {"workload": "bert"}))
    assert doubted(*rows) == []
