"""Cost the algorithms of collectives: rings, and all that NCCL has, of which it takes the fastest.

A message cut into chunks goes down a chain of hops in α + βS + k·√(α·βS) seconds: small chunks
cost a hop's latency each, large ones keep later hops waiting. With the best chunk size k is 2
(Pjesivac-Grbovic et al.: Performance Analysis of MPI Collective Operations, 2007).

Devices are taken in the order of their indices, which is that of NCCL on the machines of the
catalogue: neighbours first. A ring runs at the pace of its slowest hop.

Latencies are those of NCCL's own cost table (NVIDIA/nccl, src/graph/tuning.cc): a collective has a
start (baseLat: 6.6 µs with the LL protocol), and hops on top (hwLat: 0.6 µs over NVLink). A new
algorithm is one entry of `ALGORITHMS`; a collective without one goes around its ring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from estimator.elementwise import Array, maximum, sqrt, uniform, where
from estimator.machines.profile import CollectiveName, Link, MachineProfile
from estimator.machines.typical import achieved_bytes_per_s
from estimator.placement.mesh import ProcessGroup


def levels(count: Any) -> Any:
    """The logarithm to base 2, rounded up, of one number or of an array of them."""
    return np.frexp(count - 1)[1] if isinstance(count, np.ndarray) else (count - 1).bit_length()


# Bytes that cross the busiest link of a ring, as a share of the buffer, for n ranks; rounds of
# latency (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication in MPICH, 2005).
# gloo takes the ring for an all-reduce of any size (gloo/allreduce.cc, UNSPECIFIED → RING).
# Each holds for one n and for an array of them.
RING_SHARE: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "all_to_all": lambda n: (n - 1) / n,
}
RING_ROUNDS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "broadcast": levels,
    "all_to_all": lambda n: n - 1,
}


class Line(NamedTuple):
    """Seconds of one algorithm by bytes, over one group or a row for each.

    `alpha_s` + `beta_s_per_byte` · S + `root_s` · √S.
    """

    alpha_s: Any
    beta_s_per_byte: Any
    root_s: Any = 0.0

    @classmethod
    def pipelined(cls, alpha_s: Any, beta_s_per_byte: Any, pipelining: Any) -> Line:
        """A transfer through a pipeline whose chunks are `pipelining`/2 as good as the best."""
        if type(pipelining) is float and pipelining == 0.0:
            return cls(alpha_s, beta_s_per_byte)
        return cls(alpha_s, beta_s_per_byte, pipelining * sqrt(alpha_s * beta_s_per_byte))


def powers(sizes_bytes: Array) -> Array:
    """What the terms of a line are multiplied by for each size: (sizes, 3)."""
    return np.stack([np.ones_like(sizes_bytes), sizes_bytes, np.sqrt(sizes_bytes)], axis=-1)


# The lines of one group as an array, (lines, 3), or those of a group in each row.
Lines = Array | Sequence[Line]


def fastest_s(factors: Array, lines: Lines) -> Array:
    """Seconds by the fastest line for each size: (sizes,) of one group, (sizes, rows) of many.

    `factors`, (sizes, 3), are those of `powers` times what was measured over the formula. Terms are
    added in their order, which a product of matrices leaves open: one group and many agree to the
    last bit.
    """
    if isinstance(lines, np.ndarray):
        each_s = np.add.reduce(factors[:, :, None] * lines.T, axis=1)
        return np.asarray(np.minimum.reduce(each_s, axis=1))
    of_start, of_bytes, of_root = factors.T[:, :, None]
    fastest = None
    for alpha_s, beta_s_per_byte, root_s in lines:
        seconds = of_start * alpha_s + of_bytes * beta_s_per_byte
        if isinstance(root_s, np.ndarray) or root_s:
            seconds += of_root * root_s
        fastest = seconds if fastest is None else np.minimum(fastest, seconds, out=fastest)
    return np.asarray(fastest)


# Links that carry collectives between devices of a node.
DEVICE_LINKS = ("d2d", "nvlink", "infinity_fabric", "pcie")


# The start of one of NCCL's collectives: published all-reduce, all-gather and reduce-scatter of 512
# bytes over 2, 4 and 8 A100 (aiconfigurator's tables) lie on 7.9 µs + 1.05 µs per hop, so do those
# of B200; those of H100 and H200 on 4.6 µs + 0.8 µs.
START_S = 7.9e-6
_HOPPER_START_S = 4.6e-6
# k of α + βS + k·√(α·βS): fitted to published nccl-tests and profilers, and judged on systems that
# were left out (benchmarks/collective_accuracy.py). Over NVLink of A100 and later chunks are short
# beside a hop's latency; over PCIe, and the slower NVLink before, they hardly wait for it.
PIPELINING = {"quick": 1.9, "hopper": 1.5, "slow": 0.6}


# The switch moves a buffer at 5/6 of the links for any number of ranks, less what nvlsEfficiency
# leaves of it (tuning.cc). 8 H100 reach a bus bandwidth of 475 GB/s (H100_NVLS_BW of aliyun/SimAI's
# astra-sim; H200: NVIDIA/nccl-tests, issue 272): 0.773 of what a ring gets of NVLink. Blackwell has
# 0.74 of its links where Hopper has 0.85. All-reduces of 32 KiB to 512 KiB over 8 GPUs take 19 µs
# on H100 and 28 µs on B200 (aiconfigurator's tables): so much later than a ring the switch starts.
IN_SWITCH_RATIO = 0.773
_HOPPER_SWITCH = IN_SWITCH_RATIO, 12.8e-6
_BLACKWELL_SWITCH = IN_SWITCH_RATIO * 0.74 / 0.85, 18e-6
# Its k: 1 over 8 H100 and 8 B200 (aiconfigurator's tables, 1 MiB to 512 MiB), 3 over the 72 GPUs of
# a GB200 NVL72 (coreweave/nccl-tests, pull request 43, 0.5 GiB to 8 GiB). A pass takes a chunk of
# every rank's slice, so that the pipeline fills more slowly where there are more.
_SWITCH_RANKS_OF_ONE = 8


class InnerLinks(NamedTuple):
    """One hop of a ring within a node, or a row for each: its latency, rate and pipelining.

    `reduces` says that the switch between devices adds what they send; `start_s` is what a
    collective takes before its first hop. `keeps_order` says that the node's network writes bytes
    in the order in which they were sent, on which NCCL's LL and LL128 protocols rely; LL128 also
    needs links `over_nvlink` between the devices of a node. `over_sockets` says that the network is
    TCP. `switch_ratio` is what the adding switch gets of what a ring gets, after `switch_start_s`
    more than a ring's start.
    """

    latency_s: Any
    bytes_per_s: Any
    pipelining: Any = 0.0
    reduces: Any = False
    start_s: Any = START_S
    keeps_order: Any = True
    over_nvlink: Any = True
    over_sockets: Any = False
    switch_ratio: Any = IN_SWITCH_RATIO
    switch_start_s: Any = 0.0


def pace_of(profile: MachineProfile, link: Link | None) -> str:
    """Whether hops between devices are short or long beside NCCL's chunks: see `PIPELINING`."""
    capability = profile.devices[0].compute_capability
    if link is None or link.kind not in ("nvlink", "infinity_fabric"):
        return "slow"
    if link.kind == "nvlink" and (capability or 0.0) >= 9:
        return "hopper"
    return "quick" if capability is None or capability >= 8 else "slow"


