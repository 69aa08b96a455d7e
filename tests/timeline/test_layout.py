"""Steps of ranks that share layers, worked out by hand from the links between them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn

import estimator as est
from estimator.cache import Cache
from estimator.errors import StrategyError, WorkloadError
from estimator.estimates.engine import DEFAULT
from estimator.estimates.estimate import Estimate
from estimator.graph.ir.collectives import collectives_of
from estimator.graph.partition.partitioner import split
from estimator.graph.partition.plan import Plan
from estimator.kernels.durations import op_durations
from estimator.machines.profile import MachineProfile
from estimator.placement.mesh import Mesh
from estimator.timeline.rank.layer_collectives import layer_collectives_of
from estimator.workload.layouts import Layout
from estimator.workload.strategies import DDP
from tests.graph.partition.test_split import BATCH, FLOAT, INNER, MLP_GRAPH, STREAM_BYTES, WIDTH
from tests.synthetic import Machine, with_every_collective

MACHINE = Machine(rank_jitter_ratio=0.0)
PROFILE = MACHINE.profile()
GRAPH = MLP_GRAPH
PLAN = {"up": "colwise", "down": "rowwise"}
EXCHANGE = {"dtensor_exchange_s": 1e-3}


def answer(allocation: str, layout: str | None, **more: object) -> Estimate:
    about = {"tp_plan": PLAN if layout else None, "profile": PROFILE} | more
    return est.estimate(GRAPH, allocation, layout=layout, **about)


def all_reduce_s(latency_s: float, bytes_per_s: float) -> float:
    return latency_s + STREAM_BYTES / bytes_per_s


def test_two_reductions_of_the_stream_stand_in_the_breakdown() -> None:
    found = answer("1x2:m", "tp=2")
    each_s = all_reduce_s(MACHINE.latency_s, MACHINE.bandwidth_bytes_per_s)
    assert found.breakdown.layer_communication_s == pytest.approx(2 * each_s, rel=0.01)
    assert found.breakdown.communication_exposed_s == 0
    assert found.breakdown.total_s == pytest.approx(found.step_time_s)
    assert found.timeline.step_time_s == pytest.approx(found.step_time_s, rel=1e-9)


def test_ranks_wait_for_collectives_after_computing_as_measured_so() -> None:
    local = split(GRAPH, Plan.of(PLAN), tp=2)
    spent = op_durations(local.at(), PROFILE, devices_busy=2, cache=Cache(limit_bytes=0))
    first, second = (each.op_index for each in collectives_of(local.at()))
    between_s = sum((spent.device_s + spent.host_s)[first + 1 : second + 1])
    # The second comes halfway between both windows. Of the first, which no other one comes before,
    # no window is known: it waits as after the longest.
    waited_s = (
        (0.5 * between_s, STREAM_BYTES, 0.01),
        (1.5 * between_s, STREAM_BYTES, 0.03),
    )
    costs = [
        replace(each, blocking=waited_s) if each.op == "all_reduce" else each
        for each in PROFILE.collectives
    ]
    profile = replace(PROFILE, collectives=tuple(costs))
    found = answer("1x2:m", "tp=2", profile=profile)
    assert found.breakdown.layer_communication_s == pytest.approx(0.03 + 0.02, rel=1e-6)
    assert MachineProfile.from_dict(profile.to_dict()) == profile
    # Gradients' reductions are queued, not waited for.
    replicas = [est.estimate(GRAPH, "1x2:m", profile=each) for each in (PROFILE, profile)]
    assert replicas[0].step_time_s == replicas[1].step_time_s


def test_no_exchange_takes_less_than_without_knowing_what_is_computed_before_it() -> None:
    profile, strategy, cache = with_every_collective(PROFILE), DDP(), Cache(limit_bytes=0)
    layout, placement = Layout.parse("tp=2,sp"), DEFAULT.place("1x2:m", profile=profile)
    layer_collectives = layer_collectives_of(Mesh.laid_out(placement, layout, strategy), cache)
    bound = DEFAULT.split(GRAPH, layout).at()
    durations = op_durations(bound, profile, devices_busy=2, cache=cache)
    least_s = layer_collectives.seconds(bound).each_s
    assert least_s.sum() > 0
    # Gradients that the update sums, three times, are summed for all micro-batches together.
    for micro_batches in (1, 3, 8):
        assert (least_s <= layer_collectives.seconds(bound, durations, micro_batches).each_s).all()


def test_calls_of_no_bytes_say_nothing_of_what_ranks_wait_for() -> None:
    costs = [replace(each, blocking=((0.0, 0.0, 0.01),)) for each in PROFILE.collectives]
    profile = replace(PROFILE, collectives=tuple(costs))
    found = answer("1x2:m", "tp=2", profile=profile)
    assert found.step_time_s == answer("1x2:m", "tp=2").step_time_s
    with pytest.raises(ValueError, match="CollectiveCost"):
        replace(costs[0], blocking=((-1.0, 1.0, 0.01),))


@pytest.mark.parametrize(("optimizer", "reads"), [("sgd", 1), ("adamw", 3), ("adamw-fused", 1)])
def test_gradients_of_vectors_are_summed_for_each_operator_that_reads_them(
    optimizer: str, reads: int
) -> None:
    profile = with_every_collective(replace(PROFILE, host=replace(PROFILE.host, **EXCHANGE)))

    def exchanged_s(name: str, allocation: str = "1x2:m", **more: object) -> float:
        graph = replace(GRAPH, optimizer=name)
        layout = {"layout": "tp=2,sp,dp=*", "profile": profile}
        return est.estimate(graph, allocation, **layout, **more).breakdown.layer_communication_s

    # The weight and the bias of a norm, whose tokens are divided, and what DTensor does for each.
    each_s = MACHINE.latency_s + WIDTH * FLOAT / MACHINE.bandwidth_bytes_per_s + 1e-3
    more_s = exchanged_s(optimizer) - exchanged_s("sgd")
    assert more_s == pytest.approx(2 * (reads - 1) * each_s, rel=0.02, abs=1e-9)
    graph = replace(GRAPH, optimizer=optimizer)
    found = est.estimate(graph, "1x2:m", layout="tp=2,sp", profile=profile)
    said = f"DTensor sums gradients of 2 vectors {reads} times: for each operator of {optimizer} "
    assert any(said in text for text in found.assumptions) == (reads > 1)
    # Of several micro-batches they are summed after the last one, as often.
    several_s = [exchanged_s(name, accumulation_steps=2) for name in ("sgd", optimizer)]
    assert several_s[1] - several_s[0] == pytest.approx(
        2 * (reads - 1) * (each_s - 1e-3) + 4 * max(reads / 2 - 1, 0) * 1e-3, rel=0.02, abs=1e-9
    )
    # FSDP sums them once.
    sharded_s = [exchanged_s(name, "1x4:m", strategy="fsdp") for name in ("sgd", optimizer)]
    assert sharded_s[0] == sharded_s[1]


def test_the_batch_is_that_of_a_data_parallel_rank() -> None:
    found = answer("1x8:m", "tp=2,dp=*")
    assert found.global_batch == 4 * BATCH
    assert answer("1x8:m", "tp=2", global_batch=8 * BATCH).batch_per_gpu == 2 * BATCH
    assert found.layout == "tp=2,dp=*"


def test_micro_batches_exchange_each() -> None:
    one, three = (answer("1x2:m", "tp=2", accumulation_steps=steps) for steps in (1, 3))
    assert three.breakdown.layer_communication_s == pytest.approx(
        3 * one.breakdown.layer_communication_s
    )


def test_groups_that_share_layers_stay_in_a_node() -> None:
    inside, across = answer("2x2:m", "tp=2"), answer("2x2:m", "tp=4")
    assert inside.breakdown.layer_communication_s == pytest.approx(
        answer("1x2:m", "tp=2").breakdown.layer_communication_s
    )
    assert across.breakdown.layer_communication_s > 4 * inside.breakdown.layer_communication_s
    # Two rings of gradients leave each node at once, and share its network.
    ring = inside.plan.group
    assert (ring.ranks, ring.nodes) == (2, 2)
    assert ring.bytes_per_s == pytest.approx(MACHINE.network_bytes_per_s / 2, rel=0.1)


@pytest.mark.parametrize(
    ("width", "tokens", "ranks", "alone", "shared", "wins"),
    [
        # Three passes of 2.7e11 operations at some 6e14 a second, and two sums of 8 MB by NVLink.
        (4096, 1024, 8, "1x1:h100-sxm", "1x8:h100-sxm", True),
        # Three passes of 8.6e9 at some 3e13, and two sums of 4 MB over 50 Gbit/s.
        (256, 8192, 4, "1x1:t4-g4dn", "4x1:t4-g4dn", False),
    ],
)
def test_tp_wins_by_nvlink_and_loses_over_a_slow_network(
    width: int, tokens: int, ranks: int, alone: str, shared: str, wins: bool
) -> None:
    with torch.device("meta"):
        layers = [("up", nn.Linear(width, 4 * width)), ("down", nn.Linear(4 * width, width))]
        model = nn.Sequential(OrderedDict(layers))
    batch = torch.zeros(2, tokens // 2, width)
    graph = est.trace_model(model, batch, optimizer="sgd", precision="fp16", target="cuda")
    one = est.estimate(graph, alone)
    together = est.estimate(graph, shared, layout=f"tp={ranks}", tp_plan=PLAN)
    assert (together.step_time_s < one.step_time_s) == wins


def test_a_rank_holds_and_updates_its_part() -> None:
    whole, half = answer("1x2:m", None), answer("1x2:m", "tp=2")
    assert half.memory.parameters_bytes < whole.memory.parameters_bytes
    assert half.breakdown.update_s < whole.breakdown.update_s
    # Half of every matmul, beside the copy in which a gradient is summed.
    assert half.breakdown.backward_s < whole.breakdown.backward_s


def test_what_dtensor_does_on_the_host_is_counted_by_module_and_collective() -> None:
    costs = {
        "dtensor_forward_s": 1e-3,
        "dtensor_backward_s": 2e-3,
        "dtensor_exchange_s": 1e-4,
        "shard_update_tensor_s": 5e-4,
    }
    slow = replace(PROFILE, host=replace(PROFILE.host, **costs))
    plain, more = (answer("1x2:m", "tp=2", profile=profile) for profile in (PROFILE, slow))
    # up and down, once a pass each; a reduction of each pass; the update of two divided weights.
    host_s = 2 * (1e-3 + 2e-3) + 2 * 1e-4
    added_s = more.breakdown.host_exposed_s - plain.breakdown.host_exposed_s
    assert added_s == pytest.approx(host_s)
    assert more.breakdown.update_s - plain.breakdown.update_s == pytest.approx(2 * 5e-4)
    said = "what DTensor does on the host is not counted"
    assert [any(said in text for text in each.assumptions) for each in (plain, more)] == [1, 0]


def test_ranks_of_megatron_exchange_without_dtensor_on_the_host() -> None:
    slow = replace(PROFILE, host=replace(PROFILE.host, **EXCHANGE, dtensor_forward_s=1e-3))
    plain, more = (answer("1x2:m", "tp=2,megatron", profile=profile) for profile in (PROFILE, slow))
    assert more.step_time_s == plain.step_time_s


def test_dtensor_updates_a_tensor_for_more_where_operators_evict_the_hosts_code() -> None:
    # As much as an operator moves of a weight, 2.5 times its bytes: half of the code is evicted.
    private_bytes = int(2.5 * INNER // 2 * WIDTH * FLOAT)
    memory = replace(PROFILE.memory, private_cache_bytes=private_bytes)

    def update_s(cold_s: float | None) -> float:
        host = replace(PROFILE.host, shard_update_tensor_s=1e-3, dtensor_update_tensor_s=cold_s)
        profile = replace(PROFILE, host=host, memory=memory)
        found = answer("1x2:m", "tp=2", profile=profile)
        return found.breakdown.update_s

    assert update_s(3e-3) - update_s(None) == pytest.approx(2 * (2e-3 - 1e-3))
    # Cold code is not quicker.
    assert update_s(1e-4) == update_s(None)


def test_sharding_over_the_data_parallel_ranks_that_are_left() -> None:
    found = answer("1x8:m", "tp=2,dp=*", strategy="zero1")
    assert found.plan.shards == 4


def test_fsdp_shards_what_a_rank_holds_of_the_layers() -> None:
    profile = with_every_collective(PROFILE)
    both, alone = (
        answer("1x4:m", layout, strategy="fsdp", profile=profile) for layout in ("tp=2,dp=*", None)
    )
    assert (both.plan.shards, alone.plan.shards) == (2, 4)
    assert both.plan.mesh.dp_shard == both.plan.mesh.tp == 2
    assert both.breakdown.layer_communication_s > 0
    assert both.timeline.step_time_s == pytest.approx(both.step_time_s, rel=1e-9)


def test_tp_of_one_is_data_parallel() -> None:
    assert answer("1x4:m", "tp=1").step_time_s == answer("1x4:m", None).step_time_s


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("tp=3", r"layout 'tp=3,dp=\*' takes a multiple of 3 ranks, found 4"),
        ("tp=2,dp=4", "layout 'tp=2,dp=4' takes 8 ranks, found 4"),
        ("tp=two", "tp: 'two' is no whole number"),
        ("tp=*", r"tp: '\*' is no whole number"),
        (
            "zp=2",
            r"'zp=2' is no knob of a layout; its knobs are tp=8, .*, dp=\*, ring",
        ),
        ("cp=2", "cp=2 divides the tokens of fused attention, and Mlp has none"),
        ("ring", "keys and values of cp ranks go around a ring"),
        ("sp", "sp and vocab divide what tp ranks share"),
        ("megatron", "megatron is how tp and pp ranks exchange"),
        ("tp=2,tp=2", "'tp' stands twice; write it once"),
        ("tp=2,sp,sp", "'sp' stands twice; write it once"),
        ("ep=2,imbalance=1,imbalance=2", "'imbalance' stands twice; write it once"),
        ("tp=" + "0" * 8 + "1" * 5000, "is not from 1 to 1e"),
        ("tp=²", "is no whole number"),
        ("pp=2,schedule=interleaved:" + "9" * 5000, "is no pipeline schedule"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(layout: str, sentence: str) -> None:
    with pytest.raises(StrategyError, match=sentence):
        answer("1x4:m", layout)


def test_unlike_batches_of_ranks_that_share_layers_are_refused() -> None:
    with pytest.raises(WorkloadError, match="work on the same samples"):
        answer("1x2:m+1x2:m", "tp=2", batch_per_gpu=(4, 8))


def test_a_plan_without_a_layout_is_refused() -> None:
    with pytest.raises(StrategyError, match="a tensor-parallel plan needs a layout"):
        est.estimate(GRAPH, "1x2:m", tp_plan=PLAN, profile=PROFILE)


@pytest.mark.parametrize(
    "text",
    [
        *("tp=8,sp,vocab,dp=*", "tp=8,sp,vocab,megatron,dp=*", "tp=2,dp=4", "dp=*", "cp=2,dp=*"),
        *("cp=2,ep=4,imbalance=1.25,dp=*", "tp=2,ep=2,all-reduce,dp=*", "tp=2,ep=4,dp=*"),
    ],
)
def test_a_layout_prints_as_it_is_read(text: str) -> None:
    assert str(Layout.parse(text)) == text


def test_parts_of_a_layout_stand_in_any_order() -> None:
    text = "tp=2,cp=4,ring,sp,dp=2"
    assert Layout.parse(str(Layout.parse(text))) == Layout.parse(text)
    assert str(Layout.parse("cp=2,ring")) == "cp=2,ring,dp=*"
