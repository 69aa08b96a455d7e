"""Place columns of allocations on machines or nodes, with groups, links and rank classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from estimator.cache import Cache
from estimator.elementwise import Array, Flags, Indices
from estimator.errors import EstimatorError
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.catalogue import named_profile
from estimator.machines.profile import MachineProfile, PairMatrix
from estimator.placement.allocation import MOST_RANKS
from estimator.placement.columns import HOST_MARK, AllocationColumns
from estimator.placement.mesh import ProcessGroup
from estimator.placement.placement import (
    NodeGroup,
    hop_latency_s,
    hop_locality,
    node_group_of,
    place,
)
from estimator.placement.topology import (
    Cluster,
    NodeNetwork,
    network_in_cluster,
    network_of,
    rates_by_ranks,
)
from estimator.timeline.plan import compiled_step
from estimator.timeline.rank.program import RankClass, RankColumns, largest
from estimator.timeline.rank.rules import DP_REPLICATE, DP_SHARD, Groups, StepShape

_UNKNOWN = -2


@dataclass(slots=True, kw_only=True, eq=False)
class PlacedColumns:
    """What `Placement` holds of one allocation, in arrays (node groups of a row, rows).

    `node_group` are indices into a `NodeGroupTable`, padded with −1 behind a row's last group;
    `per_node` are the group's ranks on each of its nodes, `group_ranks` on all, `ranks_on_node`
    those of the whole row there. `ranks` and `nodes` are per row. `repeating` are the rows with a
    node in several groups. `invalid` marks rows that cannot be placed.
    """

    node_group: Indices
    per_node: Indices
    group_ranks: Indices
    ranks_on_node: Indices
    ranks: Indices
    nodes: Indices
    repeating: Indices
    invalid: Flags


class NodeGroupTable:
    """The node groups that rows name, indexed in the order of first use, and their properties.

    Without a cluster a node group is a machine type, with one it is a single node. The arrays have
    one row more than there are groups, for the padding index −1. `nic_bytes_per_s` has a column for
    each number of ranks on a node: their rate over its network (inf where that is unknown).
    """

    def __init__(self, cluster: Cluster | None, profile: MachineProfile | None) -> None:
        self.cluster = cluster
        self.profile = profile
        self.groups: list[NodeGroup] = []
        self.devices: Indices = np.zeros(1, dtype=np.intp)
        self.nic_bytes_per_s: Array = np.full((1, 1), math.inf)
        self._indices: dict[str, int] = {}
        self._networks: list[NodeNetwork | None] = []

    def indices(self, names: Iterable[str]) -> list[int]:
        """The indices of machine types, or of hosts where there is a cluster; −2 for unknown."""
        before = len(self.groups)
        indices = [self._index(name) for name in names]
        if len(self.groups) > before:
            self.devices = np.array([len(group.profile.devices) for group in self.groups] + [0])
            self.nic_bytes_per_s = rates_by_ranks(self._networks, int(self.devices.max()))
        return indices

    def _index(self, name: str) -> int:
        if name not in self._indices:
            try:
                group, network = self._node_group(name)
            except EstimatorError:
                self._indices[name] = _UNKNOWN
            else:
                self._indices[name] = len(self.groups)
                self.groups.append(group)
                self._networks.append(network)
        return self._indices[name]

    def _node_group(self, name: str) -> tuple[NodeGroup, NodeNetwork | None]:
        if self.cluster is not None:
            node_group = node_group_of(name, (0,), self.cluster, self.profile)
            return node_group, network_in_cluster(node_group.profile, self.cluster, name)
        machine = self.profile or named_profile(name)
        return NodeGroup(profile=machine, nodes=1, per_node=1), network_of(machine)


@dataclass(slots=True, kw_only=True, eq=False)
class _ChunkGroups:
    """The groups of a chunk of rows, in arrays (groups, rows); `name` is in `columns.machines`."""

    columns: AllocationColumns
    name: Indices
    nodes: Indices
    devices: Indices
    is_host: Flags
    invalid: Flags

    @property
    def is_present(self) -> Flags:
        return self.name >= 0


def place_columns(columns: AllocationColumns, table: NodeGroupTable) -> PlacedColumns:
    """Resolve every group of every row, as `place` does for one allocation."""
    groups = _checked(columns, one_machine=table.profile is not None)
    if table.cluster is None:
        placed = _on_machines(groups, table)
    else:
        placed = _in_cluster(groups, table, table.cluster)
    placed.invalid |= (placed.ranks_on_node > table.devices[placed.node_group]).any(axis=0)
    unknown = np.isinf(table.nic_bytes_per_s[:, -1])
    offline = (unknown[placed.node_group] & (placed.node_group != -1)).any(axis=0)
    placed.invalid |= offline & (placed.nodes > 1)
    return placed


def _checked(columns: AllocationColumns, *, one_machine: bool) -> _ChunkGroups:
    """The groups of rows; rows whose counts no allocation can have are invalid."""
    name = np.ascontiguousarray(columns.machine.T, dtype=np.intp)
    nodes = np.ascontiguousarray(columns.nodes.T, dtype=np.intp)
    devices = np.ascontiguousarray(columns.devices.T, dtype=np.intp)
    is_present = name >= 0
    hosts = [text.endswith(HOST_MARK) for text in columns.machines]
    out_of_range = (nodes < 1) | (nodes > MOST_RANKS) | (devices < 1) | (devices > MOST_RANKS)
    out_of_range &= is_present
    is_host = np.array([*hosts, False])[name] if any(hosts) else np.broadcast_to(False, name.shape)
    if any(hosts):
        out_of_range |= is_host & (nodes != 1)
    invalid = out_of_range.any(axis=0)
    if invalid.any() or not is_present.all():
        is_present &= ~invalid
        name = np.where(is_present, name, -1)
        nodes, devices = nodes * is_present, devices * is_present
    invalid |= (nodes * devices).sum(axis=0) > MOST_RANKS
    if one_machine and len(columns.machines) > 1:
        named = np.where(is_host, len(columns.machines), name)
        invalid |= ((named != named[0]) & is_present).any(axis=0)
    return _ChunkGroups(
        columns=columns, name=name, nodes=nodes, devices=devices, is_host=is_host, invalid=invalid
    )


def _on_machines(groups: _ChunkGroups, table: NodeGroupTable) -> PlacedColumns:
    names = groups.columns.machines
    indices = np.array([*table.indices(names), -1], dtype=np.intp)
    node_group = indices[groups.name]
    invalid = groups.invalid | (groups.is_host | (node_group == _UNKNOWN)).any(axis=0)
    group_ranks = groups.nodes * groups.devices
    return PlacedColumns(
        node_group=np.maximum(node_group, -1),
        per_node=groups.devices,
        group_ranks=group_ranks,
        ranks_on_node=groups.devices,
        ranks=group_ranks.sum(axis=0),
        nodes=groups.nodes.sum(axis=0),
        repeating=np.zeros(0, dtype=np.intp),
        invalid=invalid,
    )


def _in_cluster(groups: _ChunkGroups, table: NodeGroupTable, cluster: Cluster) -> PlacedColumns:
    """Expand each row's groups node by node; counted groups take the first free nodes."""
    names = groups.columns.machines
    hosts = [name.removesuffix(HOST_MARK) if name.endswith(HOST_MARK) else None for name in names]
    indices = iter(table.indices(host for host in hosts if host is not None))
    host_index = np.array([-1 if h is None else next(indices) for h in hosts] + [-1])
    nodes_of = [
        np.array(table.indices(cluster.hosts_of(name)) if host is None else [], dtype=np.intp)
        for name, host in zip(names, hosts, strict=True)
    ]
    available = np.array([len(nodes) for nodes in nodes_of] + [0])
    before = _taken_before(groups)
    counted = ~groups.is_host & groups.is_present
    too_many = (before + groups.nodes > available[groups.name]) & counted
    invalid = groups.invalid | too_many.any(axis=0)
    invalid |= (groups.is_host & (host_index[groups.name] == _UNKNOWN)).any(axis=0)
    highest = groups.columns.highest
    if highest is not None:
        named = np.where(groups.is_host, highest.T, -1)
        invalid |= (named >= table.devices[host_index[groups.name]]).any(axis=0) & ~invalid
    first = np.cumsum([0, *available[:-2]])
    pool = np.concatenate([*nodes_of, np.zeros(1, dtype=np.intp)])
    starts = np.where(groups.is_host, 0, np.append(first, 0)[groups.name] + before)
    node_group, per_node = _expanded(groups, starts, pool, host_index, ~invalid)
    mixed = np.flatnonzero(groups.is_host.any(axis=0) & counted.any(axis=0) & ~invalid)
    for row in mixed.tolist():
        _place_row(groups, row, table, node_group, per_node, invalid)
    return _joined(node_group, per_node, invalid)


