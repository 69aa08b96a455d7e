"""Forms that only benchmarks compare with follow their formulas."""

from __future__ import annotations

import numpy as np
import pytest
from calibration.rivals import (
    AsynchronousOptimusRegressor,
    IndependentWorkers,
    LinearScaling,
    OnesRegressor,
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
