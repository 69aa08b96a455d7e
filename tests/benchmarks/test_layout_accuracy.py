"""Ranks train the case whose step was predicted, and a case that was found is kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import layout_accuracy
import pytest
from layout_accuracy import CASES, measured, run
from options import Options

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

    def run_on(devices: Any, target: str, arguments: Mapping[str, Any], **_: Any) -> list[Any]:
        asked.append(arguments)
        return [{"step_s": 1.0}, {"step_s": 2.0}]

    monkeypatch.setattr(layout_accuracy, "run_on_devices", run_on)
    monkeypatch.setattr(layout_accuracy, "CASES", CASES[3:])
    assert measured(CASES[3], "tp", PLAN, profile(), steps=1, processes=1) == [2.0]
    # A rank is a fresh process, which knows all cases again.
    (found,) = (case for case in CASES if case.name == asked[0]["case"])
    assert found is CASES[3]
    measured(CASES[3], "zb", None, profile(), steps=1, processes=1)
    assert [each["schedule"] for each in asked] == ["", "zb"]


def test_a_case_that_was_found_is_not_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Answer:
        layout, step_time_s, low_s, high_s = "tp=2", 0.9, 0.8, 1.0

        class breakdown:
            layer_communication_s = 0.1

    measurements = iter([[float(n), n + 0.2, n - 0.2] for n in range(1, 6)])
    monkeypatch.setattr(layout_accuracy, "local_machine", lambda _: profile())
    monkeypatch.setattr(layout_accuracy, "predicted", lambda *_, **__: (PLAN, Answer()))
    monkeypatch.setattr(layout_accuracy, "measured", lambda *_, **__: next(measurements))
    options = Options(quick=True, data=tmp_path, work=tmp_path)
    first = list(run(options))
    assert [case["measured_s"] for case in first] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert {case["method"] for case in first} == {"layers", "pipeline"}
    assert list(run(options)) == first
