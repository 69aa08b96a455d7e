"""Turn host and device seconds per op into the times at which a lane's ops end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def one_lane(host_s: Array, device_s: Array) -> Array:
    """End of each op where host and compute are the same cores."""
    return np.cumsum(host_s + device_s)


def two_lanes(host_s: Array, device_s: Array) -> Array:
    """End of each op on the device: in order, never before the host has issued it.

    end_i = max(end_{i−1}, issued_i) + device_i, written as a running maximum.
    """
    issued = np.cumsum(host_s)
    done = np.cumsum(device_s)
    return np.asarray(np.maximum.accumulate(issued - (done - device_s)) + done)


def looped(
    end_s: Array, host_s: Array, device_s: Array, update_host_s: float, update_device_s: float
) -> tuple[Array, float]:
    """(end of each op, seconds of the update behind the last) where step follows step unawaited.

    `end_s` are the ends in a step begun on an idle device. In a loop the host issues the next step
    while the device still works on this one, so that a step takes what the busier of the two has to
    do in it, and ops end earlier by the lead that the host then has, if the device can keep up.
    """
    step_s = max(float(host_s.sum()) + update_host_s, float(device_s.sum()) + update_device_s)
    if not len(end_s):
        return end_s, step_s
    lead_s = max(float(end_s[-1]) + update_device_s - step_s, 0.0)
    end = np.maximum(end_s - lead_s, np.cumsum(device_s))
    return end, step_s - float(end[-1])
