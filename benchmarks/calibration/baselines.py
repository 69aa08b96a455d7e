"""Fit the throughput models of other systems to observed steps, as baselines.

A row of X is (ranks, nodes, samples per rank and micro-batch, micro-batches per step), further
columns being ignored; y are step times in seconds. `fit` minimises relative errors and returns
self; fitted values end in ``_``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from estimator.calibrate.performance_model import ACCUMULATION, BATCH, NODES, RANKS
from estimator.graph.costs.call_costs import nonnegative_fit

Array = NDArray[np.float64]


def rows_of(X: ArrayLike) -> Array:
    """Rows of which the first four columns are read."""
    return np.atleast_2d(np.asarray(X, dtype=float))


class OptimusRegressor:
    """Optimus (Peng et al., EuroSys 2018), synchronous, as many servers as workers.

    Its θ0·M/w + θ1 + θ2·w/p + θ3·w + θ4·p with p = w is a·(samples per rank) + b + c·ranks.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> OptimusRegressor:
        """Fit a, b, c ≥ 0."""
        rows, times = rows_of(X), np.asarray(y, dtype=float)
        self.coefficients_ = nonnegative_fit(self._features(rows), times)
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Step times of rows, in seconds."""
        return self.step_s(rows_of(X))

    def step_s(self, rows: Array) -> Array:
        """The same of rows that are known to be right."""
        return np.asarray(self._features(rows) @ self.coefficients_)

    @staticmethod
    def _features(rows: Array) -> Array:
        samples = rows[:, BATCH] * rows[:, ACCUMULATION]
        return np.column_stack([samples, np.ones(len(rows)), rows[:, RANKS]])


class PolluxRegressor:
    """Pollux (Qiao et al., OSDI 2021): seven parameters, overlap by a norm.

    gradient = α_c + β_c·batch; sync = 0 on one rank, α_r + β_r·(ranks − 2) on one node, α_n +
    β_n·(ranks − 2) on more; step = (accumulation − 1)·gradient + (gradient^γ + sync^γ)^(1/γ), with
    γ from 1 to 10.

    Fitted as AdaptDL does (petuum/adaptdl, goodput.fit_perf_params): L-BFGS-B on the root mean
    square of log errors, with its initial values, its penalties on γ and on β over α, and its
    rules for parameters that the rows do not identify. The tables have no times of compute alone,
    so that term of its loss is left out; a second initial value of γ helps out of local minima.
    """

    _STARTS = ((0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.001), (0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 3.0))
    _LOWEST = (1e-8,) * 6 + (1.0,)
    _HIGHEST = (np.inf,) * 6 + (10.0,)

    def __init__(self, starts: Sequence[ArrayLike] = _STARTS) -> None:
        self.starts = starts

    def fit(self, X: ArrayLike, y: ArrayLike) -> PolluxRegressor:
        """Fit the seven parameters, from each of `starts`."""
        from scipy.optimize import minimize

        rows, times = rows_of(X), np.asarray(y, dtype=float)
        lowest, highest = np.array(self._LOWEST), np.array(self._HIGHEST)
        for index, value in self._unidentified(rows, times).items():
            lowest[index] = highest[index] = value

        columns = _PolluxColumns.of(rows)

        def loss(parameters: Array) -> tuple[float, Array]:
            steps, jacobian = columns.step_s(parameters)
            errors = np.log(steps / times)
            error = max(math.sqrt(errors @ errors / len(errors)), np.finfo(float).tiny)
            gradient = jacobian @ (errors / steps) / (error * len(errors))
            _, _, alpha_n, beta_n, alpha_r, beta_r, gamma = parameters.tolist()
            penalty = 1e-3 * (gamma - 1) ** 2
            gradient[6] += 2e-3 * (gamma - 1)
            for place, alpha, beta in ((2, alpha_n, beta_n), (4, alpha_r, beta_r)):
                ratio = beta / alpha
                penalty += 1e-2 * ratio**2
                gradient[place] -= 2e-2 * ratio**2 / alpha
                gradient[place + 1] += 2e-2 * ratio / alpha
            return error + penalty, gradient

        bounds = list(zip(lowest, highest, strict=True))
        fits = [
            minimize(
                loss, np.clip(start, lowest, highest), method="L-BFGS-B", bounds=bounds, jac=True
            )
            for start in self.starts
        ]
        parameters = np.asarray(min(fits, key=lambda fit: float(fit.fun)).x)
        if not (rows[:, NODES] > 1).any():
            # Inter-node communication is at least 10 % slower than intra-node (AdaptDL).
            parameters[2:4] = np.maximum(parameters[2:4], 1.1 * parameters[4:6])
        self.parameters_ = parameters
        return self

    @classmethod
    def _unidentified(cls, rows: Array, times: Array) -> dict[int, float]:
        """Parameters, by index, that the rows do not identify, and the values they are fixed to."""
        ranks, across = rows[:, RANKS], rows[:, NODES] > 1
        unidentified: set[int] = set()
        if not across.any():
            unidentified |= {2, 3}
        if not (~across & (ranks > 1)).any():
            unidentified |= {4, 5}
        if not (ranks > 2).any():
            unidentified |= {3, 5}
        fixed = {index: cls._LOWEST[index] for index in unidentified}
        if len(np.unique(rows[:, BATCH])) == 1:
            alone = ranks == 1
            fixed[0] = float(np.mean(times[alone] if alone.any() else times)) / 2
        return fixed

    def predict(self, X: ArrayLike) -> Array:
        """Step times of rows, in seconds."""
        return self.step_s(rows_of(X))

    def step_s(self, rows: Array) -> Array:
        """The same of rows that are known to be right."""
        columns = _PolluxColumns.of(rows)
        gradient_s, _, both_s = columns.parts_s(self.parameters_)
        return np.asarray(columns.repeats * gradient_s + both_s)


class _PolluxColumns(NamedTuple):
    """What the Pollux form takes from rows; each term of synchronisation, 0 where it is not."""

    batch: Array
    repeats: Array
    alone: NDArray[np.bool_]
    sync: Array

    @classmethod
    def of(cls, rows: Array) -> _PolluxColumns:
        """The columns of rows (ranks, nodes, batch, micro-batches)."""
        ranks = rows[:, RANKS]
        beyond = np.maximum(ranks - 2, 0)
        alone = ranks == 1
        across = (rows[:, NODES] > 1) & ~alone
        within = ~across & ~alone
        sync = np.array([across, across * beyond, within, within * beyond], dtype=float)
        return cls(rows[:, BATCH], rows[:, ACCUMULATION] - 1, alone, sync)

    def parts_s(self, parameters: Array) -> tuple[Array, Array, Array]:
        """Gradient, synchronisation, and both with their overlap."""
        gradient_s = parameters[0] + parameters[1] * self.batch
        sync_s = parameters[2:6] @ self.sync
        gamma = parameters[6]
        # The larger factored out, so that no power overflows.
        larger, smaller = np.maximum(gradient_s, sync_s), np.minimum(gradient_s, sync_s)
        return gradient_s, sync_s, larger * (1 + (smaller / larger) ** gamma) ** (1 / gamma)

    def step_s(self, parameters: Array) -> tuple[Array, Array]:
        """Step times, and their derivatives by the parameters, (parameters, rows)."""
        gradient_s, sync_s, both_s = self.parts_s(parameters)
        gamma = parameters[6]
        gradient_ratio = gradient_s / both_s
        sync_ratio = np.where(self.alone, 1.0, sync_s / both_s)
        jacobian = np.empty((7, len(both_s)))
        by_gradient, by_sync = gradient_ratio ** (gamma - 1), sync_ratio ** (gamma - 1)
        jacobian[0] = self.repeats + by_gradient
        jacobian[1] = jacobian[0] * self.batch
        jacobian[2:6] = by_sync * self.sync
        # A row of one rank has no synchronisation: the logarithm of its ratio is 0.
        by_gamma = by_gradient * gradient_ratio * np.log(gradient_ratio)
        by_gamma += by_sync * sync_ratio * np.log(sync_ratio)
        jacobian[6] = by_gamma * both_s / gamma
        return self.repeats * gradient_s + both_s, jacobian
