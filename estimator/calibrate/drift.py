"""Detect drift: nodes, or machine types, that became slower or faster than expected.

A slow node slows every step that it takes part in. For each node the steps with it after a change
point are compared with its steps before that and with all steps without it, by the two-sample
statistic of their residuals (log of observed over expected); the change point is the one with the
largest statistic (Page 1954).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean, stdev

LEAST_SHIFT_RATIO = 0.05
# Standard errors between the two samples; above 3, since many change points are tested.
_LEAST_Z = 4.5
_LEAST_STEPS = 3
# Only so many of the latest steps of a node are searched: the cost is quadratic in them.
_MOST_STEPS = 200
# Observation noise between two runs of the same step is at least about this (`gaussian_process`).
_LEAST_SIGMA = 0.02


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
    """What has drifted, the most significant first; each residual is attributed to one node."""
    left = sorted(residuals, key=lambda residual: residual.at)
    found: list[Drift] = []
    while True:
        names = {name for residual in left for name in residual.nodes}
        tested = [(name, _change_point(name, left)) for name in sorted(names)]
        significant = [(change[0], name, change) for name, change in tested if change]
        if not significant:
            return found
        _, name, (_, shift, since) = max(significant, key=lambda item: item[0])
        explained = [r for r in left if name in r.nodes and (since is None or r.at >= since)]
        found.append(Drift(name=name, ratio=math.exp(shift), since=since, steps=len(explained)))
        left = [residual for residual in left if residual not in explained]


_ChangePoint = tuple[float, float, datetime | None]


def _change_point(name: str, residuals: Sequence[Residual]) -> _ChangePoint | None:
    """(statistic, shift, since when) of a node's most significant change, if there is any."""
    own = [residual for residual in residuals if name in residual.nodes][-_MOST_STEPS:]
    others = [residual.value for residual in residuals if name not in residual.nodes]
    best: _ChangePoint | None = None
    for first in range(len(own) - _LEAST_STEPS + 1):
        after = [residual.value for residual in own[first:]]
        before = [residual.value for residual in own[:first]] + others
        # With too few others the reference is the expectation itself, a residual of 0.
        is_two_sample = len(before) >= max(_LEAST_STEPS, len(after) / 2)
        base, sigma = (fmean(before), stdev(before)) if is_two_sample else (0.0, 0.0)
        shift = fmean(after) - base
        error = max(sigma, stdev(after), _LEAST_SIGMA) * math.sqrt(
            1 / len(after) + 1 / max(len(before), _LEAST_STEPS)
        )
        statistic = abs(shift) / error
        if abs(math.expm1(shift)) < LEAST_SHIFT_RATIO or statistic < _LEAST_Z:
            continue
        if best is None or statistic > best[0]:
            best = statistic, shift, own[first].at if first else None
    return best
