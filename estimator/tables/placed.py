"""Put columns of allocations onto machines or the nodes of a cluster, many rows at once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimator.errors import EstimatorError
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import MachineProfile
from estimator.placement.allocation import MOST_RANKS
from estimator.placement.columns import HOST_MARK, AllocationColumns
from estimator.placement.network import NodeNetwork, network_in_cluster, network_of, rates_by_ranks
from estimator.placement.placement import Site, place, site_of
from estimator.placement.topology import Cluster

Indices = NDArray[np.intp]
Flags = NDArray[np.bool_]
Array = NDArray[np.float64]

_UNKNOWN = -2


@dataclass(slots=True, kw_only=True, eq=False)
class PlacedColumns:
    """Rows on sites: what `Placement` holds of one allocation, in arrays (sites of a row, rows).

    `site` numbers the sites of a `SiteTable`, −1 behind a row's last one; `busy` are the ranks of
    the whole row on one of the site's nodes. `ranks` and `nodes` are per row. `repeating` are the
    rows that come back to a node. `wrong` marks rows that cannot be placed.
    """

    site: Indices
    per_node: Indices
    busy: Indices
    ranks: Indices
    nodes: Indices
    repeating: Indices
    wrong: Flags


class SiteTable:
    """The sites that rows name, numbered as they are met, and what is known of each.

    Without a cluster a site is a machine type, with one it is a node. The arrays have one row more
    than there are sites, for the number −1. `nic_bytes_per_s` has a column for each number of ranks
    on a node, what they get of its network (inf where nothing is known of it).
    """

    def __init__(self, cluster: Cluster | None, profile: MachineProfile | None) -> None:
        self.cluster = cluster
        self.profile = profile
        self.sites: list[Site] = []
        self.devices: Indices = np.zeros(1, dtype=np.intp)
        self.nic_bytes_per_s: Array = np.full((1, 1), math.inf)
        self._numbers: dict[str, int] = {}
        self._networks: list[NodeNetwork | None] = []

    def numbers(self, names: Iterable[str]) -> list[int]:
        """The numbers of machine types, or of hosts where there is a cluster; −2 for unknown."""
        before = len(self.sites)
        found = [self._number(name) for name in names]
        if len(self.sites) > before:
            self.devices = np.array([len(site.profile.devices) for site in self.sites] + [0])
            self.nic_bytes_per_s = rates_by_ranks(self._networks, int(self.devices.max()))
        return found

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            try:
                site, network = self._site(name)
            except EstimatorError:
                self._numbers[name] = _UNKNOWN
            else:
                self._numbers[name] = len(self.sites)
                self.sites.append(site)
                self._networks.append(network)
        return self._numbers[name]

    def _site(self, name: str) -> tuple[Site, NodeNetwork | None]:
        if self.cluster is not None:
            site = site_of(name, (0,), self.cluster, self.profile)
            return site, network_in_cluster(site.profile, self.cluster, name)
        machine = self.profile or load_profile(name)
        return Site(profile=machine, nodes=1, per_node=1), network_of(machine)


@dataclass(slots=True, kw_only=True, eq=False)
class _Groups:
    """The groups of a chunk of rows, in arrays (groups, rows)."""

    columns: AllocationColumns
    site: Indices
    nodes: Indices
    devices: Indices
    is_host: Flags
    wrong: Flags

    @property
    def there(self) -> Flags:
        return self.site >= 0


def place_columns(columns: AllocationColumns, table: SiteTable) -> PlacedColumns:
    """Resolve every group of every row, as `place` does for one allocation."""
    groups = _checked(columns, one_machine=table.profile is not None)
    if table.cluster is None:
        placed = _on_machines(groups, table)
    else:
        placed = _in_cluster(groups, table, table.cluster)
    placed.wrong |= (placed.busy > table.devices[placed.site]).any(axis=0)
    unknown = np.isinf(table.nic_bytes_per_s[:, -1])
    offline = (unknown[placed.site] & (placed.site != -1)).any(axis=0)
    placed.wrong |= offline & (placed.nodes > 1)
    return placed


def _checked(columns: AllocationColumns, *, one_machine: bool) -> _Groups:
    """The groups of rows, and which rows ask for what no allocation can."""
    site = np.ascontiguousarray(columns.site.T, dtype=np.intp)
    nodes = np.ascontiguousarray(columns.nodes.T, dtype=np.intp)
    devices = np.ascontiguousarray(columns.devices.T, dtype=np.intp)
    there = site >= 0
    hosts = [name.endswith(HOST_MARK) for name in columns.sites]
    out = ((nodes < 1) | (nodes > MOST_RANKS) | (devices < 1) | (devices > MOST_RANKS)) & there
    is_host = np.array([*hosts, False])[site] if any(hosts) else np.broadcast_to(False, site.shape)
    if any(hosts):
        out |= is_host & (nodes != 1)
    wrong = out.any(axis=0)
    if wrong.any() or not there.all():
        there &= ~wrong
        site = np.where(there, site, -1)
        nodes, devices = nodes * there, devices * there
    wrong |= (nodes * devices).sum(axis=0) > MOST_RANKS
    if one_machine and len(columns.sites) > 1:
        named = np.where(is_host, len(columns.sites), site)
        wrong |= ((named != named[0]) & there).any(axis=0)
    return _Groups(
        columns=columns, site=site, nodes=nodes, devices=devices, is_host=is_host, wrong=wrong
    )


def _on_machines(groups: _Groups, table: SiteTable) -> PlacedColumns:
    names = groups.columns.sites
    numbers = np.array([*table.numbers(names), -1], dtype=np.intp)
    site = numbers[groups.site]
    wrong = groups.wrong | (groups.is_host | (site == _UNKNOWN)).any(axis=0)
    return PlacedColumns(
        site=np.maximum(site, -1),
        per_node=groups.devices,
        busy=groups.devices,
        ranks=(groups.nodes * groups.devices).sum(axis=0),
        nodes=groups.nodes.sum(axis=0),
        repeating=np.zeros(0, dtype=np.intp),
        wrong=wrong,
    )


def _in_cluster(groups: _Groups, table: SiteTable, cluster: Cluster) -> PlacedColumns:
    """Lay each row's groups out node by node; counted groups take the first free nodes."""
    names = groups.columns.sites
    hosts = [name.removesuffix(HOST_MARK) if name.endswith(HOST_MARK) else None for name in names]
    numbers = table.numbers(host for host in hosts if host is not None)
    by_number = iter(numbers)
    host_number = np.array([-1 if h is None else next(by_number) for h in hosts] + [-1])
    nodes_of = [
        np.array(table.numbers(cluster.hosts_of(name)) if host is None else [], dtype=np.intp)
        for name, host in zip(names, hosts, strict=True)
    ]
    available = np.array([len(nodes) for nodes in nodes_of] + [0])
    before = _taken_before(groups)
    counted = ~groups.is_host & groups.there
    wrong = groups.wrong | ((before + groups.nodes > available[groups.site]) & counted).any(axis=0)
    wrong |= (groups.is_host & (host_number[groups.site] == _UNKNOWN)).any(axis=0)
    highest = groups.columns.highest
    if highest is not None:
        named = np.where(groups.is_host, highest.T, -1)
        wrong |= (named >= table.devices[host_number[groups.site]]).any(axis=0) & ~wrong
    first = np.cumsum([0, *available[:-2]])
    pool = np.concatenate([*nodes_of, np.zeros(1, dtype=np.intp)])
    starts = np.where(groups.is_host, 0, np.append(first, 0)[groups.site] + before)
    site, per_node = _laid_out(groups, starts, pool, host_number, ~wrong)
    mixed = np.flatnonzero(groups.is_host.any(axis=0) & counted.any(axis=0) & ~wrong)
    for row in mixed.tolist():
        _place_row(groups, row, table, site, per_node, wrong)
    return _joined(site, per_node, wrong)


