"""The choice of a strategy: by the links of workers and servers, by memory, by what is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

import estimator as est
from estimator.advise.scaling import SweepRow, rank_strategies
from estimator.errors import ProfileError, StrategyError
from estimator.machines.profile import MachineProfile
from tests.synthetic import Machine, perceptron

GRAPH = perceptron([1000, 2048, 1000], batch=64)
PROFILE = Machine(devices=2, network_bytes_per_s=1e8).profile()


def best_strategy(
    allocation: str, strategies: tuple[str, ...], profile: MachineProfile = PROFILE
) -> list[SweepRow]:
    return rank_strategies(
        allocation,
        strategies,
        lambda each: est.estimate(GRAPH, allocation, strategy=each, profile=profile),
    )


def names(rows: list[SweepRow]) -> list[str]:
    return [str(row.strategy).partition(":")[0] for row in rows]


def best_of_two(server: str) -> str:
    rows = best_strategy("4x1:m", ("ddp", f"ps:1,link={server}"))
    return names(rows)[0]


def test_a_server_wins_where_its_link_carries_all_workers_and_loses_where_it_does_not() -> None:
    # A ring of four sends 1.5 times the bytes over a worker's link; a server's link takes all
    # four workers' bytes, and a worker's link its own: 1 at four times the rate, else 4.
    assert best_of_two("400MB/s") == "ps"
    assert best_of_two("100MB/s") == "ddp"


def test_what_does_not_fit_comes_after_what_does() -> None:
    rows = best_strategy("4x1:m", ("ddp", "zero1"))
    assert names(rows) == ["ddp", "zero1"]
    needs = {str(row.strategy): row.answer.peak_memory_bytes for row in rows if row.answer}
    room = (needs["ddp"] + needs["zero1"]) // 2
    small = tuple(replace(device, memory_bytes=room) for device in PROFILE.devices)
    tight = best_strategy("4x1:m", ("ddp", "zero1"), profile=replace(PROFILE, devices=small))
    assert names(tight) == ["zero1", "ddp"]
    assert tight[1].answer.fits == "no"


def test_a_strategy_whose_collectives_were_not_measured_is_last_with_its_reason() -> None:
    rows = best_strategy("1x2:m", ("fsdp", "ddp"))
    assert names(rows) == ["ddp", "fsdp"]
    assert "all-gather" in rows[1].refusal
    with pytest.raises(ProfileError, match="all-gather"):
        best_strategy("1x2:m", ("fsdp",))
    with pytest.raises(StrategyError, match="no strategy"):
        best_strategy("1x2:m", ())


def test_a_strategy_that_cannot_divide_the_ranks_is_last_with_its_reason() -> None:
    rows = best_strategy("1x2:m", ("fsdp:shard=4", "ddp"))
    assert names(rows) == ["ddp", "fsdp"]
    assert "do not divide 2" in rows[1].refusal


def test_parameter_servers_use_no_ring_all_reduce() -> None:
    (row,) = best_strategy("2x1:m", ("ps:1",))
    (told,) = [each for each in row.answer.assumptions if "was not measured" in each]
    assert told.endswith("its bytes over the slowest link of a worker or of the servers")


def test_servers_of_one_node_are_reached_over_its_network() -> None:
    assert PROFILE.network
    rows = best_strategy("1x2:m", ("ddp", "ps:1"))
    # Two workers share 1e8 B/s: 16.4 MB of gradients each way take over 0.3 s.
    slow = next(row.answer for row in rows if str(row.strategy) == "ps:1")
    assert slow.breakdown.communication_exposed_s > 0.2
    with pytest.raises(ProfileError, match="no network"):
        best_strategy("1x2:m", ("ps:1",), profile=replace(PROFILE, network=()))
