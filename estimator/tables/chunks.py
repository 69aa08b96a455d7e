"""Estimate any number of allocations in pieces, here or on the workers of an executor."""

from __future__ import annotations

import hashlib
import os
import pickle
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from dataclasses import replace
from itertools import islice
from typing import Any

from numpy.typing import NDArray

from estimator.coefficients import Calibration
from estimator.engine import DEFAULT, Engine
from estimator.errors import WorkloadError
from estimator.graph.op_graph import OpGraph
from estimator.machines.profile import MachineProfile
from estimator.placement.allocation import Allocation
from estimator.placement.columns import AllocationColumns
from estimator.placement.topology import Cluster
from estimator.tables.answers import Allocations, Question, RowAnswers
from estimator.tables.table import (
    EstimateTable,
    check_asked,
    columns_of,
    read_cluster,
    read_loader,
)
from estimator.workload import Strategy
from estimator.workload.loader import Loader

# Pieces sent ahead of the one that is waited for: all workers have work, and memory stays flat.
_IN_FLIGHT = 32
# Graphs that a thread of a worker keeps.
_MOST_KEPT = 8
_worker = threading.local()
_Columns = dict[str, NDArray[Any]]


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
        strategy=Strategy.parse(strategy),
        cluster=read_cluster(cluster),
        calibration=calibration,
        profile=profile,
        loader=read_loader(loader),
        engine=engine,
        strict=strict,
    )
    answers: RowAnswers | None = None
    questions = _questions(question, _pieces(allocations, rows))
    if executor is not None:
        yield from _elsewhere(question, questions, executor)
        return
    for asked in questions:
        answers = answers or RowAnswers(asked)
        yield EstimateTable(question=asked, **columns_of(asked, answers))


def _questions(question: Question, pieces: Iterable[Allocations]) -> Iterator[Question]:
    first = 0
    for piece in pieces:
        yield replace(question, allocations=piece, first_row=first)
        first += len(piece)


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


def _elsewhere(
    question: Question, questions: Iterator[Question], executor: Executor
) -> Iterator[EstimateTable]:
    """Tables from an executor's workers, in order."""
    try:
        # The engine is each worker's own.
        content = pickle.dumps(replace(question, engine=None))  # type: ignore[arg-type]
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise WorkloadError(
            f"the question cannot be sent to other processes ({error}); leave out executor"
        ) from None
    key, call = hashlib.sha256(content).hexdigest(), secrets.token_hex(8)
    waiting: deque[tuple[Question, Future[_Columns | None] | None]] = deque()
    is_broken = False

    def sent(asked: Question, with_content: bytes | None) -> Future[_Columns | None] | None:
        nonlocal is_broken
        if is_broken:
            return None
        try:
            return executor.submit(
                _worked_out, key, call, with_content, asked.allocations, asked.first_row
            )
        except (BrokenExecutor, RuntimeError):
            is_broken = True
            return None

    for asked in islice(questions, _IN_FLIGHT):
        waiting.append((asked, sent(asked, None)))
    while waiting:
        asked, future = waiting.popleft()
        columns: _Columns | None = None
        try:
            if future is not None and (columns := future.result()) is None:
                again = sent(asked, content)
                columns = again.result() if again is not None else None
        except (BrokenExecutor, CancelledError):
            # A pool of processes ends with the first that dies: the rest is done here.
            is_broken = True
        following = next(questions, None)
        if following is not None:
            waiting.append((following, sent(following, None)))
        yield EstimateTable(question=asked, **(columns or columns_of(asked)))


def _worked_out(
    key: str, call: str, content: bytes | None, allocations: Allocations, first_row: int
) -> _Columns | None:
    """The columns of some allocations, on a worker; None where it has yet to be sent the graph.

    What is compiled holds for one call: machines may be probed anew before the next.
    """
    kept: OrderedDict[str, Question] = vars(_worker).setdefault("kept", OrderedDict())
    if key not in kept:
        if content is None:
            return None
        kept[key] = replace(pickle.loads(content), engine=DEFAULT)
        if len(kept) > _MOST_KEPT:
            kept.popitem(last=False)
    question = replace(kept[key], allocations=allocations, first_row=first_row)
    if vars(_worker).get("call") != call:
        _worker.call, _worker.answers = call, RowAnswers(question)
    return columns_of(question, _worker.answers)
