"""Estimates corrected by observed steps, of a synthetic machine whose real speed is made up."""

from __future__ import annotations

import math
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

import estimator as est
from estimator import trace_model
from estimator.calibrate.calibrator import Calibrator
from estimator.calibrate.corrections import StepCorrections
from estimator.calibrate.observation_files import read_observations
from estimator.calibrate.observed import Observation
from estimator.coefficients import Calibration
from estimator.errors import StrategyError
from estimator.estimates.estimate import Estimate
from estimator.estimates.table import estimate_many
from estimator.graph.ir.op_graph import OpGraph
from tests.graph.partition.test_stages import traced
from tests.synthetic import Machine, perceptron, with_every_collective

ASSUMED = Machine(devices=4)
# What the machine really is: devices 1.25 times as slow, a network at 40 % of its rate.
REAL = Machine(
    devices=4,
    flops_per_s=ASSUMED.flops_per_s / 1.25,
    memory_bytes_per_s=ASSUMED.memory_bytes_per_s / 1.25,
    network_bytes_per_s=ASSUMED.network_bytes_per_s * 0.4,
)
JOB = perceptron([1024] * 5, batch=64)
OTHER = replace(perceptron([768] * 6, batch=32), name="other")


def answer(
    allocation: str,
    *,
    graph: OpGraph = JOB,
    machine: Machine = ASSUMED,
    calibration: Calibration | None = None,
    batch: int = 64,
) -> Estimate:
    about = {"batch_per_gpu": batch, "profile": machine.profile(), "calibration": calibration}
    return est.estimate(graph, allocation, **about)


def attention(tokens: int) -> OpGraph:
    """A block of attention on sequences of some length, all else equal."""
    model = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    return trace_model(model, torch.randn(4, tokens, 32))


