"""Fit throughput models that only benchmarks compare with: linear, ONES's, of asynchronous workers.

The latter take rows (workers, parameter servers) and seconds per update, whichever worker it comes
from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from calibration.baselines import OptimusRegressor, PolluxRegressor, rows_of
from estimator.calibrate import intervals
from estimator.calibrate.performance_model import ACCUMULATION, BATCH, RANKS
from estimator.errors import WorkloadError
from estimator.graph.costs.call_costs import nonnegative_fit

Array = NDArray[np.float64]


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


# Forms of the step by ranks, nodes and batch, by name.
FORMS: Mapping[str, Callable[[], Any]] = {
    "linear": LinearScaling,
    "optimus": OptimusRegressor,
    "pollux": PolluxRegressor,
    "ones": OnesRegressor,
}


class IndependentWorkers:
    """Asynchronous workers do not slow each other: updates a second are linear in their number."""

    def fit(self, X: ArrayLike, y: ArrayLike) -> IndependentWorkers:
        """Fit the seconds of a single worker; from all rows if none has a single worker."""
        rows, times = worker_rows(X), np.asarray(y, dtype=float)
        alone = rows[:, 0] == 1
        if alone.any():
            rows, times = rows[alone], times[alone]
        self.worker_s_ = float(np.mean(times * rows[:, 0]))
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Seconds per update of rows."""
        return np.asarray(self.worker_s_ / worker_rows(X)[:, 0])


class AsynchronousOptimusRegressor:
    """Optimus (Peng et al., EuroSys 2018), asynchronous: a worker's step is a + b·workers/servers.

    Its rate is w·(θ0 + θ1·w/p + θ2·w + θ3·p)^−1 updates a second; with p fixed, θ2 and θ3 cannot
    be told from θ1 and θ0.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> AsynchronousOptimusRegressor:
        """Fit a, b ≥ 0."""
        rows, times = worker_rows(X), np.asarray(y, dtype=float)
        worker_s = times * rows[:, 0]
        self.coefficients_ = nonnegative_fit(self._features(rows), worker_s)
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Seconds per update of rows."""
        rows = worker_rows(X)
        return np.asarray(self._features(rows) @ self.coefficients_ / rows[:, 0])

    @staticmethod
    def _features(rows: Array) -> Array:
        return np.column_stack([np.ones(len(rows)), rows[:, 0] / rows[:, 1]])


_WORKERS, _SERVERS = 0, 1
# Log-normal priors: worker_s and server_s relative to the initial worker_s, contention, g − 1 and
# server_exponent. A priori a server is saturated by fifteen workers (CM-DARE's CNNs on K80 and
# P100, Li et al. 2020: from 3 to far beyond 8 workers).
_LOG_MEDIANS = np.log([1.0, 1 / 15, 0.003, 3.0, 0.7])
_SIGMAS = np.array([3.0, 1.5, 1.0, 0.7, 0.3])
# Observation noise: standard deviation of log seconds between two runs of the same setting.
_NOISE_SIGMA = 0.04


class AsynchronousRegressor:
    """Seconds between updates of one model, whichever worker they come from.

    Throughput is bounded by the workers, each with its own step time, and by the parameter servers
    that all share. With w workers and p servers the seconds between updates are the p-norm
    ((worker_s·(1 + contention·(w − 1)) / w)^g + (server_s / p^server_exponent)^g)^(1/g): about the
    larger of both, and more than either where they are nearly equal.

    A row is (workers, parameter servers).
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Fit rows and their seconds per update by maximum a posteriori least squares."""
        from scipy.optimize import least_squares

        rows, times = worker_rows(X), np.asarray(y, dtype=float)
        if times.shape != (len(rows),) or not len(rows):
            raise WorkloadError(f"{len(rows)} rows have {times.size} times; give one for each")
        if not (np.isfinite(times).all() and (times > 0).all()):
            raise WorkloadError("times must be positive seconds; leave out the others")
        fewest = rows[:, _WORKERS] == rows[:, _WORKERS].min()
        self.worker_s_ = float(np.median((times * rows[:, _WORKERS])[fewest]))
        found = least_squares(
            lambda z: np.concatenate([(self._log_s(z, rows) - np.log(times)) / _NOISE_SIGMA, z]),
            self._initial_parameters(rows, times),
        )
        self.standardised_parameters_ = found.x
        self.covariance_ = np.linalg.inv(found.jac.T @ found.jac)
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Seconds per update of rows."""
        return np.exp(self._log_s(self.standardised_parameters_, worker_rows(X)))

    def predict_interval(self, X: ArrayLike) -> tuple[Array, Array]:
        """Seconds between which four of five measured ones should lie."""
        rows = worker_rows(X)
        step = 1e-5 * np.eye(len(self.standardised_parameters_))
        at = self.standardised_parameters_
        ahead = np.stack([self._log_s(at + each, rows) for each in step], axis=1)
        jacobian = (ahead - self._log_s(at, rows)[:, None]) / 1e-5
        variance = np.einsum("ij,jk,ik->i", jacobian, self.covariance_, jacobian)
        quantile = intervals.score_quantile(np.empty(0))
        factor = np.exp(quantile * np.sqrt(variance + _NOISE_SIGMA**2))
        return self.predict(rows) / factor, self.predict(rows) * factor

    def _initial_parameters(self, rows: Array, times: Array) -> Array:
        """Servers saturated at the fastest row; far from that the gradient of server_s vanishes."""
        start = np.zeros(len(_LOG_MEDIANS))
        start[1] = (np.log(times.min() / self.worker_s_) - _LOG_MEDIANS[1]) / _SIGMAS[1]
        return start

    def _log_s(self, standardised: Array, rows: Array) -> Array:
        parameters = np.exp(_LOG_MEDIANS + _SIGMAS * standardised)
        worker, server, contention, norm_excess, server_exponent = parameters
        workers = rows[:, _WORKERS]
        log_worker = np.log(worker * self.worker_s_ * (1 + contention * (workers - 1)) / workers)
        log_server = np.log(server * self.worker_s_) - server_exponent * np.log(rows[:, _SERVERS])
        norm = 1 + norm_excess
        return np.asarray(np.logaddexp(norm * log_worker, norm * log_server) / norm)


def worker_rows(X: ArrayLike) -> Array:
    """Rows (workers, parameter servers); raises WorkloadError where they are none."""
    rows = np.atleast_2d(np.asarray(X, dtype=float))
    if rows.shape[1] != 2 or not np.isfinite(rows).all() or (rows < 1).any():
        raise WorkloadError(
            "a row must be (workers, parameter servers), both at least 1; correct the table"
        )
    return rows
