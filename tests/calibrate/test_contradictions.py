"""Wrong observations neither raise the error on true ones much nor go unnoticed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from estimator.calibrate.mixture import OUTLIER_WEIGHT
from estimator.calibrate.performance_model import BATCH
from estimator.calibrate.step_time_regressor import StepTimeRegressor
from tests.calibrate.test_step_time_regressor import MEASURED_S, ROWS

Wrong = Callable[[np.random.Generator, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def random(
    rng: np.random.Generator, rows: np.ndarray, times_s: np.ndarray
) -> tuple[np.ndarray, ...]:
    factors = np.exp(rng.uniform(np.log(2), np.log(10), len(rows)))
    return rows, times_s * factors ** rng.choice([-1, 1], len(rows))


def contradictory(
    rng: np.random.Generator, rows: np.ndarray, times_s: np.ndarray
) -> tuple[np.ndarray, ...]:
    return rows, times_s * rng.choice([1 / 3, 3])


def of_another_model(
    rng: np.random.Generator, rows: np.ndarray, times_s: np.ndarray
) -> tuple[np.ndarray, ...]:
    return rows, 4 * times_s


def of_another_batch(
    rng: np.random.Generator, rows: np.ndarray, times_s: np.ndarray
) -> tuple[np.ndarray, ...]:
    rows = rows.copy()
    rows[:, BATCH] *= np.where(rows[:, BATCH] >= 32, 1 / 8, 8)
    return rows, times_s


def duplicated(
    rng: np.random.Generator, rows: np.ndarray, times_s: np.ndarray
) -> tuple[np.ndarray, ...]:
    return rows, times_s


@pytest.mark.parametrize(
    "wrong", [random, contradictory, of_another_model, of_another_batch, duplicated]
)
@pytest.mark.parametrize("count", [12, 20])
@pytest.mark.parametrize("seed", range(4))
def test_wrong_observations_raise_no_error_by_half(wrong: Wrong, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    measured_s = MEASURED_S * np.exp(rng.normal(0, 0.03, len(ROWS)))
    seen = np.concatenate([[0, 3], rng.choice(np.arange(4, len(ROWS)), count - 2, replace=False)])
    rows, times_s = ROWS[seen], measured_s[seen]
    chosen = rng.choice(count, count // 5, replace=False)
    wrong_rows, wrong_s = wrong(rng, rows[chosen], times_s[chosen])
    clean = StepTimeRegressor().fit(rows, times_s)
    fitted = StepTimeRegressor().fit(
        np.vstack([rows, wrong_rows]), np.concatenate([times_s, wrong_s])
    )
    before, after = (
        np.mean(np.abs(each.predict(ROWS) / MEASURED_S - 1)) for each in (clean, fitted)
    )
    assert after < 1.5 * before
    # `calibrate show` names what has so little weight; what is off by less than half may pass.
    is_far = np.abs(np.log(clean.predict(wrong_rows) / wrong_s)) > np.log(2)
    assert (fitted.observation_weights_[count:][is_far] < OUTLIER_WEIGHT).all()