def _taken_before(groups: _ChunkGroups) -> Indices:
    """For each group, the nodes that earlier groups of its row take of the same machine type."""
    before = np.zeros_like(groups.nodes)
    for later in range(1, len(before)):
        for earlier in range(later):
            same = groups.name[earlier] == groups.name[later]
            before[later] += np.where(same, groups.nodes[earlier], 0)
    return before


def _expanded(
    groups: _ChunkGroups, starts: Indices, pool: Indices, host_index: Indices, valid: Flags
) -> tuple[Indices, Indices]:
    """(node_group, devices) node by node, in arrays (nodes, rows); invalid rows stay empty."""
    count = np.where(valid, groups.nodes, 0).T.ravel()
    group = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(group)) - np.repeat(np.cumsum(count) - count, count)
    row = group // max(len(groups.name), 1)
    of_row = np.where(valid, groups.nodes.sum(axis=0), 0)
    column = np.arange(len(group)) - np.repeat(np.cumsum(of_row) - of_row, of_row)
    host = host_index[groups.name.T.ravel()[group]]
    taken = pool[np.minimum(starts.T.ravel()[group] + within, len(pool) - 1)]
    shape = (int(of_row.max(initial=1)), len(of_row))
    node_group, per_node = np.full(shape, -1, dtype=np.intp), np.zeros(shape, dtype=np.intp)
    node_group[column, row] = np.where(host >= 0, host, taken)
    per_node[column, row] = groups.devices.T.ravel()[group]
    return node_group, per_node


