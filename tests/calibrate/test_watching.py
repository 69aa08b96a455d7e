"""A watched loop's step time is kept, and nothing that goes wrong with it reaches the training."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import estimator
from estimator.calibrate import watching
from estimator.calibrate.review import review
from estimator.calibrate.store import Observation, ObservationStore, ObservedWorkload
from estimator.calibrate.watching import GradientNoise, Watch, Window, Windows, observe
from estimator.errors import EstimatorError, ObservationError, StoreError

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
    class Failing(ObservationStore):
        calls = 0

        def add_many(self, observations: Iterable[Observation], **options: Any) -> int:
            self.calls += 1
            if self.calls == 1:
                raise StoreError("the disk is full; free space")
            return super().add_many(observations, **options)

    with observe(Failing(kept.path), **JOB, clock=clock) as watch:
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
    kept: ObservationStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(ObservationStore):
        def add_many(self, observations: Iterable[Observation], **options: Any) -> int:
            raise StoreError("the disk is full; free space")

    with observe(Broken(kept.path), **JOB, clock=clock) as watch:
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


def fill(windows: Windows, times_s: Iterable[float]) -> list[Window]:
    """Every window that these step durations complete."""
    found = (windows.add(time_s, 1) for time_s in times_s)
    return [window for window in found if window is not None]


@pytest.mark.parametrize("first_s", [0.16, 0.0025])
def test_steps_are_dropped_until_the_steady_state(first_s: float) -> None:
    # The distance from 20 ms halves every four steps: from above as caches fill, from below as the
    # queue of an asynchronous device fills.
    settling = [0.02 * (first_s / 0.02) ** (0.5 ** (step / 4)) for step in range(30)]
    windows = Windows(warmup_steps=0)
    fill(windows, [*settling, *[0.02] * 9])
    window = windows.close()
    assert window.step_time_s == pytest.approx(0.02, rel=0.1)
    # The logarithm of the distance falls to 0.6 times in three steps: these agree within 10 % with
    # the three before once it was ln 1.1 / 0.4 = 0.24 or less, of ln 8 = 2.08, in the middle of
    # those: at step 12.5, so that they begin with step 11 to 13.
    assert 11 <= windows.dropped_steps <= 13


def test_a_loop_without_a_steady_state_is_kept_all_the_same() -> None:
    windows = Windows(warmup_steps=0)
    # Three long, three short: the last three never agree with the three before them.
    fill(windows, [0.04, 0.04, 0.04, 0.01, 0.01, 0.01] * 6)
    assert windows.close() is not None


def test_nothing_is_kept_of_a_loop_that_ends_before_its_steady_state() -> None:
    windows = Windows()
    fill(windows, [0.02] * 10)
    assert windows.close() is None
    assert windows.dropped_steps == 10


def test_a_window_ends_after_5_seconds() -> None:
    windows = Windows(warmup_steps=0)
    assert [window.steps for window in fill(windows, [0.5] * 12)] == [10]


def test_later_windows_are_twice_as_long_up_to_64_times() -> None:
    windows = Windows(warmup_steps=0)
    sizes = [window.steps for window in fill(windows, [0.02] * (3150 + 3 * 3200))]
    assert sizes == [50, 100, 200, 400, 800, 1600, 3200, 3200, 3200]


def test_a_window_is_the_median_of_its_steps() -> None:
    windows = Windows(warmup_steps=0)
    fill(windows, [1e-3] * 6)
    windows.close()
    # 11 steps from 10 to 20 ms, one after a long pause: median 15.
    fill(windows, [time_s / 1000 for time_s in (*range(10, 20), 9000)])
    window = windows.close()
    assert window.step_time_s == pytest.approx(0.015)


def test_a_clock_that_stands_still_gives_no_window() -> None:
    windows = Windows(warmup_steps=0)
    assert fill(windows, [0.0] * 60) == []
    assert windows.close() is None


WIDTH, OFF, SIGMA, BATCH = 8, 0.5, 2.0, 16
# Half the squared error of y = e ~ N(0, σ²) by w·x, x ~ N(0, 1): a sample's gradient is
# (w·x − e)·x, its mean w, its covariance (|w|² + σ²)·1 + w·wᵀ.
SQUARED = WIDTH * OFF**2
SCALE = (WIDTH * (SQUARED + SIGMA**2) + SQUARED) / SQUARED


def linear_model() -> nn.Linear:
    model = nn.Linear(WIDTH, 1, bias=False)
    nn.init.constant_(model.weight, OFF)
    return model


def loss_of(model: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    targets = SIGMA * torch.randn(BATCH)
    predicted = model(torch.randn(BATCH, WIDTH)).squeeze(-1)
    return ((predicted - targets) ** 2).mean() / 2


@pytest.mark.parametrize("divisor", [4, 1], ids=["mean of micro-batches", "their sum"])
def test_micro_batches_show_the_noise_of_a_linear_model(
    monkeypatch: pytest.MonkeyPatch, divisor: int
) -> None:
    assert SCALE == 25
    monkeypatch.setattr(watching, "_KEPT", 0.999)
    torch.manual_seed(0)
    model = linear_model()
    noise = GradientNoise(model, batch_per_gpu=BATCH, every_steps=1)
    for _ in range(4000):
        model.zero_grad()
        for _ in range(4):
            (loss_of(model) / divisor).backward()
        # What the optimizer is given is no longer the gradient.
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        noise.step()
    assert noise.measured in (3999, 4000)
    assert noise.scale_samples == pytest.approx(SCALE, rel=0.06)


def test_one_gradient_a_step_shows_nothing_and_is_left_alone() -> None:
    model = linear_model()
    noise = GradientNoise(model, batch_per_gpu=BATCH, every_steps=1)
    for _ in range(30):
        loss_of(model).backward()
        noise.step()
    assert noise.scale_samples is None
    assert not model.weight._backward_hooks


def test_few_measured_steps_and_broken_gradients_say_nothing() -> None:
    model = linear_model()
    noise = GradientNoise(model, batch_per_gpu=BATCH, every_steps=3)
    for step in range(60):
        model.zero_grad()
        for _ in range(2):
            (loss_of(model) * (torch.inf if step == 6 else 1.0)).backward()
        noise.step()
    # Every third of 60, without the one that overflowed; the last one is not read yet.
    assert noise.scale_samples is None
    assert noise.measured == 19
    noise.close()
    assert not model.weight._backward_hooks


def test_layers_that_take_part_in_some_passes_only_are_left_out() -> None:
    two = nn.ModuleList([linear_model(), linear_model()])
    noise = GradientNoise(two, batch_per_gpu=BATCH, every_steps=1)
    for _ in range(3):
        for layers in (two, two[:1]):
            sum(loss_of(layer) for layer in layers).backward()  # type: ignore[union-attr]
        noise.step()
    assert noise.scale_samples is None
    assert noise.measured == 0


def _train_ranks(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    torch.manual_seed(rank)
    model = linear_model()
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    watching._KEPT, watching.EVERY_STEPS = 0.998, 1
    store = ObservationStore(f"{folder}/seen.db") if rank == 0 else None
    about = {"workload": "linear", "allocation": "1x2:local", "batch_per_gpu": BATCH}
    with observe(store, **about, rank=rank, model=wrapped) as watch:  # type: ignore[arg-type]
        for _ in range(1000):
            model.zero_grad()
            loss_of(wrapped).backward()
            watch.step()
    # No rank closes connections that the other one, or its own reducer, still has.
    del wrapped, watch
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # Threads of torch may abort a process whose interpreter ends.
    os._exit(0)


def test_two_ranks_of_ddp_show_it_without_sending_anything(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_train_ranks, (str(tmp_path),), nprocs=2)
    found = ObservationStore(tmp_path / "seen.db").gradient_noise_samples("linear")
    assert found == pytest.approx(SCALE, rel=0.25)


def test_strategies_without_whole_mean_gradients_are_not_measured(store: Path) -> None:
    model = linear_model()
    for strategy in ("fsdp", "zero2", "ps:1", "local-sgd"):
        about = {"workload": "linear", "allocation": "1x2:local", "batch_per_gpu": BATCH}
        with observe(store / "seen.db", **about, strategy=strategy, rank=0, model=model):  # type: ignore[arg-type]
            assert not model.weight._backward_hooks


def test_it_is_kept_and_the_last_one_counts(store: Path) -> None:
    kept = ObservationStore(store / "seen.db")
    seen = {"workload": "gpt2", "allocation": "1x2:local", "batch_per_gpu": 8, "step_time_s": 0.4}
    kept.add_many(
        Observation(**seen, gradient_noise_samples=noise)  # type: ignore[arg-type]
        for noise in (120.0, 450.5, None)
    )
    kept.close()
    again = ObservationStore(store / "seen.db")
    assert [one.gradient_noise_samples for one in again] == [120.0, 450.5, None]
    assert again.gradient_noise_samples("gpt2") == 450.5
    assert again.gradient_noise_samples("bert") is None
    assert review(again).jobs[0].gradient_noise_samples == 450.5
    for wrong in (0.0, -1.0, float("nan"), "many"):
        with pytest.raises(ObservationError, match="gradient_noise_samples must be a positive"):
            Observation(**seen, gradient_noise_samples=wrong)  # type: ignore[arg-type]
