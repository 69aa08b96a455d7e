"""Callbacks trace what trains, time its steps, and set both side by side, in every framework."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from estimator.calibrate.store import ObservationStore
from estimator.errors import AllocationError, StoreError, StrategyError
from estimator.integrations.callbacks import training as accelerate_callback
from estimator.integrations.callbacks.training import (
    Comparison,
    HookedTraining,
    Settings,
    WatchedTraining,
    precision_of,
)

STEPS = 60


class Regression(nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean squared error, in a mapping."""
        loss = nn.functional.mse_loss(self.layers(features).squeeze(-1), labels)
        return {"loss": loss}


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "features": torch.randn(32, generator=generator),
            "labels": torch.randn((), generator=generator),
        }
        for _ in range(count)
    ]


def check(found: Comparison | None, store: Path, *, batch: int) -> Comparison:
    """What every framework's callback must have said and kept."""
    assert found.predicted is not None, found.refusal
    assert found.predicted.batch_per_gpu == batch
    # After the traced first step: 5 of warm-up, then at most 30 until step times count as steady.
    assert STEPS - 1 - 5 - 30 <= found.steps < STEPS
    kept = list(ObservationStore(store / "seen.db"))
    assert sum(one.steps for one in kept) == found.steps
    assert {one.fingerprint for one in kept} != {None}
    assert found.error_ratio == pytest.approx(found.predicted.step_time_s / found.measured_s - 1)
    return found


def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(STEPS):
        batch = {"features": torch.randn(8, 32), "labels": torch.randn(8)}
        loss = model(**batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_hooks_watch_a_plain_loop_and_leave_nothing_behind(store: Path) -> None:
    torch.manual_seed(0)
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters())
    said: list[str] = []
    settings = Settings(store=store / "seen.db", report=store / "out.json", say=said.append)
    with HookedTraining(model, optimizer, settings, ranks=1, precision="fp32") as watched:
        loop(model, optimizer)
    found = check(watched.training.comparison, store, batch=8)
    assert said == [str(found)]
    assert "Regression on 1x1:local: predicted " in said[0]
    assert json.loads((store / "out.json").read_text())["steps"] == found.steps
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_the_noise_of_gradients_is_measured_where_micro_batches_are_added(store: Path) -> None:
    torch.manual_seed(0)
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    settings = Settings(store=store / "seen.db", say=lambda line: None)
    watched = HookedTraining(
        model, optimizer, settings, ranks=1, accumulation_steps=2, precision="fp32"
    )
    with watched:
        for _ in range(260):
            optimizer.zero_grad()
            for _ in range(2):
                # Labels that features say: gradients agree.
                features = torch.randn(8, 32)
                model(features, features[:, 0] + 5)["loss"].backward()
            optimizer.step()
    found = watched.training.comparison
    assert found.gradient_noise_samples > 0
    assert str(found).endswith(f"scale {found.gradient_noise_samples:,.0f} samples")
    assert found.to_dict()["gradient_noise_samples"] == found.gradient_noise_samples
    kept = ObservationStore(store / "seen.db")
    (job,) = kept.workloads().values()
    assert kept.gradient_noise_samples(job) == found.gradient_noise_samples
    assert not any(one._backward_hooks for one in model.parameters())


def test_watching_changes_no_weight(store: Path) -> None:
    trained = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        model = Regression()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_watched:
            settings = Settings(store=store / "seen.db", say=lambda line: None)
            with HookedTraining(model, optimizer, settings, ranks=1, precision="fp32"):
                loop(model, optimizer)
        else:
            loop(model, optimizer)
        trained.append(model.layers[0].weight)
    assert torch.equal(*trained)


