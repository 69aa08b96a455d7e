"""Fit the throughput forms of other systems to observed steps, to be compared with.

A row of X is (ranks, nodes, samples per rank and micro-batch, micro-batches per step), further
columns being ignored; y are step times in seconds. `fit` minimises relative errors and returns
self; learned values end in ``_``. Forms of asynchronous training take rows (workers, parameter
servers) and seconds per update, whichever worker it comes from.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from estimator.calibrate.step_law import ACCUMULATION, BATCH, NODES, RANKS
from estimator.errors import WorkloadError

Array = NDArray[np.float64]


class ScalingForm(Protocol):
    """What every form offers."""

    def fit(self, X: ArrayLike, y: ArrayLike) -> ScalingForm:
        """Learn from rows and their step times."""
        ...

    def predict(self, X: ArrayLike) -> Array:
        """Step times of rows, in seconds."""
        ...


def _rows(X: ArrayLike) -> Array:
    rows = np.atleast_2d(np.asarray(X, dtype=float))[:, :4]
    # A batch is a mean over ranks where it does not divide evenly.
    least = (1, 1, np.finfo(float).tiny, 1)
    if rows.shape[1] != 4 or not np.isfinite(rows).all() or (rows < least).any():
        raise WorkloadError(
            "a row must be (ranks, nodes, batch, micro-batches), all at least 1; correct the table"
        )
    return rows


def _worker_rows(X: ArrayLike) -> Array:
    rows = np.atleast_2d(np.asarray(X, dtype=float))
    if rows.shape[1] != 2 or not np.isfinite(rows).all() or (rows < 1).any():
        raise WorkloadError(
            "a row must be (workers, parameter servers), both at least 1; correct the table"
        )
    return rows


def _checked(rows: Array, y: ArrayLike) -> tuple[Array, Array]:
    times = np.asarray(y, dtype=float)
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

    Fitted to the rows with one rank where there are any. Of a single batch size half of the time is
    taken as fixed, AdaptDL's choice for the same want (see `PolluxForm`).
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> LinearScaling:
        """Learn the line over samples per rank."""
        rows, times = _checked(_rows(X), y)
        alone = rows[:, RANKS] == 1
        if alone.any():
            rows, times = rows[alone], times[alone]
        features = self._features(rows)
        if np.ptp(features[:, 0]) == 0:
            half_s = float(np.median(times)) / 2
            self.coefficients_ = np.array([half_s / features[0, 0], half_s])
        else:
            self.coefficients_ = _nonnegative_fit(features, times)
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
        rows, times = _checked(_rows(X), y)
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
    γ from 1 to 10.

    Fitted as AdaptDL does (petuum/adaptdl, goodput.fit_perf_params): L-BFGS-B on the root mean
    square of log errors, with its start, its penalties on γ and on β over α, and its rules for
    parameters that no row tells of. The tables have no times of compute alone, so that term is
    left out; a second start of γ makes up for where the first gets stuck.
    """

    _STARTS = ((0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.001), (0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 3.0))
    _LOWEST = (1e-8,) * 6 + (1.0,)
    _HIGHEST = (np.inf,) * 6 + (10.0,)

    def fit(self, X: ArrayLike, y: ArrayLike) -> PolluxForm:
        """Learn the seven parameters."""
        from scipy.optimize import minimize

        rows, times = _checked(_rows(X), y)
        lowest, highest = np.array(self._LOWEST), np.array(self._HIGHEST)
        for index, value in self._untold(rows, times).items():
            lowest[index] = highest[index] = value

        def loss(parameters: Array) -> float:
            errors = np.log(self._step_s(parameters, rows)) - np.log(times)
            _, _, alpha_n, beta_n, alpha_r, beta_r, gamma = parameters
            penalty = 1e-3 * (gamma - 1) ** 2
            penalty += 1e-2 * ((beta_n / alpha_n) ** 2 + (beta_r / alpha_r) ** 2)
            return float(np.sqrt(np.mean(errors**2)) + penalty)

        bounds = list(zip(lowest, highest, strict=True))
        fits = [
            minimize(loss, np.clip(start, lowest, highest), method="L-BFGS-B", bounds=bounds)
            for start in self._STARTS
        ]
        parameters = np.asarray(min(fits, key=lambda fit: float(fit.fun)).x)
        if not (rows[:, NODES] > 1).any():
            # Between nodes at least as slow as within one.
            parameters[2:4] = np.maximum(parameters[2:4], 1.1 * parameters[4:6])
        self.parameters_ = parameters
        return self

    @classmethod
    def _untold(cls, rows: Array, times: Array) -> dict[int, float]:
        """Parameters, by index, that the rows say nothing of, and the value they are given."""
        ranks, across = rows[:, RANKS], rows[:, NODES] > 1
        untold: set[int] = set()
        if not across.any():
            untold |= {2, 3}
        if not (~across & (ranks > 1)).any():
            untold |= {4, 5}
        if not (ranks > 2).any():
            untold |= {3, 5}
        given = {index: cls._LOWEST[index] for index in untold}
        if len(np.unique(rows[:, BATCH])) == 1:
            alone = ranks == 1
            given[0] = float(np.mean(times[alone] if alone.any() else times)) / 2
        return given

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


