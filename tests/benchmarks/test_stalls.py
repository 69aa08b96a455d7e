"""Stalls beside what was put in."""

from __future__ import annotations

from pathlib import Path

import pytest
from records import Record, Records
from stall_accuracy import Case, _measured, _some_of


def found(measured_s: float) -> Record:
    bounds = {"of_value": 0.10, "of_step": 0.02, "step_s": 1.0}
    return {"predicted_s": 0.5, "measured_s": measured_s, **bounds}


@pytest.mark.parametrize(("measured_s", "met"), [(0.549, True), (0.551, False), (0.449, False)])
def test_a_case_is_met_within_a_tenth_of_what_was_expected(
    tmp_path: Path, measured_s: float, met: bool
) -> None:
    records = Records(tmp_path / "records")
    assert _measured(records, "injected", Case("a", lambda: found(measured_s)))["met"] is met


def test_a_case_that_was_found_is_not_measured_again(tmp_path: Path) -> None:
    first = _measured(Records(tmp_path / "records"), "injected", Case("a", lambda: found(0.5)))
    again = Records(tmp_path / "records")
    assert _measured(again, "injected", Case("a", lambda: found(0.9))) == first


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (0.35, 7), (0.65, 13), (1.0, 20)])
def test_a_share_of_the_files_is_spread_over_them(ratio: float, count: int) -> None:
    files = [Path(str(number)) for number in range(20)]
    chosen = _some_of(files, ratio)
    assert len(chosen) == count
    halves = [sum(int(path.name) // 10 == half for path in chosen) for half in (0, 1)]
    assert abs(halves[0] - halves[1]) <= 1
