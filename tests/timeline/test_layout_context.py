"""Steps of ranks that share the tokens of samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import estimator as est
from estimator.errors import StrategyError
from estimator.estimates.estimate import Estimate
from estimator.kernels.durations import Durations
from estimator.timeline.rank.layer_collectives import LayerCollectiveSeconds
from tests.graph.partition.test_split_context import BATCH, graph_of
from tests.synthetic import Machine, with_every_collective

MACHINE = Machine(rank_jitter_ratio=0.0)
PROFILE = with_every_collective(MACHINE.profile())
GRAPH = graph_of()


def answer(allocation: str, layout: str | None, **more: object) -> Estimate:
    return est.estimate(GRAPH, allocation, layout=layout, profile=PROFILE, **more)


def test_ranks_that_share_tokens_average_the_gradients_of_all_weights() -> None:
    found = answer("1x8:m", "cp=2,dp=*")
    assert found.layout == "cp=2,dp=*"
    assert found.global_batch == 4 * BATCH
    assert found.plan.group.ranks == 8
    assert found.plan.mesh.dp == 4
    assert found.breakdown.total_s == pytest.approx(found.step_time_s)
    assert found.timeline.step_time_s == pytest.approx(found.step_time_s, rel=1e-9)


def test_fsdp_shards_over_ranks_that_share_tokens_too() -> None:
    assert answer("1x8:m", "cp=2,dp=*", strategy="fsdp").plan.shards == 8
    half = answer("1x8:m", "cp=2,dp=*", strategy="fsdp:shard=4").plan
    assert half.shards == 4
    assert {group.ranks for group in half.groups["dp_shard"]} == {4}
    with pytest.raises(StrategyError, match="choose a multiple of 2"):
        answer("1x8:m", "cp=2,dp=*", strategy="fsdp:shard=3")


def test_a_rank_holds_all_weights_and_half_of_the_activations() -> None:
    whole, half = answer("1x2:m", None), answer("1x2:m", "cp=2")
    assert half.memory.parameters_bytes == whole.memory.parameters_bytes
    assert half.memory.activations_bytes < whole.memory.activations_bytes


def test_tp_and_cp_ranks_have_groups_of_their_own() -> None:
    found = answer("1x8:m", "tp=2,cp=2,dp=*")
    mesh = found.plan.mesh
    assert mesh.members("tp")[0].tolist() == [0, 1]
    assert mesh.members("cp")[0].tolist() == [0, 2]
    # Ranks with the same heads average their gradients.
    assert mesh.members("dp")[0].tolist() == [0, 2, 4, 6]
    assert found.breakdown.layer_communication_s > 0


def test_a_ring_is_hidden_by_the_block_that_is_computed_meanwhile() -> None:
    # Two hops beside a kernel of 3 ms, one of 5 ms beside one of 2 ms, one beside nothing.
    sent = LayerCollectiveSeconds(
        each_s=np.array([2e-3, 2e-3, 0.0, 5e-3, 0.0, 1e-3]),
        error_s=0.0,
        source="measured",
        hidden_by=((0, 2), (1, 2), (3, 4)),
    )
    durations = Durations(
        host_s=np.zeros(6),
        device_s=np.array([0.0, 0.0, 3e-3, 0.0, 2e-3, 0.0]),
        sources=("fitted",) * 6,
        relative_errors=np.zeros(6),
        in_grid=np.zeros(6, dtype=np.bool_),
    )
    exposed = sent.exposed(durations)
    assert exposed.each_s == pytest.approx([0.0, 1e-3, 0.0, 3e-3, 0.0, 1e-3])
    assert durations.device_s[2] == 3e-3


def test_hops_hide_on_gpus_alone() -> None:
    graph = replace(GRAPH, target="cuda")
    gpu = est.estimate(graph, "1x8:h100-sxm", layout="cp=8,ring")
    assert gpu.plan.kinds[0].program.exchanged.hidden_by
    cpu = answer("1x2:m", "cp=2,ring")
    assert not cpu.plan.kinds[0].program.exchanged.hidden_by
