"""Closed forms of training among failures: worked by hand, and beside training that is played."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_failures import simulated_asynchronous_s, simulated_times_s

from estimator.advise.rent.revocations import Revocations
from estimator.advise.rent.transient import (
    Spot,
    TransientCluster,
    Worker,
    best_interval_s,
    checkpoint_s,
    expected_time_s,
    pareto_front,
    server_steps_per_s,
)
from estimator.errors import WorkloadError

HOUR = 3600.0
COSTS = {"checkpoint_s": 60.0, "restart_s": 300.0}


def test_expected_time_by_hand() -> None:
    # M = 100, τ + C = 100·ln 2, R = 100·ln 3: each interval takes 100 · 3 · (2 − 1) = 300 s.
    interval_s = 100 * math.log(2) - 5
    found = expected_time_s(
        4 * interval_s, interval_s, checkpoint_s=5, restart_s=100 * math.log(3), mtbf_s=100
    )
    assert found == pytest.approx(1200)


def test_without_failures_only_checkpoints_are_added() -> None:
    found = expected_time_s(1000, 100, checkpoint_s=5, restart_s=50, mtbf_s=math.inf)
    assert found == pytest.approx(1050)


@given(cost=st.floats(1e-3, 1e4), mtbf=st.floats(10, 1e7), factor=st.floats(0.2, 5).filter(bool))
def test_no_other_interval_is_better_than_the_best(cost: float, mtbf: float, factor: float) -> None:
    costs = {"checkpoint_s": cost, "restart_s": 0.0, "mtbf_s": mtbf}
    best = best_interval_s(cost, mtbf)
    least = expected_time_s(1e9, best, **costs)
    assert least <= expected_time_s(1e9, best * factor, **costs) * (1 + 1e-9)


@given(cost=st.floats(1, 100), mtbf=st.floats(1e4, 1e7))
def test_youngs_interval_comes_close_where_failures_are_rare(cost: float, mtbf: float) -> None:
    # √(2CM): J. W. Young, CACM 17, 1974.
    young = math.sqrt(2 * cost * mtbf)
    assert best_interval_s(cost, mtbf) == pytest.approx(young, rel=2 * math.sqrt(cost / mtbf))


@pytest.mark.parametrize("mtbf_s", [600.0, HOUR, 20 * HOUR])
def test_training_that_is_played_takes_the_expected_time(mtbf_s: float) -> None:
    played = simulated_times_s(20_000, 500, **COSTS, mtbf_s=mtbf_s, runs=20_000)
    expected = expected_time_s(20_000, 500, **COSTS, mtbf_s=mtbf_s)
    error = 4 * played.std() / math.sqrt(len(played))
    assert error < 0.02 * expected
    assert played.mean() == pytest.approx(expected, abs=error)


def test_training_that_cannot_end_is_told() -> None:
    with pytest.raises(WorkloadError, match="does not end; keep checkpoints more often"):
        simulated_times_s(1e6, 1e6, checkpoint_s=0, restart_s=0, mtbf_s=1, runs=1)


def test_published_figures_of_checkpoints_and_servers() -> None:
    assert checkpoint_s(200e6) == pytest.approx(3.65 + 0.0199 * 200)
    # 32 tensors of 2 MB in all: 3.488 ms and 2.64 ms a step; two servers take twice as many.
    assert server_steps_per_s(32, 2e6) == pytest.approx(1 / 6.128e-3)
    assert server_steps_per_s(32, 2e6, servers=2) == pytest.approx(2 / 6.128e-3)


def transient(*rates: float, revoked: float = 0.5, **more: float) -> TransientCluster:
    worker = Revocations(per_hour=(revoked,))
    return TransientCluster(
        workers=tuple(Worker(steps_per_s=rate, revocations=worker) for rate in rates),
        replace_s=more.get("replace_s", 360.0),
        checkpoint_s=more.get("checkpoint_s", 6.0),
        checkpoint_every_steps=more.get("every", 4000.0),
        most_steps_per_s=more.get("most", math.inf),
    )


def test_a_lost_asynchronous_worker_costs_its_own_share() -> None:
    # Each worker is there 1 / (1 + 0.5 · 0.1) of the time, and ahead by λ·d²·a²/2 of it.
    share = 1 / 1.05
    ahead_s = 0.5 / HOUR * (360 * share) ** 2 / 2 / share
    expected = 10_000 / share - ahead_s + 150
    assert transient(5, 5).asynchronous_s(100_000) == pytest.approx(expected)


def test_what_servers_take_bounds_each_moment_not_the_mean() -> None:
    # Two workers of 5 steps/s, each there for 10/11, servers take 8: (100·8 + 2·10·5) / 121.
    cluster = transient(5, 5, revoked=1.0, most=8.0, replace_s=360.0, checkpoint_s=0.0)
    # One that is there adds 8 − 5 beside the other, else 5; each is ahead by λ·d²·a²/2.
    ahead_s = 1 / HOUR * (360 * 10 / 11) ** 2 / 2
    expected = (1e6 - 2 * ahead_s * (10 * 3 + 1 * 5) / 11) / (900 / 121)
    assert cluster.asynchronous_s(1e6) == pytest.approx(expected)


@pytest.mark.parametrize(
    "cluster",
    [
        transient(5, 5, 5, 5),
        transient(9, 3, 1, revoked=2.0),
        transient(*[4] * 8, most=25.0, revoked=1.0),
    ],
)
def test_asynchronous_training_that_is_played_takes_the_expected_time(
    cluster: TransientCluster,
) -> None:
    played = np.array([simulated_asynchronous_s(cluster, 200_000, seed=n) for n in range(300)])
    error = 4 * played.std() / math.sqrt(len(played))
    expected = cluster.asynchronous_s(200_000)
    assert error < 0.02 * expected
    assert played.mean() == pytest.approx(expected, abs=error)


def test_revocations_go_by_the_hour_of_the_day() -> None:
    night_only = Revocations(per_hour=(1.0,) * 6 + (0.0,) * 18)
    assert night_only.expected(4 * HOUR, start_hour=4) == pytest.approx(2)
    assert night_only.expected(48 * HOUR, start_hour=9) == pytest.approx(12)
    assert night_only.mean_per_s == pytest.approx(0.25 / HOUR)
    cluster = TransientCluster(
        workers=(Worker(steps_per_s=1.0, revocations=night_only),),
        replace_s=600.0,
        checkpoint_s=0.0,
        checkpoint_every_steps=1e9,
    )
    # From six in the morning on, 18 hours pass without one.
    assert simulated_asynchronous_s(cluster, 17 * HOUR, start_hour=6) == pytest.approx(17 * HOUR)
    assert cluster.asynchronous_s(17 * HOUR, start_hour=6) == pytest.approx(17 * HOUR)
    nights = [
        simulated_asynchronous_s(cluster, 6 * HOUR, start_hour=0, seed=n) for n in range(2000)
    ]
    # One an hour, each 600 s later than the last: 6 / (1 + 1/6) in six hours; some of what was lost
    # is trained after six, without more.
    lost = np.mean(nights) - 6 * HOUR
    assert lost == pytest.approx(600 * 6 / (1 + 1 / 6), rel=0.05)
    assert cluster.asynchronous_s(6 * HOUR) == pytest.approx(np.mean(nights), rel=0.003)


def test_more_spot_workers_are_worth_it_until_they_set_each_other_back() -> None:
    each = Revocations(per_hour=(0.05,))
    spot = Spot(revocations=each, checkpoint_s=120.0, restart_s=600.0)
    expected_s = {}
    for count in (1, 2, 4, 8, 64, 512):
        of_any = Revocations.of_any([(count, each)])
        (expected_s[count],), _ = spot.times_s([100 * HOUR / count**0.9], of_any)
    front = pareto_front(expected_s, lambda count: (expected_s[count], count * expected_s[count]))
    assert front == [64, 8, 4, 2, 1]
    # 512 workers lose one every 140 s: with restarts of 600 s little is trained.
    assert expected_s[512] > expected_s[1]


@pytest.mark.parametrize("rates", [(), (1.0, 2.0), (-1.0,), (math.nan,), (math.inf,)])
def test_impossible_rates_are_refused(rates: tuple[float, ...]) -> None:
    with pytest.raises(WorkloadError, match="revocations an hour are"):
        Revocations(per_hour=rates)


WORKERS = (Worker(steps_per_s=10.0),) * 2
CLUSTER = {"workers": WORKERS, "replace_s": 90.0, "checkpoint_s": 5.0}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (lambda: checkpoint_s(-1), "size_bytes is -1; give a number from 0 on"),
        (lambda: checkpoint_s(math.nan), "size_bytes is nan"),
        (lambda: server_steps_per_s(0, 0), "tensors is 0; give a number from 1 on"),
        (lambda: server_steps_per_s(10, 1e6, servers=0), "servers is 0"),
        (lambda: Worker(steps_per_s=math.inf), "a worker takes inf steps/s"),
        (lambda: Revocations(per_hour=(1.0,)).expected(-5), "duration_s is -5"),
        (lambda: cluster_of(checkpoint_every_steps=0), "every_steps is 0"),
        (lambda: cluster_of(replace_s=-1), "replace_s is -1; give a number from 0 on"),
        (lambda: cluster_of(checkpoint_s=math.nan), "checkpoint_s is nan"),
        (lambda: cluster_of(most_steps_per_s=0), "most_steps_per_s is 0; give a number above 0"),
        (lambda: cluster_of().asynchronous_s(-1), "steps is -1; give a number from 0 on"),
    ],
)
def test_what_no_training_has_is_refused(asked: Callable[[], object], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        asked()


def cluster_of(**other: float) -> TransientCluster:
    return TransientCluster(**{**CLUSTER, "checkpoint_every_steps": 1000.0, **other})  # type: ignore[arg-type]
