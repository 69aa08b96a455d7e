"""Make a regression's design matrix, the kernel of its residuals, the weights of its rows.

Residuals are of log step time. They are correlated between placements that resemble each other and
between batch sizes, and the part that is due to communication is scaled by the share of the step
that gradient synchronisation takes.
"""

from __future__ import annotations

import math
import threading
from contextlib import ContextDecorator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from estimator.calibrate.performance_model import (
    BATCH,
    LARGEST_NODE,
    NODES,
    RANKS,
    Array,
    ComputeReference,
    EngineTimes,
    Priors,
    evaluate_model,
)


class _OneThread(ContextDecorator):
    """Linear algebra on one thread: these matrices are small, and threads wait for each other.

    Beside other programs, fits on several threads take ten times as long. The bound is the
    process's: the first caller sets it, and the last one lifts it.
    """

    def __init__(self) -> None:
        self._callers, self._counting = 0, threading.Lock()
        self._limit: Any = None

    def __enter__(self) -> None:
        with self._counting:
            if not self._callers:
                self._limit = _linear_algebra().limit(limits=1)
            self._callers += 1

    def __exit__(self, *_: object) -> None:
        with self._counting:
            self._callers -= 1
            if not self._callers:
                self._limit.restore_original_limits()


@cache
def _linear_algebra() -> Any:
    """The libraries of linear algebra that are loaded."""
    import scipy.linalg  # noqa: F401  # brings one of its own
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


one_thread = _OneThread()

# How far, in logarithms, most rows are from what those of fewest ranks suggest.
_REFERENCE_ITERATIONS, _MOST_OFF = 3, math.log(10)


def design_matrix(X: ArrayLike) -> Array:
    """Rows of (ranks, nodes, batch, micro-batches, most devices on one node)."""
    return np.asarray(X, dtype=float).reshape(-1, 5)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dataset:
    """A design matrix, the logarithms of step times, and the engine's seconds where known."""

    rows: Array
    log_times: Array
    engine_times: EngineTimes | None

    def distinct(self) -> tuple[Array, NDArray[np.intp]]:
        """The distinct rows, and for each row which of them it is."""
        rows, places = np.unique(self.rows, axis=0, return_inverse=True)
        return rows, places.reshape(-1)


def reference_of(data: Dataset, priors: Priors) -> ComputeReference:
    """The mean batch, and its compute: the engine's, or what the rows of fewest ranks suggest.

    Each distinct row counts once, by the median of its runs. Without rows it is next to none, and
    so is the stall, which nothing has shown.
    """
    if not len(data.rows):
        return ComputeReference(compute_s=float(np.finfo(float).tiny), batch=1.0)
    distinct, row_of = data.distinct()
    batch = float(np.exp(np.log(distinct[:, BATCH]).mean()))
    if data.engine_times is not None:
        # Of one row the engine says the same each time.
        compute_s = data.engine_times.compute_s[np.unique(row_of, return_index=True)[1]]
        return ComputeReference(compute_s=float(np.exp(np.log(compute_s).mean())), batch=batch)
    times = np.array([np.median(data.log_times[row_of == row]) for row in range(len(distinct))])
    is_fewest = distinct[:, RANKS] == distinct[:, RANKS].min()
    log_reference = float(times[is_fewest].mean())
    for _ in range(_REFERENCE_ITERATIONS):
        reference = ComputeReference(compute_s=math.exp(log_reference), batch=batch)
        off = times - evaluate_model(priors.log_medians(), distinct, reference).log_step
        # What most rows contradict is in another unit.
        median = float(np.median(off))
        log_reference += float(off[is_fewest].mean()) if abs(median) < _MOST_OFF else median
    return ComputeReference(compute_s=math.exp(log_reference), batch=batch)


