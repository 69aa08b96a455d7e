"""The forms of other systems recover the coefficients that made their own data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from calibration.baselines import OptimusRegressor, PolluxRegressor
from calibration.machine_priors import priors_of
from calibration.rivals import (
    AsynchronousOptimusRegressor,
    AsynchronousRegressor,
    IndependentWorkers,
    LinearScaling,
    OnesRegressor,
)

from estimator.calibrate.performance_model import WEAK_PRIORS
from estimator.errors import WorkloadError
from tests.benchmarks.test_evaluation import measured

ROWS = np.array(
    [
        (ranks, nodes, batch, accumulation)
        for ranks, nodes in ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (8, 2), (16, 4))
        for batch in (8, 32, 128)
        for accumulation in (1, 3)
    ],
    dtype=float,
)


def test_optimus_recovers_its_coefficients() -> None:
    truth = 0.002 * ROWS[:, 2] * ROWS[:, 3] + 0.05 + 0.01 * ROWS[:, 0]
    fitted = OptimusRegressor().fit(ROWS, truth)
    assert fitted.coefficients_ == pytest.approx([0.002, 0.05, 0.01])


def test_pollux_recovers_steps_of_its_own_model() -> None:
    alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma = 0.03, 0.002, 0.2, 0.02, 0.05, 0.01, 2
    ranks, nodes, batch, accumulation = ROWS.T
    gradient = alpha_c + beta_c * batch
    extra = np.maximum(ranks - 2, 0)
    sync = np.where(nodes > 1, alpha_n + beta_n * extra, alpha_r + beta_r * extra)
    sync[ranks == 1] = 0
    truth = (accumulation - 1) * gradient + (gradient**gamma + sync**gamma) ** (1 / gamma)
    fitted = PolluxRegressor().fit(ROWS, truth)
    assert fitted.predict(ROWS) == pytest.approx(truth, rel=1e-3)
    assert fitted.parameters_ == pytest.approx(
        [alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma], rel=0.05
    )


def test_pollux_assumes_inter_node_communication_no_faster_than_intra_node() -> None:
    seen = ROWS[ROWS[:, 1] == 1]
    times = 0.05 + 0.001 * seen[:, 2] * seen[:, 3] + 0.1 * (seen[:, 0] > 1)
    within, across = PolluxRegressor().fit(seen, times).predict([(2, 1, 32, 1), (2, 2, 32, 1)])
    assert across >= within


def test_with_a_single_batch_half_of_the_time_is_assumed_fixed() -> None:
    # 0.2 s + 0.2 s · 16 / 8.
    assert PolluxRegressor().fit([(1, 1, 8, 1)], [0.4]).predict([(1, 1, 16, 1)]) == pytest.approx(
        [0.6]
    )


def test_linear_scaling_recovers_its_line_from_one_rank_alone() -> None:
    rows = np.array([(1, 1, 8, 1), (1, 1, 32, 3), (4, 2, 8, 1)], dtype=float)
    truth = 0.05 + 0.002 * rows[:, 2] * rows[:, 3]
    fitted = LinearScaling().fit(rows, np.where(rows[:, 0] == 1, truth, 3 * truth))
    assert fitted.coefficients_ == pytest.approx([0.002, 0.05])
    assert fitted.predict([(64, 8, 32, 1)]) == pytest.approx([0.114])
    # Of a single batch half of the time is fixed: 0.2 s + 0.2 s · 16 / 8.
    single = LinearScaling().fit([(1, 1, 8, 1)], [0.4])
    assert single.predict([(4, 1, 16, 1)]) == pytest.approx([0.6])


def test_ones_interpolates_throughput_linearly_over_ranks() -> None:
    # 8 samples in 0.1 s on 1 rank: 80/s; 2 · 8 in 0.1 s: 160/s; 4 · 8 in 0.2 s: 160/s.
    fitted = OnesRegressor().fit([(1, 1, 8, 1), (2, 1, 8, 1), (4, 1, 8, 1)], [0.1, 0.1, 0.2])
    # 3 ranks: 160/s, 24 samples. Beyond 4 the last line stays flat.
    predicted = fitted.predict([(3, 1, 8, 1), (8, 2, 8, 1)])
    assert predicted == pytest.approx([24 / 160, 64 / 160])


def test_ones_averages_repetitions_and_interpolates_over_batches() -> None:
    fitted = OnesRegressor().fit([(1, 1, 8, 1), (1, 1, 8, 1), (1, 1, 16, 1)], [0.1, 0.2, 0.1])
    # Batch 8: (80 + 40)/2 = 60/s; batch 16: 160/s; batch 12 lies between: 110/s.
    assert fitted.predict([(1, 1, 12, 1)]) == pytest.approx([12 / 110])


def test_asynchronous_forms_recover_what_made_the_updates() -> None:
    rows = np.array([(1, 1), (2, 1), (4, 1), (8, 1)], dtype=float)
    alone = IndependentWorkers().fit(rows, [0.4, 0.3, 0.2, 0.1])
    assert alone.predict([(8, 1)]) == pytest.approx([0.05])
    # A worker's step of 0.2 s + 0.05 s per worker.
    seen = (0.2 + 0.05 * rows[:, 0]) / rows[:, 0]
    optimus = AsynchronousOptimusRegressor().fit(rows, seen)
    assert optimus.coefficients_ == pytest.approx([0.2, 0.05])
    assert optimus.predict([(5, 1)]) == pytest.approx([0.09])


# P100 and one server, ResNet-32 of CM-DARE-like speed: 10 updates a second of a worker, 30 at most.
WORKERS = np.arange(1, 9)
ASYNCHRONOUS_ROWS = np.column_stack([WORKERS, np.ones(8)]).astype(float)
FREE_S = 0.1 / WORKERS
FULL_S = np.maximum(FREE_S, 1 / 30)
SEEN = np.isin(WORKERS, (1, 2, 4, 8))


def test_throughput_is_linear_far_from_saturated_servers() -> None:
    fitted = AsynchronousRegressor().fit(ASYNCHRONOUS_ROWS[SEEN], FREE_S[SEEN])
    assert fitted.predict(ASYNCHRONOUS_ROWS) == pytest.approx(FREE_S, rel=0.02)


def test_a_saturated_server_bounds_the_throughput() -> None:
    fitted = AsynchronousRegressor().fit(ASYNCHRONOUS_ROWS[SEEN], FULL_S[SEEN])
    full = WORKERS > 4
    assert fitted.predict(ASYNCHRONOUS_ROWS[full]) == pytest.approx(FULL_S[full], rel=0.06)
    unbounded = (
        IndependentWorkers()
        .fit(ASYNCHRONOUS_ROWS[SEEN], FULL_S[SEEN])
        .predict(ASYNCHRONOUS_ROWS[~SEEN])
    )
    assert np.abs(fitted.predict(ASYNCHRONOUS_ROWS[~SEEN]) / FULL_S[~SEEN] - 1).mean() < np.mean(
        np.abs(unbounded / FULL_S[~SEEN] - 1)
    )


def test_more_servers_raise_the_throughput() -> None:
    fitted = AsynchronousRegressor().fit(ASYNCHRONOUS_ROWS[SEEN], FULL_S[SEEN])
    one, two = fitted.predict([(8, 1), (8, 2)])
    assert two < one


def test_the_interval_holds_the_prediction_and_widens_beyond_the_observations() -> None:
    fitted = AsynchronousRegressor().fit(ASYNCHRONOUS_ROWS[SEEN], FULL_S[SEEN])
    rows = np.array([(4.0, 1.0), (64.0, 1.0)])
    low_s, high_s = fitted.predict_interval(rows)
    assert (low_s < fitted.predict(rows)).all()
    assert (fitted.predict(rows) < high_s).all()
    assert high_s[1] / low_s[1] > high_s[0] / low_s[0]


@pytest.mark.parametrize(
    ("rows", "times"), [([(0, 1)], [1.0]), ([(1, 1, 1)], [1.0]), ([(1, 1)], [0.0]), ([(1, 1)], [])]
)
def test_an_invalid_table_is_refused_asynchronous(
    rows: list[tuple[int, ...]], times: list[float]
) -> None:
    with pytest.raises(WorkloadError):
        AsynchronousRegressor().fit(rows, times)


@pytest.fixture(autouse=True)
def only_shipped_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESTIMATOR_HOME", str(tmp_path))


def inter_node(gpu: str, interconnect: str, gpus_per_node: int | None = 8) -> float | None:
    """The median of the network's prior over that of the weak one; None where none is derived."""
    alone = measured((1,), 8, gpu)
    step = replace(alone, gpus_per_node=gpus_per_node, interconnect=interconnect)
    priors = priors_of(step)
    weak = WEAK_PRIORS.by_name["inter_node"]
    return priors and priors.by_name["inter_node"].median / weak.median


