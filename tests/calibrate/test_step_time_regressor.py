"""The regression learns from few rows, is robust to outliers, and converges to observations."""

from __future__ import annotations

import numpy as np
import pytest
from calibration.baselines import PolluxRegressor

from estimator.calibrate.performance_model import (
    WEAK_PRIORS,
    ComputeReference,
    EngineTimes,
    LogNormalPrior,
    evaluate_model,
)
from estimator.calibrate.regressor import StepTimeRegressor

PLACEMENTS = (
    (1, 1, 1),
    (2, 1, 2),
    (4, 1, 4),
    (2, 2, 1),
    (4, 2, 3),
    (6, 3, 2),
    (8, 4, 4),
    (16, 4, 4),
)
ROWS = np.array(
    [
        (ranks, nodes, batch, 1, most)
        for ranks, nodes, most in PLACEMENTS
        for batch in (8, 16, 32, 64)
    ],
    dtype=float,
)
ALONE = ROWS[:, 0] == 1
# A T4-like job that does not follow the model: 50 ms + 10 ms a sample; gradients of 0.4 s a ring
# across nodes and 0.1 s within one, a third of them hidden.
RING = 2 * (1 - 1 / ROWS[:, 0])
SYNC_S = np.where(ROWS[:, 1] > 1, 0.4, 0.1) * RING
COMPUTE_S = 0.05 + 0.01 * ROWS[:, 2]
MEASURED_S = COMPUTE_S + np.maximum(SYNC_S - COMPUTE_S / 3, 0)


def rows_like(*wanted: tuple[float, ...]) -> np.ndarray:
    """Places of rows (ranks, nodes, batch)."""
    return np.array([np.flatnonzero((ROWS[:, :3] == want).all(axis=1))[0] for want in wanted])


FEW = rows_like((1, 1, 8), (1, 1, 64), (4, 1, 16), (2, 2, 8), (8, 4, 32))


def error(fitted: StepTimeRegressor | PolluxRegressor) -> float:
    """Median relative error over all rows."""
    return float(np.median(np.abs(fitted.predict(ROWS) / MEASURED_S - 1)))


def test_steps_of_the_model_itself_are_recovered_from_few_rows() -> None:
    truth = np.exp(
        evaluate_model(
            WEAK_PRIORS.log_medians(), ROWS, ComputeReference(compute_s=0.4, batch=22.0)
        ).log_step
    )
    predicted = np.exp(StepTimeRegressor().fit(ROWS[FEW], truth[FEW]).model(ROWS).log_step)
    assert predicted == pytest.approx(truth, rel=0.05)


def test_few_rows_teach_more_than_they_teach_pollux() -> None:
    seen, times = ROWS[FEW], MEASURED_S[FEW]
    ours = error(StepTimeRegressor().fit(seen, times))
    assert ours < error(PolluxRegressor().fit(seen, times))


def test_a_row_observed_often_is_predicted_as_it_was_observed() -> None:
    odd = rows_like((4, 2, 16))
    others = np.setdiff1d(np.arange(len(ROWS)), odd)
    seen = np.concatenate([others, np.repeat(odd, 4)])
    times = np.concatenate([MEASURED_S[others], 2 * MEASURED_S[odd] * [0.99, 1.01, 1.0, 1.0]])
    fitted = StepTimeRegressor().fit(ROWS[seen], times)
    assert fitted.predict(ROWS[odd]) == pytest.approx(2 * MEASURED_S[odd], rel=0.05)
    without = StepTimeRegressor().fit(ROWS[others], MEASURED_S[others])
    assert fitted.predict(ROWS[others]) == pytest.approx(without.predict(ROWS[others]), rel=0.05)


def test_an_outlier_three_times_too_long_hardly_moves_other_predictions() -> None:
    seen = np.concatenate([np.flatnonzero(ALONE), FEW, rows_like((16, 4, 64), (6, 3, 16))])
    times = MEASURED_S[seen].copy()
    clean = StepTimeRegressor().fit(ROWS[seen], times).predict(ROWS)
    times[-1] *= 3
    fitted = StepTimeRegressor().fit(ROWS[seen], times)
    assert fitted.observation_weights_[-1] < 0.05
    assert np.mean(np.abs(fitted.predict(ROWS) / clean - 1)) < 0.05


def test_an_outlier_does_not_lead_the_fit_to_another_optimum() -> None:
    # BERT on RTX 2080 Ti in the table of Sia: one row alone tells which link is the slower.
    seen = [
        (1, 1, 4, 1, 1, 0.252), (1, 1, 6, 1, 1, 0.326), (1, 1, 8, 1, 1, 0.368),
        (1, 1, 11, 1, 1, 0.413), (1, 1, 12, 1, 1, 0.447), (13, 2, 6, 1, 7, 0.953),
        (12, 2, 11, 1, 8, 0.901), (6, 2, 11, 1, 3, 0.847), (14, 2, 6, 1, 8, 0.909),
        (10, 2, 11, 1, 6, 0.926), (22, 3, 4, 1, 8, 0.901), (5, 2, 6, 1, 3, 0.708),
        (12, 2, 11, 1, 6, 0.945), (3, 2, 12, 1, 2, 0.671), (7, 1, 8, 1, 7, 3 * 0.727),
    ]  # fmt: skip
    rows, times = np.array(seen)[:, :5], np.array(seen)[:, 5]
    fitted = StepTimeRegressor().fit(rows, times)
    without = StepTimeRegressor().fit(rows[:-1], times[:-1])
    assert fitted.observation_weights_[-1] < 0.05
    others = np.vstack([rows[:-1], [(2, 1, 8, 1, 2), (4, 1, 8, 1, 4), (8, 1, 8, 1, 8)]])
    assert np.mean(np.abs(fitted.predict(others) / without.predict(others) - 1)) < 0.05


