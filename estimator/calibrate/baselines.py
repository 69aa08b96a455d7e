"""Fit the throughput forms of other systems to observed steps, to be compared with.

A row of X is (ranks, nodes, samples per rank and micro-batch, micro-batches per step); y are step
times in seconds. `fit` minimises relative errors and returns self; learned values end in ``_``.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from estimator.errors import WorkloadError

Array = NDArray[np.float64]
RANKS, NODES, BATCH, ACCUMULATION = range(4)


class ScalingForm(Protocol):
    """What every form offers."""

    def fit(self, X: ArrayLike, y: ArrayLike) -> ScalingForm:
        """Learn from rows and their step times."""
        ...

    def predict(self, X: ArrayLike) -> Array:
        """Step times of rows, in seconds."""
        ...


def _rows(X: ArrayLike) -> Array:
    rows = np.atleast_2d(np.asarray(X, dtype=float))
    if rows.shape[1] != 4 or not np.isfinite(rows).all() or (rows < 1).any():
        raise WorkloadError(
            "a row must be (ranks, nodes, batch, micro-batches), all at least 1; correct the table"
        )
    return rows


def _checked(X: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
    rows, times = _rows(X), np.asarray(y, dtype=float)
    if times.shape != (len(rows),) or not len(rows):
        raise WorkloadError(f"{len(rows)} rows have {times.size} step times; give one for each")
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise WorkloadError("step times must be positive seconds; leave out the others")
    return rows, times


def _nonnegative_fit(features: Array, times: Array) -> Array:
    """Least relative squares with coefficients ≥ 0."""
    from scipy.optimize import nnls

    return np.asarray(nnls(features / times[:, None], np.ones(len(times)))[0])


class LinearScaling:
    """Throughput per rank stays that of one device: step = a + b · samples per rank and step.

    Fitted to the rows with one rank where there are any.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> LinearScaling:
        """Learn the line over samples per rank."""
        rows, times = _checked(X, y)
        alone = rows[:, RANKS] == 1
        if alone.any():
            rows, times = rows[alone], times[alone]
        self.coefficients_ = _nonnegative_fit(self._features(rows), times)
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Step times of rows, in seconds."""
        return np.asarray(self._features(_rows(X)) @ self.coefficients_)

    @staticmethod
    def _features(rows: Array) -> Array:
        samples = rows[:, BATCH] * rows[:, ACCUMULATION]
        return np.column_stack([samples, np.ones(len(rows))])


class OptimusForm:
    """Optimus (Peng et al., EuroSys 2018), synchronous, as many servers as workers.

    Its θ0·M/w + θ1 + θ2·w/p + θ3·w + θ4·p with p = w is a·(samples per rank) + b + c·ranks.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> OptimusForm:
        """Learn a, b, c ≥ 0."""
        rows, times = _checked(X, y)
        self.coefficients_ = _nonnegative_fit(self._features(rows), times)
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Step times of rows, in seconds."""
        return np.asarray(self._features(_rows(X)) @ self.coefficients_)

    @staticmethod
    def _features(rows: Array) -> Array:
        return np.column_stack([LinearScaling._features(rows), rows[:, RANKS]])


class PolluxForm:
    """Pollux (Qiao et al., OSDI 2021): seven parameters, overlap by a norm.

    gradient = α_c + β_c·batch; sync = 0 on one rank, α_r + β_r·(ranks − 2) on one node, α_n +
    β_n·(ranks − 2) on more; step = (accumulation − 1)·gradient + (gradient^γ + sync^γ)^(1/γ), with
    γ from 1 to 10. Fitted to log step times, as in AdaptDL.
    """

    _START = (0.1, 0.01, 0.1, 0.01, 0.1, 0.01)
    _GAMMAS = (1.0, 10.0)

    def fit(self, X: ArrayLike, y: ArrayLike) -> PolluxForm:
        """Learn the seven parameters from three starts of γ."""
        from scipy.optimize import least_squares

        rows, times = _checked(X, y)
        scale = float(np.median(times))

        def residuals(parameters: Array) -> Array:
            return np.asarray(np.log(self._step_s(parameters, rows)) - np.log(times))

        bounds = (np.array([1e-9] * 6 + [1.0]), np.array([np.inf] * 6 + [10.0]))
        fits = [
            least_squares(
                residuals,
                np.array([value * scale for value in self._START] + [gamma]),
                bounds=bounds,
                x_scale="jac",
            )
            for gamma in (1.5, 3.0, 8.0)
        ]
        self.parameters_ = np.asarray(min(fits, key=lambda fit: fit.cost).x)
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Step times of rows, in seconds."""
        return self._step_s(self.parameters_, _rows(X))

    @staticmethod
    def _step_s(parameters: Array, rows: Array) -> Array:
        alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma = parameters
        gradient_s = alpha_c + beta_c * rows[:, BATCH]
        beyond = np.maximum(rows[:, RANKS] - 2, 0)
        across = rows[:, NODES] > 1
        sync_s = np.where(across, alpha_n + beta_n * beyond, alpha_r + beta_r * beyond)
        sync_s = np.where(rows[:, RANKS] == 1, 0.0, sync_s)
        # The larger factored out, so that no power overflows.
        larger, smaller = np.maximum(gradient_s, sync_s), np.minimum(gradient_s, sync_s)
        both_s = larger * (1 + (smaller / larger) ** gamma) ** (1 / gamma)
        return np.asarray((rows[:, ACCUMULATION] - 1) * gradient_s + both_s)
