"""Layouts of models with experts: they are proposed divided, and bounds drop none of the best."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator.advise.layouts.candidates import Candidate, LayoutBounds
from estimator.advise.layouts.search import LayoutRanking, best_layouts
from estimator.estimates.engine import Engine
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.profile import MachineProfile
from estimator.workload.layouts import Layout
from estimator.workload.strategies import Strategy
from tests.advise.layouts.test_layouts import (
    GIB,
    answer_to,
    check_that_bounds_leave_out_none_of_the_best,
    graphs,
    machine,
)
from tests.budgets import examples

pytest.importorskip("transformers")


@cache
def moe_graph() -> OpGraph:
    """8 experts in each of 2 layers, of whose samples each has 8 tokens."""
    from tests.graph.partition.test_split_experts import graph_of

    return graph_of()


def exchanging(*args: Any, **knobs: Any) -> MachineProfile:
    """A machine that knows what an all-to-all takes: here as long as an all-reduce."""
    profile = machine(*args, **knobs)
    known = [cost for cost in profile.collectives if cost.op == "all_reduce"]
    more = (replace(cost, op="all_to_all") for cost in known)
    return replace(profile, collectives=(*profile.collectives, *more))


def ranked(allocation: str, profile: MachineProfile, **asked: Any) -> LayoutRanking:
    return best_layouts(moe_graph(), allocation, profile=profile, **asked)


@settings(max_examples=examples(3), deadline=None)
@given(
    st.sampled_from(["1x2:m", "1x4:m", "2x2:m"]),
    st.sampled_from([4, 8]),
    st.sampled_from([1_500_000, 4_000_000, GIB]),
    st.floats(1e-6, 1e-3),
    st.floats(1e7, 1e11),
    st.integers(1, 6),
    st.sampled_from([("ddp", "fsdp"), ("fsdp",), ("zero1", "ddp")]),
)
def test_bounds_leave_out_none_of_the_best_with_experts(
    allocation: str,
    global_batch: int,
    memory_bytes: int,
    latency_s: float,
    bandwidth: float,
    most: int,
    strategies: tuple[str, ...],
) -> None:
    profile = exchanging(memory_bytes, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)
    asked = {"global_batch": global_batch, "most": most, "engine": Engine()}
    asked |= {"strategies": strategies, "schedules": ("1f1b",)}
    check_that_bounds_leave_out_none_of_the_best(partial(ranked, allocation, profile, **asked))


@pytest.mark.parametrize(
    ("layout", "strategy"),
    [
        *[("ep=4", each) for each in ("ddp", "fsdp")],
        *[("ep=2", each) for each in ("ddp", "fsdp")],
        *[("tp=2,ep=4", each) for each in ("ddp", "fsdp")],
        *[("tp=2,ep=2,all-reduce", each) for each in ("ddp", "fsdp")],
        # No two ranks have the same experts of a stage: their gradients are reduced by none.
        ("ep=2,pp=2", "ddp"),
    ],
)
def test_no_step_with_divided_experts_is_faster_or_smaller_than_its_bounds(
    layout: str, strategy: str
) -> None:
    slow = exchanging(bandwidth_bytes_per_s=1e6, network_bytes_per_s=1e6)
    engine, read = Engine(), Layout.parse(layout)
    placement = engine.place("2x2:m", profile=slow)
    read = replace(read, dp=4 // read.tp // read.pp)
    candidate = Candidate(0, read, Strategy.parse(strategy), 4, 1)
    answer = answer_to(candidate, engine, moe_graph(), placement)
    bounds = LayoutBounds(moe_graph(), placement, engine)
    assert 0 < bounds.step_s(candidate) <= answer.step_time_s
    assert bounds.closer(candidate)[0] <= answer.step_time_s
    usable = max(each.device.usable_bytes for each in answer.plan.kinds)
    assert bounds.memory_ratio(candidate) * usable > 0
    assert bounds.memory_ratio(candidate) * usable <= answer.peak_memory_bytes


def test_experts_are_proposed_divided_in_both_forms_where_degrees_allow() -> None:
    found = ranked("1x4:m", exchanging(), global_batch=16, most=1000, prune=False)
    layouts = {row.layout for row in found.rows}
    # Degrees of 4 ranks that divide 8 experts; with tp=2, those that are a multiple of it.
    expected = {
        "ep=2,dp=4",
        "ep=4,dp=4",
        "tp=2,ep=2,sp,vocab,dp=2",
        "tp=2,ep=2,all-reduce,sp,vocab,dp=2",
        "tp=2,ep=4,sp,vocab,dp=2",
    }
    assert expected <= layouts
    # Only these strategies can reduce gradients of experts apart.
    divided = {row.strategy for row in found.rows if "ep=" in row.layout}
    assert {each.partition(":")[0] for each in divided} == {"ddp", "distributed-optimizer", "fsdp"}


def test_experts_that_fit_on_no_rank_are_divided() -> None:
    whole = ranked("1x4:m", exchanging(), global_batch=16, strategies=("ddp",), most=1)
    small = exchanging(int(whole.rows[0].answer.peak_memory_bytes * 0.7))
    found = ranked("1x4:m", small, global_batch=16, strategies=("ddp",), schedules=(), most=50)
    assert found.rows
    assert all("ep=" in row.layout or "tp=" in row.layout for row in found.rows)


def test_models_without_experts_are_proposed_no_expert_parallelism() -> None:
    found = best_layouts(graphs()[0], "1x4:m", global_batch=16, profile=machine(), most=1000)
    assert not any("ep=" in row.layout for row in found.rows)
    assert not any("experts" in reason for reason, _ in found.refusals)
