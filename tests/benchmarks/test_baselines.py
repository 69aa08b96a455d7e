"""The forms of other systems recover the coefficients that made their own data."""

from __future__ import annotations

import numpy as np
import pytest
from calibration.baselines import (
    OptimusRegressor,
    PolluxRegressor,
)

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
