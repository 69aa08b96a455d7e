"""Sharded strategies: FSDP's prefetching queue, what an update shares, what memory is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.errors import ProfileError
from estimator.estimates import Estimate, estimate_graph
from estimator.graph.shards import shard_units
from estimator.timeline.program import LaneUnit
from estimator.timeline.sharding import blocking_s, prefetching_s
from tests.synthetic import Machine, perceptron, with_every_collective

GRAPH = perceptron([1000, 2048, 1000], batch=64)


def profile(**numbers: float):  # type: ignore[no-untyped-def]
    return with_every_collective(Machine(devices=4, **numbers).profile())  # type: ignore[arg-type]


def answer(strategy: str, ranks: int = 4) -> Estimate:
    return estimate_graph(GRAPH, f"1x{ranks}:m", profile=profile(), strategy=strategy)


def played(units: list[LaneUnit], gather: list[float], scatter: list[float]) -> float:
    """FSDP's step on two queues, each in the order of issue, as a list of dependent tasks."""
    last = len(units) - 1
    tasks: list[tuple[str, float, list[str], str]] = [("ag0", gather[0], [], "net")]
    for i, unit in enumerate(units):
        if i:
            tasks.append((f"ag{i}", gather[i], [f"start f{i - 1}"], "net"))
        tasks.append((f"f{i}", unit.forward_s, [f"ag{i}"], "gpu"))
    for i in range(last, -1, -1):
        if i == last and i:
            tasks.append((f"again{i}", gather[i], [f"f{i}"], "net"))
        if i > 1:
            tasks.append((f"again{i - 1}", gather[i - 1], [f"start b{i}"], "net"))
        tasks.append((f"b{i}", units[i].backward_s, [f"again{i}"] if i else [], "gpu"))
        tasks.append((f"rs{i}", scatter[i], [f"b{i}"], "net"))
    order = {lane: [t for t in tasks if t[3] == lane] for lane in ("net", "gpu")}
    starts: dict[str, float] = {}
    ends: dict[str, float] = {}
    free = {"net": 0.0, "gpu": 0.0}
    while any(order.values()):
        for lane, queue in order.items():
            while queue:
                name, seconds, needs, _ = queue[0]
                known = {**ends, **{f"start {key}": value for key, value in starts.items()}}
                if any(need not in known for need in needs):
                    break
                starts[name] = max([free[lane], *(known[need] for need in needs)])
                ends[name] = free[lane] = starts[name] + seconds
                queue.pop(0)
    return max(ends.values()) - sum(unit.forward_s + unit.backward_s for unit in units)


seconds = st.floats(0.0, 1.0)


@given(st.lists(st.tuples(seconds, seconds, seconds, seconds), min_size=1, max_size=7))
def test_prefetching_equals_the_play_of_two_queues(rows: list[tuple[float, ...]]) -> None:
    units = [LaneUnit(0, forward, backward) for forward, backward, _, _ in rows]
    gather, scatter = [row[2] for row in rows], [row[3] for row in rows]
    expected = played(units, gather, scatter)
    assert prefetching_s(units, gather, scatter) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_two_units_by_hand() -> None:
    # Gather 1 s each, compute 3 s forward and 3 s backward, scatter 2 s.
    units = [LaneUnit(0, 3.0, 3.0)] * 2
    # 1 gathered, then forward to 7; the last again to 8, backward to 11 and 14; scattered at 16.
    assert prefetching_s(units, [1.0, 1.0], [2.0, 2.0]) == 16.0 - 12.0
    # Blocking: three gatherings (the first unit is kept) and two scatterings.
    assert blocking_s(units, [1.0, 1.0], [2.0, 2.0]) == 3.0 + 4.0


def test_units_are_the_numbered_blocks_and_the_rest() -> None:
    assert [unit.path for unit in shard_units(GRAPH)] == ["0", "1"] or all(
        unit.parameter_bytes > 0 for unit in shard_units(GRAPH)
    )
    held = sum(unit.parameter_bytes for unit in shard_units(GRAPH))
    assert held == GRAPH.parameter_bytes


def test_sharding_divides_the_update_and_the_state() -> None:
    whole, one, full = answer("ddp"), answer("zero1"), answer("fsdp")
    # Launching 10 µs stays; two tensors at 20 µs and 3 ns a parameter are shared by four.
    shared_s = whole.breakdown.update_s - 1e-5
    assert one.breakdown.update_s == pytest.approx(1e-5 + shared_s / 4)
    # ZeRO-1 gives whole tensors away: of two equal ones a rank has one. FSDP cuts each in four.
    assert one.memory.optimizer_state_bytes == whole.memory.optimizer_state_bytes // 2
    assert full.memory.optimizer_state_bytes == whole.memory.optimizer_state_bytes // 4
    assert full.peak_memory_bytes < one.peak_memory_bytes < whole.peak_memory_bytes


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp", "ps:2", "ps:2,async"])
def test_every_strategy_answers_with_a_breakdown_that_sums(strategy: str) -> None:
    found = answer(strategy) if not strategy.startswith("ps") else across(strategy)
    assert found.breakdown.total_s == pytest.approx(found.step_time_s)
    assert found.strategy == strategy
    assert found.timeline.step_time_s == pytest.approx(found.step_time_s)


@pytest.mark.parametrize(
    ("strategy", "waits_for", "bucket"),
    [
        ("ddp", "reducing gradients of 4 ranks over", "all-reduce bucket 0"),
        ("zero1", "reducing gradients and broadcasting parameters of 4", "all-reduce bucket 0"),
        ("zero2", "reducing gradients and gathering parameters of 4", "reduce-scatter bucket 0"),
        ("fsdp", "gathering parameters and reducing gradients of 4", None),
        ("ps:2", "sending gradients of 4 ranks to 2 parameter servers", "push, pull bucket 0"),
    ],
)
def test_texts_name_what_a_strategy_sends(
    strategy: str, waits_for: str, bucket: str | None
) -> None:
    found = estimate_graph(
        GRAPH, "4x1:m", profile=profile(network_bytes_per_s=1e6), strategy=strategy
    )
    assert found.bottleneck.startswith(waits_for)
    assert "over the network of 'synthetic'" in found.bottleneck
    names = {label.name.rpartition(" (")[0] for label in found.timeline.spans.labels}
    assert {name for name in names if name.endswith("bucket 0")} == ({bucket} if bucket else set())


def across(strategy: str, ranks: int = 4) -> Estimate:
    return estimate_graph(GRAPH, f"{ranks}x1:m", profile=profile(), strategy=strategy)


def test_more_servers_never_slow_a_parameter_server_job() -> None:
    assert across("ps:4").step_time_s <= across("ps:1").step_time_s
    assert across("ps:1,async").step_time_s <= across("ps:1").step_time_s


def test_a_profile_without_the_collective_says_which() -> None:
    with pytest.raises(ProfileError, match="reduce-scatter"):
        estimate_graph(GRAPH, "1x2:m", profile=Machine().profile(), strategy="zero2")
