"""Trade the peak of a step against its time: plans for budgets between the least and all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from estimator.advise.swap_plan import SwapPlan, play
from estimator.advise.swap_problem import SwapProblem
from estimator.advise.swap_search import EVERYTHING, Means, Planned, least_bytes, plan_within

_BUDGETS = 20


def pareto(
    problem: SwapProblem,
    *,
    means: Means = EVERYTHING,
    budgets: int = _BUDGETS,
    seeds: Sequence[Planned] = (),
    report: Callable[[float], None] = lambda _done: None,
) -> list[Planned]:
    """Plans of which none has both a lower peak and a shorter step, the largest peak first."""
    low, high = least_bytes(problem), problem.vanilla_bytes
    found = [Planned(plan=SwapPlan(), played=play(problem, SwapPlan()))]
    for number in range(1, budgets + 1):
        budget = int(high - (high - low) * number / budgets)
        found.append(plan_within(problem, budget, means=means, seeds=seeds))
        report(number / budgets)
    found.sort(key=lambda each: (each.played.step_s, each.played.peak_bytes))
    kept: list[Planned] = []
    for each in found:
        if not kept or each.played.peak_bytes < kept[-1].played.peak_bytes:
            kept.append(each)
    return kept


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
