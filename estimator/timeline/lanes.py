"""Turn host and device seconds per op into the times at which a lane's ops end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def _waits(host_s: Array, device_s: Array) -> Array:
    """How long the device would idle before each op if it waited for that op alone."""
    done = np.cumsum(device_s)
    return np.asarray(np.cumsum(host_s) - (done - device_s))


def _ends_s(host_s: Array, device_s: Array, awaited: Sequence[int]) -> Array:
    """End of each op where the host issues nothing more before each `awaited` one has ended."""
    ends_s = np.empty(len(host_s))
    begin_s, bounds = 0.0, [0, *(op + 1 for op in awaited), len(host_s)]
    for start, stop in pairwise(bounds):
        if start < stop:
            host, device = host_s[start:stop], device_s[start:stop]
            run_s = np.maximum.accumulate(_waits(host, device)) + np.cumsum(device)
            ends_s[start:stop] = begin_s + run_s
            begin_s = float(ends_s[stop - 1])
    return ends_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatches:
    """The ops of `count` micro-batches, one after the other; the last one does something more.

    An op ends at max(end of the one before, issued by the host) + its time on the device, written
    as a running maximum; where `is_shared` says that host and device are the same cores, both add
    up. Ends do not depend on how many there are but for a sum: those in the middle advance by the
    period of the slower lane. `lead_s` is how much earlier ops end than in a step that is begun on
    an idle device. The host waits for the device after each `awaited` op of a micro-batch: from
    there on both begin together again.
    """

    host_s: Array
    device_s: Array
    last_host_s: Array
    last_device_s: Array
    count: int
    is_shared: bool
    lead_s: float = 0.0
    awaited: tuple[int, ...] = ()

    def ends_s(self, number: int) -> Array:
        """End of each op in one of the micro-batches, counted from 0."""
        host_s, device_s = self._spent_s(number)
        host, device = float(self.host_s.sum()), float(self.device_s.sum())
        if self.is_shared or not len(host_s):
            return np.cumsum(host_s + device_s) + number * (host + device)
        if self.awaited:
            return self._ends_with_waits_s(number)
        done = np.cumsum(device_s) + number * device
        waits = _waits(host_s, device_s) + number * (host - device)
        if number:
            longest = float(_waits(self.host_s, self.device_s).max())
            waits[0] = max(waits[0], longest + max((number - 1) * (host - device), 0.0))
        end = np.maximum.accumulate(waits) + done
        return np.asarray(np.maximum(end - self.lead_s, done) if self.lead_s else end)

    def _spent_s(self, number: int) -> tuple[Array, Array]:
        """Seconds of host and device per op of one of the micro-batches."""
        if number == self.count - 1:
            return self.last_host_s, self.last_device_s
        return self.host_s, self.device_s

    def _ends_with_waits_s(self, number: int) -> Array:
        """Ends where the host waits: a micro-batch is felt no further than in the next one.

        The lead is felt up to the first wait, and all that comes later is earlier by what the wait
        ends earlier.
        """
        ops, first, last = len(self.host_s), self.awaited[0], self.awaited[-1]
        begun_s = _ends_s(*self._spent_s(0), self.awaited)
        done_s = np.cumsum(self._spent_s(0)[1])
        led_s = np.maximum(begun_s - self.lead_s, done_s)
        earlier_s = float(begun_s[first] - led_s[first])
        if not number:
            return np.concatenate([led_s[:first], begun_s[first:] - earlier_s])
        both = self.awaited + tuple(ops + op for op in self.awaited)
        host_s, device_s = (
            np.concatenate(two) for two in zip(self._spent_s(0), self._spent_s(number), strict=True)
        )
        ends_s = _ends_s(host_s, device_s, both)[ops:]
        if number > 1:
            twice = _ends_s(np.tile(self.host_s, 2), np.tile(self.device_s, 2), both)
            ends_s += (number - 1) * float(twice[ops + last] - twice[last])
        return ends_s - earlier_s

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
        if self.awaited and not self.is_shared:
            lead_s, step_s = self._loop_with_waits(update_host_s, update_device_s)
        else:
            lead_s = float(self.ends_s(before)[-1]) + update_device_s - step_s
        found = replace(self, lead_s=max(lead_s, 0.0))
        return found, step_s - float(found.ends_s(before)[-1])

    def _loop_with_waits(self, update_host_s: float, update_device_s: float) -> tuple[float, float]:
        """(lead of the host where a step begins, seconds from a step to the next).

        From its last wait on, a step is played with the update and what the next one does up to its
        first wait. The update is ready when both lanes are through with it.
        """
        first, rest = self.awaited[0] + 1, self.awaited[-1] + 1
        (head_host_s, head_device_s), (host_s, device_s) = map(self._spent_s, (0, self.count - 1))
        tail = len(host_s) - rest + 2
        both_s = _ends_s(
            np.concatenate([host_s[rest:], [0.0, update_host_s], head_host_s[:first]]),
            np.concatenate([device_s[rest:], [update_device_s, 0.0], head_device_s[:first]]),
            (),
        )
        lead_s = float(both_s[tail - 1] - host_s[rest:].sum()) - update_host_s
        awaited_s = self.ends_s(self.count - 1)[rest - 1] - self.ends_s(0)[first - 1]
        return lead_s, float(awaited_s + both_s[-1])
