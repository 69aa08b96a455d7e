"""Recipes of training: what they add to a step's time and memory, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import estimator as est
from estimator.advise.memory import memory_of
from estimator.cache import Cache
from estimator.errors import ProfileError, StrategyError
from estimator.estimates.estimate import Estimate
from estimator.estimates.table.table import estimate_many
from estimator.graph.ir.ops import OpTiming
from estimator.graph.memory.sizes import update_call
from estimator.graph.trace.trace import trace_graph
from estimator.placement.mesh import ProcessGroup
from estimator.timeline.collectives.costs import GroupCollective
from estimator.timeline.rank.updates import cost_of_update, memory_bound_s
from tests.synthetic import in_blocks, perceptron
from tests.timeline.strategies.test_sharding import profile

# Four matrices of 1000 x 1000 (4 MB each), the first outside all blocks.
BLOCKS = in_blocks(perceptron([1000] * 5, batch=64))
ELEMENTS = 4_000_000


def answer(
    strategy: str = "ddp", allocation: str = "1x4:m", machine: Any = None, **options: Any
) -> Estimate:
    graph = replace(BLOCKS, **options)
    return est.estimate(graph, allocation, profile=machine or profile(), strategy=strategy)


def passes_s(moved_bytes: float, ranks: int = 4) -> float:
    """Seconds of streaming bytes, 8 for each element that a pass reads and writes."""
    elements = [int(moved_bytes / 8)]
    return float(memory_bound_s(profile(), "aten.add_.Tensor", elements, ranks, Cache(1 << 20))[0])


def norm_s(ranks: int) -> float:
    group = ProcessGroup(ranks=ranks, nodes=1, per_node=ranks)
    found = GroupCollective.of(profile(), "all_reduce", group)
    return found.time_s(4.0)


def test_clipping_reads_gradients_twice_and_writes_them_once() -> None:
    plain, clipped = answer(), answer(clip_grad_norm=True)
    host = profile().host
    # On a CPU each of four gradients has a norm and a product of its own, six operators follow.
    expected_s = passes_s(3 * 4 * ELEMENTS) + (6 + 2 * 4) * host.bare_op_s
    more_s = clipped.breakdown.update_s - plain.breakdown.update_s
    assert more_s == pytest.approx(expected_s, rel=1e-9)
    # Every rank has all gradients: no norm is sent.
    assert clipped.breakdown.waiting_s == pytest.approx(plain.breakdown.waiting_s, rel=1e-9)


@pytest.mark.parametrize("strategy", ["zero2", "distributed-optimizer", "fsdp"])
def test_shards_of_gradients_are_clipped_by_each_rank_after_their_norms_are_added(
    strategy: str,
) -> None:
    plain, clipped = answer(strategy), answer(strategy, clip_grad_norm=True)
    more_s = clipped.breakdown.waiting_s - plain.breakdown.waiting_s
    assert more_s == pytest.approx(norm_s(4), rel=1e-6)
    host = profile().host
    update_s = clipped.breakdown.update_s - plain.breakdown.update_s
    fixed_s = (6 + 2 * 4) * host.bare_op_s
    assert update_s == pytest.approx(passes_s(3 * 4 * ELEMENTS) / 4 + fixed_s, rel=1e-9)


def test_a_shared_optimizer_with_whole_gradients_clips_all_of_them() -> None:
    more_s = (
        answer("zero1", clip_grad_norm=True).breakdown.update_s - answer("zero1").breakdown.update_s
    )
    host = profile().host
    expected_s = passes_s(3 * 4 * ELEMENTS) + (6 + 2 * 4) * host.bare_op_s
    assert more_s == pytest.approx(expected_s, rel=1e-9)


def test_an_update_that_was_not_probed_takes_as_many_times_as_it_moves_bytes() -> None:
    machine = profile()
    (known,) = (each for each in machine.updates if each.optimizer == "adamw")
    fused = cost_of_update(machine, "adamw-fused", "cpu")
    assert fused.per_parameter_s == pytest.approx(known.per_parameter_s * 28 / 80)
    assert fused.provenance.source == "fitted"
    assert fused.provenance.relative_error == 0.4
    own = replace(known, form="fused", per_parameter_s=1e-12)
    probed = replace(machine, updates=(*machine.updates, own))
    assert cost_of_update(probed, "adamw-fused", "cpu") is own
    # The plain one stays what it was.
    assert cost_of_update(probed, "adamw", "cpu") is known
    with pytest.raises(ProfileError, match="no update cost of lamb"):
        cost_of_update(replace(machine, updates=()), "lamb", "cpu")


def test_master_weights_cast_gradients_and_weights_and_update_fp32() -> None:
    # bf16 in name: the traced tensors keep their 4 bytes, the copies are twice as wide.
    plain, master = (answer(s, precision="bf16") for s in ("ddp", "ddp:master"))
    more_s = master.breakdown.update_s - plain.breakdown.update_s
    assert more_s == pytest.approx(passes_s(12 * ELEMENTS), rel=1e-9)
    # Two moments and the master weights of 8 bytes, instead of two moments of 4.
    held = [found.memory.optimizer_state_bytes for found in (plain, master)]
    assert held == [8 * ELEMENTS, 24 * ELEMENTS]
    with pytest.raises(StrategyError, match="found one in fp32; leave out master"):
        answer("ddp:master")


def test_what_autocast_keeps_of_all_weights_under_fsdp_is_said_with_the_way_out() -> None:
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 128))
    graph = trace_graph(model, torch.randn(4, 256), target="cuda", precision="bf16-amp")

    def said(strategy: str) -> list[str]:
        found = est.estimate(graph, "1x8:h100-sxm", strategy=strategy)
        return [text for text in found.assumptions if "autocast holds" in text]

    # (256 x 1024 + 1024 + 1024 x 128 + 128) elements of 2 bytes: 770 KiB.
    (text,) = said("fsdp")
    assert text.startswith("autocast holds 770 KiB of bf16 copies of weights")
    assert "--precision bf16 --strategy fsdp:param=bf16,reduce=fp32" in text
    assert said("ddp") == []


def test_a_compressed_bucket_is_sent_in_half_and_cast_twice() -> None:
    plain, half = answer("ddp:unbucketed"), answer("ddp:unbucketed,reduce=bf16")
    reduce = GroupCollective.of(profile(), "all_reduce", ProcessGroup(ranks=4, nodes=1, per_node=4))
    network = half.plan.network
    alone_s = network.alone_s(half.plan.ranks(half.plan.kinds[0]))
    assert alone_s == pytest.approx(4 * reduce.time_s(2e6), rel=1e-9)
    # A copy reads and writes 8 bytes an element; the hook casts (6), divides (4), casts back (6).
    cast_s = half.plan.kinds[0].lane.copies_s / plain.plan.kinds[0].lane.copies_s
    assert cast_s == pytest.approx((8 + 6 + 4 + 6) / 8)
    # One bucket's copy in half stands beside the buckets.
    assert half.memory.bucket_bytes - plain.memory.bucket_bytes == 2_000_000


def test_both_shared_optimizers_are_named_and_sent_differently() -> None:
    zero, whole = answer("zero1"), answer("distributed-optimizer")
    op = {name: GroupCollective.of(
        profile(), name, ProcessGroup(ranks=4, nodes=1, per_node=4)
    ) for name in ("broadcast", "reduce_scatter", "all_gather", "all_reduce")}  # fmt: skip
    every = {name: found for name, found in op.items() if found is not None}
    assert len(every) == 4

    def alone_s(found: Estimate) -> float:
        return float(found.plan.network.alone_s(found.plan.ranks(found.plan.kinds[0])))

    # One bucket of 1 MiB at least has the first gradient, the other three are in the next.
    sizes = (4e6, 12e6)
    reduced_s = sum(every["all_reduce"].time_s(size) for size in sizes)
    assert alone_s(zero) == pytest.approx(reduced_s + 4 * every["broadcast"].time_s(4e6), rel=1e-9)
    expected_s = sum(
        every["reduce_scatter"].time_s(size) + every["all_gather"].time_s(size) for size in sizes
    )
    assert alone_s(whole) == pytest.approx(expected_s, rel=1e-9)
    # The update is shared by four, its state cut evenly; gradients live in their buckets, whole.
    assert whole.memory.optimizer_state_bytes == 8 * ELEMENTS // 4
    assert whole.memory.gradients_bytes == 4 * ELEMENTS
    assert whole.memory.bucket_bytes == 0


def test_muon_updates_matrices_of_blocks_and_is_not_cut() -> None:
    with pytest.raises(StrategyError, match="muon updates whole matrices, found 'fsdp'"):
        answer("fsdp", optimizer="muon")
    found = answer(optimizer="muon")
    # Three matrices have one state, the one outside all blocks AdamW's two.
    assert found.memory.optimizer_state_bytes == (3 + 2) * 4_000_000
    machine = profile()
    cost = cost_of_update(machine, "muon", "cpu")
    # 13.5 tensors moved for each element of a matrix, 20 for the others.
    elements = 3e6 + 1e6 * 20 / 13.5
    tensors = 3 + 1e-5 / 2.5e-4
    own_s = cost.update_time_s(tensors=tensors, parameters=elements)
    assert found.breakdown.update_s > own_s
    # 5 passes of three products of 1000 x 1000 x 1000 for each of three matrices.
    products_s = 45 * 2e9 / 5e10
    assert found.breakdown.update_s - own_s == pytest.approx(products_s, rel=0.2)


@pytest.mark.parametrize(
    "strategy", ["ddp", "ddp:reduce=fp16", "distributed-optimizer", "zero2:reduce=bf16", "fsdp"]
)
def test_timelines_of_recipes_play_what_was_computed(strategy: str) -> None:
    found = answer(strategy, clip_grad_norm=True, optimizer="adamw-8bit")
    assert found.timeline.step_time_s == pytest.approx(found.step_time_s, rel=1e-9)


GPU_BLOCKS = replace(BLOCKS, target="cuda")


def offloaded(allocation: str = "1x1:h100-sxm", **options: Any) -> Estimate:
    graph = replace(GPU_BLOCKS, **options)
    return est.estimate(graph, allocation, strategy="fsdp:offload")


def test_offloaded_shards_are_copied_before_each_gather_and_after_each_reduction() -> None:
    plain = est.estimate(GPU_BLOCKS, "1x8:h100-sxm", strategy="fsdp")
    plans = plain.plan, offloaded("1x8:h100-sxm").plan
    alone_s = [plan.alone_s(plan.kinds[0]) for plan in plans]
    # Seven gathers and four reductions of 4 MB over 8 ranks, on 0.76 of PCIe 5.0 x16.
    one_s = 1e-5 + 4e6 / 8 / (0.76 * 63.015e9)
    assert alone_s[1] - alone_s[0] == pytest.approx((7 + 4) * one_s, rel=1e-9)


def test_offloaded_shards_are_updated_by_the_host_and_leave_the_device() -> None:
    found = offloaded("1x8:h100-sxm")
    # AdamW's loop moves 80 bytes for each of a rank's 500,000 elements at 0.8 of 51 GB/s; 50 µs for
    # the step, 10 µs and 5 µs of FSDP's hooks for each of four tensors.
    expected_s = 80 * ELEMENTS / 8 / (0.8 * 51e9) + 5e-5 + 4 * 1e-5 + 4 * 5e-6
    assert found.breakdown.update_s == pytest.approx(expected_s, rel=0.02)
    assert found.memory.optimizer_state_bytes == 0
    assert found.memory.update_bytes == 0
    plain = est.estimate(GPU_BLOCKS, "1x8:h100-sxm", strategy="fsdp")
    assert found.peak_memory_bytes < plain.peak_memory_bytes
    assert any("on the host" in text for text in found.assumptions)
    with pytest.raises(ProfileError, match="no h2d link"):
        answer("fsdp:offload")


# Of a rank alone: 80 bytes an element at 0.8 of 51 GB/s, 50 µs for the step, 10 µs a tensor.
_HOST_UPDATE_S = 80 * ELEMENTS / (0.8 * 51e9) + 5e-5 + 4 * 1e-5


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-loop"])
def test_a_single_ranks_offloaded_update_takes_the_hosts_time(optimizer: str) -> None:
    found = offloaded(optimizer=optimizer)
    assert found.breakdown.update_s == pytest.approx(_HOST_UPDATE_S, rel=0.02)
    assert found.timeline.step_time_s == pytest.approx(found.step_time_s, rel=1e-9)


def test_an_update_that_was_timed_on_the_gpu_is_not_that_of_offloaded_shards() -> None:
    timing = OpTiming(seconds=1e-5)
    found = offloaded(timings={update_call(GPU_BLOCKS): timing}, timed_on="h100-sxm")
    assert found.breakdown.update_s == pytest.approx(_HOST_UPDATE_S, rel=0.02)


def test_offloaded_parameters_in_half_are_updated_as_the_host_was_timed() -> None:
    # Half the bytes are half the time of a GPU; of other dtypes on CPUs nothing is known.
    parameters = [
        replace(each, spec=replace(each.spec, dtype="bfloat16")) for each in GPU_BLOCKS.parameters
    ]
    found = offloaded(parameters=tuple(parameters))
    assert found.breakdown.update_s == pytest.approx(_HOST_UPDATE_S, rel=0.02)


def test_offloaded_gradients_are_clipped_at_the_hosts_rate() -> None:
    plain, clipped = offloaded(), offloaded(clip_grad_norm=True)
    host = plain.plan.kinds[0].program.profile.host
    # Three times 4 bytes an element; each of four gradients has a norm and a product of its own.
    expected_s = 12 * ELEMENTS / (0.8 * 51e9) + (6 + 2 * 4) * host.bare_op_s
    more_s = clipped.breakdown.update_s - plain.breakdown.update_s
    assert more_s == pytest.approx(expected_s, rel=0.02)


def test_a_single_rank_copies_all_of_what_it_keeps_on_the_host() -> None:
    plain, alone = est.estimate(GPU_BLOCKS, "1x1:h100-sxm", strategy="fsdp"), offloaded()
    # Seven copies of 4 MB to the device and four back, in each micro-batch.
    copied_s = 11 * (1e-5 + 4e6 / (0.76 * 63.015e9))
    more_s = alone.breakdown.copies_exposed_s - plain.breakdown.copies_exposed_s
    assert more_s == pytest.approx(copied_s, rel=1e-9)
    assert alone.memory.optimizer_state_bytes == 0
    assert alone.peak_memory_bytes < plain.peak_memory_bytes
    assert alone.timeline.step_time_s == pytest.approx(alone.step_time_s, rel=1e-9)
    assert memory_of(alone).curve.peak_bytes == alone.peak_memory_bytes


@pytest.mark.parametrize("strategy", ["fsdp:offload", "fsdp:shard=4,offload"])
@pytest.mark.parametrize("clips", [False, True])
def test_offloaded_steps_are_the_same_in_columns_and_when_they_are_played(
    strategy: str, clips: bool
) -> None:
    graph = replace(GPU_BLOCKS, clip_grad_norm=clips)
    alone = [] if "shard" in strategy else ["1x1:h100-sxm"]
    texts = [
        *alone,
        "1x4:h100-sxm",
        "2x8:h100-sxm",
        "1x8:a100-sxm-80gb+1x4:h100-sxm",
        "3x4:t4-g4dn",
    ]
    table = estimate_many(graph, texts, strategy=strategy)
    for row, text in enumerate(texts):
        one = est.estimate(graph, text, strategy=strategy)
        assert table.step_time_s[row] == pytest.approx(one.step_time_s, rel=1e-9)
        assert table.peak_memory_bytes[row] == one.peak_memory_bytes
        assert one.timeline.step_time_s == pytest.approx(one.step_time_s, rel=1e-9)
        curve = memory_of(one).curve
        assert curve.peak_bytes == pytest.approx(one.peak_memory_bytes, rel=1e-6)


def test_what_a_recipe_takes_for_granted_is_said() -> None:
    def said(**options: Any) -> str:
        graph = replace(GPU_BLOCKS, **options)
        return " ".join(est.estimate(graph, "1x2:h100-sxm@500W").assumptions)

    assert "gradients are clipped" in said(clip_grad_norm=True)
    assert "gradients are clipped" not in said()
    assert "lamb's update takes the bytes that its kernels move" in said(optimizer="lamb")
    assert "limited: busy units hold a lower clock, its memory keeps its rate" in said()
