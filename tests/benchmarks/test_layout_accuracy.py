"""Ranks train the case whose step was predicted, and a case that was found is kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import layout_accuracy
import pytest
from layout_accuracy import CASES, main, measured

from estimator.graph.partition.plan import Plan
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import MachineProfile

PLAN = Plan((), sequence=False)


def profile() -> MachineProfile:
    return load_profile("h100-sxm")


def test_ranks_train_the_case_asked_for_where_only_some_cases_are_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Mapping[str, Any]] = []

    def run(devices: Any, target: str, arguments: Mapping[str, Any], **_: Any) -> list[Any]:
        asked.append(arguments)
        return [{"step_s": 1.0}, {"step_s": 2.0}]

    monkeypatch.setattr(layout_accuracy, "run_on_devices", run)
    monkeypatch.setattr(layout_accuracy, "CASES", CASES[3:])
    assert measured(CASES[3], "tp", PLAN, profile(), steps=1, processes=1) == [2.0]
    # A rank is a fresh process, which knows all cases again.
    (found,) = (case for case in CASES if case.name == asked[0]["case"])
    assert found is CASES[3]
    measured(CASES[3], "zb", None, profile(), steps=1, processes=1)
    assert [each["schedule"] for each in asked] == ["", "zb"]


def test_a_case_that_was_found_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Answer:
        layout, step_time_s = "tp=2", 0.9

        class breakdown:
            layer_communication_s = 0.1

    measurements = iter(([1.0, 1.2, 0.8], [2.0, 1.8, 2.2]))
    monkeypatch.setattr(layout_accuracy.est, "load_profile", lambda _: profile())
    monkeypatch.setattr(layout_accuracy, "predicted", lambda *_, **__: (PLAN, Answer()))
    monkeypatch.setattr(layout_accuracy, "measured", lambda *_, **__: next(measurements))
    monkeypatch.setattr("sys.argv", ["layout_accuracy", "--only", "3", "--work", str(tmp_path)])
    main()
    first = capsys.readouterr().out
    # Ten per cent below one second, 55 below two.
    assert "-10.0%" in first
    assert "median 32.5%, worst 55.0%, 2 cases" in first
    main()
    assert capsys.readouterr().out == first