def links_over(profile: MachineProfile, link: Link | None) -> InnerLinks:
    """The hops over a link that some devices reach each other by: of no time without one."""
    if link is None:
        return InnerLinks(0.0, math.inf, **network_traits(profile))
    capability = profile.devices[0].compute_capability or 0.0
    ratio, switch_start_s = _BLACKWELL_SWITCH if capability >= 10 else _HOPPER_SWITCH
    return InnerLinks(
        latency_s=link.latency_s,
        bytes_per_s=achieved_bytes_per_s(link),
        pipelining=PIPELINING[pace_of(profile, link)],
        reduces=link.reduces,
        start_s=_HOPPER_START_S if 9 <= capability < 10 else START_S,
        over_nvlink=link.kind == "nvlink",
        switch_ratio=ratio,
        switch_start_s=switch_start_s,
        **network_traits(profile),
    )


def network_traits(profile: MachineProfile) -> dict[str, bool]:
    """What NCCL's protocols need to know of a machine's network."""
    kinds = {link.kind for link in profile.network}
    return {"keeps_order": keeps_order(profile), "over_sockets": kinds == {"tcp"}}


def keeps_order(profile: MachineProfile) -> bool:
    """Whether NCCL may run its LL and LL128 protocols over a machine's network.

    EFA did not keep the order of bytes before P5 (aws/aws-ofi-nccl, issue 76 and pull request 280).
    """
    capability = profile.devices[0].compute_capability
    over_efa = any(link.kind == "efa" for link in profile.network)
    return not over_efa or capability is None or capability >= 9


