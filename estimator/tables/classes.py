"""Number the kinds of ranks that rows are made of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from estimator.cache import Cache
from estimator.graph.op_graph import OpGraph
from estimator.machines.profile import MachineProfile
from estimator.tables.placed import PlacedColumns, SiteTable
from estimator.timeline.plan import compiled_step
from estimator.timeline.ranks import RankColumns, RankKind, StepShape

Indices = NDArray[np.intp]

_LARGEST = np.iinfo(np.int64).max


class RankNumbers:
    """Kinds of ranks by (batch, merging or not, machine and slowdown, busy devices of the node).

    A kind is compiled when a row first needs it. Number 0 stands behind a row's last site.
    `columns` holds what the kinds cost.
    """

    def __init__(self, graph: OpGraph, table: SiteTable, shape: StepShape, cache: Cache) -> None:
        self._graph, self._shape, self._cache = graph, shape, cache
        kinds: dict[tuple[int, float], int] = {}
        self._machines: list[tuple[MachineProfile, float]] = []
        of_site = []
        for site in table.sites:
            key = (id(site.profile), site.slowdown_ratio)
            if key not in kinds:
                kinds[key] = len(kinds) + 1
                self._machines.append((site.profile, site.slowdown_ratio))
            of_site.append(kinds[key])
        self._machine_of = np.array([*of_site, 0], dtype=np.intp)
        self._most_busy = int(table.devices.max()) + 1
        self._batches: dict[int, int] = {}
        self._sizes = np.array([_LARGEST])
        self._numbers: Indices = np.zeros(0, dtype=np.intp)
        self._kinds: list[RankKind] = []
        self.columns = RankColumns(self._kinds)

    def numbers(self, placed: PlacedColumns, batch: Indices | int) -> Indices:
        """The number of every site's kind of every row, in an array (sites of a row, rows).

        `batch` is that of all rows or of each; 0 is the one that was traced.
        """
        code = self._batch_codes(batch) * 2 + (placed.ranks > 1)
        kind = self._machine_of[placed.site]
        codes = (code * (len(self._machines) + 1) + kind) * self._most_busy + placed.busy
        found = self._numbers[codes]
        if (found < 0).any():
            for missing in np.unique(codes[found < 0]).tolist():
                self._compile(missing)
            self.columns = RankColumns(self._kinds)
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
            block = np.full((2, len(self._machines) + 1, self._most_busy), -1, dtype=np.intp)
            block[:, 0] = 0
            self._numbers = np.concatenate([self._numbers, block.ravel()])
        return self._batches[size]

    def _compile(self, code: int) -> None:
        rest, busy = divmod(code, self._most_busy)
        rest, machine = divmod(rest, len(self._machines) + 1)
        batch_code, merging = divmod(rest, 2)
        size = list(self._batches)[batch_code]
        batch = size or self._graph.batch
        table, _ = compiled_step(self._graph, self._shape, batch, bool(merging), self._cache)
        profile, slowdown_ratio = self._machines[machine - 1]
        self._kinds.append(table.kind(profile, busy, slowdown_ratio))
        self._numbers[code] = len(self._kinds)
