"""Remedies for a step that does not fit: each fits, and says what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.advise.fitting import remedies
from estimator.engine import estimate_graph
from estimator.machines.profile import MachineProfile
from tests.advise.swap_problems import link
from tests.synthetic import Machine, perceptron


def machine(memory_bytes: int) -> MachineProfile:
    profile = Machine(devices=4).profile()
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in profile.devices)
    links = (link("d2h", 1e9), link("h2d", 1e9))
    return replace(profile, devices=devices, links=links)


def test_every_remedy_fits_and_the_cheapest_comes_first() -> None:
    graph = perceptron([256] * 8, batch=4)
    profile = machine(12 << 20)
    answer = estimate_graph(graph, "1x1:synthetic", batch_per_gpu=1024, profile=profile)
    assert answer.fits == "no"
    found = remedies(graph, answer, profile=profile)
    assert found
    assert all(remedy.peak_bytes <= 0.9 * (12 << 20) for remedy in found)
    costs = [remedy.cost_ratio for remedy in found]
    assert costs == sorted(costs)
    smaller = next(remedy for remedy in found if "accumulated" in remedy.change)
    # The largest divisor of 1024 that fits: twice as many samples do not.
    batch = int(smaller.change.split()[2].rstrip(","))
    halves = {
        each: estimate_graph(
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


def test_a_wider_allocation_fills_nodes_before_it_takes_more() -> None:
    graph = perceptron([256] * 8, batch=4)
    answer = estimate_graph(graph, "1x1:synthetic", batch_per_gpu=2048, profile=machine(12 << 20))
    # 8 devices are twice as many as a node has: two nodes of four.
    found = [r.change for r in remedies(graph, answer, profile=machine(12 << 20))]
    assert "2x4:synthetic with ddp" in found


def test_nothing_makes_parameters_fit_that_no_device_can_hold() -> None:
    graph = perceptron([256] * 8, batch=4)
    profile = machine(1 << 16)
    answer = estimate_graph(graph, "1x1:synthetic", batch_per_gpu=4, profile=profile)
    assert remedies(graph, answer, profile=profile) == []
