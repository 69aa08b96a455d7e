"""Find what runs slower or faster than it did, or than its like: nodes first, else machine types.

A node that is slow makes every step slow that it takes part in. Residuals (log of observed over
expected) of the steps with a node are set beside those without it, before and after the moment
that divides them best (the largest statistic of all two-sample divisions: Page, 1954).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean, stdev

LEAST_SHIFT_RATIO = 0.05
# Standard errors between both sides of a division; many are tried, hence more than 3.
_LEAST_Z = 4.5
_LEAST_STEPS = 3
# Of one node only so many of the latest steps are divided: the work rises with their square.
_MOST_STEPS = 200
# Two runs of the same step differ by about this much (see `residual_field`).
_LEAST_SPREAD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """log(observed / expected) of one step, when it was seen, and the nodes that took part."""

    at: datetime
    nodes: frozenset[str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A node, or machine type, whose steps take `ratio` times as long as expected since `since`.

    `since` is None where it has been so from the first observation on.
    """

    name: str
    ratio: float
    since: datetime | None
    steps: int

    def __str__(self) -> str:
        percent = 100 * abs(self.ratio - 1)
        how = "slower" if self.ratio > 1 else "faster"
        since = "" if self.since is None else f" since {self.since:%A %Y-%m-%d %H:%M}"
        return f"{self.name} is {percent:.0f} % {how} than expected{since} ({self.steps} steps)"


def drifts(residuals: Sequence[Residual]) -> list[Drift]:
    """What has drifted, the clearest first; each residual is blamed on one node at most."""
    left = sorted(residuals, key=lambda residual: residual.at)
    found: list[Drift] = []
    while True:
        names = {name for residual in left for name in residual.nodes}
        tried = [(name, _division(name, left)) for name in sorted(names)]
        clear = [(division[0], name, division) for name, division in tried if division]
        if not clear:
            return found
        _, name, (_, shift, since) = max(clear, key=lambda item: item[0])
        explained = [r for r in left if name in r.nodes and (since is None or r.at >= since)]
        found.append(Drift(name=name, ratio=math.exp(shift), since=since, steps=len(explained)))
        left = [residual for residual in left if residual not in explained]


_Division = tuple[float, float, datetime | None]


def _division(name: str, residuals: Sequence[Residual]) -> _Division | None:
    """(statistic, shift, since when) of the clearest division of a node's steps, if any is."""
    own = [residual for residual in residuals if name in residual.nodes][-_MOST_STEPS:]
    others = [residual.value for residual in residuals if name not in residual.nodes]
    best: _Division | None = None
    for first in range(len(own) - _LEAST_STEPS + 1):
        after = [residual.value for residual in own[first:]]
        before = [residual.value for residual in own[:first]] + others
        # With little to compare with, the expectation itself is what a node drifts from.
        compares = len(before) >= max(_LEAST_STEPS, len(after) / 2)
        base, spread = (fmean(before), stdev(before)) if compares else (0.0, 0.0)
        shift = fmean(after) - base
        error = max(spread, stdev(after), _LEAST_SPREAD) * math.sqrt(
            1 / len(after) + 1 / max(len(before), _LEAST_STEPS)
        )
        statistic = abs(shift) / error
        if abs(math.expm1(shift)) < LEAST_SHIFT_RATIO or statistic < _LEAST_Z:
            continue
        if best is None or statistic > best[0]:
            best = statistic, shift, own[first].at if first else None
    return best
