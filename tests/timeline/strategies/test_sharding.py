"""Sharded strategies: what an update shares, what memory is left, what texts name."""

from __future__ import annotations

from typing import Any

import pytest

import estimator as est
from estimator.errors import ProfileError
from estimator.estimates.estimate import Estimate
from estimator.machines.profile import MachineProfile
from estimator.timeline.rank.lanes import ShardedPasses
from estimator.workload.strategies import NAMES
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