def widest_link(profile: MachineProfile, devices: int) -> Link | None:
    """What the first `devices` devices of a node reach each other over.

    Of the links that join that many, those that join the fewest others: an NVLink bridge for two,
    the switch of a socket for its half of the node.
    """
    found = [link for link in profile.links if link.kind in DEVICE_LINKS]
    if not found:
        return None
    joined = [link.ring_devices or math.inf for link in found]
    enough = [number for number in joined if number >= devices]
    near = min(enough) if enough else max(joined)
    return max(
        (link for link, number in zip(found, joined, strict=True) if number == near),
        key=achieved_bytes_per_s,
    )


class LinksByDevices:
    """The inner links of some profiles, by the number of a profile and of devices in use."""

    def __init__(self, found: Sequence[Sequence[InnerLinks]]) -> None:
        most = max((len(row) for row in found), default=1)
        self._most = most - 1
        self._plain = [[*row, *[row[-1]] * (most - len(row))] for row in found]
        self._columns = np.array(self._plain, dtype=np.float64).transpose(2, 0, 1).copy()

    def at(self, profile: Any, devices: Any) -> InnerLinks:
        """The links of one group or of each row: of no time where nothing is known of them."""
        if type(profile) is int and type(devices) is int:
            return self._plain[profile][min(devices, self._most)]
        links = InnerLinks(*self._columns[:, profile, np.minimum(devices, self._most)])
        flags = ("reduces", "keeps_order", "over_nvlink", "over_sockets")
        return links._replace(**{name: uniform(getattr(links, name) != 0) for name in flags})


# k of α + βS + k·√(α·βS) of a tree between nodes: see `PIPELINING`.
TREE_PIPELINING = 2.2
# A hop over NVLink, beside which `START_S` was measured.
USUAL_HOP_S = 1.05e-6
# What a tree gets of the links that a ring fills: 2 nodes of p4d.24xlarge all-reduce 1 GiB in
# 35.2 ms (NVIDIA/nccl, issue 527), 26.8 ms at 0.8 of four 100 Gbit/s cards.
TREE_RATIO = 0.76


class Cost(NamedTuple):
    """Of one algorithm: inside nodes and between them."""

    inside: Any
    across: Any


class Protocol(NamedTuple):
    """How NCCL moves data between nodes: its start and hops beyond LL's, and its share of the rate.

    `pipelining` is k of α + βS + k·√(α·βS).
    """

    start_s: float = 0.0
    hop: Cost = Cost(0.0, 0.0)
    ratio: float = 1.0
    pipelining: float = TREE_PIPELINING
    most_bytes_per_s: float = math.inf
    needs_nvlink: bool = False


# Of a ring, baseLat and hwLat of NVLink and the network in tuning.cc: LL 6.6, 0.6 and 2.7 µs, LL128
# 14, 1.9 and 4, Simple 8.4, 3.4 and 14. Of 8 bytes LL spends 4 on a flag that says that the others
# have arrived, LL128 8 of 128, so data goes on at once; LL sends no faster than its llMaxBws, 22.5
# GB/s of A100s on two nodes. Simple waits for whole chunks at each hop; k = 2 with the best ones.
_LL = Protocol(ratio=0.5, pipelining=0.0, most_bytes_per_s=22.5e9)
_LL128 = Protocol(7.4e-6, Cost(1.3e-6, 1.3e-6), 120 / 128, 0.0, needs_nvlink=True)
_SIMPLE = Protocol(1.8e-6, Cost(2.8e-6, 11.3e-6), 1.0, 2.0)


class Algorithm(NamedTuple):
    """How a collective is carried out.

    `rounds` are hops of latency in a row, inside and across nodes; `share` is what one device sends
    over its links inside a node, and what one node sends over its network, as a share of the
    buffer; `ratio` is what it gets of the rates that a ring gets; `rank_s` is added for each rank.
    `runs` says where NCCL has it. Of its `protocols`, those after the first need a network that
    keeps the order of bytes. `pipelining` is k inside a node: 0 where one kernel sends all at once.
    """

    rounds: Callable[[ProcessGroup], tuple[Any, Any]]
    share: Callable[[ProcessGroup], tuple[Any, Any]]
    ratio: Cost = Cost(1.0, 1.0)
    runs: Callable[[ProcessGroup, InnerLinks], Any] = lambda group, links: True
    protocols: tuple[Protocol, ...] = (Protocol(),)
    in_switch: bool = False
    rank_s: float = 0.0
    pipelining: Callable[[ProcessGroup, InnerLinks], Any] = lambda group, links: links.pipelining


