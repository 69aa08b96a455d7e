"""Changes of speed are told from outliers and from what is new, and old steps go on to teach."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import estimator as est
from estimator.calibrate.calibrator import Calibrator
from estimator.calibrate.mixture import OUTLIER_WEIGHT
from estimator.calibrate.observed import Observation
from estimator.calibrate.performance_model import EngineTimes
from estimator.calibrate.regressor import StepTimeRegressor
from estimator.calibrate.review import populations, review
from estimator.estimates.engine import DEFAULT
from estimator.estimates.estimate import Estimate
from estimator.graph.ir.op_graph import OpGraph
from estimator.placement.topology import Cluster, Node
from tests.calibrate.test_calibrator import ASSUMED, JOB, OTHER, answer

START = datetime(2026, 3, 2, tzinfo=UTC)  # a Monday
DAY_S = 86400.0
# Devices, nodes, batch, micro-batches, most on a node; compute grows with the batch, and a ring
# takes 40 ms within a node and 90 ms across nodes, not overlapped.
KINDS = np.array(
    [(r, n, b, 1, r // n) for r, n in ((1, 1), (2, 1), (4, 1), (4, 2), (8, 2)) for b in (8, 16)],
    dtype=float,
)


def parts_s(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ring = np.where(rows[:, 1] > 1, 0.09, 0.04) * (1 - 1 / rows[:, 0])
    return 0.01 + 0.005 * rows[:, 2], ring


def fitted(
    rows: np.ndarray,
    times_s: np.ndarray,
    *,
    at: np.ndarray | None = None,
    hosts: Sequence[frozenset[str]] = (),
) -> StepTimeRegressor:
    compute_s, sync_s = parts_s(rows)
    times = EngineTimes(compute_s=compute_s, sync_s=sync_s, step_s=compute_s + sync_s)
    days = DAY_S * np.arange(len(rows)) if at is None else at
    return StepTimeRegressor().fit(rows, times_s, engine_times=times, at=days, hosts=hosts)


def predicted(found: StepTimeRegressor, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Predictions over what an unchanged machine takes, and half-widths."""
    compute_s, sync_s = parts_s(rows)
    step_s = compute_s + sync_s
    times = EngineTimes(compute_s=compute_s, sync_s=sync_s, step_s=step_s)
    answers = found.prediction(rows, engine_times=times)
    return np.exp(answers.log_step) / step_s, answers.half_width


