"""Estimate any number of allocations in pieces, here or on the workers of an executor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from numpy.typing import NDArray

from estimator.coefficients import Calibration
from estimator.engine import DEFAULT, Engine
from estimator.errors import WorkloadError, quoted
from estimator.graph.op_graph import OpGraph
from estimator.graph.split_layout import agreed_strategy
from estimator.machines.profile import MachineProfile
from estimator.placement.allocation import Allocation
from estimator.placement.columns import AllocationColumns
from estimator.placement.grid import AllocationGrid
from estimator.placement.topology import Cluster
from estimator.tables.answers import RowAnswers
from estimator.tables.question import Allocations, Question
from estimator.tables.table import (
    EstimateTable,
    check_asked,
    checked_layouts,
    columns_of,
    read_cluster,
    read_loader,
)
from estimator.tables.workers import map_shared
from estimator.workload import Strategy
from estimator.workload.loader import Loader

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
    accumulation_steps: int = 1,
    strategy: str | Strategy = "ddp",
    batch_per_gpu: int | None = None,
    global_batch: int | None = None,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    calibration: Calibration | None = None,
    profile: MachineProfile | None = None,
    loader: Loader | str | None = None,
    engine: Engine = DEFAULT,
    strict: bool = False,
    executor: Executor | None = None,
    reduce: Callable[[EstimateTable], Reduced] | None = None,
) -> Iterator[Any]:
    """The table of `estimate_many` in pieces of `rows` rows: memory stays flat for any number.

    `allocations` may be an iterator of texts, or an `AllocationGrid`, which is counted where it is
    worked out; all have the same batch. With an `executor` (a process pool, ``dask.distributed``'s
    ``Client.get_executor()``, ``mpi4py.futures``) pieces are worked out on its workers, each of
    which is sent the graph once, and come in the same order; what a worker that died had is done
    again. Of each piece `reduce` makes what comes instead of its table, such as its best row: on
    the worker, so that columns do not travel.
    """
    is_grid = isinstance(allocations, AllocationGrid)
    check_asked(graph, () if is_grid else allocations, profile, calibration)
    if type(rows) is not int or rows < 1:
        raise WorkloadError(f"rows is {quoted(rows)}; write a number of rows from 1")
    if reduce is not None and not callable(reduce):
        raise WorkloadError(f"reduce is {quoted(reduce)}; give a function of a table, or None")
    question = Question(
        graph=graph,
        allocations=(),
        batch_per_gpu=batch_per_gpu,
        global_batch=global_batch,
        accumulation_steps=accumulation_steps,
        strategy=agreed_strategy(graph, strategy),
        cluster=read_cluster(cluster),
        calibration=calibration,
        profile=profile,
        loader=read_loader(loader),
        engine=engine,
        strict=strict,
    )
    # The engine is each worker's own.
    shared = question if executor is None else replace(question, engine=None)  # type: ignore[arg-type]
    pieces = _pieces(allocations, rows)
    if reduce is not None:
        work = partial(_reduced, reduce)
        return (found for _, found in map_shared(executor, work, shared, pieces))
    return (
        EstimateTable(question=_asked(question, piece), **columns)
        for piece, columns in map_shared(executor, _columns, shared, pieces)
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


def _asked(question: Question, piece: _Piece) -> Question:
    """The question about the allocations of a piece; a worker has an engine of its own.

    The ranks of a module that was divided before it was traced are laid out so.
    """
    allocations, first = piece
    if isinstance(allocations, _GridRows):
        allocations = allocations.grid[first : first + allocations.rows]
    return replace(
        question,
        allocations=allocations,
        first_row=first,
        layouts=checked_layouts(None, len(allocations), question.graph),
        engine=question.engine or DEFAULT,
    )


def _columns(question: Question, kept: dict[str, Any], piece: _Piece) -> dict[str, NDArray[Any]]:
    """The columns of a piece, on a worker."""
    return _answers(_asked(question, piece), kept)


def _reduced(
    reduce: Callable[[EstimateTable], Reduced],
    question: Question,
    kept: dict[str, Any],
    piece: _Piece,
) -> Reduced:
    """What is made of a piece's table, on a worker."""
    asked = _asked(question, piece)
    return reduce(EstimateTable(question=asked, **_answers(asked, kept)))


def _answers(asked: Question, kept: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """All columns; `kept` has what the pieces before compiled."""
    if "answers" not in kept:
        kept["answers"] = RowAnswers(asked)
    return columns_of(asked, kept["answers"])
