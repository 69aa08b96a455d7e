"""Follow the links between the ranks of many placed rows at once: `process_groups`, as arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from estimator.machines.profile import MachineProfile, PairMatrix
from estimator.placement.placement import Site, hop_latency_s, hop_reach
from estimator.placement.process_groups import ProcessGroup
from estimator.placement.topology import Cluster
from estimator.tables.placed import PlacedColumns, SiteTable
from estimator.timeline.ranks import largest
from estimator.timeline.strategies.registry import DP_REPLICATE, DP_SHARD, Groups

Array = NDArray[np.float64]
Indices = NDArray[np.intp]


class RowLinks:
    """What process groups need of every site, in arrays with one value more, for the site −1.

    `profiles` are the unlike ones of the sites, `cluster` is what joins these.
    """

    def __init__(self, table: SiteTable) -> None:
        sites, self.cluster = table.sites, table.cluster
        self._nic = table.nic_bytes_per_s
        self.profiles: list[MachineProfile] = []
        numbers: dict[int, int] = {}
        of_site = []
        for site in sites:
            if id(site.profile) not in numbers:
                numbers[id(site.profile)] = len(self.profiles)
                self.profiles.append(site.profile)
            of_site.append(numbers[id(site.profile)])
        self.number_of = numbers
        self.profile_of: Indices = np.array([*of_site, 0], dtype=np.intp)
        reach = hop_reach(table.cluster)
        hops = [hop_latency_s(profile, reach) for profile in self.profiles]
        self._latency = np.array([hops[number] for number in of_site] + [0.0])
        self._pairs = _measured_pairs(sites)
        self._switches = _Switches(sites, table.cluster) if table.cluster else None

    def whole_groups(self, placed: PlacedColumns) -> ProcessGroup:
        """The process group of all ranks of each row: `process_groups.whole_group`, as arrays."""
        alone = placed.nodes <= 1
        # Where in the table stands what the busy ranks of each node get of its network.
        sent = placed.site * self._nic.shape[1] + placed.busy
        return ProcessGroup(
            ranks=placed.ranks,
            nodes=np.maximum(placed.nodes, 1),
            per_node=placed.busy.max(axis=0),
            bytes_per_s=np.where(alone, math.inf, self._slowest_hop(placed, sent)),
            latency_s=np.where(alone, 0.0, largest(self._latency, placed.site)),
            network=self._slowest_profile(placed, sent),
        )

    def nested_groups(
        self,
        placed: PlacedColumns,
        whole: ProcessGroup,
        shard: int,
        groups_of: Callable[[int], Groups],
    ) -> Groups:
        """Those that hold one replica and those that hold the same shard, of the `whole` ones.

        Where every node holds whole replicas they follow from counts; `groups_of` tells them of one
        of the other rows.
        """
        there = placed.site >= 0
        regular = ((placed.per_node % shard == 0) | ~there).all(axis=0)
        if self.cluster is not None or not regular.all():
            return self._one_by_one(np.flatnonzero(~placed.wrong), len(regular), groups_of)
        inside = [
            ProcessGroup(
                ranks=np.full(len(regular), shard),
                nodes=np.ones(len(regular), dtype=np.intp),
                per_node=np.full(len(regular), shard),
                bytes_per_s=np.full(len(regular), math.inf),
                latency_s=np.zeros(len(regular)),
                network=self.profile_of[np.where(here, site, placed.site[0])],
            )
            for site, here in zip(placed.site, there, strict=True)
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
        joined: dict[str, tuple[ProcessGroup, ...]] = {}
        for axis in (DP_SHARD, DP_REPLICATE):
            most = max((len(groups[axis]) for groups in found.values()), default=0)
            by_row = [[*found.get(row, {axis: ()})[axis]] for row in range(count)]
            padded = [(each or [alone]) for each in by_row]
            padded = [each + each[-1:] * (most - len(each)) for each in padded]
            joined[axis] = tuple(_joined([each[n] for each in padded]) for n in range(most))
        return joined

    def _slowest_profile(self, placed: PlacedColumns, sent: Indices) -> Indices:
        """The profile of the first site with the slowest network, then the most ranks of a node."""
        width, rows = placed.site.shape
        if len(self.profiles) <= 1:
            return np.zeros(rows, dtype=np.intp)
        # One number that sorts by rate, then by ranks, then by place in the row.
        rank_of = np.unique(self._nic, return_inverse=True)[1].reshape(self._nic.shape) + 1
        rank_of[-1] = rank_of.size + 1
        by_rate = rank_of.reshape(-1) * (int(placed.busy.max()) + 1) * width
        least = by_rate[sent[0]] - placed.busy[0] * width
        for place in range(1, width):
            key = by_rate[sent[place]] - placed.busy[place] * width + place
            np.minimum(least, key, out=least)
        return np.asarray(self.profile_of[placed.site[least % width, np.arange(rows)]])

    def _slowest_hop(self, placed: PlacedColumns, sent: Indices) -> Array:
        """Bytes per second of one flow over the slowest link that the ring crosses."""
        if self._switches is None:
            return -largest(-self._nic.reshape(-1), sent)
        site = placed.site
        following = np.vstack([site[1:], site[:1]])
        following = np.where(following < 0, site[0], following)
        hop = (site >= 0) & (following != site)
        rate = self._busiest_nic(placed, hop, self._nic.reshape(-1)[sent])
        for row_of, column_of, rates in self._pairs:
            measured = rates[row_of[site], column_of[following]]
            np.minimum(rate, np.where(hop, measured, math.inf).min(axis=0), out=rate)
        return np.minimum(rate, self._switches.slowest(site, following))

    def _busiest_nic(self, placed: PlacedColumns, hop: NDArray[np.bool_], nics: Array) -> Array:
        """A node's network is shared by the flows that leave it, one each time the ring does."""
        rate = np.where(hop, nics, math.inf).min(axis=0)
        rows = placed.repeating
        if len(rows):
            site, leaving = placed.site[:, rows], hop[:, rows]
            shared = np.full(len(rows), math.inf)
            for each, whole in zip(site, nics[:, rows], strict=True):
                flows = ((site == each) & leaving).sum(axis=0)
                nic = whole / np.maximum(flows, 1)
                np.minimum(shared, np.where(flows > 0, nic, math.inf), out=shared)
            rate[rows] = shared
        return np.asarray(rate)


