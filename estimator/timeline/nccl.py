"""Count the rounds of latency that NCCL's collectives cost, the start of the kernel included.

NCCL's own cost table (NVIDIA/nccl, src/graph/tuning.cc) gives a collective a fixed start (baseLat:
6.6 µs with the LL protocol) on top of its hops (hwLat: 0.6 µs over NVLink); all-reduce across nodes
takes the cheaper of a ring through every rank and a double tree over the nodes with a chain in
each.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from estimator.elementwise import minimum
from estimator.machines.profile import CollectiveName

# The start in hops: published all-reduce, all-gather and reduce-scatter of 512 bytes over 2, 4 and
# 8 A100 (aiconfigurator's tables) lie on 7.9 µs + 1.05 µs per hop.
START_ROUNDS = 7.5


def nccl_rounds(op: CollectiveName, ranks: Any, nodes: Any) -> Any:
    """Hops of latency in a row for `ranks` ranks spread evenly over `nodes` nodes.

    Both are whole numbers or arrays of them.

    >>> nccl_rounds("all_reduce", 8, 1)  # 7.5 to start, 2 · 7 around the ring
    21.5
    >>> nccl_rounds("all_reduce", 64, 8)  # up and down: 7 in a node, 3 between nodes
    27.5
    """
    hops: Any = ranks - 1
    if op == "all_reduce":
        tree = 2 * (levels(nodes) + ranks / nodes - 1)
        hops = minimum(2 * hops, tree)
    elif op == "broadcast":
        hops = levels(ranks)
    return START_ROUNDS + hops


def levels(count: Any) -> Any:
    """The logarithm to base 2, rounded up, of one number or of an array of them."""
    return np.frexp(count - 1)[1] if isinstance(count, np.ndarray) else (count - 1).bit_length()
