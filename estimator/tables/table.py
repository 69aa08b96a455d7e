"""Estimate many allocations as a table of columns; each row equals `estimate` of it."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.coefficients import Calibration
from estimator.engine import DEFAULT, Engine
from estimator.errors import AllocationError, WorkloadError
from estimator.estimates import FITS, Estimate
from estimator.graph.op_graph import OpGraph
from estimator.loader import Loader
from estimator.machines.profile import MachineProfile
from estimator.placement.allocation import Allocation
from estimator.placement.columns import AllocationColumns
from estimator.placement.topology import Cluster
from estimator.tables.answers import Allocations, Integers, Question, RowAnswers
from estimator.timeline.step import BOTTLENECKS
from estimator.workload import MOST_GLOBAL_BATCH, Strategy, check_count

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class EstimateTable:
    """One estimate a row, as columns; see `Estimate` and `Breakdown` for what they mean.

    `fits_code` and `bottleneck_code` are indices into `FITS` and `BOTTLENECKS`. `batch_per_gpu` is
    0 for a graph without a batch size; rates are then NaN, MFU and HFU where no peak is known.
    """

    question: Question
    step_time_s: Array
    low_s: Array
    high_s: Array
    samples_per_s: Array
    mfu_ratio: Array
    hfu_ratio: Array
    peak_memory_bytes: NDArray[np.int64]
    fits_code: NDArray[np.uint8]
    bottleneck_code: NDArray[np.uint8]
    ranks: NDArray[np.int32]
    nodes: NDArray[np.int32]
    batch_per_gpu: NDArray[np.int32]
    forward_s: Array
    backward_s: Array
    host_exposed_s: Array
    communication_exposed_s: Array
    straggler_s: Array
    update_s: Array
    copies_exposed_s: Array
    idle_s: Array
    input_stall_s: Array

    def __repr__(self) -> str:
        model, columns = self.question.graph.name, ", ".join(self._shown())
        return f"EstimateTable({model}: {len(self)} rows, columns {columns})"

    def __len__(self) -> int:
        return len(self.step_time_s)

    def row(self, row: int) -> Estimate:
        """The full estimate of one row, with its assumptions, provenance and timeline."""
        return self.question.answer(range(len(self))[row])

    def allocation(self, row: int) -> Allocation:
        """The allocation that a row is about."""
        return self.question.allocation(range(len(self))[row])

    @property
    def fits(self) -> NDArray[np.str_]:
        """Whether each row fits into memory: ``yes``, ``no`` or ``uncertain``."""
        return np.array(FITS)[self.fits_code]

    @property
    def bottleneck(self) -> NDArray[np.str_]:
        """What each row spends most of its step on, one of `BOTTLENECKS`."""
        return np.array(BOTTLENECKS)[self.bottleneck_code]

    @property
    def global_batch(self) -> NDArray[np.int64]:
        """Samples of a step; 0 for a graph without a batch size."""
        per_rank = self.batch_per_gpu.astype(np.int64) * self.question.accumulation_steps
        return per_rank * self.ranks

    @property
    def tokens_per_s(self) -> Array:
        """Tokens a second; NaN for a model without tokens."""
        return self.samples_per_s * (self.question.graph.tokens_per_sample or np.nan)

    def order(self, by: str = "samples_per_s") -> NDArray[np.intp]:
        """Row numbers, best first: rows that fit or may fit, then by a column.

        Rates are better when high, anything else when low.
        """
        column = np.asarray(getattr(self, by), dtype=np.float64)
        rising = by.endswith(("_per_s", "mfu_ratio", "hfu_ratio"))
        return np.lexsort((-column if rising else column, self.fits_code == 0))

    def best(self, by: str = "samples_per_s") -> Estimate:
        """The full estimate of the best row; see `order`. Raises WorkloadError for no rows."""
        if not len(self):
            raise WorkloadError("the table has no rows; give at least one allocation")
        return self.row(int(self.order(by)[0]))

    def to_dict(self) -> dict[str, list[Any]]:
        """The columns as lists of plain values in base units, the allocations as text."""
        rows = range(len(self))
        plain: dict[str, list[Any]] = {"allocation": [str(self.allocation(row)) for row in rows]}
        for shown in self._shown():
            plain[shown] = getattr(self, shown).tolist()
        return plain

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


_TYPES: dict[str, type] = {
    "peak_memory_bytes": np.int64,
    "fits_code": np.uint8,
    "bottleneck_code": np.uint8,
    "ranks": np.int32,
    "nodes": np.int32,
    "batch_per_gpu": np.int32,
}
COLUMNS = tuple(item.name for item in fields(EstimateTable) if item.name != "question")


def estimate_many(
    graph: OpGraph,
    allocations: Allocations,
    *,
    batch_per_gpu: int | Integers | None = None,
    global_batch: int | Integers | None = None,
    accumulation_steps: int = 1,
    strategy: str | Strategy = "ddp",
    cluster: Cluster | str | os.PathLike[str] | None = None,
    calibration: Calibration | None = None,
    profile: MachineProfile | None = None,
    loader: Loader | str | None = None,
    engine: Engine = DEFAULT,
) -> EstimateTable:
    """Predict the step of a traced graph on many allocations, each as `estimate` would.

    `allocations` are texts, `Allocation`s or `AllocationColumns`; `batch_per_gpu` and
    `global_batch` one number, or an array with one for each allocation. A global batch is split
    evenly over the ranks of its row; a `loader` feeds every rank. Raises what `estimate` raises,
    naming the first row.
    """
    _check_graph(graph)
    _check_several(allocations)
    question = Question(
        graph=graph,
        allocations=allocations,
        batch_per_gpu=_checked_batches(batch_per_gpu, len(allocations)),
        global_batch=_checked_batches(global_batch, len(allocations)),
        accumulation_steps=accumulation_steps,
        strategy=Strategy.parse(strategy),
        cluster=_described(cluster),
        calibration=calibration,
        profile=profile,
        loader=_loader(loader),
        engine=engine,
    )
    return _table(question, RowAnswers(question))


def estimate_chunks(
    graph: OpGraph,
    allocations: Iterable[str | Allocation] | AllocationColumns,
    *,
    rows: int = 1 << 16,
    accumulation_steps: int = 1,
    strategy: str | Strategy = "ddp",
    batch_per_gpu: int | None = None,
    global_batch: int | None = None,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    calibration: Calibration | None = None,
    profile: MachineProfile | None = None,
    loader: Loader | str | None = None,
    engine: Engine = DEFAULT,
) -> Iterator[EstimateTable]:
    """The table of `estimate_many` in pieces of `rows` rows: memory stays flat for any number.

    `allocations` may be an iterator of texts; all have the same batch.
    """
    _check_graph(graph)
    _check_several(allocations)
    described, parsed, fed = _described(cluster), Strategy.parse(strategy), _loader(loader)
    answers: RowAnswers | None = None
    first = 0
    for piece in _pieces(allocations, rows):
        question = Question(
            graph=graph,
            allocations=piece,
            batch_per_gpu=batch_per_gpu,
            global_batch=global_batch,
            accumulation_steps=accumulation_steps,
            strategy=parsed,
            cluster=described,
            calibration=calibration,
            profile=profile,
            loader=fed,
            engine=engine,
            first_row=first,
        )
        answers = answers or RowAnswers(question)
        yield _table(question, answers)
        first += len(piece)


def _check_graph(graph: Any) -> None:
    if not isinstance(graph, OpGraph):
        raise WorkloadError(
            f"a table is of one OpGraph, found {type(graph).__name__}; make one with trace_model"
        )


def _check_several(allocations: Any) -> None:
    if isinstance(allocations, str | Allocation):
        raise AllocationError(
            f"allocations come in a list, found only '{allocations}'; write ['{allocations}']"
        )


def _described(cluster: Cluster | str | os.PathLike[str] | None) -> Cluster | None:
    return Cluster.load(cluster) if isinstance(cluster, str | os.PathLike) else cluster


def _loader(loader: Loader | str | None) -> Loader | None:
    return None if loader is None else Loader.parse(loader)


def _table(question: Question, answers: RowAnswers) -> EstimateTable:
    rows = len(question.allocations)
    columns: dict[str, NDArray[Any]] = {
        name: np.zeros(rows, _TYPES.get(name, np.float64)) for name in COLUMNS
    }
    answers.fill(question, columns)
    return EstimateTable(question=question, **columns)


def _pieces(
    allocations: Iterable[str | Allocation] | AllocationColumns, rows: int
) -> Iterator[Allocations]:
    if isinstance(allocations, AllocationColumns):
        for start in range(0, len(allocations), rows):
            yield allocations[start : start + rows]
        return
    remaining = iter(allocations)
    while piece := list(islice(remaining, rows)):
        yield piece


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
