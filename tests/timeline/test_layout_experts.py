"""Steps of ranks that share the experts of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

import estimator as est
from estimator.errors import StrategyError
from estimator.estimates.estimate import Estimate
from estimator.graph.ir.collectives import collectives_of
from estimator.graph.models import load_model
from estimator.graph.partition.experts import split_experts
from estimator.timeline.rank.lanes import ShardedPasses
from estimator.workload.layouts import Layout
from tests.graph.partition.test_split_experts import BATCH, GRAPH

ON_GPUS = replace(GRAPH, target="cuda")


def answer(allocation: str, layout: str | None, **more: object) -> Estimate:
    return est.estimate(ON_GPUS, allocation, layout=layout, **more)


def exchanged_s(found: Estimate, axis: str) -> list[float]:
    program = found.plan.kinds[0].program
    each_s = program.exchanged.each_s
    return [
        float(each_s[each.op_index]) for each in collectives_of(program.bound) if each.axis == axis
    ]


def test_every_rank_has_a_batch_and_dense_gradients_are_averaged_over_all() -> None:
    found = answer("1x8:h100-sxm", "ep=4,dp=*")
    assert found.layout == "ep=4,dp=*"
    assert found.global_batch == 8 * BATCH
    assert found.plan.group.ranks == 8
    mesh = found.plan.mesh
    assert mesh.members("ep").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.members("expert_dp").tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    own = [("experts" in p.name, p.spec.nbytes) for p in GRAPH.parameters]
    dense = sum(size for is_expert, size in own if not is_expert)
    buckets = found.plan.kinds[0].program.buckets
    assert sum(bucket.size_bytes for bucket in buckets) == dense
    # The allocator's blocks are of 512 bytes; a rank has two of eight experts.
    held = sum(-(-(size // 4 if is_expert else size) // 512) * 512 for is_expert, size in own)
    assert found.memory.parameters_bytes == held
    assert found.timeline.step_time_s == pytest.approx(found.step_time_s, rel=1e-9)


def test_gradients_of_experts_that_one_rank_has_are_not_reduced() -> None:
    assert not any(exchanged_s(answer("1x8:h100-sxm", "ep=8"), "expert_dp"))
    assert all(exchanged_s(answer("1x8:h100-sxm", "ep=4"), "expert_dp"))


def test_tokens_between_nodes_take_longer_than_within_one() -> None:
    inside, across = (
        sum(exchanged_s(answer(allocation, "ep=8"), "ep"))
        for allocation in ("1x8:h100-sxm", "8x1:h100-sxm")
    )
    assert across > inside


def test_the_busiest_rank_sets_the_pace() -> None:
    even, uneven = (
        answer("1x8:h100-sxm", layout, batch_per_gpu=4096)
        for layout in ("ep=8", "ep=8,imbalance=2")
    )
    assert uneven.breakdown.forward_s > even.breakdown.forward_s
    ratio = max(exchanged_s(uneven, "ep")) / max(exchanged_s(even, "ep"))
    assert 1.0 < ratio <= 2.0


def test_tokens_and_experts_are_divided_together() -> None:
    found = answer("1x8:h100-sxm", "cp=2,ep=4,dp=*")
    assert found.global_batch == 4 * BATCH
    assert found.plan.mesh.members("ep").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    whole, half = (
        max(each.size_bytes for each in _of_experts(layout)) for layout in ("ep=4", "cp=2,ep=4")
    )
    assert half * 2 == whole


def _of_experts(layout: str) -> list[object]:
    program = answer("1x8:h100-sxm", layout).plan.kinds[0].program
    return [each for each in collectives_of(program.bound) if each.axis == "ep"]


def test_fsdp_shards_experts_over_the_ranks_that_have_the_same() -> None:
    found = answer("2x8:h100-sxm", "ep=4", strategy="fsdp:shard=8")
    mesh = found.plan.mesh
    assert mesh.members("ep").tolist()[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.members("expert_shard").tolist()[:4] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [group.ranks for group in found.plan.groups["expert_shard"]] == [2]
    # FSDP reduces gradients of experts with those of the rest of their unit.
    assert not any(exchanged_s(found, "expert_dp"))
    assert found.timeline.step_time_s == pytest.approx(found.step_time_s, rel=1e-9)


def test_a_shard_of_experts_is_as_large_with_ep_as_without() -> None:
    # The allocator's blocks are of 512 bytes.
    sizes = {p.name: -(-p.spec.nbytes // 512) * 512 for p in GRAPH.parameters}
    experts = sum(size for name, size in sizes.items() if "experts" in name)
    dense = sum(sizes.values()) - experts
    # What is gathered at most: the rest of the model, and a block of two.
    apart = sum(s for n, s in sizes.items() if "experts" not in n and ".layers.1." not in n)
    for layout, gathered in ((None, apart + experts // 2), ("ep=4", apart + experts // 8)):
        memory = answer("1x8:h100-sxm", layout, strategy="fsdp").memory
        # AdamW's two moments of a shard of everything.
        assert memory.optimizer_state_bytes == pytest.approx(2 * (dense + experts) / 8, rel=0.05)
        assert memory.parameters_bytes == (dense + experts) / 8 + gathered


@pytest.mark.parametrize("layout", ["ep=4", "tp=2,ep=4", "tp=2,megatron,ep=4"])
def test_a_rank_of_the_distributed_optimizer_updates_its_share_of_its_own_experts(
    layout: str,
) -> None:
    found = answer("1x8:h100-sxm", layout, strategy="distributed-optimizer")
    graph, replicas = found.plan.members.table.graph, found.plan.mesh.replicas
    # Of eight ranks two have the same quarter of the experts; all else, or the slices of it that tp
    # makes, is on as many as there are replicas.
    shares = [1 / 2 if p.is_expert else 1 / replicas for p in graph.parameters]
    owned = list(zip(graph.parameters, shares, strict=True))
    updated = sum(parameter.spec.numel * share for parameter, share in owned)
    program = found.plan.kinds[0].program
    (known,) = [u for u in program.profile.updates if (u.optimizer, u.form) == ("adamw", "foreach")]
    # In eager torch what tp divides is a DTensor, which its host looks up.
    dtensors = sum(parameter.is_dtensor for parameter in graph.parameters)
    assert (dtensors > 0) == (layout == "tp=2,ep=4")
    tensors_s = len(graph.parameters) * known.per_tensor_s / replicas
    tensors_s += dtensors * program.profile.host.shard_update_tensor_s / replicas
    expected_s = known.launch_s + tensors_s + updated * known.per_parameter_s
    assert found.breakdown.update_s == pytest.approx(expected_s, rel=1e-9)
    # AdamW's two moments, in the allocator's blocks of 512 bytes.
    held = sum(-(-parameter.spec.nbytes // 512) * 512 * share for parameter, share in owned)
    assert found.memory.optimizer_state_bytes == 2 * held


def test_experts_are_gathered_from_the_ranks_that_have_the_same() -> None:
    def gathers_s(layout: str | None) -> float:
        spans = answer("8x1:h100-sxm", layout, strategy="fsdp").timeline.spans
        return sum(s.end_s - s.start_s for s in spans if "all-gather unit" in s.name)

    alone, pairs, whole = map(gathers_s, ("ep=8", "ep=4", None))
    assert 0.0 < alone < pairs
    assert alone < whole


def test_sharded_bytes_of_experts_follow_from_the_units() -> None:
    local = split_experts(ON_GPUS, ep=4)
    experts = ShardedPasses.of(local).experts
    own = sum(p.spec.nbytes for p in GRAPH.parameters if "experts" in p.name) // 4
    assert experts.gathered.tolist() == experts.reduced.tolist() == [0.0, own / 2, own / 2]
    assert experts.parts == 4


@pytest.mark.parametrize(
    ("layout", "strategy", "sentence"),
    [
        ("ep=3", "ddp", "ep=3 does not divide the 8 experts|over 3 of the 8 ranks of dp"),
        ("ep=2", "zero1", "estimated with ddp and fsdp without offload, found 'zero1'"),
        ("ep=8", "fsdp:shard=4", "over 8 of the 4 ranks of dp, cp and tp"),
        ("tp=4,ep=2", "ddp", "tp=4 ranks that share a batch are among .* found ep=2"),
        ("tp=2,ep=4,all-reduce", "ddp", "write ep and tp alike"),
        ("imbalance=2", "ddp", "write ep=2 or more"),
        ("ep=2,imbalance=0.5", "ddp", "from 1 to 10000, found '0.5'"),
        ("ep=2,imbalance=much", "ddp", "'much' is no number"),
    ],
)
def test_a_layout_of_experts_that_cannot_be_is_refused(
    layout: str, strategy: str, sentence: str
) -> None:
    with pytest.raises(StrategyError, match=sentence):
        answer("1x8:h100-sxm", layout, strategy=strategy)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "layout", ["tp=2,ep=4", "tp=2,ep=2,all-reduce", "tp=2,ep=8", "tp=2,cp=2,ep=4"]
)
def test_experts_and_layers_are_divided_together(layout: str, strategy: str) -> None:
    found = answer("1x8:h100-sxm", layout, strategy=strategy)
    assert found.timeline.step_time_s == pytest.approx(found.step_time_s, rel=1e-9)
    # A group with the ranks that share a batch in it, and the ranks with the same experts.
    ep = Layout.parse(layout).ep
    mesh = found.plan.mesh
    assert mesh.members("ep")[0].tolist() == list(range(ep))
    assert mesh.members("expert_dp")[0].tolist() == list(range(0, 8, ep))
    sizes = {p.name: -(-p.spec.nbytes // 512) * 512 for p in GRAPH.parameters}
    experts = sum(size for name, size in sizes.items() if "experts" in name)
    if strategy == "ddp":
        plain = answer("1x8:h100-sxm", layout.replace(f",ep={ep}", "").replace(",all-reduce", ""))
        saved = plain.memory.parameters_bytes - found.memory.parameters_bytes
        assert saved == experts - experts // ep


def test_megatron_exchanges_gradients_of_experts_beside_passes() -> None:
    wide = "hf:qwen3_moe,hidden_size=512,moe_intermediate_size=8192,num_hidden_layers=2,head_dim=64"
    wide += ",num_attention_heads=4,num_key_value_heads=4,num_experts=8,num_experts_per_tok=2"
    module, batch, loss, _ = load_model(f"{wide},vocab_size=64", batch=2, seq_len=8, weights=False)
    graph = est.trace_model(module, batch, loss, target="cuda", precision="bf16", recipe="megatron")

    def reduced(batch_per_gpu: int) -> tuple[list[float], float, float]:
        found = est.estimate(graph, "8x1:h100-sxm", batch_per_gpu=batch_per_gpu, layout="ep=4")
        program = found.plan.kinds[0].program
        seconds: dict[str, float] = {"forward": 0.0, "backward": 0.0}
        computed_s = program.durations.device_s - program.exchanged.each_s
        for op, own_s in zip(program.bound.graph.ops, computed_s, strict=True):
            seconds[op.phase] += float(own_s)
        return exchanged_s(found, "expert_dp"), seconds["forward"], seconds["backward"]

    # Passes hide all but the exchange of the last gradients.
    hidden, *_ = reduced(1 << 14)
    total_s = len(hidden) * sum(hidden)
    # Passes of few tokens do not: sums are scattered beside one, weights gathered beside another.
    left, forward_s, backward_s = reduced(1)
    expected_s = max(total_s / 2 - forward_s, 0.0) + max(total_s / 2 - backward_s, 0.0)
    assert expected_s > 0.0
    assert sum(left) == pytest.approx(max(expected_s, sum(hidden)))
