"""Place columns of allocations on machines, with process groups and kinds of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from estimator.cache import Cache
from estimator.elementwise import Flags, Indices
from estimator.errors import EstimatorError
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.catalogue import named_profile
from estimator.machines.profile import MachineProfile
from estimator.placement.allocation import MOST_RANKS
from estimator.placement.columns import AllocationColumns
from estimator.placement.mesh import ProcessGroup
from estimator.placement.placement import hop_locality, network_latency_s
from estimator.placement.topology import network_of, rates_by_ranks
from estimator.timeline.plan import compiled_step
from estimator.timeline.rank.program import RankClass, RankColumns, largest
from estimator.timeline.rank.rules import StepShape

_UNKNOWN = -2


@dataclass(slots=True, kw_only=True, eq=False)
class PlacedColumns:
    """What `Placement` holds of one allocation, in arrays (groups of a row, rows).

    `machine` are numbers in a `MachineTable`, padded with −1 behind a row's last group; `per_node`
    are the group's ranks on each of its nodes, `group_ranks` on all. `ranks` and `nodes` are per
    row. `invalid` marks rows that cannot be placed.
    """

    machine: Indices
    per_node: Indices
    group_ranks: Indices
    ranks: Indices
    nodes: Indices
    invalid: Flags

    @property
    def is_mixed(self) -> Flags:
        """The rows of several machines; see `Placement.is_mixed`."""
        return np.asarray(((self.machine != self.machine[0]) & (self.machine >= 0)).any(axis=0))


class MachineTable:
    """The machines that rows name, numbered in the order of first use, and their properties.

    Arrays have one item more than there are machines, for the padding −1. `profile` stands in for
    whatever machine is named.
    """

    def __init__(self, profile: MachineProfile | None) -> None:
        self.profile = profile
        self.profiles: list[MachineProfile] = []
        self.devices: Indices = np.zeros(1, dtype=np.intp)
        self._rate = np.full((1, 1), math.inf)
        self._latency_s = np.zeros(1)
        self._numbers: dict[str, int] = {}
        self._of_profile: dict[int, int] = {}

    def numbers(self, names: Iterable[str]) -> Indices:
        """The numbers of machine types, −2 of what is none, and −1."""
        before = len(self.profiles)
        numbers = [self._number(name) for name in names]
        if len(self.profiles) > before:
            self.devices = np.array([*(len(profile.devices) for profile in self.profiles), 0])
            networks = [network_of(profile) for profile in self.profiles]
            # By the number of a machine and of ranks on a node; inf where that is unknown.
            self._rate = rates_by_ranks(networks, int(self.devices.max()))
            latencies = [network_latency_s(each, hop_locality(None)) for each in self.profiles]
            self._latency_s = np.array([*latencies, 0.0])
        return np.array([*numbers, -1], dtype=np.intp)

    def _number(self, name: str) -> int:
        if name in self._numbers:
            return self._numbers[name]
        number = _UNKNOWN
        # Nothing tells what a host is.
        if "[" not in name:
            with suppress(EstimatorError):
                profile = self.profile or named_profile(name)
                number = self._of_profile.setdefault(id(profile), len(self.profiles))
                if number == len(self.profiles):
                    self.profiles.append(profile)
        self._numbers[name] = number
        return number

    def place(self, columns: AllocationColumns) -> PlacedColumns:
        """Resolve every group of every row, as `placement.place` does for one allocation."""
        name, nodes, devices = (
            np.ascontiguousarray(column.T, dtype=np.intp)
            for column in (columns.machine, columns.nodes, columns.devices)
        )
        is_present = name >= 0
        # Both from 1 to MOST_RANKS, a power of 2.
        out_of_range = ((nodes - 1) | (devices - 1)) >> (MOST_RANKS.bit_length() - 1) != 0
        invalid = (out_of_range & is_present).any(axis=0)
        if invalid.any() or not is_present.all():
            is_present &= ~invalid
            name = np.where(is_present, name, -1)
            nodes, devices = nodes * is_present, devices * is_present
        group_ranks = nodes * devices
        ranks, of_row = group_ranks.sum(axis=0), nodes.sum(axis=0)
        invalid |= ranks > MOST_RANKS
        if self.profile is not None and len(columns.machines) > 1:
            invalid |= ((name != name[0]) & is_present).any(axis=0)
        machine = self.numbers(columns.machines)[name]
        invalid |= (machine == _UNKNOWN).any(axis=0)
        machine = np.maximum(machine, -1)
        invalid |= (devices > self.devices[machine]).any(axis=0)
        offline = np.isinf(self._rate[:, -1])
        offline[-1] = False
        if offline.any():
            invalid |= offline[machine].any(axis=0) & (of_row > 1)
        return PlacedColumns(
            machine=machine,
            per_node=devices,
            group_ranks=group_ranks,
            ranks=ranks,
            nodes=of_row,
            invalid=invalid,
        )

    def whole_groups(self, placed: PlacedColumns) -> ProcessGroup:
        """The process group of all ranks of each row; see `mesh.whole_group`."""
        alone = placed.nodes <= 1
        # Flat places in the table of rates.
        rate_at = placed.machine * self._rate.shape[1] + placed.per_node
        slowest = -largest(-self._rate.reshape(-1), rate_at)
        return ProcessGroup(
            ranks=placed.ranks,
            nodes=np.maximum(placed.nodes, 1),
            per_node=placed.per_node.max(axis=0),
            bytes_per_s=np.where(alone, math.inf, slowest),
            latency_s=np.where(alone, 0.0, largest(self._latency_s, placed.machine)),
            network=self._slowest(placed, rate_at),
        )

    def _slowest(self, placed: PlacedColumns, rate_at: Indices) -> Indices:
        """The machine with the slowest network; of equals, the one with most ranks on a node."""
        width, rows = placed.machine.shape
        if len(self.profiles) <= 1:
            return np.zeros(rows, dtype=np.intp)
        # An integer key that sorts by rate, then by ranks, then by position in the row.
        rank_of = np.unique(self._rate, return_inverse=True)[1].reshape(self._rate.shape) + 1
        rank_of[-1] = rank_of.size + 1
        by_rate = rank_of.reshape(-1) * (int(placed.per_node.max()) + 1) * width
        least = by_rate[rate_at[0]] - placed.per_node[0] * width
        for position in range(1, width):
            key = by_rate[rate_at[position]] - placed.per_node[position] * width + position
            np.minimum(least, key, out=least)
        return np.asarray(placed.machine[least % width, np.arange(rows)])


def hold_whole_replicas(placed: PlacedColumns, shard: int) -> Flags:
    """The rows on each of whose nodes are whole replicas of `shard` ranks."""
    return np.asarray((placed.per_node % shard == 0).all(axis=0))


def nested_groups(
    placed: PlacedColumns, outer: ProcessGroup, shard: int
) -> tuple[tuple[ProcessGroup, ...], tuple[ProcessGroup, ...]]:
    """Groups of one replica, and of the same shard in all, where nodes hold whole replicas."""
    rows = len(placed.ranks)
    inside = [
        ProcessGroup(
            ranks=np.full(rows, shard),
            nodes=np.ones(rows, dtype=np.intp),
            per_node=np.full(rows, shard),
            bytes_per_s=np.full(rows, math.inf),
            latency_s=np.zeros(rows),
            network=np.where(machine >= 0, machine, placed.machine[0]),
        )
        for machine in placed.machine
    ]
    between = replace(
        outer,
        ranks=outer.ranks // shard,
        per_node=outer.per_node // shard,
        # A node's ranks of one replica are each in a group of their own.
        bytes_per_s=outer.bytes_per_s / shard,
        sharing_ratio=float(shard),
    )
    return tuple(inside), (between,)


_LARGEST = np.iinfo(np.int64).max


class RankClassTable:
    """Kinds of ranks by (batch, whether it synchronises, machine, ranks on its node).

    A kind is compiled when a row first needs it. Index 0 pads rows behind their last group.
    `columns` holds the costs of all kinds.
    """

    def __init__(self, graph: OpGraph, table: MachineTable, shape: StepShape, cache: Cache) -> None:
        self._graph, self._shape, self._cache = graph, shape, cache
        self._profiles = tuple(table.profiles)
        self._rank_counts = int(table.devices.max()) + 1
        self._batches: dict[int, int] = {}
        self._sizes = np.array([_LARGEST])
        self._kind_of_code: Indices = np.zeros(0, dtype=np.intp)
        self._kinds: list[RankClass] = []
        self.columns = RankColumns(self._kinds)

    def indices(self, placed: PlacedColumns, batch: Indices | int) -> Indices:
        """The kind of every group of every row, in an array (groups of a row, rows).

        `batch` is that of all rows or of each; 0 is the traced one.
        """
        code = self._batch_codes(batch) * 2 + (placed.ranks > 1)
        machine = code * (len(self._profiles) + 1) + placed.machine + 1
        codes = machine * self._rank_counts + placed.per_node
        kinds = self._kind_of_code[codes]
        if (kinds < 0).any():
            for missing in np.unique(codes[kinds < 0]).tolist():
                self._compile(missing)
            self.columns = RankColumns(self._kinds)
            kinds = self._kind_of_code[codes]
        return np.asarray(kinds)

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
            block = np.full((2, len(self._profiles) + 1, self._rank_counts), -1, dtype=np.intp)
            block[:, 0] = 0
            self._kind_of_code = np.concatenate([self._kind_of_code, block.ravel()])
        return self._batches[size]

    def _compile(self, code: int) -> None:
        rest, ranks_on_node = divmod(code, self._rank_counts)
        rest, machine = divmod(rest, len(self._profiles) + 1)
        batch_code, synchronises = divmod(rest, 2)
        batch = list(self._batches)[batch_code] or self._graph.batch
        table, _ = compiled_step(self._graph, self._shape, batch, bool(synchronises), self._cache)
        self._kinds.append(table.kind(self._profiles[machine - 1], ranks_on_node, 1.0))
        self._kind_of_code[code] = len(self._kinds)
