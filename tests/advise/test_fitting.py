"""Remedies for a step that does not fit: each fits, and says what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import estimator as est
from estimator.advise.memory import Remedy, quick_remedies, remedies
from estimator.estimates.estimate import Estimate
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.profile import MachineProfile
from tests.advise.swap.swap_problems import link
from tests.graph.trace.test_checkpointing import ROWS, WIDTH, Model
from tests.synthetic import Machine, perceptron


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
