"""FSDP and HSDP as tasks: what is sent when, worked out by hand, and what must follow from it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import estimator as est
from estimator.cache import Cache
from estimator.elementwise import expected_maximum
from estimator.errors import StrategyError
from estimator.estimates.estimate import Estimate
from estimator.machines.profile import MachineProfile
from estimator.placement.mesh import ProcessGroup
from estimator.placement.topology import Cluster, Node
from estimator.timeline.collectives.costs import GroupCollective
from estimator.timeline.plan import StepPlan
from estimator.timeline.rank.lanes import ShardedPasses
from estimator.timeline.rank.rules import DP, DP_REPLICATE, DP_SHARD, Ranks, StepShape
from estimator.timeline.rank.updates import Trained, update_cost
from estimator.timeline.strategies.fsdp import FullyShardedDataParallel
from estimator.workload.strategies import FSDP
from tests.synthetic import in_blocks, on_gpus, perceptron
from tests.timeline.strategies.test_sharding import profile

# The rest and three blocks, each of 4 MB of parameters.
BLOCKS = in_blocks(perceptron([1000] * 5, batch=64))


def answer(allocation: str, strategy: str, machine: MachineProfile, **options: Any) -> Estimate:
    graph = replace(BLOCKS, target=machine.kind)
    return est.estimate(graph, allocation, strategy=strategy, profile=machine, **options)


def seconds(machine: MachineProfile, op: Any, ranks: int, nodes: int = 1, **links: float) -> float:
    """A collective of one block."""
    group = ProcessGroup(ranks=ranks, nodes=nodes, per_node=ranks // nodes, **links)
    found = GroupCollective.of(machine, op, group)
    return found.time_s(4e6)


def test_collectives_that_block_are_all_exposed() -> None:
    # In each micro-batch: the rest gathered once, three blocks twice, and four reduce-scatters.
    machine = profile()
    one_s = 7 * seconds(machine, "all_gather", 2) + 4 * seconds(machine, "reduce_scatter", 2)
    for count in (1, 2, 5):
        found = answer("1x2:m", "fsdp", machine, accumulation_steps=count)
        assert found.breakdown.communication_exposed_s == pytest.approx(count * one_s, rel=1e-9)
    # Shards on one rank each are replicates that all reduce whole gradients.
    found = answer("1x2:m", "fsdp:shard=1", machine, accumulation_steps=3)
    expected_s = 3 * 4 * seconds(machine, "all_reduce", 2)
    assert found.breakdown.communication_exposed_s == pytest.approx(expected_s, rel=1e-9)


def test_without_gradient_sync_only_the_last_micro_batch_reduces() -> None:
    machine = profile()
    gathers_s, scatters_s = (
        7 * seconds(machine, "all_gather", 2),
        4 * seconds(machine, "reduce_scatter", 2),
    )
    found = answer("1x2:m", "fsdp:no_sync", machine, accumulation_steps=5)
    expected_s = 5 * gathers_s + scatters_s
    assert found.breakdown.communication_exposed_s == pytest.approx(expected_s, rel=1e-9)
    # Blocks that are not resharded are gathered once in a micro batch.
    found = answer("1x2:m", "fsdp:no_reshard", machine, accumulation_steps=3)
    one_s = 4 * seconds(machine, "all_gather", 2) + 4 * seconds(machine, "reduce_scatter", 2)
    assert found.breakdown.communication_exposed_s == pytest.approx(3 * one_s, rel=1e-9)
    assert found.peak_memory_bytes > answer("1x2:m", "fsdp", machine).peak_memory_bytes


def test_gradients_are_reduced_in_the_dtype_that_is_asked_for() -> None:
    # Parameters in bf16 are gathered as they are; in fp32 their gradients are twice as large.
    machine = profile()
    graph = replace(BLOCKS, precision="bf16")
    found = est.estimate(
        graph, "1x2:m", profile=machine, strategy="fsdp:param=bf16,reduce=fp32"
    ).breakdown
    group = ProcessGroup(ranks=2, nodes=1, per_node=2)
    scatter = GroupCollective.of(machine, "reduce_scatter", group)
    expected_s = 7 * seconds(machine, "all_gather", 2) + 4 * scatter.time_s(8e6)
    assert found.communication_exposed_s == pytest.approx(expected_s, rel=1e-9)


def test_a_model_that_computes_in_another_dtype_than_is_gathered_is_refused() -> None:
    with pytest.raises(StrategyError, match="computes in bf16, found a model in fp32"):
        answer("1x2:m", "fsdp:param=bf16", profile())


def test_the_update_of_a_gpu_follows_the_bytes_of_what_is_updated() -> None:
    # 1000 elements of bf16: half the bytes of fp32, and all of them where the shards are fp32.
    machine, graph = on_gpus(profile()), replace(BLOCKS, target="cuda", precision="bf16")
    (cost,) = (each for each in machine.updates if each.optimizer == graph.optimizer)
    trained = Trained(tensors=2, elements=1000, size_bytes=2000, words=500, idle=0.0)
    fixed_s = cost.launch_s + 2 * cost.per_tensor_s
    for stored_ratio, elements in ((1, 500), (2, 1000)):
        seconds, *_ = update_cost(trained, graph, machine, 1, False, stored_ratio)
        assert seconds == pytest.approx(fixed_s + elements * cost.per_parameter_s, rel=1e-9)


def test_hybrid_shards_all_reduce_what_a_rank_holds_in_each_micro_batch() -> None:
    machine = profile()
    found = answer("2x2:m", "fsdp:shard=2", machine, accumulation_steps=3)
    # Two rings of two ranks between two nodes: each has half of 1e8 B/s, and 0.2 ms of latency.
    links = {"bytes_per_s": 1e8 / 2, "latency_s": 2e-4}
    group = ProcessGroup(ranks=2, nodes=2, per_node=1, **links)
    between = GroupCollective.of(machine, "all_reduce", group)
    inside_s = 7 * seconds(machine, "all_gather", 2) + 4 * seconds(machine, "reduce_scatter", 2)
    expected_s = 3 * (inside_s + 4 * between.time_s(2e6))
    assert found.breakdown.communication_exposed_s == pytest.approx(expected_s, rel=1e-9)


def test_what_is_not_measured_of_nested_groups_is_told_of_each() -> None:
    # Within nodes all is measured, between them nothing: a ring of two ranks over two nodes.
    found = answer("2x2:m", "fsdp:shard=2", profile())
    text = "all-reduce over 2 ranks on 2 nodes was not measured"
    assert sum(text in each for each in found.assumptions) == 1
    assert not any("reduce-scatter over" in each for each in found.assumptions)
    (source,) = [source for part, source, *_ in found.provenance if part == "communication"]
    assert source == "fitted"
    # The spread of ranks is that of all of them.
    plan: StepPlan = found.plan
    lane_s = plan.kinds[0].lane.length_s(2)
    assert found.breakdown.straggler_s == pytest.approx(0.01 * lane_s * expected_maximum(4))


def test_the_answer_of_nested_groups_is_plain_json() -> None:
    found = json.loads(json.dumps(answer("2x2:m", "fsdp:shard=2", profile()).to_dict()))
    assert found["peak_memory_bytes"] == found["memory"]["total_bytes"]


def network_bound(machine: MachineProfile) -> MachineProfile:
    """Collectives far longer than compute, which neither slows."""
    return replace(machine, overlaps=())


def test_prefetching_hides_all_gathers_but_the_first_ones_behind_long_compute() -> None:
    # Of 4 MB each: gathers take 4.1 ms, a block's passes on a slow device some hundred.
    machine = network_bound(on_gpus(profile(flops_per_s=1e9)))
    found = answer("1x2:m", "fsdp", machine)
    gather_s, scatter_s = (seconds(machine, op, 2) for op in ("all_gather", "reduce_scatter"))
    # The gather of the rest comes before all compute, its reduction after it; all else is beside.
    assert found.breakdown.communication_exposed_s == pytest.approx(gather_s + scatter_s, rel=1e-9)


def test_a_slow_node_stretches_the_compute_of_every_unit() -> None:
    machine = profile()
    nodes = {name: Node(machine="m") for name in ("a", "b")}
    even = Cluster(nodes=nodes)
    slow = Cluster(nodes={**nodes, "b": Node(machine="m", slowdown_ratio=2.0)})
    one, two = (
        answer("a[0]+b[0]", "fsdp", machine, cluster=cluster).breakdown for cluster in (even, slow)
    )
    assert two.forward_s == pytest.approx(2 * one.forward_s)
    assert two.backward_s == pytest.approx(2 * one.backward_s)
    # What blocks is sent when the slow node has come to it; the fast one waits.
    assert two.communication_exposed_s == pytest.approx(one.communication_exposed_s, rel=1e-9)


def test_unlike_nodes_wait_for_each_other_at_every_collective() -> None:
    # A rank that is slow in one unit and one that is slow in another are both waited for.
    passes = ShardedPasses(
        gathered_bytes=np.array([0.0, 4e6]),
        gradient_bytes=np.array([0.0, 4e6]),
        reduced_bytes=np.array([0.0, 4e6]),
        forward=(1,),
        backward=(1,),
        forward_ends=(0, 1, 1),
        backward_ends=(1, 2, 2),
    )
    rules = FullyShardedDataParallel(BLOCKS, StepShape(FSDP(), 1), Cache(0))
    rules.passes = passes
    machine = profile()
    network = rules.network((machine,), None)
    group = ProcessGroup(ranks=2, nodes=1, per_node=2)
    # Forward 1 and 4 s, backward 5 and 2 s; nothing is copied.
    segments_s = [np.array(each) for each in ([0, 0], [1, 4], [0, 0], [0, 0], [5, 2], [0, 0])]
    segments_s += [np.zeros(2)] * 5
    ranks = Ranks(
        groups={DP: (group,), DP_SHARD: (group,), DP_REPLICATE: ()},
        ready=None,  # type: ignore[arg-type]
        segments_s=segments_s,
        lane_s=6.0,
        compute_ratio=1.0,
        ratio=1.0,
    )
    found = network.communication(ranks)
    sent_s = 2 * seconds(machine, "all_gather", 2) + seconds(machine, "reduce_scatter", 2)
    assert found.exposed_s == pytest.approx(4 + 5 - 6 + sent_s)


def test_the_host_and_the_device_are_not_added_up() -> None:
    # The lane of a rank is what its units take, however host and device share it.
    found = answer("1x2:m", "fsdp", network_bound(on_gpus(profile())))
    (kind,) = found.plan.kinds
    units = len(ShardedPasses.of(BLOCKS).gathered_bytes)
    between_s = float(kind.segments_s[: -2 * units - 1].sum())
    assert between_s == pytest.approx(kind.program.lanes.end_s, rel=1e-9)


def test_a_step_of_ten_million_micro_batches_takes_their_number_of_times_as_long() -> None:
    machine = profile(rank_jitter_ratio=0.0)
    one, many = (answer("1x2:m", "fsdp", machine, accumulation_steps=n) for n in (1, 10**7))
    once_s = one.step_time_s - one.breakdown.update_s
    adding_s = many.plan.kinds[0].lane.sharded_lane_s / 2
    expected_s = 10**7 * once_s + one.breakdown.update_s + adding_s
    assert many.step_time_s == pytest.approx(expected_s, rel=1e-9)
    assert len(many.timeline.spans) < 2000
