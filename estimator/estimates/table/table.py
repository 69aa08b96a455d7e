"""Estimate many allocations as a table of columns; each row equals `estimate` of it."""

from __future__ import annotations

import csv
import importlib
import io
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.coefficients import Calibration
from estimator.elementwise import Array, Flags, Indices, Integers, Sizes
from estimator.errors import (
    AllocationError,
    EstimatorError,
    RowError,
    StrategyError,
    WorkloadError,
    quoted,
)
from estimator.estimates.engine import DEFAULT, Engine
from estimator.estimates.estimate import FITS, Estimate
from estimator.estimates.request import EstimateRequest, agreed_layout
from estimator.estimates.table.answers import RowAnswers
from estimator.estimates.table.request import Allocations, KnownRows, TableRequest
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.profile import MachineProfile
from estimator.placement.allocation import Allocation
from estimator.placement.columns import AllocationColumns
from estimator.placement.topology import Cluster
from estimator.timeline.step import BOTTLENECKS
from estimator.workload import MOST_GLOBAL_BATCH, Strategy, check_count
from estimator.workload.layouts import Layout
from estimator.workload.loader import Loader


def row_number(row: Any, rows: int) -> int:
    """One row of a table of so many, from 0 on; raises RowError where there is none."""
    chosen = chosen_rows(row, rows)
    if not isinstance(chosen, int):
        raise _no_such(row, rows)
    return chosen


def chosen_rows(asked: Any, rows: int) -> int | slice | Indices:
    """A row of so many from 0 on, a slice, or rows of several or a mask; raises RowError."""
    try:
        if isinstance(asked, slice):
            asked.indices(rows)
            return asked
        if np.ndim(asked) == 0 and not isinstance(asked, bool):
            return range(rows)[operator.index(asked)]
        several = np.asarray(asked)
        if several.ndim == 1:
            kept = several if len(several) else several.astype(np.intp)
            return np.asarray(np.arange(rows)[kept])
    except (IndexError, TypeError, ValueError):
        pass
    raise _no_such(asked, rows)


