"""Estimate many allocations as a table of columns; each row equals `estimate` of it."""

from __future__ import annotations

import csv
import hashlib
import importlib
import io
import operator
import os
import pickle
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack

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
from estimator.estimates.table.request import Allocations, TableRequest, kept_columns
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.profile import MachineProfile
from estimator.placement.allocation import Allocation
from estimator.placement.columns import AllocationColumns, AllocationGrid
from estimator.placement.topology import Cluster
from estimator.timeline.plan import BOTTLENECKS
from estimator.workload.layouts import Layout
from estimator.workload.loader import Loader
from estimator.workload.strategies import MOST_GLOBAL_BATCH, Strategy, check_count


def row_number(row: Any, rows: int) -> int:
    """One row of a table of so many, from 0 on; raises RowError where there is none."""
    chosen = chosen_rows(row, rows)
    if not isinstance(chosen, int):
        raise _no_such(row, rows)
    return chosen


def chosen_rows(index: Any, rows: int) -> int | slice | Indices:
    """A row of so many from 0 on, a slice, or rows of several or a mask; raises RowError."""
    try:
        if isinstance(index, slice):
            index.indices(rows)
            return index
        if np.ndim(index) == 0 and not isinstance(index, bool):
            return range(rows)[operator.index(index)]
        several = np.asarray(index)
        if several.ndim == 1:
            kept = several if len(several) else several.astype(np.intp)
            return np.asarray(np.arange(rows)[kept])
    except (IndexError, TypeError, ValueError):
        pass
    raise _no_such(index, rows)


