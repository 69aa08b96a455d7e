"""Number the classes of ranks that rows are made of, and hold what each costs in arrays."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from estimator.graph.ops import OpGraph
from estimator.placed_columns import PlacedColumns, SiteTable
from estimator.profile import MachineProfile
from estimator.timeline.program import StepProgram, step_program
from estimator.workload import Strategy

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

# What is kept of a class, compute times its slowdown. `memory_ratio` is the share of the device's
# memory in use where nothing is sharded, `model_peak_s` and `hardware_peak_s` what the flops of a
# micro-batch take at the device's peak.
VALUES = (
    "lane_s",
    "forward_s",
    "backward_s",
    "host_s",
    "copies_s",
    "copy_back_s",
    "update_launch_s",
    "update_shared_s",
    "update_error",
    "host_error",
    "kernels_variance_s2",
    "memory_bytes",
    "memory_ratio",
    "device_bytes",
    "spread_ratio",
    "model_peak_s",
    "hardware_peak_s",
)
_LARGEST = np.iinfo(np.int64).max
# Every class is compared with every other only while that is quick.
_MOST_COMPARED = 1024


class ClassTable:
    """Classes by (batch, merging or not, machine and its slowdown, busy devices of the node).

    A class is compiled when a row first needs it. Class 0 stands behind a row's last site: it takes
    no time, and its buckets are always ready. `values[name]` and `ready_s` have a row a class,
    `units_s` has the seconds of FSDP's units as (forward or backward, units, classes),
    `memory_lines` the lines of `ShardedMemory.total` as (lines, fixed or sharded, classes).
    """

    def __init__(
        self, graph: OpGraph, table: SiteTable, strategy: Strategy, accumulation_steps: int
    ) -> None:
        self._graph, self._strategy = graph, strategy
        self._accumulation_steps = accumulation_steps
        kinds: dict[tuple[int, float], int] = {}
        self._kinds: list[tuple[MachineProfile, float]] = []
        of_site = []
        for site in table.sites:
            key = (id(site.profile), site.slowdown_ratio)
            if key not in kinds:
                kinds[key] = len(kinds) + 1
                self._kinds.append((site.profile, site.slowdown_ratio))
            of_site.append(kinds[key])
        self._kind_of = np.array([*of_site, 0], dtype=np.intp)
        self._most_busy = int(table.devices.max()) + 1
        self._batches: dict[int, int] = {}
        self._sizes = np.array([_LARGEST])
        self._numbers: Indices = np.zeros(0, dtype=np.intp)
        self._rows: list[list[float]] = [[-math.inf] * len(VALUES)]
        self._ready: list[Array] = [np.zeros(0)]
        self._units: list[Array] = [np.zeros((2, 0))]
        self._memory: list[tuple[tuple[int, int], ...]] = [((0, 0),)]
        self.bucket_bytes: Array = np.zeros(0)
        self.unit_bytes: Array = np.zeros(0)
        self._lay_out()

    def numbers(self, placed: PlacedColumns, batch: Indices | int) -> Indices:
        """The class of every site of every row, in an array (sites of a row, rows).

        `batch` is that of all rows or of each; 0 is the one that was traced.
        """
        code = self._batch_codes(batch) * 2 + (placed.ranks > 1)
        kind = self._kind_of[placed.site]
        codes = (code * (len(self._kinds) + 1) + kind) * self._most_busy + placed.busy
        found = self._numbers[codes]
        if (found < 0).any():
            for missing in np.unique(codes[found < 0]).tolist():
                self._compile(missing)
            self._lay_out()
            found = self._numbers[codes]
        return np.asarray(found)

    def _batch_codes(self, batch: Indices | int) -> Indices | int:
        if isinstance(batch, int):
            return self._batch_code(batch)
        place = np.searchsorted(self._sizes, batch)
        if (self._sizes[place] != batch).any():
            for size in np.unique(batch).tolist():
                self._batch_code(size)
            self._sizes = np.array(sorted([*self._batches, _LARGEST]))
            place = np.searchsorted(self._sizes, batch)
        codes = [self._batches.get(size, 0) for size in self._sizes.tolist()]
        return np.array(codes, dtype=np.intp)[place]

    def _batch_code(self, size: int) -> int:
        if size not in self._batches:
            self._batches[size] = len(self._batches)
            block = np.full((2, len(self._kinds) + 1, self._most_busy), -1, dtype=np.intp)
            block[:, 0] = 0
            self._numbers = np.concatenate([self._numbers, block.ravel()])
        return self._batches[size]

    def _compile(self, code: int) -> None:
        rest, busy = divmod(code, self._most_busy)
        rest, kind = divmod(rest, len(self._kinds) + 1)
        batch_code, merging = divmod(rest, 2)
        profile, slowdown = self._kinds[kind - 1]
        size = list(self._batches)[batch_code]
        program = step_program(
            self._graph,
            profile,
            batch=size or self._graph.batch,
            busy=busy,
            merging=bool(merging),
            strategy=self._strategy,
            accumulation_steps=self._accumulation_steps,
        )
        self._numbers[code] = len(self._rows)
        self._rows.append(_values(program, slowdown))
        self._ready.append(program.ready_s * slowdown)
        self._memory.append(program.memory.total.lines)
        units = [(unit.forward_s, unit.backward_s) for unit in program.units]
        self._units.append(np.array(units).reshape(len(units), 2).T)
        if merging:
            self.bucket_bytes = program.bucket_bytes
            self.unit_bytes = np.array([float(unit.parameter_bytes) for unit in program.units])

    def _lay_out(self) -> None:
        """Gather what is known of all classes into arrays."""
        columns = np.array(self._rows).T
        self.values = dict(zip(VALUES, columns, strict=True))
        self.memory_lines = _padded(self._memory)
        self.ready_s = np.full((len(self._rows), len(self.bucket_bytes)), -math.inf)
        self.units_s = np.zeros((2, len(self.unit_bytes), len(self._rows)))
        for number, (ready_s, units_s) in enumerate(zip(self._ready, self._units, strict=True)):
            if len(ready_s):
                self.ready_s[number] = ready_s
            if units_s.size:
                self.units_s[:, :, number] = units_s
        self.covers = self._covers()

    def _covers(self) -> NDArray[np.bool_]:
        """Whether a class has no bucket ready before another class has it, in (class, other)."""
        count = len(self._rows)
        if count > _MOST_COMPARED:
            return np.asarray(np.eye(count, dtype=np.bool_) | (np.arange(count) == 0))
        return np.array([(ready_s >= self.ready_s).all(axis=1) for ready_s in self.ready_s])


def _padded(memory: list[tuple[tuple[int, int], ...]]) -> NDArray[np.int64]:
    """Lines of every class, its last one again where others have more: (lines, 2, classes)."""
    most = max(map(len, memory))
    rows = [lines + (lines[-1],) * (most - len(lines)) for lines in memory]
    return np.array(rows, dtype=np.int64).transpose(1, 2, 0)


def _values(program: StepProgram, slowdown: float) -> list[float]:
    profile = program.profile
    device = profile.devices[0]
    peak = program.peak_flops_per_s or math.nan
    memory_bytes = program.memory.total_bytes(1)
    host_error = (profile.host.provenance.relative_error or 0.0) if profile.host else 0.0
    values = {
        "lane_s": program.lane_s * slowdown,
        "forward_s": program.forward_s * slowdown,
        "backward_s": program.backward_s * slowdown,
        "host_s": program.host_s * slowdown,
        "copies_s": program.copies_s * slowdown,
        "copy_back_s": program.copy_back_s * slowdown,
        "update_launch_s": program.update_launch_s * slowdown,
        "update_shared_s": (program.update_s - program.update_launch_s) * slowdown,
        "update_error": program.update_error,
        "host_error": host_error,
        "kernels_variance_s2": program.kernels_variance_s2 * slowdown**2,
        "memory_bytes": memory_bytes,
        "memory_ratio": memory_bytes / device.memory_bytes,
        "device_bytes": device.memory_bytes,
        "spread_ratio": profile.rank_spread_ratio or 0.0,
        "model_peak_s": program.flops.model / peak or math.nan,
        "hardware_peak_s": program.flops.hardware / peak or math.nan,
    }
    return [values[name] for name in VALUES]
