"""Several jobs on a device: what one holds between its steps is away while the others run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swap.checker import plan_flaws
from swap.steps import joined

from estimator.advise.swap.plan import SwapPlan, play
from estimator.advise.swap.search import plan_within
from estimator.errors import WorkloadError
from tests.advise.swap.swap_problems import link, problem_of


def job(fixed_bytes: int = 0):  # type: ignore[no-untyped-def]
    """Ops of 10 s; 4 bytes of state that ops 0 and 5 touch, 6 of activation from op 2 to op 3."""
    tensors = [(4, -1, 6, (0, 5)), (6, 2, 3, (2, 3))]
    return problem_of([10.0] * 6, tensors, fixed_bytes=fixed_bytes)


def test_jobs_hold_what_stands_and_one_of_them_what_it_makes() -> None:
    both = joined([job(1), job(2)])
    assert both.levels().tolist() == [11, 11, 17, 17, 11, 11] * 2
    assert both.vanilla_s == 120.0
    assert play(both, SwapPlan()).peak_bytes == 17


def test_a_joint_plan_needs_less_than_the_sum_of_single_plans() -> None:
    # Alone the state is away for ops 2 and 3 and leaves the 6 bytes of activation: 12 for two jobs.
    # Together the other job's state is away as well, and both are there, 8 bytes, as turns change.
    single = plan_within(job(), 6)
    assert single.played.peak_bytes == 6
    both = joined([job(), job()])
    found = plan_within(both, 8)
    assert found.played.peak_bytes <= 8 < 2 * single.played.peak_bytes
    assert found.played.overhead_ratio == pytest.approx(0.0, abs=1e-9)
    assert plan_flaws(both, found.plan, found.played) == []


def test_jobs_of_unlike_links_are_refused() -> None:
    with pytest.raises(WorkloadError, match="share its host link"):
        joined([job(), replace(job(), d2h=link("d2h", 7.0))])
    with pytest.raises(WorkloadError, match="at least one"):
        joined([])
