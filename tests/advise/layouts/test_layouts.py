"""Ranking of layouts: bounds drop none of the best, and the reasons are those of the estimates."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import estimator as est
from estimator.advise.layouts.candidates import candidates, divisors
from estimator.advise.layouts.search import (
    SCHEDULES,
    LayoutRanking,
    StepErrors,
    are_alike,
    best_layouts,
    step_errors,
    why_slower,
)
from estimator.coefficients import Z_80, Coefficients
from estimator.errors import WorkloadError
from estimator.estimates.engine import DEFAULT, Engine
from estimator.estimates.estimate import MODEL_ERROR, Estimate
from estimator.estimates.request import EstimateRequest
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.partition.stages import split_points
from estimator.machines.profile import MachineProfile
from estimator.workload.layouts import Layout
from estimator.workload.schedules import Schedule
from estimator.workload.strategies import DDP
from tests.budgets import examples
from tests.graph.partition.test_stages import Model
from tests.synthetic import Machine, with_every_collective

GIB = 1 << 30


@cache
def graphs() -> tuple[OpGraph, OpGraph]:
    import torch

    tokens = torch.zeros(8, 10, dtype=torch.long)
    return tuple(  # type: ignore[return-value]
        est.trace_model(Wide(), tokens, checkpoint=form) for form in (None, "full")
    )


class Wide(Model):
    """Blocks that have parts, which a checkpoint asks for."""

    def __init__(self) -> None:
        from torch import nn

        super().__init__(4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(4)
        )


def machine(memory_bytes: int = 64 * GIB, **knobs: float) -> MachineProfile:
    profile = with_every_collective(Machine(rank_jitter_ratio=0.0, **knobs).profile())  # type: ignore[arg-type]
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in profile.devices)
    return replace(profile, devices=devices)


def ranked(allocation: str, global_batch: int, **asked: object) -> LayoutRanking:
    asked = {"profile": machine()} | asked
    return best_layouts(graphs(), allocation, global_batch=global_batch, **asked)  # type: ignore[arg-type]


@settings(max_examples=examples(4), deadline=None)
@given(
    st.sampled_from(["1x2:m", "1x4:m", "2x2:m", "1x6:m"]),
    st.sampled_from([12, 16, 64]),
    st.sampled_from([100_000, 200_000, 400_000, GIB]),
    st.floats(1e-6, 1e-3),
    st.floats(1e8, 1e11),
    st.integers(1, 6),
    st.sampled_from([("1f1b", "zb"), ("gpipe", "interleaved:2"), ("zbv",)]),
    st.sampled_from([("ddp", "fsdp"), ("zero2",), ("distributed-optimizer", "zero1")]),
)
def test_bounds_leave_out_none_of_the_best(
    allocation: str,
    global_batch: int,
    memory_bytes: int,
    latency_s: float,
    bandwidth: float,
    most: int,
    schedules: tuple[str, ...],
    strategies: tuple[str, ...],
) -> None:
    profile = machine(memory_bytes, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)
    asked = {"profile": profile, "most": most, "engine": Engine()}
    asked |= {"schedules": schedules, "strategies": strategies}
    try:
        every = ranked(allocation, global_batch, prune=False, **asked)
    except WorkloadError:
        with pytest.raises(WorkloadError, match="no layout trains"):
            ranked(allocation, global_batch, **asked)
        return
    some = ranked(allocation, global_batch, **asked)
    assert [row.answer.step_time_s for row in some.rows] == [
        row.answer.step_time_s for row in every.rows
    ]
    assert every.worked_out == every.candidates == some.candidates
    assert some.worked_out <= every.worked_out


def test_bounds_spare_work() -> None:
    # On slow devices it is the kernels that count, of which the bounds know.
    slow = machine(flops_per_s=1e7, memory_bytes_per_s=1e7)
    found = ranked("1x4:m", 64, most=1, profile=slow)
    assert found.worked_out < found.candidates / 2


def test_every_row_is_the_estimate_of_what_it_says() -> None:
    found = ranked("1x4:m", 64, most=50)
    assert len({(row.layout, row.strategy, row.micro_batches) for row in found.rows}) > 10
    for row in found.rows[::7]:
        graph = graphs()[row.checkpoint == "full"]
        again = est.estimate(
            graph,
            "1x4:m",
            layout=row.layout,
            batch_per_gpu=row.batch_per_gpu,
            accumulation_steps=row.micro_batches,
            strategy=row.strategy,
            profile=machine(),
        )
        assert again.step_time_s == pytest.approx(row.answer.step_time_s)
        assert again.global_batch == 64


def test_rows_say_what_makes_them_slower_and_whether_that_can_be_told() -> None:
    found = ranked("1x4:m", 64, most=50)
    best = found.rows[0]
    assert (best.why, best.like_best) == ("", False)
    told_apart = [row for row in found.rows[1:] if not row.like_best]
    assert told_apart
    assert all(row.answer.step_time_s > best.answer.step_time_s for row in told_apart)
    piped = next(row for row in found.rows if "pp=" in row.layout)
    # Two parts of the breakdown by hand: what the pipeline waits, and what it computes more.
    one, other = piped.answer.breakdown, best.answer.breakdown
    if piped.why.startswith("bubble"):
        assert one.idle_s - other.idle_s >= one.update_s - other.update_s


def test_a_slower_part_is_named_with_its_share_of_the_best_step() -> None:
    one, two = (ranked("1x2:m", 16, most=9).rows[number].answer for number in (0, 1))
    slower = replace(two, breakdown=replace(one.breakdown, idle_s=one.breakdown.idle_s + 1.0))
    assert why_slower(slower, one) == f"bubble +{1.0 / one.step_time_s:.0%}"


def test_what_does_not_fit_alone_is_laid_out_over_ranks() -> None:
    one = est.estimate(graphs()[0], "1x1:m", batch_per_gpu=1, profile=machine())
    small = machine(int(one.peak_memory_bytes * 0.8))
    with pytest.raises(WorkloadError, match=r"no layout trains .*: nothing fits"):
        ranked("1x1:m", 4, profile=small)
    found = ranked("1x4:m", 4, profile=small)
    assert all(row.answer.fits != "no" for row in found.rows)
    assert all(row.layout != "dp=4" or row.strategy != "ddp" for row in found.rows)


def test_where_nothing_fits_memory_is_the_reason_whatever_was_refused_before() -> None:
    graph = replace(graphs()[0], checkpoint=None)
    # Three ranks divide no heads, which is refused before any memory is looked at.
    with pytest.raises(WorkloadError, match=r"nothing fits into .*; trace it"):
        best_layouts(graph, "1x3:m", global_batch=3, profile=machine(8000))


def test_long_samples_are_divided_and_megatrons_stages_are_even() -> None:
    graph = replace(graphs()[0], tokens_per_sample=4096, recipe="megatron")
    placement = DEFAULT.place("1x8:m", profile=machine())
    shares = [Layout(), Layout(tp=2), Layout(tp=2, cp=2)]
    schedules = [Schedule.parse(text) for text in SCHEDULES]
    found = list(candidates(graph, placement, 16, [DDP()], schedules, shares))
    layouts = {each.layout for each in found}
    assert any(each.cp == 2 and each.pp == 2 and each.dp == 1 for each in layouts)
    assert all(each.megatron for each in layouts if each.tp * each.pp > 1)
    assert {each.schedule.name for each in layouts} <= {"1f1b", "interleaved"}
    blocks = len(split_points(graph))
    assert {each.schedule.virtual for each in layouts if each.pp == 2} == set(divisors(blocks // 2))


def test_an_executor_finds_the_same() -> None:
    with ThreadPoolExecutor(2) as executor:
        found = ranked("1x4:m", 64, executor=executor)
    assert [row.to_dict() for row in found.rows] == [
        row.to_dict() for row in ranked("1x4:m", 64).rows
    ]


def test_a_batch_that_no_ranks_divide_is_refused_in_one_sentence() -> None:
    with pytest.raises(WorkloadError, match="global batch must be at least 1"):
        ranked("1x2:m", 0)
    assert est.best_layouts is best_layouts
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def answer(layout: str, **asked: Any) -> Estimate:
    options = {"batch_per_gpu": 8, "accumulation_steps": 4, "profile": machine()} | asked
    return Engine().estimate(EstimateRequest.of(graphs()[0], "1x4:m", layout=layout, **options))


@pytest.mark.parametrize("layout", ["dp=*", "tp=2,dp=*", "pp=4", "pp=2,dp=*"])
def test_the_sources_of_an_error_make_up_its_interval(layout: str) -> None:
    found = answer(layout)
    errors = step_errors(found)
    whole = math.log(found.high_s / found.step_time_s) / Z_80
    assert math.hypot(*errors.shared.values(), errors.own) == pytest.approx(whole)
    assert errors.own >= MODEL_ERROR * (1 - 1e-9)


def test_a_step_and_itself_differ_by_what_is_its_own() -> None:
    errors = step_errors(answer("tp=2,dp=*"))
    assert errors.ratio_error(errors) == pytest.approx(math.sqrt(2) * errors.own)


def test_kernels_of_one_family_cancel_and_other_sources_add_up() -> None:
    one = StepErrors({"matmul": 0.4, "exchanges": 0.03}, 0.0)
    other = StepErrors({"matmul": 0.36}, 0.0)
    assert one.ratio_error(other) == pytest.approx(0.05)
    assert are_alike((1.05, one), (1.0, other))
    assert not are_alike((1.08, one), (1.0, other))


def test_a_narrow_interval_leaves_nothing_beside_its_sources() -> None:
    found = answer("dp=*")
    plan = found.plan.under(Coefficients(relative_error=0.001))
    errors = step_errors(replace(found, plan=plan))
    assert math.hypot(*errors.shared.values(), errors.own) == pytest.approx(0.001)
