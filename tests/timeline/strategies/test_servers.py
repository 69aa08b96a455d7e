"""Parameter servers: where they stand, what a node adds up first, in which units they have tensors.

Expected seconds are worked out by hand from bytes over links, as in BytePS (OSDI 2020).
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import estimator as est
from estimator.advise.scaling import rank_strategies
from estimator.cache import Cache
from estimator.estimates.estimate import Estimate
from estimator.machines.profile import Link, MachineProfile
from estimator.placement.mesh import ProcessGroup
from estimator.timeline.rank.rules import StepShape
from estimator.timeline.strategies import rules_of
from estimator.workload.strategies import Strategy
from tests.synthetic import CHOSEN, Machine, perceptron

# Two tensors of 8,192,000 bytes.
GRAPH = perceptron([1000, 2048, 1000], batch=64)
SIZE = 4 * 2 * 2048 * 1000
RATE, LATENCY_S = 1e8, 2e-4
PROFILE = Machine(devices=4, network_bytes_per_s=RATE, network_latency_s=LATENCY_S).profile()


def line(strategy: str, nodes: int, per_node: int, profile: MachineProfile = PROFILE) -> Any:
    """Seconds of a byte in the queue, and of the last ones, as the strategy's rules have them."""
    shape = StepShape(Strategy.parse(strategy), 1)
    rules = rules_of(GRAPH, shape, Cache(1 << 20))
    costs = rules.network([profile], None).reduce
    group = ProcessGroup(
        ranks=nodes * per_node,
        nodes=nodes,
        per_node=per_node,
        bytes_per_s=RATE,
        latency_s=LATENCY_S,
    )
    (queued,), (last,) = costs.model(group).lines, costs.last(group).lines
    return queued.beta_s_per_byte, last.beta_s_per_byte


def test_servers_elsewhere_take_all_pushes_and_a_node_those_of_its_ranks() -> None:
    # Eight ranks push to two servers: four times a byte each; a node sends twice a byte.
    assert line("ps:2", 4, 2) == pytest.approx((4 / RATE, 4 / RATE))
    # Eight servers: now the node's own two.
    assert line("ps:8", 4, 2) == pytest.approx((2 / RATE, 2 / RATE))
    # One worker pushes alone where they do not wait for each other.
    assert line("ps:2,async", 4, 2) == pytest.approx((2 / RATE, 2 / RATE))


def test_a_node_that_adds_up_first_pushes_once() -> None:
    queued_s, last_s = line("ps:2,local", 4, 2)
    # Four nodes push to two servers: twice a byte each.
    assert queued_s == pytest.approx(2 / RATE)
    # Then the bytes come back, and the node spreads them.
    assert last_s > 2 / RATE


@pytest.mark.parametrize(("nodes", "servers"), [(4, 1), (4, 2), (4, 3), (8, 5), (4, 4), (4, 9)])
def test_servers_beside_workers_share_the_load_by_the_formula_of_byteps(
    nodes: int, servers: int
) -> None:
    # Section 4.1: 2 n (n − 1) / (n² + k n − 2 k) of all bytes over each link, and no less than one.
    n, k = nodes, servers
    byteps = max(2 * n * (n - 1) / (n * n + k * n - 2 * k), 1.0)
    queued_s, _ = line(f"ps:{servers},beside,local,sum", nodes, 1)
    assert queued_s == pytest.approx(byteps / RATE)


def test_servers_beside_workers_alone_send_as_much_as_a_ring() -> None:
    # Each node pushes 3/4 of its bytes and serves 3/4 of them: 2 (n − 1) / n.
    assert line("ps:beside,sum", 4, 1)[0] == pytest.approx(1.5 / RATE)
    # Two ranks of a node push twice: 2 · 3/4 and, of 6 pushes of others, a quarter.
    assert line("ps:beside,sum", 4, 2)[0] == pytest.approx(3.0 / RATE)


def test_one_node_needs_no_network_and_its_host_adds_up_and_updates() -> None:
    graph = replace(GRAPH, optimizer="adamw")
    rules = rules_of(graph, StepShape(Strategy.parse("ps:beside"), 1), Cache(1 << 20))
    profile = replace(PROFILE, network=())
    group = ProcessGroup(ranks=4, nodes=1, per_node=4)
    costs = rules.network([profile], None).reduce
    (queued,) = costs.model(group).lines
    # The probe's AdamW took 3 ns a parameter on one of the four devices, in 20 passes over its
    # four bytes; three pushes are added, each in three passes over a byte.
    parameter_s = 3e-9
    byte_s = parameter_s / 4 + 3 * 3 * parameter_s / (20 * 4)
    assert queued.beta_s_per_byte == pytest.approx(byte_s / 4)
    assert queued.alpha_s == 0.0
    assert not costs.model(group).unknown


def test_devices_copy_to_the_host_over_their_own_links() -> None:
    links = tuple(
        Link(kind=kind, latency_s=1e-5, bandwidth_bytes_per_s=5e7, pinned=True, provenance=CHOSEN)
        for kind in ("h2d", "d2h")
    )
    graph = replace(GRAPH, target="cuda")
    profile = replace(PROFILE, links=links)
    found = {}
    for strategy in ("ps:beside,sum", "ps:beside,local,sum"):
        rules = rules_of(graph, StepShape(Strategy.parse(strategy), 1), Cache(1 << 20))
        group = ProcessGroup(ranks=4, nodes=4, per_node=1, bytes_per_s=RATE, latency_s=LATENCY_S)
        (queued,) = rules.network([profile], None).reduce.model(group).lines
        found[strategy] = queued
    # 1 / 5e7 each way, slower than the 1.5 / 1e8 of the network.
    assert found["ps:beside,sum"].beta_s_per_byte == pytest.approx(1 / 5e7)
    assert found["ps:beside,sum"].alpha_s == pytest.approx(2 * LATENCY_S + 2e-5)


