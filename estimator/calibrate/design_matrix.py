"""Make the design matrix and the responses of a regression from what a caller gives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from estimator.calibrate.performance_model import (
    BATCH,
    NODES,
    RANKS,
    EngineTimes,
    Reference,
    evaluate_model,
)
from estimator.calibrate.priors import Array, Priors
from estimator.errors import WorkloadError

_LEAST = (1, 1, np.finfo(float).tiny, 1, 1)
# Variance between runs exceeds that between the steps of one run, so an observation of many steps
# does not weigh as much as many observations.
_LARGEST_WEIGHT = 4.0
_REFERENCE_ITERATIONS = 3


def design_matrix(X: ArrayLike) -> Array:
    """Rows of (ranks, nodes, batch, micro-batches, most devices on one node).

    Where the fifth column is left out, devices are spread evenly over nodes.
    """
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
class Dataset:
    """A design matrix, the logarithms of step times, and how many observations each counts for."""

    rows: Array
    log_times: Array
    weights: Array
    engine_times: EngineTimes | None

    @classmethod
    def checked(
        cls,
        X: ArrayLike,
        y: ArrayLike,
        weights: ArrayLike | None,
        engine_times: EngineTimes | None,
    ) -> Dataset:
        """The same from what a caller gives; raises WorkloadError."""
        rows, times = design_matrix(X), np.asarray(y, dtype=float)
        counts = np.ones(len(rows)) if weights is None else np.asarray(weights, dtype=float)
        for name, values in (("step times", times), ("weights", counts)):
            if values.shape != (len(rows),):
                raise WorkloadError(
                    f"{len(rows)} rows have {values.size} {name}; give one for each"
                )
            wrong = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
            if len(wrong):
                raise WorkloadError(
                    f"{name} must be positive and finite, found {values[wrong[0]]:g} in row "
                    f"{wrong[0]}; correct it or leave the row out"
                )
        return cls(
            rows=rows,
            log_times=np.log(times),
            weights=np.minimum(counts, _LARGEST_WEIGHT),
            engine_times=engine_times,
        )

    def part(self, places: slice | NDArray[np.intp]) -> Dataset:
        """Some of the observations."""
        times = self.engine_times
        return Dataset(
            rows=self.rows[places],
            log_times=self.log_times[places],
            weights=self.weights[places],
            engine_times=None if times is None else times.part(places),
        )

    def originals(self) -> NDArray[np.intp]:
        """The places of all observations but copies of an earlier one, step and time alike."""
        values = np.column_stack([self.rows, self.log_times])
        return np.sort(np.unique(values, axis=0, return_index=True)[1])

    def distinct(self) -> tuple[Array, NDArray[np.intp]]:
        """The distinct rows, and for each row which of them it is."""
        rows, places = np.unique(self.rows, axis=0, return_inverse=True)
        return rows, places.reshape(-1)


def reference_of(data: Dataset, priors: Priors, compute_s: Array | None) -> Reference:
    """The mean batch, and its compute: the engine's, or what the rows of fewest ranks suggest.

    Each distinct row counts once, by the median of its runs. Without rows it is next to none, and
    so is the stall, which nothing has shown.
    """
    if not len(data.rows):
        return Reference(compute_s=float(np.finfo(float).tiny), batch=1.0)
    distinct, row_of = data.distinct()
    batch = float(np.exp(np.log(distinct[:, BATCH]).mean()))
    if compute_s is not None:
        # Of one row the engine says the same each time.
        first = np.unique(row_of, return_index=True)[1]
        return Reference(compute_s=float(np.exp(np.log(compute_s[first]).mean())), batch=batch)
    fewest = np.flatnonzero(distinct[:, RANKS] == distinct[:, RANKS].min())
    rows = distinct[fewest]
    times = np.array([np.median(data.log_times[row_of == row]) for row in fewest])
    reference_s = float(np.exp(times.mean()))
    for _ in range(_REFERENCE_ITERATIONS):
        reference = Reference(compute_s=reference_s, batch=batch)
        model = evaluate_model(priors.log_medians(), rows, reference)
        reference_s *= float(np.exp((times - model.log_step).mean()))
    return Reference(compute_s=reference_s, batch=batch)
