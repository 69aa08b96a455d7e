"""Say how what the step law misses is alike from one row to another, and carry it over.

Placements are faster or slower than the law says, and so are batch sizes: a Gaussian process over
both, in the logarithm of step time, scaled by how much synchronisation rules the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estimator.calibrate.priors import Array
from estimator.calibrate.step_law import BATCH, LARGEST_NODE, NODES, RANKS

# Relative sizes and reach (in e-folds) of what fits to whole tables of Pollux's T4 cluster leave:
# a placement's own synchronisation differs by 10 %, half of it shared with placements like it.
_PLACEMENT_RATIO = 0.10
_SHARED_BY_ALIKE = 0.5
_RANKS_REACH, _NODES_REACH, _LARGEST_REACH = 0.7, 0.5, 0.7
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
    """Rows where the field is looked at: the rows, and synchronisation's share of each."""

    rows: Array
    sync_share: Array


def covariance(first: Sites, second: Sites) -> Array:
    """How much of the field two sets of sites have in common, without noise of a run."""
    distance = _placement_distance(first.rows, second.rows)
    alike = np.exp(-distance / 2)
    same = (distance < 1e-12).astype(float)
    log_ratio = np.log(first.rows[:, BATCH])[:, None] - np.log(second.rows[:, BATCH])[None]
    batch_distance = log_ratio**2 / 2
    shares = first.sync_share[:, None] * second.sync_share[None]
    computing = (1 - first.sync_share)[:, None] * (1 - second.sync_share)[None]
    placement = _SHARED_BY_ALIKE * alike + (1 - _SHARED_BY_ALIKE) * same
    field = (
        _PLACEMENT_RATIO**2
        * shares
        * placement
        * np.exp(-batch_distance / _PLACEMENT_BATCH_REACH**2)
    )
    field += _COMPUTE_RATIO**2 * computing * np.exp(-batch_distance / _COMPUTE_BATCH_REACH**2)
    several = (first.rows[:, RANKS] > 1)[:, None] & (second.rows[:, RANKS] > 1)[None]
    spread = alike * np.exp(-batch_distance / _SPREAD_BATCH_REACH**2)
    return np.asarray(field + _SPREAD_RATIO**2 * several * spread)


def own_variance(sites: Sites) -> Array:
    """The diagonal of `covariance(sites, sites)`."""
    several = sites.rows[:, RANKS] > 1
    placement = (_PLACEMENT_RATIO * sites.sync_share) ** 2
    computing = (_COMPUTE_RATIO * (1 - sites.sync_share)) ** 2
    return np.asarray(placement + computing + _SPREAD_RATIO**2 * several)


def _placement_distance(first: Array, second: Array) -> Array:
    from scipy.spatial.distance import cdist

    reach = np.array([_RANKS_REACH, _NODES_REACH, _LARGEST_REACH])
    columns = [RANKS, NODES, LARGEST_NODE]
    left, right = np.log(first[:, columns]) / reach, np.log(second[:, columns]) / reach
    return np.asarray(cdist(left, right, "sqeuclidean"))
