"""The exact optimum on small steps: by hand, and never above what the planner finds."""

from __future__ import annotations

import pytest
from swap.exact import exact_step_s

from estimator.advise.swap.search import plan_within
from tests.advise.swap.swap_problems import chain, problem_of


def test_the_optimum_of_one_swap_by_hand() -> None:
    # Tensor 0 must be gone in op 2. Moved: out from 1 s to 7 s, op 2 until 8 s, back at 14 s, op 4
    # until 15 s. Made again by op 0 it takes 1 s: 11 s of ops and that.
    tensors = [(6, 0, 4, (0, 4)), (8, 2, 2, (2,))]
    moved = problem_of([1, 4, 1, 4, 1], tensors)
    assert exact_step_s(moved, 8).step_s == pytest.approx(15)
    again = problem_of([1, 4, 1, 4, 1], tensors, forward=1)
    assert exact_step_s(again, 8).step_s == pytest.approx(12)
    assert exact_step_s(again, 14).step_s == pytest.approx(11)


def test_nothing_fits_a_budget_below_the_largest_op() -> None:
    answer = exact_step_s(chain(3), 1)
    assert (answer.step_s, answer.is_proven) == (None, True)


@pytest.mark.parametrize("ratio", [0.5, 0.7])
def test_no_plan_is_faster_than_the_optimum(ratio: float) -> None:
    problem = chain(5, seconds=2.0)
    budget = int(ratio * problem.vanilla_bytes)
    found = plan_within(problem, budget)
    exact = exact_step_s(problem, budget)
    assert exact.is_proven
    assert exact.step_s is not None
    if found.played.peak_bytes <= budget:
        assert found.played.step_s >= exact.step_s - 1e-6
