"""Real training runs: what they measure, and how they fail."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from estimator.errors import ModelError, StrategyError, TrainingError
from estimator.machines.profile import Device
from estimator.validate import training as training_module
from estimator.validate.training import Validation, train, transformers_modules, validate

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
DEVICES = tuple(
    Device(kind="cpu", index=rank, name="core", memory_bytes=1 << 30, cores=tuple(CORES[rank:][:1]))
    for rank in range(2)
)
MODELS = """
import os, time, torch
from torch import nn

class Sleeper(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.linear = seconds, nn.Linear(4, 1)
    def forward(self, x):
        rank = int(torch.distributed.get_rank()) if torch.distributed.is_initialized() else 0
        time.sleep(self.seconds * (1 + rank))
        return self.linear(x)

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)
    def forward(self, x):
        return {"loss": self.used(x).mean()}

def sleeper(batch=2):
    return Sleeper(0.02), torch.ones(batch, 4)

def branches():
    return Branches(), {"x": torch.ones(2, 4)}

def own_loss(batch=2):
    loss = lambda output, given: output.sum() * len(given[0])
    return nn.Linear(4, 1), (torch.ones(batch, 4),), loss

class Hoarder(nn.Linear):
    kept = []
    def forward(self, x):
        self.kept.append(torch.ones(1 << 20))
        return super().forward(x)

def hoarder():
    return Hoarder(4, 1), torch.ones(2, 4)

class Fatal(nn.Linear):
    def forward(self, x):
        os._exit(7)

def fatal():
    return Fatal(4, 1), torch.ones(2, 4)

def itself():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step(model, batch):
        optimizer.zero_grad()
        time.sleep(0.02)
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        return loss
    return model, torch.ones(2, 4), step

def broken():
    raise ValueError("no weights")

def misfit():
    return nn.Linear(4, 1), torch.ones(2, 5)
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    # None of these models needs what other tests have imported, which takes ranks' server long.
    monkeypatch.setattr(training_module, "transformers_modules", lambda: ())
    (tmp_path / "models.py").write_text(MODELS)
    return str(tmp_path / "models.py")


