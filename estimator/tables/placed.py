"""Place columns of allocations on machines or on the nodes of a cluster, vectorised over rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimator.errors import EstimatorError
from estimator.machines.catalogue import named_profile
from estimator.machines.profile import MachineProfile
from estimator.placement.allocation import MOST_RANKS
from estimator.placement.columns import HOST_MARK, AllocationColumns
from estimator.placement.network import NodeNetwork, network_in_cluster, network_of, rates_by_ranks
from estimator.placement.placement import NodeGroup, node_group_of, place
from estimator.placement.topology import Cluster

Indices = NDArray[np.intp]
Flags = NDArray[np.bool_]
Array = NDArray[np.float64]

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
        found = [self._index(name) for name in names]
        if len(self.groups) > before:
            self.devices = np.array([len(group.profile.devices) for group in self.groups] + [0])
            self.nic_bytes_per_s = rates_by_ranks(self._networks, int(self.devices.max()))
        return found

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
class _Groups:
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


def _checked(columns: AllocationColumns, *, one_machine: bool) -> _Groups:
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
    return _Groups(
        columns=columns, name=name, nodes=nodes, devices=devices, is_host=is_host, invalid=invalid
    )


def _on_machines(groups: _Groups, table: NodeGroupTable) -> PlacedColumns:
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


def _in_cluster(groups: _Groups, table: NodeGroupTable, cluster: Cluster) -> PlacedColumns:
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


def _taken_before(groups: _Groups) -> Indices:
    """For each group, the nodes that earlier groups of its row take of the same machine type."""
    before = np.zeros_like(groups.nodes)
    for later in range(1, len(before)):
        for earlier in range(later):
            same = groups.name[earlier] == groups.name[later]
            before[later] += np.where(same, groups.nodes[earlier], 0)
    return before


def _expanded(
    groups: _Groups, starts: Indices, pool: Indices, host_index: Indices, valid: Flags
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
    groups: _Groups,
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
        for position, each in enumerate(some):
            ranks_on_node[position, repeating] = np.where(some == each, ranks, 0).sum(axis=0)
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