def _no_such(index: Any, rows: int) -> RowError:
    return RowError(
        f"the table has {rows:,} rows, found row {quoted(index)}; give numbers below {rows:,}, a "
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

    >>> import estimator as est, torch
    >>> graph = est.trace_model(torch.nn.Linear(8, 8), torch.randn(4, 8), target="cuda")
    >>> table = est.estimate_many(graph, ["1x1:t4-g4dn", "2x4:t4-g4dn"])
    >>> table.ranks.tolist(), len(table[1:]), table[1].ranks
    ([1, 8], 1, 8)
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


class TableOptions(TypedDict, total=False):
    """How all rows are trained, as `estimator.estimate` takes it; `cluster` may be a path."""

    accumulation_steps: int
    strategy: str | Strategy
    cluster: Cluster | str | os.PathLike[str] | None
    calibration: Calibration | None
    profile: MachineProfile | None
    loader: Loader | str | None


def estimate_many(
    graph: OpGraph,
    allocations: Allocations | Iterable[str | Allocation],
    *,
    batch_per_gpu: int | Integers | None = None,
    global_batch: int | Integers | None = None,
    layout: str | Layout | Sequence[str | Layout | None] | None = None,
    engine: Engine = DEFAULT,
    strict: bool = False,
    **options: Unpack[TableOptions],
) -> EstimateTable:
    """Predict the step of a traced graph on many allocations, each as `estimate` would.

    `allocations` are texts or `Allocation`s in any iterable, or `AllocationColumns`;
    `batch_per_gpu`, `global_batch` and `layout` one for all, or one for each of them (rows whose
    ranks share layers or hold stages are estimated one by one); other `options` are those of
    `estimate`. Rows that cannot be answered are NaN, and `errors` of the table says why; with
    `strict` the first of them raises what `estimate` raises, with its number, and so does a global
    batch that ranks cannot share evenly.

    >>> import estimator as est, torch
    >>> graph = est.trace_model(torch.nn.Linear(8, 8), torch.randn(4, 8), target="cuda")
    >>> table = est.estimate_many(graph, ["1x1:t4-g4dn", "1x9:t4-g4dn"], batch_per_gpu=[4, 8])
    >>> table.step_time_s[0] > 0, sorted(table.errors)
    (np.True_, [1])
    """
    check_several(allocations)
    if not isinstance(allocations, Sequence | AllocationColumns):
        allocations = list(allocations)
    request = TableRequest(
        shared=_shared(graph, options, strict),
        allocations=allocations,
        batch_per_gpu=_checked_batches(batch_per_gpu, len(allocations)),
        global_batch=_checked_batches(global_batch, len(allocations)),
        layouts=checked_layouts(layout, len(allocations), graph),
        engine=engine,
        strict=strict,
    )
    table = EstimateTable(request=request, **kept_columns(request, columns_of))
    if strict and table.errors:
        request.refuse(next(iter(table.errors)))
    return table


def _shared(graph: OpGraph, options: TableOptions, strict: bool) -> EstimateRequest:
    """What all rows have in common."""
    cluster = Cluster.given(options.get("cluster"))
    known: Any = {**options, "cluster": cluster, "strict": strict}
    if known.get("neighbours"):
        raise WorkloadError("a table has no neighbours; ask 'estimate' about one allocation")
    return EstimateRequest.of(graph, **known)


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
    read = [None if layout is None else Layout.parse(layout) for layout in layouts]
    if graph.layout is not None:
        read = [agreed_layout(graph, layout) for layout in read]
    return tuple(None if layout is None or layout.is_data_parallel else layout for layout in read)


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


Shared = TypeVar("Shared")
Item = TypeVar("Item")
Result = TypeVar("Result")
# Of (what is shared, what a worker keeps between the items of one call, an item).
Work = Callable[[Shared, dict[str, Any], Item], Result]

# Items sent ahead of the one that is waited for: all workers have work, and memory stays flat.
_IN_FLIGHT = 32
# Questions that a thread of a worker keeps.
_MOST_KEPT = 8
_worker = threading.local()


def map_shared(
    executor: Executor | None,
    work: Work[Shared, Item, Result],
    shared: Shared,
    items: Iterable[Item],
) -> Iterator[tuple[Item, Result]]:
    """(item, work of it) in order, on an executor's workers or here without one.

    Items are taken as they are sent, some ahead. What is `shared` is sent to each worker once,
    however many items and calls there are; what a worker keeps holds for one call: machines may be
    probed anew before the next. What a worker that died had is done again. Raises WorkloadError
    where `shared` cannot be pickled, and what `work` raises.
    """
    kept: dict[str, Any] = {}
    if executor is None:
        for item in items:
            yield item, work(shared, kept, item)
        return
    try:
        content = pickle.dumps(shared)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise WorkloadError(
            f"the question cannot be sent to other processes ({error}); leave out executor"
        ) from None
    sender = _Sender(executor, work, hashlib.sha256(content).hexdigest())
    remaining = iter(items)
    waiting = deque((item, sender.sent(item, None)) for item in islice(remaining, _IN_FLIGHT))
    while waiting:
        item, future = waiting.popleft()
        result = sender.result(future)
        if result is None and future is not None:
            result = sender.result(sender.sent(item, content))
        yield item, result[0] if result is not None else work(shared, kept, item)
        for following in islice(remaining, 1):
            waiting.append((following, sender.sent(following, None)))


class _Sender:
    """Sends items to the workers of an executor until it breaks."""

    def __init__(self, executor: Executor, work: Work[Any, Any, Any], key: str) -> None:
        self._executor, self._work, self._key = executor, work, key
        self._call = secrets.token_hex(8)
        self._is_broken = False

    def sent(self, item: Any, content: bytes | None) -> Future[tuple[Any] | None] | None:
        if self._is_broken:
            return None
        try:
            return self._executor.submit(
                _worked_out, self._work, self._key, self._call, content, item
            )
        except (BrokenExecutor, RuntimeError):
            self._is_broken = True
            return None

    def result(self, future: Future[tuple[Any] | None] | None) -> tuple[Any] | None:
        """What came back; None where the worker lacks the question, or is no more."""
        try:
            return None if future is None else future.result()
        except (BrokenExecutor, CancelledError):
            # A pool of processes ends with the first that dies: the rest is done here.
            self._is_broken = True
            return None


def _worked_out(
    work: Work[Any, Any, Any], key: str, call: str, content: bytes | None, item: Any
) -> tuple[Any] | None:
    """The work of an item, on a worker; None where it has yet to be sent what is shared."""
    shared: OrderedDict[str, Any] = vars(_worker).setdefault("shared", OrderedDict())
    if key not in shared:
        if content is None:
            return None
        shared[key] = pickle.loads(content)
        if len(shared) > _MOST_KEPT:
            shared.popitem(last=False)
    if vars(_worker).get("call") != call:
        _worker.call, _worker.kept = call, {}
    return (work(shared[key], _worker.kept, item),)


Reduced = TypeVar("Reduced")


class _GridRows(NamedTuple):
    """So many rows of a grid."""

    grid: AllocationGrid
    rows: int


# Allocations, and how many came before them.
_Piece = tuple[Allocations | _GridRows, int]


def estimate_chunks(
    graph: OpGraph,
    allocations: Iterable[str | Allocation] | AllocationColumns | AllocationGrid,
    *,
    rows: int = 1 << 16,
    batch_per_gpu: int | None = None,
    global_batch: int | None = None,
    engine: Engine = DEFAULT,
    strict: bool = False,
    executor: Executor | None = None,
    reduce: Callable[[EstimateTable], Reduced] | None = None,
    **options: Unpack[TableOptions],
) -> Iterator[Any]:
    """The table of `estimate_many` in pieces of `rows` rows: memory stays flat for any number.

    `allocations` may be an iterator of texts, or an `AllocationGrid`, which is counted where it is
    worked out; all have the same batch. With an `executor` (a process pool, ``dask.distributed``'s
    ``Client.get_executor()``, ``mpi4py.futures``) pieces are worked out on its workers, each of
    which is sent the graph once, and come in the same order; what a worker that died had is done
    again. Of each piece `reduce` makes what comes instead of its table, such as its best row: on
    the worker, so that columns do not travel.

    >>> import estimator as est, torch
    >>> graph = est.trace_model(torch.nn.Linear(8, 8), torch.randn(4, 8), target="cuda")
    >>> grid = est.AllocationGrid("1..3x1..4:t4-g4dn")
    >>> [len(table) for table in est.estimate_chunks(graph, grid, rows=5)]
    [5, 5, 2]
    """
    is_grid = isinstance(allocations, AllocationGrid)
    check_several(() if is_grid else allocations)
    if type(rows) is not int or rows < 1:
        raise WorkloadError(f"rows is {quoted(rows)}; write a number of rows from 1")
    if reduce is not None and not callable(reduce):
        raise WorkloadError(f"reduce is {quoted(reduce)}; give a function of a table, or None")
    request = TableRequest(
        shared=_shared(graph, options, strict),
        allocations=(),
        batch_per_gpu=batch_per_gpu,
        global_batch=global_batch,
        engine=engine,
        strict=strict,
    )
    # The engine is each worker's own.
    shared = request if executor is None else replace(request, engine=None)  # type: ignore[arg-type]
    work = partial(_piece_answer, reduce)
    answers = map_shared(executor, work, shared, _pieces(allocations, rows))
    if reduce is not None:
        return (reduced for _, reduced in answers)
    return (
        EstimateTable(request=_of_piece(request, piece), **columns) for piece, columns in answers
    )


def _pieces(
    allocations: Iterable[str | Allocation] | AllocationColumns | AllocationGrid, rows: int
) -> Iterator[_Piece]:
    if isinstance(allocations, AllocationGrid):
        for start in range(0, len(allocations), rows):
            yield _GridRows(allocations, rows), start
        return
    if isinstance(allocations, AllocationColumns):
        for start in range(0, len(allocations), rows):
            yield allocations[start : start + rows], start
        return
    remaining, first = iter(allocations), 0
    while piece := list(islice(remaining, rows)):
        yield piece, first
        first += len(piece)


def _of_piece(request: TableRequest, piece: _Piece) -> TableRequest:
    """The question about the allocations of a piece; a worker has an engine of its own.

    The ranks of a module that was divided before it was traced are laid out so.
    """
    allocations, first = piece
    if isinstance(allocations, _GridRows):
        allocations = allocations.grid[first : first + allocations.rows]
    return replace(
        request,
        allocations=allocations,
        first_row=first,
        layouts=checked_layouts(None, len(allocations), request.shared.graph),
        engine=request.engine or DEFAULT,
    )


def _piece_answer(
    reduce: Callable[[EstimateTable], Any] | None,
    request: TableRequest,
    kept: dict[str, Any],
    piece: _Piece,
) -> Any:
    """What is made of a piece's table, else its columns, on a worker.

    `kept` has what the pieces before compiled.
    """
    own = _of_piece(request, piece)
    if "answers" not in kept:
        kept["answers"] = RowAnswers(own)
    columns = columns_of(own, kept["answers"])
    return columns if reduce is None else reduce(EstimateTable(request=own, **columns))
