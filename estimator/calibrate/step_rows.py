"""Check rows of (ranks, nodes, batch, micro-batches, most devices on one node) and their times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from estimator.calibrate.priors import Array
from estimator.calibrate.step_law import NODES, RANKS, Parts
from estimator.errors import WorkloadError

_LEAST = (1, 1, np.finfo(float).tiny, 1, 1)
# Runs differ more than the steps within one: many steps are not many runs.
_LARGEST_WEIGHT = 4.0


def placed_rows(X: ArrayLike) -> Array:
    """Rows with all five columns; devices are spread evenly where the fifth is left out."""
    rows = np.asarray(X, dtype=float)
    if not rows.size:
        return np.empty((0, 5))
    rows = np.atleast_2d(rows)
    if rows.ndim == 2 and rows.shape[1] == 4:
        rows = np.column_stack([rows, np.ceil(rows[:, RANKS] / np.maximum(rows[:, NODES], 1))])
    if rows.ndim != 2 or rows.shape[1] != 5 or not np.isfinite(rows).all() or (rows < _LEAST).any():
        raise WorkloadError(
            "a row must be (ranks, nodes, batch, micro-batches, most devices on one node), the "
            "batch positive and the others at least 1; correct the table"
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observed:
    """Rows, the logarithms of their step times, and how many observations each counts for."""

    rows: Array
    log_times: Array
    weights: Array
    parts: Parts | None

    @classmethod
    def checked(
        cls, X: ArrayLike, y: ArrayLike, weights: ArrayLike | None, parts: Parts | None
    ) -> Observed:
        """The same from what a caller gives."""
        rows, times = placed_rows(X), np.asarray(y, dtype=float)
        counts = np.ones(len(rows)) if weights is None else np.asarray(weights, dtype=float)
        for name, values in (("step times", times), ("weights", counts)):
            if values.shape != (len(rows),):
                raise WorkloadError(
                    f"{len(rows)} rows have {values.size} {name}; give one for each"
                )
            if not (np.isfinite(values).all() and (values > 0).all()):
                raise WorkloadError(f"{name} must be positive; leave out the others")
        return cls(
            rows=rows,
            log_times=np.log(times),
            weights=np.minimum(counts, _LARGEST_WEIGHT),
            parts=parts,
        )

    def distinct(self) -> tuple[Array, NDArray[np.intp]]:
        """The distinct rows, and for each row which of them it is."""
        rows, places = np.unique(self.rows, axis=0, return_inverse=True)
        return rows, places.reshape(-1)