def test_what_cannot_be_traced_is_observed_by_name_and_said(store: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(2, 2)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            # The shape depends on values, which no trace of shapes can follow.
            found = self.line(values)
            return found[: 1 + int(found.abs().sum())]

    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = Settings(store=store / "seen.db", say=lambda line: None)
    with HookedTraining(model, optimizer, settings, ranks=1, precision="fp32") as watched:
        for _ in range(STEPS):
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
    found = watched.training.comparison
    assert found.predicted is None
    assert found.error_ratio is None
    assert "no prediction (" in str(found)
    assert {one.workload for one in ObservationStore(store / "seen.db")} == {"Odd"}


def test_a_machine_that_was_never_probed_ends_no_training(store: Path) -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = Settings(store=store / "seen.db", allocation="1x1:unknown", say=lambda line: None)
    with HookedTraining(model, optimizer, settings, ranks=1, precision="fp32") as watched:
        loop(model, optimizer)
    found = watched.training.comparison
    assert "unknown" in found.refusal
    assert found.measured_s is not None


def test_a_training_of_few_steps_says_so(store: Path) -> None:
    training = WatchedTraining(settings=Settings(store=store / "seen.db", say=lambda line: None))
    assert training.end() is None
    model = Regression()
    batch = {"features": torch.randn(8, 32), "labels": torch.randn(8)}
    training.begin(model, batch, ranks=1, optimizer="sgd", precision="fp32")
    training.step()
    found = training.end()
    assert found.measured_s is None
    assert str(found).count("too few steady steps to measure") == 1


def test_more_threads_than_the_device_has_cores_are_told(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    training = WatchedTraining(settings=Settings(store=store / "seen.db", say=lambda line: None))
    batch = {"features": torch.randn(8, 32), "labels": torch.randn(8)}
    training.begin(Regression(), batch, ranks=1, optimizer="sgd", precision="fp32")
    found = training.end()
    assert "computes with 3 threads, a device of '1x1:local' has 1 cores" in str(found)


def test_a_report_that_cannot_be_written_is_refused_before_training() -> None:
    with pytest.raises(StoreError):
        Settings(report="/dev/null/out.json")


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"store": "/"}, StoreError),
        ({"allocation": "two nodes"}, AllocationError),
        ({"strategy": "magic"}, StrategyError),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_training(
    store: Path, given: dict[str, str], kind: type[Exception]
) -> None:
    # At the first batch they would end the training.
    with pytest.raises(kind):
        Settings(**given)


def test_the_precision_is_that_of_the_parameters_unless_mixed() -> None:
    assert precision_of(nn.Linear(1, 1), None) == "fp32"
    assert precision_of(nn.Linear(1, 1).bfloat16(), "no") == "bf16"
    assert precision_of(nn.Linear(1, 1), "fp16") == "fp16-amp"


def test_accelerates_facts_are_taken_from_the_accelerator(store: Path) -> None:
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator = SimpleNamespace(
        unwrap_model=lambda wrapped: wrapped.module,
        num_processes=1,
        distributed_type="DistributedType.NO",
        gradient_accumulation_steps=2,
        mixed_precision="bf16",
        print=lambda line: None,
    )
    prepared = SimpleNamespace(module=model), SimpleNamespace(optimizer=optimizer)
    watched = accelerate_callback.watch(accelerator, *prepared, store=store / "seen.db")
    loop(model, optimizer)
    watched.end()
    found = watched.training.comparison
    assert found.predicted is not None, found.refusal
    assert (found.predicted.accumulation_steps, found.predicted.precision) == (2, "bf16-amp")


def test_accelerate_itself_is_watched(store: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True)
    data = torch.utils.data.DataLoader(rows(8 * STEPS), batch_size=8)
    model = Regression()
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
    settings: dict[str, Any] = {"store": store / "seen.db"}
    with accelerate_callback.watch(accelerator, model, optimizer, **settings) as watched:
        for batch in data:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    check(watched.training.comparison, store, batch=8)


def test_transformers_trainer_is_watched(store: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    transformers = pytest.importorskip("transformers")
    from estimator.integrations.callbacks.transformers import EstimatorCallback

    callback = EstimatorCallback(store=store / "seen.db", say=lambda line: None)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(
        model=Regression(),
        args=arguments,
        train_dataset=rows(8 * STEPS),
        callbacks=[callback],
    )
    trainer.train()
    found = check(callback.comparison, store, batch=8)
    assert found.predicted.optimizer == "adamw-fused"


@pytest.mark.filterwarnings("ignore")
def test_lightnings_trainer_is_watched(store: Path, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from estimator.integrations.callbacks.lightning import EstimatorCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Regression()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.model(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    callback = EstimatorCallback(store=store / "seen.db", say=lambda line: None)
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        callbacks=[callback],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(rows(8 * STEPS), batch_size=8))
    found = check(callback.comparison, store, batch=8)
    assert found.workload.startswith("Module")
