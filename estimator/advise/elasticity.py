"""Throughput over batch, workers and micro-batches as a grid, with the batch that memory allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.advise.largest_batch import largest_batch
from estimator.errors import WorkloadError
from estimator.graph.op_graph import OpGraph
from estimator.placement.allocation import Allocation
from estimator.tables import estimate_many


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Elasticity:
    """Arrays of a row per allocation, a column per batch and a layer per number of micro-batches.

    Where a step cannot be taken, throughput is NaN; `fits` says whether it fits into memory surely.
    `largest_batch` is the most samples per device and micro-batch that surely fit, by allocation.
    """

    allocations: tuple[str, ...]
    batches: tuple[int, ...]
    accumulation_steps: tuple[int, ...]
    samples_per_s: NDArray[np.float64]
    step_time_s: NDArray[np.float64]
    global_batch: NDArray[np.int64]
    fits: NDArray[np.bool_]
    largest_batch: NDArray[np.int64]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units; null where there is none."""
        return {
            "allocations": list(self.allocations),
            "batches": list(self.batches),
            "accumulation_steps": list(self.accumulation_steps),
            "samples_per_s": _plain(self.samples_per_s),
            "step_time_s": _plain(self.step_time_s),
            "global_batch": self.global_batch.tolist(),
            "fits": self.fits.tolist(),
            "largest_batch": self.largest_batch.tolist(),
        }


def elasticity(
    graph: OpGraph,
    allocations: Sequence[str | Allocation],
    batches: Sequence[int],
    *,
    accumulation_steps: Sequence[int] = (1,),
    **asked: Any,
) -> Elasticity:
    """The grid of every allocation at every batch per device and number of micro-batches.

    `asked` goes to `estimate_many`, as `strategy` and `calibration` do. Raises WorkloadError,
    AllocationError.
    """
    for name, given in (
        ("allocations", allocations),
        ("batches", batches),
        ("accumulation_steps", accumulation_steps),
    ):
        if isinstance(given, str) or not len(given):
            raise WorkloadError(f"{name} are {given!r}; give a list of at least one")
    shape = len(allocations), len(batches)
    rows = [each for each in allocations for _ in batches]
    column = np.tile(np.asarray(batches, dtype=np.int64), len(allocations))
    tables = [
        estimate_many(graph, rows, batch_per_gpu=column, accumulation_steps=steps, **asked)
        for steps in accumulation_steps
    ]

    def grid(name: str) -> NDArray[Any]:
        layers = [np.asarray(getattr(table, name)).reshape(shape) for table in tables]
        return np.stack(layers, axis=-1)

    return Elasticity(
        allocations=tuple(str(Allocation.parse(each)) for each in allocations),
        batches=tuple(batches),
        accumulation_steps=tuple(accumulation_steps),
        samples_per_s=grid("samples_per_s"),
        step_time_s=grid("step_time_s"),
        global_batch=grid("global_batch"),
        fits=grid("fits") == "yes",
        largest_batch=np.array(
            [largest_batch(graph, each, **asked).batch_per_gpu for each in allocations]
        ),
    )


def _plain(cells: NDArray[np.float64]) -> list[Any]:
    """Nested lists, with None where there is no number."""
    return [
        [[None if math.isnan(value) else value for value in layer] for layer in row]
        for row in cells.tolist()
    ]