def test_a_down_weighted_outlier_still_widens_the_intervals() -> None:
    times = MEASURED_S.copy()
    times[5] *= 3
    fitted = StepTimeRegressor().fit(ROWS, times)
    assert fitted.observation_weights_[5] < 0.05
    scores = fitted.scores_
    # It is log 3 away from what its neighbours say, whose spread is some percent.
    assert scores.argmax() == 5
    assert scores[5] > 5


def test_without_observations_the_engines_times_are_the_answer() -> None:
    nothing = EngineTimes(*3 * [np.zeros(0)])
    fitted = StepTimeRegressor().fit([], [], engine_times=nothing)
    engine = EngineTimes(compute_s=COMPUTE_S, sync_s=SYNC_S * ~ALONE, step_s=MEASURED_S)
    assert fitted.predict(ROWS, engine_times=engine) == pytest.approx(MEASURED_S, rel=1e-9)


def test_beside_an_engine_left_out_errors_count_as_they_are() -> None:
    seen, expected_s = ROWS[FEW], MEASURED_S[FEW]
    times_s = expected_s * np.array([1.5, 1.0, 0.6, 1.5, 0.6])
    engine = EngineTimes(
        compute_s=COMPUTE_S[FEW], sync_s=SYNC_S[FEW] * ~ALONE[FEW], step_s=expected_s
    )
    beside = StepTimeRegressor().fit(seen, times_s, engine_times=engine)
    alone = StepTimeRegressor().fit(seen, times_s)
    assert beside.spread_.inflation_variance == pytest.approx(1, abs=0.01)
    assert alone.spread_.inflation_variance > 1.2


def test_a_stall_that_the_engine_does_not_know_is_learnt_as_seconds() -> None:
    # An input pipeline holds up each step by 60 ms, whatever the batch; the engine knows the rest.
    engine = EngineTimes(compute_s=COMPUTE_S, sync_s=SYNC_S * ~ALONE, step_s=MEASURED_S)
    seen = np.flatnonzero(ALONE & (ROWS[:, 2] < 64))
    known = EngineTimes(
        compute_s=COMPUTE_S[seen], sync_s=np.zeros(len(seen)), step_s=MEASURED_S[seen]
    )
    fitted = StepTimeRegressor().fit(ROWS[seen], MEASURED_S[seen] + 0.06, engine_times=known)
    largest = np.flatnonzero(ALONE & (ROWS[:, 2] == 64))
    predicted = np.exp(fitted.prediction(ROWS, engine_times=engine).model.log_step)[largest]
    # By the mean ratio of what was seen, 1.30, the 0.69 s of the engine would be 0.89 s.
    assert predicted == pytest.approx(0.75, rel=0.04)


def test_the_engines_shape_carries_one_observation_to_other_placements() -> None:
    # The engine sees the right shape and is 30 % short everywhere.
    parts = COMPUTE_S / 1.3, SYNC_S * ~ALONE / 1.3, MEASURED_S / 1.3
    engine, one = EngineTimes(*parts), rows_like((8, 4, 16))
    seen = EngineTimes(*(part[one] for part in parts))
    before = StepTimeRegressor().fit([], [], engine_times=EngineTimes(*3 * [np.zeros(0)]))
    after = StepTimeRegressor().fit(ROWS[one], MEASURED_S[one], engine_times=seen)
    across = ROWS[:, 1] > 1
    errors = [
        np.median(np.abs(fitted.predict(ROWS, engine_times=engine) / MEASURED_S - 1)[across])
        for fitted in (before, after)
    ]
    assert errors[1] < 0.6 * errors[0]


def test_intervals_shrink_with_observations_and_widen_far_from_them() -> None:
    few = StepTimeRegressor().fit(ROWS[FEW], MEASURED_S[FEW])
    many = StepTimeRegressor().fit(ROWS, MEASURED_S)
    wide, narrow = (
        np.log(high / low) for low, high in (f.predict_interval(ROWS) for f in (few, many))
    )
    assert np.median(narrow) < np.median(wide)
    single = StepTimeRegressor().fit(ROWS[ALONE], MEASURED_S[ALONE])
    low_s, high_s = single.predict_interval(ROWS)
    widths = np.log(high_s / low_s)
    assert widths[~ALONE].min() > widths[ALONE].max()


def test_rows_far_from_all_observations_extrapolate() -> None:
    fitted = StepTimeRegressor().fit(ROWS, MEASURED_S)
    far = np.array([(1024, 256, 16, 1, 4), (8, 4, 4096, 1, 4)], dtype=float)
    assert fitted.prediction(far).extrapolates.all()
    assert not fitted.prediction(ROWS).extrapolates.any()
    alone = StepTimeRegressor().fit(ROWS[ALONE], MEASURED_S[ALONE])
    assert alone.prediction(ROWS[-4:-3]).extrapolates.all()


def test_the_prior_decides_where_no_row_identifies_a_parameter() -> None:
    slow = WEAK_PRIORS.updated(inter_node=LogNormalPrior(median=5.0, sigma=0.1))
    rows = ROWS[rows_like((8, 4, 8))]
    usual, slower = (
        StepTimeRegressor(priors=p).fit(ROWS[ALONE], MEASURED_S[ALONE]).predict(rows)
        for p in (None, slow)
    )
    assert slower[0] > 2 * usual[0]
