"""Local SGD: what an average of parameters costs, shared by the steps between two."""

from __future__ import annotations

import pytest

import estimator as est
from estimator.cache import Cache
from estimator.errors import StrategyError
from estimator.placement.mesh import ProcessGroup
from estimator.timeline.collectives.costs import GroupCollective
from estimator.timeline.rank.updates import copies_s
from estimator.workload.strategies import Strategy
from tests.timeline.strategies.test_sharding import answer, profile

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


def test_a_table_answers_as_one_allocation_does() -> None:
    graph = answer("local-sgd").plan.members.table.graph
    table = est.estimate_many(
        graph, ["1x2:m", "1x4:m", "2x2:m"], profile=profile(), strategy="local-sgd:every=3"
    )
    for row, text in enumerate(("1x2:m", "1x4:m", "2x2:m")):
        one = est.estimate(graph, text, profile=profile(), strategy="local-sgd:every=3")
        assert table.step_time_s[row] == pytest.approx(one.step_time_s, rel=1e-9)
        assert table.peak_memory_bytes[row] == one.peak_memory_bytes


def test_a_period_is_a_positive_number_of_steps() -> None:
    assert str(Strategy.parse("local-sgd:every=16")) == "local-sgd:every=16"
    with pytest.raises(StrategyError, match="found 0"):
        Strategy.parse("local-sgd:every=0")
