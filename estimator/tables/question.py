"""Hold what is asked of many allocations at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.coefficients import Calibration
from estimator.engine import Engine
from estimator.errors import AllocationError, EstimatorError
from estimator.estimates import Estimate
from estimator.graph.op_graph import OpGraph
from estimator.machines.profile import MachineProfile
from estimator.placement.allocation import Allocation
from estimator.placement.columns import AllocationColumns
from estimator.placement.topology import Cluster
from estimator.tables.balance import balance
from estimator.workload import Strategy
from estimator.workload.layout import Layout
from estimator.workload.loader import Loader

Integers = NDArray[np.integer]
Indices = NDArray[np.intp]
Flags = NDArray[np.bool_]
Allocations = Sequence[str | Allocation] | AllocationColumns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """What is asked of every allocation: `estimate`'s arguments; batches one each, or one.

    `layouts` has one for each allocation, None for data-parallel ranks; None: all are.
    Rows that cannot be answered stay empty, or raise where `strict`. `first_row` is how many rows
    came before, in other pieces of the same question.
    """

    graph: OpGraph
    allocations: Allocations
    batch_per_gpu: int | Integers | None
    global_batch: int | Integers | None
    accumulation_steps: int
    strategy: Strategy
    cluster: Cluster | None
    calibration: Calibration | None
    profile: MachineProfile | None
    loader: Loader | None
    engine: Engine
    layouts: tuple[Layout | None, ...] | None = None
    strict: bool = False
    first_row: int = 0

    def allocation(self, row: int) -> Allocation:
        """The allocation of a row; raises AllocationError."""
        if isinstance(self.allocations, AllocationColumns):
            return self.allocations.allocation(row)
        return Allocation.parse(self.allocations[row])

    def text(self, row: int) -> str:
        """The allocation of a row as it was written, or as it prints; empty if it does not."""
        if not isinstance(self.allocations, AllocationColumns):
            return str(self.allocations[row])
        try:
            return str(self.allocation(row))
        except AllocationError:
            return ""

    def answer(self, row: int) -> Estimate:
        """The estimate of one row; raises what `estimate` raises."""
        batch, whole = _of_row(self.batch_per_gpu, row), _of_row(self.global_batch, row)
        asked: dict[str, Any] = {
            "accumulation_steps": self.accumulation_steps,
            "strategy": self.strategy,
            "cluster": self.cluster,
            "calibration": self.calibration,
            "profile": self.profile,
            "loader": self.loader,
        }
        allocation = self.allocation(row)
        layout = None if self.layouts is None else self.layouts[row]
        if layout is not None:
            asked |= {"batch_per_gpu": batch, "global_batch": whole, "layout": layout}
            return self.engine.estimate(self.graph, allocation, **asked)
        if whole is not None and batch is None:
            asked |= {"global_batch": whole, "engine": self.engine}
            return balance(self.graph, allocation, **asked).answer
        asked |= {"batch_per_gpu": batch, "global_batch": whole}
        return self.engine.estimate(self.graph, allocation, **asked)

    def refuse(self, row: int) -> None:
        """Raise why a row has no answer, with its number."""
        try:
            self.answer(row)
        except EstimatorError as error:
            raise type(error)(f"row {self.first_row + row}: {error}") from None

    def are_laid_out(self, numbers: Indices) -> Flags | bool:
        """Which of some rows have ranks that share a micro-batch's computing."""
        if self.layouts is None:
            return False
        return np.array([self.layouts[number] is not None for number in numbers.tolist()])

    def rows(self, chosen: slice | Indices) -> Question:
        """The same question of some of the rows."""
        batch, whole = (
            value[chosen] if isinstance(value, np.ndarray) else value
            for value in (self.batch_per_gpu, self.global_batch)
        )
        allocations = self.allocations
        if isinstance(allocations, AllocationColumns) or isinstance(chosen, slice):
            some: Allocations = allocations[chosen]  # type: ignore[index]
        else:
            some = [allocations[row] for row in chosen.tolist()]
        layouts = self.layouts
        if layouts is not None:
            numbers = np.arange(len(layouts))[chosen]
            layouts = tuple(layouts[number] for number in numbers.tolist())
        return replace(
            self, allocations=some, batch_per_gpu=batch, global_batch=whole, layouts=layouts
        )


def _of_row(value: int | Integers | None, row: int) -> int | None:
    return int(value[row]) if isinstance(value, np.ndarray) else value
