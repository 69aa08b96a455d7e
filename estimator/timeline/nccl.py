"""Cost NCCL's collectives: the algorithms that it has, each a line, of which it takes the fastest.

Latencies are those of NCCL's own cost table (NVIDIA/nccl, src/graph/tuning.cc): a collective has a
start (baseLat: 6.6 µs with the LL protocol), and hops on top (hwLat: 0.6 µs over NVLink). A new
algorithm is one entry of `ALGORITHMS`; a collective without one goes around its ring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from estimator.elementwise import anywhere, maximum, where
from estimator.machines.profile import CollectiveName
from estimator.placement.process_groups import ProcessGroup
from estimator.timeline.inner_links import START_S, InnerLinks
from estimator.timeline.lines import Line
from estimator.timeline.rings import RING_ROUNDS, RING_SHARE, levels

# k of α + βS + k·√(α·βS) of a tree between nodes: see `inner_links.PIPELINING`.
TREE_PIPELINING = 2.2
# A hop over NVLink, beside which `START_S` was measured.
USUAL_HOP_S = 1.05e-6
# What a tree gets of the links that a ring fills: 2 nodes of p4d.24xlarge all-reduce 1 GiB in
# 35.2 ms (NVIDIA/nccl, issue 527), 26.8 ms at 0.8 of four 100 Gbit/s cards.
TREE_RATIO = 0.76
# 8 H100 all-reduce at a bus bandwidth of 475 GB/s in the switch (H100_NVLS_BW of
# aliyun/SimAI's astra-sim), each sending 9/8 of its buffer: 0.87 of what a ring gets of NVLink.
IN_SWITCH_RATIO = 0.87


class Shape(NamedTuple):
    """How many ranks a group has, on how many nodes, and on the node with most: numbers or rows."""

    ranks: Any
    nodes: Any
    per_node: Any


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


# Of a ring, baseLat and hwLat of NVLink and the network in tuning.cc: LL 6.6, 0.6 and 2.7 µs, LL128
# 14, 1.9 and 4, Simple 8.4, 3.4 and 14. Of 8 bytes LL spends 4 on a flag that says that the others
# have arrived, LL128 8 of 128, so data goes on at once; LL sends no faster than its llMaxBws, 22.5
# GB/s of A100s on two nodes. Simple waits for whole chunks at each hop; k = 2 with the best ones.
_LL = Protocol(ratio=0.5, pipelining=0.0, most_bytes_per_s=22.5e9)
_LL128 = Protocol(7.4e-6, Cost(1.3e-6, 1.3e-6), 120 / 128, 0.0)
_SIMPLE = Protocol(1.8e-6, Cost(2.8e-6, 11.3e-6), 1.0, 2.0)


class Algorithm(NamedTuple):
    """How a collective is carried out.

    `rounds` are hops of latency in a row; `share` is what one device sends over its links inside a
    node, and what one node sends over its network, as a share of the buffer; `ratio` is what it
    gets of the rates that a ring gets, inside and across. `runs` says where NCCL has it. Of its
    `protocols`, those after the first need a network that keeps the order of bytes.
    """

    rounds: Callable[[Shape], Cost]
    share: Callable[[Shape], Cost]
    ratio: Cost = Cost(1.0, 1.0)
    runs: Callable[[Shape, InnerLinks], Any] = lambda shape, links: True
    protocols: tuple[Protocol, ...] = (Protocol(),)


def _ring(op: CollectiveName) -> Algorithm:
    """Through every rank, node by node."""
    rounds, share = RING_ROUNDS[op], RING_SHARE[op]
    return Algorithm(
        rounds=lambda g: Cost(rounds(g.ranks) - rounds(g.nodes), rounds(g.nodes)),
        share=lambda g: Cost(share(g.ranks), share(g.ranks)),
        protocols=(_SIMPLE, _LL, _LL128),
    )


# A chain in each node, a tree over the nodes: up and down. Of two trees, each with half of the
# data, a node is inside one and a leaf of the other (Sanders, Speck, Träff: Two-tree algorithms
# for full bandwidth broadcast, reduction and scan, 2009).
_TREE = Algorithm(
    rounds=lambda g: Cost(2 * (g.per_node - 1), 2 * levels(g.nodes)),
    share=lambda g: Cost(2.0, 2 * (g.nodes - 1) / g.nodes),
    ratio=Cost(0.9, TREE_RATIO),  # busBw · .9, tuning.cc
    runs=lambda g, links: g.nodes > 1,
)
# The switch adds what devices send, and sends each sum to all of them (NVLS, NCCL 2.17); between
# nodes as the tree.
_IN_SWITCH = Algorithm(
    rounds=lambda g: Cost(2, 2 * levels(g.nodes)),
    share=lambda g: Cost((g.per_node + 1) / g.per_node, 2 * (g.nodes - 1) / g.nodes),
    ratio=Cost(IN_SWITCH_RATIO, TREE_RATIO),
    runs=lambda g, links: links.reduces & (g.per_node > 2),
)
# Every rank sends its part to each of the others, those on other nodes over the node's network.
_ALL_TO_ALL = Algorithm(
    rounds=lambda g: Cost(g.ranks - g.nodes, g.nodes - 1),
    share=lambda g: Cost((g.ranks - 1) / g.ranks, g.per_node * (g.ranks - g.per_node) / g.ranks),
)
ALGORITHMS: dict[CollectiveName, tuple[Algorithm, ...]] = {
    "all_reduce": (_ring("all_reduce"), _TREE, _IN_SWITCH),
    "all_to_all": (_ALL_TO_ALL,),
}


def algorithms_of(op: CollectiveName) -> tuple[Algorithm, ...]:
    """How a collective is carried out: as `ALGORITHMS` lists, else around its ring."""
    return ALGORITHMS.get(op) or (_ring(op),)


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
    shape = Shape(group.ranks, group.nodes, group.per_node)
    lines: list[Line] = []
    for algorithm in algorithms or algorithms_of(op):
        for number, protocol in enumerate(algorithm.protocols):
            runs = algorithm.runs(shape, links)
            if number > 0:
                runs = runs & (group.nodes > 1) & links.keeps_order
            if not anywhere(runs):
                continue
            found = _line(algorithm, protocol, group, links)
            if lines:
                found = Line(*(where(runs, *both) for both in zip(found, lines[0], strict=True)))
            lines.append(found)
    return tuple(lines)


def _line(algorithm: Algorithm, protocol: Protocol, group: ProcessGroup, links: InnerLinks) -> Line:
    shape = Shape(group.ranks, group.nodes, group.per_node)
    rounds, share, ratio = algorithm.rounds(shape), algorithm.share(shape), algorithm.ratio
    inside, across = group.per_node > 1, group.nodes > 1
    # Inside one node the latency is that of all protocols together, and so is k.
    beyond = where(across, 1.0, 0.0)
    hop_s = links.latency_s + beyond * protocol.hop.inside
    alpha_s = links.start_s + beyond * protocol.start_s + where(inside, rounds.inside * hop_s, 0.0)
    network_s = group.latency_s + protocol.hop.across
    alpha_s = alpha_s + where(across, rounds.across * network_s, 0.0)
    beta_inside = where(inside, share.inside / (links.bytes_per_s * ratio.inside), 0.0)
    beta = where(across, share.across / (group.bytes_per_s * ratio.across), 0.0)
    # The slower of both sets the pace: where that is the node's own links, with their pipelining.
    pipelining = where(
        beta > beta_inside,
        protocol.pipelining,
        maximum(where(across, protocol.pipelining, 0.0), links.pipelining),
    )
    beta = maximum(beta_inside, beta)
    slowed = maximum(beta / protocol.ratio, share.across / protocol.most_bytes_per_s)
    return Line.pipelined(alpha_s, where(across, slowed, beta), pipelining)


def hop_latency_s(op: CollectiveName, ranks: int, latency_s: float) -> float:
    """Seconds of a hop where a small collective over one node takes `latency_s`.

    Its start and its hops are in the same proportion as usual.
    """
    hops = algorithms_of(op)[0].rounds(Shape(ranks, 1, ranks)).inside
    return latency_s / float(hops + START_S / USUAL_HOP_S)
