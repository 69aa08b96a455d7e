"""What a store shows of its jobs, and the commands that print it."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estimator.api import estimate
from estimator.calibrate.calibrator import Calibrator
from estimator.calibrate.observed import Observation
from estimator.calibrate.review import counting_drifts, review
from estimator.calibrate.store import ObservationStore
from estimator.estimates.table import estimate_many
from estimator.placement.topology import Cluster, Node
from tests.synthetic import perceptron

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


def test_a_node_is_found_among_many_in_a_time_that_grows_with_the_steps() -> None:
    """300 steps on each of 32 hosts, one of which became slower."""
    hosts = [f"a{number}[0,1]" for number in range(32)]
    noise = np.random.default_rng(0).normal(0, 0.01, (300, 32))
    steps = [
        observed(hour, host, 0.2 * math.exp(noise[hour, place]))
        for hour in range(300)
        for place, host in enumerate(hosts)
    ]
    steps += [observed(300 + hour, hosts[7], 0.2 * 1.2) for hour in range(20)]
    start_s = time.process_time()
    (found,) = review(steps).drifts
    assert time.process_time() - start_s < 10.0
    assert (found.name, found.steps) == ("a7", 20)
    assert str(found).startswith("a7 is 20 % slower than expected since Saturday 2026-03-14 12:00")


def test_machines_of_one_name_and_two_speeds_are_told_of() -> None:
    noise = [0.99, 1.0, 1.01, 1.0, 0.985, 1.015]
    steps = [observed(hour, "1x2:t4", 0.2 * noise[hour % 6]) for hour in range(24)]
    assert review(steps).populations == ()
    steps += [observed(24 + hour, "1x2:t4", 0.28 * noise[hour % 6]) for hour in range(12)]
    (found,) = review(steps).populations
    assert (found.name, found.slower, found.steps) == ("t4", 12, 36)
    assert found.ratio == pytest.approx(1.4, rel=0.03)
    # Scatter around one speed is one population, however wide.
    wide = [observed(hour, "1x2:t4", 0.2 * 1.02 ** (hour - 20)) for hour in range(40)]
    assert review(wide).populations == ()


def test_an_observation_that_others_contradict_is_named() -> None:
    steps = [observed(hour, f"1x{1 + hour % 4}:t4", 0.2 + 0.02 * (hour % 4)) for hour in range(12)]
    wrong = observed(12, "1x2:t4", 0.9)
    (found,) = review([*steps, wrong]).doubted
    assert found[0] == wrong
    assert "4." in found[1]
    assert "longer than the 12 other steps" in found[1]


def test_show_prints_jobs_and_outliers(store: Path, command: Callable[..., Any]) -> None:
    assert "no step was observed yet" in command("calibrate", "show").out
    kept = ObservationStore()
    kept.add_many([observed(hour, "1x2:t4", 0.2) for hour in range(3)])
    kept.add(observed(4, "1x2:t4", 200.0))
    answer = command("calibrate", "show")
    assert answer.code == 0
    assert "mlp" in answer.out
    assert "doubted, counts little" in answer.out
    content = json.loads(command("calibrate", "show", "--json").out)
    assert [job["observations"] for job in content["jobs"]] == [4]
    # The keys that earlier versions printed, which scripts read.
    assert [set(each) for each in content["outliers"]] == [{"identity", "reason"}]


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
    (step,) = json.loads(command("calibrate", "fit", model, "--json").out)["steps"]
    assert step["engine_s"] == pytest.approx(cold["step_time_s"], rel=1e-9)
    assert step["calibrated_s"] == pytest.approx(step["observed_s"], rel=0.1)
    found = command("estimate", model, "--on", "1x2:local", "--calibration", "-", "--json").out
    assert json.loads(found)["step_time_s"] == pytest.approx(step["calibrated_s"], rel=1e-6)


def test_rows_that_were_altered_are_told_in_one_line(
    store: Path, command: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    kept = ObservationStore()
    kept.add_many([observed(hour, "1x2:t4", 0.2) for hour in range(5)])
    kept.close()
    with contextlib.closing(sqlite3.connect(kept.path, isolation_level=None)) as connection:
        connection.execute("UPDATE observations SET accumulation_steps = -1 WHERE number > 1")
    assert len(kept.observations()) == 1
    (line,) = caplog.messages
    assert line.startswith("4 of the store's rows are left out, such as ")
    # What another job has lost is not told of one that was not observed.
    caplog.clear()
    assert "no step of" in command("calibrate", "fit", "hf:gpt2").sentence
    assert not caplog.messages


def test_a_drift_is_counted_unless_the_cluster_says_how_slow_a_host_is() -> None:
    steps = [observed(hour, f"a{1 + hour % 3}[0,1]", 0.2) for hour in range(30)]
    steps += [observed(30 + hour, "a3[0,1]", 0.2 * 1.2) for hour in range(6)]
    cluster = Cluster(nodes={f"a{number}": Node(machine="t4") for number in (1, 2, 3)})
    counted, (said,) = counting_drifts(cluster, {"a2", "a3"}, steps)
    assert counted.nodes["a3"].slowdown_ratio == pytest.approx(1.2, rel=0.05)
    assert {counted.nodes[name].slowdown_ratio for name in ("a1", "a2")} == {1.0}
    assert "'slowdown = 1.2" in said
    assert counting_drifts(counted, {"a3"}, steps) == (counted, [])
    assert counting_drifts(cluster, {"a1"}, steps) == (cluster, [])
    # A host that the cluster does not have is refused elsewhere.
    without = Cluster(nodes={"a1": cluster.nodes["a1"]})
    assert counting_drifts(without, {"a3"}, steps) == (without, [])


def test_a_job_that_saw_a_host_grow_slow_among_others_expects_it_slow_there(
    tmp_path: Path, store: Path
) -> None:
    graph = perceptron([8, 16, 4], batch=4)
    cluster = Cluster(nodes={f"a{number}": Node(machine="local") for number in (1, 2, 3)})
    healthy_s = estimate(graph, "a1[0]", cluster=cluster).step_time_s
    calibrator = Calibrator(tmp_path / "seen.sqlite")
    for hour in range(36):
        host, step_s = (f"a{1 + hour % 3}", 1.1) if hour < 30 else ("a3", 1.1 * 1.2)
        one = observed(hour, f"{host}[0]", step_s * healthy_s)
        calibrator.add_many([replace(one, workload=graph.name, batch_per_gpu=4)])
    counted, _ = calibrator.counting_drifts(cluster)
    for known in (cluster, counted):
        slow = estimate(graph, "a3[0]", cluster=known, calibration=calibrator)
        assert slow.low_s < 1.1 * 1.2 * healthy_s < slow.high_s
        assert slow.step_time_s == pytest.approx(1.1 * 1.2 * healthy_s, rel=0.05)
        well = estimate(graph, "a1[0]", cluster=known, calibration=calibrator)
        assert well.step_time_s == pytest.approx(1.1 * healthy_s, rel=0.05)


def test_a_table_counts_the_drift_of_hosts_by_the_calibrators_cluster(
    tmp_path: Path, store: Path
) -> None:
    calibrator = Calibrator(tmp_path / "seen.sqlite")
    steps = [observed(hour, f"a{1 + hour % 3}[0]", 0.2) for hour in range(30)]
    calibrator.add_many([*steps, *(observed(30 + hour, "a3[0]", 0.24) for hour in range(6))])
    graph = perceptron([8, 16, 4], batch=4)
    cluster = Cluster(nodes={f"a{number}": Node(machine="local") for number in (1, 2, 3)})
    counted, (said,) = calibrator.counting_drifts(cluster)
    assert "a3 is 20 % slower" in said
    healthy, drifted = estimate_many(graph, ["a1[0]", "a3[0]"], cluster=counted).step_time_s
    assert drifted == pytest.approx(1.2 * healthy, rel=1e-3)