def _no_such(asked: Any, rows: int) -> RowError:
    return RowError(
        f"the table has {rows:,} rows, found row {quoted(asked)}; give numbers below {rows:,}, a "
        "mask of that length or a slice"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class EstimateTable:
    """One estimate a row, as columns; see `Estimate` and `Breakdown` for what they mean.

    `fits_code` and `bottleneck_code` are indices into `FITS` and `BOTTLENECKS`. `global_batch` is 0
    for a graph without a batch size, whose rates are NaN; `batch_per_gpu` also where groups have
    unlike batches. MFU and HFU are NaN where no peak is known. A row that cannot be answered is
    NaN, 0 in columns of integers; `errors` says why. Indexed with a row number, a table gives the
    full estimate; with a slice, row numbers or flags, a table of those rows.
    """

    request: TableRequest
    step_time_s: Array
    low_s: Array
    high_s: Array
    samples_per_s: Array
    mfu_ratio: Array
    hfu_ratio: Array
    peak_memory_bytes: Sizes
    fits_code: NDArray[np.uint8]
    bottleneck_code: NDArray[np.uint8]
    ranks: NDArray[np.int32]
    nodes: NDArray[np.int32]
    batch_per_gpu: NDArray[np.int32]
    global_batch: Sizes
    forward_s: Array
    backward_s: Array
    host_exposed_s: Array
    communication_exposed_s: Array
    straggler_s: Array
    update_s: Array
    copies_exposed_s: Array
    idle_s: Array
    input_stall_s: Array
    layer_communication_s: Array

    def __repr__(self) -> str:
        model, columns = self.request.shared.graph.name, ", ".join(self._shown())
        return f"EstimateTable({model}: {len(self)} rows, columns {columns})"

    def __len__(self) -> int:
        return len(self.step_time_s)

    def __iter__(self) -> Iterator[Estimate]:
        return (self.row(row) for row in range(len(self)))

    def __getitem__(self, rows: Any) -> Any:
        chosen = chosen_rows(rows, len(self))
        if isinstance(chosen, int):
            return self.request.answer(chosen)
        columns = {name: getattr(self, name)[chosen] for name in COLUMNS}
        return EstimateTable(request=self.request.rows(chosen), **columns)

    def row(self, row: int) -> Estimate:
        """The full estimate of one row, with its assumptions, provenance and timeline.

        Raises RowError where there is no such row, and what `estimate` raises where it has none.
        """
        return self.request.answer(row_number(row, len(self)))

    def allocation(self, row: int) -> Allocation:
        """The allocation that a row is about; raises RowError where there is no such row."""
        return self.request.allocation(row_number(row, len(self)))

    @property
    def answered(self) -> Flags:
        """Which rows have an answer."""
        return ~np.isnan(self.step_time_s)

    @property
    def errors(self) -> RowErrors:
        """Why rows have no answer: a sentence by row number, made when looked up."""
        return RowErrors(self)

    @property
    def fits(self) -> NDArray[np.str_]:
        """Whether each row fits into memory: ``yes``, ``no``, ``uncertain``; empty if unknown."""
        return np.where(self.answered, np.array(FITS)[self.fits_code], "")

    @property
    def bottleneck(self) -> NDArray[np.str_]:
        """What each row spends most of its step on, one of `BOTTLENECKS`; empty if unknown."""
        return np.where(self.answered, np.array(BOTTLENECKS)[self.bottleneck_code], "")

    @property
    def tokens_per_s(self) -> Array:
        """Tokens a second; NaN for a model without tokens."""
        return self.samples_per_s * (self.request.shared.graph.tokens_per_sample or np.nan)

    def order(self, by: str = "samples_per_s") -> Indices:
        """Row numbers, best first: rows that fit or may fit, then by a column.

        Rates are better when high, anything else when low. Rows without an answer come last.
        """
        column = np.asarray(getattr(self, by), dtype=np.float64)
        rising = by.endswith(("_per_s", "mfu_ratio", "hfu_ratio"))
        return np.lexsort((-column if rising else column, self.fits_code == 0, ~self.answered))

    def best(self, by: str = "samples_per_s") -> Estimate:
        """The full estimate of the best row; see `order`.

        Raises WorkloadError for no rows, and what `estimate` raises where no row has an answer.
        """
        if not len(self):
            raise WorkloadError("the table has no rows; give at least one allocation")
        return self.row(int(self.order(by)[0]))

    def to_dict(self) -> dict[str, list[Any]]:
        """The columns as lists of plain values in base units, allocations and errors as text."""
        return {
            name: column.tolist() if isinstance(column, np.ndarray) else column
            for name, column in self._named().items()
        }

    def to_pandas(self) -> Any:
        """The columns of `to_dict` as a DataFrame; raises WorkloadError where pandas is missing."""
        return _library("pandas", "pandas").DataFrame(self._named())

    def to_arrow(self) -> Any:
        """The columns of `to_dict` as a pyarrow Table; raises WorkloadError where it is missing."""
        return _library("pyarrow", "pyarrow").table(self._named())

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def _named(self) -> dict[str, Any]:
        errors = self.errors
        rows = range(len(self))
        return {
            "allocation": [self.request.text(row) for row in rows],
            **{name: getattr(self, name) for name in self._shown()},
            "error": [errors.get(row) for row in rows],
        }

    def _shown(self) -> list[str]:
        """The columns by the names under which they hold words or numbers for people."""
        return [name.removesuffix("_code") for name in COLUMNS]

    def to_csv(self) -> str:
        """The columns of `to_dict` as comma-separated text with a header."""
        plain = self.to_dict()
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(plain)
        writer.writerows(zip(*plain.values(), strict=True))
        return text.getvalue()


class RowErrors(Mapping[int, str]):
    """Why rows of a table have no answer, by row number; a row is asked again when looked up."""

    def __init__(self, table: EstimateTable) -> None:
        self._table, self._empty = table, ~table.answered

    def __getitem__(self, row: int) -> str:
        try:
            is_empty = row >= 0 and self._empty[operator.index(row)]
        except (IndexError, TypeError):
            is_empty = False
        if not is_empty:
            raise KeyError(row)
        try:
            self._table.row(row)
        except EstimatorError as error:
            return str(error)
        return "it could not be answered when the table was made; ask for the table again"

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self._empty).tolist())

    def __len__(self) -> int:
        return int(self._empty.sum())

    def __repr__(self) -> str:
        first = next(iter(self), None)
        shown = "" if first is None else f", the first {first}: {self[first]}"
        return f"RowErrors({len(self)} of {len(self._empty)} rows{shown})"


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise WorkloadError(
            f"a table becomes one of {package} only where that is installed; install {package}, "
            "or use to_dict()"
        ) from None


_TYPES: dict[str, type] = {
    "peak_memory_bytes": np.int64,
    "fits_code": np.uint8,
    "bottleneck_code": np.uint8,
    "ranks": np.int32,
    "nodes": np.int32,
    "batch_per_gpu": np.int32,
    "global_batch": np.int64,
}
COLUMNS = tuple(item.name for item in fields(EstimateTable) if item.name != "request")


