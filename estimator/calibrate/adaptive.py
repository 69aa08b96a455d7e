"""Keep intervals honest as steps arrive: adaptive conformal inference (Gibbs and Candès 2021).

Where steps drift away from those before them, intervals whose scores are of all of them hold less
than they state. Each observation is compared with the interval that those before it give; a miss
raises the coverage asked of the next intervals, and a hit lowers it less, so that over time they
hold what is stated whatever the steps do.
"""

from __future__ import annotations

import numpy as np

from estimator.calibrate.intervals import PRIOR_COUNT, prior_scores
from estimator.calibrate.priors import Array

# The step size: Gibbs and Candès take 0.005 for thousands of observations.
_STEP_SIZE = 0.02
# Beyond these coverages quantiles of so few scores say nothing.
_LEAST_COVERAGE, _MOST_COVERAGE = 0.5, 0.99


def adapted_coverage(scores: Array, coverage_ratio: float) -> float:
    """The coverage to ask of the next interval so that `coverage_ratio` is held.

    `scores` are of observations in order of arrival, each predicted from those before it.
    """
    prior = prior_scores()
    missed_ratio = 1 - coverage_ratio
    values = np.concatenate([prior, scores])
    weights = np.concatenate([np.full(len(prior), PRIOR_COUNT / len(prior)), np.ones(len(scores))])
    order = np.argsort(values, kind="stable")
    for place, score in enumerate(scores):
        before = order[order < len(prior) + place]
        cumulated = np.cumsum(weights[before])
        level = np.clip(1 - missed_ratio, _LEAST_COVERAGE, _MOST_COVERAGE)
        at = np.searchsorted(cumulated, level * cumulated[-1])
        is_missed = score > values[before[min(at, len(before) - 1)]]
        missed_ratio += _STEP_SIZE * (1 - coverage_ratio - is_missed)
    return float(np.clip(1 - missed_ratio, _LEAST_COVERAGE, _MOST_COVERAGE))
