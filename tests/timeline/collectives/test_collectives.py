"""Collective costs from measured points."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from estimator.cache import Cache
from estimator.errors import AllocationError
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import (
    CollectiveCost,
    CollectiveName,
    Device,
    Link,
    MachineProfile,
    OverlapCost,
    PairMatrix,
    Provenance,
)
from estimator.machines.typical import achieved_bytes_per_s
from estimator.placement.mesh import ProcessGroup, groups_along, ring_between, whole_group
from estimator.placement.placement import place
from estimator.placement.topology import Cluster, Node, Switch
from estimator.timeline.collectives.algorithms import (
    LinksByDevices,
    links_over,
    pace_of,
    widest_link,
)
from estimator.timeline.collectives.costs import GroupCollective, monotone
from estimator.timeline.collectives.overlap import OverlapCosts
from tests.synthetic import CHOSEN, Machine

MEASURED = Provenance(source="measured", relative_error=0.05)


def one_node(ranks: int) -> ProcessGroup:
    return ProcessGroup(ranks=ranks, nodes=1, per_node=ranks)


def _profile(*points: tuple[float, float]) -> MachineProfile:
    cost = CollectiveCost(
        op="all_reduce",
        backend="gloo",
        group_size=2,
        points=points,
        latency_s=1e-4,
        bandwidth_bytes_per_s=1e9,
        provenance=MEASURED,
    )
    device = Device(kind="cpu", index=0, name="c", memory_bytes=1 << 30)
    return MachineProfile(name="m", devices=(device,), collectives=(cost,), provenance=MEASURED)


@pytest.mark.parametrize(
    ("points", "size", "expected_s", "rel"),
    [
        pytest.param([(1e3, 1e-4), (1e6, 1e-3)], 1e6, 1e-3, 1e-6, id="a measured size"),
        # The fit says 0.11 ms and 1.1 ms where 0.1 ms and 10 ms were measured; at 1e5 it says
        # 0.2 ms, corrected between on logarithms.
        pytest.param(
            [(1e4, 1e-4), (1e6, 1e-2)],
            1e5,
            2e-4 * math.sqrt((0.1 / 0.11) * (10 / 1.1)),
            1e-6,
            id="between two sizes",
        ),
        # The formula says 1.1 ms for 1 MB; a latency that was measured too long is no rate.
        pytest.param([(1e3, 1e-9), (1e6, 1e-3)], 4e6, 4e-3, 1e-2, id="beyond the largest"),
        pytest.param([(1e3, 1e-9), (1e6, 1e-3)], 1e9, 1.0, 1e-2, id="far beyond the largest"),
        # 1 GB/s: 4 MB take 4 ms more than 4 kB, whatever the slope of two latencies.
        pytest.param(
            [(1e3, 2e-3), (4e3, 2.1e-3)],
            4**5 * 4e3,
            2.1e-3 + (4**5 - 1) * 4e-6,
            1e-9,
            id="beyond points of mere latency",
        ),
    ],
)
def test_a_size_takes_what_was_measured_about_it(
    points: list[tuple[float, float]], size: float, expected_s: float, rel: float
) -> None:
    model = GroupCollective.of(_profile(*points), "all_reduce", one_node(2))
    assert model.time_s(size) == pytest.approx(expected_s, rel=rel)


def test_a_smaller_message_never_takes_longer_than_a_larger_one() -> None:
    assert monotone([(4, 2.0), (1, 3.0), (8, 5.0)]) == ((1, 2.0), (4, 2.0), (8, 5.0))


def test_two_collectives_at_once_tell_how_much_of_one_is_latency() -> None:
    # Two of 1 kB take 1.4 ms where one takes 1 ms: 0.6 ms of each pass beside the other.
    profile = _profile((1e3, 1e-3), (1e6, 4e-3))
    cost = replace(profile.collectives[0], pair_ratio=((1e3, 1.4), (1e6, 1.9)))
    model = GroupCollective.of(replace(profile, collectives=(cost,)), "all_reduce", one_node(2))
    found = model.corrections.latency_at(np.array([1e3, 1e6]))
    assert found == pytest.approx([0.5, 0.6 / 4])  # two threads: never more than half


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter"])
def test_an_unmeasured_group_is_scaled_as_a_ring_of_all_reduces(op: CollectiveName) -> None:
    # 2 → 4 ranks: bytes on the wire 1 → 1.5 buffers, rounds of latency 2 → 6. For a reduce-scatter
    # gloo runs an all-reduce: not 3 times the bytes.
    model = GroupCollective.of(_profile((1e8, 0.1001)), op, one_node(4))
    assert model.source == "fitted"
    assert model.time_s(1e8) == pytest.approx(6 / 2 * 1e-4 + 0.1 * 1.5)


def test_a_hop_that_was_timed_too_long_takes_nothing_off_a_slower_link() -> None:
    # Messages say 3 ms a hop; two ranks at 1 GB/s took 0.4 ms and 1 ns for each byte.
    profile = over_network(hop_s=3e-3, points=tuple((s, 4e-4 + s * 1e-9) for s in (1e3, 1e6, 4e6)))
    slower = ProcessGroup(ranks=2, nodes=2, per_node=1, bytes_per_s=0.25e9, latency_s=3e-3)
    model = GroupCollective.of(profile, "all_reduce", slower)
    for size in (1e3, 1e6, 4e6, 25e6):
        assert model.time_s(size) == pytest.approx(4e-4 + size * 4e-9, rel=1e-9)
    # 2 → 4 ranks: 1 → 1.5 buffers on the wire, 2 → 6 rounds of what they took, not of the hops.
    more = replace(slower, ranks=4, nodes=4)
    model = GroupCollective.of(profile, "all_reduce", more)
    assert model.time_s(4e6) == pytest.approx(3 * 4e-4 + 1.5 * 4e6 * 4e-9, rel=1e-9)


def test_waiting_that_passes_while_links_are_busy_takes_nothing_off_slower_ones() -> None:
    # A small call waits 4 ms; 16 MB over 1 GB/s take 17 ms, so that 1 ms of them is waiting.
    profile = over_network(hop_s=2e-3, points=((1e3, 4e-3), (16e6, 17e-3)))
    slower = ProcessGroup(ranks=2, nodes=2, per_node=1, bytes_per_s=0.25e9, latency_s=2e-3)
    model = GroupCollective.of(profile, "all_reduce", slower)
    assert model.time_s(16e6) == pytest.approx(1e-3 + 16e6 * 4e-9)


def test_what_gloo_takes_beside_sending_is_no_longer_over_a_slower_link() -> None:
    # A byte over 1 GB/s takes 1 ns; a small call waits 0.4 ms, and 4, 8 and 16 MB take 1, 2 and
    # 4 ms more than sending does.
    points = ((1e3, 0.401e-3), (4e6, 5e-3), (8e6, 10e-3), (16e6, 20e-3))
    slower = ProcessGroup(ranks=2, nodes=2, per_node=1, bytes_per_s=0.25e9, latency_s=2e-4)
    model = GroupCollective.of(over_network(hop_s=2e-4, points=points), "all_reduce", slower)
    assert model is not None
    for size, beside_s in ((1e3, 0.4e-3), (4e6, 1e-3), (12e6, 3e-3), (16e6, 4e-3)):
        assert model.time_s(size) == pytest.approx(beside_s + size * 4e-9)


def test_groups_that_share_an_uplink_fill_what_one_leaves_of_it() -> None:
    # Alone two ranks keep their links of 1 GB/s busy for 2/3 of an all-gather, and all the time in
    # an all-reduce. From two nodes two such groups at once have twice the bytes on each uplink.
    profile = over_network(hop_s=0.0, points=((1e6, 1e-3), (64e6, 64e-3)))
    reduced = profile.collectives[0]
    gathered = replace(reduced, op="all_gather", points=((1e6, 0.75e-3), (64e6, 48e-3)))
    devices = tuple(replace(profile.devices[0], index=index) for index in range(2))
    profile = replace(profile, devices=devices, collectives=(reduced, gathered))
    nodes = Cluster(
        nodes={name: Node(machine="m", switch="s") for name in "ab"}, switches={"s": Switch()}
    )
    placed = place("a[0]+b[0]+a[1]+b[1]", cluster=nodes, profile=profile)
    ((group, _),) = groups_along(placed, np.array([[0, 1], [2, 3]]))
    assert (group.bytes_per_s, group.sharing_ratio) == (0.5e9, 2.0)
    for op, one_s, both_s in (("all_reduce", 64e-3, 128e-3), ("all_gather", 48e-3, 64e-3)):
        alone = replace(group, bytes_per_s=1e9, sharing_ratio=1.0)
        assert GroupCollective.of(profile, op, alone).time_s(64e6) == pytest.approx(one_s)
        assert GroupCollective.of(profile, op, group).time_s(64e6) == pytest.approx(both_s)


def test_a_measured_group_had_hops_as_long_as_others_of_its_cluster() -> None:
    # Between racks a hop takes 2 ms, within one 0.1 ms; a group of both takes what it took.
    profile = over_network(hop_s=1e-4, points=((1e3, 8e-3), (1e6, 2.1e-2)))
    far = replace(profile.network[0], locality="cluster", latency_s=2e-3)
    cost = replace(profile.collectives[0], group_size=4, nodes=4, hosts=("a1", "a2", "b1", "b2"))
    profile = replace(profile, network=(*profile.network, far), collectives=(cost,))
    group = whole_group(
        place("+".join(f"{host}[0]" for host in cost.hosts), cluster=cluster(), profile=profile)
    )
    model = GroupCollective.of(profile, "all_reduce", group, cluster=cluster())
    assert [model.time_s(size) for size, _ in cost.points] == pytest.approx([8e-3, 2.1e-2])


def over_network(hop_s: float, points: tuple[tuple[float, float], ...]) -> MachineProfile:
    """One device a node, at 1 GB/s; what all-reduces over two nodes take."""
    profile = _profile(*points)
    link = Link(
        kind="tcp",
        locality="rack",
        latency_s=hop_s,
        bandwidth_bytes_per_s=1e9,
        provenance=MEASURED,
    )
    cost = replace(profile.collectives[0], nodes=2)
    return replace(profile, network=(link,), collectives=(cost,))


def test_what_was_never_measured_has_no_cost() -> None:
    assert GroupCollective.of(_profile((1e6, 1e-3)), "broadcast", one_node(2)) is None


def test_a_reduce_scatter_that_was_measured_over_the_group_is_believed() -> None:
    profile = _profile((1e6, 1e-3))
    own = replace(profile.collectives[0], op="reduce_scatter", points=((1e6, 1.2e-3),))
    known = replace(profile, collectives=(*profile.collectives, own))
    model = GroupCollective.of(known, "reduce_scatter", one_node(2))
    assert model.time_s(1e6) == pytest.approx(1.2e-3)


KIB, MIB = 1 << 10, 1 << 20


def beside(size_bytes: int, in_flight: int, exposed: float, slowdown: float) -> OverlapCost:
    return OverlapCost(
        compute="compute_bound",
        backend="gloo",
        group_size=2,
        size_bytes=size_bytes * in_flight,
        in_flight=in_flight,
        exposed_ratio=exposed,
        collective_slowdown_ratio=slowdown,
        provenance=CHOSEN,
    )


# All-reduces of 1 ms and a second per GB, measured beside compute at 64 KiB, 8 at once, and 16 MiB.
PROFILE = replace(
    Machine(devices=2, latency_s=1e-3, bandwidth_bytes_per_s=1e9).profile(),
    overlaps=(beside(64 * KIB, 8, 0.3, 1.0), beside(16 * MIB, 1, 0.7, 2.0)),
)


def ratios(*sizes_bytes: float) -> tuple[float, float]:
    costs = OverlapCosts([PROFILE], np.array(sizes_bytes), Cache(limit_bytes=0))
    found = costs.overlap(one_node(2), 1.0)
    return float(found.exposed_ratio), float(found.slowdown)


@pytest.mark.parametrize(
    ("size_bytes", "exposed", "slowdown"),
    [
        (1 * KIB, 0.3, 1.0),
        (64 * KIB, 0.3, 1.0),
        # Halfway by the logarithm.
        (1 * MIB, 0.5, 1.5),
        (16 * MIB, 0.7, 2.0),
        (64 * MIB, 0.7, 2.0),
    ],
)
def test_each_size_is_between_those_measured(
    size_bytes: int, exposed: float, slowdown: float
) -> None:
    assert ratios(size_bytes) == pytest.approx((exposed, slowdown))


def test_collectives_of_unlike_sizes_count_by_their_time() -> None:
    # 1 ms + 0.066 ms and 1 ms + 16.8 ms.
    small_s, large_s = 1e-3 + 64 * KIB / 1e9, 1e-3 + 16 * MIB / 1e9
    expected = (0.3 * small_s + 0.7 * large_s) / (small_s + large_s)
    assert ratios(64 * KIB, 16 * MIB)[0] == pytest.approx(expected)


def test_a_step_without_collectives_has_some_overlap() -> None:
    assert ratios(0.0) == pytest.approx((0.7, 2.0))


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
    # Both flows of a ring that zigzags, and those of two groups, have it together.
    rate, link = ring("a1[0]+a2[0]+a1[1]+a2[1]", cluster(), profile)
    assert (rate, link) == (2.5e7, "1/2 of the link between 'a1' and 'a2'")
    placed = place("a1[0]+a2[0]+a1[1]+a2[1]", cluster=cluster(), profile=profile)
    ((group, _),) = groups_along(placed, np.array([[0, 1], [2, 3]]))
    assert (group.bytes_per_s, group.sharing_ratio) == (2.5e7, 2.0)


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


def link(kind: str, rate: float, ring_devices: int | None = None) -> Link:
    return Link(
        kind=kind,  # type: ignore[arg-type]
        latency_s=1e-6,
        bandwidth_bytes_per_s=rate,
        ring_devices=ring_devices,
        provenance=CHOSEN,
    )


def machine(*links: Link, capability: str = "8.6") -> MachineProfile:
    details = {"compute_capability": capability}
    card = Device(kind="cuda", index=0, name="card", memory_bytes=1 << 34, details=details)
    devices = tuple(replace(card, index=index) for index in range(8))
    return MachineProfile(name="box", devices=devices, links=links, provenance=CHOSEN)


BRIDGED = machine(link("pcie", 10e9), link("pcie", 20e9, 4), link("nvlink", 50e9, 2))


def all_reduce_s(profile: MachineProfile, ranks: int, size: float) -> float:
    return GroupCollective.of(profile, "all_reduce", one_node(ranks)).time_s(size)


def test_a_bridge_joins_two_a_socket_four_and_the_rest_cross_sockets() -> None:
    rates = [widest_link(BRIDGED, used).bandwidth_bytes_per_s for used in range(2, 9)]  # type: ignore[union-attr]
    assert rates == [50e9, 20e9, 20e9, 10e9, 10e9, 10e9, 10e9]


def test_the_slowest_hop_sets_the_pace_of_large_messages() -> None:
    # 2 · 7/8 of 1 GB over 10 GB/s; 2 · 1/2 of it over the bridge.
    assert 0.175 < all_reduce_s(BRIDGED, 8, 1e9) < 0.18
    assert 0.02 < all_reduce_s(BRIDGED, 2, 1e9) < 0.021


def test_a_node_without_links_is_unknown() -> None:
    bare = machine()
    assert widest_link(bare, 2) is None
    assert GroupCollective.of(bare, "all_reduce", one_node(2)) is None


def test_rows_find_the_links_that_each_would_find_alone() -> None:
    found = [[widest_link(BRIDGED, used) for used in range(9)]]
    table = LinksByDevices([[links_over(BRIDGED, each) for each in found[0]]])
    used = np.array([2, 3, 8, 12])
    rows = table.at(np.zeros(4, dtype=np.intp), used)
    alone = [table.at(0, int(each)) for each in used]
    assert rows.bytes_per_s.tolist() == [each.bytes_per_s for each in alone]


def test_hops_over_nvlink_are_short_only_since_ampere() -> None:
    nvlink = link("nvlink", 100e9)
    assert pace_of(machine(nvlink, capability="8.0"), nvlink) == "quick"
    assert pace_of(machine(nvlink, capability="7.0"), nvlink) == "slow"
    assert pace_of(machine(nvlink), link("pcie", 10e9)) == "slow"


def test_the_hybrid_cube_mesh_gives_pairs_one_link_and_all_six() -> None:
    profile = load_profile("dgx-1")
    pair, whole = (widest_link(profile, used) for used in (2, 8))
    assert whole.bandwidth_bytes_per_s == 6 * pair.bandwidth_bytes_per_s


def test_a_profile_of_an_earlier_version_has_one_class_of_links() -> None:
    plain = replace(BRIDGED, links=(link("nvlink", 100e9),))
    assert all_reduce_s(plain, 8, 1e9) > all_reduce_s(plain, 2, 1e9)


def test_four_k80s_share_a_port_through_host_memory() -> None:
    profile = load_profile("k80-p2")
    links = [widest_link(profile, devices) for devices in (2, 8, 16)]
    rates = [achieved_bytes_per_s(link) for link in links if link is not None]
    # 16 lanes of 8 GT/s, 128 bits in 130: 15.75 GB/s, of which NCCL gets 12, halved on a board.
    port = 16 * 8e9 * 128 / 130 / 8 * 0.76
    assert rates == pytest.approx([port / 2, port / 4, port / 4], rel=1e-3)