def steps(kinds: np.ndarray, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random ones, with 2 % of noise."""
    rng = np.random.default_rng(seed)
    rows = kinds[rng.integers(len(kinds), size=count)]
    return rows, np.sum(parts_s(rows), axis=0) * np.exp(rng.normal(0, 0.02, count))


@pytest.mark.parametrize("kinds", [KINDS[-1:], KINDS], ids=["one allocation", "several"])
@pytest.mark.parametrize("ratio", [0.6, 1.3, 1.5])
def test_three_steps_show_a_change_and_old_ones_teach_how_steps_grow(
    ratio: float, kinds: np.ndarray
) -> None:
    rows, times_s = steps(kinds, 53)
    times_s[50:] *= ratio
    found = fitted(rows, times_s)
    (change,) = found.changes_.changes
    assert (change.at, change.steps, change.of_network) == (50 * DAY_S, 3, False)
    assert predicted(found, kinds)[0] == pytest.approx(np.full(len(kinds), ratio), rel=0.08)


@pytest.mark.parametrize("new", [1, 2])
def test_until_it_is_confirmed_an_interval_reaches_both_levels(new: int) -> None:
    rows, times_s = steps(KINDS[-1:], 50 + new)
    times_s[50:] *= 1.5
    ratio, half_width = predicted(fitted(rows, times_s), KINDS[-1:])
    assert ratio[0] == pytest.approx(1.0, rel=0.05)
    assert ratio[0] * np.exp(half_width[0]) > 1.5


def test_a_network_that_became_slower_leaves_computing_as_it_is() -> None:
    rows, times_s = steps(KINDS, 80)
    compute_s, sync_s = parts_s(rows)
    times_s[50:] *= ((compute_s + 2 * sync_s) / (compute_s + sync_s))[50:]
    found = fitted(rows, times_s)
    assert found.changes_.changes[0].of_network
    assert {change.at for change in found.changes_.changes} == {50 * DAY_S}
    ratio, _ = predicted(found, KINDS)
    compute_s, sync_s = parts_s(KINDS)
    assert ratio == pytest.approx(1 + sync_s / (compute_s + sync_s), rel=0.08)


def test_what_has_ended_is_no_change() -> None:
    rows, times_s = steps(KINDS, 60)
    times_s[30:45] *= 1.6
    found = fitted(rows, times_s)
    assert found.changes_.changes == ()
    assert predicted(found, KINDS)[0] == pytest.approx(np.ones(len(KINDS)), rel=0.05)


def test_two_changes_are_told_apart() -> None:
    rows, times_s = steps(KINDS, 70)
    times_s[30:] *= 1.5
    times_s[50:] *= 0.6
    found = fitted(rows, times_s)
    assert [change.at / DAY_S for change in found.changes_.changes] == [30, 50]
    assert predicted(found, KINDS)[0] == pytest.approx(np.full(len(KINDS), 0.9), rel=0.05)


def test_one_outlier_moves_nothing() -> None:
    rows, times_s = steps(KINDS, 30)
    times_s[20] *= 3
    found = fitted(rows, times_s)
    assert found.changes_.changes == ()
    assert np.flatnonzero(found.observation_weights_ < OUTLIER_WEIGHT).tolist() == [20]
    without = fitted(np.delete(rows, 20, axis=0), np.delete(times_s, 20))
    assert predicted(found, KINDS)[0] == pytest.approx(predicted(without, KINDS)[0], rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_a_table_sorted_by_allocation_raises_no_alarm(seed: int) -> None:
    """Each placement is 10 % off what the model says of it, for good."""
    rng = np.random.default_rng(seed)
    rows = np.repeat(KINDS, 4, axis=0)
    off = np.repeat(rng.normal(0, 0.1, len(KINDS) // 2), 8)
    times_s = np.sum(parts_s(rows), axis=0) * np.exp(off + rng.normal(0, 0.02, len(rows)))
    assert fitted(rows, times_s).changes_.changes == ()


def test_what_was_seen_at_one_moment_is_on_one_side_of_a_change() -> None:
    rows, times_s = steps(KINDS[-1:], 40)
    times_s[20:] *= 1.5
    assert fitted(rows, times_s, at=np.zeros(40)).changes_.changes == ()
    # Ten of those that are slower are of the moment of the ten before them.
    at = np.repeat([0.0, 1.0, 2.0, 3.0], [10, 20, 5, 5])
    assert {each.at for each in fitted(rows, times_s, at=at).changes_.changes} <= {1.0, 2.0}


def test_many_steps_are_searched_in_a_bounded_time() -> None:
    rows, times_s = steps(KINDS, 1000)
    times_s[600:] *= 1.4
    found = fitted(rows, times_s)
    (change,) = found.changes_.changes
    # Of the earlier steps every twelfth was looked at.
    assert abs(change.at / DAY_S - 600) <= 12
    assert predicted(found, KINDS)[0] == pytest.approx(np.full(len(KINDS), 1.4), rel=0.05)


def kept(
    path: Path, count: int, ratio: float, *, graph: object = JOB, first: int = 0
) -> Calibrator:
    """Daily steps of two nodes that take so many times as long as the engine says."""
    calibrator = Calibrator(path / "o.db")
    cold_s = answer("2x2:synthetic", graph=graph).step_time_s  # type: ignore[arg-type]
    for day in range(count):
        calibrator.observe(
            graph,  # type: ignore[arg-type]
            "2x2:synthetic",
            step_time_s=ratio * cold_s * (1.01 if day % 2 else 0.99),
            batch_per_gpu=64,
            at=START + timedelta(days=first + day),
        )
    return calibrator


def calibrated(calibrator: Calibrator, graph: object = JOB) -> Estimate:
    return answer("2x2:synthetic", graph=graph, calibration=calibrator)  # type: ignore[arg-type]


def test_an_answer_says_since_when_its_machines_are_slower(tmp_path: Path) -> None:
    kept(tmp_path, 30, 1.0)
    calibrator = kept(tmp_path, 3, 1.3, first=30)
    found = calibrated(calibrator)
    cold_s = answer("2x2:synthetic").step_time_s
    assert found.step_time_s == pytest.approx(1.3 * cold_s, rel=0.05)
    # Thirty days after a Monday.
    assert "; since Wednesday 2026-04-01 1.3 × slower on synthetic: 3 steps" in (
        found.plan.coefficients.remark
    )


def test_steps_count_in_order_of_time_and_not_of_arrival(tmp_path: Path) -> None:
    kept(tmp_path, 5, 1.5, first=30)
    late = calibrated(kept(tmp_path, 30, 1.0))
    assert late.step_time_s == pytest.approx(1.5 * answer("2x2:synthetic").step_time_s, rel=0.05)


def test_a_change_that_one_job_showed_holds_for_others_on_the_machines(tmp_path: Path) -> None:
    kept(tmp_path, 30, 1.0, graph=OTHER)
    kept(tmp_path, 30, 1.0)
    calibrator = kept(tmp_path, 5, 1.4, first=30)
    calibrated(calibrator)  # known with its graph
    found = calibrated(calibrator, OTHER)
    true_s = 1.4 * answer("2x2:synthetic", graph=OTHER).step_time_s
    assert found.low_s < true_s < found.high_s
    assert found.step_time_s == pytest.approx(true_s, rel=0.1)
    assert "1.4 × slower on synthetic: 5 steps" in found.plan.coefficients.remark
    # Its own steps after that settle it: this job is as fast as ever.
    calibrator = kept(tmp_path, 3, 1.0, graph=OTHER, first=36)
    calibrated(calibrator)
    found = calibrated(calibrator, OTHER)
    assert found.step_time_s == pytest.approx(true_s / 1.4, rel=0.1)
    assert "since" not in found.plan.coefficients.remark


@pytest.mark.parametrize("has_graph", [True, False], ids=["graph at hand", "store alone"])
def test_a_job_of_old_steps_knows_what_another_showed_of_its_machines(
    tmp_path: Path, has_graph: bool
) -> None:
    kept(tmp_path, 50, 1.0, graph=OTHER)
    kept(tmp_path, 50, 1.0)
    calibrator = kept(tmp_path, 3, 1.4, first=50)
    if has_graph:
        calibrated(calibrator)
    found = calibrated(calibrator, OTHER)
    true_s = 1.4 * answer("2x2:synthetic", graph=OTHER).step_time_s
    assert found.low_s < true_s < found.high_s
    assert found.step_time_s == pytest.approx(true_s, rel=0.1)
    assert "since Tuesday 2026-04-21 1.4 × slower on synthetic: 3 steps" in (
        found.plan.coefficients.remark
    )


def on_hosts(count: int, slow: str, *, since: int = 0, seed: int = 0) -> tuple[Any, ...]:
    """Random steps, each on one or two of four hosts, one of which takes 1.4 times as long."""
    rows, times_s = steps(KINDS, count, seed)
    rng = np.random.default_rng(seed + 1)
    hosts = [
        frozenset(rng.choice(["a1", "a2", "a3", "a4"], int(nodes), replace=False).tolist())
        for nodes in rows[:, 1]
    ]
    times_s *= [1.4 if slow in on and day >= since else 1.0 for day, on in enumerate(hosts)]
    return rows, times_s, hosts


@pytest.mark.parametrize("since", [0, 40], ids=["from the first", "since a day"])
@pytest.mark.parametrize("seed", range(3))
def test_a_slow_host_is_told_from_others_of_its_type(since: int, seed: int) -> None:
    rows, times_s, hosts = on_hosts(60, "a3", since=since, seed=seed)
    found = fitted(rows, times_s, hosts=hosts)
    (change,) = found.changes_.changes
    assert change.host == "a3"
    assert change.hosts == 4
    assert np.exp(change.log_ratio) == pytest.approx(1.4, rel=0.05)
    assert change.at / DAY_S == next(d for d, on in enumerate(hosts) if "a3" in on and d >= since)
    # What is predicted is of hosts like most.
    assert predicted(found, KINDS)[0] == pytest.approx(np.ones(len(KINDS)), rel=0.08)


@pytest.mark.parametrize("seed", range(5))
def test_hosts_alike_raise_no_alarm(seed: int) -> None:
    """Of a table sorted by host too, each placement of which is off for good."""
    rows, times_s, hosts = on_hosts(60, "none", seed=seed)
    off = np.random.default_rng(seed).normal(0, 0.1, 20)
    times_s *= np.exp(off[(2 * rows[:, 0] + rows[:, 1]).astype(int)])
    order = sorted(range(len(hosts)), key=lambda step: sorted(hosts[step]))
    for chosen in (np.arange(len(hosts)), np.array(order)):
        found = fitted(rows[chosen], times_s[chosen], hosts=[hosts[step] for step in chosen])
        assert found.changes_.changes == ()


CLUSTER = Cluster(nodes={f"a{number}": Node(machine="synthetic") for number in range(1, 5)})
HOSTS = [(f"a{one}", f"a{two}") for one, two in combinations(range(1, 5), 2)]


def answer_in_cluster(
    allocation: str,
    *,
    graph: OpGraph = JOB,
    cluster: Cluster = CLUSTER,
    calibration: Calibrator | None = None,
) -> Estimate:
    return est.estimate(
        graph,
        allocation,
        batch_per_gpu=64,
        cluster=cluster,
        profile=ASSUMED.profile(),
        calibration=calibration,
    )


def kept_on_hosts(path: Path, days: Iterable[int], slow: str, graph: OpGraph = JOB) -> Calibrator:
    """A daily step on two of four hosts; one takes 1.4 times as long as the engine says."""
    calibrator = Calibrator(path / "o.db")
    cold_s = answer_in_cluster("a1[0,1]+a2[0,1]", graph=graph).step_time_s
    for day in days:
        hosts = HOSTS[day % len(HOSTS)]
        calibrator.observe(
            graph,
            "+".join(f"{host}[0,1]" for host in hosts),
            step_time_s=cold_s * (1.4 if slow in hosts else 1.0) * (1.01 if day % 4 < 2 else 0.99),
            batch_per_gpu=64,
            at=START + timedelta(days=day),
        )
    return calibrator


def test_an_answer_is_of_the_hosts_it_names_and_else_of_any(tmp_path: Path) -> None:
    calibrator = kept_on_hosts(tmp_path, range(30), "a3")
    cold_s = answer_in_cluster("a1[0,1]+a2[0,1]").step_time_s
    texts = ["a1[0,1]+a2[0,1]", "a1[0,1]+a3[0,1]", "2x2:synthetic"]
    well, slow, any_two = [answer_in_cluster(text, calibration=calibrator) for text in texts]
    assert well.step_time_s == pytest.approx(cold_s, rel=0.03)
    assert slow.step_time_s == pytest.approx(1.4 * cold_s, rel=0.03)
    # Two of four hosts: in one of two cases the slow one is among them.
    assert any_two.step_time_s == pytest.approx(math.sqrt(1.4) * cold_s, rel=0.03)
    assert any_two.low_s < cold_s
    assert any_two.high_s > 1.4 * cold_s
    assert "1.4 × slower on a3: 15 steps" in slow.plan.coefficients.remark
    assert "slower" not in well.plan.coefficients.remark
    table = est.estimate_many(
        JOB, [*texts, *texts], batch_per_gpu=64, cluster=CLUSTER, profile=ASSUMED.profile(),
        calibration=calibrator,
    )  # fmt: skip
    one_by_one = [found.step_time_s for found in (well, slow, any_two)]
    assert table.step_time_s == pytest.approx(np.array(2 * one_by_one), rel=1e-12)


@pytest.mark.parametrize("has_graph", [True, False], ids=["graph at hand", "store alone"])
def test_what_one_job_showed_of_a_host_holds_for_others_there_and_nowhere_else(
    tmp_path: Path, has_graph: bool
) -> None:
    kept_on_hosts(tmp_path, range(50), "none", OTHER)
    calibrator = kept_on_hosts(tmp_path, range(50, 80), "a3")
    if has_graph:
        answer_in_cluster("a1[0,1]", calibration=calibrator)
    cold_s = answer_in_cluster("a1[0,1]+a2[0,1]", graph=OTHER).step_time_s
    well, slow = (
        answer_in_cluster(text, graph=OTHER, calibration=calibrator)
        for text in ("a1[0,1]+a2[0,1]", "a3[0,1]+a4[0,1]")
    )
    assert well.step_time_s == pytest.approx(cold_s, rel=0.03)
    assert slow.low_s < 1.4 * cold_s < slow.high_s
    # A cluster that says how slow it is has said it.
    slowed = Node(machine="synthetic", slowdown_ratio=1.4)
    cluster = Cluster(nodes=CLUSTER.nodes | {"a3": slowed})
    stated, engine = (
        answer_in_cluster("a3[0,1]+a4[0,1]", graph=OTHER, cluster=cluster, calibration=calibration)
        for calibration in (calibrator, None)
    )
    assert stated.step_time_s == pytest.approx(engine.step_time_s, rel=0.03)


def test_a_store_names_the_jobs_that_were_seen_since_a_moment(tmp_path: Path) -> None:
    calibrator = kept(tmp_path, 5, 1.0)
    kept(tmp_path, 4, 1.0, graph=OTHER, first=2)
    for day in range(10):
        calibrator.observe(
            "by name", "1x2:t4", step_time_s=1.0, batch_per_gpu=8, at=START + timedelta(days=day)
        )
    job, other = (("content", DEFAULT.content(graph).fingerprint) for graph in (JOB, OTHER))
    by_name = ("name", "by name")
    assert calibrator.store.jobs_since(START, least=3) == [job, other, by_name]
    assert calibrator.store.jobs_since(START + timedelta(days=3), least=3) == [other, by_name]


def test_steps_after_a_change_are_not_doubted() -> None:
    seen = [
        Observation(
            workload="mlp",
            allocation="2x4:t4",
            batch_per_gpu=8,
            step_time_s=(1.3 if day >= 50 else 1.0) * (1.01 if day % 2 else 0.99),
            at=START + timedelta(days=day),
        )
        for day in range(53)
    ]
    shown = review(seen)
    (drift,) = shown.drifts
    assert (drift.name, drift.steps) == ("t4", 3)
    assert shown.doubted == ()
    # One step by itself is.
    alone = replace(seen[20], step_time_s=1.5)
    assert [one for one, _ in review([*seen[:20], alone, *seen[21:50]]).doubted] == [alone]


def test_two_populations_are_found_among_many_steps() -> None:
    noise = np.resize([0.01, -0.01, 0.005, -0.005], 8000)
    found = populations("t4", np.concatenate([np.log(1.4) + noise[:4000], noise]))
    assert (found.slower, found.steps) == (4000, 12000)
    assert found.ratio == pytest.approx(1.4, rel=1e-3)
