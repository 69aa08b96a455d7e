"""Compute the steps of many rows at once, and fill the columns of a table in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.cache import Cache
from estimator.coefficients import StepQuestion
from estimator.elementwise import Array, Flags, Indices
from estimator.errors import EstimatorError
from estimator.estimates.engine import TrialEngine
from estimator.estimates.estimate import (
    FITS,
    Estimate,
    bottleneck_code,
    fits_code,
    interval_ratio,
    relative_error,
)
from estimator.estimates.table.placed import (
    MachineTable,
    PlacedColumns,
    RankClassTable,
    hold_whole_replicas,
    nested_groups,
)
from estimator.estimates.table.request import TableRequest
from estimator.graph.ir.op_graph import OpGraph
from estimator.kernels.durations import why_not_on
from estimator.placement.columns import AllocationColumns, TextReader
from estimator.timeline.collectives.overlap import NO_OVERLAP
from estimator.timeline.plan import (
    UNCALIBRATED_RATIOS,
    Breakdown,
    Ratios,
    after_s,
    breakdown_of,
    with_input,
)
from estimator.timeline.rank.lanes import InputCosts
from estimator.timeline.rank.program import LaneCosts, RankColumns, largest
from estimator.timeline.rank.rules import (
    DP,
    DP_REPLICATE,
    DP_SHARD,
    Communication,
    Groups,
    Network,
    Ranks,
    StepShape,
)
from estimator.timeline.strategies import rules_of
from estimator.workload.strategies import MOST_BATCH


class StepRows:
    """The steps of one graph on the machines numbered so far.

    `runs` says which of them can run the graph's step.
    """

    def __init__(
        self, graph: OpGraph, machines: MachineTable, shape: StepShape, cache: Cache
    ) -> None:
        self._machines = machines
        self._kinds = RankClassTable(graph, machines, shape, cache)
        self._rules, self._loader = rules_of(graph, shape, cache), shape.loader
        self._network: Network | None = None
        able = [why_not_on(graph, profile) is None for profile in machines.profiles]
        self.runs = np.array([*able, True])

    def columns(
        self,
        placed: PlacedColumns,
        batch: Indices | int,
        ratios: Ratios,
        learnt_error: Array | None,
    ) -> tuple[dict[str, Any], Flags]:
        """(columns of rows that can be placed, the rows with a collective of unknown cost).

        `batch` is that of all rows or of each, 0 as traced; `learnt_error` what calibration leaves,
        NaN where it has learnt nothing. Replicas that are sharded apart have each a node of their
        own.
        """
        kind_of = self._kinds.indices(placed, batch)
        kinds, ranks = self._kinds.columns, placed.ranks
        shards, share = self._rules.shards(ranks), self._rules.update_share(ranks)
        slowest, lane_s = _first_largest(kind_of, kinds.length_s(kind_of, shards))
        last, _ = _first_largest(kind_of, after_s(kinds.update(kind_of), share, ratios))
        lane = _at_peak_together(kinds.lane(slowest), kinds, kind_of, placed)
        waits = self._communication(placed, kind_of, slowest, lane_s, ratios)
        parts = breakdown_of(
            lane,
            kinds.update(last),
            lane_s=lane_s,
            ranks=ranks,
            share=share,
            jitter_ratio=largest(kinds.jitter_ratio, kind_of),
            waiting_s=waits.exposed_s,
            ratios=ratios,
        )
        loader = self._loader
        if loader is not None:
            own_s, period_s = (largest(column, kind_of) for column in kinds.input)
            parts = with_input(parts, InputCosts(own_s, period_s))
        error = relative_error(
            parts,
            lane,
            ratios.compute,
            waits.relative_error,
            waits.slower_s,
            parts.total_s,
            loader.relative_error if loader else 0.0,
        )
        if learnt_error is not None:
            error = np.where(np.isnan(learnt_error), error, learnt_error)
        memory = kinds.memory(kind_of, shards)
        return self._named(placed, batch, parts, lane, error, memory), waits.unknown

    def _named(
        self,
        placed: PlacedColumns,
        batch: Indices | int,
        parts: Breakdown[Any],
        lane: LaneCosts,
        error: Array,
        memory: tuple[Array, Array],
    ) -> dict[str, Any]:
        """The columns by their names; `memory` are the most bytes and their share of a device."""
        graph, accumulation_steps = self._rules.graph, self._rules.shape.accumulation_steps
        step_s, factor = parts.total_s, interval_ratio(error)
        sizes = np.where(np.equal(batch, 0), graph.batch or 0, batch)
        samples = sizes * (placed.ranks * accumulation_steps)
        per_s = accumulation_steps / step_s
        return {
            **{name: getattr(parts, name) for name in parts.__dataclass_fields__},
            "step_time_s": step_s,
            "low_s": step_s / factor,
            "high_s": step_s * factor,
            "samples_per_s": np.nan if graph.batch is None else samples / step_s,
            "mfu_ratio": lane.model_peak_s * per_s,
            "hfu_ratio": lane.hardware_peak_s * per_s,
            "peak_memory_bytes": memory[0],
            "fits_code": fits_code(memory[1], graph.knows_activations),
            "bottleneck_code": bottleneck_code(parts),
            "ranks": placed.ranks,
            "nodes": placed.nodes,
            "batch_per_gpu": sizes,
            "global_batch": samples,
        }

    def _communication(
        self,
        placed: PlacedColumns,
        kind_of: Indices,
        slowest: Indices,
        lane_s: Array,
        ratios: Ratios,
    ) -> Communication:
        """What ranks wait for; nothing where there is one."""
        several, kinds, compute = placed.ranks > 1, self._kinds.columns, ratios.compute
        if not several.any():
            return Communication(0.0, NO_OVERLAP, several, relative_error=0.0)
        if self._network is None:
            self._network = self._rules.network(self._machines.profiles, None)
        ranks = Ranks(
            groups=self._groups(placed),
            ready=_RowReady(kinds, kind_of, slowest, lane_s, compute),
            segments_s=kinds.segments_s[:, kind_of] * compute if len(kinds.segments_s) else (),
            lane_s=lane_s * compute,
            compute_ratio=compute,
            ratio=ratios.communication,
        )
        waits = self._network.communication(ranks)
        return waits._replace(
            exposed_s=np.where(several, waits.exposed_s, 0.0),
            relative_error=np.where(several, waits.relative_error, 0.0),
            unknown=waits.unknown & several,
            slower_s=np.where(several, waits.slower_s, 0.0),
        )

    def _groups(self, placed: PlacedColumns) -> Groups:
        groups = self._machines.whole_groups(placed)
        if self._rules.axes == (DP,):
            return {DP: (groups,)}
        shard = self._rules.shape.strategy.shard_ranks
        if shard is None:
            return {DP: (groups,), DP_SHARD: (groups,), DP_REPLICATE: ()}
        inside, between = nested_groups(placed, groups, shard)
        return {DP: (groups,), DP_SHARD: inside, DP_REPLICATE: between}


class _RowReady:
    """When the last rank of a row has each bucket ready; see `rules.Ready`.

    In most rows the slowest kind of rank has every bucket ready last: those rows are `alike`.
    """

    def __init__(
        self,
        kinds: RankColumns,
        kind_of: Indices,
        slowest: Indices,
        lane_s: Array,
        compute_ratio: Array | float,
    ) -> None:
        self._ready_s, self._kind_of, self._slowest = kinds.ready_s, kind_of, slowest
        self._lane_s = lane_s
        self._ratio = compute_ratio
        covered = np.ones(len(lane_s), dtype=np.bool_)
        for kind in kind_of:
            covered &= kinds.covers[slowest, kind]
        self.alike: Indices = covered.astype(np.intp)

    def slack_s(self, rows: Indices | None) -> Array:
        """Seconds from then to the end of the slowest lane, of rows that are alike."""
        rows = np.arange(len(self._lane_s)) if rows is None else rows
        latest_s = self._ready_s.take(self._slowest[rows], axis=0, mode="clip")
        if not self.alike[rows[0]]:
            for others in self._kind_of[:, rows]:
                np.maximum(latest_s, self._ready_s.take(others, axis=0, mode="clip"), out=latest_s)
        slack_s = np.empty(latest_s.shape[::-1])
        np.subtract(self._lane_s[rows], latest_s.T, out=slack_s)
        if isinstance(self._ratio, np.ndarray):
            slack_s *= self._ratio[rows]
        elif self._ratio != 1.0:
            slack_s *= self._ratio
        return slack_s


def _at_peak_together(
    lane: LaneCosts, kinds: RankColumns, kind_of: Indices, placed: PlacedColumns
) -> LaneCosts:
    """The lanes with what the FLOPs take at the peak of all devices; see `ranks.at_peak_s`.

    All ranks of a row compute as many FLOPs: their devices' peaks are as 1 over these times.
    """
    mixed = placed.is_mixed
    if not mixed.any():
        return lane
    ranks, chosen = placed.group_ranks, []
    slowest = lane.model_peak_s, lane.hardware_peak_s
    for seconds, peaks in zip(slowest, kinds.at_peak_s(kind_of), strict=True):
        chosen.append(np.where(mixed, placed.ranks / (ranks / peaks).sum(axis=0), seconds))
    return lane._replace(model_peak_s=chosen[0], hardware_peak_s=chosen[1])


def _first_largest(index: Indices, keys: Array) -> tuple[Indices, Array]:
    """(index of the first largest key, that key) of each column."""
    largest_key, chosen = keys[0].copy(), index[0]
    for column, key in zip(index[1:], keys[1:], strict=True):
        larger = key > largest_key
        chosen = np.where(larger, column, chosen)
        np.fmax(largest_key, key, out=largest_key)
    return chosen, largest_key


Columns = Mapping[str, NDArray[np.generic]]

# Rows of a chunk, and groups of all of its rows: their arrays stay in the caches.
_ROWS_AT_ONCE = 16384
_CELLS_AT_ONCE = 1 << 18
# Elements of a chunk in FSDP's table of compute between collectives.
_SEGMENTS_AT_ONCE = 1 << 22


class RowAnswers:
    """Answers questions that differ in allocations and batches; compiles a kind of rank once."""

    def __init__(self, request: TableRequest) -> None:
        shared = self._shared = request.shared
        self._graph, self._strategy = shared.graph, shared.strategy
        self._accumulation_steps = shared.accumulation_steps
        self._shape = StepShape(self._strategy, self._accumulation_steps, shared.loader)
        self._machines = MachineTable(shared.profile)
        self._reader = TextReader()
        self._engine = request.engine
        self._steps: StepRows | None = None

    def fill(self, request: TableRequest, columns: Columns) -> None:
        """Write every row's estimate into `columns`; rows that have none are left as they are.

        Where the question is strict, the first of those raises.
        """
        for start, part in self._parts(request):
            answer_rows = _rows_at_once(part, self._segments)
            for first in range(0, len(part), answer_rows):
                rows = slice(start + first, start + min(first + answer_rows, len(part)))
                self._answer(request, part[first : first + answer_rows], rows, columns)

    def _parts(self, request: TableRequest) -> Iterator[tuple[int, AllocationColumns]]:
        if isinstance(request.allocations, AllocationColumns):
            yield 0, request.allocations
        else:
            yield from self._reader.parts(
                request.allocations, first_row=request.first_row, strict=request.strict
            )

    def _answer(
        self,
        request: TableRequest,
        part: AllocationColumns,
        rows: slice | Indices,
        columns: Columns,
    ) -> None:
        """Write the estimates of `part`, whose rows in the question are `rows`."""
        numbers = _numbers(rows)
        placed = self._machines.place(part)
        steps = self._tables()
        placed.invalid |= ~steps.runs[placed.machine].all(axis=0)
        batch, invalid = self._batches(request, rows, placed)
        one_by_one = request.are_apart(numbers) | self._by_speed(request, placed)
        shard = self._strategy.shard_ranks
        if shard is not None:
            one_by_one |= ~hold_whole_replicas(placed, shard) & ~placed.invalid
        invalid |= ~np.asarray(self._strategy.divides(placed.ranks))
        apart = placed.invalid | invalid | one_by_one
        if apart.any():
            self._answer_rest(request, part, rows, columns, apart=apart, one_by_one=one_by_one)
            return
        ratios, errors = self._calibrated(request, placed, batch, numbers)
        with np.errstate(divide="ignore", invalid="ignore"):
            answered, unknown = steps.columns(placed, batch, ratios, errors)
            if unknown.any():
                self._answer_rest(request, part, rows, columns, apart=unknown)
                return
            global_batch = request.global_batch
            if global_batch is not None:
                # Shares that differ add up to what was asked.
                answered["global_batch"] = (
                    global_batch[rows] if isinstance(global_batch, np.ndarray) else global_batch
                )
                answered["samples_per_s"] = answered["global_batch"] / answered["step_time_s"]
            for name, values in answered.items():
                columns[name][rows] = values

    def _answer_rest(
        self,
        request: TableRequest,
        part: AllocationColumns,
        rows: slice | Indices,
        columns: Columns,
        *,
        apart: Flags,
        one_by_one: Flags | bool = False,
    ) -> None:
        """Answer some rows `one_by_one`, then all that are not `apart`."""
        numbers = _numbers(rows)
        refused = apart if request.strict else apart & one_by_one
        for number in numbers[refused].tolist():
            try:
                answer = request.answer(number)
            except EstimatorError:
                if request.strict:
                    request.refuse(number)
            else:
                for name, value in _cells(answer).items():
                    columns[name][number] = value
        if not apart.all():
            self._answer(request, part[~apart], numbers[~apart], columns)

    def _by_speed(self, request: TableRequest, placed: PlacedColumns) -> Flags | bool:
        """The rows whose global batch is split over unlike devices."""
        if request.global_batch is None or request.batch_per_gpu is not None:
            return False
        return placed.is_mixed & ~placed.invalid

    @property
    def _segments(self) -> int:
        """How many elements a row has for each of its groups, beside those of the buckets."""
        return rules_of(self._graph, self._shape, self._engine.cache).segments

    def _tables(self) -> StepRows:
        """The steps on the machines numbered so far, rebuilt whenever there are more."""
        if self._steps is None or len(self._steps.runs) <= len(self._machines.profiles):
            self._steps = StepRows(self._graph, self._machines, self._shape, self._engine.cache)
        return self._steps

    def _batches(
        self, request: TableRequest, rows: slice | Indices, placed: PlacedColumns
    ) -> tuple[Indices | int, Flags | bool]:
        """(batch of all rows or of each, 0 as traced; rows without a valid batch)."""
        batch, global_batch = request.batch_per_gpu, request.global_batch
        if global_batch is not None:
            global_batch = (
                global_batch[rows].astype(np.int64)
                if isinstance(global_batch, np.ndarray)
                else global_batch
            )
            shares = np.maximum(placed.ranks, 1) * self._accumulation_steps
            largest = np.asarray(-(-global_batch // shares), dtype=np.intp)
            invalid = (
                (np.asarray(global_batch) < shares) | (batch is not None) | (largest > MOST_BATCH)
            )
            if self._shared.strict:
                invalid |= global_batch % shares != 0
            return largest, invalid
        if batch is None:
            return 0, False
        if isinstance(batch, np.ndarray):
            return batch[rows].astype(np.intp), (batch[rows] < 1) | (batch[rows] > MOST_BATCH)
        return batch, np.full(len(placed.ranks), not 1 <= batch <= MOST_BATCH)

    def _calibrated(
        self,
        request: TableRequest,
        placed: PlacedColumns,
        batch: Indices | int,
        numbers: Indices,
    ) -> tuple[Ratios, Array | None]:
        """The calibrated factors of each row, and their relative errors (NaN where uncalibrated).

        Rows that calibration does not distinguish are asked for once.
        """
        calibration = self._shared.calibration
        if calibration is None:
            return UNCALIBRATED_RATIOS, None
        engine = TrialEngine(self._engine, self._shared)
        job = engine.content.fingerprint
        profiles = self._machines.profiles
        names = sorted({profile.name for profile in profiles})
        number_of = [names.index(profile.name) for profile in profiles]
        has = np.zeros((len(names) + 1, len(placed.ranks)), dtype=np.bool_)
        for machine in np.array([*number_of, len(names)])[placed.machine]:
            has[machine, np.arange(len(machine))] = True
        sizes = np.where(np.equal(batch, 0), self._graph.batch or 0, batch)
        sizes = np.broadcast_to(sizes, placed.ranks.shape)
        most_on_node = placed.per_node.max(axis=0)
        columns = np.vstack([placed.ranks, placed.nodes, most_on_node, sizes, has[:-1]])
        distinct, first, index = np.unique(columns, axis=1, return_index=True, return_inverse=True)
        questions = [
            StepQuestion(
                job=job,
                workload=self._graph.workload,
                machines="+".join(n for n, one in zip(names, machines, strict=True) if one),
                ranks=ranks,
                nodes=nodes,
                most_on_node=most,
                batch=float(size),
                accumulation_steps=self._accumulation_steps,
                strategy=self._strategy,
            )
            for ranks, nodes, most, size, *machines in distinct.T.tolist()
        ]
        allocations = [request.allocation(row) for row in numbers[first].tolist()]
        coefficients = calibration.coefficients_for(questions, allocations, engine)
        index = index.reshape(-1)
        ratios = Ratios(
            compute=np.array([learnt.compute_ratio for learnt in coefficients])[index],
            update=np.array([learnt.update_ratio for learnt in coefficients])[index],
            communication=np.array([learnt.communication_ratio for learnt in coefficients])[index],
        )
        return ratios, np.array([learnt.relative_error or np.nan for learnt in coefficients])[index]


def _rows_at_once(part: AllocationColumns, segments: int) -> int:
    width = part.machine.shape[1]
    rows = min(_ROWS_AT_ONCE, _CELLS_AT_ONCE // max(width, 1))
    return int(max(min(rows, _SEGMENTS_AT_ONCE // max(width * segments, 1)), 1))


def _numbers(rows: slice | Indices) -> Indices:
    """The rows of the question that a part of them has."""
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


def _cells(answer: Estimate) -> dict[str, Any]:
    """One row of the columns."""
    parts = answer.breakdown
    nan = float("nan")
    return {
        **{name: getattr(parts, name) for name in parts.__dataclass_fields__},
        "step_time_s": answer.step_time_s,
        "low_s": answer.low_s,
        "high_s": answer.high_s,
        "samples_per_s": answer.samples_per_s or nan,
        "mfu_ratio": answer.mfu_ratio or nan,
        "hfu_ratio": answer.hfu_ratio or nan,
        "peak_memory_bytes": answer.peak_memory_bytes,
        "fits_code": FITS.index(answer.fits),
        "bottleneck_code": bottleneck_code(parts),
        "ranks": answer.ranks,
        "nodes": answer.plan.placement.nodes,
        "batch_per_gpu": answer.batch_per_gpu or 0,
        "global_batch": answer.global_batch or 0,
    }