def _ring(op: CollectiveName) -> Algorithm:
    """Through every rank, node by node."""
    rounds, share = RING_ROUNDS[op], RING_SHARE[op]
    return Algorithm(
        rounds=lambda g: (rounds(g.ranks) - rounds(g.nodes), rounds(g.nodes)),
        share=lambda g: (share(g.ranks), share(g.ranks)),
        protocols=(_SIMPLE, _LL, _LL128),
    )


# A chain in each node, a tree over the nodes: up and down. Of two trees, each with half of the
# data, a node is inside one and a leaf of the other (Sanders, Speck, Träff: Two-tree algorithms
# for full bandwidth broadcast, reduction and scan, 2009).
_TREE = Algorithm(
    rounds=lambda g: (2 * (g.per_node - 1), 2 * levels(g.nodes)),
    share=lambda g: (2.0, 2 * (g.nodes - 1) / g.nodes),
    ratio=Cost(0.9, TREE_RATIO),  # busBw · .9, tuning.cc
    runs=lambda g, links: g.nodes > 1,
)
# The switch adds what devices send, and sends each sum to all of them (NVLS, NCCL 2.17); between
# nodes as the tree.
_IN_SWITCH = Algorithm(
    rounds=lambda g: (2, 2 * levels(g.nodes)),
    share=lambda g: (1.0, 2 * (g.nodes - 1) / g.nodes),
    ratio=Cost(1.0, TREE_RATIO),
    runs=lambda g, links: links.reduces & (g.per_node > 2),
    in_switch=True,
    pipelining=lambda g, links: sqrt(g.per_node / _SWITCH_RANKS_OF_ONE),
)
# Every rank sends its part to each of the others, those on other nodes over the node's network.
_ALL_TO_ALL = Algorithm(
    rounds=lambda g: (g.ranks - g.nodes, g.nodes - 1),
    share=lambda g: ((g.ranks - 1) / g.ranks, g.per_node * (g.ranks - g.per_node) / g.ranks),
)
# Of their links, beside what a ring gets of NVLink and of the network: HybridEP on GB200 moves 546,
# 523, 484 and 479 GB/s in bf16 among 8, 16, 32 and 36 ranks, own tokens counted, 450 to 490 without
# (702 by a ring); on H100 50 to 58 GB/s of tokens for 2 to 8 nodes, 40 without those that stay, of
# a 50 GB/s card (deepseek-ai/DeepEP, branch hybrid-ep, docs/README_Hybrid-EP.md).
_DISPATCH_RATIO = Cost(0.68, 0.85)


def expert_dispatch(copies: int) -> Algorithm:
    """DeepEP's and HybridEP's exchange of tokens that each have `copies`, for random experts.

    A token goes once to each node that has any of these, and there over NVLink to each rank.
    """

    def reached(places: Any) -> Any:
        return places * (1.0 - (1.0 - 1.0 / places) ** copies)

    return Algorithm(
        rounds=lambda g: (where(g.per_node > 1, 1, 0), where(g.nodes > 1, 1, 0)),
        share=lambda g: (
            reached(g.ranks) * (1.0 - 1.0 / g.per_node) / copies,
            g.per_node * reached(g.nodes) * (1.0 - 1.0 / g.nodes) / copies,
        ),
        ratio=_DISPATCH_RATIO,
        protocols=(Protocol(pipelining=0.0),),
        pipelining=lambda g, links: 0.0,
    )


