"""What some ranks of a node get of its network cards, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import estimator as est
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import MachineProfile
from estimator.placement.placement import place
from estimator.placement.topology import Cluster, Node, network_in_cluster, network_of
from tests.synthetic import perceptron

GBIT = 1e9 / 8
# TCP with timestamps at MTU 1500: 1448 bytes of payload in 1514 on the wire.
TCP = 1448 / 1514


def sent(name: str, ranks: int) -> float:
    network = network_of(load_profile(name))
    return network.sent_bytes_per_s(ranks)


@pytest.mark.parametrize(
    ("name", "ranks", "gbits"),
    # InfiniBand gives 0.93 of a line rate, EFA 0.8 and RoCE 0.9 (sources: machines/typical.py).
    [
        ("dgx-h100", 1, 0.93 * 400),  # eight cards for eight GPUs: each its own
        ("dgx-h100", 3, 0.93 * 3 * 400),
        ("dgx-h100", 8, 0.93 * 8 * 400),
        ("dgx-2", 1, 0.93 * 100),  # eight cards for sixteen GPUs: two share one
        ("dgx-2", 2, 0.93 * 100),
        ("dgx-2", 3, 0.93 * 200),
        ("h100-p5", 1, 0.8 * 4 * 100),  # thirty-two cards for eight GPUs: four each
        ("gtx-1080-roce", 1, 0.9 * 40),  # one card for all
        ("gtx-1080-roce", 4, 0.9 * 40),
    ],
)
def test_ranks_of_a_node_use_the_cards_nearest_to_them(name: str, ranks: int, gbits: float) -> None:
    assert sent(name, ranks) == pytest.approx(gbits * GBIT)


def on_tcp(uplink_bytes_per_s: float | None) -> Cluster:
    nodes = {name: Node(machine="m", uplink_bytes_per_s=uplink_bytes_per_s) for name in ("a", "b")}
    return Cluster(nodes=nodes)


@pytest.mark.parametrize(
    ("uplink", "ranks", "gbits"),
    [
        (3200, 1, 400),  # as the datasheet: one card of eight
        (1600, 8, 1600),  # half of the cards plugged in
        (100, 1, 100),  # one thinner card
        (6400, 1, 800),  # faster cards than the datasheet knows of
    ],
)
def test_an_uplink_is_what_all_cards_give_together(uplink: int, ranks: int, gbits: int) -> None:
    cluster = on_tcp(uplink * GBIT)
    network = network_in_cluster(load_profile("dgx-h100"), cluster, "a")
    assert network.sent_bytes_per_s(ranks) == pytest.approx(TCP * gbits * GBIT)


def test_a_measured_flow_is_what_any_number_of_ranks_gets(small_profile: MachineProfile) -> None:
    (link,) = load_profile("dgx-h100").network
    measured = replace(link, provenance=replace(link.provenance, source="measured"))
    network = network_of(replace(load_profile("dgx-h100"), network=(measured,)))
    assert network.sent_bytes_per_s(1) == network.sent_bytes_per_s(8) == 8 * 400 * GBIT
    assert network_of(replace(small_profile, network=())) is None


def test_a_host_that_comes_twice_shares_the_cards_of_both_its_ranks() -> None:
    cluster = on_tcp(3200 * GBIT)
    profile = load_profile("dgx-h100")
    (kind,) = place("a[0]+b[0]+a[1]+b[1]", cluster=cluster, profile=profile).kinds
    assert kind.nic_bytes_per_s == pytest.approx(TCP * 800 * GBIT)


@given(st.sampled_from(["dgx-h100", "dgx-2", "h100-p5", "a100-p4d", "gb200"]), st.data())
def test_more_ranks_never_get_less_of_the_network(name: str, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, len(load_profile(name).devices) - 1))
    assert sent(name, ranks) <= sent(name, ranks + 1)


def test_an_estimate_says_how_many_cards_it_counts_on() -> None:
    step = replace(perceptron([512, 512]), target="cuda")
    answer = est.estimate(step, "2x1:dgx-h100")
    assert any("1 rank on a node of 'dgx-h100' uses 1 of its 8" in a for a in answer.assumptions)