class OnesForm:
    """ONES (Bian et al., SC'21): observed throughput, interpolated over ranks, and over batch.

    Its monitor keeps the mean throughput of each size of a job, 0 at size 0, and draws straight
    lines between and beyond (kurisusnowdeng/ones_sc21, get_throughput). Here each size has such a
    line over its batches too, flat where only one was seen. Nodes play no part.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> OnesForm:
        """Keep the mean throughput of each number of ranks and batch."""
        rows, times = _checked(_rows(X), y)
        samples = rows[:, BATCH] * rows[:, ACCUMULATION]
        rates = rows[:, RANKS] * samples / times
        self.lines_: dict[float, tuple[Array, Array]] = {}
        for ranks in np.unique(rows[:, RANKS]):
            of_size = rows[:, RANKS] == ranks
            batches = np.unique(samples[of_size])
            means = [float(rates[of_size & (samples == batch)].mean()) for batch in batches]
            self.lines_[float(ranks)] = (batches, np.array(means))
        # Lines drawn on may fall below zero.
        self.lowest_rate_ = float(rates.min())
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Step times of rows, in seconds."""
        rows = _rows(X)
        samples = rows[:, BATCH] * rows[:, ACCUMULATION]
        sizes = np.array([0.0, *self.lines_])
        known = np.array([_line(samples, *line) for line in self.lines_.values()])
        # One column a row: throughput at each known size, 0 at size 0.
        table = np.vstack([np.zeros(len(rows)), known])
        rates = np.array(
            [
                _line(ranks[None], sizes, column)[0]
                for ranks, column in zip(rows[:, RANKS], table.T, strict=True)
            ]
        )
        return np.asarray(rows[:, RANKS] * samples / np.maximum(rates, self.lowest_rate_))


def _line(at: Array, x: Array, y: Array) -> Array:
    """Straight lines through points of rising x, drawn on beyond them; flat for a single point."""
    if len(x) == 1:
        return np.full(len(at), y[0])
    piece = np.clip(np.searchsorted(x, at) - 1, 0, len(x) - 2)
    slope = np.diff(y) / np.diff(x)
    return np.asarray(y[piece] + slope[piece] * (at - x[piece]))


class SumOfWorkers:
    """Asynchronous workers do not hinder each other: updates a second grow as their number."""

    def fit(self, X: ArrayLike, y: ArrayLike) -> SumOfWorkers:
        """Learn the seconds that one worker alone takes; from all rows if none is alone."""
        rows, times = _checked(_worker_rows(X), y)
        alone = rows[:, 0] == 1
        if alone.any():
            rows, times = rows[alone], times[alone]
        self.worker_s_ = float(np.mean(times * rows[:, 0]))
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Seconds per update of rows."""
        return np.asarray(self.worker_s_ / _worker_rows(X)[:, 0])


class OptimusAsynchronous:
    """Optimus (Peng et al., EuroSys 2018), asynchronous: a worker's step is a + b·workers/servers.

    Its w·(θ0 + θ1·w/p + θ2·w + θ3·p)^−1 updates a second; with p fixed the others merge into both.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> OptimusAsynchronous:
        """Learn a, b ≥ 0."""
        rows, times = _checked(_worker_rows(X), y)
        worker_s = times * rows[:, 0]
        self.coefficients_ = _nonnegative_fit(self._features(rows), worker_s)
        return self

    def predict(self, X: ArrayLike) -> Array:
        """Seconds per update of rows."""
        rows = _worker_rows(X)
        return np.asarray(self._features(rows) @ self.coefficients_ / rows[:, 0])

    @staticmethod
    def _features(rows: Array) -> Array:
        return np.column_stack([np.ones(len(rows)), rows[:, 0] / rows[:, 1]])
