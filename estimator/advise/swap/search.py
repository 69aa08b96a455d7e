"""Choose what to move to the host and what to compute again, so that a step fits a budget.

Where most is held, the tensor is taken whose absence frees most bytes for a second that it costs:
none while its copies fit beside what the link carries already, else what they are too long; for a
recomputation its own time. All windows are then laid out together, and what turns out not to be
needed is put back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from estimator.advise.swap.plan import (
    Gap,
    Moved,
    PlayedPlan,
    Recompute,
    SwapPlan,
    gaps_of,
    planned_levels,
    play,
    recipe,
    scheduled,
)
from estimator.advise.swap.problem import SwapProblem, TensorKind
from estimator.elementwise import Array, Flags, Indices, Sizes

# A tensor below this share of the peak is not worth a copy's latency.
_SMALLEST_RATIO = 1e-4
# Seconds that a second of a copy beside computing counts: of two that cost nothing, the shorter.
_HIDDEN = 0.01
# How much longer copies are taken to be when tensors are chosen: different drafts are tried.
_CAUTIONS = (1.0, 1.5, 4.0)
_MOST_DROPS = 20
_MOST_EXCHANGES = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planned:
    """A plan with the step that it is for and what it brings."""

    problem: SwapProblem
    plan: SwapPlan
    played: PlayedPlan

    @property
    def swapped(self) -> dict[str, int]:
        """How many tensors of each kind go to the host."""
        return dict(Counter(self.problem.tensors[swap.tensor].kind for swap in self.plan.swaps))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        return {
            "updates": self.problem.updates,
            "peak_bytes": self.played.peak_bytes,
            "saved_ratio": self.played.saved_ratio,
            "step_time_s": self.played.step_s,
            "overhead_ratio": self.played.overhead_ratio,
            "swaps": len(self.plan.swaps),
            "swapped": self.swapped,
            "recomputes": len(self.plan.recomputes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a planner may use; `kinds` are those of tensors that it may move, () for all."""

    swap: bool = True
    recompute: bool = True
    kinds: tuple[TensorKind, ...] = ()


EVERYTHING = Means()


def plan_within(
    problem: SwapProblem,
    budget_bytes: int,
    *,
    means: Means = EVERYTHING,
) -> Planned:
    """The fastest plan found whose peak is within a budget, else the one with the least peak."""
    drafts = [_Draft(problem, budget_bytes, means, caution) for caution in _CAUTIONS]
    laid_out = [draft.laid_out() for draft in drafts]
    ranks = [_rank(plan, budget_bytes) for plan in laid_out]
    best = ranks.index(min(ranks))
    return drafts[best].refined(laid_out[best])


def _rank(planned: Planned, budget_bytes: int) -> tuple[int, float]:
    return max(planned.played.peak_bytes - budget_bytes, 0), planned.played.step_s


def least_bytes(problem: SwapProblem) -> int:
    """What no plan goes below: the largest op with nothing but what it touches."""
    needed = np.full(problem.ops, problem.fixed_bytes, dtype=np.int64) + problem.workspace_bytes
    for tensor in problem.tensors:
        for access in tensor.accesses:
            needed[access] += tensor.size_bytes
    return int(needed.max())


