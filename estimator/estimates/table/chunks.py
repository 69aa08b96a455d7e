"""Estimate any number of allocations in pieces, here or on the workers of an executor."""

from __future__ import annotations

import hashlib
import os
import pickle
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from numpy.typing import NDArray

from estimator.coefficients import Calibration
from estimator.errors import WorkloadError, quoted
from estimator.estimates.engine import DEFAULT, Engine
from estimator.estimates.request import EstimateRequest
from estimator.estimates.table.answers import RowAnswers
from estimator.estimates.table.request import Allocations, TableRequest
from estimator.estimates.table.table import (
    EstimateTable,
    check_several,
    checked_layouts,
    columns_of,
)
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.profile import MachineProfile
from estimator.placement.allocation import Allocation
from estimator.placement.columns import AllocationColumns, AllocationGrid
from estimator.placement.topology import Cluster
from estimator.workload import Strategy
from estimator.workload.loader import Loader

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
        found = sender.result(future)
        if found is None and future is not None:
            found = sender.result(sender.sent(item, content))
        yield item, found[0] if found is not None else work(shared, kept, item)
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
    check_several(() if is_grid else allocations)
    if type(rows) is not int or rows < 1:
        raise WorkloadError(f"rows is {quoted(rows)}; write a number of rows from 1")
    if reduce is not None and not callable(reduce):
        raise WorkloadError(f"reduce is {quoted(reduce)}; give a function of a table, or None")
    request = TableRequest(
        shared=EstimateRequest.of(
            graph,
            accumulation_steps=accumulation_steps,
            strategy=strategy,
            cluster=Cluster.given(cluster),
            calibration=calibration,
            profile=profile,
            loader=loader,
        ),
        allocations=(),
        batch_per_gpu=batch_per_gpu,
        global_batch=global_batch,
        engine=engine,
        strict=strict,
    )
    # The engine is each worker's own.
    shared = request if executor is None else replace(request, engine=None)  # type: ignore[arg-type]
    pieces = _pieces(allocations, rows)
    if reduce is not None:
        work = partial(_reduced, reduce)
        return (found for _, found in map_shared(executor, work, shared, pieces))
    return (
        EstimateTable(request=_of_piece(request, piece), **columns)
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


def _columns(request: TableRequest, kept: dict[str, Any], piece: _Piece) -> dict[str, NDArray[Any]]:
    """The columns of a piece, on a worker."""
    return _answers(_of_piece(request, piece), kept)


def _reduced(
    reduce: Callable[[EstimateTable], Reduced],
    request: TableRequest,
    kept: dict[str, Any],
    piece: _Piece,
) -> Reduced:
    """What is made of a piece's table, on a worker."""
    own = _of_piece(request, piece)
    return reduce(EstimateTable(request=own, **_answers(own, kept)))


def _answers(request: TableRequest, kept: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """All columns; `kept` has what the pieces before compiled."""
    if "answers" not in kept:
        kept["answers"] = RowAnswers(request)
    return columns_of(request, kept["answers"])
