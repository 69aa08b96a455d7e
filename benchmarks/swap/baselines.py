"""Plan memory as others do: vDNN, Capuchin and Chen's checkpoints, on the same problems.

vDNN offloads the inputs of convolutions (Rhu et al., MICRO 2016, vDNN_conv). Capuchin (Peng et al.,
ASPLOS 2020) swaps what is unused longest and, where that would make the step wait, recomputes what
saves most memory per second. Chen et al. (arXiv 1604.06174) keep what passes between √n segments of
the forward pass and make the rest again, segment by segment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from estimator.advise.swap.plan import (
    Gap,
    Moved,
    Recompute,
    Swap,
    SwapPlan,
    gaps_of,
    planned_levels,
    play,
    recipe,
    scheduled,
)
from estimator.advise.swap.problem import SwapProblem
from estimator.advise.swap.search import Planned


def turn_of(problem: SwapProblem) -> int:
    """The first op after the forward pass."""
    forward = [op for op, again in enumerate(problem.repeatable) if again]
    return max(forward, default=-1) + 1


def saved_gaps(problem: SwapProblem) -> list[Gap]:
    """The stretches over the turn of the step of what the forward pass leaves."""
    turn = turn_of(problem)
    return [
        gap for gap in gaps_of(problem, ["activation"]) if gap.after < turn <= gap.use < problem.ops
    ]


def planned(problem: SwapProblem, plan: SwapPlan) -> Planned:
    """A plan with what it brings."""
    return Planned(plan=plan, played=play(problem, plan))


def vdnn(problem: SwapProblem, convolutions: Sequence[int]) -> Planned:
    """Offload what each convolution of the forward pass reads; `convolutions` are those ops.

    A copy out is waited for before the next convolution begins, a copy in is issued one
    convolution ahead in the backward pass.
    """
    inputs = {tensor for op in convolutions for tensor in problem.reads[op]}
    gaps = [gap for gap in saved_gaps(problem) if gap.tensor in inputs]
    uses = sorted(gap.use for gap in gaps)
    swaps = []
    for gap in gaps:
        layer = next((op for op in convolutions if op > gap.after), gap.after + 1)
        ahead = [use for use in uses if use < gap.use]
        fetch = max(ahead[-1] if ahead else gap.use, layer)
        if layer < gap.use:
            swaps.append(
                Swap(
                    tensor=gap.tensor,
                    after=gap.after,
                    free_before=layer,
                    fetch_before=min(fetch, gap.use),
                    use=gap.use,
                )
            )
    return planned(problem, SwapPlan(swaps=tuple(swaps)))


def capuchin(problem: SwapProblem, budget_bytes: int) -> Planned:
    """Swap by the longest free time, then recompute by the most memory saved per second."""
    ends_s = np.cumsum(problem.op_s)
    starts_s = ends_s - problem.op_s
    gaps = saved_gaps(problem)

    def free_s(gap: Gap) -> float:
        out_s = problem.d2h.transfer_time_s(gap.size_bytes)
        back_s = problem.h2d.transfer_time_s(gap.size_bytes)
        return float(starts_s[gap.use] - ends_s[gap.after]) - out_s - back_s

    moved: list[Moved] = []
    recomputes: dict[Gap, tuple[int, ...]] = {}
    best = planned(problem, SwapPlan())
    left = sorted(gaps, key=free_s, reverse=True)
    for gap in [each for each in left if free_s(each) > 0]:
        if best.played.peak_bytes <= budget_bytes:
            return best
        moved.append(Moved(gap=gap, by=gap.use))
        found = _joined(problem, moved, recomputes, budget_bytes)
        if found.played.step_s <= problem.vanilla_s * (1 + 1e-6):
            best = found
        else:
            # Not hidden any more: what follows would wait for the link.
            moved.pop()
    for gap in _by_saving(problem, [g for g in gaps if g not in [m.gap for m in moved]]):
        if best.played.peak_bytes <= budget_bytes:
            return best
        ops = recipe(problem, gap.tensor, after=gap.after, before=gap.use)
        if ops is None:
            continue
        recomputes[gap] = ops
        best = _joined(problem, moved, recomputes, budget_bytes)
    return best


def _by_saving(problem: SwapProblem, gaps: Iterable[Gap]) -> list[Gap]:
    """Memory saved per second of making it again, the most first."""
    rates: list[tuple[float, Gap]] = []
    for gap in gaps:
        ops = recipe(problem, gap.tensor, after=gap.after, before=gap.use)
        if ops is not None:
            rates.append((gap.size_bytes / (float(problem.op_s[list(ops)].sum()) + 1e-12), gap))
    return [gap for _, gap in sorted(rates, key=lambda each: -each[0])]


def _joined(
    problem: SwapProblem,
    moved: Sequence[Moved],
    recomputes: dict[Gap, tuple[int, ...]],
    budget_bytes: int,
) -> Planned:
    settled = settle(problem, recomputes)
    read_at = sources_of(problem, settled)
    by = [Moved(gap=each.gap, by=min([each.by, *_between(read_at, each.gap)])) for each in moved]
    held, again = planned_levels(problem, SwapPlan(recomputes=settled))
    swaps = scheduled(problem, by, np.maximum(held, again), budget_bytes)
    return planned(problem, SwapPlan(swaps=swaps, recomputes=settled))


def _between(read_at: dict[int, list[int]], gap: Gap) -> list[int]:
    return [op for op in read_at.get(gap.tensor, ()) if gap.after < op < gap.use]


def sources_of(problem: SwapProblem, recomputes: Iterable[Recompute]) -> dict[int, list[int]]:
    """Before which ops each tensor is read to make others again."""
    found: dict[int, list[int]] = {}
    for each in recomputes:
        written = {tensor for op in each.ops for tensor in problem.writes[op]}
        for tensor in {t for op in each.ops for t in problem.reads[op]} - written:
            found.setdefault(tensor, []).append(each.before)
    return found


def settle(problem: SwapProblem, chosen: dict[Gap, tuple[int, ...]]) -> tuple[Recompute, ...]:
    """Recomputations whose sources are made again in time: earlier than they would need be."""
    by = {gap: gap.use for gap in chosen}
    recipes = dict(chosen)
    ahead = list(chosen)
    of_tensor = {gap.tensor: gap for gap in chosen}
    while ahead:
        gap = ahead.pop()
        if gap not in by:
            continue
        ops = recipe(problem, gap.tensor, after=gap.after, before=by[gap])
        if ops is None:
            del by[gap], recipes[gap]
            continue
        recipes[gap] = ops
        written = {tensor for op in ops for tensor in problem.writes[op]}
        for tensor in {t for op in ops for t in problem.reads[op]} - written:
            other = of_tensor.get(tensor)
            if other is not None and other in by and other.after < by[gap] < by[other]:
                by[other] = by[gap]
                ahead.append(other)
    found = [
        Recompute(tensor=gap.tensor, after=gap.after, before=by[gap], ops=recipes[gap])
        for gap in by
        if by[gap] - gap.after > 1
    ]
    return tuple(sorted(found, key=lambda each: (each.before, each.ops[-1])))


def chen(problem: SwapProblem, segments: int | None = None) -> Planned:
    """Keep what passes between segments of the forward pass, make the rest of each again at once.

    By default there are √n of them for n ops.
    """
    turn = turn_of(problem)
    computing = [op for op in range(turn) if problem.repeatable[op]]
    count = segments or max(1, round(math.sqrt(len(computing))))
    bounds = [piece[0] for piece in np.array_split(np.array(computing), count) if len(piece)]
    chosen: dict[Gap, tuple[int, ...]] = {}
    for gap in saved_gaps(problem):
        born = problem.tensors[gap.tensor].born
        segment = int(np.searchsorted(bounds, born, "right"))
        if segment == len(bounds) or segment != int(np.searchsorted(bounds, gap.after, "right")):
            continue
        ops = recipe(problem, gap.tensor, after=gap.after, before=gap.use)
        if ops is not None:
            chosen[gap] = ops
    # The whole segment runs again before the first use of anything in it.
    first: dict[int, int] = {}
    for gap in chosen:
        segment = int(np.searchsorted(bounds, gap.after, "right"))
        first[segment] = min(first.get(segment, gap.use), gap.use)
    whole = {
        Gap(
            tensor=gap.tensor,
            after=gap.after,
            use=first[int(np.searchsorted(bounds, gap.after, "right"))],
            size_bytes=gap.size_bytes,
        ): ops
        for gap, ops in chosen.items()
    }
    return planned(problem, SwapPlan(recomputes=settle(problem, whole)))
