"""Add up what a collective costs by size: a start, bytes over a rate, and a pipeline's filling.

A message cut into chunks goes down a chain of hops in α + βS + k·√(α·βS) seconds: small chunks
cost a hop's latency each, large ones keep later hops waiting. With the best chunk size k is 2
(Pjesivac-Grbovic et al.: Performance Analysis of MPI Collective Operations, 2007).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from estimator.elementwise import sqrt

Array = NDArray[np.float64]


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
        return cls(alpha_s, beta_s_per_byte, pipelining * sqrt(alpha_s * beta_s_per_byte))


def powers(sizes_bytes: Array) -> Array:
    """What the terms of a line are multiplied by for each size: (sizes, 3)."""
    return np.stack([np.ones_like(sizes_bytes), sizes_bytes, np.sqrt(sizes_bytes)], axis=-1)


def as_array(lines: Sequence[Line]) -> Array:
    """(lines, 3) of one group, (lines, 3, rows) of many."""
    if not any(isinstance(term, np.ndarray) for line in lines for term in line):
        return np.array(lines, dtype=np.float64)
    return np.array([np.broadcast_arrays(*line) for line in lines], dtype=np.float64)


def fastest_s(factors: Array, lines: Array) -> Array:
    """Seconds by the fastest line for each size: (sizes,) of one group, (sizes, rows) of many.

    `factors` are those of `powers` times what was measured over the formula: (sizes, 3), or
    (rows, sizes, 3) where rows differ in that.
    """
    if factors.ndim == 3:
        return np.asarray(np.einsum("rst,ltr->lsr", factors, lines).min(axis=0))
    if lines.ndim == 2:
        return np.asarray((factors @ lines.T).min(axis=1))
    return np.asarray(np.minimum.reduce(factors @ lines))
