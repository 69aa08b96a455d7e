"""Say what was measured of a collective over what its formula says, size by size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimator.machines.profile import CollectiveCost, DeviceKind
from estimator.timeline.lines import Line, as_array, fastest_s, powers

Array = NDArray[np.float64]

# Points on a line beyond the largest measured, each four times the one before.
_FURTHER_POINTS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Corrections:
    """Measured over formula at the logarithms of the sizes that were measured, sizes rising.

    `lines` are those of the formula for the measured group. `latency_s` is the part of the
    measured times that passes beside the collective before, as far as that is not over half.
    """

    log_sizes: Array
    log_ratios: Array
    lines: tuple[Line, ...] = (Line(1.0, 0.0),)
    latency_s: float = 0.0

    @classmethod
    def of(cls, cost: CollectiveCost, lines: tuple[Line, ...], kind: DeviceKind) -> Corrections:
        """Those of a measured group whose formula is `lines`."""
        measured_sizes, measured_s = np.array(monotone(cost.points)).T
        beta = min(line.beta_s_per_byte for line in lines)
        sizes, seconds = _extended(measured_sizes, measured_s, beta)
        formula_s = _formula_s(lines, sizes)
        latency_s = _latency_s(cost, kind)
        return cls(np.log(sizes), np.log(seconds / formula_s), lines=lines, latency_s=latency_s)

    def at(self, sizes_bytes: Array) -> Array:
        """Interpolated on logarithms, constant beyond both ends."""
        logs = np.interp(np.log(sizes_bytes), self.log_sizes, self.log_ratios)
        return np.asarray(np.exp(logs))

    def latency_at(self, sizes_bytes: Array) -> Array:
        """The parts of the times of some sizes that pass beside the collective before."""
        measured_s = _formula_s(self.lines, sizes_bytes) * self.at(sizes_bytes)
        return np.asarray(np.minimum(self.latency_s / measured_s, 0.5))


NO_CORRECTIONS = Corrections(np.zeros(1), np.zeros(1))


def _formula_s(lines: Sequence[Line], sizes_bytes: Array) -> Array:
    return fastest_s(powers(sizes_bytes), as_array(lines))


def monotone(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Measured points sorted by size, each lowered to at most the time of the larger ones.

    What disturbs a measurement makes it longer, and a larger message that took less shows it.
    """
    result: list[tuple[float, float]] = []
    for size, seconds in sorted(points, reverse=True):
        if size > 0:
            result.append((size, min(seconds, result[-1][1]) if result else seconds))
    return tuple(reversed(result))


def _latency_s(cost: CollectiveCost, kind: DeviceKind) -> float:
    """How long of a small collective the link waits for the ranks and can serve another one.

    Two threads of gloo run a collective each (ProcessGroupGloo.hpp), so one is sent while the
    other waits: two at once then take less than twice as long. NCCL runs one at a time.
    """
    if kind == "cuda" or not cost.pair_ratio:
        return 0.0
    size, ratio = min(cost.pair_ratio)
    sizes, seconds = np.array(monotone(cost.points)).T
    return float(max(2.0 - ratio, 0.0) * np.interp(size, sizes, seconds))


def _extended(sizes: Array, seconds: Array, beta: float) -> tuple[Array, Array]:
    """Points with some beyond the largest, on a line: a ratio to the formula would not hold there.

    A formula that is off in its latency is off by ever less as sizes rise. The line's slope is
    that of the points, as far as the largest of them is more than its latency, else the formula's.
    """
    first_s, last_s = seconds[0], seconds[-1]
    trust = max(0.0, 1.0 - 2.0 * first_s / last_s)
    measured = (last_s - first_s) / max(sizes[-1] - sizes[0], 1.0)
    slope = trust * measured + (1.0 - trust) * beta
    further = sizes[-1] * 4.0 ** np.arange(1, _FURTHER_POINTS + 1)
    line_s = last_s + slope * (further - sizes[-1])
    return np.append(sizes, further), np.append(seconds, line_s)