# Standard deviations and length scales (of logarithms) of the residuals that fits to whole tables
# of Pollux's T4 cluster leave: the synchronisation of a placement differs from the model by 10 %,
# and half of that variance is shared with placements like it.
_PLACEMENT_SIGMA = 0.10
_SMOOTH_SHARE = 0.5
_PLACEMENT_COLUMNS = [RANKS, NODES, LARGEST_NODE]
_PLACEMENT_LENGTH_SCALES = np.array([0.7, 0.5, 0.7])
_PLACEMENT_BATCH_LENGTH_SCALE = 1.5
_COMPUTE_SIGMA, _COMPUTE_BATCH_LENGTH_SCALE = 0.03, 0.5
_JITTER_SIGMA, _JITTER_BATCH_LENGTH_SCALE = 0.04, 1.0
# Observation noise: two runs of the same allocation and batch, without and with communication.
USUAL_NOISE_SIGMA, _SYNC_NOISE_SIGMA = 0.03, 0.04
# Squared distance below which two placements are the same, up to rounding.
_SAME_PLACEMENT = 1e-12
# The covariance of so many rows with a thousand stays in a core's cache while it is worked out.
_ROWS_AT_ONCE = 64


def noise_variance(sync_share: Array) -> Array:
    """Variance of log step time between two runs of the same allocation and batch."""
    return np.asarray(USUAL_NOISE_SIGMA**2 + (_SYNC_NOISE_SIGMA * sync_share) ** 2)


def marginal_variance(sync_share: Array) -> Array:
    """Variance of log step time about the performance model: of noise and of the placement."""
    placement = (_PLACEMENT_SIGMA * sync_share) ** 2
    return np.asarray(noise_variance(sync_share) + placement)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """Inputs of the Gaussian process: rows, and what the performance model says of each.

    `sync_share` is the share of synchronisation in its step, `jacobian` d log(step) / d parameter,
    standardised by the priors. `placements` are the logarithms of ranks, nodes and most devices on
    a node, over their length scales.
    """

    rows: Array
    sync_share: Array
    jacobian: Array
    placements: Array = field(init=False)
    log_batches: Array = field(init=False)
    is_distributed: Array = field(init=False)

    def __post_init__(self) -> None:
        placements = np.log(self.rows[:, _PLACEMENT_COLUMNS]) / _PLACEMENT_LENGTH_SCALES
        object.__setattr__(self, "placements", placements)
        object.__setattr__(self, "log_batches", np.log(self.rows[:, BATCH]))
        object.__setattr__(self, "is_distributed", (self.rows[:, RANKS] > 1).astype(float))

    def part(self, places: NDArray[np.intp]) -> Inputs:
        """Some of them."""
        return Inputs(
            rows=self.rows[places],
            sync_share=self.sync_share[places],
            jacobian=self.jacobian[places],
        )


