"""The gradient noise scale: of a linear model as worked out, of two ranks, kept and used."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from estimator.calibrate import watching
from estimator.calibrate.observed import Observation
from estimator.calibrate.review import review
from estimator.calibrate.store import ObservationStore
from estimator.calibrate.watching import GradientNoise, observe
from estimator.errors import ObservationError

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


def test_a_store_of_before_opens(store: Path) -> None:
    path = store / "seen.db"
    kept = ObservationStore(path)
    seen = {"workload": "gpt2", "allocation": "1x2:local", "batch_per_gpu": 8, "step_time_s": 0.4}
    kept.add(Observation(**seen))  # type: ignore[arg-type]
    kept.close()
    # As it was without the column.
    before = sqlite3.connect(path)
    before.execute("ALTER TABLE observations DROP COLUMN gradient_noise_samples")
    (version,) = before.execute("PRAGMA user_version").fetchone()
    before.execute(f"PRAGMA user_version = {version - 1}")
    before.commit()
    before.close()
    again = ObservationStore(path)
    assert [one.gradient_noise_samples for one in again] == [None]
    again.add(Observation(**seen, gradient_noise_samples=64.0))  # type: ignore[arg-type]
    assert again.gradient_noise_samples("gpt2") == 64.0
