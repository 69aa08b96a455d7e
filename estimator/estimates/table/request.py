"""Hold what is asked of many allocations at once, and keep small tables for whoever asks again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
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

    def are_laid_out(self, numbers: Indices) -> Flags | bool:
        """Which of some rows have ranks that share a micro-batch's computing, or exchange in it."""
        if ranks_of_own(self.shared.graph, self.engine.cache) is not None:
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

# Rows of a table that is kept, and rows kept of one request. A larger table costs little a row.
MOST_ROWS = 1024
_MOST_KEPT = 8192


class KnownRows:
    """The rows answered of one question, whatever its allocations; safe under threads.

    Rows are forgotten once the file of a machine that one is on has changed.
    """

    def __init__(self) -> None:
        self.columns: Columns = {}
        self._place: dict[str, int] = {}
        self._machines: dict[str, MachineProfile] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, request: TableRequest) -> KnownRows | None:
        """Those of a question; None for one whose rows are not kept.

        Corrections change with what is observed, and a large table is made of columns.
        """
        if (
            request.shared.calibration is not None
            or request.layouts is not None
            or isinstance(request.allocations, AllocationColumns)
            or not 0 < len(request.allocations) <= MOST_ROWS
            or isinstance(request.batch_per_gpu, np.ndarray)
            or isinstance(request.global_batch, np.ndarray)
        ):
            return None
        owners, details = _key(request)
        return request.engine.cache.get("rows", owners, cls, *details)

    def table(self, request: TableRequest, made: Callable[[TableRequest], Columns]) -> Columns:
        """The columns of a question; `made` makes those of the rows that are not known."""
        texts = [request.text(row) for row in range(len(request.allocations))]
        with self._lock:
            self._forget_if_changed(request)
            missing = [text for text in dict.fromkeys(texts) if text not in self._place]
            if not missing:
                return self._rows(self.columns, self._place, texts)
            computed = made(replace(request, allocations=missing, strict=False))
            columns, place = self._joined(computed, missing)
            self._keep(request, columns, place, missing)
            owners, details = _key(request)
            request.engine.cache.grown((computed, missing), "rows", owners, *details)
            return self._rows(columns, place, texts)

    def _joined(self, computed: Columns, texts: list[str]) -> tuple[Columns, dict[str, int]]:
        if not self._place:
            return computed, {text: row for row, text in enumerate(texts)}
        first = len(self._place)
        columns = {name: np.concatenate([self.columns[name], computed[name]]) for name in computed}
        return columns, self._place | {text: first + row for row, text in enumerate(texts)}

    def _keep(
        self,
        request: TableRequest,
        columns: Columns,
        place: dict[str, int],
        added: list[str],
    ) -> None:
        """Keep the rows that have an answer: a machine may yet be described."""
        if len(place) > _MOST_KEPT:
            self._forget()
            return
        answered = ~np.isnan(columns["step_time_s"])
        if not answered.all():
            texts = [text for text, row in place.items() if answered[row]]
            columns = {name: column[answered] for name, column in columns.items()}
            place = {text: row for row, text in enumerate(texts)}
        self.columns, self._place = columns, place
        if request.shared.profile is None:
            for machine in _machines(request, (text for text in added if text in place)):
                self._machines.setdefault(machine, named_profile(machine))

    def _forget_if_changed(self, request: TableRequest) -> None:
        try:
            if all(named_profile(name) is profile for name, profile in self._machines.items()):
                return
        except EstimatorError:  # its file is gone or damaged
            pass
        self._forget()

    def _forget(self) -> None:
        self.columns, self._place, self._machines = {}, {}, {}

    @staticmethod
    def _rows(columns: Columns, place: Mapping[str, int], texts: list[str]) -> Columns:
        rows = np.array([place[text] for text in texts], dtype=np.intp)
        return {name: column[rows] for name, column in columns.items()}


def _key(request: TableRequest) -> tuple[tuple[object, ...], tuple[Hashable, ...]]:
    """(objects, details) by which the engine's cache keeps the rows of a request."""
    shared = request.shared
    owners = (shared.graph, shared.cluster, shared.profile)
    batches: tuple[Any, ...] = (request.batch_per_gpu, request.global_batch)
    return owners, (
        *batches,
        shared.accumulation_steps,
        shared.strategy,
        shared.loader,
        shared.strict,
    )


def _machines(request: TableRequest, texts: Iterable[str]) -> set[str]:
    """The machines that allocations are on."""
    groups = {text.strip() for listed in texts for text in listed.split("+")}
    cluster, profiles = request.shared.cluster, set()
    for text in groups:
        group = Allocation.parse(text).groups[0]
        host = cluster.nodes[group.host] if cluster and group.host else None
        profiles.add(host.machine if host else group.machine or "")
    return profiles
