"""Training by the hour of the day and up to a lifetime, beside training that is played."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from simulated_failures import simulated_asynchronous_s, simulated_lives_s

from estimator.advise.rent.revocations import Lives, Revocations, presence, read_revocations
from estimator.advise.rent.transient import Spot, TransientCluster, Worker, expected_time_s
from estimator.errors import WorkloadError

HOUR, DAY = 3600.0, 86400.0
COSTS = {"checkpoint_s": 60.0, "restart_s": 300.0}
# None by night, one an hour by day, few in the evening.
BY_HOUR = (0.0,) * 8 + (1.0,) * 10 + (0.3,) * 6


def lives(
    per_hour: tuple[float, ...] = BY_HOUR, lifetime_s: float = math.inf, **other: float
) -> Lives:
    revocations = Revocations(per_hour=per_hour, lifetime_s=lifetime_s)
    return Lives(**{"interval_s": 1800.0, **COSTS, **other, "revocations": revocations})  # type: ignore[arg-type]


def four_workers(revocations: Revocations, *, replace_s: float) -> TransientCluster:
    """Asynchronous ones, whose servers take 35 of the 40 steps that they make in a second."""
    return TransientCluster(
        workers=(Worker(steps_per_s=10.0, revocations=revocations),) * 4,
        replace_s=replace_s,
        checkpoint_s=6.0,
        checkpoint_every_steps=40_000,
        most_steps_per_s=35.0,
    )


def played_s(of: Lives, work_s: float, *, start_hour: float, runs: int = 4000) -> float:
    """The mean time of training that is played, known to 0.3 %."""
    times = simulated_lives_s(of, work_s, start_hour=start_hour, runs=runs)
    assert times.std() / math.sqrt(runs) < 0.003 * times.mean()
    return float(times.mean())


@pytest.mark.parametrize(
    ("of", "work_h", "start_hour"),
    [
        pytest.param(lives(), 4, 10, id="four hours from ten"),
        pytest.param(lives(), 72, 6.3, id="three days"),
        pytest.param(lives(tuple(4 * rate for rate in BY_HOUR)), 40, 6.3, id="hardly by day"),
        pytest.param(lives((0.02,), DAY, restart_s=600.0), 72, 0, id="24 hours at most"),
        pytest.param(lives(lifetime_s=5 * HOUR), 40, 3, id="five hours at most"),
        pytest.param(
            lives(lifetime_s=DAY, checkpoint_s=25.0, warning_s=30.0, interval_s=72 * HOUR),
            *(72, 3),
            id="kept when warned alone",
        ),
        pytest.param(
            lives(checkpoint_s=25.0, warning_s=30.0), 6, 10, id="kept when warned and before"
        ),
        pytest.param(lives(checkpoint_s=5.0, interval_s=120.0), 24, 3, id="many intervals"),
        pytest.param(lives(lifetime_s=DAY), 45 * 24, 3, id="longer than what is solved"),
    ],
)
def test_training_by_the_hour_takes_as_long_as_when_it_is_played(
    of: Lives, work_h: float, start_hour: float
) -> None:
    runs = 4000 if work_h < 100 else 150
    (found,) = of.expected_s([work_h * HOUR], start_hour)
    expected = played_s(of, work_h * HOUR, start_hour=start_hour, runs=runs)
    assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("per_hour", [0.01, 0.2, 2.0])
@pytest.mark.parametrize("intervals", [1, 8, 150])
def test_the_same_rate_at_every_hour_is_the_closed_form(per_hour: float, intervals: int) -> None:
    work_s = intervals * 1800.0
    (found,) = lives((per_hour,)).expected_s([work_s])
    expected = expected_time_s(work_s, 1800.0, **COSTS, mtbf_s=HOUR / per_hour)
    assert found == pytest.approx(expected, rel=0.003)


def test_one_rate_is_answered_by_the_closed_form_itself() -> None:
    steady = Revocations(per_hour=(0.25,) * 24)
    (found,), interval_s = Spot(revocations=steady, **COSTS).times_s([20 * HOUR], steady)
    assert found == expected_time_s(20 * HOUR, interval_s, **COSTS, mtbf_s=4 * HOUR)


def test_a_night_without_revocations_costs_only_checkpoints() -> None:
    # Seven hours from midnight on, in intervals of half an hour.
    assert lives().expected_s([7 * HOUR])[0] == pytest.approx(7 * HOUR + 14 * 60)
    # At the mean rate of the day it would take a fifth more.
    mean_s = HOUR * 24 / sum(BY_HOUR)
    assert expected_time_s(7 * HOUR, 1800.0, **COSTS, mtbf_s=mean_s) > 1.2 * 7 * HOUR


def test_a_lifetime_ends_training_on_time_by_hand() -> None:
    # Ten hours of work on instances that stay for four, a checkpoint an hour (60 s), a restart of
    # 300 s: a first life keeps 3 of them, the second and third 3 each, and one is left.
    found = lives((0.0,), 4 * HOUR, interval_s=HOUR).expected_s([10 * HOUR])[0]
    assert found == pytest.approx(3 * 4 * HOUR + 300 + 3660, rel=1e-6)
    # Warned, a checkpoint of 60 s keeps 3:59 of the first, 3:54 of the second: 2:07 are left.
    warned = lives((0.0,), 4 * HOUR, interval_s=10 * HOUR, warning_s=120.0)
    assert warned.expected_s([10 * HOUR])[0] == pytest.approx(
        2 * 4 * HOUR + 300 + 60 + 127 * 60, rel=1e-3
    )


def test_a_warning_that_is_too_short_is_worth_nothing() -> None:
    without, short = (lives(warning_s=warning_s) for warning_s in (0.0, 59.0))
    assert short.expected_s([20 * HOUR]) == without.expected_s([20 * HOUR])
    assert lives(warning_s=60.0).expected_s([20 * HOUR]) < without.expected_s([20 * HOUR])


def test_what_keeps_nothing_does_not_end() -> None:
    assert lives((0.1,), 2000.0).expected_s([HOUR]) == [math.inf]
    assert lives((300.0,) * 24, DAY).expected_s([HOUR]) == [math.inf]
    # An interval longer than the one quiet hour is never kept.
    hardly = (1000.0,) * 23 + (0.0,)
    assert lives(hardly, interval_s=7200.0).expected_s([4 * HOUR]) == [math.inf]
    # Where one hour is quiet it ends, in that hour of some day.
    (once,) = lives((300.0,) * 23 + (0.0,), interval_s=600.0).expected_s([600.0])
    assert once == pytest.approx(23 * HOUR + 960, rel=0.02)


def test_the_interval_is_the_best_of_those_tried() -> None:
    revocations = Revocations(per_hour=BY_HOUR, lifetime_s=DAY)
    (best,), interval_s = Spot(revocations=revocations, **COSTS).times_s([30 * HOUR], revocations)
    assert (30 * HOUR / interval_s) == pytest.approx(round(30 * HOUR / interval_s))
    for other_s in (300.0, 900.0, 7200.0):
        assert best <= lives(lifetime_s=DAY, interval_s=other_s).expected_s([30 * HOUR])[0]


def test_any_of_many_instances_ends_a_life() -> None:
    rare = Revocations(per_hour=(0.5,), lifetime_s=DAY)
    often = Revocations(per_hour=tuple(float(hour) for hour in range(24)))
    both = Revocations.of_any([(2, rare), (3, often)])
    assert both.per_hour[:3] == (1.0, 4.0, 7.0)
    assert both.lifetime_s == DAY
    assert Revocations.of_any([(4, Revocations(per_hour=(0.25,)))]).is_steady


def test_a_worker_is_there_as_often_as_its_rate_says() -> None:
    # After a while 1 / (1 + 2 · 0.5) of the time, and by a lifetime of 2 h with 1 h between 2 of 3.
    steady = presence(
        Revocations(per_hour=(2.0,)), 1800.0, begin_s=0.0, step_s=300.0, steps=12 * 24
    )
    assert steady[-1] == pytest.approx(0.5, rel=0.005)
    aged = presence(
        Revocations(lifetime_s=2 * HOUR), HOUR, begin_s=0.0, step_s=300.0, steps=12 * 24
    )
    assert aged.mean() == pytest.approx(2 / 3, rel=0.02)


@pytest.mark.parametrize(
    ("revocations", "steps", "start_hour"),
    [
        (Revocations(per_hour=BY_HOUR), 4 * HOUR * 40, 10.0),
        (Revocations(per_hour=BY_HOUR, lifetime_s=DAY), 60 * HOUR * 40, 5.5),
        (Revocations(per_hour=(0.3,), lifetime_s=6 * HOUR), 60 * HOUR * 40, 0.0),
    ],
)
def test_asynchronous_training_by_the_hour_takes_as_long_as_when_it_is_played(
    revocations: Revocations, steps: float, start_hour: float
) -> None:
    cluster = four_workers(revocations, replace_s=1200.0)
    runs = [
        simulated_asynchronous_s(cluster, steps, start_hour=start_hour, seed=n) for n in range(200)
    ]
    found = cluster.asynchronous_s(steps, start_hour)
    assert np.std(runs) / math.sqrt(200) < 0.004 * np.mean(runs)
    assert found == pytest.approx(np.mean(runs), rel=0.01)


def test_one_rate_through_the_day_is_the_closed_form_of_asynchronous_workers() -> None:
    def cluster(lifetime_s: float) -> TransientCluster:
        # A lifetime that nobody reaches.
        taken = Revocations(per_hour=(0.5,), lifetime_s=lifetime_s)
        return four_workers(taken, replace_s=360.0)

    expected = cluster(math.inf).asynchronous_s(4e6)
    assert cluster(1e9).asynchronous_s(4e6, start_hour=3) == pytest.approx(expected, rel=0.003)
    # Longer than what is followed.
    expected = cluster(math.inf).asynchronous_s(4e8)
    assert cluster(1e9).asynchronous_s(4e8) == pytest.approx(expected, rel=0.003)


def test_synchronous_workers_go_by_the_hour_too() -> None:
    worker = Worker(steps_per_s=1.0, revocations=Revocations(per_hour=BY_HOUR, lifetime_s=DAY))
    cluster = TransientCluster(
        workers=(worker,) * 2, replace_s=300.0, checkpoint_s=60.0, checkpoint_every_steps=1800
    )
    pair = lives(tuple(2 * rate for rate in BY_HOUR), DAY)
    assert cluster.synchronous_s(9 * HOUR, 10.0) == pair.expected_s([9 * HOUR], 10.0)[0]


def test_rates_are_read_from_numbers_and_files(tmp_path: Path) -> None:
    assert read_revocations(",".join(["0.5"] * 24)).per_hour == (0.5,) * 24
    path = tmp_path / "rates.csv"
    lines = [f"{machine},{hour},{hour / 100}" for machine in ("a", "b") for hour in range(24)]
    path.write_text("machine,hour,per_hour\n" + "\n".join(lines))
    read = read_revocations(str(path), lifetime_s=DAY)
    assert isinstance(read, dict)
    assert read["b"] == Revocations(
        per_hour=tuple(hour / 100 for hour in range(24)), lifetime_s=DAY
    )
    path.write_text("hour,per_hour\n" + "\n".join(f"{hour},1" for hour in range(24)))
    assert read_revocations(str(path)) == Revocations(per_hour=(1.0,) * 24)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no rates; begin it with hour,per_hour"),
        ("hour,per_hour", "has no lines; give one for each of 24 hours"),
        ("hour,per_hour\n24,1", "line 2: .*24"),
        ("hour,per_hour\n1,1\n1,2", "line 3: hour 1 stands twice"),
        ("hour,per_hour\n1,often", "line 2: .*often"),
        ("hour,per_hour\n1,1", "has 1 hours; give a line for each of 24"),
        ("machine,hour,per_hour\nm,1,1", "has 1 hours of 'm'"),
    ],
)
def test_files_without_rates_are_refused(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "rates.csv"
    path.write_text(content)
    with pytest.raises(WorkloadError, match=said):
        read_revocations(str(path))


@pytest.mark.parametrize("text", ["1,2", "often", "rates.txt", "-1", "missing.csv"])
def test_texts_without_rates_are_refused(text: str) -> None:
    with pytest.raises(WorkloadError, match=r"24|cannot read missing.csv"):
        read_revocations(text)


def test_what_is_assumed_of_instances_is_said() -> None:
    spot = Spot(
        revocations=Revocations(per_hour=BY_HOUR, lifetime_s=DAY),
        checkpoint_s=20.0,
        warning_s=30.0,
        start_hour=22.5,
    )
    assert spot.assumptions == [
        "training starts at 22:30",
        "a restart begins on new instances, all at once",
        "a checkpoint of 20.0 s is written within the 30.0 s before a revocation, and none else",
    ]
    assert Spot(revocations=Revocations(per_hour=(1.0,)), warning_s=30.0).assumptions == [
        "a warning of 30.0 s is too short for a checkpoint of 60.0 s"
    ]
    with pytest.raises(WorkloadError, match="lifetime_s is 0; give a time above 0"):
        Revocations(lifetime_s=0.0)
    never = Revocations(lifetime_s=300.0)
    assert Spot(revocations=never).times_s([HOUR], never)[0] == [math.inf]
