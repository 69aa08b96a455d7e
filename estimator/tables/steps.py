"""Answer the steps of many rows at once: `timeline.plan`, over rows instead of one placement."""

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
from estimator.tables.classes import RankNumbers
from estimator.tables.links import RowLinks
from estimator.tables.placed import PlacedColumns, SiteTable
from estimator.timeline.ability import why_not_on
from estimator.timeline.ranks import LaneCosts, RankColumns, StepShape, largest
from estimator.timeline.step import Breakdown, Ratios, after_s, breakdown_of
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

    `communication_error` is the relative error of what reduces gradients, 0 for single ranks, and
    `slower_s` what a step adds if that is slower by as much;
    `memory_ratio` the largest share of a device's memory in use. `unknown` marks rows over whose
    network nothing says what a collective that they need costs.
    """

    parts: Breakdown
    lane: LaneCosts
    communication_error: Array
    slower_s: Any
    memory_bytes: Array
    memory_ratio: Array
    unknown: Flags


class StepRows:
    """What the steps of one graph need of every site numbered so far.

    `runs` says of which sites the machine can run the graph's step.
    """

    def __init__(self, graph: OpGraph, table: SiteTable, shape: StepShape, cache: Cache) -> None:
        self._links = RowLinks(table)
        self._numbers = RankNumbers(graph, table, shape, cache)
        self._rules = rules_of(graph, shape, cache)
        self._network: Network | None = None
        able = [why_not_on(graph, site.profile) is None for site in table.sites]
        self.runs = np.array([*able, True])

    def number_of(self, profile: MachineProfile) -> int:
        """The number of a profile, as process groups name it."""
        found = self._links.number_of.get(id(profile))
        if found is None:
            # Its file has been written anew since the sites were numbered.
            found = [each.name for each in self._links.profiles].index(profile.name)
        return found

    def columns(
        self,
        placed: PlacedColumns,
        batch: Indices | int,
        ratios: Ratios,
        groups_of: Callable[[int], Groups],
    ) -> StepColumns:
        """The steps of rows that can be placed; `batch` of all rows or of each, 0 as traced.

        `groups_of` tells of one row the process groups that do not follow from counts.
        """
        numbers = self._numbers.numbers(placed, batch)
        kinds, ranks = self._numbers.columns, placed.ranks
        shards, share = self._rules.shards(ranks), self._rules.update_share(ranks)
        slowest, lane_s = _first_largest(numbers, kinds.length_s(numbers, shards))
        last, _ = _first_largest(numbers, after_s(kinds.update(numbers), share, ratios))
        lane = kinds.lane(slowest)
        several = ranks > 1
        waiting_s: Any = 0.0
        unknown, error = np.zeros_like(several), np.zeros(len(several))
        slower_s: Any = 0.0
        if several.any():
            groups = self._groups(placed, groups_of)
            brought = _ranks(kinds, numbers, slowest, lane_s, groups, ratios)
            found = self._costs().communication(brought)
            waiting_s = np.where(several, found.exposed_s, 0.0)
            unknown = found.unknown & several
            error = np.where(several, found.relative_error, 0.0)
            slower_s = np.where(several, found.slower_s, 0.0)
        memory_bytes, memory_ratio = kinds.memory(numbers, shards)
        return StepColumns(
            parts=breakdown_of(
                lane,
                kinds.update(last),
                lane_s=lane_s,
                ranks=ranks,
                share=share,
                spread_ratio=largest(kinds.spread_ratio, numbers),
                waiting_s=waiting_s,
                ratios=ratios,
            ),
            lane=lane,
            communication_error=error,
            slower_s=slower_s,
            memory_bytes=memory_bytes,
            memory_ratio=memory_ratio,
            unknown=unknown,
        )

    def _costs(self) -> Network:
        if self._network is None:
            self._network = self._rules.network(self._links.profiles, self._links.cluster)
        return self._network

    def _groups(self, placed: PlacedColumns, groups_of: Callable[[int], Groups]) -> Groups:
        whole: ProcessGroup = self._links.whole_groups(placed)
        if self._rules.axes == (DP,):
            return {DP: (whole,)}
        shard = self._rules.shape.strategy.shard
        if shard is None:
            return {DP: (whole,), DP_SHARD: (whole,), DP_REPLICATE: ()}
        return {DP: (whole,), **self._links.nested_groups(placed, whole, shard, groups_of)}


def _ranks(
    kinds: RankColumns,
    numbers: Indices,
    slowest: Indices,
    lane_s: Array,
    groups: Groups,
    ratios: Ratios,
) -> Ranks:
    """What the ranks of each row bring to their collectives."""
    compute = ratios.compute
    segments_s = kinds.segments_s[:, numbers] * compute if len(kinds.segments_s) else ()
    return Ranks(
        groups=groups,
        ready=_Ready(kinds, numbers, slowest, lane_s, compute),
        segments_s=segments_s,
        lane_s=lane_s * compute,
        compute_ratio=compute,
        ratio=ratios.communication,
    )


class _Ready:
    """When all ranks of a row have each bucket ready; see `bucket_queue.Ready`.

    Mostly the slowest kind of a row is behind the others with every bucket: those rows are `alike`.
    """

    def __init__(
        self,
        kinds: RankColumns,
        numbers: Indices,
        slowest: Indices,
        lane_s: Array,
        compute_ratio: Array | float,
    ) -> None:
        self._ready_s, self._numbers, self._slowest = kinds.ready_s, numbers, slowest
        self._lane_s = lane_s
        self._ratio = compute_ratio
        covered = np.ones(len(lane_s), dtype=np.bool_)
        for each in numbers:
            covered &= kinds.covers[slowest, each]
        self.alike: Indices = covered.astype(np.intp)

    def slack_s(self, rows: Indices | None) -> Array:
        """Seconds of the slowest lane that are left then, of rows that are alike."""
        rows = np.arange(len(self._lane_s)) if rows is None else rows
        latest_s = self._ready_s.take(self._slowest[rows], axis=0, mode="clip")
        if not self.alike[rows[0]]:
            for others in self._numbers[:, rows]:
                np.maximum(latest_s, self._ready_s.take(others, axis=0, mode="clip"), out=latest_s)
        slack_s = np.empty(latest_s.shape[::-1])
        np.subtract(self._lane_s[rows], latest_s.T, out=slack_s)
        if isinstance(self._ratio, np.ndarray):
            slack_s *= self._ratio[rows]
        elif self._ratio != 1.0:
            slack_s *= self._ratio
        return slack_s


def _first_largest(index: Indices, keys: Array) -> tuple[Indices, Array]:
    """(index of the first largest key, that key) of each column."""
    largest_key, chosen = keys[0].copy(), index[0]
    for each, key in zip(index[1:], keys[1:], strict=True):
        larger = key > largest_key
        chosen = np.where(larger, each, chosen)
        np.fmax(largest_key, key, out=largest_key)
    return chosen, largest_key
