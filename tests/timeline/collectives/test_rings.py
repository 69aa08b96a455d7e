"""The hop that sets the pace of a ring, worked out by hand on small clusters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.errors import AllocationError
from estimator.machines.profile import MachineProfile, PairMatrix
from estimator.placement.mesh import ring_between, whole_group
from estimator.placement.placement import place
from estimator.placement.topology import Cluster, Node, Switch
from tests.synthetic import CHOSEN, Machine

# TCP with timestamps at MTU 1500: 1448 bytes of payload in 1514 on the wire.
TCP = 1448 / 1514
GBIT = 1e9 / 8


def cluster(uplink: float = 4 * GBIT, **slow: float) -> Cluster:
    """Two racks, each of two nodes at 1 Gbit/s under an uplink."""
    switches = {
        "spine": Switch(),
        "r1": Switch(parent="spine", uplink_bytes_per_s=uplink),
        "r2": Switch(parent="spine", uplink_bytes_per_s=uplink),
    }
    nodes = {
        name: Node(
            machine="m",
            switch="r1" if name.startswith("a") else "r2",
            uplink_bytes_per_s=slow.get(name, GBIT),
        )
        for name in ("a1", "a2", "b1", "b2")
    }
    return Cluster(nodes=nodes, switches=switches)


def ring(text: str, cluster: Cluster, profile: MachineProfile | None = None) -> tuple[float, str]:
    found = whole_group(place(text, cluster=cluster, profile=profile or Machine().profile()))
    return found.bytes_per_s, found.link


def test_the_slowest_uplink_sets_the_pace() -> None:
    rate, link = ring("a1[0]+a2[0]+b1[0]", cluster(a2=0.5 * GBIT))
    assert rate == pytest.approx(0.5 * GBIT * TCP)
    assert link == "the uplink of node 'a2'"


def test_ranks_of_one_node_in_a_row_are_one_flow_and_scattered_ones_share_its_uplink() -> None:
    assert ring("a1[0,1]+a2[0,1]", cluster())[0] == pytest.approx(GBIT * TCP)
    assert ring("a1[0]+a2[0]+a1[1]+a2[1]", cluster())[0] == pytest.approx(GBIT * TCP / 2)


def test_a_ring_that_zigzags_between_racks_divides_their_uplink() -> None:
    thin = cluster(uplink=0.8 * GBIT)
    # In order of racks one flow leaves each; zigzagging, two do.
    rate, link = ring("a1[0]+a2[0]+b1[0]+b2[0]", thin)
    assert rate == pytest.approx(0.8 * GBIT * TCP)
    assert link.startswith("the uplink of switch")
    assert ring("a1[0]+b1[0]+a2[0]+b2[0]", thin)[0] == pytest.approx(0.4 * GBIT * TCP)


def test_a_measured_pair_slower_than_its_uplinks_wins() -> None:
    pairs = PairMatrix(
        hosts=("a1", "a2"),
        latency_s=((None, 1e-4), (1e-4, None)),
        bandwidth_bytes_per_s=((None, 5e7), (6e7, None)),
        provenance=CHOSEN,
    )
    profile = replace(Machine().profile(), pairs=pairs)
    rate, link = ring("a1[0]+a2[0]", cluster(), profile)
    assert rate == 5e7
    assert link == "the link between 'a1' and 'a2'"


def test_counted_groups_take_free_nodes_in_the_order_of_the_file() -> None:
    placed = place("a1[0]+2x1:m", cluster=cluster(), profile=Machine().profile())
    assert [node_group.host for node_group in placed.node_groups] == ["a1", "a2", "b1"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("z9[0]", "no node 'z9'"),
        ("a1[10]", "has no device 10"),
        ("5x1:m", "asks for 5 free nodes"),
        ("a1[0]+4x1:m", "asks for 4 free nodes"),
        ("1x1:unknown", "asks for 1 free nodes of 'unknown'"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused(text: str, words: str) -> None:
    with pytest.raises(AllocationError, match=words):
        place(text, cluster=cluster(), profile=Machine(devices=10).profile())


def test_a_named_host_needs_a_cluster_file() -> None:
    with pytest.raises(AllocationError, match="--cluster"):
        place("a1[0]")


def test_a_measured_group_had_the_uplinks_of_the_racks_it_ran_on() -> None:
    thin, hosts = cluster(uplink=0.5 * GBIT), ("a1", "b1", "a2", "b2")
    group = replace(Machine().profile().collectives[0], group_size=4, nodes=4, hosts=hosts)
    # Zigzagging, two of its flows leave each rack.
    profile = Machine().profile()
    assert ring_between(group, 0.0, GBIT, profile, thin).bytes_per_s == pytest.approx(
        0.25 * GBIT * TCP
    )
    elsewhere = replace(group, hosts=("x1", "x2", "x3", "x4"))
    assert ring_between(elsewhere, 0.0, GBIT, profile, thin).bytes_per_s == GBIT
