"""The benchmark of balanced splits: which splits it tries, and what it makes of their times."""

from __future__ import annotations

from typing import Any

import pytest
from testbed_subjects import splits


def test_splits_around_the_best_one_keep_the_global_batch_and_include_the_even_one() -> None:
    ranks = (3, 1)
    found = splits.splits_around((8, 4), (7, 7), ranks)
    assert found[:2] == [(7, 7), (8, 4)]
    # What leaves the single slow rank goes to three fast ones: 3 samples at a time, of 28.
    assert set(found[2:]) == {(9, 1), (6, 10), (5, 13)}
    found = splits.splits_around((12, 8, 4), (8, 8, 8), (2, 2, 2))
    assert {12 - split[0] for split in found} >= {-3, -2, -1, 0, 1, 2, 3, 4}
    assert all(sum(split) == 24 and min(split) >= 1 for split in found)


def record(batches: tuple[int, int], predicted_s: float, measured_s: float | None) -> Any:
    return {
        "id": str(batches),
        "case": "c",
        "batches": batches,
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "noise_ratio": 0.01,
        "is_best": batches == (6, 2),
        "is_even": batches == (4, 4),
        "reason": None,
    }


def test_gain_and_loss_are_counted_at_the_predicted_best_split() -> None:
    rows = [record((4, 4), 1.5, 1.4), record((6, 2), 1.0, 1.0), record((5, 3), 1.1, 0.98)]
    (row,) = splits.balances(rows)
    assert row["predicted_gain_ratio"] == pytest.approx(0.5)
    assert row["gain_ratio"] == pytest.approx(0.4)
    # 50 % instead of 40 % is a quarter too much, though the step itself is exact.
    assert row["gain_error_ratio"] == pytest.approx(0.25)
    assert not row["is_within"]
    assert row["measured_best"] == (5, 3)
    assert row["lost_ratio"] == pytest.approx(1.0 / 0.98 - 1)
    (figure,) = splits.figures(rows)
    assert figure["value"] == pytest.approx(0.25)


def test_a_case_with_a_split_that_failed_is_not_judged() -> None:
    rows = [record((4, 4), 1.5, None), record((6, 2), 1.0, 1.0)]
    assert list(splits.balances(rows)) == []
    assert list(splits.figures(rows)) == []
