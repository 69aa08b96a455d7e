"""Follow the ring of ranks over the links of a placement and find the hop that sets its pace."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from estimator.placement import Placement, Site
from estimator.profile import CollectiveCost, MachineProfile, PairMatrix
from estimator.topology import Cluster


@dataclass(frozen=True, slots=True)
class Ring:
    """What the cost of a collective needs to know of a group: sizes, and the slowest hop's link.

    `bytes_per_s` is what one flow of the ring gets on the slowest hop between nodes after the
    flows that share it have divided it (inf within one node); `latency_s` is the longest hop's.
    """

    ranks: int
    nodes: int
    per_node: int
    bytes_per_s: float
    latency_s: float
    link: str = ""


def ring_of(placement: Placement) -> Ring:
    """The ring in rank order over a placement; gloo and NCCL both keep the order of nodes."""
    per_node = max(placement.busy)
    if placement.nodes <= 1:
        return Ring(placement.ranks, 1, per_node, math.inf, 0.0)
    rate, link = math.inf, ""
    for candidate, name in _limits(placement):
        if candidate < rate:
            rate, link = candidate, name
    latency_s = max(hop_latency_s(site.profile, placement.cluster) for site in placement.sites)
    return Ring(placement.ranks, placement.nodes, per_node, rate, latency_s, link)


def hop_latency_s(profile: MachineProfile, cluster: Cluster | None) -> float:
    """One-way seconds of a hop: racks count as soon as the cluster has more than one switch."""
    reach = "cluster" if cluster is not None and len(cluster.switches) > 1 else "rack"
    singles = [link for link in profile.network if link.streams == 1]
    exact = [link.latency_s for link in singles if link.reach == reach]
    return max(exact or [link.latency_s for link in singles], default=0.0)


def _limits(placement: Placement) -> Iterator[tuple[float, str]]:
    """(bytes per second of one flow, name of the link) for everything that a ring hop crosses."""
    sites, cluster = placement.sites, placement.cluster
    if cluster is None:
        for site in sites:
            if site.nodes * len(sites) > 1 and site.nic_bytes_per_s is not None:
                yield site.nic_bytes_per_s, f"the network of '{site.profile.name}'"
        return
    hops = list(_hops(sites))
    flows = Counter(a.host for a, _ in hops)
    for site in sites:
        if site.nic_bytes_per_s is not None and flows[site.host]:
            yield site.nic_bytes_per_s / flows[site.host], f"the uplink of node '{site.host}'"
    yield from _measured_hops(hops)
    yield from _switch_limits(hops, cluster)


def _hops(sites: Sequence[Site]) -> Iterator[tuple[Site, Site]]:
    """Neighbouring sites on unlike nodes, the last and the first included."""
    for index, site in enumerate(sites):
        following = sites[(index + 1) % len(sites)]
        if following.host != site.host:
            yield site, following


def _measured_hops(hops: Sequence[tuple[Site, Site]]) -> Iterator[tuple[float, str]]:
    for a, b in hops:
        rate = _pair_rate(a.profile.pairs, a.host, b.host)
        if rate is not None:
            yield rate, f"the link between '{a.host}' and '{b.host}'"


def _pair_rate(pairs: PairMatrix | None, a: str | None, b: str | None) -> float | None:
    if pairs is None or a not in pairs.hosts or b not in pairs.hosts:
        return None
    return pairs.bandwidth_bytes_per_s[pairs.hosts.index(a)][pairs.hosts.index(b)]


def _switch_limits(
    hops: Sequence[tuple[Site, Site]], cluster: Cluster
) -> Iterator[tuple[float, str]]:
    """A hop leaves every switch that is above its start and not above its end."""
    leaving: Counter[str] = Counter()
    for a, b in hops:
        beyond = set(cluster.switches_above(b.host or ""))
        leaving.update(s for s in cluster.switches_above(a.host or "") if s not in beyond)
    for name, flows in leaving.items():
        rate = cluster.switches[name].uplink_bytes_per_s
        if rate is not None:
            yield cluster.payload_bytes_per_s(rate) / flows, f"the uplink of switch '{name}'"


def ring_between(
    cost: CollectiveCost,
    latency_s: float,
    nic_bytes_per_s: float | None,
    pairs: PairMatrix | None,
) -> Ring:
    """The ring of a measured group, by the links that were measured beside it."""
    per_node = math.ceil(cost.group_size / cost.nodes)
    if not cost.spans_nodes:
        return Ring(cost.group_size, 1, per_node, math.inf, 0.0)
    neighbours = zip(cost.hosts, cost.hosts[1:] + cost.hosts[:1], strict=True)
    rates = [_pair_rate(pairs, a, b) for a, b in neighbours if a != b]
    known = [rate for rate in rates if rate is not None]
    rate = min(known) if known else nic_bytes_per_s or math.inf
    return Ring(cost.group_size, cost.nodes, per_node, rate, latency_s)