def estimate_many(
    graph: OpGraph,
    allocations: Allocations | Iterable[str | Allocation],
    *,
    batch_per_gpu: int | Integers | None = None,
    global_batch: int | Integers | None = None,
    accumulation_steps: int = 1,
    strategy: str | Strategy = "ddp",
    layout: str | Layout | Sequence[str | Layout | None] | None = None,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    calibration: Calibration | None = None,
    profile: MachineProfile | None = None,
    loader: Loader | str | None = None,
    engine: Engine = DEFAULT,
    strict: bool = False,
) -> EstimateTable:
    """Predict the step of a traced graph on many allocations, each as `estimate` would.

    `allocations` are texts or `Allocation`s in any iterable, or `AllocationColumns`;
    `batch_per_gpu`, `global_batch` and `layout` one for all, or one for each of them (rows whose
    ranks share layers or hold stages are estimated one by one); a `loader` feeds every rank. Rows
    that cannot be answered are NaN, and `errors` of the table says why; with `strict` the first of
    them raises what `estimate` raises, with its number.
    """
    check_several(allocations)
    if not isinstance(allocations, Sequence | AllocationColumns):
        allocations = list(allocations)
    shared = EstimateRequest.of(
        graph,
        accumulation_steps=accumulation_steps,
        strategy=strategy,
        cluster=Cluster.given(cluster),
        calibration=calibration,
        profile=profile,
        loader=loader,
    )
    request = TableRequest(
        shared=shared,
        allocations=allocations,
        batch_per_gpu=_checked_batches(batch_per_gpu, len(allocations)),
        global_batch=_checked_batches(global_batch, len(allocations)),
        layouts=checked_layouts(layout, len(allocations), graph),
        engine=engine,
        strict=strict,
    )
    known = KnownRows.of(request)
    if known is None:
        return EstimateTable(request=request, **columns_of(request))
    table = EstimateTable(request=request, **known.table(request, columns_of))
    if strict and table.errors:
        request.refuse(next(iter(table.errors)))
    return table


def check_several(allocations: Any) -> None:
    """Raise AllocationError for what is no list of allocations."""
    if isinstance(allocations, str | Allocation):
        raise AllocationError(
            f"allocations come in a list, found only '{allocations}'; write ['{allocations}']"
        )
    if isinstance(allocations, bytes) or not isinstance(allocations, Iterable | AllocationColumns):
        raise AllocationError(
            f"allocations come in a list, found {quoted(allocations)}; write one such as "
            "['1x2:local']"
        )


def columns_of(request: TableRequest, answers: RowAnswers | None = None) -> dict[str, NDArray[Any]]:
    """The columns of a table of a question."""
    rows = len(request.allocations)
    columns: dict[str, NDArray[Any]] = {
        name: np.zeros(rows, _TYPES[name]) if name in _TYPES else np.full(rows, np.nan)
        for name in COLUMNS
    }
    (answers or RowAnswers(request)).fill(request, columns)
    return columns


def checked_layouts(
    layouts: Any, allocations: int, graph: OpGraph
) -> tuple[Layout | None, ...] | None:
    """One for each allocation, None where all ranks are data-parallel; raises StrategyError."""
    layouts = graph.layout if layouts is None else layouts
    if layouts is None:
        return None
    if isinstance(layouts, str | Layout):
        layouts = [layouts] * allocations
    if not isinstance(layouts, Sequence) or len(layouts) != allocations:
        raise StrategyError(
            f"layouts are one text or one for each of {allocations} allocations, found "
            f"{quoted(layouts)}; write such as 'tp=2,dp=*'"
        )
    read = [None if each is None else Layout.parse(each) for each in layouts]
    if graph.layout is not None:
        read = [agreed_layout(graph, each) for each in read]
    return tuple(None if each is None or each.is_data_parallel else each for each in read)


def _checked_batches(batches: Any, allocations: int) -> int | Integers | None:
    if batches is None:
        return None
    if isinstance(batches, str) or not isinstance(batches, np.ndarray | Sequence):
        # One that is too small is told with its row.
        if isinstance(batches, int) and batches < 1:
            return batches
        return check_count(batches, most=MOST_GLOBAL_BATCH)
    column = np.asarray(batches)
    if column.shape != (allocations,) or column.dtype.kind not in "iu":
        raise WorkloadError(
            f"batches are {column.dtype} of shape {column.shape} for {allocations} allocations; "
            "give one integer, or one for each allocation"
        )
    return column
