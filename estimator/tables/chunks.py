"""Estimate any number of allocations in pieces, here or on the workers of an executor."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import replace
from itertools import islice
from typing import Any

from numpy.typing import NDArray

from estimator.coefficients import Calibration
from estimator.engine import DEFAULT, Engine
from estimator.graph.op_graph import OpGraph
from estimator.graph.split_layout import agreed_strategy
from estimator.machines.profile import MachineProfile
from estimator.placement.allocation import Allocation
from estimator.placement.columns import AllocationColumns
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

# Allocations, and how many came before them.
_Piece = tuple[Allocations, int]


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
    strict: bool = False,
    executor: Executor | None = None,
) -> Iterator[EstimateTable]:
    """The table of `estimate_many` in pieces of `rows` rows: memory stays flat for any number.

    `allocations` may be an iterator of texts; all have the same batch. With an `executor` (a
    process pool, ``dask.distributed``'s ``Client.get_executor()``, ``mpi4py.futures``) pieces are
    worked out on its workers, each of which is sent the graph once, and come in the same order;
    what a worker that died had is done again.
    """
    check_asked(graph, allocations, profile, calibration)
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
    for piece, columns in map_shared(executor, _columns, shared, pieces):
        yield EstimateTable(question=_asked_of(question, piece), **columns)


def _pieces(
    allocations: Iterable[str | Allocation] | AllocationColumns, rows: int
) -> Iterator[_Piece]:
    if isinstance(allocations, AllocationColumns):
        for start in range(0, len(allocations), rows):
            yield allocations[start : start + rows], start
        return
    remaining, first = iter(allocations), 0
    while piece := list(islice(remaining, rows)):
        yield piece, first
        first += len(piece)


def _asked_of(question: Question, piece: _Piece) -> Question:
    """What is asked of a piece; the ranks of a module that was divided before are laid out so."""
    allocations, first = piece
    layouts = checked_layouts(None, len(allocations), question.graph)
    return replace(question, allocations=allocations, first_row=first, layouts=layouts)


def _columns(question: Question, kept: dict[str, Any], piece: _Piece) -> dict[str, NDArray[Any]]:
    """The columns of a piece; `kept` has what the pieces before it compiled."""
    asked = replace(_asked_of(question, piece), engine=question.engine or DEFAULT)
    if "answers" not in kept:
        kept["answers"] = RowAnswers(asked)
    return columns_of(asked, kept["answers"])
