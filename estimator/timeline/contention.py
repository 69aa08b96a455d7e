"""Say how much slower work runs because other devices of its machine are busy too."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from estimator.machines.profile import MachineProfile

Array = NDArray[np.float64]


class SlowdownCurve(NamedTuple):
    """Seconds busy over seconds alone, by the bytes that work moves; 1 where nothing is known."""

    log_bytes: tuple[float, ...]
    ratios: tuple[float, ...]

    def at(self, moved_bytes: Any) -> Any:
        """The ratio for a number of bytes, or for each of an array."""
        if not self.ratios:
            return 1.0
        return np.interp(np.log(np.maximum(moved_bytes, 1.0)), self.log_bytes, self.ratios)

    def beyond(self, cached_bytes: float) -> SlowdownCurve:
        """The same for work on memory: what stays in a cache of that size does not wait for it."""
        if not self.ratios or not cached_bytes or math.log(cached_bytes) >= self.log_bytes[0]:
            return self
        return SlowdownCurve((math.log(cached_bytes), *self.log_bytes), (1.0, *self.ratios))


NOTHING_BUSY = SlowdownCurve((), ())


def slowdown_curve(profile: MachineProfile, bound: str, devices_busy: int) -> SlowdownCurve:
    """What was measured of work bound by `bound` with the nearest number of busy devices.

    One busy device is slowed only where neighbours outside the job were measured.
    """
    measured = [
        item
        for item in profile.contentions
        if item.bound == bound and item.points and (item.devices_busy == 1 or devices_busy > 1)
    ]
    if not measured:
        return NOTHING_BUSY
    nearest = min(measured, key=lambda item: abs(item.devices_busy - devices_busy))
    from scipy.optimize import isotonic_regression

    sizes, ratios = zip(*sorted(nearest.points))
    # More bytes share more of what is shared: what falls with size is noise of the measurement.
    rising = np.maximum(isotonic_regression(ratios).x, 1.0)
    return SlowdownCurve(tuple(math.log(max(size, 1.0)) for size in sizes), tuple(rising.tolist()))


def slowdown_ratio(
    profile: MachineProfile, bound: str, devices_busy: int, moved_bytes: float
) -> float:
    """How much slower work bound by `bound` runs with `devices_busy` devices busy."""
    return float(slowdown_curve(profile, bound, devices_busy).at(moved_bytes))
