"""Global batches split over unlike devices: level, whole, never worse than an even split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as some

import estimator as est
from estimator.advise.scaling import scaling_of
from estimator.api import estimate
from estimator.errors import AllocationError, EstimatorError, WorkloadError
from estimator.estimates import engine
from estimator.estimates.balance import Balance, balance
from estimator.estimates.neighbours import Sender, fair_rates, link_ratios
from estimator.estimates.request import EstimateRequest
from estimator.estimates.table import estimate_many
from estimator.machines.profile import MachineProfile
from estimator.placement.topology import Cluster, Node, Switch
from estimator.workload import strategies
from tests.budgets import examples
from tests.synthetic import Machine, in_blocks, perceptron

GRAPH = perceptron([256, 512, 256], batch=64)
MACHINE = Machine(devices=8).profile()


def cluster(*slowdowns: float, uplink_bytes_per_s: float = 1e9) -> Cluster:
    """Nodes a0, a1, … of one machine type that take that many times as long."""
    nodes = {
        f"a{number}": Node(
            machine="m",
            switch="s",
            uplink_bytes_per_s=uplink_bytes_per_s,
            slowdown_ratio=slowdown,
        )
        for number, slowdown in enumerate(slowdowns)
    }
    return Cluster(nodes=nodes, switches={"s": Switch()})


def balanced(allocation: str, global_batch: int, *slowdowns: float, **options: Any) -> Balance:
    options = {"cluster": cluster(*slowdowns), "profile": MACHINE} | options
    return balance(EstimateRequest.of(GRAPH, allocation, global_batch=global_batch, **options))


def split_over(
    allocation: str, batches: int | Sequence[int], *slowdowns: float, **options: Any
) -> est.Estimate:
    """The step where ranks have these batches."""
    about = {"cluster": cluster(*slowdowns), "profile": MACHINE, "batch_per_gpu": batches}
    return estimate(GRAPH, allocation, **about, **options)


def text_of(ranks: list[int]) -> str:
    """All of the first devices of each node."""
    return "+".join(
        f"a{node}[{','.join(map(str, range(count)))}]" for node, count in enumerate(ranks)
    )


@settings(max_examples=examples(30), deadline=None)
@given(
    some.lists(some.tuples(some.integers(1, 4), some.floats(1, 4)), min_size=2, max_size=4),
    some.integers(1, 200),
    some.integers(1, 3),
)
@example([(2, 1.0), (1, 1.5)], 1, 1)
def test_a_balanced_split_has_the_global_batch_and_is_never_slower_than_the_even_one(
    groups: list[tuple[int, float]], even_batch: int, accumulation_steps: int
) -> None:
    ranks = [count for count, _ in groups]
    global_batch = even_batch * sum(ranks) * accumulation_steps
    slowdowns = [slowdown for _, slowdown in groups]
    found = balanced(
        text_of(ranks), global_batch, *slowdowns, accumulation_steps=accumulation_steps
    )
    batches = found.answer.batches or ()
    samples = sum(count * batch for count, batch in zip(ranks, batches, strict=True))
    assert samples * accumulation_steps == global_batch == found.answer.global_batch
    assert min(batches) >= 1
    assert found.gain_ratio >= 0


@settings(max_examples=examples(30), deadline=None)
@given(
    some.lists(some.floats(1, 4), min_size=2, max_size=3), some.integers(2, 40), some.integers(0, 2)
)
def test_no_move_of_a_sample_shortens_the_step_of_a_balanced_split(
    slowdowns: list[float], even_batch: int, more: int
) -> None:
    nodes = len(slowdowns)
    assume(len(set(slowdowns)) > 1)
    allocation, total = text_of([1] * nodes), even_batch * nodes + min(more, nodes - 1)
    found = balanced(allocation, total, *slowdowns)
    best = found.answer.batches or ()
    for giver in range(nodes):
        for taker in range(nodes):
            split = list(best)
            split[giver] -= 1
            split[taker] += 1
            if split[giver] >= 1:
                moved = split_over(allocation, split, *slowdowns)
                assert moved.step_time_s >= found.answer.step_time_s * (1 - 1e-9)


def test_equal_devices_get_equal_batches() -> None:
    found = balanced("a0[0,1]+a1[0,1]", 24, 1.0, 1.0)
    assert found.answer.batches == (6, 6)
    assert found.answer.batch_per_gpu == 6
    assert found.gain_ratio == 0


def test_a_global_batch_is_shared_on_any_count_and_all_wait_for_the_largest_share() -> None:
    text = "a0[0,1,2]"
    answer = balanced(text, 64, 1.0).answer
    # 64 = 22 + 21 + 21; 66 is what ranks of 22 samples each would have.
    assert (answer.batches, answer.global_batch) == ((22,), 64)
    padded = balanced(text, 66, 1.0).answer
    assert answer.step_time_s == padded.step_time_s
    assert answer.samples_per_s == pytest.approx(padded.samples_per_s * 64 / 66)
    assert "batches differ (at most 22 per device, 2 fewer in all)" in answer.assumptions[0]
    by_group = balanced("a0[0,1]+a1[0,1]", 33, 1.0, 2.0).answer
    # Two groups of two ranks have an even number of samples.
    assert by_group.global_batch == 33
    assert 2 * sum(by_group.batches) == 34
    asked: dict[str, Any] = {"cluster": cluster(1.0), "profile": MACHINE}
    table = estimate_many(GRAPH, [text, "a0[0,1]"], global_batch=64, **asked)
    assert table.global_batch.tolist() == [64, 64]
    assert table.batch_per_gpu.tolist() == [22, 32]
    assert table.step_time_s[0] == pytest.approx(answer.step_time_s)
    assert table.samples_per_s[0] == pytest.approx(answer.samples_per_s)
    for refuse in (
        lambda: balanced(text, 64, 1.0, strict=True),
        lambda: estimate_many(GRAPH, [text], global_batch=64, strict=True, **asked),
    ):
        with pytest.raises(WorkloadError, match=r"64 cannot be split evenly over 3 .* of 3"):
            refuse()


def no_host_costs() -> MachineProfile:
    """A machine whose steps take time in proportion to the batch, but for the update."""
    host = MACHINE.host
    return replace(MACHINE, host=replace(host, **dict.fromkeys(NO_HOST, 0.0)))


NO_HOST = (
    *("forward_op_s", "forward_view_s", "backward_op_s", "bare_op_s", "module_call_s", "step_s"),
    *("ddp_step_s", "ddp_bucket_s"),
)


def test_a_device_twice_as_slow_gets_about_half_the_batch() -> None:
    # 3072 over speeds 1 and 1/2: 2048 and 1024, but for kernels' starts and copies of weights.
    found = balanced("a0[0]+a1[0]", 3072, 1.0, 2.0, profile=no_host_costs())
    fast, slow = found.answer.batches or (0, 0)
    assert slow / fast == pytest.approx(0.5, abs=0.01)
    # Even lanes take 2 · 1536 samples' time, balanced ones 2048: at most 3072 / 2048 − 1 is gained.
    assert 0.2 < found.gain_ratio <= 0.5


def test_the_even_split_to_compare_with_is_padded_where_it_does_not_divide() -> None:
    found = balanced("a0[0]+a1[0]", 333, 1.0, 2.0)
    assert sum(found.answer.batches or ()) == 333
    assert found.even.batches == (167, 167)


def test_the_split_is_bounded_by_memory() -> None:
    roomy = balanced("a0[0]+a1[0]", 4096, 1.0, 3.0).answer
    needed = roomy.peak_memory_bytes
    # Devices that hold a bit less than the fast rank's share of the unlimited split.
    small = (replace(device, memory_bytes=round(0.9 * needed)) for device in MACHINE.devices)
    tight = replace(MACHINE, devices=tuple(small))
    found = balanced("a0[0]+a1[0]", 4096, 1.0, 3.0, profile=tight).answer
    assert found.batches[0] < roomy.batches[0]
    assert found.fits != "no"
    assert found.batches > (2048, 2048)


def test_a_question_is_placed_and_its_strategy_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def counted(inner: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            asked.append(arguments[0])
            return inner(*arguments, **options)

        return call

    monkeypatch.setattr(engine, "place", counted(engine.place))
    monkeypatch.setattr(strategies, "_parsed", counted(strategies._parsed))
    nodes = cluster(1.0, 2.0)
    answer = estimate(GRAPH, "a0[0]+a1[0]", global_batch=333, cluster=nodes, profile=MACHINE)
    assert answer.batches[0] > answer.batches[1]
    assert asked == ["ddp", est.Allocation.parse("a0[0]+a1[0]")]


def test_estimate_splits_by_speed_and_a_table_does_not() -> None:
    asked: dict[str, Any] = {"cluster": cluster(1.0, 2.0), "profile": MACHINE, "global_batch": 333}
    answer = estimate(GRAPH, "a0[0]+a1[0]", **asked)
    assert answer.batch_per_gpu is None
    assert answer.batches == balanced("a0[0]+a1[0]", 333, 1.0, 2.0).answer.batches
    table = estimate_many(GRAPH, ["a0[0]+a1[0]"], **asked)
    assert table.step_time_s[0] == answer.step_time_s


def test_a_given_split_counts_every_rank_of_every_group() -> None:
    answer = split_over("a0[0,1]+a1[0]", (24, 8), 1.0, 2.0, accumulation_steps=2)
    assert answer.batches == (24, 8)
    # 2 micro-batches of 24 on each of two ranks and of 8 on the third.
    assert answer.global_batch == 2 * (24 + 24 + 8)
    assert answer.samples_per_s == pytest.approx(112 / answer.step_time_s)
    # Three devices at 50 Gflop/s did the flops of 112 samples; the model's grow with its samples.
    alone = split_over("a0[0]", 112, 1.0)
    flops = alone.plan.kinds[0].program.flops.model
    assert answer.mfu_ratio == pytest.approx(flops / (3 * 5e10 * answer.step_time_s), rel=1e-6)
    fullest = split_over("a0[0,1]+a1[0]", 24, 1.0, 2.0)
    # The batch of the fast ranks; accumulating keeps no more than one micro-batch.
    assert answer.peak_memory_bytes == fullest.peak_memory_bytes
    (weights,) = (text for text in answer.assumptions if "24 + 8 per device" in text)
    assert "multiply each rank's mean loss" in weights


def test_counted_groups_of_a_cluster_take_their_batch_to_all_their_nodes() -> None:
    answer = split_over("2x1:m+1x2:m", (4, 16), 1.0, 1.0, 1.0)
    assert answer.global_batch == 2 * 4 + 2 * 16


def test_scaling_is_relative_to_each_device_alone_at_its_own_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESTIMATOR_HOME", str(tmp_path))
    MACHINE.save(tmp_path / "machines" / "m.json")
    asked: dict[str, Any] = {"cluster": cluster(1.0, 2.0)}
    answer = est.estimate(GRAPH, "a0[0]+a1[0]", batch_per_gpu=(96, 32), **asked)
    fast, slow = (
        est.estimate(GRAPH, text, batch_per_gpu=batch, **asked).step_time_s
        for text, batch in (("a0[0]", 96), ("a1[0]", 32))
    )
    scaling = scaling_of(answer)
    assert scaling.efficiency_ratio == pytest.approx(max(fast, slow) / answer.step_time_s)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_per_gpu": (1, 2, 3)}, "3 batches were given for .* give one for each group"),
        ({"batch_per_gpu": (4, 0)}, "batch size must be at least 1, found 0"),
        ({"batch_per_gpu": (4, 2), "global_batch": 8}, "not both"),
        ({"global_batch": 3}, "3 leaves ranks without a sample; 4 ranks .* at least 4"),
        (
            {"global_batch": 33, "strict": True},
            r"33 cannot be split .* groups of 2 \+ 2 ranks .* multiple of 4",
        ),
        ({"global_batch": 9, "accumulation_steps": 2, "strict": True}, "use a multiple of 8"),
        ({"global_batch": 8, "accumulation_steps": 0}, "accumulation steps must be at least 1"),
    ],
)
def test_an_impossible_split_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        estimate(GRAPH, "a0[0,1]+a1[0,1]", cluster=cluster(1.0, 2.0), profile=MACHINE, **options)


NEIGHBOURS_GRAPH = in_blocks(perceptron([512, 512, 512, 512], batch=16))
NEIGHBOURS_MACHINE = Machine(
    devices=4, latency_s=1e-12, network_latency_s=1e-12, rank_jitter_ratio=0.0
).profile()
LATE = "ddp:unbucketed"


def test_flows_on_one_link_share_what_a_slower_one_leaves() -> None:
    # 10 B/s for three: 3⅓ each, of which one takes 2; the others share the 8 that it leaves.
    rates = fair_rates(
        np.array([[True, True, True], [True, False, True]]),
        np.array([10.0]),
        np.ones((1, 3)),
        np.array([2.0, 10.0, 10.0]),
    )
    np.testing.assert_allclose(rates, [[2, 4, 4], [2, 0, 8]])


def test_a_flow_over_two_hops_takes_the_share_of_the_narrower_one() -> None:
    # Hop 0 carries 10 and flows a, b; hop 1 carries 4 and a, c: a and c 2 each, so b has 8.
    uses = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    alone = np.array([4.0, 10.0, 4.0])
    rates = fair_rates(np.ones((1, 3), dtype=bool), np.array([10.0, 4.0]), uses, alone)
    np.testing.assert_allclose(rates, [[2, 8, 2]])


def test_a_flow_that_leaves_twice_takes_twice_its_rate_of_a_link() -> None:
    # x + 2x = 9.
    uses = np.array([[1.0, 2.0]])
    rates = fair_rates(np.ones((1, 2), dtype=bool), np.array([9.0]), uses, np.array([9.0, 4.5]))
    np.testing.assert_allclose(rates, [[3, 3]])


def test_jobs_without_a_link_in_common_have_their_own_rates() -> None:
    always = lambda ratio: (1.0, 1.0)  # noqa: E731
    one, other = {("node", "a"): (1e9, 1)}, {("node", "b"): (1e9, 1)}
    assert link_ratios([Sender(one, 1e9, always), Sender(other, 1e9, always)]) == [1.0, 1.0]


def test_many_jobs_that_always_send_have_equal_parts_of_a_link() -> None:
    link = {("switch", "r"): (1e9, 1)}
    ratios = link_ratios([Sender(link, 1e9, lambda ratio: (1.0, 1.0))] * 20)
    assert ratios == pytest.approx([1 / 20] * 20)


def _estimate(allocation: str, **options: Any) -> est.Estimate:
    return est.estimate(
        NEIGHBOURS_GRAPH, allocation, strategy=LATE, profile=NEIGHBOURS_MACHINE, **options
    )


def test_two_jobs_on_one_network_card_wait_for_each_other_while_both_send() -> None:
    # Each computes C and then sends for S. With d the share of time that the other sends, a job
    # has 1 - d/2 of the link, sends for x = S / (1 - d/2), and d = x / (C + x):
    # x² + 2(C - S)x - 2SC = 0, so x = S - C + √(S² + C²).
    alone = _estimate("2x2:synthetic")
    send_s = alone.plan.alone_s(alone.answer.slowest)
    compute_s = alone.step_time_s - send_s
    beside = _estimate("2x2:synthetic", neighbours=[alone])
    longer_s = send_s - compute_s + math.hypot(send_s, compute_s)
    assert longer_s > 1.1 * send_s
    assert beside.step_time_s == pytest.approx(compute_s + longer_s, rel=1e-3)
    assert any("1 other job on the same links leaves" in text for text in beside.assumptions)
    assert beside.breakdown.forward_s == alone.breakdown.forward_s


def test_traffic_that_fills_a_link_leaves_half_of_it() -> None:
    alone = _estimate("2x2:synthetic")
    beside = _estimate("2x2:synthetic", neighbours=[("2x1:synthetic", 1e8)])
    send_s = (
        6 / 4 * NEIGHBOURS_GRAPH.parameter_bytes / 1e8
    )  # a ring of four passes 2 · 3/4 of all bytes on
    assert beside.step_time_s - alone.step_time_s == pytest.approx(send_s, rel=1e-3)


def _two_racks() -> Cluster:
    racks = {name: Switch(parent="core", uplink_bytes_per_s=1e8) for name in ("r", "s")}
    nodes = {
        f"{rack}{number}": Node(machine="synthetic", switch=rack)
        for rack in ("r", "s")
        for number in range(3)
    }
    return Cluster(nodes=nodes, switches={"core": Switch(), **racks})


@pytest.mark.parametrize(
    ("other", "slowed"),
    [
        ("r1[0]+s1[0]", True),  # other nodes, the same uplinks of both racks
        ("r0[2]+r1[0]", True),  # one node in common
        ("r1[0]+r2[0]", False),  # other nodes below one switch
        ("r0[2]+r0[3]", False),  # inside a node nothing leaves it
    ],
)
def test_only_what_crosses_the_same_nodes_or_uplinks_slows(other: str, slowed: bool) -> None:
    cluster = _two_racks()
    alone = _estimate("r0[0,1]+s0[0,1]", cluster=cluster)
    neighbour = _estimate(other, cluster=cluster)
    beside = _estimate("r0[0,1]+s0[0,1]", cluster=cluster, neighbours=[neighbour])
    assert (beside.step_time_s > 1.01 * alone.step_time_s) == slowed


def test_a_pipeline_and_sharded_ranks_are_slowed_too() -> None:
    for options in ({"strategy": "fsdp"}, {"strategy": "ps:2"}, {"layout": "pp=2,dp=*"}):
        asked: Any = {"profile": NEIGHBOURS_MACHINE, **options}
        alone = est.estimate(NEIGHBOURS_GRAPH, "2x2:synthetic", **asked)
        asked["neighbours"] = [("2x1:synthetic", 1e8)]
        beside = est.estimate(NEIGHBOURS_GRAPH, "2x2:synthetic", **asked)
        assert beside.step_time_s > alone.step_time_s


def test_a_cluster_that_was_read_twice_is_one(tmp_path: Path) -> None:
    file = tmp_path / "rack.toml"
    file.write_text("".join(f'[nodes.{node}]\nmachine = "{MACHINE.name}"\n' for node in "ab"))
    asked = {"profile": NEIGHBOURS_MACHINE, "cluster": file, "strategy": LATE}
    other = est.estimate(NEIGHBOURS_GRAPH, "a[1]+b[1]", **asked)
    answer = est.estimate(NEIGHBOURS_GRAPH, "a[0]+b[0]", neighbours=[other], **asked)
    assert answer.step_time_s > est.estimate(NEIGHBOURS_GRAPH, "a[0]+b[0]", **asked).step_time_s
    file.write_text(file.read_text() + f'[nodes.c]\nmachine = "{MACHINE.name}"\n')
    with pytest.raises(WorkloadError, match="of one cluster"):
        est.estimate(NEIGHBOURS_GRAPH, "a[0]+b[0]", neighbours=[other], **asked)


def test_jobs_that_want_more_devices_than_a_node_has_are_refused() -> None:
    neighbour = _estimate("2x3:synthetic")
    with pytest.raises(AllocationError, match=r"the jobs want 5 devices of node 1, which has 4"):
        _estimate("2x2:synthetic", neighbours=[neighbour])


@pytest.mark.parametrize("neighbour", [3, "2x1:synthetic", ("2x1:synthetic", -1), (1, 2, 3), None])
def test_what_is_no_neighbour_is_refused_in_a_sentence(neighbour: Any) -> None:
    with pytest.raises(EstimatorError, match="neighbour"):
        _estimate("2x2:synthetic", neighbours=[neighbour])


def test_a_table_has_no_neighbours() -> None:
    options: Any = {"neighbours": [("2x1:t4-g4dn", 1.0)]}
    with pytest.raises(WorkloadError, match="a table has no neighbours"):
        est.estimate_many(NEIGHBOURS_GRAPH, ["2x1:t4-g4dn"], **options)
