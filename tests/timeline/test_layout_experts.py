"""Steps of ranks that share the experts of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

import estimator as est
from estimator.errors import StrategyError
from estimator.estimates import Estimate
from estimator.graph.exchanges import collectives_of
from estimator.workload.layout import Layout
from tests.graph.test_split_experts import BATCH, GRAPH

ON_GPUS = replace(GRAPH, target="cuda")


def answer(allocation: str, layout: str | None, **more: object) -> Estimate:
    return est.estimate(ON_GPUS, allocation, layout=layout, **more)


def exchanged_s(found: Estimate, axis: str) -> list[float]:
    program = found.plan.ranks_by_kind[0].program
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
    buckets = found.plan.ranks_by_kind[0].program.buckets
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
    program = answer("1x8:h100-sxm", layout).plan.ranks_by_kind[0].program
    return [each for each in collectives_of(program.bound) if each.axis == "ep"]


@pytest.mark.parametrize(
    ("layout", "strategy", "sentence"),
    [
        ("ep=3", "ddp", "ep=3 does not divide the 8 experts|over 3 of the 8 ranks"),
        ("ep=2", "fsdp", "estimated with ddp alone, not with fsdp"),
        ("tp=2,ep=2", "ddp", "leave tp or ep out"),
        ("imbalance=2", "ddp", "write ep=2 or more"),
        ("ep=2,imbalance=0.5", "ddp", "from 1 to 10000, found '0.5'"),
        ("ep=2,imbalance=much", "ddp", "found 'much'"),
    ],
)
def test_a_layout_of_experts_that_cannot_be_is_refused(
    layout: str, strategy: str, sentence: str
) -> None:
    with pytest.raises(StrategyError, match=sentence):
        answer("1x8:h100-sxm", layout, strategy=strategy)


def test_a_layout_with_experts_prints_as_it_is_read() -> None:
    text = "cp=2,ep=4,imbalance=1.25,dp=*"
    assert str(Layout.parse(text)) == text
