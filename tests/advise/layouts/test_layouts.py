"""Ranking of layouts: bounds are below what the engine says, and drop none of the best."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import estimator as est
from estimator.advise.layouts.candidates import (
    Candidate,
    LayoutBounds,
    Stages,
    candidates,
    divisors,
)
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
from estimator.errors import EstimatorError, WorkloadError
from estimator.estimates.engine import DEFAULT, Engine
from estimator.estimates.estimate import MODEL_ERROR, Estimate
from estimator.estimates.request import EstimateRequest
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.partition.stages import split_points
from estimator.machines.profile import MachineProfile
from estimator.placement.placement import Placement
from estimator.timeline.pipelines.simulation import _held_at_once
from estimator.workload.layouts import Layout
from estimator.workload.schedules import Schedule
from estimator.workload.strategies import DDP, Strategy
from tests.budgets import examples
from tests.graph.partition.test_stages import Model
from tests.synthetic import Machine, with_every_collective

GIB = 1 << 30


@cache
def graphs(target: str = "cpu") -> tuple[OpGraph, OpGraph]:
    tokens = torch.zeros(8, 10, dtype=torch.long)
    return tuple(  # type: ignore[return-value]
        est.trace_model(Wide(), tokens, checkpoint=form, target=target) for form in (None, "full")
    )


class Wide(Model):
    """Blocks that have parts, which a checkpoint asks for."""

    def __init__(self) -> None:
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


def check_that_bounds_leave_out_none_of_the_best(ranked: Callable[..., LayoutRanking]) -> None:
    try:
        every = ranked(prune=False)
    except WorkloadError:
        with pytest.raises(WorkloadError, match="no layout trains"):
            ranked()
        return
    some = ranked()
    assert [row.answer.step_time_s for row in some.rows] == [
        row.answer.step_time_s for row in every.rows
    ]
    assert every.worked_out == every.candidates == some.candidates
    assert some.worked_out <= every.worked_out


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
    check_that_bounds_leave_out_none_of_the_best(partial(ranked, allocation, global_batch, **asked))


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


HALVED = Layout(tp=2)
NAMES = ("1f1b", "gpipe", "interleaved:2", "interleaved:3", "zb", "zbv", "dualpipev", "dualpipe")


@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from(NAMES), st.integers(2, 6), st.integers(1, 24))
def test_what_a_rank_holds_at_least_it_holds_at_once(name: str, ranks: int, count: int) -> None:
    schedule = Schedule.parse(name)
    if not schedule.runs(ranks, count):
        return
    for rank in range(ranks):
        least = schedule.held_at_least(rank, ranks, count)
        held = _held_at_once(schedule, ranks, rank, count)
        assert any(all(a <= b for a, b in zip(least, one, strict=True)) for one in held)


def stages(
    forward: list[float],
    backward: list[float],
    kept: list[float],
    passing: list[float] | None = None,
) -> Stages:
    count = len(forward)
    return Stages(
        forward_s=np.array(forward),
        backward_s=np.array(backward),
        kept_bytes=np.array(kept),
        parameters_bytes=np.full(count, 10.0),
        states_bytes=np.full(count, 20.0),
        passing_bytes=np.array(passing or kept),
        added_s=np.zeros(count),
    )


def test_a_step_of_1f1b_takes_its_fill_and_the_passes_of_a_rank() -> None:
    found = stages([1.0, 2.0], [2.0, 4.0], [5.0, 7.0])
    # Rank 1 waits for (1 + 2) s of the first stage, before and behind 4 × (2 + 4) s of its own.
    assert found.step_s(Schedule.parse("1f1b"), 2, 4) == 3.0 + 24.0
    # Gradients of weights may be computed behind: only the forward pass comes first.
    assert found.step_s(Schedule.parse("zb"), 2, 4) == 1.0 + 24.0
    # The slowest of ranks that are alike takes half as long again for its own passes.
    assert found.step_s(Schedule.parse("zb"), 2, 4, 0.5) == 1.0 + 36.0
    # Gradients of three micro-batches are added to those of the first.
    adding = found._replace(added_s=np.array([0.0, 0.25]))
    assert adding.step_s(Schedule.parse("zb"), 2, 4, 0.5) == 1.0 + 36.0 + 3 * 0.25


def test_too_few_micro_batches_leave_ranks_of_interleaved_stages_waiting() -> None:
    found, schedule = stages([1.0] * 4, [2.0] * 4, [5.0] * 4), Schedule.parse("interleaved:2")
    # One micro-batch goes through four stages and back, whoever holds them: 4 × (1 + 2) s.
    assert found.played_s(schedule, 2, 1) == 12.0
    assert found.played_s(Schedule.parse("zbv"), 2, 1) == 0.0
    # One rank adds to the gradients of the first of two micro-batches.
    adding = stages([1.0], [2.0], [5.0])._replace(added_s=np.array([0.5]))
    assert adding.played_s(Schedule.parse("gpipe"), 1, 2) == 2 * 3.0 + 0.5


def test_the_first_rank_of_1f1b_holds_as_many_micro_batches_as_there_are_ranks() -> None:
    found = stages([1.0, 1.0], [1.0, 1.0], [5.0, 7.0])
    # Once it has gone back through one of them, gradients of 10 bytes stand in the place of 5.
    assert found.memory_bytes(Schedule.parse("1f1b"), 2, 8, 1) == 10 + 20 + 5 + 10
    assert found.memory_bytes(Schedule.parse("gpipe"), 2, 8, 4) == 10 + 20 / 4 + 7 * 7 + 10


def test_a_backward_pass_makes_more_than_waits_for_it() -> None:
    found = stages([1.0] * 4, [1.0] * 4, [5.0] * 4, [5.0, 9.0, 40.0, 9.0])
    # Rank 0 of two holds stages 0 and 2, each with two micro-batches: of one, 40 bytes for 5.
    interleaved = Schedule.parse("interleaved:2")
    held = interleaved.held_at_least(0, 2, 4)
    assert found.memory_bytes(interleaved, 2, 4, 1) == 2 * 30 + 5 * sum(held) + 40 - 5
    # Of 1F1B, gradients stand in its place only where they are more.
    assert found.memory_bytes(Schedule.parse("1f1b"), 4, 1, 1) == 30 + 40


def test_stages_hold_what_blocks_before_the_widest_keep() -> None:
    placement = Engine().place("1x4:m", profile=machine())
    bounds = LayoutBounds(graphs()[1], placement, Engine())
    costs = bounds._blocks(Layout(dp=4), 8)
    kept, passing = costs.each.kept_bytes, costs.each.passing_bytes
    found = costs.stages(costs.blocks.points[2:3])
    # Checkpointed blocks compute again: that is more than they keep.
    assert (passing > kept).all()
    assert found.passing_bytes[0] == max(passing[0], kept[0] + passing[1])
    assert found.kept_bytes.tolist() == [kept[:2].sum(), kept[2:].sum()]


def answer_to(
    candidate: Candidate, engine: Engine, graph: OpGraph, placement: Placement
) -> Estimate:
    _, layout, strategy, batch, micro_batches = candidate
    return engine.estimate(
        EstimateRequest.of(
            graph,
            placement,
            layout=layout,
            batch_per_gpu=batch,
            accumulation_steps=micro_batches,
            strategy=strategy,
        )
    )


_STRATEGIES = ["ddp", "ddp:view", "zero1", "zero2", "distributed-optimizer", "fsdp:shard=2"]
_STRATEGIES += ["fsdp", "fsdp:no_reshard", "fsdp:offload"]


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [(Layout(dp=2), "fsdp:offload"), (Layout(tp=2, pp=2, dp=2), "fsdp:offload,no_reshard")],
)
def test_what_the_host_holds_takes_no_room_on_devices(layout: Layout, strategy: str) -> None:
    engine, graph = Engine(), graphs("cuda")[0]
    placement = engine.place(f"1x{layout.tp * layout.pp * 2}:h100-sxm")
    candidate = Candidate(0, layout, Strategy.parse(strategy), 4, 2)
    answer = answer_to(candidate, engine, graph, placement)
    bounds = LayoutBounds(graph, placement, engine)
    usable = max(kind.device.usable_bytes for kind in answer.plan.kinds)
    ratio = max(bounds.memory_ratio(candidate), bounds.closer(candidate)[1])
    assert 0 < ratio * usable <= answer.peak_memory_bytes


def check_bounds(
    candidate: Candidate, engine: Engine, graph: OpGraph, placement: Placement
) -> None:
    try:
        answer = answer_to(candidate, engine, graph, placement)
    except EstimatorError:
        return
    bounds = LayoutBounds(graph, placement, engine)
    usable = max(kind.device.usable_bytes for kind in answer.plan.kinds)
    most = answer.peak_memory_bytes * (1 + 1e-9)
    step_s, ratio = bounds.closer(candidate)
    # Of ranks that hold the whole depth no more may be known than before.
    assert min(step_s, ratio) > 0 or candidate.layout.pp == 1
    assert ratio * usable <= most
    assert bounds.memory_ratio(candidate) * usable <= most
    least_s = max(step_s, bounds.step_s(candidate), bounds.played(candidate)[0])
    assert least_s <= answer.step_time_s * (1 + 1e-9)


@settings(max_examples=examples(40), deadline=None)
@given(st.data(), st.booleans(), st.sampled_from([16, 24]), st.sampled_from([Layout(), HALVED]))
def test_no_candidate_on_gpus_needs_less_than_its_bounds(
    data: st.DataObject, checkpointed: bool, global_batch: int, shared: Layout
) -> None:
    graph, engine = graphs("cuda")[checkpointed], Engine()
    placement = engine.place("1x8:h100-sxm")
    schedules = [Schedule.parse(name) for name in NAMES]
    strategies = [Strategy.parse(text) for text in _STRATEGIES]
    several = list(candidates(graph, placement, global_batch, strategies, schedules, [shared]))
    candidate = data.draw(st.sampled_from(several))
    check_bounds(candidate, engine, graph, placement)


@settings(max_examples=examples(10), deadline=None)
@given(
    st.sampled_from([("1x4:m", 2), ("1x4:m", 4), ("2x2:m", 2), ("1x6:m", 3)]),
    st.sampled_from(("1f1b", "gpipe", "interleaved:2", "zb", "zbv", "dualpipev", "dualpipe")),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([4, 8, 12]),
    st.sampled_from(["ddp", "ddp:view", "zero1", "distributed-optimizer", "fsdp:no_reshard"]),
    st.booleans(),
    st.booleans(),
)
def test_no_pipeline_is_faster_or_smaller_than_its_bounds(
    where: tuple[str, int],
    schedule: str,
    batch: int,
    micro_batches: int,
    strategy: str,
    checkpointed: bool,
    divided: bool,
) -> None:
    allocation, pp = where
    graph, engine = graphs()[checkpointed], Engine()
    profile = machine(flops_per_s=1e9)
    profile = replace(profile, rank_jitter_ratio=0.05)
    placement = engine.place(allocation, profile=profile)
    tp = 2 if divided and placement.ranks == 2 * pp else 1
    dp = placement.ranks // pp // tp
    layout = Layout(tp=tp, pp=pp, dp=dp, schedule=Schedule.parse(schedule))
    candidate = Candidate(0, layout, Strategy.parse(strategy), batch, micro_batches)
    check_bounds(candidate, engine, graph, placement)
