"""Combine what observations say of the law's parameters with what they say of the field about it.

Universal kriging: the law made linear about its fit, its parameters normal with unit priors, and
the residual field Gaussian, so that means, spreads and leave-one-out errors are linear algebra.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.calibrate import intervals, residual_field
from estimator.calibrate.priors import Array
from estimator.calibrate.residual_field import Sites

# Leave-one-out errors of so many runs settle a quantile.
_SCORED_RUNS = 200


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """What was seen at distinct sites.

    `slopes` are d log(step) / d deviation, (sites, parameters); `residuals` are mean measured −
    fitted log step times; `noise` is their variance; `own` is the variance of an effect that a
    site has for itself; `deviations` is where the law was fitted, in widths of its priors. Of every
    run at them, `run_sites` are the sites, `run_residuals` its own measured − fitted, `run_noise`
    the variance that a run has however much it is doubted.
    """

    sites: Sites
    slopes: Array
    residuals: Array
    noise: Array
    own: Array
    deviations: Array
    run_sites: NDArray[np.intp]
    run_residuals: Array
    run_noise: Array


class Posterior:
    """Means and spreads of log step time, over the fitted law, given evidence."""

    def __init__(self, evidence: Evidence) -> None:
        from scipy.linalg import cho_factor

        self._evidence = evidence
        matrix = self._covariance(evidence.sites) + np.diag(evidence.noise)
        self._factor = cho_factor(matrix, check_finite=False) if len(matrix) else None
        slopes = evidence.slopes
        self._solved_slopes = self._solve(slopes)
        precision = np.eye(slopes.shape[1]) + slopes.T @ self._solved_slopes
        self.parameter_covariance = np.linalg.inv(precision)
        pull = self._solved_slopes.T @ evidence.residuals - evidence.deviations
        self.shift = self.parameter_covariance @ pull
        self._weights = self._solve(evidence.residuals - slopes @ self.shift)

    def mean(self, sites: Sites, slopes: Array) -> Array:
        """What to add to the fitted law's log step time."""
        return self._mean(self._covariance(sites), slopes)

    def mean_and_variance(self, sites: Sites, slopes: Array) -> tuple[Array, Array]:
        """That, and the variance of log step time of a run, that between runs included."""
        common = self._covariance(sites)
        field = np.maximum(residual_field.own_variance(sites) - self._known(common), 0)
        law = self.law_variance(slopes - common @ self._solved_slopes)
        variance = field + law + residual_field.run_variance(sites.sync_share)
        return self._mean(common, slopes), variance

    def _mean(self, common: Array, slopes: Array) -> Array:
        return np.asarray(slopes @ self.shift + common @ self._weights)

    def _known(self, common: Array) -> Array:
        """How much of the field's variance is known by what it has in common with sites seen."""
        from scipy.linalg.lapack import dtrtrs

        if self._factor is None:
            return np.zeros(len(common))
        # cho_factor leaves U with UᵀU = C, so that |U⁻ᵀc|² = cᵀC⁻¹c.
        half, _ = dtrtrs(self._factor[0], common.T, trans=1)
        return np.asarray((half * half).sum(axis=0))

    def law_variance(self, slopes: Array) -> Array:
        """Variance that comes of not knowing the law's parameters."""
        return np.asarray(((slopes @ self.parameter_covariance) * slopes).sum(axis=1))

    @cached_property
    def scores(self) -> tuple[Array, Array]:
        """How far runs are from what all other sites say, in predicted spreads; and their shares.

        A doubted run is as far as it is: the next one may be such a run too.
        """
        evidence = self._evidence
        step = max(1, len(evidence.run_sites) // _SCORED_RUNS)
        chosen = evidence.run_sites[::step]
        sites, place = np.unique(chosen, return_inverse=True)
        # C⁻¹ of all uncertainty together; a row of it over its diagonal predicts from the others.
        lifted = evidence.residuals + evidence.slopes @ evidence.deviations
        inner = self._solved_slopes @ self.parameter_covariance
        pulled = self._solve(lifted) - inner @ (self._solved_slopes.T @ lifted)
        unit = np.zeros((len(lifted), len(sites)))
        unit[sites, np.arange(len(sites))] = 1.0
        own = self._solve(unit)[sites, np.arange(len(sites))]
        own -= np.einsum("ij,ij->i", inner[sites], self._solved_slopes[sites])
        own = np.maximum(own, 1e-12)
        without = (pulled[sites] / own - evidence.residuals[sites])[place]
        variance = np.maximum(1 / own - evidence.noise[sites], 0)[place]
        errors = evidence.run_residuals[::step] + without
        scores = np.abs(errors) / np.sqrt(variance + evidence.run_noise[::step])
        return scores, evidence.sites.sync_share[chosen]

    @cached_property
    def _knots(self) -> dict[float, Array]:
        return {}

    def factors(self, sync_share: Array, coverage_ratio: float) -> Array:
        """Spreads to either side that cover the given share of runs at rows."""
        if coverage_ratio not in self._knots:
            self._knots[coverage_ratio] = intervals.knot_factors(*self.scores, coverage_ratio)
        return intervals.factors_at(self._knots[coverage_ratio], sync_share)

    def _solve(self, values: Array) -> Array:
        from scipy.linalg import cho_solve

        factor: Any = self._factor
        if factor is None:
            return values
        return np.asarray(cho_solve(factor, values, check_finite=False))

    def _covariance(self, sites: Sites) -> Array:
        """Of sites with those seen, effects of a site's own included."""
        seen = self._evidence.sites
        common = residual_field.covariance(sites, seen)
        for place in np.flatnonzero(self._evidence.own):
            same = (sites.rows == seen.rows[place]).all(axis=1)
            common[same, place] += self._evidence.own[place]
        return common
