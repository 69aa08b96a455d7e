"""Wrong observations neither raise the error on true ones much nor go unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estimator.calibrate.mixture import OUTLIER_WEIGHT
from estimator.calibrate.observed import Observation
from estimator.calibrate.performance_model import BATCH, LARGEST_NODE, NODES, RANKS
from estimator.calibrate.regressor import StepTimeRegressor
from estimator.calibrate.store import ObservationStore
from tests.calibrate.test_step_time_regressor import MEASURED_S, ROWS

Wrong = Callable[[np.random.Generator, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
START = datetime(2026, 3, 2, tzinfo=UTC)


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


def wrong_and_copied_thrice(
    rng: np.random.Generator, rows: np.ndarray, times_s: np.ndarray
) -> tuple[np.ndarray, ...]:
    return np.repeat(rows, 3, axis=0), np.repeat(3 * times_s, 3)


def too_long_and_copied_fifty_times(
    rng: np.random.Generator, rows: np.ndarray, times_s: np.ndarray
) -> tuple[np.ndarray, ...]:
    return np.repeat(rows[:1], 50, axis=0), np.repeat(3 * times_s[:1], 50)


def too_short_and_copied_fifty_times(
    rng: np.random.Generator, rows: np.ndarray, times_s: np.ndarray
) -> tuple[np.ndarray, ...]:
    return np.repeat(rows[:1], 50, axis=0), np.repeat(times_s[:1] / 3, 50)


KINDS = [
    random,
    contradictory,
    of_another_model,
    of_another_batch,
    wrong_and_copied_thrice,
    too_long_and_copied_fifty_times,
    too_short_and_copied_fifty_times,
]


def observed(
    seed: int, count: int, wrong: Wrong
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """True rows and step times, of 3 % of noise, and wrong ones made of a fifth of them."""
    rng = np.random.default_rng(seed)
    measured_s = MEASURED_S * np.exp(rng.normal(0, 0.03, len(ROWS)))
    seen = np.concatenate([[0, 3], rng.choice(np.arange(4, len(ROWS)), count - 2, replace=False)])
    rows, times_s = ROWS[seen], measured_s[seen]
    chosen = rng.choice(count, count // 5, replace=False)
    return rows, times_s, *wrong(rng, rows[chosen], times_s[chosen])


@cache
def clean_fit(seed: int, count: int) -> StepTimeRegressor:
    """The fit of the true observations, which whatever is wrong beside them does not change."""
    rows, times_s, _, _ = observed(seed, count, random)
    return StepTimeRegressor().fit(rows, times_s)


def error(fitted: StepTimeRegressor) -> float:
    """Mean relative error over all rows."""
    return float(np.mean(np.abs(fitted.predict(ROWS) / MEASURED_S - 1)))


def is_far(clean: StepTimeRegressor, rows: np.ndarray, times_s: np.ndarray) -> np.ndarray:
    """`calibrate show` names what is this far off; what is off by less may pass."""
    return np.abs(np.log(clean.predict(rows) / times_s)) > np.log(2)


@pytest.mark.parametrize("wrong", KINDS)
@pytest.mark.parametrize("count", [12, 20])
@pytest.mark.parametrize("seed", range(4))
def test_wrong_observations_raise_no_error_by_half(wrong: Wrong, count: int, seed: int) -> None:
    rows, times_s, wrong_rows, wrong_s = observed(seed, count, wrong)
    clean = clean_fit(seed, count)
    fitted = StepTimeRegressor().fit(
        np.vstack([rows, wrong_rows]), np.concatenate([times_s, wrong_s])
    )
    assert error(fitted) < 1.5 * error(clean)
    far = is_far(clean, wrong_rows, wrong_s)
    assert (fitted.observation_weights_[count:][far] < OUTLIER_WEIGHT).all()


@pytest.mark.parametrize("count", [12, 20])
@pytest.mark.parametrize("seed", range(4))
def test_copies_of_a_right_observation_make_no_other_answer_surer(count: int, seed: int) -> None:
    rows, times_s, _, _ = observed(seed, count, random)
    copies = np.concatenate([np.arange(count), np.repeat(count // 2, 50)])
    clean = clean_fit(seed, count)
    fitted = StepTimeRegressor().fit(rows[copies], times_s[copies])
    assert error(fitted) < 1.25 * error(clean)
    others = ROWS[(rows[count // 2] != ROWS).any(axis=1)]
    before, after = (
        np.mean(np.log(high / low))
        for low, high in (each.predict_interval(others) for each in (clean, fitted))
    )
    assert after > 0.85 * before


@pytest.mark.parametrize("wrong", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_show_names_every_observation_that_is_far_off(
    wrong: Wrong, seed: int, store: Path, command: Callable[..., Any]
) -> None:
    rows, times_s, wrong_rows, wrong_s = observed(seed, 20, wrong)
    clean = clean_fit(seed, 20)
    far = is_far(clean, wrong_rows, wrong_s)
    # In random order: all of them after the others would be a change of speed.
    order = np.random.default_rng(seed).permutation(len(rows) + len(wrong_rows))
    every, every_s = np.vstack([rows, wrong_rows]), np.concatenate([times_s, wrong_s])
    every, every_s = every[order], every_s[order]
    ObservationStore().add_many(
        Observation(
            workload="mlp",
            allocation=placement(row),
            batch_per_gpu=int(row[BATCH]),
            step_time_s=step_s,
            at=START + timedelta(hours=hour),
        )
        for hour, (row, step_s) in enumerate(zip(every, every_s, strict=True))
    )
    out = " ".join(command("calibrate", "show").out.split())
    for row in np.unique(wrong_rows[far], axis=0):
        same = (wrong_rows[far] == row).all(axis=1).sum()
        times = f", {same} observations" if same > 1 else ""
        what = f"mlp on {placement(row)} with batch {row[BATCH]:.0f}{times}: "
        assert f"doubted, counts little: {what}" in out


def placement(row: np.ndarray) -> str:
    """An allocation of a row: most devices on the first node, the others evenly."""
    ranks, nodes, most = int(row[RANKS]), int(row[NODES]), int(row[LARGEST_NODE])
    each, more = divmod(ranks - most, max(nodes - 1, 1))
    sizes = [most, *(each + (number < more) for number in range(nodes - 1))]
    groups = [f"{sizes.count(size)}x{size}:t4" for size in dict.fromkeys(sizes)]
    return "+".join(groups)
