"""Fit the throughput of asynchronous training with parameter servers.

Throughput is bounded by the workers, each with its own step time, and by the parameter servers that
all of them share. With w workers and p servers the seconds between updates are the p-norm
((worker_s·(1 + contention·(w − 1)) / w)^g + (server_s / p^server_exponent)^g)^(1/g): about the
larger of both, and more than either where they are nearly equal.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from estimator.calibrate import intervals
from estimator.calibrate.performance_model import Array
from estimator.errors import WorkloadError

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

    A row is (workers, parameter servers).
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Fit rows and their seconds per update by maximum a posteriori least squares."""
        from scipy.optimize import least_squares

        rows, times = _rows(X), np.asarray(y, dtype=float)
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
        return np.exp(self._log_s(self.standardised_parameters_, _rows(X)))

    def predict_interval(self, X: ArrayLike) -> tuple[Array, Array]:
        """Seconds between which four of five measured ones should lie."""
        rows = _rows(X)
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


def _rows(X: ArrayLike) -> Array:
    rows = np.atleast_2d(np.asarray(X, dtype=float))
    if rows.ndim != 2 or rows.shape[1] != 2 or not np.isfinite(rows).all() or (rows < 1).any():
        raise WorkloadError(
            "a row must be (workers, parameter servers), both at least 1; correct the table"
        )
    return rows
