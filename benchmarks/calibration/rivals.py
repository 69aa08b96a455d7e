"""Fit throughput models that only benchmarks compare with: linear, ONES's, of asynchronous workers.

The latter take rows (workers, parameter servers) and seconds per update, whichever worker it comes
from.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calibration.baselines import OptimusRegressor, rows_of
from estimator.calibrate.performance_model import ACCUMULATION, BATCH, RANKS
from estimator.errors import WorkloadError
from estimator.graph.costs.call_costs import nonnegative_fit

Array = NDArray[np.float64]


def _worker_rows(X: ArrayLike) -> Array:
    rows = np.atleast_2d(np.asarray(X, dtype=float))
    if rows.shape[1] != 2 or not np.isfinite(rows).all() or (rows < 1).any():
        raise WorkloadError(
            "a row must be (workers, parameter servers), both at least 1; correct the table"
        )
    return rows


class LinearScaling(OptimusRegressor):
    """Throughput per rank stays that of one device: step = a + b · samples per rank and step.

    Fitted to the rows with one rank where there are any. With a single batch size, a is half of the
    time, as AdaptDL assumes in this case (see `baselines.PolluxRegressor`).
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> LinearScaling:
        """Fit a and b ≥ 0."""
        rows, times = rows_of(X), np.asarray(y, dtype=float)
        alone = rows[:, RANKS] == 1
        if alone.any():
            rows, times = rows[alone], times[alone]
        features = self._features(rows)
        if np.ptp(features[:, 0]) == 0:
            half_s = float(np.median(times)) / 2
            self.coefficients_ = np.array([half_s / features[0, 0], half_s])
        else:
            self.coefficients_ = nonnegative_fit(features, times)
        return self

    @staticmethod
    def _features(rows: Array) -> Array:
        return OptimusRegressor._features(rows)[:, :2]


class OnesRegressor:
    """ONES (Bian et al., SC'21): observed throughput, interpolated over ranks, and over batch.

    Its monitor keeps the mean throughput of each number of ranks, 0 at none, and interpolates and
    extrapolates linearly (kurisusnowdeng/ones_sc21, get_throughput). Here throughput is linear in
    the batch too, constant where only one batch was observed. It does not depend on nodes.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> OnesRegressor:
        """Keep the mean throughput of each number of ranks and batch."""
        rows, times = rows_of(X), np.asarray(y, dtype=float)
        samples = rows[:, BATCH] * rows[:, ACCUMULATION]
        rates = rows[:, RANKS] * samples / times
        self.throughputs_: dict[float, tuple[Array, Array]] = {}
        for ranks in np.unique(rows[:, RANKS]):
            of_size = rows[:, RANKS] == ranks
            batches = np.unique(samples[of_size])
            means = [float(rates[of_size & (samples == batch)].mean()) for batch in batches]
            self.throughputs_[float(ranks)] = (batches, np.array(means))
        # A linear extrapolation may fall below zero.
        self.lowest_rate_ = float(rates.min())
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Step times of rows, in seconds."""
        rows = rows_of(X)
        samples = rows[:, BATCH] * rows[:, ACCUMULATION]
        sizes = np.array([0.0, *self.throughputs_])
        known = np.array([_piecewise_linear(samples, *line) for line in self.throughputs_.values()])
        # One column a row: throughput at each known size, 0 at size 0.
        table = np.vstack([np.zeros(len(rows)), known])
        rates = np.array(
            [
                _piecewise_linear(ranks[None], sizes, column)[0]
                for ranks, column in zip(rows[:, RANKS], table.T, strict=True)
            ]
        )
        return np.asarray(rows[:, RANKS] * samples / np.maximum(rates, self.lowest_rate_))


def _piecewise_linear(at: Array, x: Array, y: Array) -> Array:
    """Linear interpolation and extrapolation of points of rising x; constant for a single one."""
    if len(x) == 1:
        return np.full(len(at), y[0])
    piece = np.clip(np.searchsorted(x, at) - 1, 0, len(x) - 2)
    slope = np.diff(y) / np.diff(x)
    return np.asarray(y[piece] + slope[piece] * (at - x[piece]))


class IndependentWorkers:
    """Asynchronous workers do not slow each other: updates a second are linear in their number."""

    def fit(self, X: ArrayLike, y: ArrayLike) -> IndependentWorkers:
        """Fit the seconds of a single worker; from all rows if none has a single worker."""
        rows, times = _worker_rows(X), np.asarray(y, dtype=float)
        alone = rows[:, 0] == 1
        if alone.any():
            rows, times = rows[alone], times[alone]
        self.worker_s_ = float(np.mean(times * rows[:, 0]))
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Seconds per update of rows."""
        return np.asarray(self.worker_s_ / _worker_rows(X)[:, 0])


class AsynchronousOptimusRegressor:
    """Optimus (Peng et al., EuroSys 2018), asynchronous: a worker's step is a + b·workers/servers.

    Its rate is w·(θ0 + θ1·w/p + θ2·w + θ3·p)^−1 updates a second; with p fixed, θ2 and θ3 cannot
    be told from θ1 and θ0.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> AsynchronousOptimusRegressor:
        """Fit a, b ≥ 0."""
        rows, times = _worker_rows(X), np.asarray(y, dtype=float)
        worker_s = times * rows[:, 0]
        self.coefficients_ = nonnegative_fit(self._features(rows), worker_s)
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Seconds per update of rows."""
        rows = _worker_rows(X)
        return np.asarray(self._features(rows) @ self.coefficients_ / rows[:, 0])

    @staticmethod
    def _features(rows: Array) -> Array:
        return np.column_stack([np.ones(len(rows)), rows[:, 0] / rows[:, 1]])
