"""Sharded strategies and local SGD: what an update shares, what memory is left, what texts name."""

from __future__ import annotations

from typing import Any

import pytest

import estimator as est
from estimator.cache import Cache
from estimator.errors import ProfileError, StrategyError
from estimator.estimates.estimate import Estimate
from estimator.machines.profile import MachineProfile
from estimator.placement.mesh import ProcessGroup
from estimator.timeline.collectives.costs import GroupCollective
from estimator.timeline.rank.lanes import ShardedPasses
from estimator.timeline.rank.updates import copies_s
from estimator.workload.strategies import NAMES, Strategy
from tests.synthetic import Machine, in_blocks, perceptron, with_every_collective

GRAPH = perceptron([1000, 2048, 1000], batch=64)


def profile(**numbers: Any) -> MachineProfile:
    return with_every_collective(Machine(devices=4, **numbers).profile())


def answer(strategy: str, ranks: int = 4) -> Estimate:
    return est.estimate(GRAPH, f"1x{ranks}:m", profile=profile(), strategy=strategy)


def test_units_are_the_numbered_blocks_and_the_rest() -> None:
    passes = ShardedPasses.of(in_blocks(perceptron([1000, 2048, 1000, 500], batch=64)))
    # The rest first, then blocks in the order in which their gradients are ready.
    assert passes.gathered_bytes.tolist() == [4 * 1000 * 2048, 4 * 1000 * 500, 4 * 2048 * 1000]
    assert [run.path for run in passes.forward_runs] == ["layers.1", "layers.2"]
    assert [run.path for run in passes.backward_runs] == ["layers.2", "layers.1"]


def test_sharding_divides_the_update_and_the_state() -> None:
    whole, one, full = answer("ddp"), answer("zero1"), answer("fsdp")
    # Launching 10 µs stays; two tensors at 20 µs and 3 ns a parameter are shared by four.
    shared_s = whole.breakdown.update_s - 1e-5
    assert one.breakdown.update_s == pytest.approx(1e-5 + shared_s / 4)
    # ZeRO-1 gives whole tensors away: of two equal ones a rank has one. FSDP cuts each in four.
    assert one.memory.optimizer_state_bytes == whole.memory.optimizer_state_bytes // 2
    assert full.memory.optimizer_state_bytes == whole.memory.optimizer_state_bytes // 4
    assert full.peak_memory_bytes < one.peak_memory_bytes < whole.peak_memory_bytes


@pytest.mark.parametrize(
    "strategy",
    [
        *(name for name in NAMES if name != "ps"),
        *("ps:2", "ps:2,async", "ps:beside", "ps:beside,local,sum", "ps:2,beside,part=1000000"),
    ],
)
def test_every_strategy_answers_with_a_breakdown_that_sums_to_its_spans(strategy: str) -> None:
    found = answer(strategy) if not strategy.startswith("ps") else across(strategy)
    assert found.strategy == strategy
    end_s = max(span.start_s + span.duration_s for span in found.timeline.spans)
    assert found.breakdown.total_s == pytest.approx(end_s, rel=1e-9)


@pytest.mark.parametrize(
    ("strategy", "waits_for", "bucket"),
    [
        ("ddp", "reducing gradients of 4 ranks over", "all-reduce bucket 0"),
        ("zero1", "reducing gradients and broadcasting parameters of 4", "all-reduce bucket 0"),
        ("zero2", "reducing gradients and gathering parameters of 4", "reduce-scatter bucket 0"),
        ("fsdp", "gathering parameters and reducing gradients of 4", None),
        ("ps:2", "sending gradients of 4 ranks to 2 parameter servers", "push, pull bucket 0"),
        ("ps:beside", "sending gradients of 4 ranks to servers beside", "push, pull bucket 0"),
    ],
)
def test_texts_name_what_a_strategy_sends(
    strategy: str, waits_for: str, bucket: str | None
) -> None:
    found = est.estimate(
        GRAPH, "4x1:m", profile=profile(network_bytes_per_s=1e6), strategy=strategy
    )
    assert found.bottleneck.startswith(waits_for)
    assert "over the network of 'synthetic'" in found.bottleneck
    names = {label.name.rpartition(" (")[0] for label in found.timeline.spans.labels}
    assert {name for name in names if name.endswith("bucket 0")} == ({bucket} if bucket else set())


def across(strategy: str, ranks: int = 4) -> Estimate:
    return est.estimate(GRAPH, f"{ranks}x1:m", profile=profile(), strategy=strategy)


def test_more_servers_never_slow_a_parameter_server_job() -> None:
    assert across("ps:4").step_time_s <= across("ps:1").step_time_s
    assert across("ps:1,async").step_time_s <= across("ps:1").step_time_s


def test_a_profile_without_the_collective_says_which() -> None:
    # Its all-reduces say what gloo's reduce-scatters cost, nothing says it of all-gathers.
    with pytest.raises(ProfileError, match="all-gather"):
        est.estimate(GRAPH, "1x2:m", profile=Machine().profile(), strategy="zero2")


# Two matrices of 1000 x 2048 in fp32.
PARAMETERS_BYTES = 2 * 1000 * 2048 * 4


def test_each_step_has_its_part_of_one_all_reduce_of_all_parameters() -> None:
    alone_s = answer("ddp", ranks=1).plan.kinds[0].lane.lane_s
    reduce = GroupCollective.of(profile(), "all_reduce", ProcessGroup(ranks=4, nodes=1, per_node=4))
    average_s = reduce.time_s(float(PARAMETERS_BYTES))
    # The flat tensor is filled, divided and copied back.
    copied_s = 3 * float(copies_s(profile(), [PARAMETERS_BYTES], 4, Cache(0)).sum())
    for every in (1, 8):
        found = answer(f"local-sgd:every={every}")
        assert found.breakdown.communication_exposed_s == pytest.approx(average_s / every)
        assert found.breakdown.copies_exposed_s == pytest.approx(copied_s / every)
        # No bucket is copied: a lane is that of a rank alone on as busy a node.
        assert found.plan.kinds[0].lane.copies_s == 0.0
        assert found.plan.kinds[0].lane.lane_s >= alone_s


def test_the_flat_tensor_is_held_beside_parameters_gradients_and_state() -> None:
    ddp, local = answer("ddp"), answer("local-sgd")
    assert local.memory.bucket_bytes == 0
    assert local.memory.optimizer_state_bytes == ddp.memory.optimizer_state_bytes
    assert local.memory.update_bytes == max(PARAMETERS_BYTES, ddp.memory.update_bytes)
    assert local.peak_memory_bytes < ddp.peak_memory_bytes


def test_it_is_faster_the_rarer_ranks_meet_and_says_what_that_leaves_out() -> None:
    steps = [answer(f"local-sgd:every={every}").step_time_s for every in (1, 2, 16)]
    assert steps == sorted(steps, reverse=True)
    (text,) = [each for each in answer("local-sgd").assumptions if "averaged" in each]
    assert "every 4 steps" in text


def test_a_period_is_a_positive_number_of_steps() -> None:
    assert str(Strategy.parse("local-sgd:every=16")) == "local-sgd:every=16"
    with pytest.raises(StrategyError, match="found 0"):
        Strategy.parse("local-sgd:every=0")
