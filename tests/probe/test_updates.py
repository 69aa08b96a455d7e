"""Splitting the cost of an optimizer step, with costs known beforehand."""

from __future__ import annotations

import pytest

from estimator.probe.backend import CpuBackend
from estimator.probe.updates import fit_update, measure_updates


def test_the_fit_recovers_the_costs_it_was_made_from() -> None:
    launch, tensor, parameter = 2e-5, 3e-6, 4e-10
    points = [
        (float(tensors), float(parameters), launch + tensors * tensor + parameters * parameter)
        for tensors, parameters in ((1, 64), (100, 6400), (100, 10**6), (12, 2.4e7), (4, 4e6))
    ]
    found = fit_update(points)
    assert found[:3] == pytest.approx((launch, tensor, parameter), rel=1e-6)
    assert found[3] == pytest.approx(0.0, abs=1e-9)


def test_no_cost_is_negative_even_where_a_free_fit_would_make_it_so() -> None:
    # More tensors in less time: an unbounded fit would give tensors a negative cost.
    found = fit_update([(1.0, 100.0, 1.0), (100.0, 100.0, 0.5), (1.0, 10_000.0, 2.0)])
    assert min(found[:3]) >= 0.0


def test_a_spent_budget_names_what_was_left_out() -> None:
    emitted: list[dict[str, object]] = []
    measure_updates(CpuBackend(), emitted.append, budget_s=-1.0)
    (last,) = emitted
    assert "adamw (loop)" in last["skipped"]  # type: ignore[operator]
    assert len(last["skipped"]) == 12  # type: ignore[arg-type]
