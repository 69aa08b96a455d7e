"""Compile the kinds of ranks that rows are made of, each once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from estimator.cache import Cache
from estimator.graph.op_graph import OpGraph
from estimator.machines.profile import MachineProfile
from estimator.tables.placed import NodeGroupTable, PlacedColumns
from estimator.timeline.plan import compiled_step
from estimator.timeline.ranks import RankColumns, RankKind, StepShape

Indices = NDArray[np.intp]

_LARGEST = np.iinfo(np.int64).max


class RankKindTable:
    """Kinds of ranks by (batch, whether it synchronises, machine and slowdown, ranks on its node).

    A kind is compiled when a row first needs it. Index 0 pads rows behind their last node group.
    `columns` holds the costs of all kinds.
    """

    def __init__(
        self, graph: OpGraph, table: NodeGroupTable, shape: StepShape, cache: Cache
    ) -> None:
        self._graph, self._shape, self._cache = graph, shape, cache
        kinds: dict[tuple[int, float], int] = {}
        self._machines: list[tuple[MachineProfile, float]] = []
        of_group = []
        for group in table.groups:
            key = (id(group.profile), group.slowdown_ratio)
            if key not in kinds:
                kinds[key] = len(kinds) + 1
                self._machines.append((group.profile, group.slowdown_ratio))
            of_group.append(kinds[key])
        self._machine_of = np.array([*of_group, 0], dtype=np.intp)
        self._rank_counts = int(table.devices.max()) + 1
        self._batches: dict[int, int] = {}
        self._sizes = np.array([_LARGEST])
        self._kind_of_code: Indices = np.zeros(0, dtype=np.intp)
        self._kinds: list[RankKind] = []
        self.columns = RankColumns(self._kinds)

    def are_mixed(self, placed: PlacedColumns) -> NDArray[np.bool_]:
        """The rows whose devices differ in machine or speed."""
        machine = self._machine_of[placed.node_group]
        return np.asarray(((machine != machine[0]) & (machine > 0)).any(axis=0))

    def indices(self, placed: PlacedColumns, batch: Indices | int) -> Indices:
        """The kind of every node group of every row, in an array (node groups of a row, rows).

        `batch` is that of all rows or of each; 0 is the traced one.
        """
        code = self._batch_codes(batch) * 2 + (placed.ranks > 1)
        kind = self._machine_of[placed.node_group]
        codes = (code * (len(self._machines) + 1) + kind) * self._rank_counts + placed.ranks_on_node
        found = self._kind_of_code[codes]
        if (found < 0).any():
            for missing in np.unique(codes[found < 0]).tolist():
                self._compile(missing)
            self.columns = RankColumns(self._kinds)
            found = self._kind_of_code[codes]
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
            block = np.full((2, len(self._machines) + 1, self._rank_counts), -1, dtype=np.intp)
            block[:, 0] = 0
            self._kind_of_code = np.concatenate([self._kind_of_code, block.ravel()])
        return self._batches[size]

    def _compile(self, code: int) -> None:
        rest, ranks_on_node = divmod(code, self._rank_counts)
        rest, machine = divmod(rest, len(self._machines) + 1)
        batch_code, synchronises = divmod(rest, 2)
        size = list(self._batches)[batch_code]
        batch = size or self._graph.batch
        table, _ = compiled_step(self._graph, self._shape, batch, bool(synchronises), self._cache)
        profile, slowdown_ratio = self._machines[machine - 1]
        self._kinds.append(table.kind(profile, ranks_on_node, slowdown_ratio))
        self._kind_of_code[code] = len(self._kinds)
