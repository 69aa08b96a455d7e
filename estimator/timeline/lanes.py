"""Turn host and device seconds per op into the times at which a lane's ops end."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def _waits(host_s: Array, device_s: Array) -> Array:
    """How long the device would idle before each op if it waited for that op alone."""
    done = np.cumsum(device_s)
    return np.asarray(np.cumsum(host_s) - (done - device_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatches:
    """The ops of `count` micro-batches, one after the other; the last one does something more.

    An op ends at max(end of the one before, issued by the host) + its time on the device, written
    as a running maximum; where `is_shared` says that host and device are the same cores, both add
    up. Ends do not depend on how many there are but for a sum: those in the middle advance by the
    period of the slower lane. `lead_s` is how much earlier ops end than in a step that is begun on
    an idle device.
    """

    host_s: Array
    device_s: Array
    last_host_s: Array
    last_device_s: Array
    count: int
    is_shared: bool
    lead_s: float = 0.0

    def ends_s(self, number: int) -> Array:
        """End of each op in one of the micro-batches, counted from 0."""
        last = number == self.count - 1
        host_s = self.last_host_s if last else self.host_s
        device_s = self.last_device_s if last else self.device_s
        host, device = float(self.host_s.sum()), float(self.device_s.sum())
        if self.is_shared or not len(host_s):
            return np.cumsum(host_s + device_s) + number * (host + device)
        done = np.cumsum(device_s) + number * device
        waits = _waits(host_s, device_s) + number * (host - device)
        if number:
            longest = float(_waits(self.host_s, self.device_s).max())
            waits[0] = max(waits[0], longest + max((number - 1) * (host - device), 0.0))
        end = np.maximum.accumulate(waits) + done
        return np.asarray(np.maximum(end - self.lead_s, done) if self.lead_s else end)

    @property
    def end_s(self) -> float:
        """When the last op of all ends."""
        return float(self.ends_s(self.count - 1)[-1]) if len(self.host_s) else 0.0

    def slower_host_s(self, error: float) -> float:
        """How much later the last op ends if the host takes longer by that share of its time."""
        times = 1.0 + error
        slower = replace(self, host_s=times * self.host_s, last_host_s=times * self.last_host_s)
        return slower.end_s - self.end_s

    def looped(self, update_host_s: float, update_device_s: float) -> tuple[MicroBatches, float]:
        """(the same, seconds of the update behind them) where step follows step unawaited.

        In a loop the host issues the next step while the device still works on this one, so that a
        step takes what the busier of the two has to do in it, and ops end earlier by the lead that
        the host then has, if the device can keep up.
        """
        before = self.count - 1
        host_s = before * float(self.host_s.sum()) + float(self.last_host_s.sum())
        device_s = before * float(self.device_s.sum()) + float(self.last_device_s.sum())
        step_s = max(host_s + update_host_s, device_s + update_device_s)
        if not len(self.host_s):
            return self, step_s
        last_s = float(self.ends_s(before)[-1])
        found = replace(self, lead_s=max(last_s + update_device_s - step_s, 0.0))
        return found, step_s - float(found.ends_s(before)[-1])