class _Draft:
    """Tensors chosen for one budget, one after the other."""

    def __init__(
        self, problem: SwapProblem, budget_bytes: int, means: Means, caution: float
    ) -> None:
        self.problem, self.budget = problem, budget_bytes
        smallest = _SMALLEST_RATIO * problem.vanilla_bytes
        self.gaps = [g for g in gaps_of(problem, means.kinds) if g.size_bytes > smallest]
        self.after = np.array([gap.after for gap in self.gaps], dtype=np.intp)
        self.use = np.array([gap.use for gap in self.gaps], dtype=np.intp)
        self.size = np.array([gap.size_bytes for gap in self.gaps], dtype=np.int64)
        ends_s = np.cumsum(problem.op_s)
        length_s = problem.length_s
        self.ends_s = np.concatenate([ends_s, ends_s + length_s, ends_s + 2 * length_s])
        self.starts_s = self.ends_s - np.tile(problem.op_s, 3)
        links = [problem.d2h, problem.h2d]
        self.out_s, self.back_s = (
            caution * (link.latency_s + self.size / link.bandwidth_bytes_per_s) for link in links
        )
        self.can_swap = np.full(len(self.gaps), means.swap)
        if not means.recompute:
            self.again_s: Array = np.full(len(self.gaps), np.inf)
        else:
            self.again_s = np.array([self._recompute_s(gap) for gap in self.gaps])
        # Alone on the link, when it is gone and must come back.
        self.gone = np.searchsorted(self.starts_s, self.ends_s[self.after] + self.out_s)
        self.back = (
            np.searchsorted(self.starts_s, self.starts_s[self.use] - self.back_s, "right") - 1
        )
        self.swapped: Flags = np.zeros(len(self.gaps), dtype=np.bool_)
        self.again: Flags = np.zeros(len(self.gaps), dtype=np.bool_)
        self._recipes: dict[tuple[int, int], tuple[int, ...] | None] = {}

    def _recompute_s(self, gap: Gap) -> float:
        if gap.use >= self.problem.ops:
            return np.inf
        ops = recipe(self.problem, gap.tensor, after=gap.after, before=gap.use)
        if ops is None:
            return np.inf
        return float(self.problem.op_s[list(ops)].sum())

    def laid_out(self) -> Planned:
        """Choose until the step fits, and give everything its windows."""
        self._choose()
        return self._laid_out()

    def refined(self, planned: Planned) -> Planned:
        """The same made faster: see `_exchanged` and `_without_needless`."""
        return self._without_needless(self._exchanged(planned))

    # choosing

    def _choose(self) -> None:
        refused: Flags = np.zeros(len(self.gaps), dtype=np.bool_)
        for _ in range(2 * len(self.gaps)):
            levels = self._levels()
            worst = int(levels.argmax())
            if levels[worst] <= self.budget:
                return
            number = self._cheapest(levels, worst, refused)
            if number is None:
                return
            refused[number] = True

    def _levels(self) -> Sizes:
        """Bytes during each op as if each copy had the link for itself."""
        recomputes, moved = self.settled()
        held = self._held(recomputes)
        ops = self.problem.ops
        changes = np.zeros(2 * ops + 1, dtype=np.int64)
        for number, tensor in moved:
            gone, back = int(self.gone[number]), int(min(self.back[number], tensor.by))
            # Where it can be absent only by making the step wait, it can be at least between.
            middle = (tensor.gap.after + 1 + tensor.by) // 2
            first, last = min(gone, middle), max(back, middle + 1)
            changes[min(first, 2 * ops)] += tensor.gap.size_bytes
            changes[min(last, 2 * ops)] -= tensor.gap.size_bytes
        gone_bytes = np.cumsum(changes)[: 2 * ops]
        return np.asarray(held - gone_bytes[:ops] - gone_bytes[ops:])

    def _held(self, recomputes: Sequence[Recompute]) -> Sizes:
        held, again = planned_levels(self.problem, SwapPlan(recomputes=tuple(recomputes)))
        return np.maximum(held, again)

    def _cheapest(self, levels: Sizes, worst: int, refused: Flags) -> int | None:
        """Mark the gap over the fullest op that frees most for its cost; None if there is none."""
        ops = self.problem.ops
        free = ~(self.swapped | self.again | refused)
        covers = ((self.after < worst) & (worst < self.use)) | (
            (self.after < worst + ops) & (worst + ops < self.use)
        )
        candidates = np.flatnonzero(free & covers)
        if not len(candidates):
            return None
        over = np.flatnonzero(levels > self.budget)
        useful = np.minimum(self.size[candidates], levels[worst] - self.budget)
        swap_s = self._swap_cost_s(candidates, over, worst)
        swap_s = np.where(self.can_swap[candidates], swap_s, np.inf)
        again_s = self.again_s[candidates]
        cost_s = np.minimum(swap_s, again_s)
        if not np.isfinite(cost_s).any():
            return None
        # Of what is over elsewhere a longer absence frees more.
        length = (self.use - self.after)[candidates] / ops
        score = useful * (1 + length) / (cost_s + 1e-9)
        best = int(score.argmax())
        number = int(candidates[best])
        if again_s[best] < swap_s[best]:
            self.again[number] = True
        else:
            self.swapped[number] = True
        return number

    def _swap_cost_s(self, numbers: Indices, over: Indices, worst: int) -> Array:
        """Seconds that the step would wait for each one's copies beside those chosen already."""
        ops = self.problem.ops
        after, use = self.after[numbers], self.use[numbers]
        # What is over the budget in the gap lies between these ops.
        place = np.where((after < worst) & (worst < use), worst, worst + ops)
        both = np.concatenate([over, over + ops])
        first = both[np.minimum(np.searchsorted(both, after + 1), len(both) - 1)]
        last = both[np.maximum(np.searchsorted(both, use) - 1, 0)]
        first, last = np.minimum(first, place), np.maximum(last, place)
        cost = np.zeros(len(numbers))
        chosen = np.flatnonzero(self.swapped)
        begin_s, until_s = self.ends_s[after], self.starts_s[first]
        cost += self._excess_s(
            begin_s, until_s, self.ends_s[self.after[chosen]], self.out_s, numbers
        )
        begin_s, until_s = self.ends_s[last], self.starts_s[use]
        cost += self._excess_s(
            begin_s, until_s, self.starts_s[self.use[chosen]], self.back_s, numbers
        )
        return cost + _HIDDEN * (self.out_s[numbers] + self.back_s[numbers])

    def _excess_s(
        self,
        begin_s: Array,
        until_s: Array,
        chosen_at_s: Array,
        seconds: Array,
        numbers: Indices,
    ) -> Array:
        """By how much a copy is too long for its window beside those that lie in it."""
        length_s = self.problem.length_s
        chosen = np.flatnonzero(self.swapped)
        at_s = np.concatenate([chosen_at_s - length_s, chosen_at_s, chosen_at_s + length_s])
        own_s = np.tile(seconds[chosen], 3)
        order = np.argsort(at_s)
        sums = np.append(0.0, np.cumsum(own_s[order]))
        low = np.searchsorted(at_s[order], begin_s, "left")
        high = np.searchsorted(at_s[order], until_s, "right")
        busy_s = sums[np.maximum(high, low)] - sums[low]
        room_s = until_s - begin_s - busy_s
        return np.asarray(np.maximum(seconds[numbers] - room_s, 0.0))

    # settling

    def settled(self) -> tuple[list[Recompute], list[tuple[int, Moved]]]:
        """Recomputations in their order, and what is moved, with by when each must be back.

        What a recomputation reads must be there by then: it comes back earlier.
        """
        by = {
            int(number): self.gaps[number].use
            for number in np.flatnonzero(self.again | self.swapped)
        }
        of_tensor: dict[int, list[int]] = {}
        for number in by:
            of_tensor.setdefault(self.gaps[number].tensor, []).append(number)
        ahead = [int(number) for number in np.flatnonzero(self.again)]
        recipes: dict[int, tuple[int, ...]] = {}
        while ahead:
            number = ahead.pop()
            ops = self._recipe(number, by[number])
            if ops is None:
                # It is read again where it cannot be made: keep it.
                by.pop(number)
                self.again[number] = False
                recipes.pop(number, None)
                continue
            recipes[number] = ops
            for source in self._sources(ops, number):
                for other in of_tensor.get(source, ()):
                    if other in by and self.gaps[other].after < by[number] < by[other]:
                        by[other] = by[number]
                        if self.again[other]:
                            ahead.append(other)
        recomputes = [
            Recompute(
                tensor=self.gaps[number].tensor,
                after=self.gaps[number].after,
                before=by[number],
                ops=ops,
            )
            for number, ops in recipes.items()
            if by[number] - self.gaps[number].after > 1
        ]
        recomputes.sort(key=lambda recompute: (recompute.before, recompute.ops[-1]))
        moved = [
            (int(number), Moved(gap=self.gaps[number], by=by[int(number)]))
            for number in np.flatnonzero(self.swapped)
            if by[int(number)] - self.gaps[number].after > 1
        ]
        return recomputes, moved

    def _recipe(self, number: int, before: int) -> tuple[int, ...] | None:
        key = number, before
        if key not in self._recipes:
            gap = self.gaps[number]
            self._recipes[key] = recipe(self.problem, gap.tensor, after=gap.after, before=before)
        return self._recipes[key]

    def _sources(self, ops: Sequence[int], number: int) -> set[int]:
        read = {tensor for op in ops for tensor in self.problem.reads[op]}
        written = {tensor for op in ops for tensor in self.problem.writes[op]}
        return (read - written) - {self.gaps[number].tensor}

    # laying out

    def _laid_out(self) -> Planned:
        recomputes, moved = self.settled()
        held = self._held(recomputes)
        swaps = scheduled(self.problem, [tensor for _, tensor in moved], held, self.budget)
        plan = SwapPlan(swaps=swaps, recomputes=tuple(recomputes))
        return Planned(problem=self.problem, plan=plan, played=play(self.problem, plan))

    def _exchanged(self, planned: Planned) -> Planned:
        """Make again what was to be moved where that is faster, in groups of the cheapest first."""
        options = np.flatnonzero(self.swapped & np.isfinite(self.again_s))
        options = options[np.argsort(self.again_s[options] / self.size[options])]
        pieces = np.array_split(options, min(len(options), _MOST_EXCHANGES)) if len(options) else []
        for piece in pieces:
            before = self.again.copy(), self.swapped.copy()
            self.again[piece], self.swapped[piece] = True, False
            other = self._laid_out()
            if _rank(other, self.budget) < _rank(planned, self.budget):
                planned = other
            else:
                self.again, self.swapped = before
        return planned

    def _without_needless(self, planned: Planned) -> Planned:
        """Put back what the plan fits without, what costs most first."""
        cost_s = np.where(self.again, self.again_s, self.out_s + self.back_s)
        chosen = np.flatnonzero(self.again | self.swapped)
        limit = max(planned.played.peak_bytes, self.budget)
        for number in chosen[np.argsort(-cost_s[chosen])][:_MOST_DROPS].tolist():
            before = bool(self.again[number]), bool(self.swapped[number])
            self.again[number] = self.swapped[number] = False
            other = self._laid_out()
            if other.played.peak_bytes <= limit and other.played.step_s <= planned.played.step_s:
                planned = other
            else:
                self.again[number], self.swapped[number] = before
        return planned


_BUDGETS = 20


def pareto(
    *problems: SwapProblem,
    means: Means = EVERYTHING,
    budgets: int = _BUDGETS,
    report: Callable[[float], None] = lambda _done: None,
) -> list[Planned]:
    """Plans of which none has both a lower peak and a shorter step, the largest peak first.

    `problems` are one step with its updates here and there (`swap_problems`); of equal plans that
    for the first one stays.
    """
    plans = []
    for place, problem in enumerate(problems):
        low, high = least_bytes(problem), problem.vanilla_bytes
        nothing = SwapPlan()
        plans.append(Planned(problem=problem, plan=nothing, played=play(problem, nothing)))
        for number in range(1, budgets + 1):
            budget = int(high - (high - low) * number / budgets)
            plans.append(plan_within(problem, budget, means=means))
            report((place + number / budgets) / len(problems))
    plans.sort(key=lambda planned: (planned.played.step_s, planned.played.peak_bytes))
    kept: list[Planned] = []
    for planned in plans:
        if not kept or planned.played.peak_bytes < kept[-1].played.peak_bytes:
            kept.append(planned)
    return kept
