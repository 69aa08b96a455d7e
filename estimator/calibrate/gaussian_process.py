"""Give the kernel of a Gaussian process over the residuals of the performance model.

Residuals are of log step time. They are correlated between placements that resemble each other and
between batch sizes, and the part that is due to communication is scaled by the share of the step
that gradient synchronisation takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from estimator.calibrate.performance_model import BATCH, LARGEST_NODE, NODES, RANKS
from estimator.calibrate.priors import Array

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
_NOISE_SIGMA, _SYNC_NOISE_SIGMA = 0.03, 0.04
# Squared distance below which two placements are the same, up to rounding.
_SAME_PLACEMENT = 1e-12
# The covariance of so many rows with a thousand stays in a core's cache while it is worked out.
_ROWS_AT_ONCE = 64


def noise_variance(sync_share: Array) -> Array:
    """Variance of log step time between two runs of the same allocation and batch."""
    return np.asarray(_NOISE_SIGMA**2 + (_SYNC_NOISE_SIGMA * sync_share) ** 2)


def marginal_variance(sync_share: Array) -> Array:
    """Variance of log step time about the performance model: of noise and of the placement."""
    placement = (_PLACEMENT_SIGMA * sync_share) ** 2
    return np.asarray(noise_variance(sync_share) + placement)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """Inputs of the Gaussian process: rows, and the share of synchronisation in each row's step.

    `placements` are the logarithms of ranks, nodes and most devices on a node, over their length
    scales.
    """

    rows: Array
    sync_share: Array
    placements: Array = field(init=False)
    log_batches: Array = field(init=False)
    is_distributed: Array = field(init=False)

    def __post_init__(self) -> None:
        placements = np.log(self.rows[:, _PLACEMENT_COLUMNS]) / _PLACEMENT_LENGTH_SCALES
        object.__setattr__(self, "placements", placements)
        object.__setattr__(self, "log_batches", np.log(self.rows[:, BATCH]))
        object.__setattr__(self, "is_distributed", (self.rows[:, RANKS] > 1).astype(float))


def kernel(first: Inputs, second: Inputs) -> Array:
    """Covariance of the residuals at two sets of inputs, without observation noise.

    A sum of three squared-exponential kernels: of the placement's synchronisation, of compute at a
    batch size, and of the jitter between ranks.
    """
    found = np.empty((len(first.rows), len(second.rows)))
    for start in range(0, len(found), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        found[rows] = _kernel_rows(first, rows, second)
    return found


def lower_kernel(inputs: Inputs) -> Array:
    """The lower triangle of ``kernel(inputs, inputs)`` in columns; above it is nothing of use."""
    found = np.empty((len(inputs.rows), len(inputs.rows)), order="F")
    for start in range(0, len(found), _ROWS_AT_ONCE):
        columns, rest = slice(start, start + _ROWS_AT_ONCE), slice(start, None)
        found[rest, columns] = _kernel_rows(inputs, columns, inputs, rest).T
    return found


def _kernel_rows(first: Inputs, rows: slice, second: Inputs, columns: slice = slice(None)) -> Array:
    from scipy.spatial.distance import cdist

    distance = cdist(first.placements[rows], second.placements[columns], "sqeuclidean")
    smooth = np.exp(-distance / 2)
    batch_distance = (first.log_batches[rows, None] - second.log_batches[columns]) ** 2 / 2
    placement = _SMOOTH_SHARE * smooth
    same = distance < _SAME_PLACEMENT
    if same.any():
        placement[same] += 1 - _SMOOTH_SHARE
    share, distributed = first.sync_share[rows, None], first.is_distributed[rows, None]
    other_share = second.sync_share[columns]
    placement *= np.exp(batch_distance * (-1 / _PLACEMENT_BATCH_LENGTH_SCALE**2))
    placement *= _PLACEMENT_SIGMA**2 * share * other_share
    compute = np.exp(batch_distance * (-1 / _COMPUTE_BATCH_LENGTH_SCALE**2))
    compute *= _COMPUTE_SIGMA**2 * (1 - share) * (1 - other_share)
    jitter = smooth
    jitter *= np.exp(batch_distance * (-1 / _JITTER_BATCH_LENGTH_SCALE**2))
    jitter *= _JITTER_SIGMA**2 * distributed * second.is_distributed[columns]
    return np.asarray(placement + compute + jitter)


def kernel_diagonal(inputs: Inputs) -> Array:
    """The diagonal of ``kernel(inputs, inputs)``: the prior variance of the residuals."""
    placement = (_PLACEMENT_SIGMA * inputs.sync_share) ** 2
    compute = (_COMPUTE_SIGMA * (1 - inputs.sync_share)) ** 2
    return np.asarray(placement + compute + _JITTER_SIGMA**2 * inputs.is_distributed)
