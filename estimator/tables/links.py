"""Derive the process groups of placed rows and their slowest links, vectorised over rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from estimator.machines.profile import MachineProfile, PairMatrix
from estimator.placement.placement import NodeGroup, hop_latency_s, hop_locality
from estimator.placement.process_groups import ProcessGroup
from estimator.placement.topology import Cluster
from estimator.tables.placed import NodeGroupTable, PlacedColumns
from estimator.timeline.ranks import largest
from estimator.timeline.strategies.registry import DP_REPLICATE, DP_SHARD, Groups

Array = NDArray[np.float64]
Indices = NDArray[np.intp]


class NetworkTable:
    """Network properties of every node group, in arrays with one more value, for the padding −1.

    `profiles` are the distinct ones of the node groups, `cluster` is the network between them.
    """

    def __init__(self, table: NodeGroupTable) -> None:
        groups, self.cluster = table.groups, table.cluster
        self._nic = table.nic_bytes_per_s
        self.profiles: list[MachineProfile] = []
        index_of: dict[int, int] = {}
        of_group = []
        for group in groups:
            if id(group.profile) not in index_of:
                index_of[id(group.profile)] = len(self.profiles)
                self.profiles.append(group.profile)
            of_group.append(index_of[id(group.profile)])
        self.number_of = index_of
        self.profile_of: Indices = np.array([*of_group, 0], dtype=np.intp)
        locality = hop_locality(table.cluster)
        hops = [hop_latency_s(profile, locality) for profile in self.profiles]
        self._latency = np.array([hops[profile] for profile in of_group] + [0.0])
        self._pairs = _measured_pairs(groups)
        self._switches = _Switches(groups, table.cluster) if table.cluster else None

    def whole_groups(self, placed: PlacedColumns) -> ProcessGroup:
        """The process group of all ranks of each row; see `process_groups.whole_group`."""
        alone = placed.nodes <= 1
        # Flat indices into the table of network rates by node group and ranks on the node.
        rate_at = placed.node_group * self._nic.shape[1] + placed.ranks_on_node
        return ProcessGroup(
            ranks=placed.ranks,
            nodes=np.maximum(placed.nodes, 1),
            per_node=placed.ranks_on_node.max(axis=0),
            bytes_per_s=np.where(alone, math.inf, self._slowest_hop(placed, rate_at)),
            latency_s=np.where(alone, 0.0, largest(self._latency, placed.node_group)),
            network=self._slowest_profile(placed, rate_at),
        )

    def nested_groups(
        self,
        placed: PlacedColumns,
        whole: ProcessGroup,
        shard: int,
        groups_of: Callable[[int], Groups],
    ) -> Groups:
        """Groups of one replica (sharding), and of the same shard in all replicas (replication).

        Where every node holds whole replicas they follow from counts; `groups_of` derives those of
        any other row.
        """
        is_present = placed.node_group >= 0
        regular = ((placed.per_node % shard == 0) | ~is_present).all(axis=0)
        if self.cluster is not None or not regular.all():
            return self._one_by_one(np.flatnonzero(~placed.invalid), len(regular), groups_of)
        inside = [
            ProcessGroup(
                ranks=np.full(len(regular), shard),
                nodes=np.ones(len(regular), dtype=np.intp),
                per_node=np.full(len(regular), shard),
                bytes_per_s=np.full(len(regular), math.inf),
                latency_s=np.zeros(len(regular)),
                network=self.profile_of[np.where(present, group, placed.node_group[0])],
            )
            for group, present in zip(placed.node_group, is_present, strict=True)
        ]
        between = replace(
            whole,
            ranks=whole.ranks // shard,
            per_node=whole.per_node // shard,
            # A node's ranks of one replica are each in a group of their own.
            bytes_per_s=whole.bytes_per_s / shard,
        )
        return {DP_SHARD: tuple(inside), DP_REPLICATE: (between,)}

    def _one_by_one(self, rows: Indices, count: int, groups_of: Callable[[int], Groups]) -> Groups:
        found = {row: groups_of(row) for row in rows.tolist()}
        alone = ProcessGroup(ranks=1, nodes=1, per_node=1)
        stacked: dict[str, tuple[ProcessGroup, ...]] = {}
        for axis in (DP_SHARD, DP_REPLICATE):
            most = max((len(groups[axis]) for groups in found.values()), default=0)
            by_row = [[*found.get(row, {axis: ()})[axis]] for row in range(count)]
            padded = [(each or [alone]) for each in by_row]
            padded = [each + each[-1:] * (most - len(each)) for each in padded]
            stacked[axis] = tuple(_stacked([each[n] for each in padded]) for n in range(most))
        return stacked

    def _slowest_profile(self, placed: PlacedColumns, rate_at: Indices) -> Indices:
        """The profile of the node group with the slowest network; of equals, with most ranks."""
        width, rows = placed.node_group.shape
        if len(self.profiles) <= 1:
            return np.zeros(rows, dtype=np.intp)
        # An integer key that sorts by rate, then by ranks, then by position in the row.
        rank_of = np.unique(self._nic, return_inverse=True)[1].reshape(self._nic.shape) + 1
        rank_of[-1] = rank_of.size + 1
        by_rate = rank_of.reshape(-1) * (int(placed.ranks_on_node.max()) + 1) * width
        least = by_rate[rate_at[0]] - placed.ranks_on_node[0] * width
        for position in range(1, width):
            key = by_rate[rate_at[position]] - placed.ranks_on_node[position] * width + position
            np.minimum(least, key, out=least)
        return np.asarray(self.profile_of[placed.node_group[least % width, np.arange(rows)]])

    def _slowest_hop(self, placed: PlacedColumns, rate_at: Indices) -> Array:
        """Bytes per second of one flow over the bottleneck link of the ring."""
        if self._switches is None:
            return -largest(-self._nic.reshape(-1), rate_at)
        group = placed.node_group
        following = np.vstack([group[1:], group[:1]])
        following = np.where(following < 0, group[0], following)
        hop = (group >= 0) & (following != group)
        rate = self._busiest_nic(placed, hop, self._nic.reshape(-1)[rate_at])
        for row_of, column_of, rates in self._pairs:
            measured = rates[row_of[group], column_of[following]]
            np.minimum(rate, np.where(hop, measured, math.inf).min(axis=0), out=rate)
        return np.minimum(rate, self._switches.slowest(group, following))

    def _busiest_nic(self, placed: PlacedColumns, hop: NDArray[np.bool_], nics: Array) -> Array:
        """The rate of a flow over the busiest NIC: one flow each time the ring leaves a node."""
        rate = np.where(hop, nics, math.inf).min(axis=0)
        rows = placed.repeating
        if len(rows):
            group, leaving = placed.node_group[:, rows], hop[:, rows]
            shared = np.full(len(rows), math.inf)
            for each, whole in zip(group, nics[:, rows], strict=True):
                flows = ((group == each) & leaving).sum(axis=0)
                nic = whole / np.maximum(flows, 1)
                np.minimum(shared, np.where(flows > 0, nic, math.inf), out=shared)
            rate[rows] = shared
        return np.asarray(rate)


def _stacked(groups: Sequence[ProcessGroup]) -> ProcessGroup:
    """Stack process groups of one row each into columns."""
    return ProcessGroup(
        ranks=np.array([group.ranks for group in groups]),
        nodes=np.array([group.nodes for group in groups]),
        per_node=np.array([group.per_node for group in groups]),
        bytes_per_s=np.array([group.bytes_per_s for group in groups]),
        latency_s=np.array([group.latency_s for group in groups]),
        network=np.array([group.network for group in groups], dtype=np.intp),
    )


class _Switches:
    """The switches above each node, by depth from the root, and the rates of their uplinks."""

    def __init__(self, groups: Sequence[NodeGroup], cluster: Cluster) -> None:
        index_of = {name: index for index, name in enumerate(cluster.switches)}
        rates = [switch.uplink_bytes_per_s for switch in cluster.switches.values()]
        self._rates = np.array(
            [math.inf if rate is None else cluster.payload_bytes_per_s(rate) for rate in rates]
        )
        paths = [cluster.switches_above(group.host or "")[::-1] for group in groups]
        self._above = np.full((max(map(len, paths), default=0), len(groups) + 1), -1, dtype=np.intp)
        for column, path in enumerate(paths):
            self._above[: len(path), column] = [index_of[name] for name in path]

    def slowest(self, group: Indices, following: Indices) -> Array:
        """The least rate of a flow over an uplink: a hop leaves switches not above its target."""
        rows, count = group.shape[1], len(self._rates)
        if not np.isfinite(self._rates).any():
            return np.full(rows, math.inf)
        row = np.broadcast_to(np.arange(rows), group.shape)
        flows = np.zeros(count * rows, dtype=np.intp)
        for above in self._above:
            switch = above[group]
            left = (switch >= 0) & (above[following] != switch)
            flows += np.bincount(switch[left] * rows + row[left], minlength=count * rows)
        flows_of = flows.reshape(count, rows)
        shares = self._rates[:, None] / np.maximum(flows_of, 1)
        return np.asarray(np.where(flows_of > 0, shares, math.inf).min(axis=0))


def _measured_pairs(groups: Sequence[NodeGroup]) -> list[tuple[Indices, Indices, Array]]:
    """For each pair matrix: the row and the column of every node group in it, and its rates.

    The rate of a hop is in the matrix of its source node's profile. The last row and column stand
    for nodes that are not in the matrix.
    """
    matrices: dict[int, PairMatrix] = {}
    for group in groups:
        if group.profile.pairs is not None:
            matrices.setdefault(id(group.profile.pairs), group.profile.pairs)
    found = []
    for pairs in matrices.values():
        index_of = {host: index for index, host in enumerate(pairs.hosts)}
        unknown = len(index_of)
        columns = [index_of.get(group.host or "", unknown) for group in groups]
        rows = [
            column if group.profile.pairs is pairs else unknown
            for group, column in zip(groups, columns, strict=True)
        ]
        rates = np.full((unknown + 1, unknown + 1), math.inf)
        known = [
            [math.inf if rate is None else rate for rate in r] for r in pairs.bandwidth_bytes_per_s
        ]
        rates[:unknown, :unknown] = known
        found.append((np.array([*rows, unknown]), np.array([*columns, unknown]), rates))
    return found