# Parallel aggregated trees (NCCL 2.23) between nodes of one GPU each: a logarithm of rounds, each
# 1/3.5 of a hop, 2.8 µs for each rank, and 0.75 of the ring's rate (ncclPatEnable, tuning.cc).
_PAT = Algorithm(
    rounds=lambda g: (0, levels(g.nodes) / 3.5),
    share=lambda g: (0.0, (g.nodes - 1) / g.nodes),
    ratio=Cost(1.0, 0.75),
    runs=lambda g, links: (g.per_node == 1) & (g.nodes > 1),
    protocols=(_SIMPLE,),
    rank_s=2.8e-6,
)
ALGORITHMS: dict[CollectiveName, tuple[Algorithm, ...]] = {
    "all_reduce": (_ring("all_reduce"), _TREE, _IN_SWITCH),
    "all_gather": (_ring("all_gather"), _PAT),
    "reduce_scatter": (_ring("reduce_scatter"), _PAT),
    "all_to_all": (_ALL_TO_ALL,),
}


def algorithms_of(op: CollectiveName, *, in_switch: bool = True) -> tuple[Algorithm, ...]:
    """How a collective is carried out: as `ALGORITHMS` lists, else around its ring.

    Without `in_switch` no switch adds (NCCL_NVLS_ENABLE=0).
    """
    found = ALGORITHMS.get(op) or (_ring(op),)
    return found if in_switch else tuple(each for each in found if not each.in_switch)


def nccl_lines(
    op: CollectiveName,
    group: ProcessGroup,
    links: InnerLinks,
    *,
    algorithms: Sequence[Algorithm] | None = None,
) -> tuple[Line, ...]:
    """What each algorithm and protocol takes over one group, or over that of each row.

    Where NCCL does not have one, in some rows, those have the first's.
    """
    inside, across = uniform(group.per_node > 1), uniform(group.nodes > 1)
    beyond = where(across, 1.0, 0.0)
    keeps_order = across & links.keeps_order
    over_nvlink = (group.per_node == 1) | links.over_nvlink
    lines: list[Line] = []
    for algorithm in algorithms or algorithms_of(op):
        is_there = uniform(algorithm.runs(group, links))
        if is_there is False:
            continue
        (hops, hops_across), (share, share_across) = algorithm.rounds(group), algorithm.share(group)
        start_s, rate = links.start_s, links.bytes_per_s * algorithm.ratio.inside
        if algorithm.rank_s:
            start_s = start_s + algorithm.rank_s * group.ranks
        if algorithm.in_switch:
            start_s, rate = start_s + links.switch_start_s, rate * links.switch_ratio
        # Between nodes nothing is sent where there is one, whose rate is inf.
        beta = maximum(
            where(inside, share / rate, 0.0),
            share_across / (group.bytes_per_s * algorithm.ratio.across),
        )
        pipelining = algorithm.pipelining(group, links)
        for number, protocol in enumerate(algorithm.protocols):
            runs = is_there
            if number > 0:
                runs = runs & keeps_order
            if protocol.needs_nvlink:
                runs = runs & over_nvlink
            runs = uniform(runs)
            if runs is False:
                continue
            # Inside one node latency and k are those of all protocols together.
            hop_s = links.latency_s + beyond * protocol.hop.inside
            alpha_s = start_s + beyond * protocol.start_s + hops * hop_s
            alpha_s = alpha_s + hops_across * (group.latency_s + protocol.hop.across)
            # Across nodes the protocol says what a pipeline costs, whichever hop sets its pace: a k
            # of the hop would leap where the network overtakes the node's own links. A connection's
            # slice of 1 MiB takes far longer than the hops that it waits for where it goes through
            # a socket: rings of 2 to 8 Perlmutter nodes get 1.2 GB/s of 40 MB as of 2 GB
            # (estimate-train-time).
            between = where(links.over_sockets, 0.0, protocol.pipelining)
            slowed = beta / protocol.ratio
            if protocol.most_bytes_per_s < math.inf:
                slowed = maximum(slowed, share_across / protocol.most_bytes_per_s)
            k = where(across, between, pipelining)
            line = Line.pipelined(alpha_s, where(across, slowed, beta), k)
            if lines and isinstance(runs, np.ndarray):
                line = Line(*(where(runs, *both) for both in zip(line, lines[0], strict=True)))
            lines.append(line)
    return tuple(lines)


def hop_latency_s(op: CollectiveName, ranks: int, latency_s: float) -> float:
    """Seconds of a hop where a small collective over one node takes `latency_s`.

    Its start and its hops are in the same proportion as usual.
    """
    one_node = ProcessGroup(ranks=ranks, nodes=1, per_node=ranks)
    hops, _ = algorithms_of(op)[0].rounds(one_node)
    return latency_s / float(hops + START_S / USUAL_HOP_S)
