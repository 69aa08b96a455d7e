"""Give every rank its coordinates, and every axis its process groups with their slowest hop."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from estimator.elementwise import Flags, Indices
from estimator.errors import AllocationError, StrategyError, WorkloadError, quoted
from estimator.machines.profile import (
    CollectiveCost,
    CollectiveName,
    DeviceKind,
    MachineProfile,
    PairMatrix,
)
from estimator.placement.placement import NodeGroup, NodeKind, Placement
from estimator.placement.topology import Cluster, network_in_cluster, network_of
from estimator.workload.layouts import DATA_PARALLEL, Layout
from estimator.workload.strategies import MOST_GLOBAL_BATCH, Strategy, check_count


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """What the cost of a collective needs to know of a group of ranks: one, or a row for each.

    `bytes_per_s` is what one flow of a ring in rank order gets on the slowest hop between nodes
    after the flows that share it have divided it (inf within one node); `latency_s` is the longest
    hop's. `per_node` are the most ranks of the group on one node. `network` is the number of the
    profile whose measurements cost the group's collectives, among those that are asked;
    `sharing_ratio` is how many times as fast that hop is while the other groups along the axis are
    silent, `link` says in words what it crosses.
    """

    ranks: Any
    nodes: Any
    per_node: Any
    bytes_per_s: Any = math.inf
    latency_s: Any = 0.0
    network: Any = 0
    sharing_ratio: Any = 1.0
    link: str = field(default="", compare=False)


def carrier_of(op: CollectiveName, kind: DeviceKind) -> CollectiveName:
    """The collective that the ranks run for one.

    gloo reduces the whole buffer on every rank and keeps a part of it, for want of a
    reduce-scatter of its own (ProcessGroupGloo.cpp, _reduce_scatter_base).
    """
    return "all_reduce" if op == "reduce_scatter" and kind == "cpu" else op


def whole_group(placement: Placement) -> ProcessGroup:
    """All ranks of a placement: a ring in rank order; gloo and NCCL keep the order of nodes."""
    kinds = placement.kinds
    per_node = max([kind.ranks_per_node for kind in kinds])
    if placement.nodes <= 1:
        return ProcessGroup(ranks=placement.ranks, nodes=1, per_node=per_node)
    rate, link = math.inf, ""
    names: tuple[str, ...] = ("",)
    for candidate, what, between in _limits(placement):
        if candidate < rate:
            rate, link, names = candidate, what, between
    return ProcessGroup(
        ranks=placement.ranks,
        nodes=placement.nodes,
        per_node=per_node,
        bytes_per_s=rate,
        latency_s=max([kind.hop_latency_s for kind in kinds]),
        link=link.format(*names),
    )


_Limit = tuple[float, str, tuple[str, ...]]
_Hop = tuple[str, str]


def _limits(placement: Placement) -> Iterator[_Limit]:
    """What a ring hop crosses: (bytes per second of one flow, kind of link, names in it)."""
    cluster = placement.cluster
    if cluster is None:
        slowest = slowest_network(placement)
        yield slowest.rate_bytes_per_s, _NETWORK, (slowest.profile.name,)
        return
    node_groups = placement.node_groups
    hops = list(_hops(node_groups))
    flows = Counter([a.host for a, _ in hops])
    for node_group, number in zip(node_groups, placement.kind_of, strict=True):
        leaving, rate = flows[node_group.host], placement.kinds[number].nic_bytes_per_s
        if rate is not None and leaving:
            yield rate / leaving, _UPLINK, (node_group.host or "",)
    named = [(a.host or "", b.host or "") for a, b in hops]
    between = Counter(named)
    for (a, _), ends in zip(hops, named, strict=True):
        if a.profile.pairs is not None:
            yield from _measured_limit(a.profile.pairs, ends, between[ends])
    yield from _switch_limits(_leaving(named, cluster), cluster)


# A node by its number or name, or a switch by its name.
HopKey = tuple[str, int | str | None]


def crossed(placement: Placement) -> dict[HopKey, tuple[float, int]]:
    """What a ring in rank order leaves: (bytes per second of its uplink each way, how often).

    Without a cluster, nodes are told apart by their numbers. Empty within one node.
    """
    if placement.nodes <= 1:
        return {}
    cluster, node_groups = placement.cluster, placement.node_groups
    if cluster is None:
        profiles = [group.profile for group in node_groups for _ in range(group.nodes)]
        networks = [(number, network_of(profile)) for number, profile in enumerate(profiles)]
        return {("node", number): (net.bytes_per_s, 1) for number, net in networks if net}
    hops, found = list(_hops(node_groups)), dict[HopKey, tuple[float, int]]()
    flows, of_host = Counter([a.host for a, _ in hops]), {a.host: a.profile for a, _ in hops}
    for host, profile in of_host.items():
        network = network_in_cluster(profile, cluster, host or "")
        if network is not None:
            found["node", host] = network.bytes_per_s, flows[host]
    for name, count in _leaving([(a.host or "", b.host or "") for a, b in hops], cluster).items():
        rate = cluster.switches[name].uplink_bytes_per_s
        if rate is not None:
            found["switch", name] = cluster.payload_bytes_per_s(rate), count
    return found


def check_room(placements: Sequence[Placement]) -> None:
    """Raise AllocationError where jobs want more devices of a node together than it has."""
    wanted: Counter[int | str] = Counter()
    for placement in placements:
        number = 0
        for group in placement.node_groups:
            for node in [number + n for n in range(group.nodes)]:
                key = node if group.host is None else group.host
                wanted[key] += group.per_node
                if wanted[key] > len(group.profile.devices):
                    raise AllocationError(
                        f"the jobs want {wanted[key]} devices of "
                        + (f"node {node + 1}" if group.host is None else f"'{group.host}'")
                        + f", which has {len(group.profile.devices)}; name other nodes of a cluster"
                    )
            number += group.nodes


_NETWORK = "the network of '{}'"
_UPLINK = "the uplink of node '{}'"


def _hops(node_groups: Sequence[NodeGroup]) -> Iterator[tuple[NodeGroup, NodeGroup]]:
    """Neighbouring groups of nodes on unlike nodes, the last and the first included."""
    for index, node_group in enumerate(node_groups):
        following = node_groups[(index + 1) % len(node_groups)]
        if following.host != node_group.host:
            yield node_group, following


def _measured_limit(pairs: PairMatrix | None, hop: _Hop, flows: int) -> Iterator[_Limit]:
    """What one flow of the pair was measured to get is what any number of them get together."""
    rate = _pair_rate(pairs, *hop)
    if rate is not None:
        yield rate / flows, _share(flows) + "the link between '{}' and '{}'", hop


def _pair_rate(pairs: PairMatrix | None, a: str | None, b: str | None) -> float | None:
    if pairs is None or a not in pairs.hosts or b not in pairs.hosts:
        return None
    return pairs.bandwidth_bytes_per_s[pairs.hosts.index(a)][pairs.hosts.index(b)]


def _outside(switches: Sequence[str], beyond: Sequence[str]) -> list[str]:
    """The switches above the start of a hop that are not above its end: it leaves them."""
    return [switch for switch in switches if switch not in beyond]


def _leaving(hops: Sequence[_Hop], cluster: Cluster) -> Counter[str]:
    """How many hops leave each switch."""
    above = cluster.switches_above
    # Most hops of a large ring go from and to the same switches.
    alike = Counter([(above(a), above(b)) for a, b in hops])
    leaving: Counter[str] = Counter()
    for (switches, beyond), count in alike.items():
        leaving.update(dict.fromkeys(_outside(switches, beyond), count))
    return leaving


def _switch_limits(leaving: Counter[str], cluster: Cluster) -> Iterator[_Limit]:
    """The uplinks that hops leave, each divided by the flows on it."""
    for name, flows in leaving.items():
        rate = cluster.switches[name].uplink_bytes_per_s
        if rate is not None:
            yield cluster.payload_bytes_per_s(rate) / flows, "the uplink of switch '{}'", (name,)


def groups_along(
    placement: Placement, members: Indices
) -> tuple[tuple[ProcessGroup, NodeKind], ...]:
    """The unlike groups that communicate at once, each with the kind of node that costs it.

    Groups of one shape are unlike where other machines cost them.

    `members` are the ranks of each group in the order of its ring, (groups, ranks of each). Flows
    of all groups that leave a node, or a switch, share its uplink.
    """
    first, size = placement.kinds[0], members.shape[1]
    if len(placement.kinds) == 1 and placement.cluster is None:
        node = members // first.ranks_per_node
        if (node == node[:, :1]).all():
            inside = ProcessGroup(ranks=size, nodes=1, per_node=size)
            return ((inside, first),)
    nodes = _NodesOfRanks(placement)
    node = nodes.of_rank[members]
    following = node.take(np.arange(1, size + 1) % size, axis=1)
    hop = node != following
    flows = np.bincount(node[hop], minlength=len(nodes.kinds))
    if nodes.are_named:
        crossing = [
            [nodes.hop(a, b) for a, b in zip(*ends, strict=True)]
            for ends in _ends(node, following, hop)
        ]
    else:
        unlike = _unlike(node, flows, nodes.kind_of)
        node, hop = node[unlike], hop[unlike]
        crossing = [[]] * len(unlike)
    rates = np.array([kind.rate_bytes_per_s for kind in placement.kinds])[nodes.kind_of]
    own_rate = np.where(hop, rates[node] / np.maximum(flows, 1)[node], math.inf)
    shared = _shared_limits(placement.cluster, crossing)
    between: Counter[tuple[str, ...]] = Counter(ends for hops in crossing for ends in hops)
    groups: dict[tuple[ProcessGroup, int], tuple[ProcessGroup, NodeKind]] = {}
    for number, row in enumerate(node.tolist()):
        counts = Counter(row)
        kinds = [placement.kinds[kind] for kind in dict.fromkeys(nodes.kind_of[row].tolist())]
        across = len(counts) > 1
        slowest = int(own_rate[number].argmin())
        own, names = nodes.name(row[slowest])
        leaving = int(flows[row[slowest]])
        limits: list[_Limit] = [(float(own_rate[number, slowest]), _share(leaving) + own, names)]
        for ends in crossing[number]:
            limits += _measured_limit(nodes.pairs_of(ends[0]), ends, between[ends])
            limits += shared.get(ends, ())
        rate, link, names = min(limits, key=lambda limit: limit[0])
        # What a switch limits is taken for the group's own.
        flows_there = between[names] or 1
        own_flows = sum(ends == names for ends in crossing[number]) or 1
        if across and limits[0][0] == rate:
            own_flows = int((hop[number] & (node[number] == row[slowest])).sum())
            flows_there = leaving
        group = ProcessGroup(
            ranks=len(row),
            nodes=len(counts),
            per_node=max(counts.values()),
            bytes_per_s=rate if across else math.inf,
            latency_s=max(kind.hop_latency_s for kind in kinds) if across else 0.0,
            sharing_ratio=flows_there / own_flows,
            link=link.format(*names) if across else "",
        )
        kind = min(kinds, key=_BY_NETWORK)
        groups.setdefault((group, id(kind.profile)), (group, kind))
    return tuple(groups.values())


def _share(flows: int) -> str:
    """What to say before the name of a link that several flows share."""
    return f"1/{flows} of " if flows > 1 else ""


def slowest_network(placement: Placement) -> NodeKind:
    """The kind of node with the slowest network, among equals the one with most ranks."""
    kinds = placement.kinds
    return kinds[0] if len(kinds) == 1 else min(kinds, key=_BY_NETWORK)


_BY_NETWORK = attrgetter("by_network")


def _ends(node: Indices, following: Indices, hop: Flags) -> Iterator[tuple[list[int], list[int]]]:
    for a, b, there in zip(node, following, hop, strict=True):
        yield a[there].tolist(), b[there].tolist()


def _unlike(node: Indices, flows: Indices, kind_of: Indices) -> list[int]:
    """The first of each sort of groups over nodes without names.

    Groups are alike whose rings go through nodes of the same kinds at the same distances, each left
    by as many flows.
    """
    sorts = np.stack([node - node[:, :1], flows[node], kind_of[node]], axis=1)
    if (sorts == sorts[0]).all():
        return [0]
    first: dict[bytes, int] = {}
    for number, sort in enumerate(sorts):
        first.setdefault(sort.tobytes(), number)
    return list(first.values())


def _shared_limits(
    cluster: Cluster | None, crossing: Sequence[Sequence[_Hop]]
) -> dict[_Hop, list[_Limit]]:
    """For each hop, the uplinks of switches that it leaves, divided by all flows on them."""
    if cluster is None:
        return {}
    hops = [hop for group in crossing for hop in group]
    leaving, above = _leaving(hops, cluster), cluster.switches_above
    limits = {
        names[0]: (rate, _share(leaving[names[0]]) + link, names)
        for rate, link, names in _switch_limits(leaving, cluster)
    }
    return {
        hop: [limits[name] for name in _outside(*map(above, hop)) if name in limits]
        for hop in set(hops)
    }


class _NodesOfRanks:
    """The nodes of a placement one by one, and on which of them each rank is."""

    def __init__(self, placement: Placement) -> None:
        self._hosts: list[str | None] = []
        self._number_of: dict[str, int] = {}
        kind_of: list[int] = []
        of_rank: list[Indices] = []
        for node_group, number in zip(placement.node_groups, placement.kind_of, strict=True):
            host, first, count = node_group.host, len(kind_of), node_group.nodes
            if host is not None:
                first = self._number_of.setdefault(host, first)
                count = int(first == len(kind_of))
            kind_of += [number] * count
            self._hosts += [host] * count
            own = np.arange(first, first + max(count, 1))
            of_rank.append(np.repeat(own, node_group.per_node))
        self.kinds = [placement.kinds[number] for number in kind_of]
        self.kind_of: Indices = np.array(kind_of, dtype=np.intp)
        self.of_rank: Indices = np.concatenate(of_rank)
        self.are_named = bool(self._number_of)

    def hop(self, a: int, b: int) -> _Hop:
        return self._hosts[a] or "", self._hosts[b] or ""

    def name(self, node: int) -> tuple[str, tuple[str, ...]]:
        """What to call the network of a node: (text, names in it)."""
        host = self._hosts[node]
        if host is None:
            return _NETWORK, (self.kinds[node].profile.name,)
        return _UPLINK, (host,)

    def pairs_of(self, host: str) -> PairMatrix | None:
        number = self._number_of.get(host)
        return None if number is None else self.kinds[number].profile.pairs


def ring_between(
    cost: CollectiveCost,
    latency_s: float,
    nic_bytes_per_s: float | None,
    profile: MachineProfile | None,
    cluster: Cluster | None = None,
) -> ProcessGroup:
    """The ring of a measured group, by the links measured beside it and those of its cluster.

    A cluster counts where the group ran on nodes of it, which are then as the `profile`.
    """
    per_node = math.ceil(cost.group_size / cost.nodes)
    if not cost.spans_nodes:
        return ProcessGroup(ranks=cost.group_size, nodes=1, per_node=per_node)
    neighbours = zip(cost.hosts, cost.hosts[1:] + cost.hosts[:1], strict=True)
    hops = [(a, b) for a, b in neighbours if a != b]
    pairs = None if profile is None else profile.pairs
    rates = [
        rate / flows
        for (a, b), flows in Counter(hops).items()
        if (rate := _pair_rate(pairs, a, b)) is not None
    ]
    if not rates and nic_bytes_per_s is not None:
        rates.append(nic_bytes_per_s)
    if cluster is not None and profile is not None and cluster.nodes.keys() >= set(cost.hosts):
        rates += [rate for rate, _, _ in _switch_limits(_leaving(hops, cluster), cluster)]
        rates += _uplink_rates(hops, Counter(cost.hosts), profile, cluster)
    return ProcessGroup(
        ranks=cost.group_size,
        nodes=cost.nodes,
        per_node=per_node,
        bytes_per_s=min(rates, default=math.inf),
        latency_s=latency_s,
    )


def _uplink_rates(
    hops: Sequence[_Hop],
    ranks_of: Mapping[str, int],
    profile: MachineProfile,
    cluster: Cluster,
) -> Iterator[float]:
    """What one flow gets on the uplinks of the nodes that hops leave."""
    for host, flows in Counter([a for a, _ in hops]).items():
        network = network_in_cluster(profile, cluster, host)
        if network is not None and cluster.nodes[host].uplink_bytes_per_s is not None:
            yield network.sent_bytes_per_s(ranks_of[host]) / flows


# In the order in which ranks count, the last one fastest; torchtitan's.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# Ranks that differ in data alone are one axis more: those that reduce gradients over all replicas.
DP = "dp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The ranks of a placement as coordinates along the axes of a layout; torchtitan's names.

    `tp`, `cp` and `pp` ranks share the computing of a micro-batch; the other axes have batches of
    their own: `dp_replicate` replicas, each sharded over `dp_shard` ranks. `ep` divides experts
    over ranks that `dp_shard`, `cp` and `tp` count already. Raises StrategyError where the axes do
    not multiply to the ranks.
    """

    placement: Placement
    layout: Layout = DATA_PARALLEL
    dp_replicate: int = 1
    dp_shard: int = 1
    micro_batches: int = 1
    link_ratio: float = 1.0

    def __post_init__(self) -> None:
        layout = self.layout
        ranks = layout.pp * self.dp_replicate * self.dp_shard * layout.cp * layout.tp
        if ranks != self.placement.ranks:
            raise StrategyError(
                f"the axes of the mesh multiply to {ranks} ranks, but "
                f"'{self.placement.allocation}' has {self.placement.ranks}; change one of the axes"
            )
        if self.dp_shard * layout.cp * layout.tp % layout.ep:
            raise StrategyError(
                f"ep={layout.ep} does not divide the {self.dp_shard * layout.cp * layout.tp} ranks "
                "of dp_shard, cp and tp; choose a divisor"
            )

    @classmethod
    def laid_out(
        cls,
        placement: Placement,
        layout: Layout,
        strategy: Strategy,
        *,
        micro_batches: int = 1,
        link_ratio: float = 1.0,
    ) -> Mesh:
        """All ranks along the axes of a layout; raises StrategyError."""
        replicate, shard = _data_axes(layout, placement.ranks, strategy)
        return cls(
            placement=placement,
            layout=layout,
            dp_replicate=replicate,
            dp_shard=shard,
            micro_batches=micro_batches,
            link_ratio=link_ratio,
        )

    @property
    def tp(self) -> int:
        return self.layout.tp

    @property
    def cp(self) -> int:
        return self.layout.cp

    @property
    def ep(self) -> int:
        return self.layout.ep

    @property
    def pp(self) -> int:
        return self.layout.pp

    @property
    def dp(self) -> int:
        """Ranks with batches of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Ranks that FSDP divides weights over: those that share tokens hold the same ones."""
        return self.dp_shard * self.layout.cp

    @property
    def replicas(self) -> int:
        """Ranks whose gradients of the same weights are averaged."""
        return self.dp_replicate * self.dp_shard * self.layout.cp

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks along each of `AXES`."""
        return self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp

    def members(self, axis: str) -> Indices:
        """The ranks of every group along an axis, in order of their coordinate: (groups, ranks)."""
        ranks = np.arange(self.placement.ranks).reshape(self.shape)
        if axis == DP:
            return ranks.transpose(0, 4, 1, 2, 3).reshape(-1, self.replicas)
        if axis == "dp_shard":
            # Ranks that share the tokens of samples hold the same weights: they shard them too.
            merged = ranks.transpose(0, 1, 4, 2, 3)
            return merged.reshape(-1, self.shards)
        if axis in ("ep", "expert_dp", "expert_shard"):
            return self._experts(ranks, axis)
        place = AXES.index(axis)
        return np.moveaxis(ranks, place, -1).reshape(-1, self.shape[place])

    def _experts(self, ranks: Indices, axis: str) -> Indices:
        """Ranks that share experts are neighbours, those that share tokens among them."""
        pp, replicate, *_ = self.shape
        shared = ranks.reshape(pp, replicate, -1, self.ep)
        if axis == "ep":
            return shared.reshape(-1, self.ep)
        if axis == "expert_shard":
            return shared.swapaxes(2, 3).reshape(-1, shared.shape[2])
        return shared.transpose(0, 3, 1, 2).reshape(pp * self.ep, -1)

    def groups(self, axis: str) -> tuple[tuple[ProcessGroup, NodeKind], ...]:
        """The unlike process groups along an axis, each with the kind of node that costs it."""
        sizes = {DP: self.replicas, "dp_shard": self.shards, "dp_replicate": self.dp_replicate}
        size, members = sizes.get(axis), None
        if size not in (1, self.placement.ranks):
            members = self.members(axis)
            size = members.shape[1]
        if size == self.placement.ranks:
            return ((self.whole_group, slowest_network(self.placement)),)
        return () if members is None or size == 1 else self.groups_along(members)

    @property
    def whole_group(self) -> ProcessGroup:
        """All ranks, on links as other jobs leave them."""
        return self._beside_others(whole_group(self.placement))

    def groups_along(self, members: Indices) -> tuple[tuple[ProcessGroup, NodeKind], ...]:
        """See `groups_along`; on links as other jobs leave them."""
        found = groups_along(self.placement, members)
        return tuple((self._beside_others(group), node) for group, node in found)

    def _beside_others(self, group: ProcessGroup) -> ProcessGroup:
        if self.link_ratio == 1.0:
            return group
        return replace(group, bytes_per_s=group.bytes_per_s * self.link_ratio)

    def global_batch(self, batches: Sequence[int]) -> int:
        """Samples of a step, by those of a rank and micro-batch in each group of the allocation."""
        if batches.count(batches[0]) == len(batches):
            return batches[0] * self.dp * self.micro_batches
        per_rank = zip(self.placement.allocation.groups, batches, strict=True)
        samples = sum(group.ranks * batch for group, batch in per_rank)
        return samples * self.micro_batches


@lru_cache(maxsize=4096)
def _data_axes(layout: Layout, ranks: int, strategy: Strategy) -> tuple[int, int]:
    return layout.data_axes(ranks, strategy)


def batches_of(
    traced: int | None,
    mesh: Mesh,
    batch_per_gpu: int | Sequence[int] | None,
    global_batch: int | None,
    accumulation_steps: int,
    *,
    strict: bool = False,
) -> tuple[int, ...] | None:
    """Samples per rank and micro-batch of each group of the allocation.

    By default as many as were `traced`, None for a fixed batch. Of a global batch that ranks cannot
    share evenly the largest share, which all wait for; `strict` refuses it. Raises WorkloadError.
    """
    placement = mesh.placement
    groups = len(placement.allocation.groups)
    if global_batch is not None:
        global_batch = check_count(global_batch, "global batch", most=MOST_GLOBAL_BATCH)
        return (largest_share(mesh, global_batch, accumulation_steps, strict=strict),) * groups
    if batch_per_gpu is None:
        return None if traced is None else (traced,) * groups
    given: Any = batch_per_gpu
    if isinstance(given, str) or not isinstance(given, Sequence):
        return (check_count(given),) * groups
    if len(given) != groups:
        raise WorkloadError(
            f"{len(given)} batches were given for '{placement.allocation}', whose groups are "
            f"{groups}; give one for each group, or one number for all"
        )
    if mesh.dp != placement.ranks and len(set(given)) > 1:
        raise WorkloadError(
            f"ranks that share layers work on the same samples, found batches {quoted(given)}; "
            "give one number for all"
        )
    return tuple(map(check_count, given))


def largest_share(mesh: Mesh, global_batch: int, accumulation_steps: int, *, strict: bool) -> int:
    """Samples of the rank and micro-batch that has most of a global batch.

    Raises WorkloadError where one would have none or, if `strict`, where shares differ.
    """
    ranks, shares = mesh.dp, mesh.dp * accumulation_steps
    if global_batch < shares or (strict and global_batch % shares):
        kind = "ranks" if ranks == mesh.placement.ranks else "data-parallel ranks"
        what, ask = "leaves some without a sample of", f"at least {shares}"
        if global_batch >= shares:
            what, ask = "cannot be split evenly over", f"a multiple of {shares}"
        raise WorkloadError(
            f"global batch {global_batch} {what} {ranks} {kind} and {accumulation_steps} "
            f"accumulation steps; use {ask}"
        )
    return check_count(-(-global_batch // shares))
