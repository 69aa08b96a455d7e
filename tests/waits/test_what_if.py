"""What other loaders would give: workers, cached shares, disks, beside the least of three rates."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import estimator as est
from estimator.estimates.request import EstimateRequest
from estimator.machines.profile import InputCost, Provenance
from estimator.units import format_ratio
from estimator.waits.predicted import CACHED_RATIOS, InputAnswers, input_answers
from estimator.workload.loader import Loader
from tests.synthetic import Machine, perceptron

GRAPH = perceptron([512, 1024, 512], batch=64)
PROFILE = Machine(devices=4).profile()


def answers(loader: Loader, on: str = "1x1:m") -> InputAnswers:
    return input_answers(EstimateRequest.of(GRAPH, on, profile=PROFILE, loader=loader))


STEP_S = est.estimate(GRAPH, "1x1:m", profile=PROFILE).step_time_s


@pytest.mark.parametrize("needed", [1, 2, 3, 5, 8, 13, 16])
def test_as_many_workers_are_needed_as_make_a_batch_in_a_step(needed: int) -> None:
    # A batch takes a worker a little less than `needed` steps.
    loader = Loader(prep_s=(needed - 0.02) * STEP_S / 64, cpu_ratio=0.0, workers=1)
    found = answers(loader)
    assert found.workers_needed == needed
    assert found.as_it_is.input_stall_s == pytest.approx(max((needed - 1.02) * STEP_S, 0), rel=1e-6)


def test_cached_shares_give_what_is_left_to_the_disk() -> None:
    # All from the disk a batch takes four steps, so that a quarter from the disk is just hidden.
    loader = Loader(
        sample_bytes=1e6, cached_ratio=0.0, disk_bytes_per_s=64e6 / (4 * STEP_S), workers=4
    )
    found = answers(loader)
    by_share = {each.change: each for each in found.changes}
    for share in CACHED_RATIOS:
        text = format_ratio(share)
        step_s = max(4 * (1 - share), 1.0) * STEP_S
        assert by_share[f"{text} cached"].samples_per_s == pytest.approx(64 / step_s)
        # Without waiting on workers and cores, the least of three rates says the same.
        assert by_share[f"{text} cached"].baseline_samples_per_s == pytest.approx(64 / step_s)
    assert found.cached_needed == pytest.approx(0.75, abs=0.005)
    twice = next(each for each in found.changes if each.change.startswith("a disk of"))
    assert twice.samples_per_s == pytest.approx(64 / (2 * STEP_S))


def test_shares_are_answered_by_the_disk_that_the_probe_measured() -> None:
    cost = InputCost(
        disk_bytes_per_s=64e6 / (4 * STEP_S), provenance=Provenance(source="measured", at="2026")
    )
    loader, profile = Loader(sample_bytes=1e6, workers=4), replace(PROFILE, input=cost)
    found = input_answers(EstimateRequest.of(GRAPH, "1x1:m", profile=profile, loader=loader))
    assert found.cached_needed == pytest.approx(0.75, abs=0.005)
    by_share = {each.change: each for each in found.changes}
    assert by_share["0.0 % cached"].samples_per_s == pytest.approx(64 / (4 * STEP_S))


def test_reading_then_preparing_in_one_worker_is_slower_than_the_least_of_the_rates() -> None:
    loader = Loader(
        sample_bytes=1e6,
        cached_ratio=0.0,
        disk_bytes_per_s=64e6 / (2 * STEP_S),
        prep_s=2 * STEP_S / 64,
        cpu_ratio=0.0,
        workers=1,
    )
    found = answers(loader)
    # Two steps of reading and two of preparing, one after the other; each rate alone is two.
    assert found.as_it_is.samples_per_s == pytest.approx(64 / (4 * STEP_S))
    assert found.as_it_is.baseline_samples_per_s == pytest.approx(64 / (2 * STEP_S))
    assert (found.without_samples_per_s, found.prep_samples_per_s) == (
        pytest.approx(64 / STEP_S),
        pytest.approx(64 / (2 * STEP_S)),
    )


def test_workers_that_only_take_the_cores_of_the_step_cannot_hide_their_work() -> None:
    found = answers(Loader(prep_s=0.5 * STEP_S / 64, workers=0))
    # One core: half a step of preparing is half a step more, with workers or without.
    assert found.as_it_is.samples_per_s == pytest.approx(64 / (1.5 * STEP_S))
    assert found.workers_needed is None


def test_limited_cores_are_asked_for_twice() -> None:
    loader = Loader(prep_s=4 * STEP_S / 64, workers=16, cores=1, cpu_ratio=1.0)
    changes = {each.change for each in answers(replace(loader, cpu_ratio=0.5)).changes}
    assert "2 cores" in changes


SMALL = """
import torch

def mlp(batch=8):
    return torch.nn.Linear(64, 64), torch.randn(batch, 64)
"""


def test_the_command_answers_what_ifs_of_a_loader(
    tmp_path: Path, command: Callable[..., Any]
) -> None:
    (tmp_path / "models.py").write_text(SMALL)
    asked = ("stalls", f"{tmp_path}/models.py:mlp", "--on", "1x2:a100-sxm-40gb")
    loader = ("--loader", "sample=600kB,prep=10ms,workers=2,disk=1GB/s,cached=0.9")
    answer = command(*asked, *loader)
    assert (answer.code, answer.err) == (0, "")
    for word in ("as it is", "4 workers", "35 % cached", "workers would hide"):
        assert word in answer.out
    found = json.loads(command(*asked, *loader, "--json").out)
    assert found["input"]["as_it_is"]["input_stall_s"] > 0.03
    assert found["interconnect"]["stall_s"] < 0.01
