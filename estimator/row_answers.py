"""Fill the columns of a table of estimates, some thousand allocations at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimator.accuracy import Z_80
from estimator.allocation import Allocation
from estimator.coefficients import Calibration, StepQuestion
from estimator.columns import AllocationColumns, TextReader
from estimator.errors import EstimatorError
from estimator.estimates import (
    MODEL_ERROR,
    NOT_FIT_MARGIN_RATIO,
    OVERLAP_ERROR,
    Estimate,
    StepEngine,
    estimate_graph,
)
from estimator.graph.ops import OpGraph
from estimator.placed_columns import PlacedColumns, SiteTable, place_columns
from estimator.profile import MachineProfile
from estimator.timeline.program import COPIES_ERROR, MEDIAN_TO_SIGMA
from estimator.timeline.vectorised import Learnt, StepColumns, StepTables
from estimator.topology import Cluster
from estimator.workload import Strategy

Array = NDArray[np.float64]
Integers = NDArray[np.integer]
Indices = NDArray[np.intp]
Allocations = Sequence[str | Allocation] | AllocationColumns
Columns = Mapping[str, NDArray[np.generic]]

FITS = ("no", "uncertain", "yes")
# Rows, and nodes of all of them, worked on at once: their arrays stay in the caches.
_ROWS_AT_ONCE = 16384
_CELLS_AT_ONCE = 1 << 18
_PARTS = (
    "forward_s",
    "backward_s",
    "host_exposed_s",
    "communication_exposed_s",
    "straggler_s",
    "update_s",
    "copies_exposed_s",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """What is asked of every allocation: `estimate_graph`'s arguments; batches one each, or one.

    `first_row` is how many rows came before, in other pieces of the same question.
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
    first_row: int = 0

    def allocation(self, row: int) -> Allocation:
        """The allocation of a row; raises AllocationError."""
        if isinstance(self.allocations, AllocationColumns):
            return self.allocations.allocation(row)
        return Allocation.parse(self.allocations[row])

    def answer(self, row: int) -> Estimate:
        """The estimate of one row; raises what `estimate_graph` raises."""
        return estimate_graph(
            self.graph,
            self.allocation(row),
            batch_per_gpu=_of_row(self.batch_per_gpu, row),
            global_batch=_of_row(self.global_batch, row),
            accumulation_steps=self.accumulation_steps,
            strategy=self.strategy,
            cluster=self.cluster,
            calibration=self.calibration,
            profile=self.profile,
        )


def _of_row(value: int | Integers | None, row: int) -> int | None:
    return int(value[row]) if isinstance(value, np.ndarray) else value