def skew(strategy: str, servers: int) -> float:
    rules: Any = rules_of(GRAPH, StepShape(Strategy.parse(strategy), 1), Cache(1 << 20))
    return float(rules.skew(servers))


def test_a_tensor_that_is_not_cut_is_on_one_server() -> None:
    # Two equal tensors on three servers: the fullest has half of all, 1.5 times its share.
    assert skew("ps:3,part=1GB", 3) == pytest.approx(1.5)
    # Cut in fives of 1,638,400 bytes ten units go as 4, 3, 3.
    assert skew("ps:3,part=1638400B", 3) == pytest.approx(1.2)
    assert skew("ps:3", 3) == 1.0
    assert line("ps:3,part=1GB", 6, 1)[0] == pytest.approx(1.5 * 2 / RATE)


def test_many_groups_have_the_skew_of_each() -> None:
    rules: Any = rules_of(GRAPH, StepShape(Strategy.parse("ps:3,part=1GB"), 1), Cache(1 << 20))
    assert rules.skew(np.array([1, 3, 2, 3])).tolist() == pytest.approx([1.0, 1.5, 1.0, 1.5])


def answer(strategy: str, allocation: str = "4x1:m") -> Estimate:
    return est.estimate(GRAPH, allocation, profile=PROFILE, strategy=strategy)


def test_only_the_last_unit_is_waited_for_on_its_way_back() -> None:
    whole, cut = answer("ps:4"), answer("ps:4,part=1638400B")
    # Ten units on four servers go as 3, 3, 2, 2: 1.2 times the share of the fullest.
    assert skew("ps:4,part=1638400B", 4) == pytest.approx(1.2)
    # The workers' own link is as slow as the servers': 1 over RATE, or 1.2. The last bucket, a
    # tensor of 8,192,000 bytes, comes back; or its last unit.
    queued_s = (1.2 - 1.0) / RATE * SIZE
    back_s = (8_192_000 - 1.2 * 1_638_400) / RATE
    gained_s = whole.breakdown.communication_exposed_s - cut.breakdown.communication_exposed_s
    assert gained_s == pytest.approx(back_s - queued_s, rel=0.15)


def played(stages_s: list[float], units: int) -> float:
    """A unit after the other through stages that each work on one: an event simulation."""
    free_s = [0.0] * len(stages_s)
    arrivals = [(0.0, 0, unit) for unit in range(units)]
    heapq.heapify(arrivals)
    end_s = 0.0
    while arrivals:
        at_s, stage, unit = heapq.heappop(arrivals)
        free_s[stage] = max(free_s[stage], at_s) + stages_s[stage]
        end_s = max(end_s, free_s[stage])
        if stage + 1 < len(stages_s):
            heapq.heappush(arrivals, (free_s[stage], stage + 1, unit))
    return end_s


@pytest.mark.parametrize("strategy", ["ps:2", "ps:beside", "ps:2,beside,local"])
def test_units_played_through_push_update_and_pull_end_when_the_formula_says(
    strategy: str,
) -> None:
    queued_s, last_s = line(strategy, 4, 1)
    # Push and pull at the network's rate, and between them what the rest of the last bytes is.
    network_s = (queued_s + last_s) / 2 if strategy == "ps:2" else queued_s
    rest_s = queued_s + last_s - 2 * network_s
    units, unit = 40, SIZE / 40
    stages_s = [stage * unit for stage in (network_s, max(rest_s, 0.0), network_s)]
    expected_s = queued_s * SIZE + last_s * unit
    assert played(stages_s, units) == pytest.approx(expected_s, rel=1e-9)


def test_places_are_ranked_with_where_they_merge_and_update() -> None:
    rows = rank_strategies("4x1:m", ["places"], lambda each: answer(str(each)))
    told = {(row.to_dict()["merged_on"], row.to_dict()["updated_on"]) for row in rows}
    assert told == {
        *(("device", "device"), ("host", "device"), ("host", "host")),
        *(("server", "device"), ("server", "server")),
    }
    for row in rows:
        exposed_s = row.answer.breakdown.communication_exposed_s
        assert row.to_dict()["communication_exposed_s"] == exposed_s
    elsewhere = [str(row.strategy) for row in rows if row.strategy.merged_on == "server"]
    assert sorted(elsewhere) == ["ps:4,local", "ps:4,local,sum"]


def test_a_sweep_lists_places_for_each_allocation() -> None:
    rows = est.sweep(GRAPH, "2,4x1:m", strategies=["places"], profile=PROFILE)
    assert [row.allocation for row in rows] == ["2x1:m"] * 5 + ["4x1:m"] * 5


def test_workers_that_update_hold_the_optimizer_state() -> None:
    adam = replace(GRAPH, optimizer="adamw")

    def memory(strategy: str) -> Any:
        return est.estimate(adam, "4x1:m", profile=PROFILE, strategy=strategy).memory

    assert memory("ps:beside").optimizer_state_bytes == 0
    state = memory("ddp").optimizer_state_bytes
    assert memory("ps:beside,sum").optimizer_state_bytes == state > 0