def _place_row(
    groups: _ChunkGroups,
    row: int,
    table: NodeGroupTable,
    node_group: Indices,
    per_node: Indices,
    invalid: Flags,
) -> None:
    """Place one row by `place`: rows that mix named hosts with counted nodes."""
    try:
        placed = place(groups.columns.allocation(row), cluster=table.cluster, profile=table.profile)
    except EstimatorError:
        invalid[row] = True
        return
    node_group[: len(placed.node_groups), row] = table.indices(
        s.host or "" for s in placed.node_groups
    )
    per_node[: len(placed.node_groups), row] = [s.per_node for s in placed.node_groups]


def _joined(node_group: Indices, per_node: Indices, invalid: Flags) -> PlacedColumns:
    """Add up the ranks of a row's groups on the same node."""
    invalid |= (node_group == _UNKNOWN).any(axis=0)
    node_group = np.maximum(node_group, -1)
    ranks_on_node = per_node.copy()
    nodes = (node_group >= 0).sum(axis=0)
    in_order = np.sort(node_group, axis=0)
    repeated = (in_order[1:] == in_order[:-1]) & (in_order[1:] >= 0)
    repeating = np.flatnonzero(repeated.any(axis=0))
    if len(repeating):
        nodes[repeating] -= repeated[:, repeating].sum(axis=0)
        some, ranks = node_group[:, repeating], per_node[:, repeating]
        for position, part in enumerate(some):
            ranks_on_node[position, repeating] = np.where(some == part, ranks, 0).sum(axis=0)
    return PlacedColumns(
        node_group=node_group,
        per_node=per_node,
        group_ranks=per_node,
        ranks_on_node=ranks_on_node,
        ranks=per_node.sum(axis=0),
        nodes=nodes,
        repeating=repeating,
        invalid=invalid,
    )


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
        """The process group of all ranks of each row; see `mesh.whole_group`."""
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
        outer: ProcessGroup,
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
            outer,
            ranks=outer.ranks // shard,
            per_node=outer.per_node // shard,
            # A node's ranks of one replica are each in a group of their own.
            bytes_per_s=outer.bytes_per_s / shard,
        )
        return {DP_SHARD: tuple(inside), DP_REPLICATE: (between,)}

    def _one_by_one(self, rows: Indices, count: int, groups_of: Callable[[int], Groups]) -> Groups:
        of_row = {row: groups_of(row) for row in rows.tolist()}
        alone = ProcessGroup(ranks=1, nodes=1, per_node=1)
        stacked: dict[str, tuple[ProcessGroup, ...]] = {}
        for axis in (DP_SHARD, DP_REPLICATE):
            most = max((len(groups[axis]) for groups in of_row.values()), default=0)
            by_row = [[*of_row.get(row, {axis: ()})[axis]] for row in range(count)]
            padded = [(groups or [alone]) for groups in by_row]
            padded = [groups + groups[-1:] * (most - len(groups)) for groups in padded]
            stacked[axis] = tuple(_stacked([groups[n] for groups in padded]) for n in range(most))
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

    def _busiest_nic(self, placed: PlacedColumns, hop: Flags, nics: Array) -> Array:
        """The rate of a flow over the busiest NIC: one flow each time the ring leaves a node."""
        rate = np.where(hop, nics, math.inf).min(axis=0)
        rows = placed.repeating
        if len(rows):
            group, leaving = placed.node_group[:, rows], hop[:, rows]
            shared = np.full(len(rows), math.inf)
            for member, nics_of_row in zip(group, nics[:, rows], strict=True):
                flows = ((group == member) & leaving).sum(axis=0)
                nic = nics_of_row / np.maximum(flows, 1)
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
    measured = []
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
        measured.append((np.array([*rows, unknown]), np.array([*columns, unknown]), rates))
    return measured


_LARGEST = np.iinfo(np.int64).max


class RankClassTable:
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
        self._kinds: list[RankClass] = []
        self.columns = RankColumns(self._kinds)

    def are_mixed(self, placed: PlacedColumns) -> Flags:
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
