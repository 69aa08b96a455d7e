"""A watched loop's step time is kept, and nothing that goes wrong with it reaches the training."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import estimator
from estimator.calibrate.store import Observation, ObservationStore, ObservedWorkload
from estimator.calibrate.watching import Watch, observe
from estimator.errors import EstimatorError, StoreError

JOB: dict[str, Any] = {"workload": "gpt2", "allocation": "1x2:t4", "batch_per_gpu": 8}


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def kept(tmp_path: Path) -> ObservationStore:
    return ObservationStore(tmp_path / "observations.db")


def train(watch: Watch, clock: Clock, times_s: Iterable[float]) -> None:
    for time_s in times_s:
        clock.now_s += time_s
        watch.step()


def test_a_loop_is_kept_without_its_warm_up(kept: ObservationStore, clock: Clock) -> None:
    with observe(kept, **JOB, strategy="zero1", source="a test", clock=clock) as watch:
        train(watch, clock, [3.0] * 5 + [0.125] * 40)
    (found,) = kept
    assert (found.step_time_s, found.steps) == (0.125, 40)
    assert (found.strategy, found.source, found.ranks) == ("zero1", "a test", 2)
    assert (watch.recorded_steps, watch.dropped_steps) == (40, 5)


def test_what_was_seen_before_an_exception_is_kept(kept: ObservationStore, clock: Clock) -> None:
    def fail_at_step_30() -> None:
        with observe(kept, **JOB, clock=clock) as watch:
            train(watch, clock, [0.125] * 30)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail_at_step_30()
    assert [one.steps for one in kept] == [25]


def test_a_full_window_is_written_while_training_goes_on(
    kept: ObservationStore, clock: Clock
) -> None:
    with observe(kept, **JOB, clock=clock) as watch:
        train(watch, clock, [0.0625] * 54)
        assert len(kept) == 0
        train(watch, clock, [0.0625])
        assert len(kept) == 1


def test_time_skipped_is_no_step(kept: ObservationStore, clock: Clock) -> None:
    with observe(kept, **JOB, clock=clock, warmup_steps=0) as watch:
        for _ in range(8):
            train(watch, clock, [0.125])
            clock.now_s += 50.0
            watch.skip()
    assert [one.step_time_s for one in kept] == [0.125]


def test_an_asynchronous_device_is_synchronised_once_in_ten_steps(
    kept: ObservationStore, clock: Clock
) -> None:
    # The host issues a step in 1 ms; the device, known only by waiting for it, needs 32 ms.
    device_done_s, waits = clock.now_s, 0

    def synchronize() -> None:
        nonlocal waits
        waits += 1
        clock.now_s = max(clock.now_s, device_done_s)

    with observe(kept, **JOB, clock=clock, synchronize=synchronize) as watch:
        for _ in range(200):
            clock.now_s += 0.001
            device_done_s = max(device_done_s, clock.now_s) + 0.032
            watch.step()
    # Once before the first step, then after every tenth.
    assert waits == 1 + 20
    # The device idles 1 ms after each wait, while the host issues the next step.
    assert [one.step_time_s for one in kept] == pytest.approx([(10 * 0.032 + 0.001) / 10] * 3)


def test_long_steps_are_synchronised_one_by_one(kept: ObservationStore, clock: Clock) -> None:
    def synchronize() -> None:
        clock.now_s += 0.5

    with observe(kept, **JOB, clock=clock, synchronize=synchronize) as watch:
        train(watch, clock, [1.0] * 15)
    assert {one.step_time_s for one in kept} == {1.5}


@pytest.mark.parametrize(("variable", "argument"), [("3", None), ("0", 3)])
def test_only_rank_0_watches(
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    argument: int | None,
) -> None:
    monkeypatch.setenv("RANK", variable)
    path = tmp_path / "observations.db"
    with observe(path, **JOB, clock=clock, rank=argument) as watch:
        train(watch, clock, [0.125] * 100)
    assert not path.exists()


def test_a_store_that_fails_gets_the_same_observations_again(
    clock: Clock, caplog: pytest.LogCaptureFixture, kept: ObservationStore
) -> None:
    class Failing:
        calls = 0

        def add_many(self, observations: Iterable[Observation], **options: Any) -> int:
            self.calls += 1
            if self.calls == 1:
                raise StoreError("the disk is full; free space")
            return kept.add_many(observations, **options)

    with observe(Failing(), **JOB, clock=clock) as watch:
        train(watch, clock, [0.0625] * 60)
    assert [one.steps for one in kept] == [50, 5]
    assert caplog.text.count("the disk is full") == 1


def test_a_store_held_by_another_process_does_not_hold_up_training(
    kept: ObservationStore, clock: Clock
) -> None:
    kept.add(Observation(**JOB, step_time_s=0.25))
    holder = sqlite3.connect(kept.path, isolation_level=None)
    with observe(kept, **JOB, clock=clock) as watch:
        holder.execute("BEGIN IMMEDIATE")
        train(watch, clock, [0.0625] * 55)
        holder.execute("ROLLBACK")
    holder.close()
    assert [one.steps for one in kept] == [1, 50]


def test_a_store_lost_for_good_is_told_and_ends_nothing(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def add_many(self, observations: Iterable[Observation], **options: Any) -> int:
            raise StoreError("the disk is full; free space")

    with observe(Broken(), **JOB, clock=clock) as watch:
        train(watch, clock, [0.0625] * 60)
    assert "2 observations of gpt2 are lost" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_per_gpu": 0},
        {"allocation": "everything"},
        {"strategy": "magic"},
        {"warmup_steps": -1},
        {"workload": ""},
    ],
)
def test_invalid_arguments_are_refused_before_training(
    kept: ObservationStore, wrong: dict[str, Any]
) -> None:
    with pytest.raises(EstimatorError, match=r".{30}"):
        observe(kept, **(JOB | wrong))
    assert not kept.path.exists()


def test_the_default_store_is_the_users(
    store: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JOB | {"workload": ObservedWorkload(name="gpt2", parameter_bytes=148)}
    with estimator.observe(**job, clock=clock) as watch:
        train(watch, clock, [0.125] * 20)
    users = ObservationStore(store / "observations.db")
    assert len(users) == 1
    assert users.workloads()["gpt2"].parameter_bytes == 148
