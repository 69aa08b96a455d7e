"""Combine what observations say of the law's parameters with what they say of the field about it.

Universal kriging: the law made linear about its fit, its parameters normal with unit priors, and
the residual field Gaussian, so that means, spreads and leave-one-out errors are linear algebra.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from estimator.calibrate import residual_field
from estimator.calibrate.priors import Array
from estimator.calibrate.residual_field import Sites

# Leave-one-out errors of so many sites settle a quantile.
_SCORED_SITES = 200


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """What was seen at distinct sites.

    `slopes` are d log(step) / d deviation, (sites, parameters); `residuals` are mean measured −
    fitted log step times; `noise` is their variance; `own` is the variance of an effect that a
    site has for itself; `deviations` is where the law was fitted, in widths of its priors.
    """

    sites: Sites
    slopes: Array
    residuals: Array
    noise: Array
    own: Array
    deviations: Array


class Posterior:
    """Means and spreads of log step time, over the fitted law, given evidence."""

    def __init__(self, evidence: Evidence) -> None:
        from scipy.linalg import cho_factor

        self._evidence = evidence
        matrix = self._covariance(evidence.sites) + np.diag(evidence.noise)
        self._factor = cho_factor(matrix) if len(matrix) else None
        slopes = evidence.slopes
        self._solved_slopes = self._solve(slopes)
        precision = np.eye(slopes.shape[1]) + slopes.T @ self._solved_slopes
        self.parameter_covariance = np.linalg.inv(precision)
        pull = self._solved_slopes.T @ evidence.residuals - evidence.deviations
        self.shift = self.parameter_covariance @ pull
        self._weights = self._solve(evidence.residuals - slopes @ self.shift)

    def mean(self, sites: Sites, slopes: Array) -> Array:
        """What to add to the fitted law's log step time."""
        return np.asarray(slopes @ self.shift + self._covariance(sites) @ self._weights)

    def variance(self, sites: Sites, slopes: Array) -> Array:
        """Variance of log step time of a run, that between runs included."""
        common = self._covariance(sites)
        known = np.einsum("ij,ji->i", common, self._solve(common.T))
        field = np.maximum(residual_field.own_variance(sites) - known, 0)
        law = self.law_variance(slopes - common @ self._solved_slopes)
        return np.asarray(field + law + residual_field.run_variance(sites.sync_share))

    def law_variance(self, slopes: Array) -> Array:
        """Variance that comes of not knowing the law's parameters."""
        return np.asarray(((slopes @ self.parameter_covariance) * slopes).sum(axis=1))

    @cached_property
    def scores(self) -> tuple[Array, Array]:
        """How far sites are from what all others say, in predicted spreads; and their shares."""
        evidence = self._evidence
        step = max(1, len(evidence.residuals) // _SCORED_SITES)
        chosen = np.arange(0, len(evidence.residuals), step)
        # C⁻¹ of all uncertainty together; a row of it over its diagonal predicts from the others.
        lifted = evidence.residuals + evidence.slopes @ evidence.deviations
        inner = self._solved_slopes @ self.parameter_covariance
        pulled = self._solve(lifted) - inner @ (self._solved_slopes.T @ lifted)
        unit = np.zeros((len(lifted), len(chosen)))
        unit[chosen, np.arange(len(chosen))] = 1.0
        own = self._solve(unit)[chosen, np.arange(len(chosen))]
        own -= np.einsum("ij,ij->i", inner[chosen], self._solved_slopes[chosen])
        scores = np.abs(pulled[chosen]) / np.sqrt(np.maximum(own, 1e-12))
        return scores, evidence.sites.sync_share[chosen]

    def _solve(self, values: Array) -> Array:
        from scipy.linalg import cho_solve

        factor: Any = self._factor
        return np.asarray(cho_solve(factor, values)) if factor is not None else values

    def _covariance(self, sites: Sites) -> Array:
        """Of sites with those seen, effects of a site's own included."""
        seen = self._evidence.sites
        common = residual_field.covariance(sites, seen)
        for place in np.flatnonzero(self._evidence.own):
            same = (sites.rows == seen.rows[place]).all(axis=1)
            common[same, place] += self._evidence.own[place]
        return common
