"""Say how what the step law misses is alike from one row to another, and carry it over.

Placements are faster or slower than the law says, and so are batch sizes: a Gaussian process over
both, in the logarithm of step time, scaled by how much synchronisation rules the row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from estimator.calibrate.priors import Array
from estimator.calibrate.step_law import BATCH, LARGEST_NODE, NODES, RANKS

# Relative sizes and reach (in e-folds) of what fits to whole tables of Pollux's T4 cluster leave:
# a placement's own synchronisation differs by 10 %, half of it shared with placements like it.
_PLACEMENT_RATIO = 0.10
_SHARED_BY_ALIKE = 0.5
_PLACEMENT_COLUMNS, _PLACEMENT_REACHES = [RANKS, NODES, LARGEST_NODE], np.array([0.7, 0.5, 0.7])
# Squared distance of placements that are the same but for rounding.
_SAME = 1e-12
_PLACEMENT_BATCH_REACH = 1.5
_COMPUTE_RATIO, _COMPUTE_BATCH_REACH = 0.03, 0.5
_SPREAD_RATIO, _SPREAD_BATCH_REACH = 0.04, 1.0
# Two runs of the same row.
_RUN_RATIO, _SYNC_RUN_RATIO = 0.03, 0.04


def run_variance(sync_share: Array) -> Array:
    """Variance of log step time from one run to the next."""
    return np.asarray(_RUN_RATIO**2 + (_SYNC_RUN_RATIO * sync_share) ** 2)


def total_variance(sync_share: Array) -> Array:
    """Variance of log step time about the law, placements' own differences included."""
    placement = (_PLACEMENT_RATIO * sync_share) ** 2
    return np.asarray(run_variance(sync_share) + placement)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sites:
    """Rows where the field is looked at: the rows, and synchronisation's share of each.

    `placements` are logarithms of ranks, nodes and most devices on a node, in their reaches.
    """

    rows: Array
    sync_share: Array
    placements: Array = field(init=False)
    log_batches: Array = field(init=False)
    several: Array = field(init=False)

    def __post_init__(self) -> None:
        placements = np.log(self.rows[:, _PLACEMENT_COLUMNS]) / _PLACEMENT_REACHES
        object.__setattr__(self, "placements", placements)
        object.__setattr__(self, "log_batches", np.log(self.rows[:, BATCH]))
        object.__setattr__(self, "several", (self.rows[:, RANKS] > 1).astype(float))


def covariance(first: Sites, second: Sites) -> Array:
    """How much of the field two sets of sites have in common, without noise of a run."""
    from scipy.spatial.distance import cdist

    distance = cdist(first.placements, second.placements, "sqeuclidean")
    alike = np.exp(-distance / 2)
    batch_distance = (first.log_batches[:, None] - second.log_batches) ** 2 / 2
    placement = _SHARED_BY_ALIKE * alike
    same = distance < _SAME
    if same.any():
        placement[same] += 1 - _SHARED_BY_ALIKE
    placement *= np.exp(batch_distance * (-1 / _PLACEMENT_BATCH_REACH**2))
    placement *= (_PLACEMENT_RATIO**2 * first.sync_share)[:, None] * second.sync_share
    compute = np.exp(batch_distance * (-1 / _COMPUTE_BATCH_REACH**2))
    compute *= (_COMPUTE_RATIO**2 * (1 - first.sync_share))[:, None] * (1 - second.sync_share)
    alike *= np.exp(batch_distance * (-1 / _SPREAD_BATCH_REACH**2))
    alike *= (_SPREAD_RATIO**2 * first.several)[:, None] * second.several
    return np.asarray(placement + compute + alike)


def own_variance(sites: Sites) -> Array:
    """The diagonal of `covariance(sites, sites)`."""
    placement = (_PLACEMENT_RATIO * sites.sync_share) ** 2
    computing = (_COMPUTE_RATIO * (1 - sites.sync_share)) ** 2
    return np.asarray(placement + computing + _SPREAD_RATIO**2 * sites.several)
