"""Plans of memory: played by hand, checked by a walk of its own, chosen within a budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from plan_flaws import plan_flaws

from estimator.advise.swap.plan import Recompute, Swap, SwapPlan, gaps_of, play, recipe
from estimator.advise.swap.problem import SwapProblem
from estimator.advise.swap.search import Means, least_bytes, pareto, plan_within
from tests.advise.swap.swap_problems import chain, problem_of
from tests.budgets import examples


def three_ops_between() -> SwapProblem:
    """Tensor 0 (6 bytes) is made by op 0 and read by op 4; tensor 1 (8 bytes) lives in op 2."""
    return problem_of([1, 7, 1, 7, 1], [(6, 0, 4, (0, 4)), (8, 2, 2, (2,))], forward=1)


def test_levels_and_seconds_of_a_hidden_swap_by_hand() -> None:
    problem = three_ops_between()
    assert problem.levels().tolist() == [6, 6, 14, 6, 6]
    swap = Swap(tensor=0, after=0, free_before=2, fetch_before=3, use=4)
    played = play(problem, SwapPlan(swaps=(swap,)))
    # Out from 1 s to 7 s while op 1 runs to 8 s; back from 9 s to 15 s while op 3 runs to 16 s.
    assert played.levels.tolist() == [6, 6, 8, 6, 6]
    assert (played.peak_bytes, played.step_s) == (8, 17)
    assert played.out == ((0, 1.0, 7.0),)
    assert played.back == ((0, 9.0, 15.0),)
    assert played.saved_ratio == pytest.approx(6 / 14)
    assert played.overhead_ratio == 0


def test_a_step_waits_for_copies_that_are_too_long_by_hand() -> None:
    problem = problem_of([1, 4, 1, 4, 1], [(6, 0, 4, (0, 4)), (8, 2, 2, (2,))], forward=1)
    swap = Swap(tensor=0, after=0, free_before=2, fetch_before=3, use=4)
    # Op 1 ends at 5 s, the copy out at 7 s; op 2 ends at 8 s, the copy back at 14 s, op 4 at 15 s.
    assert play(problem, SwapPlan(swaps=(swap,))).step_s == 15


def test_two_copies_of_one_direction_follow_each_other_by_hand() -> None:
    tensors = [(3, 0, 3, (0, 3)), (3, 0, 3, (0, 3)), (9, 2, 2, (2,))]
    problem = problem_of([1, 4, 1, 9], tensors, forward=1)
    swaps = tuple(
        Swap(tensor=number, after=0, free_before=2, fetch_before=3, use=3) for number in (0, 1)
    )
    played = play(problem, SwapPlan(swaps=swaps))
    assert [(each.start_s, each.end_s) for each in played.out] == [(1, 4), (4, 7)]
    # Op 2 runs from 7 s to 8 s, both are back at 14 s, and op 3 takes 9 s.
    assert played.step_s == 23


def test_what_is_held_across_steps_is_away_across_steps_by_hand() -> None:
    # A state of 5 bytes that the last op alone touches, beside 7 bytes in op 1.
    problem = problem_of([5, 1, 5, 1], [(5, -1, 4, (3,)), (7, 1, 1, (1,))])
    swap = Swap(tensor=0, after=3, free_before=5, fetch_before=6, use=7)
    played = play(problem, SwapPlan(swaps=(swap,)))
    assert problem.levels().tolist() == [5, 12, 5, 5]
    assert played.levels.tolist() == [5, 7, 5, 5]
    # Out in 5 s while op 0 runs, back in 5 s while op 2 does.
    assert played.step_s == 12
    assert plan_flaws(problem, SwapPlan(swaps=(swap,)), played, budget_bytes=7) == []


def test_a_recomputation_takes_its_time_and_memory_by_hand() -> None:
    problem = three_ops_between()
    again = Recompute(tensor=0, after=0, before=4, ops=(0,))
    played = play(problem, SwapPlan(recomputes=(again,)))
    assert played.levels.tolist() == [6, 0, 8, 0, 6]
    assert (played.peak_bytes, played.step_s) == (8, 18)


def test_a_dead_source_is_made_again_too() -> None:
    # 0 makes a, 1 makes b of a, after which a is dead; 3 reads b.
    problem = problem_of([1] * 4, [(1, 0, 1, (0, 1)), (1, 1, 3, (1, 3))], forward=2)
    assert recipe(problem, 1, after=1, before=3) == (0, 1)
    # Were a still there, its op need not run.
    kept = problem_of([1] * 4, [(1, 0, 3, (0, 1, 3)), (1, 1, 3, (1, 3))], forward=2)
    assert recipe(kept, 1, after=1, before=3) == (1,)


def test_nothing_is_made_again_from_what_has_changed() -> None:
    # Op 2 rewrites the standing tensor 0 that op 1 read.
    problem = problem_of([1] * 4, [(1, -1, 4, (1, 2)), (1, 1, 3, (1, 3))], forward=2)
    assert recipe(problem, 1, after=1, before=3) is None


FLAWS = {
    "uses tensor 0": Swap(tensor=0, after=0, free_before=2, fetch_before=5, use=5),
    "out of order": Swap(tensor=0, after=0, free_before=3, fetch_before=2, use=4),
}


@pytest.mark.parametrize("sentence", list(FLAWS))
def test_the_checker_finds_what_a_plan_breaks(sentence: str) -> None:
    found = plan_flaws(three_ops_between(), SwapPlan(swaps=(FLAWS[sentence],)))
    assert any(sentence in flaw for flaw in found)


def test_the_checker_finds_too_much_memory_and_missing_sources() -> None:
    problem = three_ops_between()
    assert "the budget is 13" in plan_flaws(problem, SwapPlan(), budget_bytes=13)[0]
    assert plan_flaws(problem, SwapPlan(), budget_bytes=14) == []
    chained = chain(3)
    again = (
        Recompute(tensor=0, after=1, before=5, ops=(0,)),
        Recompute(tensor=1, after=2, before=4, ops=(1,)),
    )
    found = plan_flaws(chained, SwapPlan(recomputes=again))
    assert "op 1 runs again before op 4 without tensor 0" in found


def test_the_checker_finds_two_transfers_at_once() -> None:
    problem = three_ops_between()
    swap = Swap(tensor=0, after=0, free_before=2, fetch_before=3, use=4)
    plan = SwapPlan(swaps=(swap,))
    played = play(problem, plan)
    object.__setattr__(played, "out", (*played.out, played.out[0]))
    assert any("at once" in flaw for flaw in plan_flaws(problem, plan, played))


@pytest.mark.parametrize("plan", ["swap", "recompute", "both"])
def test_a_chain_fits_half_of_its_peak(plan: str) -> None:
    problem = chain(8)
    means = Means(swap=plan != "recompute", recompute=plan != "swap")
    budget = problem.vanilla_bytes // 2
    found = plan_within(problem, budget, means=means)
    assert found.played.peak_bytes <= budget
    assert plan_flaws(problem, found.plan, found.played, budget_bytes=budget) == []


@given(
    op_s=some.lists(some.floats(0.1, 5.0), min_size=6, max_size=14),
    sizes=some.lists(some.integers(1, 40), min_size=3, max_size=10),
    ratio=some.floats(0.3, 1.0),
    data=some.data(),
)
@settings(max_examples=examples(60), deadline=None)
def test_plans_within_a_budget_are_sound(
    op_s: list[float], sizes: list[int], ratio: float, data: some.DataObject
) -> None:
    ops = len(op_s)
    tensors = []
    for size in sizes:
        accesses = sorted(
            data.draw(some.lists(some.integers(0, ops - 1), min_size=1, max_size=3, unique=True))
        )
        standing = data.draw(some.booleans())
        born, dies = (-1, ops) if standing else (accesses[0], accesses[-1])
        tensors.append((size, born, dies, accesses))
    problem = problem_of(op_s, tensors, forward=ops // 2, bytes_per_s=10.0)
    budget = int(ratio * problem.vanilla_bytes)
    found = plan_within(problem, budget)
    assert plan_flaws(problem, found.plan, found.played) == []
    assert found.played.peak_bytes >= least_bytes(problem)
    assert found.played.step_s >= problem.vanilla_s * (1 - 1e-9)


def test_no_plan_of_a_curve_is_beaten_by_another() -> None:
    problem = chain(10)
    curve = pareto(problem, budgets=6)
    peaks = [each.played.peak_bytes for each in curve]
    seconds = [each.played.step_s for each in curve]
    assert peaks == sorted(peaks, reverse=True)
    assert seconds == sorted(seconds)
    assert curve[0].played.peak_bytes <= problem.vanilla_bytes


def test_gaps_of_a_standing_tensor_go_around_the_step() -> None:
    problem = problem_of([1] * 5, [(1, -1, 5, (1, 4))])
    assert [(gap.after, gap.use) for gap in gaps_of(problem)] == [(1, 4), (4, 6)]
