"""Choose the calls of hooks at which tensors are sent, freed and fetched, in time and in budget.

Between two operators of a plan there may be no call of a hook, as between those of one autograd
node. What then happens later than planned would be waited for, and what happens earlier takes
memory; so copies are issued in time where the plan's peak leaves room for it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from estimator.advise.swap_plan import Swap, SwapPlan, planned_levels
from estimator.advise.swap_problem import SwapProblem


@dataclass(slots=True, kw_only=True)
class SwapCalls:
    """One swap with the calls of hooks at which its parts happen."""

    swap: Swap
    size_bytes: int
    send: int
    free: int
    fetch: int
    use: int


class CallTimes:
    """When calls of hooks come, by planned seconds, and what is held then."""

    def __init__(self, places: Sequence[int], problem: SwapProblem, plan: SwapPlan) -> None:
        begins_s = np.concatenate([[0.0], np.cumsum(problem.op_s)])
        self.places = places
        self.call_s = begins_s[list(places)].tolist()
        self._problem = problem
        held, again = planned_levels(problem, plan)
        self._levels = held
        self._budget_bytes = int(max(held.max(), again.max()))

    def retime(self, swaps: Sequence[SwapCalls]) -> None:
        """Free when copies out have ended and fetch in time, as far as the plan's peak allows."""
        for each in swaps:
            self._hold(each.swap.free_before, self.places[each.free], each.size_bytes)
            self._hold(self.places[each.fetch], each.swap.fetch_before, each.size_bytes)
        self._free_after_copies(swaps)
        self._fetch_before_uses(swaps)

    def _free_after_copies(self, swaps: Sequence[SwapCalls]) -> None:
        lane_s = 0.0
        for each in sorted(swaps, key=lambda each: (each.send, each.swap.after)):
            copy_s = self._problem.d2h.transfer_time_s(each.size_bytes)
            lane_s = max(lane_s, self.call_s[each.send]) + copy_s
            wanted = min(max(bisect_left(self.call_s, lane_s), each.free), each.fetch)
            while wanted > each.free and not self._fits(each.free, wanted, each.size_bytes):
                wanted -= 1
            self._hold(self.places[each.free], self.places[wanted], each.size_bytes)
            each.free = wanted

    def _fetch_before_uses(self, swaps: Sequence[SwapCalls]) -> None:
        lane_s = np.inf
        for each in sorted(swaps, key=lambda each: (-each.use, -each.swap.use)):
            copy_s = self._problem.h2d.transfer_time_s(each.size_bytes)
            lane_s = min(lane_s, self.call_s[each.use]) - copy_s
            wanted = max(bisect_right(self.call_s, lane_s) - 1, each.free)
            while wanted < each.fetch and not self._fits(wanted, each.fetch, each.size_bytes):
                wanted += 1
            if wanted < each.fetch:
                self._hold(self.places[wanted], self.places[each.fetch], each.size_bytes)
                each.fetch = wanted

    def _hold(self, first: int, last: int, size_bytes: int) -> None:
        """Count a tensor during ops `first` .. `last` - 1, or no longer where these are swapped."""
        if first <= last:
            self._levels[first:last] += size_bytes
        else:
            self._levels[last:first] -= size_bytes

    def _fits(self, first: int, last: int, size_bytes: int) -> bool:
        held = self._levels[self.places[first] : self.places[last]]
        return not len(held) or int(held.max()) + size_bytes <= self._budget_bytes
