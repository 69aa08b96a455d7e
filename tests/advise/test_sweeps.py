"""Sweeps over patterns of allocations."""

from __future__ import annotations

import pytest

import estimator as est
from estimator.advise.scaling import existing, expand_pattern, sweep, sweep_csv
from estimator.errors import AllocationError, StrategyError
from estimator.estimates.estimate import Estimate
from tests.synthetic import Machine, perceptron, with_every_collective

PROFILE = Machine(devices=2).profile()
LARGER = with_every_collective(Machine(devices=4).profile())
GRAPH = perceptron([256, 1000, 256], batch=64)


def answer_of(text: str) -> Estimate:
    return est.estimate(GRAPH, text, profile=PROFILE)


def test_ranges_combine_over_joined_parts() -> None:
    texts = list(expand_pattern("1..2x4:a+1x1..2:b"))
    assert texts == ["1x4:a+1x1:b", "1x4:a+1x2:b", "2x4:a+1x1:b", "2x4:a+1x2:b"]


def test_a_range_may_be_of_gpus_under_a_power_limit() -> None:
    assert list(expand_pattern("1..2x8:h100@500W")) == ["1x8:h100@500W", "2x8:h100@500W"]


@pytest.mark.parametrize("pattern", ["4..2x1:a", "1..99999999x1:a", "1..1000x1..1000:a"])
def test_an_invalid_range_is_refused(pattern: str) -> None:
    with pytest.raises(AllocationError):
        list(expand_pattern(pattern))


def test_rows_that_do_not_exist_keep_their_reason() -> None:
    rows = sweep(("1x1..3:m",), answer_of)
    assert [row.answer is None for row in rows] == [False, False, True]
    assert "has 2" in rows[2].refusal
    assert rows[0].efficiency_ratio == 1.0
    step_ratio = rows[0].answer.step_time_s / rows[1].answer.step_time_s
    assert rows[1].efficiency_ratio == pytest.approx(step_ratio)


def test_a_sweep_of_nothing_that_exists_is_refused() -> None:
    with pytest.raises(AllocationError, match="has 2"):
        sweep(("1x3:m", "1x4:m"), answer_of)


def test_rows_whose_ranks_a_strategy_cannot_divide_keep_their_reason() -> None:
    def hybrid(text: str) -> Estimate:
        return est.estimate(GRAPH, text, profile=LARGER, strategy="fsdp:shard=2")

    rows = sweep(("1x1..4:m",), hybrid)
    assert [row.answer is None for row in rows] == [True, False, True, False]
    assert "do not divide 3" in rows[2].refusal
    with pytest.raises(StrategyError, match="do not divide 1"):
        sweep(("1x1:m", "1x3:m"), hybrid)


def test_csv_has_one_line_an_allocation() -> None:
    lines = sweep_csv(sweep(("1x1..3:m",), answer_of)).splitlines()
    assert lines[0].startswith("allocation,refusal,ranks,step_time_s")
    assert len(lines) == 4


def test_the_first_existing_allocation_stands_for_a_pattern() -> None:
    assert existing(["1..2x1:m"], lambda text: text.startswith("2")) == ["2x1:m"]
    assert existing(["1..2x1:m"], lambda text: False) == ["1x1:m"]
