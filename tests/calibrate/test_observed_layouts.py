"""What is learnt of ranks that share a model: of their own layout, and of others."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

import estimator as est
from estimator.calibrate.calibrator import Calibrator
from estimator.calibrate.observation_files import read_observations
from estimator.calibrate.observed import Observation
from estimator.errors import StrategyError
from estimator.estimates.estimate import Estimate
from tests.graph.partition.test_stages import traced
from tests.synthetic import Machine, with_every_collective

PROFILE = with_every_collective(Machine(devices=4).profile())
GRAPH = traced(8)
LAYOUTS = ["tp=2,dp=*", "tp=4,dp=*", "pp=2,schedule=1f1b,dp=*", "tp=2,pp=2,schedule=zb,dp=*"]


def answer(allocation: str, layout: str | None, calibration: Calibrator | None = None) -> Estimate:
    return est.estimate(
        GRAPH,
        allocation,
        layout=layout,
        batch_per_gpu=8,
        accumulation_steps=4,
        profile=PROFILE,
        calibration=calibration,
    )


def observed(
    path: Path, layout: str | None, slower: float, allocation: str = "1x4:m"
) -> Calibrator:
    """Three steps that took so many times as long as the engine says."""
    calibrator = Calibrator(path / "observations.db")
    for _ in range(3):
        calibrator.observe(
            GRAPH,
            allocation,
            step_time_s=slower * answer(allocation, layout).step_time_s,
            batch_per_gpu=8,
            accumulation_steps=4,
            layout=layout,
        )
    return calibrator


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_that_was_seen_three_times_is_predicted_as_seen(tmp_path: Path, layout: str) -> None:
    calibrator, cold = observed(tmp_path, layout, 1.5), answer("1x4:m", layout)
    found = answer("1x4:m", layout, calibrator)
    assert found.step_time_s == pytest.approx(1.5 * cold.step_time_s, rel=0.05)
    assert f"with layout {layout}" in found.plan.coefficients.remark


@pytest.mark.parametrize(("layout", "seen"), list(permutations([*LAYOUTS, None], 2)))
def test_a_layout_moves_others_within_the_engines_own_interval(
    tmp_path: Path, layout: str | None, seen: str | None
) -> None:
    cold = answer("1x4:m", layout)
    found = answer("1x4:m", layout, observed(tmp_path, seen, 6.0))
    assert cold.step_time_s < found.step_time_s <= cold.high_s * (1 + 1e-9)


def test_data_parallel_steps_are_not_taken_for_those_of_stages(tmp_path: Path) -> None:
    """Ranks with stages run the same graph as those that are data-parallel."""
    calibrator = observed(tmp_path, "pp=2,dp=*", 3.0)
    for _ in range(3):
        cold = answer("1x4:m", None)
        calibrator.observe(
            GRAPH, "1x4:m", step_time_s=cold.step_time_s, batch_per_gpu=8, accumulation_steps=4
        )
    found = answer("1x4:m", None, calibrator)
    assert found.step_time_s == pytest.approx(cold.step_time_s, rel=0.05)
    staged = answer("1x4:m", "pp=2,dp=*", calibrator)
    assert staged.step_time_s == pytest.approx(
        3 * answer("1x4:m", "pp=2,dp=*").step_time_s, rel=0.05
    )


def test_more_data_parallel_ranks_of_a_layout_are_alike(tmp_path: Path) -> None:
    calibrator = observed(tmp_path, "tp=2", 2.0, "1x2:m")
    cold, found = (answer("1x4:m", "tp=2,dp=2", each) for each in (None, calibrator))
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