def test_ranks_import_the_transformers_models_that_this_process_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("transformers.models.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("zed.modeling_zed", "abc.modeling_abc", "abc.configuration_abc", "abc"):
        module = f"transformers.models.{name}"
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    assert transformers_modules() == tuple(
        f"transformers.models.{name}" for name in ("abc.modeling_abc", "zed.modeling_zed")
    )


def test_a_step_takes_the_time_that_its_slowest_rank_sleeps(models: str) -> None:
    run = train(f"{models}:sleeper", DEVICES, steps=5, warmup_steps=2, timeout_s=60)
    # Rank 1 sleeps 40 ms per step, and rank 0 waits for it in the all-reduce.
    assert len(run.step_s) == 2
    assert all(len(times) == 5 for times in run.step_times_s)
    assert run.slowest_step_s > 0.04
    assert sum(run.step_times_s[1]) == pytest.approx(5 * run.step_s[1], rel=0.2)


def test_accumulation_repeats_the_micro_batch_in_one_step(models: str) -> None:
    run = train(f"{models}:sleeper", DEVICES[:1], steps=2, warmup_steps=0, accumulation_steps=3)
    # Three forwards of 20 ms each in every step.
    assert run.slowest_step_s > 0.06


def test_a_step_that_calls_its_own_optimizer_trains_as_it_is(models: str) -> None:
    run = train(f"{models}:itself", DEVICES[:1], steps=3, warmup_steps=1, timeout_s=60)
    # Each sleeps 20 ms; a second backward() through its graph would raise.
    assert run.slowest_step_s > 0.02


def test_no_step_contains_the_canary_beside_it(models: str) -> None:
    run = train(f"{models}:sleeper", DEVICES[:1], steps=4, canaries=True)
    assert len(run.canaries_s[0]) == 5
    # Three matmuls and two random factors stand between steps of 20 ms, and in none of them.
    assert run.step_s[0] == pytest.approx(sum(run.step_times_s[0]) / 4)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-amp"])
@pytest.mark.parametrize("optimizer", ["sgd", "sgd-momentum", "adam", "adamw"])
def test_every_optimizer_and_precision_trains(models: str, optimizer: str, precision: str) -> None:
    run = train(
        f"{models}:own_loss",
        DEVICES[:1],
        batch=8,
        steps=1,
        optimizer=optimizer,
        precision=precision,
    )
    assert run.slowest_step_s > 0
    assert run.canary_s > 0
    assert run.peak_memory_bytes > 0


def test_a_heap_that_grows_after_the_warm_up_costs_no_page_faults(models: str) -> None:
    """Each of 8 steps keeps 4 MiB more: 1024 faults of 4 KiB, but for memory touched before."""
    run = train(f"{models}:hoarder", DEVICES[:1], steps=8, warmup_steps=1)
    assert run.faults_per_step[0] < 100


def test_parameters_without_a_gradient_are_found_and_do_not_stop_the_ranks(models: str) -> None:
    # DDP ends where the weight and the bias of the branch that the loss does not depend on have
    # none, unless it looks for such.
    assert train(f"{models}:branches", DEVICES, steps=3).slowest_step_s > 0


DDPS = ("ddp:unbucketed", "ddp:bucket=1MiB,view", "ddp:first=2MiB", "ddp:bucket=1MiB")


@pytest.mark.parametrize("strategy", [*DDPS, "zero1", "fsdp", "fsdp:shard=1", "fsdp:no_sync"])
def test_every_strategy_trains(models: str, strategy: str) -> None:
    assert train(f"{models}:own_loss", DEVICES, strategy=strategy, steps=3).slowest_step_s > 0


def test_caps_that_ddp_cannot_have_are_refused(models: str) -> None:
    with pytest.raises(StrategyError, match="needs the default cap"):
        train(f"{models}:own_loss", DEVICES, strategy="ddp:bucket=4MiB,first=1MiB", steps=1)


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        ("fatal", TrainingError, "died without a result"),
        ("misfit", TrainingError, "rank [01] failed with RuntimeError"),
        ("broken", ModelError, "no weights"),
        ("absent", ModelError, "no function 'absent'"),
    ],
)
def test_a_training_that_fails_says_why_in_one_line(
    models: str, function: str, error: type, words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        train(f"{models}:{function}", DEVICES, steps=1, timeout_s=60)
    assert "\n" not in str(caught.value)


def test_a_training_that_hangs_is_stopped(models: str) -> None:
    with pytest.raises(TrainingError, match="did not end within 2 s"):
        train(f"{models}:sleeper", DEVICES[:1], steps=10_000, timeout_s=2.0)


def prediction(name: str, step_time_s: float = 1.0) -> Any:
    return SimpleNamespace(name=name, step_time_s=step_time_s, low_s=0.9, high_s=1.1)


def test_repeats_of_all_predictions_are_interleaved() -> None:
    trained = []

    def train(predicted: Any) -> float:
        trained.append(predicted.name)
        return float(len(trained))

    reports: list[int] = []
    cases = validate(
        [prediction("one"), prediction("two")],
        train,
        repeats=3,
        report=lambda run, predicted, step_s: reports.append(run),
    )
    assert trained == ["one", "two"] * 3
    assert reports == [1, 2, 3, 4, 5, 6]
    assert [case.runs_s for case in cases] == [(1.0, 3.0, 5.0), (2.0, 4.0, 6.0)]


def test_a_prediction_is_compared_with_the_median_of_the_runs() -> None:
    case = Validation(predicted=prediction("one", 1.2), runs_s=(0.8, 1.0, 5.0))
    assert case.measured_s == 1.0
    # 10 % lies at 0.84, 90 % at 4.2.
    assert case.noise_ratio == pytest.approx((4.2 - 0.84) / 2)
    assert case.error_ratio == pytest.approx(0.2)
    assert case.is_within_interval
    assert not Validation(predicted=prediction("one"), runs_s=(2.0, 2.0, 2.0)).is_within_interval
