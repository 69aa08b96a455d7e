"""Count the rounds of latency that NCCL's collectives cost, the start of the kernel included.

NCCL's own cost table (NVIDIA/nccl, src/graph/tuning.cc) gives a collective a fixed start (baseLat:
6.6 µs with the LL protocol) on top of its hops (hwLat: 0.6 µs over NVLink); all-reduce across nodes
takes the cheaper of a ring through every rank and a double tree over the nodes with a chain in
each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from estimator.profile import CollectiveName

Numbers = NDArray[np.float64]

# The start in hops: published all-reduce, all-gather and reduce-scatter of 512 bytes over 2, 4 and
# 8 A100 (aiconfigurator's tables) lie on 7.9 µs + 1.05 µs per hop.
START_ROUNDS = 7.5


def nccl_rounds(op: CollectiveName, ranks: Numbers | int, nodes: Numbers | int) -> Numbers:
    """Hops of latency in a row for `ranks` ranks spread evenly over `nodes` nodes.

    >>> float(nccl_rounds("all_reduce", 8, 1))  # 7.5 to start, 2 · 7 around the ring
    21.5
    >>> float(nccl_rounds("all_reduce", 64, 8))  # up and down: 7 in a node, 3 between nodes
    27.5
    """
    ranks, nodes = np.asarray(ranks, dtype=float), np.asarray(nodes, dtype=float)
    if op == "all_reduce":
        tree = 2 * (np.ceil(np.log2(nodes)) + ranks / nodes - 1)
        hops = np.minimum(2 * (ranks - 1), tree)
    elif op == "broadcast":
        hops = np.ceil(np.log2(ranks))
    else:
        hops = ranks - 1
    return np.asarray(START_ROUNDS + hops)
