"""Wrong observations neither raise the error on true ones much nor go unnoticed."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estimator.api import estimate
from estimator.calibrate.calibrator import Calibrator
from estimator.calibrate.mixture import OUTLIER_WEIGHT
from estimator.calibrate.observed import Observation
from estimator.calibrate.performance_model import BATCH, LARGEST_NODE, NODES, RANKS
from estimator.calibrate.regressor import StepTimeRegressor
from estimator.calibrate.review import counting_drifts, review
from estimator.calibrate.store import ObservationStore
from estimator.placement.topology import Cluster, Node
from tests.calibrate.test_step_time_regressor import MEASURED_S, ROWS
from tests.conftest import Command
from tests.synthetic import perceptron

Wrong = Callable[[np.random.Generator, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
START = datetime(2026, 3, 2, tzinfo=UTC)


def of_another_batch(
    _: np.random.Generator, rows: np.ndarray, times_s: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    rows = rows.copy()
    rows[:, BATCH] *= np.where(rows[:, BATCH] >= 32, 1 / 8, 8)
    return rows, times_s


def copied(times: int, ratio: float, rows: np.ndarray, times_s: np.ndarray) -> tuple[Any, Any]:
    """Observations that are wrong by a ratio, each so many times."""
    return np.repeat(rows, times, axis=0), np.repeat(ratio * times_s, times)


def random(
    rng: np.random.Generator, rows: np.ndarray, times_s: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    factors = np.exp(rng.uniform(np.log(2), np.log(10), len(rows)))
    return rows, times_s * factors ** rng.choice([-1, 1], len(rows))


KINDS: dict[str, Wrong] = {
    "random": random,
    "contradictory": lambda rng, rows, times_s: (rows, times_s * rng.choice([1 / 3, 3])),
    "of another model": lambda _, rows, times_s: (rows, 4 * times_s),
    "of another batch": of_another_batch,
    "copied thrice": lambda _, rows, times_s: copied(3, 3, rows, times_s),
    "too long, fifty times": lambda _, rows, times_s: copied(50, 3, rows[:1], times_s[:1]),
    "too short, fifty times": lambda _, rows, times_s: copied(50, 1 / 3, rows[:1], times_s[:1]),
}


def observed(
    seed: int, count: int, wrong: Wrong
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """True rows and step times, of 3 % of noise, and wrong ones made of a fifth of them."""
    rng = np.random.default_rng(seed)
    measured_s = MEASURED_S * np.exp(rng.normal(0, 0.03, len(ROWS)))
    seen = np.concatenate([[0, 3], rng.choice(np.arange(4, len(ROWS)), count - 2, replace=False)])
    rows, times_s = ROWS[seen], measured_s[seen]
    chosen = rng.choice(count, count // 5, replace=False)
    return rows, times_s, *wrong(rng, rows[chosen], times_s[chosen])


@cache
def clean_fit(seed: int, count: int) -> StepTimeRegressor:
    """The fit of the true observations, which whatever is wrong beside them does not change."""
    rows, times_s, _, _ = observed(seed, count, random)
    return StepTimeRegressor().fit(rows, times_s)


def error(fitted: StepTimeRegressor) -> float:
    """Mean relative error over all rows."""
    return float(np.mean(np.abs(fitted.predict(ROWS) / MEASURED_S - 1)))


def is_far(clean: StepTimeRegressor, rows: np.ndarray, times_s: np.ndarray) -> np.ndarray:
    """`calibrate show` names what is this far off; what is off by less may pass."""
    return np.abs(np.log(clean.predict(rows) / times_s)) > np.log(2)


@pytest.mark.parametrize("wrong", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("count", [12, 20])
@pytest.mark.parametrize("seed", range(4))
def test_wrong_observations_raise_no_error_by_half(wrong: Wrong, count: int, seed: int) -> None:
    rows, times_s, wrong_rows, wrong_s = observed(seed, count, wrong)
    clean = clean_fit(seed, count)
    fitted = StepTimeRegressor().fit(
        np.vstack([rows, wrong_rows]), np.concatenate([times_s, wrong_s])
    )
    assert error(fitted) < 1.5 * error(clean)
    far = is_far(clean, wrong_rows, wrong_s)
    assert (fitted.observation_weights_[count:][far] < OUTLIER_WEIGHT).all()


@pytest.mark.parametrize("count", [12, 20])
@pytest.mark.parametrize("seed", range(4))
def test_copies_of_a_right_observation_make_no_other_answer_surer(count: int, seed: int) -> None:
    rows, times_s, _, _ = observed(seed, count, random)
    copies = np.concatenate([np.arange(count), np.repeat(count // 2, 50)])
    clean = clean_fit(seed, count)
    fitted = StepTimeRegressor().fit(rows[copies], times_s[copies])
    assert error(fitted) < 1.25 * error(clean)
    others = ROWS[(rows[count // 2] != ROWS).any(axis=1)]
    before, after = (
        np.mean(np.log(high / low))
        for low, high in (each.predict_interval(others) for each in (clean, fitted))
    )
    assert after > 0.85 * before


@pytest.mark.parametrize("wrong", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_show_names_every_observation_that_is_far_off(
    wrong: Wrong, seed: int, store: Path, command: Command
) -> None:
    rows, times_s, wrong_rows, wrong_s = observed(seed, 20, wrong)
    clean = clean_fit(seed, 20)
    far = is_far(clean, wrong_rows, wrong_s)
    # In random order: all of them after the others would be a change of speed.
    order = np.random.default_rng(seed).permutation(len(rows) + len(wrong_rows))
    every, every_s = np.vstack([rows, wrong_rows]), np.concatenate([times_s, wrong_s])
    every, every_s = every[order], every_s[order]
    ObservationStore().add_many(
        Observation(
            workload="mlp",
            allocation=placement(row),
            batch_per_gpu=int(row[BATCH]),
            step_time_s=step_s,
            at=START + timedelta(hours=hour),
        )
        for hour, (row, step_s) in enumerate(zip(every, every_s, strict=True))
    )
    out = " ".join(command("calibrate", "show").out.split())
    for row in np.unique(wrong_rows[far], axis=0):
        same = (wrong_rows[far] == row).all(axis=1).sum()
        times = f", {same} observations" if same > 1 else ""
        what = f"mlp on {placement(row)} with batch {row[BATCH]:.0f}{times}: "
        assert f"doubted, counts little: {what}" in out


def placement(row: np.ndarray) -> str:
    """An allocation of a row: most devices on the first node, the others evenly."""
    ranks, nodes, most = int(row[RANKS]), int(row[NODES]), int(row[LARGEST_NODE])
    each, more = divmod(ranks - most, max(nodes - 1, 1))
    sizes = [most, *(each + (number < more) for number in range(nodes - 1))]
    groups = [f"{sizes.count(size)}x{size}:t4" for size in dict.fromkeys(sizes)]
    return "+".join(groups)


def doubted(*rows: tuple[float, dict[str, Any]]) -> list[float]:
    """The step times that the others contradict, seen hour by hour."""
    seen = [
        review_observed(hour, step_time_s=step_time_s, **{"allocation": "1x2:t4"} | fields)
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


def review_observed(hour: int, allocation: str, step_time_s: float, **other: Any) -> Observation:
    return Observation(
        workload=other.pop("workload", "mlp"),
        allocation=allocation,
        batch_per_gpu=4,
        step_time_s=step_time_s,
        at=START + timedelta(hours=hour),
        **other,
    )


def drifting(devices: str) -> list[Observation]:
    """Thirty hours on three hosts in turn, then six on the last, which takes a fifth longer."""
    steps = [review_observed(hour, f"a{1 + hour % 3}{devices}", 0.2) for hour in range(30)]
    return steps + [review_observed(30 + hour, f"a3{devices}", 0.2 * 1.2) for hour in range(6)]


def test_jobs_are_told_apart_by_workload_and_machines() -> None:
    seen = ((0, "1x2:t4", 0.2), (3, "2x2:t4", 0.3), (1, "1x2:a100", 0.1))
    found = review([review_observed(*each) for each in seen])
    jobs = [(job.workload, job.machines, job.observations, job.last) for job in found.jobs]
    assert jobs == [
        ("mlp", "a100", 1, START + timedelta(hours=1)),
        ("mlp", "t4", 2, START + timedelta(hours=3)),
    ]


def test_a_node_is_found_among_many_in_a_time_that_grows_with_the_steps() -> None:
    """300 steps on each of 32 hosts, one of which became slower."""
    hosts = [f"a{number}[0,1]" for number in range(32)]
    noise = np.random.default_rng(0).normal(0, 0.01, (300, 32))
    steps = [
        review_observed(hour, host, 0.2 * math.exp(noise[hour, place]))
        for hour in range(300)
        for place, host in enumerate(hosts)
    ]
    steps += [review_observed(300 + hour, hosts[7], 0.2 * 1.2) for hour in range(20)]
    start_s = time.process_time()
    (found,) = review(steps).drifts
    assert time.process_time() - start_s < 10.0
    assert (found.name, found.steps) == ("a7", 20)
    assert str(found).startswith("a7 is 20 % slower than expected since Saturday 2026-03-14 12:00")


def test_machines_of_one_name_and_two_speeds_are_told_of() -> None:
    noise = [0.99, 1.0, 1.01, 1.0, 0.985, 1.015]
    steps = [review_observed(hour, "1x2:t4", 0.2 * noise[hour % 6]) for hour in range(24)]
    assert review(steps).populations == ()
    steps += [review_observed(24 + hour, "1x2:t4", 0.28 * noise[hour % 6]) for hour in range(12)]
    (found,) = review(steps).populations
    assert (found.name, found.slower, found.steps) == ("t4", 12, 36)
    assert found.ratio == pytest.approx(1.4, rel=0.03)
    # Scatter around one speed is one population, however wide.
    wide = [review_observed(hour, "1x2:t4", 0.2 * 1.02 ** (hour - 20)) for hour in range(40)]
    assert review(wide).populations == ()


def test_an_observation_that_others_contradict_is_named() -> None:
    steps = [
        review_observed(hour, f"1x{1 + hour % 4}:t4", 0.2 + 0.02 * (hour % 4)) for hour in range(12)
    ]
    wrong = review_observed(12, "1x2:t4", 0.9)
    (found,) = review([*steps, wrong]).doubted
    assert found[0] == wrong
    assert "4." in found[1]
    assert "longer than the 12 other steps" in found[1]


def test_show_prints_jobs_and_outliers(store: Path, command: Command) -> None:
    assert "no step was observed yet" in command("calibrate", "show").out
    kept = ObservationStore()
    kept.add_many([review_observed(hour, "1x2:t4", 0.2) for hour in range(3)])
    kept.add(review_observed(4, "1x2:t4", 200.0))
    answer = command("calibrate", "show")
    assert answer.code == 0
    assert "mlp" in answer.out
    assert "doubted, counts little" in answer.out
    content = command("calibrate", "show", "--json").content
    assert [job["observations"] for job in content["jobs"]] == [4]
    # The keys that earlier versions printed, which scripts read.
    assert [set(each) for each in content["outliers"]] == [{"identity", "reason"}]


def test_fit_compares_observed_steps_with_both_predictions(
    store: Path, tiny: str, command: Command
) -> None:
    refused = command("calibrate", "fit", tiny)
    assert (refused.code, refused.out) == (2, "")
    assert "no step of" in refused.err
    assert "observations.db, which is empty; 'estimator calibrate observe'" in refused.err
    cold = command("estimate", tiny, "--on", "1x2:local", "--json").content
    ObservationStore().add_many(
        [review_observed(hour, "1x2:local", 1.5 * cold["step_time_s"]) for hour in range(3)]
    )
    (step,) = command("calibrate", "fit", tiny, "--json").content["steps"]
    assert step["engine_s"] == pytest.approx(cold["step_time_s"], rel=1e-9)
    assert step["calibrated_s"] == pytest.approx(step["observed_s"], rel=0.1)
    found = command("estimate", tiny, "--on", "1x2:local", "--calibration", "-", "--json").out
    assert json.loads(found)["step_time_s"] == pytest.approx(step["calibrated_s"], rel=1e-6)


def test_rows_that_were_altered_are_told_in_one_line(
    store: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    kept = ObservationStore()
    kept.add_many([review_observed(hour, "1x2:t4", 0.2) for hour in range(5)])
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
    steps = drifting("[0,1]")
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
        one = review_observed(hour, f"{host}[0]", step_s * healthy_s)
        calibrator.store.add_many([replace(one, workload=graph.name, batch_per_gpu=4)])
    counted, _ = calibrator.counting_drifts(cluster)
    for known in (cluster, counted):
        slow = estimate(graph, "a3[0]", cluster=known, calibration=calibrator)
        assert slow.low_s < 1.1 * 1.2 * healthy_s < slow.high_s
        assert slow.step_time_s == pytest.approx(1.1 * 1.2 * healthy_s, rel=0.05)
        well = estimate(graph, "a1[0]", cluster=known, calibration=calibrator)
        assert well.step_time_s == pytest.approx(1.1 * healthy_s, rel=0.05)
