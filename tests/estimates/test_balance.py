"""Global batches split over unlike devices: level, whole, never worse than an even split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as some

import estimator as est
from estimator.advise.scaling import scaling_of
from estimator.api import estimate
from estimator.errors import WorkloadError
from estimator.estimates import engine
from estimator.estimates.balance import Balance, balance
from estimator.estimates.request import EstimateRequest
from estimator.estimates.table import estimate_many
from estimator.machines.profile import MachineProfile
from estimator.placement.topology import Cluster, Node, Switch
from estimator.workload import strategies
from tests.budgets import examples
from tests.synthetic import Machine, perceptron

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
                moved = est.estimate(
                    GRAPH,
                    allocation,
                    batch_per_gpu=split,
                    cluster=cluster(*slowdowns),
                    profile=MACHINE,
                )
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
    assert host is not None
    return replace(MACHINE, host=replace(host, **dict.fromkeys(NO_HOST, 0.0)))


NO_HOST = (
    "forward_op_s",
    "forward_view_s",
    "backward_op_s",
    "bare_op_s",
    "module_call_s",
    "step_s",
    "ddp_step_s",
    "ddp_bucket_s",
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
    tight = replace(
        MACHINE,
        devices=tuple(
            replace(device, memory_bytes=round(0.9 * needed)) for device in MACHINE.devices
        ),
    )
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
    asked: dict[str, Any] = {
        "cluster": cluster(1.0, 2.0),
        "profile": MACHINE,
        "global_batch": 333,
    }
    answer = estimate(GRAPH, "a0[0]+a1[0]", **asked)
    assert answer.batch_per_gpu is None
    assert answer.batches == balanced("a0[0]+a1[0]", 333, 1.0, 2.0).answer.batches
    table = estimate_many(GRAPH, ["a0[0]+a1[0]"], **asked)
    assert table.step_time_s[0] == answer.step_time_s


def test_a_given_split_counts_every_rank_of_every_group() -> None:
    answer = estimate(
        GRAPH,
        "a0[0,1]+a1[0]",
        batch_per_gpu=(24, 8),
        accumulation_steps=2,
        cluster=cluster(1.0, 2.0),
        profile=MACHINE,
    )
    assert answer.batches == (24, 8)
    # 2 micro-batches of 24 on each of two ranks and of 8 on the third.
    assert answer.global_batch == 2 * (24 + 24 + 8)
    assert answer.samples_per_s == pytest.approx(112 / answer.step_time_s)
    # Three devices at 50 Gflop/s did the flops of 112 samples; the model's grow with its samples.
    alone = estimate(GRAPH, "a0[0]", batch_per_gpu=112, cluster=cluster(1.0), profile=MACHINE)
    flops = alone.plan.kinds[0].program.flops.model
    assert answer.mfu_ratio == pytest.approx(flops / (3 * 5e10 * answer.step_time_s), rel=1e-6)
    fullest = estimate(
        GRAPH, "a0[0,1]+a1[0]", batch_per_gpu=24, cluster=cluster(1.0, 2.0), profile=MACHINE
    )
    # The batch of the fast ranks; accumulating keeps no more than one micro-batch.
    assert answer.peak_memory_bytes == fullest.peak_memory_bytes
    (weights,) = (text for text in answer.assumptions if "24 + 8 per device" in text)
    assert "multiply each rank's mean loss" in weights


def test_counted_groups_of_a_cluster_take_their_batch_to_all_their_nodes() -> None:
    answer = estimate(
        GRAPH,
        "2x1:m+1x2:m",
        batch_per_gpu=(4, 16),
        cluster=cluster(1.0, 1.0, 1.0),
        profile=MACHINE,
    )
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
