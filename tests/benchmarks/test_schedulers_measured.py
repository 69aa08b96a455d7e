"""Measured step times advance jobs: between batches by a line, micro-batches unsynchronised."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedulers import gains
from schedulers_measured import MeasuredSpeeds

from estimator.replay.jobs import Job
from estimator.replay.nodes import AllocationShape
from tests.synthetic import perceptron

GRAPH = replace(perceptron([8, 8]), name="net")


def measured() -> MeasuredSpeeds:
    """One device, and two of one node, each at batches of 10 and 20."""
    speeds = MeasuredSpeeds()
    for per_node, sync_s in (((1,), 0.0), ((2,), 0.1)):
        for batch, step_s in ((10, 1.0), (20, 1.6)):
            speeds.add("net", AllocationShape("m", per_node), batch, step_s + sync_s, sync_s)
    return speeds


def seconds(per_node: tuple[int, ...], global_batch: int, most: int = 20) -> float:
    job = Job(
        name="a",
        arrival_s=0,
        graph=GRAPH,
        samples=1,
        devices=1,
        global_batch=global_batch,
        most_batch_per_gpu=most,
    )
    return measured().step_times_s(job, [AllocationShape("m", per_node)])[0]


def test_a_batch_between_measured_ones_lies_on_their_line() -> None:
    assert seconds((1,), 15) == pytest.approx(1.3)
    assert seconds((2,), 30) == pytest.approx(1.4)


def test_micro_batches_before_the_last_are_not_synchronised() -> None:
    # Two of 10 samples on each of two devices: 1.0 s, then 1.0 s with 0.1 s of synchronisation.
    assert seconds((2,), 40, most=10) == pytest.approx(2.1)


def test_a_placement_that_was_not_measured_takes_the_closest() -> None:
    assert seconds((3,), 60) == pytest.approx(1.7)
    assert seconds((1, 1), 40) == pytest.approx(1.7)


def test_gains_over_fifo_are_means_over_seeds() -> None:
    shared = {"cluster": "c", "arrivals_every_s": 60.0, "believed": "engine"}
    cases = []
    for seed, mine_s in enumerate((20, 10)):
        fifo = {"policy": "fifo", "average_jct_s": 30, "makespan_s": 50}
        mine = {"policy": "max-min", "average_jct_s": mine_s, "makespan_s": 40}
        cases += [shared | {"seed": seed} | each for each in (fifo, mine)]
    jct, makespan = gains(cases)
    assert jct["by_seed"] == [1.5, 3.0]
    assert jct["value"] == 2.25
    assert makespan["value"] == 1.25
    assert list(gains(cases[1::2])) == []
