"""Answer in closed form what a queue of collectives beside compute that never waits for it costs.

The queue is work-conserving: however many are in flight, together they advance one second per
second alone, and 1/s beside compute, which meanwhile advances at 1 − e/s. So in lane time, work
arrives at the ready times and drains at 1/(s − e), and the backlog W when compute ends is Lindley's
recursion written as a maximum over buckets k,

    W = max(0, max_k(t_k + … + t_K − (lane − ready_k) / (s − e))),

and the step ends e seconds per second of drained work after the lane, plus W alone on the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from estimator.elementwise import maximum
from estimator.timeline.collectives import CollectiveModel, SizedCollective
from estimator.timeline.corrections import Corrections
from estimator.timeline.lines import fastest_s
from estimator.timeline.overlaps import Overlap

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

# Stands for a drain of nothing: any slack then clears the backlog, and no slack leaves all of it.
_NO_DRAIN = 1e-300
# Rows worked on at once, so that their arrays stay in a core's cache.
_ROWS_AT_ONCE = 512


class Ready(Protocol):
    """When the buckets of some steps are ready.

    `alike` tells rows apart that are to be asked for one after the other; None for one step.
    """

    @property
    def alike(self) -> Indices | None: ...

    def slack_s(self, rows: Indices | None) -> Array:
        """Seconds of the slowest lane that are left then: (buckets,) of one, (buckets, rows)."""
        ...


class BucketQueue:
    """The collectives of buckets of some sizes, sent in order as they get ready.

    Seconds of each bucket by one algorithm are linear in the terms of its line, by the reference of
    the collective: `sized` holds the factors.
    """

    def __init__(self, corrections: Sequence[Corrections], sizes_bytes: Array) -> None:
        self.sizes_bytes = sizes_bytes
        self.sized = SizedCollective(corrections, sizes_bytes)
        sizes = np.where(sizes_bytes > 0, sizes_bytes, 1.0)
        ratios = np.array([each.latency_at(sizes) for each in corrections])
        self.latency_ratio = ratios.reshape(len(corrections), len(sizes_bytes))
        # For bucket k, the factors of a line's terms in what the link has to do for k and all after
        # it, and in the part of the bucket's own time before that: (references, buckets, 3).
        factors, ratio = self.sized.factors, self.latency_ratio[:, :, None]
        self._behind = np.cumsum((factors * (1.0 - ratio))[:, ::-1], axis=1)[:, ::-1]
        self._latency = factors * ratio
        self._has_latency: list[bool] = [bool(each.any()) for each in self.latency_ratio]

    def exposed_s(self, ready: Ready, model: CollectiveModel, ratio: Any, overlap: Overlap) -> Any:
        """Seconds from the end of the undisturbed lane to the end of the last collective.

        `ratio` scales the collectives. Of one step, or a row for each.
        """
        if not len(self.sizes_bytes):
            return 0.0
        lines = model.coefficients(ratio)
        if isinstance(model.reference, int):
            return float(self._exposed_s(model.reference, ready.slack_s(None), lines, overlap))
        exposed = np.broadcast_to(overlap.exposed_ratio, len(model.reference))
        slowdown = np.broadcast_to(overlap.slowdown, len(model.reference))
        found = np.zeros(len(model.reference))
        for reference, rows in _alike(model.reference, ready.alike):
            some = Overlap(exposed[rows], slowdown[rows])
            found[rows] = self._exposed_s(reference, ready.slack_s(rows), lines[..., rows], some)
        return found

    def _exposed_s(self, reference: int, slack_s: Array, lines: Array, overlap: Overlap) -> Any:
        """The closed form of the module's docstring; `slack_s` is what is left of the lane."""
        behind_s = self._behind_s(reference, lines)
        drain = maximum(overlap.drain, _NO_DRAIN)
        sent_s = 1.0 * behind_s[0]
        if not self._has_latency[reference]:
            slack_s /= drain
            behind_s -= slack_s
            backlog_s = maximum(np.maximum.reduce(behind_s), 0.0)
            return overlap.exposed_ratio * (sent_s - backlog_s) + backlog_s
        # A bucket that can be sent only after the lane's end has negative slack.
        slack_s -= self._latency[reference] @ lines[0]
        beside_s = np.maximum(slack_s, 0.0)
        behind_s -= beside_s / drain
        backlog_s = maximum(np.maximum.reduce(behind_s), 0.0)
        after_s = maximum(np.maximum.reduce(behind_s + (beside_s - slack_s)), 0.0)
        return overlap.exposed_ratio * (sent_s - backlog_s) + after_s

    def _behind_s(self, reference: int, lines: Array) -> Array:
        """What the link has to do for each bucket and all after it, each by its fastest line."""
        if len(lines) == 1 or self._has_latency[reference]:
            return np.asarray(self._behind[reference] @ lines[0])
        each_s = fastest_s(self.sized.factors[reference], lines)
        return np.cumsum(each_s[::-1], axis=0)[::-1]


def _alike(reference: Indices, others: Indices | None) -> Iterator[tuple[int, Indices]]:
    """(reference, some rows that have it and are alike), together all rows."""
    code = reference * 2 if others is None else reference * 2 + others
    order = np.argsort(code.astype(np.int16), kind="stable")
    in_order = code[order]
    ends = np.append(np.flatnonzero(np.diff(in_order)) + 1, len(order)).tolist()
    first = 0
    for end in ends:
        for start in range(first, end, _ROWS_AT_ONCE):
            yield int(in_order[first]) // 2, order[start : min(start + _ROWS_AT_ONCE, end)]
        first = end
