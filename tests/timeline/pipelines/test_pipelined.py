"""Estimates of ranks that hold stages, through the public interface."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import estimator as est
from estimator.errors import StrategyError, WorkloadError
from estimator.estimates.engine import Engine
from estimator.estimates.estimate import Estimate
from estimator.machines.profile import Contention, Link
from estimator.placement.mesh import Mesh
from estimator.timeline.pipelines.simulation import StageCosts, contended, last_ends_s
from estimator.timeline.pipelines.stage_plans import stage_plans
from estimator.timeline.rank.rules import StepShape
from estimator.workload.layouts import Layout
from estimator.workload.schedules import Schedule
from estimator.workload.strategies import DDP
from tests.graph.partition.test_stages import traced
from tests.synthetic import CHOSEN, Machine, with_every_collective

PROFILE = with_every_collective(Machine(rank_jitter_ratio=0.0).profile())
GRAPH = traced(8)
SIZES = (1 << 10, 10 << 10, 1 << 20)


def answer(allocation: str, layout: str | None, micro_batches: int = 8, **more: object) -> Estimate:
    return est.estimate(
        GRAPH,
        allocation,
        layout=layout,
        accumulation_steps=micro_batches,
        **{"profile": PROFILE, **more},  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "schedule", ["1f1b", "gpipe", "interleaved:2", "zb", "zbv", "dualpipev", "dualpipe"]
)
def test_the_parts_add_up_and_the_timeline_ends_with_the_step(schedule: str) -> None:
    found = answer("1x2:m", f"pp=2,schedule={schedule},dp=1")
    assert found.breakdown.total_s == pytest.approx(found.step_time_s, rel=1e-6)
    assert found.timeline.step_time_s == pytest.approx(found.step_time_s, rel=1e-6)
    # Interleaved, the rank with the longer passes waits for transfers alone, and so do two ranks of
    # DualPipe.
    assert found.breakdown.idle_s > 0 or schedule in ("interleaved:2", "dualpipe")
    assert found.breakdown.communication_exposed_s > 0
    assert found.global_batch == 8 * 8
    assert sum(share for _, _, share, _ in found.provenance) == pytest.approx(1.0, abs=1e-6)
    spans = list(found.timeline.spans)
    assert {span.rank for span in spans} == {0, 1}


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_shards_that_every_micro_batch_exchanges_are_refused(strategy: str) -> None:
    with pytest.raises(StrategyError, match=f"'{strategy}' exchanges shards for every micro-batch"):
        answer("1x4:m", "pp=2,dp=2", strategy=strategy)
    assert answer("1x4:m", "pp=2,dp=2", strategy="fsdp:no_reshard").step_time_s > 0


def test_micro_batches_in_the_middle_add_the_period_of_the_slowest_stage() -> None:
    found = {count: answer("1x4:m", "pp=4,dp=1", count) for count in (8, 16, 32)}
    steps_s = {count: each.step_time_s for count, each in found.items()}
    assert steps_s[32] - steps_s[16] == pytest.approx(2 * (steps_s[16] - steps_s[8]), rel=1e-6)
    # Ramps are paid once: the share of idle ranks falls.
    shares = [each.breakdown.idle_s / each.step_time_s for each in found.values()]
    assert shares == sorted(shares, reverse=True)


def test_1f1b_holds_less_than_gpipe_and_a_stage_less_than_the_model() -> None:
    one_by_one, all_first = (
        answer("1x2:m", f"pp=2,schedule={name},dp=1") for name in ("1f1b", "gpipe")
    )
    assert one_by_one.peak_memory_bytes < all_first.peak_memory_bytes
    assert one_by_one.memory.parameters_bytes < answer("1x1:m", None).memory.parameters_bytes


def test_data_parallel_ranks_of_each_stage_reduce_its_gradients() -> None:
    found = answer("1x4:m", "pp=2,dp=*")
    assert found.plan.mesh.dp == 2
    assert found.breakdown.communication_exposed_s > 0
    assert found.global_batch == 2 * 8 * 8


def test_the_answer_is_that_of_the_whole_model_and_can_be_pickled() -> None:
    found = answer("1x2:m", "pp=2,dp=1")
    assert found.model == GRAPH.name
    assert found.layout == "pp=2,schedule=1f1b,dp=1"
    assert any("stages begin at layers." in each for each in found.assumptions)
    again = pickle.loads(pickle.dumps(found))
    assert again == found
    assert again.spare_memory_bytes == found.spare_memory_bytes


def test_stages_begin_at_the_modules_that_are_named() -> None:
    found = answer("1x2:m", "pp=2,cut=layers.6,dp=1")
    assert list(found.pipeline.points) == ["layers.6"]
    assert found.layout == "pp=2,schedule=1f1b,cut=layers.6,dp=1"
    balanced = answer("1x2:m", "pp=2,dp=1")
    assert found.step_time_s > balanced.step_time_s
    same = answer("1x2:m", f"pp=2,cut={balanced.pipeline.points[0]},dp=1")
    assert same.step_time_s == balanced.step_time_s


def test_split_points_that_make_no_stages_are_refused_in_one_sentence() -> None:
    with pytest.raises(WorkloadError, match=r"'layers\.80' names no module of Model that computes"):
        answer("1x2:m", "pp=2,cut=layers.80,dp=1")
    with pytest.raises(StrategyError, match="begin at 1 modules after the first stage, found 2"):
        answer("1x2:m", "pp=2,cut=layers.2+layers.4,dp=1")
    with pytest.raises(WorkloadError, match=r"begins at 'layers\.2' would leave the one before"):
        answer("1x3:m", "pp=3,cut=layers.4+layers.2,dp=1", 6)


def test_megatrons_stages_have_as_many_layers_each_or_those_of_its_layout() -> None:
    even = ["layers.2", "layers.4", "layers.6"]
    assert list(answer("1x4:m", "pp=4,megatron,dp=1").pipeline.points) == even
    # The last stage has the head beside its layers, and torch's cut gives it fewer of them.
    assert answer("1x4:m", "pp=4,dp=1").pipeline.points[-1] != "layers.6"
    found = answer("1x4:m", "pp=4,cut=Et*3|(t*2|)*2tL,dp=1")
    assert found.layout == "pp=4,schedule=1f1b,cut=Et*3|(t*2|)*2tL,dp=1"
    assert list(found.pipeline.points) == ["layers.3", "layers.5", "layers.7"]
    with pytest.raises(WorkloadError, match="has 8 repeated blocks, found 6 in the layout"):
        answer("1x2:m", "pp=2,cut=Et*3|t*3L,dp=1")
    with pytest.raises(StrategyError, match="lays out no stages with layers each; write E, t, m"):
        answer("1x2:m", "pp=2,cut=Et*8|L,dp=1")
    with pytest.raises(StrategyError, match="begin at 1 modules after the first stage, found 2"):
        answer("1x2:m", "pp=2,cut=Et*4|t*2|t*2L,dp=1")


def test_no_micro_batch_waits_in_the_update() -> None:
    graph = est.trace_model(
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.ones(1, 64)
    )
    layout = "pp=2,schedule=gpipe,dp=1"
    few, many = (
        est.estimate(graph, "1x2:m", layout=layout, accumulation_steps=count, profile=PROFILE)
        for count in (2, 200)
    )
    # A micro-batch holds three vectors of 256 bytes, the update temporaries of a weight of 16 KiB.
    parts = few.memory
    held = parts.parameters_bytes + parts.gradients_bytes + parts.optimizer_state_bytes
    assert parts.total_bytes == held + parts.inputs_bytes + parts.update_bytes
    assert many.memory.total_bytes > parts.total_bytes


def test_what_a_pipeline_cannot_do_is_refused_in_one_sentence() -> None:
    with pytest.raises(StrategyError, match="dualpipev over 2 stages of ranks needs at least 4"):
        answer("1x2:m", "pp=2,schedule=dualpipev,dp=1", 1)
    with pytest.raises(WorkloadError, match="8 repeated blocks, which cannot make 16 stages"):
        answer("2x8:m", "pp=16,dp=1", 16)
    with pytest.raises(StrategyError, match="schedule is that of pipeline ranks; write pp=2"):
        answer("1x2:m", "schedule=1f1b")
    with pytest.raises(StrategyError, match="'2f2b' is no pipeline schedule"):
        answer("1x2:m", "pp=2,schedule=2f2b")


def test_every_schedule_does_the_same_work_in_its_time() -> None:
    # The model's flops of 8 micro-batches over the peak of two devices, whoever ends last.
    answers = [
        answer("1x2:m", f"pp=2,schedule={name},dp=1") for name in ("1f1b", "zbv", "dualpipe")
    ]
    done = [found.step_time_s * (found.mfu_ratio or 0.0) for found in answers]
    assert done[0] > 0
    assert done[1:] == pytest.approx([done[0]] * 2)


def test_stages_of_a_rank_err_together() -> None:
    # Two stages of a rank run the same kernels as one of twice the layers.
    widths = []
    for schedule in ("1f1b", "interleaved:2"):
        found = est.estimate(
            replace(GRAPH, target="cuda"),
            "1x2:h100-sxm",
            layout=f"pp=2,schedule={schedule},dp=1",
            batch_per_gpu=1 << 20,
            accumulation_steps=8,
        )
        widths.append(math.log(found.high_s / found.step_time_s))
    assert widths[1] == pytest.approx(widths[0], rel=0.05)


def test_ranks_of_dualpipe_hold_and_update_two_copies() -> None:
    one = answer("1x2:m", "pp=2,schedule=zb,dp=1,cut=layers.4")
    both = answer("1x2:m", "pp=2,schedule=dualpipe,dp=1,cut=layers.4")
    # Each of two ranks has both halves of the model.
    assert both.memory.parameters_bytes == answer("1x2:m", None, 1).memory.parameters_bytes
    assert both.breakdown.update_s > one.breakdown.update_s
    assert any("two copies" in text for text in both.assumptions)
    assert not any("two copies" in text for text in one.assumptions)


def test_copies_of_dualpipe_add_up_their_gradients_once() -> None:
    # Two ranks all-reduce the 7,552 bytes of each half: 0.1 ms and 1 byte a nanosecond. Where the
    # halves share an embedding of 50 x 16 numbers, each rank adds up its own two copies of it and
    # all-reduces the sum with the first half.
    for tied, second in ((False, 7552), (True, 7552 - 3200)):
        graph = traced(8, tied=tied)
        engine = Engine()
        mesh = Mesh.laid_out(
            engine.place("1x2:m", profile=PROFILE),
            Layout.parse("pp=2,schedule=dualpipe,dp=1,cut=layers.4"),
            DDP(),
            micro_batches=8,
        )
        shape = StepShape(DDP(), 8)
        stages = stage_plans(graph, mesh, (8,), shape, engine.cache)
        sizes = [7552, 7552, second, second]
        assert [stage.tied_s for stage in stages] == pytest.approx([1e-4 + n / 1e9 for n in sizes])


@pytest.mark.parametrize(
    ("allocation", "layout", "strategy", "says"),
    [
        ("1x4:m", "pp=2,schedule=zb,dp=2", "ddp", True),
        ("1x2:m", "pp=2,schedule=zb,dp=1", "ddp", False),
        ("1x4:m", "pp=2,schedule=1f1b,dp=2", "ddp", False),
        ("1x4:m", "pp=2,schedule=zb,dp=2", "fsdp:no_reshard", False),
    ],
)
def test_that_torch_reduces_no_split_backward_under_ddp_is_said(
    allocation: str, layout: str, strategy: str, says: bool
) -> None:
    found = answer(allocation, layout, strategy=strategy)
    assert any("issue 144530" in text for text in found.assumptions) is says


def test_gradients_of_micro_batches_are_added_up_but_megatrons() -> None:
    # Of 3,776 parameters, 1,888 on each stage, in all but the first of 8 micro-batches.
    found = answer("1x2:m", "pp=2,dp=1,cut=layers.4")
    one = answer("1x2:m", "pp=2,dp=1,cut=layers.4", 1)
    fused = answer("1x2:m", "pp=2,megatron,dp=1,cut=layers.4")
    whole = answer("1x1:m", None, 8)
    assert one.breakdown.copies_exposed_s == fused.breakdown.copies_exposed_s == 0
    # Half of the parameters take half as long but for the start of an operator.
    assert 0.5 < found.breakdown.copies_exposed_s / whole.breakdown.copies_exposed_s < 1


def _passes_s(micro_batches: int, *contentions: Contention) -> float:
    """What a micro-batch takes in two stages on one node."""
    machine = Machine(rank_jitter_ratio=0.0, devices=2).profile()
    found = est.estimate(
        GRAPH,
        "1x2:m",
        layout="pp=2,schedule=gpipe,dp=1",
        accumulation_steps=micro_batches,
        profile=replace(with_every_collective(machine), contentions=contentions),
    )
    assert found.breakdown.total_s == pytest.approx(found.step_time_s, rel=1e-6)
    return (found.breakdown.forward_s + found.breakdown.backward_s) / micro_batches


def test_stages_slow_each_other_only_while_both_compute() -> None:
    twice = Contention(bound="compute", devices_busy=2, points=((1.0, 2.0),), provenance=CHOSEN)
    # Of one micro-batch a stage waits while the other computes.
    assert _passes_s(1, twice) == pytest.approx(_passes_s(1), rel=1e-9)
    assert _passes_s(1) < _passes_s(4, twice) < _passes_s(64, twice) < 2.0 * _passes_s(64)


def test_only_gpipe_sends_one_way_at_a_time() -> None:
    # Two nodes that send to each other at once take three times as long as one that sends.
    both_ways = tuple(
        replace(cost, nodes=2, points=tuple((size, 3 * (2e-4 + size / 2 / 1e8)) for size in SIZES))
        for cost in PROFILE.collectives
        if cost.op == "all_gather"
    )
    profile = replace(PROFILE, collectives=(*PROFILE.collectives, *both_ways))
    sent_s = {}
    for name in ("gpipe", "1f1b"):
        found = answer("2x1:m", f"pp=2,schedule={name},dp=1", profile=profile)
        sent_s[name] = found.pipeline.costs[0].sent_s
    # 8 sequences of 10 tokens of 16 numbers over a link of 0.2 ms and 100 MB/s.
    one_way_s = 2e-4 + 8 * 10 * 16 * 4 / 1e8
    assert sent_s["gpipe"] == pytest.approx(one_way_s)
    assert sent_s["1f1b"] == pytest.approx(3 * one_way_s, rel=0.02)


def test_what_ranks_of_a_node_send_each_other_is_no_collective() -> None:
    loopback = Link(
        kind="loopback",
        locality="node",
        latency_s=4e-5,
        bandwidth_bytes_per_s=4e9,
        provenance=CHOSEN,
    )
    found = answer("1x2:m", "pp=2,dp=1", profile=replace(PROFILE, links=(loopback,)))
    # 8 sequences of 10 tokens of 16 numbers. A collective of two begins with 0.1 ms.
    assert found.pipeline.costs[0].sent_s == pytest.approx(4e-5 + 8 * 10 * 16 * 4 / 4e9)


def test_a_step_is_slowed_where_its_ranks_overlap_and_an_update_that_is_alone_is_not() -> None:
    # By turns: rank 0 forward 0-3, backward 6-12; rank 1 forward 1-4, backward 4-10, update 10-11.
    # Together they compute in 1-3 and 6-11: 7 of 12 seconds take half as long again.
    alone = StageCosts(1.0, 2.0, 0.0)
    gpipe, slowed = Schedule.parse("gpipe"), alone.times(1.5, 1.0)
    costs, tails_s = contended(gpipe, 2, 3, 2 * [slowed], 2 * [alone], [3.0, 3.0], [2.0, 2.0])
    assert last_ends_s(gpipe, 2, 3, costs)[0] == pytest.approx(12 + 0.5 * 7)
    # Rank 0 updates from 12 on, when rank 1 has; rank 1 beside rank 0's last pass and update.
    assert tails_s == [1.0, 3.0]