def _taken_before(groups: _Groups) -> Indices:
    """For each group, the nodes that earlier groups of its row take of the same machine type."""
    before = np.zeros_like(groups.nodes)
    for later in range(1, len(before)):
        for earlier in range(later):
            same = groups.site[earlier] == groups.site[later]
            before[later] += np.where(same, groups.nodes[earlier], 0)
    return before


def _laid_out(
    groups: _Groups, starts: Indices, pool: Indices, host_number: Indices, right: Flags
) -> tuple[Indices, Indices]:
    """(site, devices) node by node, in arrays (nodes, rows); wrong rows stay empty."""
    count = np.where(right, groups.nodes, 0).T.ravel()
    group = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(group)) - np.repeat(np.cumsum(count) - count, count)
    row = group // max(len(groups.site), 1)
    of_row = np.where(right, groups.nodes.sum(axis=0), 0)
    column = np.arange(len(group)) - np.repeat(np.cumsum(of_row) - of_row, of_row)
    host = host_number[groups.site.T.ravel()[group]]
    taken = pool[np.minimum(starts.T.ravel()[group] + within, len(pool) - 1)]
    shape = (int(of_row.max(initial=1)), len(of_row))
    site, per_node = np.full(shape, -1, dtype=np.intp), np.zeros(shape, dtype=np.intp)
    site[column, row] = np.where(host >= 0, host, taken)
    per_node[column, row] = groups.devices.T.ravel()[group]
    return site, per_node


def _place_row(
    groups: _Groups, row: int, table: SiteTable, site: Indices, per_node: Indices, wrong: Flags
) -> None:
    """Rows that mix named hosts with counted nodes are placed one by one."""
    try:
        placed = place(groups.columns.allocation(row), cluster=table.cluster, profile=table.profile)
    except EstimatorError:
        wrong[row] = True
        return
    site[: len(placed.sites), row] = table.numbers(s.host or "" for s in placed.sites)
    per_node[: len(placed.sites), row] = [s.per_node for s in placed.sites]


def _joined(site: Indices, per_node: Indices, wrong: Flags) -> PlacedColumns:
    """Add up what the parts of a row take of the same node."""
    wrong |= (site == _UNKNOWN).any(axis=0)
    site = np.maximum(site, -1)
    busy = per_node.copy()
    nodes = (site >= 0).sum(axis=0)
    in_order = np.sort(site, axis=0)
    again = (in_order[1:] == in_order[:-1]) & (in_order[1:] >= 0)
    repeating = np.flatnonzero(again.any(axis=0))
    if len(repeating):
        nodes[repeating] -= again[:, repeating].sum(axis=0)
        some, amounts = site[:, repeating], per_node[:, repeating]
        for number, each in enumerate(some):
            busy[number, repeating] = np.where(some == each, amounts, 0).sum(axis=0)
    return PlacedColumns(
        site=site,
        per_node=per_node,
        busy=busy,
        ranks=per_node.sum(axis=0),
        nodes=nodes,
        repeating=repeating,
        wrong=wrong,
    )