def _joined(groups: Sequence[ProcessGroup]) -> ProcessGroup:
    """Process groups of one row each as those of all rows."""
    return ProcessGroup(
        ranks=np.array([group.ranks for group in groups]),
        nodes=np.array([group.nodes for group in groups]),
        per_node=np.array([group.per_node for group in groups]),
        bytes_per_s=np.array([group.bytes_per_s for group in groups]),
        latency_s=np.array([group.latency_s for group in groups]),
        network=np.array([group.network for group in groups], dtype=np.intp),
    )


class _Switches:
    """Which switches are above each node, by depth from the root, and what their uplinks carry."""

    def __init__(self, sites: Sequence[Site], cluster: Cluster) -> None:
        numbers = {name: number for number, name in enumerate(cluster.switches)}
        rates = [switch.uplink_bytes_per_s for switch in cluster.switches.values()]
        self._rates = np.array(
            [math.inf if rate is None else cluster.payload_bytes_per_s(rate) for rate in rates]
        )
        paths = [cluster.switches_above(site.host or "")[::-1] for site in sites]
        self._above = np.full((max(map(len, paths), default=0), len(sites) + 1), -1, dtype=np.intp)
        for column, path in enumerate(paths):
            self._above[: len(path), column] = [numbers[name] for name in path]

    def slowest(self, site: Indices, following: Indices) -> Array:
        """The least that a flow gets of an uplink: a hop leaves the switches not above its end."""
        rows, count = site.shape[1], len(self._rates)
        if not np.isfinite(self._rates).any():
            return np.full(rows, math.inf)
        row = np.broadcast_to(np.arange(rows), site.shape)
        flows = np.zeros(count * rows, dtype=np.intp)
        for above in self._above:
            switch = above[site]
            left = (switch >= 0) & (above[following] != switch)
            flows += np.bincount(switch[left] * rows + row[left], minlength=count * rows)
        flows_of = flows.reshape(count, rows)
        shares = self._rates[:, None] / np.maximum(flows_of, 1)
        return np.asarray(np.where(flows_of > 0, shares, math.inf).min(axis=0))


def _measured_pairs(sites: Sequence[Site]) -> list[tuple[Indices, Indices, Array]]:
    """For each pair matrix: the row and the column of every site in it, and its rates.

    A hop is looked up in the matrix of the profile of the node that it leaves. The last row and
    column stand for nodes that are not in the matrix.
    """
    matrices: dict[int, PairMatrix] = {}
    for site in sites:
        if site.profile.pairs is not None:
            matrices.setdefault(id(site.profile.pairs), site.profile.pairs)
    found = []
    for pairs in matrices.values():
        places = {host: place for place, host in enumerate(pairs.hosts)}
        unknown = len(places)
        columns = [places.get(site.host or "", unknown) for site in sites]
        rows = [
            column if site.profile.pairs is pairs else unknown
            for site, column in zip(sites, columns, strict=True)
        ]
        rates = np.full((unknown + 1, unknown + 1), math.inf)
        known = [
            [math.inf if rate is None else rate for rate in r] for r in pairs.bandwidth_bytes_per_s
        ]
        rates[:unknown, :unknown] = known
        found.append((np.array([*rows, unknown]), np.array([*columns, unknown]), rates))
    return found
