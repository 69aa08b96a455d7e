"""Sweeps over patterns of allocations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import estimator as est
from estimator.advise.rank_order import hop_seconds, rank_order, ring_seconds, shared_uplinks
from estimator.advise.scaling import (
    SweepRow,
    existing,
    expand_pattern,
    rank_strategies,
    scaling_of,
    sweep,
    sweep_csv,
)
from estimator.cli.request import Request
from estimator.coefficients import Coefficients
from estimator.errors import AllocationError, ProfileError, StrategyError
from estimator.estimates.estimate import Estimate
from estimator.machines.profile import MachineProfile, PairMatrix
from estimator.placement.mesh import whole_group
from estimator.placement.placement import place
from estimator.placement.topology import Cluster, Node, Switch
from tests.conftest import Command
from tests.synthetic import CHOSEN, Machine, perceptron, with_every_collective

PROFILE = Machine(devices=2).profile()
LARGER = with_every_collective(Machine(devices=4).profile())
GRAPH = perceptron([256, 1000, 256], batch=64)


def answer_of(text: str) -> Estimate:
    return est.estimate(GRAPH, text, profile=PROFILE)


def test_ranges_combine_over_joined_parts() -> None:
    texts = list(expand_pattern("1..2x4:a+1x1..2:b"))
    assert texts == ["1x4:a+1x1:b", "1x4:a+1x2:b", "2x4:a+1x1:b", "2x4:a+1x2:b"]


def test_a_range_may_be_of_gpus_under_a_power_limit() -> None:
    assert list(expand_pattern("1..2x8:h100@500W")) == ["1x8:h100@500W", "2x8:h100@500W"]


@pytest.mark.parametrize("pattern", ["4..2x1:a", "1..99999999x1:a", "1..1000x1..1000:a"])
def test_an_invalid_range_is_refused(pattern: str) -> None:
    with pytest.raises(AllocationError):
        list(expand_pattern(pattern))


def test_rows_that_do_not_exist_keep_their_reason() -> None:
    rows = sweep(("1x1..3:m",), answer_of)
    assert [row.answer is None for row in rows] == [False, False, True]
    assert "has 2" in rows[2].refusal
    assert rows[0].efficiency_ratio == 1.0
    step_ratio = rows[0].answer.step_time_s / rows[1].answer.step_time_s
    assert rows[1].efficiency_ratio == pytest.approx(step_ratio)


def test_a_sweep_of_nothing_that_exists_is_refused() -> None:
    with pytest.raises(AllocationError, match="has 2"):
        sweep(("1x3:m", "1x4:m"), answer_of)


def test_rows_whose_ranks_a_strategy_cannot_divide_keep_their_reason() -> None:
    def hybrid(text: str) -> Estimate:
        return est.estimate(GRAPH, text, profile=LARGER, strategy="fsdp:shard=2")

    rows = sweep(("1x1..4:m",), hybrid)
    assert [row.answer is None for row in rows] == [True, False, True, False]
    assert "do not divide 3" in rows[2].refusal
    with pytest.raises(StrategyError, match="do not divide 1"):
        sweep(("1x1:m", "1x3:m"), hybrid)


def test_csv_has_one_line_an_allocation() -> None:
    lines = sweep_csv(sweep(("1x1..3:m",), answer_of)).splitlines()
    assert lines[0].startswith("allocation,refusal,ranks,step_time_s")
    assert len(lines) == 4


def test_the_first_existing_allocation_stands_for_a_pattern() -> None:
    assert existing(["1..2x1:m"], lambda text: text.startswith("2")) == ["2x1:m"]
    assert existing(["1..2x1:m"], lambda text: False) == ["1x1:m"]


STRATEGIES_GRAPH = perceptron([1000, 2048, 1000], batch=64)
STRATEGIES_PROFILE = Machine(devices=2, network_bytes_per_s=1e8).profile()


def best_strategy(
    allocation: str, strategies: tuple[str, ...], profile: MachineProfile = STRATEGIES_PROFILE
) -> list[SweepRow]:
    return rank_strategies(
        allocation,
        strategies,
        lambda each: est.estimate(STRATEGIES_GRAPH, allocation, strategy=each, profile=profile),
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
    small = tuple(replace(device, memory_bytes=room) for device in STRATEGIES_PROFILE.devices)
    tight = best_strategy(
        "4x1:m", ("ddp", "zero1"), profile=replace(STRATEGIES_PROFILE, devices=small)
    )
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
    assert STRATEGIES_PROFILE.network
    rows = best_strategy("1x2:m", ("ddp", "ps:1"))
    # Two workers share 1e8 B/s: 16.4 MB of gradients each way take over 0.3 s.
    slow = next(row.answer for row in rows if str(row.strategy) == "ps:1")
    assert slow.breakdown.communication_exposed_s > 0.2
    with pytest.raises(ProfileError, match="no network"):
        best_strategy("1x2:m", ("ps:1",), profile=replace(STRATEGIES_PROFILE, network=()))


SCALING_GRAPH = perceptron([1000, 2048, 1000], batch=512)
MACHINE = Machine(devices=1, latency_s=1e-6, network_latency_s=1e-6, network_bytes_per_s=1e8)


def test_the_needed_bandwidth_gives_the_wanted_efficiency() -> None:
    answer = est.estimate(SCALING_GRAPH, "4x1:m", profile=MACHINE.profile())
    found = scaling_of(answer)
    assert found.efficiency_ratio < 0.9
    assert found.link == "the network of 'synthetic'"
    assert found.link_bytes_per_s == 1e8
    enough = replace(MACHINE, network_bytes_per_s=found.needed_bytes_per_s).profile()
    again = scaling_of(est.estimate(SCALING_GRAPH, "4x1:m", profile=enough))
    assert again.efficiency_ratio == pytest.approx(0.9, rel=1e-3)


def test_where_latency_holds_a_job_back_no_bandwidth_is_named() -> None:
    slow = replace(MACHINE, network_latency_s=0.5).profile()
    found = scaling_of(est.estimate(SCALING_GRAPH, "4x1:m", profile=slow))
    assert found.needed_bytes_per_s is None


def test_ranks_of_one_node_have_no_bottleneck_link() -> None:
    profile = Machine(devices=2).profile()
    found = scaling_of(est.estimate(SCALING_GRAPH, "1x2:m", profile=profile))
    assert found.link == ""
    assert found.needed_bytes_per_s is None
    assert found.efficiency_ratio < 1


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_a_sharded_update_does_not_scale_better_than_linearly(strategy: str) -> None:
    alone_is_all = replace(MACHINE, network_latency_s=1e-9, network_bytes_per_s=1e14)
    profile = with_every_collective(alone_is_all.profile())
    graph = perceptron([1000, 2048, 1000], batch=4)
    asked: dict[str, Any] = {"profile": profile, "strategy": strategy}
    alone, four = (est.estimate(graph, text, **asked) for text in ("1x1:m", "4x1:m"))
    # The update, 12 ms of it a rank's share, is most of a device's step of 4 samples.
    assert alone.step_time_s > four.step_time_s
    # Launching takes 10 µs on every rank, the rest is divided by four.
    update_s = alone.breakdown.update_s
    linear_s = alone.step_time_s - update_s + 1e-5 + (update_s - 1e-5) / 4
    found = scaling_of(four)
    assert found.efficiency_ratio == pytest.approx(linear_s / four.step_time_s)
    assert 0.5 < found.efficiency_ratio < 1
    rows = sweep(("1x1:m", "4x1:m"), lambda text: est.estimate(graph, text, **asked))
    assert rows[0].efficiency_ratio == 1
    assert rows[1].efficiency_ratio == pytest.approx(found.efficiency_ratio)


def test_nested_groups_scale_against_a_device_that_shares_nothing() -> None:
    profile = with_every_collective(replace(MACHINE, devices=2).profile())
    found = est.estimate(SCALING_GRAPH, "2x2:m", strategy="fsdp:shard=2", profile=profile)
    alone = est.estimate(SCALING_GRAPH, "1x1:m", profile=profile).breakdown
    # Launching the update takes 10 µs on every rank, the rest is divided by two.
    linear_s = alone.total_s - alone.update_s + 1e-5 + (alone.update_s - 1e-5) / 2
    scaling = scaling_of(found)
    assert scaling.efficiency_ratio == pytest.approx(linear_s / found.step_time_s)
    # Ranks with the same shard form a ring each, so two share the network of a node.
    assert scaling.link == "1/2 of the network of 'synthetic'"
    assert scaling.link_bytes_per_s == 1e8 / 2


class TwiceAsSlow:
    """A calibration by which computing and updating take twice as long everywhere."""

    def coefficients_for(self, questions: Sequence[Any], *_: Any) -> list[Coefficients]:
        return [Coefficients(compute_ratio=2.0, update_ratio=2.0) for _ in questions]


def test_a_calibrated_answer_is_compared_with_a_calibrated_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESTIMATOR_HOME", str(tmp_path))
    MACHINE.profile().save(tmp_path / "machines" / "m.json")
    request = Request(model="m", calibration=TwiceAsSlow())
    alone, four = (request.estimate(SCALING_GRAPH, text) for text in ("1x1:m", "4x1:m"))
    found = scaling_of(four)
    assert found.against == "1x1:m"
    assert found.efficiency_ratio == pytest.approx(alone.step_time_s / four.step_time_s)
    rows = sweep(("1x1:m", "4x1:m"), lambda text: request.estimate(SCALING_GRAPH, text))
    assert rows[1].efficiency_ratio == pytest.approx(found.efficiency_ratio)


SIZE = 25 * 2**20


def matrix(
    rates: np.ndarray, latency_s: float = 1e-4, hosts: list[str] | None = None
) -> PairMatrix:
    names = hosts or [f"h{index}" for index in range(len(rates))]

    def rows(values: np.ndarray) -> tuple[tuple[float | None, ...], ...]:
        return tuple(
            tuple(None if i == j else float(value) for j, value in enumerate(row))
            for i, row in enumerate(values)
        )

    return PairMatrix(
        hosts=tuple(names),
        latency_s=rows(np.full(rates.shape, latency_s)),
        bandwidth_bytes_per_s=rows(rates),
        provenance=CHOSEN,
    )


def test_eight_hosts_are_ordered_as_the_best_of_all_orders_for_each_algorithm() -> None:
    orders = np.array([[0, *rest] for rest in permutations(range(1, 8))])
    for seed in range(40):
        pairs = matrix(10 ** np.random.default_rng(seed).uniform(7, 9, (8, 8)))
        hops = hop_seconds(pairs, SIZE)
        assert not np.allclose(hops, hops.T)
        best = hops[orders, np.roll(orders, -1, axis=1)].max(axis=1).min()
        assert rank_order(pairs, size_bytes=SIZE).ring_s == best
    # Two rounds of halves: each rank and its neighbour, then the one after; both ways, there and
    # back. Only links within {a, c} and {b, d} are fast: these are to be neighbours.
    rates = np.full((4, 4), 1e8)
    rates[[0, 2, 1, 3], [2, 0, 3, 1]] = 1e9
    asked: dict[str, Any] = {"size_bytes": 8e8, "algorithm": "halving-doubling", "limit_s": 0.1}
    found = rank_order(matrix(rates, latency_s=1e-9, hosts=[*"abcd"]), **asked)
    # 2 * 4e8 bytes at 1e9, then 2 * 2e8 at 1e8; in the order given 8 s, then 0.4 s.
    assert (found.ring_s, found.given_s) == (pytest.approx(0.8 + 4.0), pytest.approx(8.0 + 0.4))
    tree = rank_order(pairs, size_bytes=SIZE, algorithm="tree", limit_s=0.5)
    assert tree.ring_s < tree.given_s


# Every host has two fast links on the ring; decoys are about two more that lead astray.
@pytest.mark.parametrize(("hosts", "most", "decoys"), [(64, 2e7, 0.0), (48, 4e8, 1 / 48)])
def test_a_fast_ring_hidden_among_many_hosts_is_found(
    hosts: int, most: float, decoys: float
) -> None:
    generator = np.random.default_rng(1)
    rates = generator.uniform(1e7, most, (hosts, hosts))
    fast = generator.random((hosts, hosts)) < decoys
    rates[fast | fast.T] = 1e9
    ring = generator.permutation(hosts)
    rates[ring, np.roll(ring, -1)] = rates[np.roll(ring, -1), ring] = 1e9
    found = rank_order(matrix(rates), size_bytes=SIZE, limit_s=4.0)
    # 2 (n - 1) rounds of latency, and the bytes.
    rounds = 2 * (hosts - 1)
    assert found.ring_s == pytest.approx(rounds * 1e-4 + rounds / hosts * SIZE / 1e9)
    assert found.given_s > (10 * found.ring_s if not decoys else found.ring_s)


def test_racks_are_visited_one_after_the_other_and_beat_random_orders_by_two() -> None:
    # 4 racks of 4 nodes; an uplink carries a quarter of what its nodes send: oversubscribed 4:1.
    # One flow at a time no link is slower than another: only the cluster file tells.
    rate = 1e9 / 8
    switches = {f"r{r}": Switch(parent="spine", uplink_bytes_per_s=rate) for r in range(4)}
    nodes = {
        f"r{r}n{n}": Node(machine="m", switch=f"r{r}", uplink_bytes_per_s=rate)
        for r in range(4)
        for n in range(4)
    }
    cluster = Cluster(nodes=nodes, switches={"spine": Switch(), **switches})
    hosts = list(np.random.default_rng(3).permutation(list(nodes)))
    pairs = matrix(np.full((16, 16), cluster.payload_bytes_per_s(rate)), hosts=hosts)

    def pace(order: list[str]) -> float:
        placed = place("+".join(f"{h}[0]" for h in order), cluster=cluster, profile=profile)
        return whole_group(placed).bytes_per_s

    profile = Machine(devices=1).profile()
    found = rank_order(pairs, cluster=cluster, limit_s=0.5)
    assert pace(list(found.hosts)) == pytest.approx(cluster.payload_bytes_per_s(rate))
    generator = np.random.default_rng(4)
    random = [pace(list(generator.permutation(hosts))) for _ in range(20)]
    assert pace(list(found.hosts)) >= 2 * float(np.median(random))


def test_flows_that_leave_a_rack_share_its_uplink_in_the_seconds_of_a_ring() -> None:
    switches = {"r0": Switch(parent="s", uplink_bytes_per_s=1e8), "s": Switch()}
    nodes = {f"h{n}": Node(machine="m", switch="r0" if n < 2 else "s") for n in range(4)}
    cluster = Cluster(nodes=nodes, switches=switches)
    pairs = matrix(np.full((4, 4), 1e8), latency_s=1e-9)
    hops = hop_seconds(pairs, SIZE)
    uplinks = shared_uplinks(pairs.hosts, SIZE, cluster)
    # 6/4 of the bytes over 1448/1514 of the line, for each of the flows out of r0.
    alone_s = 1.5 * SIZE / (1e8 * 1448 / 1514)
    assert ring_seconds(hops, np.array([0, 1, 2, 3]), uplinks) == pytest.approx(alone_s)
    assert ring_seconds(hops, np.array([0, 2, 1, 3]), uplinks) == pytest.approx(2 * alone_s)


def test_a_pair_that_was_not_measured_is_named() -> None:
    rates = np.full((3, 3), 1e8)
    rates[0, 1] = rates[1, 0] = np.nan
    rows = tuple(
        tuple(None if i == j or np.isnan(v) else float(v) for j, v in enumerate(row))
        for i, row in enumerate(rates)
    )
    pairs = PairMatrix(
        hosts=("a", "b", "c"), latency_s=rows, bandwidth_bytes_per_s=rows, provenance=CHOSEN
    )
    with pytest.raises(ProfileError, match="between 'a' and 'b'"):
        rank_order(pairs)


def test_links_are_read_from_a_file_and_the_order_written(tmp_path: Path, command: Command) -> None:
    links = tmp_path / "links.csv"
    rates = {"ab": "1GB/s", "bc": "10GB/s", "ca": "10GB/s", "ac": "1GB/s", "cb": "10GB/s"}
    rows = [f"{one},{other},{rate},5us" for (one, other), rate in rates.items()]
    links.write_text("\n".join(["from,to,bandwidth,latency", *rows, "b,a,10GB/s,5us"]))
    hosts, ranks = tmp_path / "hosts", tmp_path / "ranks"
    asked = ("--size", "1GB", "--devices", 2, "--hostfile", hosts, "--rankfile", ranks, "--json")
    found = command("order", links, *asked).content
    # The ring a, c, b has a slow hop from a to c, a, b, c one from a to b: 4/3 of 1 GB at 1 GB/s.
    assert found["ring_s"] == pytest.approx(4 * 5e-6 + 4 / 3)
    order = found["hosts"]
    assert hosts.read_text() == "".join(f"{host} slots=2\n" for host in order)
    assert ranks.read_text().splitlines()[:3] == [
        f"rank 0={order[0]} slot=0",
        f"rank 1={order[0]} slot=1",
        f"rank 2={order[1]} slot=0",
    ]
    assert "as fast as in the order given" in command("order", links).out
    links.write_text("from,to,bandwidth\na,b,fast")
    assert "line 2: 'fast' is not a rate" in command("order", links).sentence
