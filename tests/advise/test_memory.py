"""The memory of a step over time, as the command shows it, beside what the estimate says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import estimator as est
from estimator.advise.memory import Remedy, memory_of, quick_remedies, remedies
from estimator.advise.shared_device import SharedStep, interleaved, share_device
from estimator.api import estimate
from estimator.errors import WorkloadError
from estimator.estimates.estimate import Estimate
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.profile import MachineProfile
from tests.advise.swap.swap_problems import link
from tests.conftest import Command, make_small_profile
from tests.graph.partition.test_split_context import graph_of
from tests.graph.partition.test_split_experts import GRAPH as EXPERTS
from tests.graph.partition.test_stages import traced
from tests.graph.trace.test_checkpointing import ROWS, WIDTH, Model
from tests.synthetic import Machine, perceptron

DENSE, STAGES, EXPERTS_ON_GPUS = (
    replace(graph, target="cuda") for graph in (graph_of(), traced(8), EXPERTS)
)
# Every kind of the strategies, and those that keep shards in other ways.
EVERY = ("ddp", "zero1", "distributed-optimizer", "zero2", "fsdp", "fsdp:no_reshard", "ps:1")
OF_STAGES = ("ddp", "zero1", "distributed-optimizer", "fsdp:no_reshard")
GRID = [
    *[(DENSE, s, layout) for s in (*EVERY, "fsdp:offload") for layout in (None, "dp=*")],
    *[(DENSE, s, layout) for s in EVERY for layout in ("tp=4,dp=1", "tp=2,dp=*", "cp=2,dp=*")],
    *[(EXPERTS_ON_GPUS, s, layout) for s in ("ddp", "fsdp") for layout in ("ep=4", "cp=2,ep=2")],
    *[
        (STAGES, s, layout)
        for s in OF_STAGES
        for layout in ("pp=4,dp=1", "pp=2,dp=*", "pp=2,schedule=interleaved:2,dp=*")
    ],
]


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(("graph", "strategy", "layout"), GRID)
def test_the_highest_level_is_the_peak_of_the_estimate(
    graph: OpGraph, strategy: str, layout: str | None, micro_batches: int
) -> None:
    asked = {"strategy": strategy, "layout": layout, "accumulation_steps": micro_batches}
    answer = est.estimate(graph, "1x4:h100-sxm", **asked)  # type: ignore[arg-type]
    curve = memory_of(answer).curve
    # Kinds that are divided over ranks are rounded up to whole bytes each, the peak once.
    assert curve.peak_bytes == pytest.approx(answer.peak_memory_bytes, abs=4)
    assert all((levels >= 0).all() for levels in curve.levels.values())


def test_a_device_of_several_cores_holds_blocked_copies_of_what_a_convolution_reads() -> None:
    layer = nn.Conv2d(24, 24, 1, bias=False)
    graph = est.trace_model(layer, torch.ones(6, 24, 80, 80), optimizer="sgd")
    one = make_small_profile()
    two = replace(one, devices=tuple(replace(d, cores=(0, 1)) for d in one.devices))
    found, more = (est.estimate(graph, "1x1:local", profile=each) for each in (one, two))
    # One thread multiplies matrices as they are. Several go through oneDNN, which holds image,
    # gradient and weight in blocks of 16 channels, of which the last is the weight's gradient.
    image_bytes, weight_bytes = 6 * 24 * 80 * 80 * 4, 24 * 24 * 4
    blocked_bytes = 2 * image_bytes * 32 // 24 + 32 * 32 * 4
    assert more.peak_memory_bytes - found.peak_memory_bytes == blocked_bytes - weight_bytes
    assert memory_of(more).curve.peak_bytes == more.peak_memory_bytes


def machine(memory_bytes: int) -> MachineProfile:
    profile = Machine(devices=4).profile()
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in profile.devices)
    links = (link("d2h", 1e9), link("h2d", 1e9))
    return replace(profile, devices=devices, links=links)


def test_every_remedy_fits_and_the_cheapest_comes_first() -> None:
    graph = perceptron([256] * 8, batch=4)
    profile = machine(12 << 20)
    answer = est.estimate(graph, "1x1:synthetic", batch_per_gpu=1024, profile=profile)
    assert answer.fits == "no"
    found = remedies(answer)
    assert found
    assert all(remedy.peak_bytes <= 0.9 * (12 << 20) for remedy in found)
    costs = [remedy.cost_ratio for remedy in found]
    assert costs == sorted(costs)
    smaller = next(remedy for remedy in found if "accumulated" in remedy.change)
    # The largest divisor of 1024 that fits: twice as many samples do not.
    batch = int(smaller.change.split()[2].rstrip(","))
    halves = {
        each: est.estimate(
            graph,
            "1x1:synthetic",
            batch_per_gpu=each,
            accumulation_steps=1024 // each,
            profile=profile,
        ).fits
        for each in (batch, 2 * batch)
    }
    assert halves[batch] == "yes"
    assert halves[2 * batch] != "yes"
    wider = next(remedy for remedy in found if remedy.change.startswith("1x"))
    # As many samples as before, on more devices, take less time, but more of the devices together:
    # they exchange gradients and each pays what does not follow the batch.
    assert wider.step_time_s < answer.step_time_s
    devices = int(wider.change.split(":")[0].removeprefix("1x"))
    assert wider.cost_ratio == pytest.approx(devices * wider.step_time_s / answer.step_time_s - 1)
    assert found.index(smaller) < found.index(wider)


def test_activation_checkpointing_is_a_remedy_worked_out_for_the_step() -> None:
    plain, full = (
        est.trace_model(Model(), torch.zeros(ROWS, WIDTH), checkpoint=form)
        for form in (None, "full")
    )

    def answered(graph: OpGraph, memory_bytes: int) -> Estimate:
        return est.estimate(graph, "1x1:synthetic", profile=machine(memory_bytes))

    # Of a device that has room for the step with checkpoints, and not for that without.
    memory_bytes = int(answered(full, 8 << 30).peak_memory_bytes / 0.88)
    answer, checkpointed = answered(plain, memory_bytes), answered(full, memory_bytes)
    assert (answer.fits, checkpointed.fits) == ("no", "yes")

    def offered(graph: OpGraph) -> list[Remedy]:
        found = quick_remedies(answered(graph, memory_bytes))
        return [remedy for remedy in found if "checkpointing" in remedy.change]

    (found,) = offered(plain)
    assert found.peak_bytes == checkpointed.peak_memory_bytes
    assert found.step_time_s == pytest.approx(checkpointed.step_time_s, rel=0.01)
    more_s = found.step_time_s - answer.step_time_s
    assert found.cost_ratio == pytest.approx(more_s / answer.step_time_s)
    # What has checkpoints already is not offered them, and what no block of has parts neither.
    assert not offered(full)
    assert not offered(perceptron([256] * 8, batch=4096))


def test_a_wider_allocation_fills_nodes_before_it_takes_more() -> None:
    graph = perceptron([256] * 8, batch=4)
    answer = est.estimate(graph, "1x1:synthetic", batch_per_gpu=2048, profile=machine(12 << 20))
    # 8 devices are twice as many as a node has: two nodes of four.
    found = [r.change for r in remedies(answer)]
    assert "2x4:synthetic with ddp" in found


def test_nothing_makes_parameters_fit_that_no_device_can_hold() -> None:
    graph = perceptron([256] * 8, batch=4)
    profile = machine(1 << 16)
    answer = est.estimate(graph, "1x1:synthetic", batch_per_gpu=4, profile=profile)
    assert remedies(answer) == []


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
    return perceptron(list(sizes), batch=batch, target="cuda")


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
    assert found.plan_bytes <= 0.9 * found.usable_bytes < found.most_bytes
    assert found.plan_bytes == sum(each.plan_peak_bytes or 0 for each in found.jobs)
    assert sum(each.swaps + each.recomputes for each in found.jobs) > 0
    for each in found.jobs:
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


def test_the_command_prints_jobs_side_by_side(models: list[Path], command: Command) -> None:
    one, other = models
    small = command("memory", one, "--on", ON, "--batch", 64, "--beside", other)
    assert small.code in (0, 1)
    found = command("memory", one, "--on", ON, "--beside", other)
    assert found.code == 1
    assert "2 jobs on 1x1:t4-g4dn" in found.out
    assert "plans with which all fit" in found.out
    assert found.err.endswith("exit code 1: 2 jobs do not fit on 1x1:t4-g4dn together\n")
    as_json = command("memory", one, "--on", ON, "--beside", other, "--json").content
    assert as_json["plan_bytes"] < as_json["usable_bytes"] < as_json["most_bytes"]
    assert len(as_json["jobs"]) == 2
    wrong = command("memory", one, "--on", ON, "--beside", other, "--plans")
    assert (wrong.code, wrong.err) == (2, "estimator: --plans is of one job; leave it out\n")
