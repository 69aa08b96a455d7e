"""Several jobs on one device: steps by hand, memory in any phase, plans with which all fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estimator.advise.shared_device import SharedStep, interleaved, share_device
from estimator.api import estimate
from estimator.errors import WorkloadError
from estimator.estimates.estimate import Estimate
from estimator.graph.ir.op_graph import OpGraph
from tests.synthetic import perceptron

Run = Callable[..., Any]
ON = "1x1:t4-g4dn"


def step(*stretches: tuple[float, float, int]) -> SharedStep:
    """Stretches of (seconds on the device, seconds beside it, bytes held)."""
    device, beside, held = zip(*stretches, strict=True)
    return SharedStep(np.array(device, float), np.array(beside, float), np.array(held))


def test_jobs_that_keep_the_device_busy_get_equal_shares() -> None:
    # Three steps of 1 s, 0.5 s and 0.25 s, each on a third of the device.
    found = interleaved([step((s, 0, 1)) for s in (1, 0.5, 0.25)], 10)
    assert found.steps_s == pytest.approx([3, 1.5, 0.75])
    assert (found.peak_bytes, found.over_ratio) == (3, 0)


def test_a_job_that_waits_for_its_host_leaves_the_device_to_the_other() -> None:
    # One needs the device all the time; the other 1 s of it after 1 s on its host, which takes two
    # seconds beside the first. In three seconds the first has 1 + 2/2.
    busy, waiting = interleaved([step((0.1, 0, 5)), step((1, 1, 7))], 10).steps_s
    assert busy == pytest.approx(0.15, rel=0.03)
    assert waiting == pytest.approx(3)


def test_two_jobs_that_mostly_wait_hardly_slow_each_other() -> None:
    first, second = interleaved([step((0.1, 0.9, 1)), step((0.1, 0.83, 1))], 10).steps_s
    assert 0.999 <= first < 1.06
    assert 0.929 <= second < 1.0


def test_what_is_held_is_added_up_at_each_moment() -> None:
    # Peaks of 6 bytes for a tenth of each step, of a second and of 0.73 s on half of the device:
    # in no fixed phase, so that they meet for about a hundredth of the time.
    jobs = [step((0.1, 0, 6), (0.9, 0, 1)), step((0.63, 0, 1), (0.1, 0, 6))]
    found = interleaved(jobs, 10)
    assert found.steps_s == pytest.approx([2.0, 1.46])
    assert found.peak_bytes == 12
    assert 0 < found.over_ratio < 0.08


def test_a_step_that_takes_no_time_is_refused() -> None:
    with pytest.raises(WorkloadError, match="takes no time"):
        interleaved([step((0, 0, 1)), step((1, 0, 1))], 10)


def network(*sizes: int, batch: int) -> OpGraph:
    return replace(perceptron(list(sizes), batch=batch), target="cuda")


def job(*sizes: int, batch: int = 1 << 16) -> Estimate:
    return estimate(network(*sizes, batch=batch), ON)


def test_two_equal_jobs_take_twice_as_long_and_need_twice_as_much() -> None:
    one = job(4096, 4096, 4096)
    found = share_device([one, one])
    for each in found.jobs:
        assert each.step_time_s == pytest.approx(2 * each.alone_s, rel=0.05)
        assert each.peak_bytes == one.peak_memory_bytes
        assert each.plan_step_s is None
    assert found.most_bytes == 2 * one.peak_memory_bytes
    assert found.played_bytes <= found.most_bytes
    # One context more is kept from tensors than for one job.
    assert found.usable_bytes < one.plan.kinds[0].device.usable_bytes - (256 << 20)
    assert found.fits == "yes"


def test_plans_make_fit_what_does_not() -> None:
    sizes = [4096] * 8
    jobs = [job(*sizes, batch=1 << 16), job(*sizes, batch=1 << 15)]
    found = share_device(jobs)
    assert found.fits == "no"
    assert found.plan_bytes is not None
    assert found.plan_bytes <= 0.9 * found.usable_bytes < found.most_bytes
    assert found.plan_bytes == sum(each.plan_peak_bytes or 0 for each in found.jobs)
    assert sum(each.swaps + each.recomputes for each in found.jobs) > 0
    for each in found.jobs:
        assert each.plan_peak_bytes is not None
        assert each.plan_step_s is not None
        assert each.plan_peak_bytes <= each.peak_bytes
        assert each.plan_step_s > 0.95 * each.step_time_s


def test_what_no_plan_makes_fit_is_said() -> None:
    # Weights of 4 GiB each, which are read from first to last op.
    wide = job(1 << 15, 1 << 15, batch=64)
    found = share_device([wide, wide, wide])
    assert (found.fits, found.plan_bytes) == ("no", None)


def test_jobs_that_cannot_share_a_device_are_refused() -> None:
    one = job(64, 64)
    for several in ([one], [one] * 5):
        with pytest.raises(WorkloadError, match="give 2 to 4 on the same one"):
            share_device(several)
    other = estimate(one.request.graph, "1x1:a100-p4d")
    with pytest.raises(WorkloadError, match="1x1:a100-p4d and 1x1:t4-g4dn are to share"):
        share_device([one, other])
    two = estimate(one.request.graph, "1x2:t4-g4dn")
    with pytest.raises(WorkloadError, match="ask for 1x1 of the machine"):
        share_device([two, two])


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "one.graph", tmp_path / "other.graph"]
    network(*[4096] * 8, batch=1 << 16).save(paths[0])
    network(*[4096] * 8, batch=1 << 15).save(paths[1])
    return paths


def test_the_command_prints_jobs_side_by_side(models: list[Path], command: Run) -> None:
    one, other = models
    small = command("memory", one, "--on", ON, "--batch", 64, "--beside", other)
    assert small.code in (0, 1)
    found = command("memory", one, "--on", ON, "--beside", other)
    assert found.code == 1
    assert "2 jobs on 1x1:t4-g4dn" in found.out
    assert "plans with which all fit" in found.out
    assert found.err.endswith("exit code 1: 2 jobs do not fit on 1x1:t4-g4dn together\n")
    as_json = json.loads(command("memory", one, "--on", ON, "--beside", other, "--json").out)
    assert as_json["plan_bytes"] < as_json["usable_bytes"] < as_json["most_bytes"]
    assert len(as_json["jobs"]) == 2
    wrong = command("memory", one, "--on", ON, "--beside", other, "--plans")
    assert (wrong.code, wrong.err) == (2, "estimator: --plans is of one job; leave it out\n")
