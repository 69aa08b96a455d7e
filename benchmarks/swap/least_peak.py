"""Search the swap plan with the least peak within a slowdown."""

from __future__ import annotations

from collections.abc import Sequence

from estimator.advise.swap.problem import SwapProblem
from estimator.advise.swap.search import EVERYTHING, Means, Planned, least_bytes, plan_within


def least_peak(
    problem: SwapProblem,
    slowdown_ratio: float,
    *,
    curve: Sequence[Planned],
    rounds: int = 6,
    means: Means = EVERYTHING,
    seeds: Sequence[Planned] = (),
) -> Planned:
    """The plan with the least peak whose step takes at most 1 + `slowdown_ratio` times as long.

    `curve` is that of `pareto`; budgets between its plans are tried.
    """
    limit_s = problem.vanilla_s * (1 + slowdown_ratio) * (1 + 1e-9)
    within = [each for each in (*curve, *seeds) if each.played.step_s <= limit_s]
    best = min(within, key=lambda each: each.played.peak_bytes)
    beyond = [
        each.played.peak_bytes for each in curve if each.played.peak_bytes < best.played.peak_bytes
    ]
    low = max(beyond, default=least_bytes(problem))
    high = best.played.peak_bytes
    for _ in range(rounds):
        middle = (low + high) // 2
        found = plan_within(problem, middle, means=means, seeds=seeds)
        fast = found.played.step_s <= limit_s
        if fast and found.played.peak_bytes < best.played.peak_bytes:
            best = found
        if fast and found.played.peak_bytes <= middle:
            high = middle
        else:
            low = middle
    return best