def test_the_weak_prior_is_that_of_t4_on_50_gbit_ethernet() -> None:
    # 8.1e12 operations over 0.75 of 6.25e9 B/s are 1,728 for each byte.
    assert inter_node("T4", "PCIe; 50GbE", 4) == pytest.approx(1728 / 1750)


def test_a_network_that_is_named_without_its_rate_is_that_of_the_gpus_machines() -> None:
    # DGX A100: 19.5e12 operations over 0.93 of 200e9 B/s.
    assert inter_node("A100-SXM4-40GB", "NVSwitch; IB") == pytest.approx(19.5e12 / 186e9 / 1750)
    assert inter_node("A100-SXM4-40GB", "NVSwitch; IB", 16) is None


def test_the_tables_own_rate_goes_before_the_profiles() -> None:
    # 15.7e12 over 0.93 of 12.5e9 B/s, where a DGX-1 has four such cards.
    assert inter_node("V100-SXM2-16GB", "NVLink; 1x 100Gb EDR IB per node") == pytest.approx(
        15.7e12 / (0.93 * 12.5e9) / 1750
    )
    assert inter_node("V100-SXM2-16GB", "4x 100Gb IB") == pytest.approx(
        15.7e12 / (0.93 * 50e9) / 1750
    )


@pytest.mark.parametrize(
    ("gpu", "interconnect"),
    [
        ("RTX 2080 Ti", "PCIe; network not stated"),
        ("H100", ""),
        ("no such GPU", "100Gb IB"),
        ("T4", "0GbE"),
    ],
)
def test_an_unknown_network_keeps_the_weak_prior(gpu: str, interconnect: str) -> None:
    assert inter_node(gpu, interconnect) is None


def test_a_damaged_profile_of_the_users_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "machines").mkdir()
    (tmp_path / "machines" / "broken.json").write_text("{")
    # Written otherwise than above: what was found of a name is kept.
    assert inter_node("A100 SXM4 40GB", "IB", None) is not None
