"""Bounds of layouts: what stages take at least is at most what the engine says that they take."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import estimator as est
from estimator.advise.layouts.candidates import Candidate, LayoutBounds, Stages, candidates
from estimator.errors import EstimatorError
from estimator.estimates.engine import Engine
from estimator.estimates.estimate import Estimate
from estimator.estimates.request import EstimateRequest
from estimator.graph.ir.op_graph import OpGraph
from estimator.placement.placement import Placement
from estimator.timeline.pipelines.simulation import _held_at_once
from estimator.workload.layouts import Layout
from estimator.workload.schedules import Schedule
from estimator.workload.strategies import Strategy
from tests.advise.layouts.test_layouts import Wide, graphs, machine
from tests.budgets import examples

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
    )


def test_a_step_of_1f1b_takes_its_fill_and_the_passes_of_a_rank() -> None:
    found = stages([1.0, 2.0], [2.0, 4.0], [5.0, 7.0])
    # Rank 1 waits for (1 + 2) s of the first stage, before and behind 4 × (2 + 4) s of its own.
    assert found.step_s(Schedule.parse("1f1b"), 2, 4) == 3.0 + 24.0
    # Gradients of weights may be computed behind: only the forward pass comes first.
    assert found.step_s(Schedule.parse("zb"), 2, 4) == 1.0 + 24.0
    # The slowest of ranks that are alike takes half as long again for its own passes.
    assert found.step_s(Schedule.parse("zb"), 2, 4, 0.5) == 1.0 + 36.0


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


@cache
def on_gpus() -> tuple[OpGraph, OpGraph]:
    tokens = torch.zeros(8, 10, dtype=torch.long)
    return tuple(  # type: ignore[return-value]
        est.trace_model(Wide(), tokens, checkpoint=form, target="cuda") for form in (None, "full")
    )


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
    engine, graph = Engine(), on_gpus()[0]
    placement = engine.place(f"1x{layout.tp * layout.pp * 2}:h100-sxm")
    candidate = Candidate(0, layout, Strategy.parse(strategy), 4, 2)
    answer = answer_to(candidate, engine, graph, placement)
    bounds = LayoutBounds(graph, placement, engine)
    usable = max(kind.device.usable_bytes for kind in answer.plan.kinds)
    ratio = max(bounds.memory_ratio(candidate), bounds.closer(candidate)[1])
    assert 0 < ratio * usable <= answer.peak_memory_bytes


@settings(max_examples=examples(40), deadline=None)
@given(st.data(), st.booleans(), st.sampled_from([16, 24]), st.sampled_from([Layout(), HALVED]))
def test_no_candidate_on_gpus_needs_less_than_its_bounds(
    data: st.DataObject, checkpointed: bool, global_batch: int, shared: Layout
) -> None:
    graph, engine = on_gpus()[checkpointed], Engine()
    placement = engine.place("1x8:h100-sxm")
    schedules = [Schedule.parse(name) for name in NAMES]
    strategies = [Strategy.parse(text) for text in _STRATEGIES]
    several = list(candidates(graph, placement, global_batch, strategies, schedules, [shared]))
    candidate = data.draw(st.sampled_from(several))
    try:
        answer = answer_to(candidate, engine, graph, placement)
    except EstimatorError:
        return
    bounds = LayoutBounds(graph, placement, engine)
    usable = max(kind.device.usable_bytes for kind in answer.plan.kinds)
    most = answer.peak_memory_bytes * (1 + 1e-9)
    step_s, ratio = bounds.closer(candidate)
    assert bounds.memory_ratio(candidate) * usable <= most
    assert ratio * usable <= most
    assert max(step_s, bounds.step_s(candidate)) <= answer.step_time_s * (1 + 1e-9)


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
    try:
        answer = answer_to(candidate, engine, graph, placement)
    except EstimatorError:
        return
    bounds = LayoutBounds(graph, placement, engine)
    step_s, ratio = bounds.closer(candidate)
    assert 0 < step_s <= answer.step_time_s * (1 + 1e-9)
    usable = max(kind.device.usable_bytes for kind in answer.plan.kinds)
    assert 0 < ratio * usable <= answer.peak_memory_bytes * (1 + 1e-9)
    assert bounds.memory_ratio(candidate) * usable <= answer.peak_memory_bytes * (1 + 1e-9)
