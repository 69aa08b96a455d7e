"""Follow the ring of ranks over the links of a placement and find the hop that sets its pace."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from estimator.network import network_in_cluster
from estimator.placement import NodeKind, Placement, Site
from estimator.profile import CollectiveCost, MachineProfile, PairMatrix
from estimator.topology import Cluster


@dataclass(frozen=True, slots=True)
class Ring:
    """What the cost of a collective needs to know of a group: sizes, and the slowest hop's link.

    `bytes_per_s` is what one flow of the ring gets on the slowest hop between nodes after the
    flows that share it have divided it (inf within one node); `latency_s` is the longest hop's.
    `cluster` holds the links that measured groups of named hosts had, too.
    """

    ranks: int
    nodes: int
    per_node: int
    bytes_per_s: float
    latency_s: float
    link: str = ""
    cluster: Cluster | None = None


def ring_of(placement: Placement) -> Ring:
    """The ring in rank order over a placement; gloo and NCCL both keep the order of nodes."""
    kinds = placement.kinds
    per_node = max([kind.busy for kind in kinds])
    if placement.nodes <= 1:
        return Ring(placement.ranks, 1, per_node, math.inf, 0.0)
    rate, link = math.inf, ""
    names: tuple[str, ...] = ("",)
    for candidate, what, between in _limits(placement):
        if candidate < rate:
            rate, link, names = candidate, what, between
    latency_s = max([kind.hop_latency_s for kind in kinds])
    link = link.format(*names)
    return Ring(
        placement.ranks, placement.nodes, per_node, rate, latency_s, link, placement.cluster
    )


_Limit = tuple[float, str, tuple[str, ...]]


def _limits(placement: Placement) -> Iterator[_Limit]:
    """What a ring hop crosses: (bytes per second of one flow, kind of link, names in it)."""
    cluster = placement.cluster
    if cluster is None:
        slowest = min(placement.kinds, key=_rate_of)
        yield _rate_of(slowest), "the network of '{}'", (slowest.profile.name,)
        return
    sites = placement.sites
    hops = list(_hops(sites))
    flows = Counter([a.host for a, _ in hops])
    for site, number in zip(sites, placement.kind_of, strict=True):
        leaving, rate = flows[site.host], placement.kinds[number].nic_bytes_per_s
        if rate is not None and leaving:
            yield rate / leaving, "the uplink of node '{}'", (site.host or "",)
    yield from _measured_hops(hops)
    yield from _switch_limits([(a.host or "", b.host or "") for a, b in hops], cluster)


def _rate_of(kind: NodeKind) -> float:
    return math.inf if kind.nic_bytes_per_s is None else kind.nic_bytes_per_s


def _hops(sites: Sequence[Site]) -> Iterator[tuple[Site, Site]]:
    """Neighbouring sites on unlike nodes, the last and the first included."""
    for index, site in enumerate(sites):
        following = sites[(index + 1) % len(sites)]
        if following.host != site.host:
            yield site, following


def _measured_hops(hops: Sequence[tuple[Site, Site]]) -> Iterator[_Limit]:
    for a, b in hops:
        rate = _pair_rate(a.profile.pairs, a.host, b.host)
        if rate is not None:
            yield rate, "the link between '{}' and '{}'", (a.host or "", b.host or "")


def _pair_rate(pairs: PairMatrix | None, a: str | None, b: str | None) -> float | None:
    if pairs is None or a not in pairs.hosts or b not in pairs.hosts:
        return None
    return pairs.bandwidth_bytes_per_s[pairs.hosts.index(a)][pairs.hosts.index(b)]


def _switch_limits(hops: Sequence[tuple[str, str]], cluster: Cluster) -> Iterator[_Limit]:
    """A hop leaves every switch that is above its start and not above its end."""
    leaving: Counter[str] = Counter()
    for a, b in hops:
        beyond = cluster.switches_above(b)
        for switch in cluster.switches_above(a):
            if switch in beyond:
                break
            leaving[switch] += 1
    for name, flows in leaving.items():
        rate = cluster.switches[name].uplink_bytes_per_s
        if rate is not None:
            yield cluster.payload_bytes_per_s(rate) / flows, "the uplink of switch '{}'", (name,)


def ring_between(
    cost: CollectiveCost,
    latency_s: float,
    nic_bytes_per_s: float | None,
    profile: MachineProfile | None,
    cluster: Cluster | None = None,
) -> Ring:
    """The ring of a measured group, by the links measured beside it and those of its cluster.

    A cluster counts where the group ran on nodes of it, which are then as the `profile`.
    """
    per_node = math.ceil(cost.group_size / cost.nodes)
    if not cost.spans_nodes:
        return Ring(cost.group_size, 1, per_node, math.inf, 0.0)
    neighbours = zip(cost.hosts, cost.hosts[1:] + cost.hosts[:1], strict=True)
    hops = [(a, b) for a, b in neighbours if a != b]
    pairs = None if profile is None else profile.pairs
    rates = [rate for a, b in hops if (rate := _pair_rate(pairs, a, b)) is not None]
    if not rates and nic_bytes_per_s is not None:
        rates.append(nic_bytes_per_s)
    if cluster is not None and profile is not None and cluster.nodes.keys() >= set(cost.hosts):
        rates += [rate for rate, _, _ in _switch_limits(hops, cluster)]
        rates += _uplink_rates(hops, Counter(cost.hosts), profile, cluster)
    rate = min(rates, default=math.inf)
    return Ring(cost.group_size, cost.nodes, per_node, rate, latency_s)


def _uplink_rates(
    hops: Sequence[tuple[str, str]],
    ranks_of: Mapping[str, int],
    profile: MachineProfile,
    cluster: Cluster,
) -> Iterator[float]:
    """What one flow gets on the uplinks of the nodes that hops leave."""
    for host, flows in Counter([a for a, _ in hops]).items():
        network = network_in_cluster(profile, cluster, host)
        if network is not None and cluster.nodes[host].uplink_bytes_per_s is not None:
            yield network.sent_bytes_per_s(ranks_of[host]) / flows
