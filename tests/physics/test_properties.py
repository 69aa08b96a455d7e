"""Physics as properties: what must hold of every estimate, whatever the machine and the model."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator.api import estimate
from estimator.estimates.estimate import Breakdown, Estimate
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.ir.ops import OpCost
from tests.budgets import examples
from tests.synthetic import Machine, perceptron

amounts = st.floats(min_value=0, max_value=1e18)
costs = st.builds(OpCost, amounts, amounts, amounts)
widths = st.lists(st.sampled_from([32, 96, 256, 1000, 2048]), min_size=2, max_size=6)
graphs = st.builds(perceptron, widths, batch=st.sampled_from([1, 8, 64]))
machines = st.builds(
    Machine,
    flops_per_s=st.floats(1e9, 1e12),
    memory_bytes_per_s=st.floats(1e9, 1e11),
    latency_s=st.floats(1e-6, 1e-2),
    bandwidth_bytes_per_s=st.floats(1e7, 1e11),
    exposed_ratio=st.floats(0, 3),
    slowdown_ratio=st.floats(1, 3),
    two_at_once_ratio=st.floats(1, 2),
    memory_contention=st.floats(1, 2),
    rank_jitter_ratio=st.floats(0, 0.05),
)
# Communication beside compute may cost more than after it; what delays it then shortens the step.
overlapping = machines.filter(lambda machine: machine.exposed_ratio <= 1)
ranks = st.integers(1, 8)
strategies = st.sampled_from(
    ["ddp", "ddp:unbucketed", "ddp:bucket=1MiB", "ddp:view", "ddp:bucket=64KiB,first=4KiB,view"]
)
growth = st.floats(1.001, 100)
# Profiles go through fits, whose own rounding is far below this and far above the floats'.
SLACK = 1 + 1e-6


def without_hidden_latency(machine: Machine, ranks: int) -> Machine:
    """The machine, where a group of other than the measured size is asked for.

    How much latency passes beside another collective is a measured share of its time; carried over
    to larger rings it moves with the link by some tenths of a percent of the step.
    """
    return machine if ranks <= 2 else replace(machine, two_at_once_ratio=2.0)


def answer(graph: OpGraph, machine: Machine, ranks: int, **options: Any) -> Estimate:
    return estimate(graph, f"1x{ranks}:synthetic", profile=machine.profile(), **options)


@given(costs, costs, costs)
def test_costs_add_like_numbers(one: OpCost, two: OpCost, three: OpCost) -> None:
    def close(left: OpCost, right: OpCost) -> bool:
        names = [item.name for item in fields(OpCost)]
        return all(getattr(left, n) == pytest.approx(getattr(right, n), rel=1e-12) for n in names)

    assert close(one + two, two + one)
    assert close((one + two) + three, one + (two + three))
    assert one + OpCost() == one


@settings(max_examples=examples(20), deadline=None)
@given(graphs, machines, ranks, strategies, st.integers(1, 3))
def test_the_breakdown_sums_to_the_step_and_has_no_negative_part(
    graph: OpGraph, machine: Machine, ranks: int, strategy: str, accumulation_steps: int
) -> None:
    found = answer(graph, machine, ranks, strategy=strategy, accumulation_steps=accumulation_steps)
    parts = [getattr(found.breakdown, item.name) for item in fields(Breakdown)]
    # The spans are played one by one; the parts are what is left of the step without each.
    end_s = max(span.start_s + span.duration_s for span in found.timeline.spans)
    assert sum(parts) == pytest.approx(end_s, rel=1e-9)
    assert min(parts) >= 0
    assert found.low_s <= found.step_time_s <= found.high_s
    assert sum(share for _, _, share, _ in found.provenance) == pytest.approx(1, rel=1e-6)


@settings(max_examples=examples(40), deadline=None)
@given(graphs, overlapping, ranks, strategies, growth, st.booleans())
def test_step_time_never_rises_with_the_bandwidth_of_links_or_falls_with_their_latency(
    graph: OpGraph, machine: Machine, ranks: int, strategy: str, factor: float, is_wider: bool
) -> None:
    machine = without_hidden_latency(machine, ranks)
    if is_wider:
        quicker = replace(machine, bandwidth_bytes_per_s=machine.bandwidth_bytes_per_s * factor)
    else:
        quicker = replace(machine, latency_s=machine.latency_s / factor)
    slow, quick = (answer(graph, each, ranks, strategy=strategy) for each in (machine, quicker))
    assert quick.step_time_s <= slow.step_time_s * SLACK


@settings(max_examples=examples(20), deadline=None)
@given(graphs, machines, ranks, growth, st.sampled_from(["flops_per_s", "memory_bytes_per_s"]))
def test_step_time_never_rises_with_the_speed_of_kernels(
    graph: OpGraph, machine: Machine, ranks: int, factor: float, rate: str
) -> None:
    faster = replace(machine, **{rate: getattr(machine, rate) * factor})
    before = answer(graph, machine, ranks).step_time_s
    assert answer(graph, faster, ranks).step_time_s <= before * SLACK


@settings(max_examples=examples(20), deadline=None)
@given(graphs, overlapping, ranks, strategies)
def test_more_equal_ranks_never_raise_throughput_per_rank(
    graph: OpGraph, machine: Machine, ranks: int, strategy: str
) -> None:
    machine = without_hidden_latency(machine, ranks + 1)
    few, many = (answer(graph, machine, count, strategy=strategy) for count in (ranks, ranks + 1))
    assert few.samples_per_s is not None
    assert many.samples_per_s is not None
    assert many.samples_per_s / many.ranks <= few.samples_per_s / few.ranks * SLACK


@settings(max_examples=examples(20), deadline=None)
@given(graphs, machines, ranks, st.sampled_from([2, 3, 5]))
def test_a_larger_batch_never_takes_less_time(
    graph: OpGraph, machine: Machine, ranks: int, factor: int
) -> None:
    assert graph.batch is not None
    before = answer(graph, machine, ranks).step_time_s
    larger = answer(graph, machine, ranks, batch_per_gpu=graph.batch * factor)
    assert larger.step_time_s >= before / SLACK


def test_one_product_on_one_device_takes_what_the_machine_says() -> None:
    # One layer 2048 → 2048 at batch 2048, all shapes in the synthetic grid:
    # three products of 2·2048³ flops at 50 Gflop/s, 1 µs each to start.
    graph = perceptron([2048, 2048], batch=2048)
    found = answer(graph, Machine(), 1)
    matmuls_s = 3 * (2 * 2048**3 / 5e10 + 1e-6)
    # relu moves 2, threshold 3, two copies 2 times 16 MiB each, at 10 GB/s.
    passes_s = (2 + 3 + 2 + 2) * (4 * 2048**2) / 1e10 + 4e-6
    kernels_s = found.breakdown.forward_s + found.breakdown.backward_s
    assert kernels_s == pytest.approx(matmuls_s + passes_s, rel=1e-6)
    # 2 forward and 5 backward ops, one gradient handed to its parameter, one empty step.
    assert found.breakdown.host_exposed_s == pytest.approx(2 * 4e-6 + 6 * 3e-6 + 2e-5, rel=1e-6)
    assert found.breakdown.update_s == pytest.approx(1e-5 + 2e-5 + 3e-9 * 2048**2, rel=1e-6)
    assert found.step_time_s == pytest.approx(
        matmuls_s + passes_s + 2 * 4e-6 + 6 * 3e-6 + 2e-5 + 3e-5 + 3e-9 * 2048**2, rel=1e-6
    )
    # 1.046 of 1.059 s.
    assert found.bottleneck == "computing on the cpu device (99 % of the step)"


@pytest.mark.parametrize(("strategy", "copies"), [("ddp:view", 1), ("ddp", 2)])
def test_one_bucket_on_two_ranks_is_exposed_where_it_takes_the_cores(
    strategy: str, copies: int
) -> None:
    # The only gradient, of 16 MiB, is ready before a product of 0.34 s, beside which it is reduced:
    # 0.1 ms and 16.8 ms at 1 GB/s, of which the cores work for 0.8.
    graph = perceptron([2048, 2048], batch=2048)
    machine = Machine(rank_jitter_ratio=0.0)
    alone, found = (answer(graph, machine, ranks, strategy=strategy) for ranks in (1, 2))
    reduced_s = 1e-4 + 4 * 2048**2 / 1e9
    assert found.breakdown.communication_exposed_s == pytest.approx(0.8 * reduced_s, rel=5e-3)
    # Copied into the bucket, and back unless gradients are views of it: 2 · 16 MiB at 10 GB/s.
    copied_s = copies * (2 * 4 * 2048**2 / 1e10 + 1e-6)
    assert found.breakdown.copies_exposed_s == pytest.approx(copied_s, rel=1e-6)
    # DDP's own host work of a step, and of its bucket.
    added_s = found.breakdown.host_exposed_s - alone.breakdown.host_exposed_s
    assert added_s == pytest.approx(2e-4 + 3e-5, rel=0.02)
    assert found.step_time_s - alone.step_time_s == pytest.approx(
        0.8 * reduced_s + copied_s + 2.3e-4, rel=5e-3
    )
