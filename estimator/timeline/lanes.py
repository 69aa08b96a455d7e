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
