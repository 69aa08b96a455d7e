"""Throughput of asynchronous workers is linear until their parameter servers are saturated."""

from __future__ import annotations

import numpy as np
import pytest
from calibration.asynchronous import AsynchronousRegressor
from calibration.rivals import IndependentWorkers

from estimator.errors import WorkloadError

# P100 and one server, ResNet-32 of CM-DARE-like speed: 10 updates a second of a worker, 30 at most.
WORKERS = np.arange(1, 9)
ROWS = np.column_stack([WORKERS, np.ones(8)]).astype(float)
FREE_S = 0.1 / WORKERS
FULL_S = np.maximum(FREE_S, 1 / 30)
SEEN = np.isin(WORKERS, (1, 2, 4, 8))


def test_throughput_is_linear_far_from_saturated_servers() -> None:
    fitted = AsynchronousRegressor().fit(ROWS[SEEN], FREE_S[SEEN])
    assert fitted.predict(ROWS) == pytest.approx(FREE_S, rel=0.02)


def test_a_saturated_server_bounds_the_throughput() -> None:
    fitted = AsynchronousRegressor().fit(ROWS[SEEN], FULL_S[SEEN])
    full = WORKERS > 4
    assert fitted.predict(ROWS[full]) == pytest.approx(FULL_S[full], rel=0.06)
    unbounded = IndependentWorkers().fit(ROWS[SEEN], FULL_S[SEEN]).predict(ROWS[~SEEN])
    assert np.abs(fitted.predict(ROWS[~SEEN]) / FULL_S[~SEEN] - 1).mean() < np.mean(
        np.abs(unbounded / FULL_S[~SEEN] - 1)
    )


def test_more_servers_raise_the_throughput() -> None:
    fitted = AsynchronousRegressor().fit(ROWS[SEEN], FULL_S[SEEN])
    one, two = fitted.predict([(8, 1), (8, 2)])
    assert two < one


def test_the_interval_holds_the_prediction_and_widens_beyond_the_observations() -> None:
    fitted = AsynchronousRegressor().fit(ROWS[SEEN], FULL_S[SEEN])
    rows = np.array([(4.0, 1.0), (64.0, 1.0)])
    low_s, high_s = fitted.predict_interval(rows)
    assert (low_s < fitted.predict(rows)).all()
    assert (fitted.predict(rows) < high_s).all()
    assert high_s[1] / low_s[1] > high_s[0] / low_s[0]


@pytest.mark.parametrize(
    ("rows", "times"), [([(0, 1)], [1.0]), ([(1, 1, 1)], [1.0]), ([(1, 1)], [0.0]), ([(1, 1)], [])]
)
def test_an_invalid_table_is_refused(rows: list[tuple[int, ...]], times: list[float]) -> None:
    with pytest.raises(WorkloadError):
        AsynchronousRegressor().fit(rows, times)
