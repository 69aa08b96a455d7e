"""Compute the steps of many rows at once: `timeline.plan`, vectorised over placements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.cache import Cache
from estimator.graph.op_graph import OpGraph
from estimator.machines.profile import MachineProfile
from estimator.placement.process_groups import ProcessGroup
from estimator.tables.links import NetworkTable
from estimator.tables.placed import NodeGroupTable, PlacedColumns
from estimator.tables.rank_kinds import RankKindTable
from estimator.timeline.ability import why_not_on
from estimator.timeline.inputs import InputCosts
from estimator.timeline.ranks import LaneCosts, RankColumns, StepShape, largest
from estimator.timeline.step import Breakdown, Ratios, after_s, breakdown_of, with_input
from estimator.timeline.strategies import rules_of
from estimator.timeline.strategies.registry import (
    DP,
    DP_REPLICATE,
    DP_SHARD,
    Groups,
    Network,
    Ranks,
)

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepColumns:
    """The steps of many rows: their parts, the slowest ranks' lanes, errors and memory.

    `communication_error` is the relative error of gradient synchronisation, 0 for single ranks, and
    `slower_s` what a step adds if that is slower by as much;
    `memory_ratio` the largest share of a device's memory in use. `unknown` marks rows with a
    collective whose cost over their network is not known.
    """

    parts: Breakdown
    lane: LaneCosts
    communication_error: Array
    slower_s: Any
    memory_bytes: Array
    memory_ratio: Array
    unknown: Flags


class StepRows:
    """The steps of one graph on the node groups indexed so far.

    `runs` says which node groups' machines can run the graph's step.
    """

    def __init__(
        self, graph: OpGraph, table: NodeGroupTable, shape: StepShape, cache: Cache
    ) -> None:
        self._network_table = NetworkTable(table)
        self._kinds = RankKindTable(graph, table, shape, cache)
        self._rules = rules_of(graph, shape, cache)
        self._has_loader = shape.loader is not None
        self._network: Network | None = None
        able = [why_not_on(graph, group.profile) is None for group in table.groups]
        self.runs = np.array([*able, True])

    def number_of(self, profile: MachineProfile) -> int:
        """The index of a profile, as process groups refer to it."""
        found = self._network_table.number_of.get(id(profile))
        if found is None:
            # Its file was rewritten and loaded again since the node groups were indexed.
            found = [each.name for each in self._network_table.profiles].index(profile.name)
        return found

    def are_mixed(self, placed: PlacedColumns) -> Flags:
        """The rows whose devices differ in machine or speed; see `Placement.is_mixed`."""
        return self._kinds.are_mixed(placed)

    def columns(
        self,
        placed: PlacedColumns,
        batch: Indices | int,
        ratios: Ratios,
        groups_of: Callable[[int], Groups],
    ) -> StepColumns:
        """The steps of rows that can be placed; `batch` of all rows or of each, 0 as traced.

        `groups_of` derives the process groups of one row, where they do not follow from counts.
        """
        kind_of = self._kinds.indices(placed, batch)
        kinds, ranks = self._kinds.columns, placed.ranks
        shards, share = self._rules.shards(ranks), self._rules.update_share(ranks)
        slowest, lane_s = _first_largest(kind_of, kinds.length_s(kind_of, shards))
        last, _ = _first_largest(kind_of, after_s(kinds.update(kind_of), share, ratios))
        lane = _at_peak_together(
            kinds.lane(slowest), kinds, kind_of, self.are_mixed(placed), placed
        )
        several = ranks > 1
        waiting_s: Any = 0.0
        unknown, error = np.zeros_like(several), np.zeros(len(several))
        slower_s: Any = 0.0
        if several.any():
            groups = self._groups(placed, groups_of)
            ranks_of_rows = _ranks(kinds, kind_of, slowest, lane_s, groups, ratios)
            found = self._costs().communication(ranks_of_rows)
            waiting_s = np.where(several, found.exposed_s, 0.0)
            unknown = found.unknown & several
            error = np.where(several, found.relative_error, 0.0)
            slower_s = np.where(several, found.slower_s, 0.0)
        memory_bytes, memory_ratio = kinds.memory(kind_of, shards)
        parts = breakdown_of(
            lane,
            kinds.update(last),
            lane_s=lane_s,
            ranks=ranks,
            share=share,
            jitter_ratio=largest(kinds.jitter_ratio, kind_of),
            waiting_s=waiting_s,
            ratios=ratios,
        )
        if self._has_loader:
            own_s, period_s = (largest(column, kind_of) for column in kinds.input)
            parts = with_input(parts, InputCosts(own_s, period_s))
        return StepColumns(
            parts=parts,
            lane=lane,
            communication_error=error,
            slower_s=slower_s,
            memory_bytes=memory_bytes,
            memory_ratio=memory_ratio,
            unknown=unknown,
        )

    def _costs(self) -> Network:
        if self._network is None:
            self._network = self._rules.network(
                self._network_table.profiles, self._network_table.cluster
            )
        return self._network

    def _groups(self, placed: PlacedColumns, groups_of: Callable[[int], Groups]) -> Groups:
        whole: ProcessGroup = self._network_table.whole_groups(placed)
        if self._rules.axes == (DP,):
            return {DP: (whole,)}
        shard = self._rules.shape.strategy.shard
        if shard is None:
            return {DP: (whole,), DP_SHARD: (whole,), DP_REPLICATE: ()}
        return {DP: (whole,), **self._network_table.nested_groups(placed, whole, shard, groups_of)}


def _ranks(
    kinds: RankColumns,
    kind_of: Indices,
    slowest: Indices,
    lane_s: Array,
    groups: Groups,
    ratios: Ratios,
) -> Ranks:
    """The ranks of each row as the strategies' network costs see them."""
    compute = ratios.compute
    segments_s = kinds.segments_s[:, kind_of] * compute if len(kinds.segments_s) else ()
    return Ranks(
        groups=groups,
        ready=_Ready(kinds, kind_of, slowest, lane_s, compute),
        segments_s=segments_s,
        lane_s=lane_s * compute,
        compute_ratio=compute,
        ratio=ratios.communication,
    )


class _Ready:
    """When the last rank of a row has each bucket ready; see `bucket_queue.Ready`.

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
        for each in kind_of:
            covered &= kinds.covers[slowest, each]
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
    lane: LaneCosts, kinds: RankColumns, kind_of: Indices, mixed: Flags, placed: PlacedColumns
) -> LaneCosts:
    """The lanes with what the FLOPs take at the peak of all devices; see `ranks.at_peak_s`.

    All ranks of a row compute as many FLOPs: their devices' peaks are as 1 over these times.
    """
    if not mixed.any():
        return lane
    ranks, found = placed.group_ranks[:, mixed], []
    slowest = lane.model_peak_s, lane.hardware_peak_s
    for seconds, each in zip(slowest, kinds.at_peak_s(kind_of[:, mixed]), strict=True):
        together = seconds.copy()
        together[mixed] = ranks.sum(axis=0) / (ranks / each).sum(axis=0)
        found.append(together)
    return lane._replace(model_peak_s=found[0], hardware_peak_s=found[1])


def _first_largest(index: Indices, keys: Array) -> tuple[Indices, Array]:
    """(index of the first largest key, that key) of each column."""
    largest_key, chosen = keys[0].copy(), index[0]
    for each, key in zip(index[1:], keys[1:], strict=True):
        larger = key > largest_key
        chosen = np.where(larger, each, chosen)
        np.fmax(largest_key, key, out=largest_key)
    return chosen, largest_key
