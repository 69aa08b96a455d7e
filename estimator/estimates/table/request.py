"""Hold what is asked of many allocations at once, and keep small tables for whoever asks again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.elementwise import Flags, Indices, Integers
from estimator.errors import AllocationError, EstimatorError
from estimator.estimates.balance import balance
from estimator.estimates.engine import Engine
from estimator.estimates.estimate import Estimate
from estimator.estimates.request import EstimateRequest
from estimator.machines.catalogue import named_profile
from estimator.machines.profile import MachineProfile
from estimator.placement.allocation import Allocation
from estimator.placement.columns import AllocationColumns
from estimator.timeline.rank.layer_collectives import ranks_of_own
from estimator.workload.layouts import Layout

Allocations = Sequence[str | Allocation] | AllocationColumns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableRequest:
    """A request with columns: allocations, batches one each or one for all, and layouts.

    `shared` is what all rows have in common; its own allocation, batches and layout are not heeded.
    `layouts` has one for each allocation, None for data-parallel ranks; None: all are.
    Rows that cannot be answered stay empty, or raise where `strict`. `first_row` is how many rows
    came before, in other pieces of the same request.
    """

    shared: EstimateRequest
    allocations: Allocations
    batch_per_gpu: int | Integers | None
    global_batch: int | Integers | None
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

    def request(self, row: int) -> EstimateRequest:
        """The request of one row; raises AllocationError, StrategyError, WorkloadError."""
        return self.shared.changed(
            allocation=self.allocation(row),
            batch_per_gpu=_of_row(self.batch_per_gpu, row),
            global_batch=_of_row(self.global_batch, row),
            layout=None if self.layouts is None else self.layouts[row],
        )

    def answer(self, row: int) -> Estimate:
        """The estimate of one row; raises what `estimate` raises."""
        return balance(self.request(row), self.engine).answer

    def refuse(self, row: int) -> None:
        """Raise why a row has no answer, with its number."""
        try:
            self.answer(row)
        except EstimatorError as error:
            raise type(error)(f"row {self.first_row + row}: {error}") from None

    def are_apart(self, numbers: Indices) -> Flags | bool:
        """Which of some rows are answered one by one.

        Those on nodes of a cluster, and those whose ranks share a micro-batch's computing or
        exchange in it.
        """
        shared = self.shared
        if shared.cluster is not None or ranks_of_own(shared.graph, self.engine.cache) is not None:
            return True
        if self.layouts is None:
            return False
        return np.array([self.layouts[number] is not None for number in numbers.tolist()])

    def rows(self, chosen: slice | Indices) -> TableRequest:
        """The same question of some of the rows."""
        batch, global_batch = (
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
            self, allocations=some, batch_per_gpu=batch, global_batch=global_batch, layouts=layouts
        )


def _of_row(value: int | Integers | None, row: int) -> int | None:
    return int(value[row]) if isinstance(value, np.ndarray) else value


Columns = dict[str, NDArray[Any]]

# Rows of a table that is kept. A larger one costs little a row.
MOST_ROWS = 1024


def kept_columns(request: TableRequest, made: Callable[[TableRequest], Columns]) -> Columns:
    """The columns of a question, which a scheduler asks again in every round."""
    owners = _machines(request)
    if owners is None:
        return made(request)
    shared = request.shared
    texts = tuple(request.text(row) for row in range(len(request.allocations)))
    batches: tuple[Any, ...] = (request.batch_per_gpu, request.global_batch)
    columns = request.engine.cache.get(
        "table",
        (shared.graph, shared.cluster, *owners),
        lambda: made(replace(request, strict=False)),
        *(texts, *batches, shared.accumulation_steps),
        *(shared.strategy, shared.loader, shared.strict),
    )
    return {name: column.copy() for name, column in columns.items()}


def _machines(request: TableRequest) -> tuple[MachineProfile, ...] | None:
    """The machines of a table that is kept: a file that changed is another one's. Else None.

    Corrections change with what is observed, a machine that is not known may yet be described, and
    a large table is made of columns.
    """
    shared = request.shared
    if (
        shared.calibration is not None
        or request.layouts is not None
        or isinstance(request.allocations, AllocationColumns)
        or not 0 < len(request.allocations) <= MOST_ROWS
        or isinstance(request.batch_per_gpu, np.ndarray)
        or isinstance(request.global_batch, np.ndarray)
    ):
        return None
    if shared.profile is not None:
        return (shared.profile,)
    nodes = shared.cluster.nodes if shared.cluster else {}
    try:
        parsed = [request.allocation(row) for row in range(len(request.allocations))]
        groups = [group for allocation in parsed for group in allocation.groups]
        names = {group.machine or nodes[group.host or ""].machine for group in groups}
        return tuple([named_profile(name) for name in sorted(names)])
    except (EstimatorError, KeyError):
        return None