def kernel(first: Inputs, second: Inputs) -> Array:
    """Covariance of log step times at two sets of inputs, without observation noise.

    That of the parameters, whose standardised priors have unit variance, and of the residuals: a
    sum of three squared-exponential kernels, of the placement's synchronisation, of compute at a
    batch size, and of the jitter between ranks.
    """
    # Rows by rows, since a table has very many.
    found = np.empty((len(first.rows), len(second.rows)))
    for start in range(0, len(found), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        found[rows] = _kernel_rows(first, rows, second)
    return found


def _kernel_rows(first: Inputs, rows: slice, second: Inputs) -> Array:
    from scipy.spatial.distance import cdist

    distance = cdist(first.placements[rows], second.placements, "sqeuclidean")
    smooth = np.exp(-distance / 2)
    batch_distance = (first.log_batches[rows, None] - second.log_batches) ** 2 / 2
    placement = _SMOOTH_SHARE * smooth
    same = distance < _SAME_PLACEMENT
    if same.any():
        placement[same] += 1 - _SMOOTH_SHARE
    share, distributed = first.sync_share[rows, None], first.is_distributed[rows, None]
    placement *= np.exp(batch_distance * (-1 / _PLACEMENT_BATCH_LENGTH_SCALE**2))
    placement *= _PLACEMENT_SIGMA**2 * share * second.sync_share
    compute = np.exp(batch_distance * (-1 / _COMPUTE_BATCH_LENGTH_SCALE**2))
    compute *= _COMPUTE_SIGMA**2 * (1 - share) * (1 - second.sync_share)
    jitter = smooth
    jitter *= np.exp(batch_distance * (-1 / _JITTER_BATCH_LENGTH_SCALE**2))
    jitter *= _JITTER_SIGMA**2 * distributed * second.is_distributed
    parameters = first.jacobian[rows] @ second.jacobian.T
    return np.asarray(placement + compute + jitter + parameters)


def kernel_diagonal(inputs: Inputs) -> Array:
    """The diagonal of ``kernel(inputs, inputs)``."""
    placement = (_PLACEMENT_SIGMA * inputs.sync_share) ** 2
    compute = (_COMPUTE_SIGMA * (1 - inputs.sync_share)) ** 2
    parameters = (inputs.jacobian**2).sum(axis=1)
    return np.asarray(placement + compute + _JITTER_SIGMA**2 * inputs.is_distributed + parameters)


# Degrees of freedom of the Student t distribution of an observation's error.
_DEGREES_OF_FREEDOM = 4.0
# An observation outside the 99.9 % interval of a normal variable is an outlier, until so many
# observations of the same row agree.
_OUTLIER_Z = 3.29
_CONFIRMED = 3
# Correlation between errors of the model in runs of one row: what it does not know of the row is
# the same in each, and about as large as their noise.
_INTRACLASS_CORRELATION = 0.5


def effective_ratio(weights: Array, row_of: NDArray[np.intp]) -> Array:
    """What each observation says of the model as a share of what it would say as the only run.

    n runs of one row say as much as n / (1 + (n − 1)·ρ) independent ones, less than 1 / ρ (the
    design effect of Kish 1965, Survey Sampling), so that no row repeated often outweighs others.
    """
    runs = np.bincount(row_of, weights)[row_of]
    return np.asarray(1 / (1 + np.maximum(runs - 1, 0) * _INTRACLASS_CORRELATION))


def leverage(rows: Array, jacobian: Array) -> Array:
    """How much a fit with this `jacobian`, of which `rows` are some, follows each of these."""
    return np.asarray(((rows @ np.linalg.inv(jacobian.T @ jacobian)) * rows).sum(axis=1))


def robust_weights(
    errors: Array, jacobian: Array, observation_weights: Array, copy_of: NDArray[np.intp]
) -> Array:
    """Weights of observations by their standardised residuals, 0 to 1.

    `errors` and `jacobian` are of all observations, then of the parameters' priors, under the
    `observation_weights` so far. A Student t distribution's weights, with those outside the 99.9 %
    interval down-weighted further. Residuals are studentised: divided by √(1 − leverage), since an
    observation, with its copies (`copy_of` says of which it is one), pulls the fit towards itself.
    """
    count = len(observation_weights)
    of_copies = np.bincount(copy_of, leverage(jacobian[:count], jacobian))[copy_of]
    variance = observation_weights * np.maximum(1 - of_copies, 1e-6)
    z = np.maximum(np.abs(errors[:count]) / np.sqrt(variance), 1e-9)
    student = (_DEGREES_OF_FREEDOM + 1) / (_DEGREES_OF_FREEDOM + z**2)
    return np.asarray(np.minimum(student, 1) * np.minimum(1, _OUTLIER_Z / z) ** 2)


def confirmed(
    weights: Array,
    row_of: NDArray[np.intp],
    residuals: Array,
    sync_share: Array,
) -> tuple[Array, Array]:
    """Robust `weights`, restored for observations that agree on a row; each row's nugget variance.

    Three or more that agree within the noise are no outliers, however far the model is from them:
    the row has an effect of its own. Where
    others of the row contradict them, copies of one value, which no two runs share to the last
    digit, speak with one voice: most of the distinct values have to agree, and copies count
    together as less than two (`effective_ratio`).
    """
    count = int(row_of.max(initial=-1)) + 1
    weights, nugget = weights.copy(), np.zeros(count)
    variance = marginal_variance(sync_share)
    for row in np.flatnonzero(np.bincount(row_of, minlength=count) >= _CONFIRMED):
        members = np.flatnonzero(row_of == row)
        distinct = np.unique(residuals[members])
        median = np.median(distinct)
        farthest = _OUTLIER_Z * np.sqrt(noise_variance(sync_share[members]))
        near = np.abs(residuals[members] - median) < farthest
        is_most = 2 * np.sum(np.abs(distinct - median) < farthest[0]) > len(distinct)
        if near.sum() >= _CONFIRMED and is_most:
            weights[members] = np.where(near, 1.0, weights[members])
            nugget[row] = max(median**2 - variance[members[0]], 0.0)
        else:
            copy_of = np.searchsorted(distinct, residuals[members])
            weights[members] *= effective_ratio(np.ones(len(members)), copy_of)
    return weights, nugget
