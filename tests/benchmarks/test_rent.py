"""The figure for choices of what to rent: right choices count, dear and late ones do not."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from pathlib import Path

import pytest
from calibration.tables import read_steps
from rent import Configuration, configurations, judged, replicate_noise_ratio
from schedulers import gains
from schedulers_measured import MeasuredSpeeds

from estimator.replay.jobs import Job
from estimator.replay.nodes import AllocationShape
from tests.synthetic import perceptron


def row(ranks: int, time_s: float, predicted_s: float, noise: float = 0.0) -> Configuration:
    """A configuration at 3,600 USD an hour and rank; linear in the ranks from 100 s."""
    return Configuration(
        gpu="T4",
        name=f"{ranks}",
        ranks=ranks,
        batch_per_gpu=8,
        noise_ratio=noise,
        time_s=time_s,
        usd=ranks * time_s,
        predicted_s=predicted_s,
        predicted_usd=ranks * predicted_s,
        linear_s=100 / ranks,
        linear_usd=100.0,
    )


def test_exact_predictions_choose_as_brute_force_does() -> None:
    found = judged([row(1, 100, 100), row(2, 60, 60), row(4, 40, 40)])["calibrated"]
    assert found == (1.0, 0.0, 0.0, 0.0, 0.0)


def test_a_choice_that_ends_late_is_none() -> None:
    # Two ranks are thought to take 50 s and take 60: wrong where a budget lies between, that is for
    # log(60/50) of log(100/40) of the budgets, one of fifty apart.
    found = judged([row(1, 100, 100), row(2, 60, 50), row(4, 40, 40)])["calibrated"]
    assert found.same_ratio == pytest.approx(1 - 0.199, abs=0.03)
    assert found.late_ratio == pytest.approx(0.199, abs=0.03)


def test_a_dearer_choice_counts_by_what_it_costs_more() -> None:
    # Two ranks are thought to take 99 s: for a budget below that four are taken, at 160 instead of
    # 120 USD where two would end in time.
    slow = [row(1, 100, 100), row(2, 60, 99), row(4, 40, 40)]
    found = judged(slow)["calibrated"]
    share = 0.546  # log(99/60) of log(100/40): budgets for which four ranks are taken instead
    assert found.same_ratio == pytest.approx(1 - share, abs=0.03)
    assert found.regret == pytest.approx(share * (160 / 120 - 1), abs=0.01)
    assert found.best_thought_late_ratio == pytest.approx(share, abs=0.03)


def test_a_choice_that_was_thought_cheaper_is_told_from_one_within_the_budget() -> None:
    # Four ranks are thought to take 20 s, 80 USD, and cost 160: wrong from 60 s on, where two do.
    found = judged([row(1, 100, 100), row(2, 60, 60), row(4, 40, 20)])["calibrated"]
    assert found.best_thought_late_ratio == found.late_ratio == 0.0
    assert found.best_thought_dear_ratio == pytest.approx(0.557, abs=0.03)  # log(100/60)/log(2.5)


def test_a_second_measurement_without_noise_chooses_the_same() -> None:
    assert judged([row(1, 100, 50), row(2, 60, 99), row(4, 40, 7)])["again"].same_ratio == 1.0


@pytest.mark.parametrize(
    ("noise_of_two", "noise_of_four", "same_ratio"),
    # Four ranks cost a third more than two, and sqrt(0.3^2 + 0.15^2) is 0.335: neither alone is.
    [(0.3, 0.15, 1.0), (0.15, 0.3, 1.0), (0.3, 0.14, 0.454), (0.32, 0.0, 0.454)],
)
def test_costs_tie_within_the_noise_of_both(
    noise_of_two: float, noise_of_four: float, same_ratio: float
) -> None:
    slow = [row(1, 100, 100), row(2, 60, 99, noise_of_two), row(4, 40, 40, noise_of_four)]
    assert judged(slow)["calibrated"].same_ratio == pytest.approx(same_ratio, abs=0.03)


def test_noise_is_that_of_all_repetitions_of_a_job_together() -> None:
    # A pair 0.2 apart in logarithms has errors of 0.1 sqrt(2) about the truth on either side.
    pairs = [[1.0, exp(0.2)], [5.0, 5.0 * exp(0.2)], [3.0]]
    assert replicate_noise_ratio(pairs) == pytest.approx(0.1 * 2**0.5)
    assert replicate_noise_ratio([[1.0], [2.0]]) == 0.0


def test_the_same_nodes_in_another_order_are_repetitions(tmp_path: Path) -> None:
    table = tmp_path / "steps.csv"
    times = {"1": 1.0, "2": 1.1, "1+1": 1.2, "4": 1.3}
    times |= {"1+2": 1.0, "2+1": exp(0.2), "1+3": 1.0, "3+1": exp(0.2)}
    rows = [f"m,T4,{each},8,{time_s}" for each, time_s in times.items()]
    table.write_text("\n".join(["model,gpu,placement,local_batch,step_time_s", *rows]))
    (job,) = read_steps([table]).jobs
    found = {each.name: each for each in configurations(job)}
    assert set(found) == {f"{each}, batch 8" for each in ("1", "2", "1+1", "4", "1+2", "1+3")}
    # 0.1 sqrt(2) of one measurement, by sqrt(2) less of two.
    assert found["1+2, batch 8"].noise_ratio == pytest.approx(0.1)
    assert found["4, batch 8"].noise_ratio == pytest.approx(0.1 * 2**0.5)


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
