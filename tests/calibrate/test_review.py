"""What a store shows of its jobs, and the commands that print it."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from estimator.calibrate.observations import ObservationStore
from estimator.calibrate.observed import Observation
from estimator.calibrate.review import review

START = datetime(2026, 3, 2, tzinfo=UTC)
MODEL = """
import torch

def mlp(batch=4):
    layers = torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    return torch.nn.Sequential(*layers), torch.randn(batch, 32)
"""


def observed(hour: int, allocation: str, step_time_s: float, **other: Any) -> Observation:
    return Observation(
        workload=other.pop("workload", "mlp"),
        allocation=allocation,
        batch_per_gpu=4,
        step_time_s=step_time_s,
        at=START + timedelta(hours=hour),
        **other,
    )


def test_jobs_are_told_apart_by_workload_and_machines() -> None:
    found = review(
        [observed(0, "1x2:t4", 0.2), observed(3, "2x2:t4", 0.3), observed(1, "1x2:a100", 0.1)]
    )
    jobs = [(job.workload, job.machines, job.observations, job.last) for job in found.jobs]
    assert jobs == [
        ("mlp", "a100", 1, START + timedelta(hours=1)),
        ("mlp", "t4", 2, START + timedelta(hours=3)),
    ]


def test_a_slow_node_is_named() -> None:
    steps = [observed(hour, f"a{1 + hour % 3}[0,1]", 0.2) for hour in range(30)]
    steps += [observed(30 + hour, "a3[0,1]", 0.2 * 1.2) for hour in range(6)]
    (found,) = review(steps).drifts
    assert (found.name, found.steps) == ("a3", 6)
    assert found.ratio == pytest.approx(1.2, rel=0.05)


def test_show_prints_jobs_and_outliers(store: Path, command: Callable[..., Any]) -> None:
    assert "no step was observed yet" in command("calibrate", "show").out
    kept = ObservationStore()
    kept.add_many([observed(hour, "1x2:t4", 0.2) for hour in range(3)])
    kept.add(observed(4, "1x2:t4", 200.0))
    answer = command("calibrate", "show")
    assert answer.code == 0
    assert "mlp" in answer.out
    assert "not used" in answer.out
    content = json.loads(command("calibrate", "show", "--json").out)
    assert [job["observations"] for job in content["jobs"]] == [3]
    # The keys that earlier versions printed, which scripts read.
    assert [set(each) for each in content["doubtful"]] == [{"identity", "doubt"}]


def test_fit_compares_observed_steps_with_both_predictions(
    store: Path, tmp_path: Path, command: Callable[..., Any]
) -> None:
    (tmp_path / "tiny.py").write_text(MODEL)
    model = f"{tmp_path / 'tiny.py'}:mlp"
    refused = command("calibrate", "fit", model)
    assert (refused.code, refused.out) == (2, "")
    assert "no step of" in refused.err
    assert "observations.db, which is empty; 'estimator calibrate observe'" in refused.err
    cold = json.loads(command("estimate", model, "--on", "1x2:local", "--json").out)
    ObservationStore().add_many(
        [observed(hour, "1x2:local", 1.5 * cold["step_time_s"]) for hour in range(3)]
    )
    (step,) = json.loads(command("calibrate", "fit", model, "--json").out)["lessons"]
    assert step["engine_s"] == pytest.approx(cold["step_time_s"], rel=1e-9)
    assert step["calibrated_s"] == pytest.approx(step["observed_s"], rel=0.1)
    found = command("estimate", model, "--on", "1x2:local", "--calibration", "-", "--json").out
    assert json.loads(found)["step_time_s"] == pytest.approx(step["calibrated_s"], rel=1e-6)