class RowAnswers:
    """Answers questions that differ in their allocations and batches, compiling each class once."""

    def __init__(self, question: Question) -> None:
        self._graph, self._strategy = question.graph, question.strategy
        self._accumulation_steps = max(question.accumulation_steps, 1)
        self._sites = SiteTable(question.cluster, question.profile)
        self._reader = TextReader()
        self._steps: StepTables | None = None
        self._known_sites = 0

    def fill(self, question: Question, columns: Columns) -> None:
        """Write every row's estimate into `columns`; raises for the first row that has none."""
        if question.accumulation_steps < 1 and len(question.allocations):
            question.answer(0)
        for start, part in self._parts(question):
            answer_rows = _rows_at_once(part, question.cluster)
            for first in range(0, len(part), answer_rows):
                rows = slice(start + first, start + min(first + answer_rows, len(part)))
                found = self._answer(question, part[first : first + answer_rows], rows)
                for name, values in found.items():
                    columns[name][rows] = values

    def _parts(self, question: Question) -> Iterator[tuple[int, AllocationColumns]]:
        if isinstance(question.allocations, AllocationColumns):
            yield 0, question.allocations
        else:
            yield from self._reader.parts(question.allocations, first_row=question.first_row)

    def _answer(
        self, question: Question, part: AllocationColumns, rows: slice
    ) -> dict[str, NDArray[np.generic] | float]:
        placed = place_columns(part, self._sites)
        steps = self._tables()
        placed.wrong |= ~steps.runs[placed.site].all(axis=0)
        batch, wrong = self._batches(question, rows, placed)
        _raise_first(placed.wrong | wrong, rows.start, question)
        learnt, errors = self._learnt(question, placed, batch, rows.start)
        with np.errstate(divide="ignore", invalid="ignore"):
            step = steps.columns(placed, batch, learnt)
        _raise_first(step.unknown, rows.start, question)
        return self._columns(placed, batch, step, errors)

    def _tables(self) -> StepTables:
        """The tables of the sites met so far, laid out anew whenever there are more."""
        if self._steps is None or self._known_sites != len(self._sites.sites):
            self._known_sites = len(self._sites.sites)
            self._steps = StepTables(
                self._graph, self._sites, self._strategy, self._accumulation_steps
            )
        return self._steps

    def _batches(
        self, question: Question, rows: slice, placed: PlacedColumns
    ) -> tuple[Indices | int, NDArray[np.bool_] | bool]:
        """(batch of all rows or of each, 0 as traced; rows that have none)."""
        batch, whole = question.batch_per_gpu, question.global_batch
        if whole is not None:
            whole = whole[rows].astype(np.int64) if isinstance(whole, np.ndarray) else whole
            shares = np.maximum(placed.ranks, 1) * self._accumulation_steps
            wrong = (whole % shares != 0) | (np.asarray(whole) < 1) | (batch is not None)
            return np.asarray(whole // shares, dtype=np.intp), wrong
        if batch is None:
            return 0, False
        if isinstance(batch, np.ndarray):
            return batch[rows].astype(np.intp), batch[rows] < 1
        return batch, np.full(len(placed.ranks), batch < 1)

    def _learnt(
        self, question: Question, placed: PlacedColumns, batch: Indices | int, start: int
    ) -> tuple[Learnt, Array | None]:
        """What calibration has learnt of each row: its factors, and its relative errors (or NaN).

        Rows that calibration does not tell apart are asked for once.
        """
        if question.calibration is None:
            return Learnt(), None
        engine = StepEngine(graph=self._graph, cluster=question.cluster, profile=question.profile)
        names = sorted({site.profile.name for site in self._sites.sites})
        number_of = [names.index(site.profile.name) for site in self._sites.sites]
        has = np.zeros((len(names) + 1, len(placed.ranks)), dtype=np.bool_)
        for site in np.array([*number_of, len(names)])[placed.site]:
            has[site, np.arange(len(site))] = True
        sizes = np.where(np.equal(batch, 0), self._graph.batch or 0, batch)
        sizes = np.broadcast_to(sizes, placed.ranks.shape)
        columns = np.vstack([placed.ranks, placed.nodes, placed.busy.max(axis=0), sizes, has[:-1]])
        unlike, first, place = np.unique(columns, axis=1, return_index=True, return_inverse=True)
        questions = [
            StepQuestion(
                workload=self._graph.workload,
                machines="+".join(n for n, one in zip(names, machines, strict=True) if one),
                ranks=ranks,
                nodes=nodes,
                most_on_node=most_on_node,
                batch=float(size),
                accumulation_steps=self._accumulation_steps,
                strategy=self._strategy,
            )
            for ranks, nodes, most_on_node, size, *machines in unlike.T.tolist()
        ]
        allocations = [question.allocation(start + row) for row in first.tolist()]
        found = question.calibration.coefficients_for(questions, allocations, engine)
        place = place.reshape(-1)
        learnt = Learnt(
            compute_ratio=np.array([each.compute_ratio for each in found])[place],
            update_ratio=np.array([each.update_ratio for each in found])[place],
            communication_ratio=np.array([each.communication_ratio for each in found])[place],
        )
        return learnt, np.array([each.relative_error or np.nan for each in found])[place]

    def _columns(
        self,
        placed: PlacedColumns,
        batch: Indices | int,
        step: StepColumns,
        learnt_error: Array | None,
    ) -> dict[str, NDArray[np.generic] | float]:
        parts: dict[str, Array] = {name: getattr(step, name) for name in _PARTS}
        step_s = sum(parts.values(), np.zeros(1))
        error = _relative_error(step, step_s)
        if learnt_error is not None:
            error = np.where(np.isnan(learnt_error), error, learnt_error)
        spread = np.exp(Z_80 * error)
        sizes = np.where(np.equal(batch, 0), self._graph.batch or 0, batch)
        samples = sizes * (placed.ranks * self._accumulation_steps)
        has_batch = self._graph.batch is not None
        return parts | {
            "step_time_s": step_s,
            "low_s": step_s / spread,
            "high_s": step_s * spread,
            "samples_per_s": samples / step_s if has_batch else np.nan,
            "mfu_ratio": step.model_peak_s * self._accumulation_steps / step_s,
            "hfu_ratio": step.hardware_peak_s * self._accumulation_steps / step_s,
            "peak_memory_bytes": step.memory_bytes,
            "fits_code": _fits_code(step.memory_ratio, self._graph.knows_activations),
            "bottleneck_code": _bottleneck_code(step),
            "ranks": placed.ranks,
            "nodes": placed.nodes,
            "batch_per_gpu": sizes,
        }


def _rows_at_once(part: AllocationColumns, cluster: Cluster | None) -> int:
    width = part.site.shape[1]
    if cluster is not None and len(part):
        width = max(width, int(np.clip(part.nodes, 0, 1 << 20).sum(axis=1).max()))
    return int(max(min(_ROWS_AT_ONCE, _CELLS_AT_ONCE // max(width, 1)), 1))


def _raise_first(wrong: NDArray[np.bool_], start: int, question: Question) -> None:
    """Raise what `estimate` says of the first wrong row, with the row's number."""
    if not wrong.any():
        return
    row = start + int(wrong.argmax())
    try:
        question.answer(row)
    except EstimatorError as error:
        raise type(error)(f"row {question.first_row + row}: {error}") from None


def _relative_error(step: StepColumns, step_s: Array) -> Array:
    """One standard deviation of log(measured / predicted), as `estimates` has it of one row."""
    waiting_s = step.communication_exposed_s + step.straggler_s
    waiting_error = np.maximum(step.merging_error, OVERLAP_ERROR)
    squares = (
        (step.host_error * step.host_exposed_s) ** 2
        + (step.update_error * step.update_s) ** 2
        + (COPIES_ERROR * step.copies_exposed_s) ** 2
        + (waiting_error * waiting_s) ** 2
    )
    variance_s2 = step.kernels_variance_s2 + MEDIAN_TO_SIGMA**2 * squares
    return np.sqrt(variance_s2 / step_s**2 + MODEL_ERROR**2)


def _fits_code(used_ratio: Array, knows_all: bool) -> NDArray[np.uint8]:
    """Index into FITS; never "yes" where not all memory is known."""
    surely = (used_ratio <= 1 - 2 * NOT_FIT_MARGIN_RATIO) & knows_all
    perhaps = used_ratio <= 1 + NOT_FIT_MARGIN_RATIO
    return np.add(surely, perhaps, dtype=np.uint8)


def _bottleneck_code(step: StepColumns) -> NDArray[np.uint8]:
    """Index into BOTTLENECKS."""
    most = step.forward_s + step.backward_s
    code = np.zeros(len(most), dtype=np.uint8)
    for number, seconds in enumerate(
        (
            step.host_exposed_s,
            step.communication_exposed_s + step.copies_exposed_s,
            step.update_s,
            step.straggler_s,
        ),
        start=1,
    ):
        np.copyto(code, number, where=seconds > most)
        np.maximum(most, seconds, out=most)
    return code
