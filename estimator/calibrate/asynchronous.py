"""Fit how asynchronous training through parameter servers speeds up with workers.

Workers neither wait for each other nor run free of each other: each needs its own step's time, and
all of them share what their servers can take in. With w workers and p servers the seconds between
updates are ((worker_s·(1 + crowding·(w − 1)) / w)^g + (server_s / p^spread)^g)^(1/g): the slower of
both rules, and near a tie both are felt.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from estimator.calibrate import intervals
from estimator.calibrate.priors import Array
from estimator.errors import WorkloadError

_WORKERS, _SERVERS = 0, 1
# worker_s and server_s over the first guess, crowding, sharpness − 1, spread: centres and widths of
# log-normal priors. Servers are guessed to take what fifteen workers send (CM-DARE's CNNs on K80
# and P100, Li et al. 2020: from 3 to far beyond 8 workers).
_CENTRES = np.log([1.0, 1 / 15, 0.003, 3.0, 0.7])
_WIDTHS = np.array([3.0, 1.5, 1.0, 0.7, 0.3])
# Two runs of the same setting, in log seconds.
_RUN_RATIO = 0.04


class AsynchronousForm:
    """Seconds between updates of one model, whichever worker they come from.

    A row is (workers, parameter servers).
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn from rows and their seconds per update."""
        from scipy.optimize import least_squares

        rows, times = _rows(X), np.asarray(y, dtype=float)
        if times.shape != (len(rows),) or not len(rows):
            raise WorkloadError(f"{len(rows)} rows have {times.size} times; give one for each")
        if not (np.isfinite(times).all() and (times > 0).all()):
            raise WorkloadError("times must be positive seconds; leave out the others")
        fewest = rows[:, _WORKERS] == rows[:, _WORKERS].min()
        self.worker_s_ = float(np.median((times * rows[:, _WORKERS])[fewest]))
        found = least_squares(
            lambda z: np.concatenate([(self._log_s(z, rows) - np.log(times)) / _RUN_RATIO, z]),
            self._start(rows, times),
        )
        self.deviations_ = found.x
        self.covariance_ = np.linalg.inv(found.jac.T @ found.jac)
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Seconds per update of rows."""
        return np.exp(self._log_s(self.deviations_, _rows(X)))

    def predict_interval(
        self, X: ArrayLike, *, coverage_ratio: float = intervals.COVERAGE_RATIO
    ) -> tuple[Array, Array]:
        """Seconds between which the given share of measured ones should lie."""
        rows = _rows(X)
        step = 1e-5 * np.eye(len(self.deviations_))
        ahead = np.stack([self._log_s(self.deviations_ + each, rows) for each in step], axis=1)
        slopes = (ahead - self._log_s(self.deviations_, rows)[:, None]) / 1e-5
        spread = np.sqrt(np.einsum("ij,jk,ik->i", slopes, self.covariance_, slopes) + _RUN_RATIO**2)
        none = np.empty(0)
        knots = intervals.knot_factors(none, none, coverage_ratio)
        factors = intervals.factors_at(knots, np.zeros(len(rows)))
        width = np.exp(factors * spread)
        return self.predict(rows) / width, self.predict(rows) * width

    def _start(self, rows: Array, times: Array) -> Array:
        """Servers full at the fastest row: far from full, nothing would show how to move them."""
        start = np.zeros(len(_CENTRES))
        start[1] = (np.log(times.min() / self.worker_s_) - _CENTRES[1]) / _WIDTHS[1]
        return start

    def _log_s(self, deviations: Array, rows: Array) -> Array:
        worker, server, crowding, sharpness, spread = np.exp(_CENTRES + _WIDTHS * deviations)
        workers = rows[:, _WORKERS]
        log_worker = np.log(worker * self.worker_s_ * (1 + crowding * (workers - 1)) / workers)
        log_server = np.log(server * self.worker_s_) - spread * np.log(rows[:, _SERVERS])
        power = 1 + sharpness
        return np.asarray(np.logaddexp(power * log_worker, power * log_server) / power)


def _rows(X: ArrayLike) -> Array:
    rows = np.atleast_2d(np.asarray(X, dtype=float))
    if rows.ndim != 2 or rows.shape[1] != 2 or not np.isfinite(rows).all() or (rows < 1).any():
        raise WorkloadError(
            "a row must be (workers, parameter servers), both at least 1; correct the table"
        )
    return rows
