"""Group the kernels of a graph by their family and by where their seconds come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from estimator.graph.costs import family_of
from estimator.graph.structure import GraphStructure


class KernelGroups(NamedTuple):
    """(family, source) of kernels, and the number of its group for each op: 0 for views."""

    keys: tuple[tuple[str, str], ...]
    of: NDArray[np.intp]

    def seconds(
        self, device_s: NDArray[np.float64], relative_errors: NDArray[np.float64]
    ) -> dict[tuple[str, str], tuple[float, float]]:
        """(family, source) → seconds of all its ops and the error on them, in seconds."""
        count = len(self.keys) + 1
        seconds, errors_s = (
            np.bincount(self.of, weights=weights, minlength=count)[1:].tolist()
            for weights in (device_s, device_s * relative_errors)
        )
        return dict(zip(self.keys, zip(seconds, errors_s, strict=True), strict=True))


def kernel_groups(structure: GraphStructure, sources: Sequence[str]) -> KernelGroups:
    ops = structure.graph.ops
    families = [family_of(ops[op].call.target) for op in structure.first_op]
    numbers: dict[tuple[str, str], int] = {}
    of = [
        0 if source == "view" else numbers.setdefault((families[call], source), len(numbers) + 1)
        for call, source in zip(structure.call_of.tolist(), sources, strict=True)
    ]
    return KernelGroups(tuple(numbers), np.array(of, dtype=np.intp))
