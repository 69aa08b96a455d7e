"""Say what a collective sends over the busiest link of a ring, and in how many rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


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