class Cluster:
    """A calibrator, and trainings on the real machine that it observes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "observations.db"
        self.calibrator = Calibrator(self.path)
        self.profile = ASSUMED.profile()

    def observe(self, *allocations: str, graph: OpGraph = JOB, times: int = 1) -> None:
        for allocation in allocations:
            real_s = answer(allocation, graph=graph, machine=REAL).step_time_s
            self.see(allocation, *[real_s] * times, graph=graph)
        self.calibrator.fit()

    def see(self, allocation: str, *steps_s: float, graph: OpGraph | str = JOB) -> None:
        for step_s in steps_s:
            self.calibrator.observe(graph, allocation, step_time_s=step_s, batch_per_gpu=64)

    def error(self, allocation: str, *, graph: OpGraph = JOB, calibrated: bool = True) -> float:
        found = self.estimate(allocation, graph=graph, calibrated=calibrated)
        real = answer(allocation, graph=graph, machine=REAL)
        return abs(found.step_time_s / real.step_time_s - 1)

    def estimate(
        self, allocation: str, *, graph: OpGraph = JOB, calibrated: bool = True
    ) -> Estimate:
        known = self.calibrator if calibrated else None
        about = {"batch_per_gpu": 64, "profile": self.profile, "calibration": known}
        return est.estimate(graph, allocation, **about)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_without_observations_the_answer_is_the_engines(cluster: Cluster) -> None:
    assert cluster.estimate("2x2:synthetic").to_dict() == (
        cluster.estimate("2x2:synthetic", calibrated=False).to_dict()
    )


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.7, 1.4, 2, 4])
def test_the_first_observation_is_believed_however_far_the_engine_is_off(
    ratio: float, cluster: Cluster
) -> None:
    engine_s = cluster.estimate("1x2:synthetic", calibrated=False).step_time_s
    seen_s = ratio * engine_s
    cluster.see("1x2:synthetic", seen_s)
    cluster.calibrator.fit()
    found = cluster.estimate("1x2:synthetic")
    assert found.step_time_s == pytest.approx(seen_s, rel=0.05)
    assert found.low_s < seen_s < found.high_s


@pytest.mark.parametrize("ratio", [1e-3, 1e3])
def test_a_first_observation_of_a_wrong_unit_is_not(ratio: float, cluster: Cluster) -> None:
    engine_s = cluster.estimate("1x2:synthetic", calibrated=False).step_time_s
    cluster.see("1x2:synthetic", ratio * engine_s)
    cluster.calibrator.fit()
    assert cluster.estimate("1x2:synthetic").step_time_s == pytest.approx(engine_s, rel=0.05)


def test_an_interval_nearly_reaches_the_steps_of_slower_nodes_of_one_name(cluster: Cluster) -> None:
    real_s = answer("1x2:synthetic", machine=REAL).step_time_s
    # A third of 36, of all that are expected, with the eighteen of a prior, more than a fifth.
    cluster.see("1x2:synthetic", *[ratio * real_s for ratio in (1.0, 1.01, 1.5)] * 12)
    found = cluster.estimate("1x2:synthetic")
    assert found.step_time_s == pytest.approx(real_s, rel=0.03)
    assert found.high_s > 1.45 * real_s


def test_observations_of_some_placements_correct_others(cluster: Cluster) -> None:
    before = cluster.error("4x2:synthetic")
    cluster.observe("1x1:synthetic", "1x2:synthetic", "2x1:synthetic", "2x2:synthetic")
    assert before > 0.5
    assert cluster.error("4x2:synthetic") < 0.15
    assert cluster.error("1x4:synthetic") < 0.15


def test_the_network_is_learnt_from_all_jobs_on_it(cluster: Cluster) -> None:
    before = cluster.error("2x1:synthetic", graph=OTHER)
    cluster.error("1x1:synthetic")  # both jobs are known with their graphs
    cluster.observe("1x1:synthetic", "2x1:synthetic", "3x1:synthetic", "4x1:synthetic", times=2)
    # No step of the other job was observed yet.
    assert cluster.error("2x1:synthetic", graph=OTHER) < 0.6 * before
    assumed = cluster.estimate("2x1:synthetic", graph=OTHER).assumptions
    assert any("other jobs" in line for line in assumed)
    cluster.observe("1x1:synthetic", graph=OTHER)
    assert cluster.error("2x1:synthetic", graph=OTHER) < before / 2


RELATED = {
    "other length": (attention(tokens=16), attention(tokens=64)),
    "other size": (JOB, replace(perceptron([2048] * 9, batch=64), name=JOB.name)),
    "other optimizer": (JOB, replace(JOB, optimizer="sgd")),
}


@pytest.mark.parametrize("kind", RELATED)
@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_observations_move_a_related_job_within_the_engines_interval(
    cluster: Cluster, kind: str, factor: float
) -> None:
    observed, asked = RELATED[kind]
    for allocation in ("1x1:synthetic", "1x2:synthetic", "2x2:synthetic"):
        cold_s = answer(allocation, graph=observed).step_time_s
        cluster.see(allocation, *[factor * cold_s] * 3, graph=observed)
    # Both were asked for, so that what was observed of one can teach the other.
    assert cluster.error("1x1:synthetic", graph=observed) > 0.1
    for allocation in ("1x1:synthetic", "1x2:synthetic", "4x1:synthetic"):
        cold = cluster.estimate(allocation, graph=asked, calibrated=False)
        found = cluster.estimate(allocation, graph=asked)
        assert found.step_time_s != cold.step_time_s
        assert cold.low_s * (1 - 1e-9) <= found.step_time_s <= cold.high_s * (1 + 1e-9)
    # Once it was observed itself, that counts.
    cluster.see("4x1:synthetic", factor * cold.step_time_s, graph=asked)
    cluster.calibrator.fit()
    seen_s = cluster.estimate("4x1:synthetic", graph=asked).step_time_s
    assert abs(math.log(seen_s / cold.step_time_s)) > 0.6 * abs(math.log(factor))


def test_one_job_under_two_names_is_one_job(cluster: Cluster) -> None:
    cluster.observe("1x1:synthetic", "2x2:synthetic", times=3)
    renamed = replace(JOB, name="the same, traced by the command line")
    assert cluster.error("2x2:synthetic", graph=renamed) < 0.02


def test_what_was_observed_of_a_name_alone_is_used_and_said(cluster: Cluster) -> None:
    cold_s = answer("2x2:synthetic").step_time_s
    cluster.see("2x2:synthetic", *[2 * cold_s] * 3, graph=JOB.workload)
    found = cluster.estimate("2x2:synthetic")
    assert found.step_time_s == pytest.approx(2 * cold_s, rel=0.05)
    assert any("by its name alone" in line for line in found.assumptions)


def test_intervals_shrink_with_observations_and_extrapolations_are_marked(cluster: Cluster) -> None:
    def width(allocation: str) -> float:
        found = cluster.estimate(allocation)
        return found.high_s / found.low_s

    cluster.observe("1x1:synthetic")
    few = width("2x2:synthetic")
    cluster.observe("2x2:synthetic", "2x1:synthetic", "1x2:synthetic", times=3)
    assert width("2x2:synthetic") < few
    assert not any("do not trust" in line for line in cluster.estimate("2x2:synthetic").assumptions)
    far = cluster.estimate("64x4:synthetic")
    assert any("do not trust" in line for line in far.assumptions)


def test_a_table_has_the_calibrated_answers_of_its_allocations(cluster: Cluster) -> None:
    cluster.observe("1x1:synthetic", "2x2:synthetic")
    texts = ["1x1:synthetic", "2x2:synthetic", "4x4:synthetic", "3x1:synthetic+1x2:synthetic"]
    table = estimate_many(
        JOB, texts, batch_per_gpu=64, profile=cluster.profile, calibration=cluster.calibrator
    )
    for text, step_s, low_s in zip(texts, table.step_time_s, table.low_s, strict=True):
        alone = cluster.estimate(text)
        assert step_s == pytest.approx(alone.step_time_s, rel=1e-9)
        assert low_s == pytest.approx(alone.low_s, rel=1e-9)
    # Another process learns the same.
    cluster.observe("1x1:synthetic", "2x2:synthetic")
    first = cluster.estimate("4x1:synthetic").step_time_s
    cluster.calibrator = Calibrator(cluster.path)
    assert cluster.estimate("4x1:synthetic").step_time_s == pytest.approx(first, rel=1e-6)


def test_the_parts_of_a_calibrated_step_add_up(cluster: Cluster) -> None:
    cluster.observe("1x1:synthetic", "2x1:synthetic", "2x2:synthetic")
    found = cluster.estimate("2x2:synthetic")
    end_s = max(span.start_s + span.duration_s for span in found.timeline.spans)
    assert found.breakdown.total_s == pytest.approx(end_s, rel=1e-9)
    # The network is what is slow: its part of the step grows more than that of computing.
    cold = cluster.estimate("2x2:synthetic", calibrated=False)
    network = found.breakdown.communication_exposed_s / cold.breakdown.communication_exposed_s
    assert network > 1.5 * found.breakdown.backward_s / cold.breakdown.backward_s


def test_three_new_steps_outweigh_those_of_a_year_ago(tmp_path: Path) -> None:
    from datetime import UTC, datetime, timedelta

    calibrator, cold = Calibrator(tmp_path / "o.db"), answer("2x2:synthetic").step_time_s
    long_ago = datetime.now(UTC) - timedelta(days=365)
    for ratio, at in ((2.0, long_ago), (1.2, datetime.now(UTC))):
        for _ in range(3):
            calibrator.observe(
                JOB, "2x2:synthetic", step_time_s=ratio * cold, batch_per_gpu=64, at=at
            )
    found = answer("2x2:synthetic", calibration=calibrator).step_time_s / cold
    assert found == pytest.approx(1.2, rel=0.05)


def test_an_estimate_made_while_a_fit_runs_is_that_of_before(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.estimate("2x2:synthetic")
    cluster.observe("2x2:synthetic", times=3)
    before = cluster.estimate("2x2:synthetic").step_time_s
    meanwhile: list[float] = []
    fit = StepCorrections.fit

    def slow_fit(self: StepCorrections, *given: Any, **more: Any) -> StepCorrections:
        with ThreadPoolExecutor(1) as other:
            asked = other.submit(cluster.estimate, "2x2:synthetic")
            meanwhile.append(asked.result(timeout=60).step_time_s)
        return fit(self, *given, **more)

    cluster.see("2x2:synthetic", 0.5)
    monkeypatch.setattr(StepCorrections, "fit", slow_fit)
    cluster.calibrator.fit()
    monkeypatch.undo()
    assert meanwhile == [before]
    # And none of them is kept for afterwards.
    after = cluster.estimate("2x2:synthetic").step_time_s
    fresh = est.estimate(
        JOB, "2x2:synthetic", batch_per_gpu=64, profile=cluster.profile,
        calibration=Calibrator(cluster.path),
    )  # fmt: skip
    assert after == fresh.step_time_s != before


def test_every_answer_beside_a_fit_is_of_one_of_its_two_states(cluster: Cluster) -> None:
    where = ("1x1:synthetic", "1x2:synthetic", "2x2:synthetic", "4x2:synthetic")
    answers = {text: {cluster.estimate(text).step_time_s} for text in where}
    rounds, is_over = 6, threading.Event()

    def ask() -> list[tuple[str, float]]:
        found = []
        while not is_over.is_set():
            found += [(text, cluster.estimate(text).step_time_s) for text in where]
        return found

    with ThreadPoolExecutor(3) as threads:
        asking = [threads.submit(ask) for _ in range(3)]
        try:
            for _ in range(rounds):
                cluster.observe("1x2:synthetic", "2x2:synthetic")
                for text in where:
                    answers[text].add(cluster.estimate(text).step_time_s)
        finally:
            is_over.set()
        found = [pair for each in asking for pair in each.result()]
    assert len(answers["2x2:synthetic"]) > rounds / 2
    assert all(step_s in answers[text] for text, step_s in found)


def test_a_job_beside_another_that_scatters_has_wider_intervals(tmp_path: Path) -> None:
    widths = []
    for scatter in (1.02, 1.5):
        cluster = Cluster(tmp_path / str(scatter))
        for turn, text in enumerate(
            f"{nodes}x{n}:synthetic" for nodes in (1, 2, 3) for n in (1, 2, 3, 4)
        ):
            real_s = answer(text, graph=OTHER, machine=REAL).step_time_s
            cluster.see(text, real_s * scatter ** (-1) ** turn, graph=OTHER)
        cluster.estimate("1x1:synthetic", graph=OTHER)  # known with its graph
        cluster.observe("1x1:synthetic", "1x2:synthetic", "2x1:synthetic")
        found = cluster.estimate("2x2:synthetic")
        widths.append(found.high_s / found.low_s)
    assert widths[1] > 1.2 * widths[0]


def test_only_jobs_with_new_observations_are_fitted_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted: list[str] = []
    fit = StepCorrections.fit

    def counting(self: StepCorrections, *given: Any, **more: Any) -> StepCorrections:
        fitted.append(self.content.fingerprint)
        return fit(self, *given, **more)

    for graph in (JOB, OTHER):
        cluster.observe("1x1:synthetic", "2x1:synthetic", graph=graph)
        cluster.estimate("2x2:synthetic", graph=graph)
    monkeypatch.setattr(StepCorrections, "fit", counting)
    cluster.observe("2x2:synthetic")
    cluster.estimate("2x2:synthetic", graph=OTHER)
    assert len(fitted) == 1


def test_a_fit_reads_no_job_again_of_which_nothing_was_observed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Asked for before anything was observed.
    cluster.estimate("1x1:synthetic", graph=OTHER)
    cluster.estimate("1x1:synthetic")
    cluster.observe("1x1:synthetic")
    read, observations = [], cluster.calibrator.store.observations

    def counted(**conditions: Any) -> list[Observation]:
        if "of_job" in conditions:
            read.append(conditions["of_job"].name)
        return observations(**conditions)

    monkeypatch.setattr(cluster.calibrator.store, "observations", counted)
    cluster.observe("2x2:synthetic", graph=OTHER)
    assert read == [OTHER.workload]


def test_an_observation_in_the_place_of_another_is_noticed(cluster: Cluster) -> None:
    cluster.observe("1x2:synthetic")
    before = cluster.estimate("1x2:synthetic").step_time_s
    with sqlite3.connect(cluster.path) as connection:
        connection.execute("DELETE FROM observations")
    cluster.see("1x2:synthetic", 2 * before)
    cluster.calibrator.fit()
    assert cluster.estimate("1x2:synthetic").step_time_s == pytest.approx(2 * before, rel=0.05)


PROFILE = with_every_collective(Machine(devices=4).profile())
GRAPH = traced(8)
LAYOUTS = ["tp=2,dp=*", "tp=4,dp=*", "pp=2,schedule=1f1b,dp=*", "tp=2,pp=2,schedule=zb,dp=*"]


def observed_answer(
    allocation: str, layout: str | None, calibration: Calibrator | None = None
) -> Estimate:
    batches = {"batch_per_gpu": 8, "accumulation_steps": 4}
    about = {"layout": layout, "profile": PROFILE, "calibration": calibration}
    return est.estimate(GRAPH, allocation, **about, **batches)


def observed(
    path: Path, layout: str | None, slower: float, allocation: str = "1x4:m"
) -> Calibrator:
    """Three steps that took so many times as long as the engine says."""
    calibrator = Calibrator(path / "observations.db")
    for _ in range(3):
        calibrator.observe(
            GRAPH,
            allocation,
            step_time_s=slower * observed_answer(allocation, layout).step_time_s,
            batch_per_gpu=8,
            accumulation_steps=4,
            layout=layout,
        )
    return calibrator


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_that_was_seen_three_times_is_predicted_as_seen(tmp_path: Path, layout: str) -> None:
    calibrator, cold = observed(tmp_path, layout, 1.5), observed_answer("1x4:m", layout)
    found = observed_answer("1x4:m", layout, calibrator)
    assert found.step_time_s == pytest.approx(1.5 * cold.step_time_s, rel=0.05)
    assert f"with layout {layout}" in found.plan.coefficients.remark


@pytest.mark.parametrize(("layout", "seen"), list(permutations([*LAYOUTS, None], 2)))
def test_a_layout_moves_others_within_the_engines_own_interval(
    tmp_path: Path, layout: str | None, seen: str | None
) -> None:
    cold = observed_answer("1x4:m", layout)
    found = observed_answer("1x4:m", layout, observed(tmp_path, seen, 6.0))
    assert cold.step_time_s < found.step_time_s <= cold.high_s * (1 + 1e-9)


def test_data_parallel_steps_are_not_taken_for_those_of_stages(tmp_path: Path) -> None:
    """Ranks with stages run the same graph as those that are data-parallel."""
    calibrator = observed(tmp_path, "pp=2,dp=*", 3.0)
    for _ in range(3):
        cold = observed_answer("1x4:m", None)
        calibrator.observe(
            GRAPH, "1x4:m", step_time_s=cold.step_time_s, batch_per_gpu=8, accumulation_steps=4
        )
    found = observed_answer("1x4:m", None, calibrator)
    assert found.step_time_s == pytest.approx(cold.step_time_s, rel=0.05)
    staged = observed_answer("1x4:m", "pp=2,dp=*", calibrator)
    assert staged.step_time_s == pytest.approx(
        3 * observed_answer("1x4:m", "pp=2,dp=*").step_time_s, rel=0.05
    )


def test_more_data_parallel_ranks_of_a_layout_are_alike(tmp_path: Path) -> None:
    calibrator = observed(tmp_path, "tp=2", 2.0, "1x2:m")
    cold, found = (observed_answer("1x4:m", "tp=2,dp=2", each) for each in (None, calibrator))
    assert found.step_time_s > 1.3 * cold.step_time_s


def test_an_observation_keeps_its_layout(tmp_path: Path) -> None:
    calibrator = observed(tmp_path, "tp=2,dp=2", 1.0)
    assert {one.layout for one in calibrator.store} == {"tp=2,dp=*"}
    table = tmp_path / "steps.csv"
    table.write_text(
        "workload,allocation,batch_per_gpu,step_time_s,layout\n"
        'gpt,1x4:m,8,0.5,"pp=2,dp=2"\ngpt,1x4:m,8,0.5,\n'
    )
    read = [one.layout for one in read_observations(table).observations]
    assert read == ["pp=2,schedule=1f1b,dp=*", None]


def test_a_layout_of_other_ranks_is_refused() -> None:
    with pytest.raises(StrategyError, match="takes a multiple of 3 ranks, found 4"):
        Observation(
            workload="gpt", allocation="1x4:m", batch_per_gpu=8, step_time_s=0.5, layout="tp=3"
        )
