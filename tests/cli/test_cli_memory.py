"""`estimator memory` prints where memory goes, draws it, and says by its exit code what fits."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]

WIDE = """
import torch

def mlp(batch=4):
    layers = torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    return torch.nn.Sequential(*layers), torch.randn(batch, 32)

def deep(batch=4096):
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(256, 256), torch.nn.GELU())]
    return torch.nn.Sequential(*layers), torch.randn(batch, 256)

def large(batch=4):
    return torch.nn.Linear(60000, 60000, device="meta"), torch.randn(batch, 60000)
"""


@pytest.fixture
def models(tmp_path: Path) -> str:
    (tmp_path / "models.py").write_text(WIDE)
    return str(tmp_path / "models.py")


def test_memory_prints_the_peak_by_kind_module_and_tensor(models: str, command: Command) -> None:
    answer = command("memory", f"{models}:mlp", "--on", "1x1:rtx-2080-ti")
    assert (answer.code, answer.err) == (0, "")
    for word in ("peak memory", "of 9.59 GiB (fits)", "optimizer state", "by module", "held until"):
        assert word in answer.out


def test_memory_as_json_adds_up_to_the_peak(models: str, command: Command) -> None:
    answer = command("memory", f"{models}:mlp", "--on", "1x1:rtx-2080-ti", "--json")
    content = json.loads(answer.out)
    assert sum(content["at_peak_bytes"].values()) == content["peak_bytes"]
    # Weights of 32 x 64 and 64 x 8 and their biases, in blocks of 512 bytes; two states of each.
    parameters = 8192 + 512 + 2048 + 512
    assert content["at_peak_bytes"]["parameters"] == parameters
    assert content["at_peak_bytes"]["optimizer state"] == 2 * parameters
    assert len(content["end_s"]) == len(content["levels_bytes"]["activations"])


def test_a_picture_that_cannot_be_drawn_is_one_sentence(
    models: str, command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "memory.doc"
    answer = command("memory", f"{models}:mlp", "--on", "1x1:rtx-2080-ti", "--picture", str(path))
    assert f"cannot draw {path} (Format 'doc' is not supported" in answer.sentence


def test_memory_draws_a_picture(models: str, command: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.svg"
    answer = command("memory", f"{models}:mlp", "--on", "1x1:rtx-2080-ti", "--picture", str(path))
    assert answer.code == 0
    # The legend names every kind that is held.
    assert "optimizer state" in path.read_text()


def test_plans_fall_from_the_peak_without_one_and_are_drawn(
    models: str, command: Command, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plans.svg"
    words = ["memory", f"{models}:deep", "--on", "1x1:rtx-2080-ti", "--plans"]
    answer = command(*words, "--picture", str(path), "--json")
    plans = json.loads(answer.out)["plans"]
    # Some memory comes for nothing: copies beside the operators.
    assert plans[0]["overhead_ratio"] == pytest.approx(0.0, abs=1e-9)
    assert plans[0]["saved_ratio"] > 0
    assert len(plans) > 1
    for less, more in itertools.pairwise(plans):
        assert less["peak_bytes"] > more["peak_bytes"]
        assert less["step_time_s"] < more["step_time_s"]
    assert "Peak against time" in path.read_text()
    assert "plans that lower the peak" in command(*words).out


def test_plans_are_made_for_one_device(models: str, command: Command) -> None:
    answer = command("memory", f"{models}:mlp", "--on", "1x2:rtx-2080-ti", "--plans")
    assert "for one rank" in answer.sentence


def test_what_does_not_fit_ends_with_code_1(models: str, command: Command) -> None:
    answer = command("memory", f"{models}:large", "--on", "1x1:rtx-2080-ti")
    # 3.6e9 parameters of 4 bytes alone are more than the device has.
    assert answer.code == 1
    assert "does not fit" in answer.out
    assert "does not fit on 1x1:rtx-2080-ti" in answer.err


@pytest.mark.parametrize("on", ["1x1:rtx-2080-ti", "1x4:rtx-2080-ti --strategy fsdp"])
def test_a_snapshot_replays_to_the_predicted_peak(
    models: str, command: Command, tmp_path: Path, on: str
) -> None:
    path = tmp_path / "memory.pickle"
    words = ["memory", f"{models}:mlp", "--on", *on.split(), "--snapshot", str(path), "--json"]
    content = json.loads(command(*words).out)
    snapshot = pickle.loads(path.read_bytes())
    held = peak = 0
    alive: set[int] = set()
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "alloc":
            alive.add(entry["addr"])
            held += entry["size"]
        elif entry["action"] == "free_completed":
            alive.remove(entry["addr"])
            held -= entry["size"]
        peak = max(peak, held)
    assert peak == content["peak_bytes"]
    # torch's own reader of snapshots takes it.
    from torch.cuda._memory_viz import trace, trace_plot

    assert "MEM[" in trace(snapshot)
    assert "html" in trace_plot(snapshot)
