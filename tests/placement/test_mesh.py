"""Ranks as coordinates, and the process groups along each axis, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import estimator as est
from estimator.errors import StrategyError
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import MachineProfile
from estimator.placement.mesh import Mesh, groups_along
from estimator.placement.placement import place
from estimator.placement.topology import Cluster, Node, Switch, network_in_cluster, network_of
from estimator.workload.layouts import DATA_PARALLEL, Layout
from estimator.workload.strategies import Strategy
from tests.synthetic import Machine, perceptron

RATE = 1e8  # of a node's network
# TCP with timestamps at MTU 1500: 1448 bytes of payload in 1514 on the wire.
TCP = 1448 / 1514
_MACHINES = ("h100-p5", "a100-p4d", "v100-nd-v2")


def mesh(text: str, strategy: str, cluster: Cluster | None = None) -> Mesh:
    profile = Machine(devices=8, network_bytes_per_s=RATE).profile()
    placement = place(text, cluster=cluster, profile=profile)
    return Mesh.laid_out(placement, DATA_PARALLEL, Strategy.parse(strategy))


def test_the_last_axis_counts_fastest() -> None:
    placement = place("2x8:m", profile=Machine(devices=8).profile())
    both = Mesh(placement=placement, layout=Layout(tp=2), dp_replicate=2, dp_shard=4)
    assert both.shape == (1, 2, 4, 1, 2)
    assert both.members("tp")[:2].tolist() == [[0, 1], [2, 3]]
    assert both.members("dp_replicate")[:2].tolist() == [[0, 8], [1, 9]]
    assert both.members("dp")[1].tolist() == [1, 3, 5, 7, 9, 11, 13, 15]


def test_ddp_replicates_and_fsdp_shards_all_ranks() -> None:
    assert mesh("2x4:m", "ddp").shape == (1, 8, 1, 1, 1)
    assert mesh("2x4:m", "fsdp").shape == (1, 1, 8, 1, 1)
    assert mesh("2x4:m", "fsdp:shard=4").shape == (1, 2, 4, 1, 1)


def test_shards_inside_nodes_leave_one_flow_of_each_rank_between_them() -> None:
    hybrid = mesh("2x4:m", "fsdp:shard=4")
    ((inside, _),) = hybrid.groups("dp_shard")
    assert (inside.ranks, inside.nodes, inside.per_node) == (4, 1, 4)
    # Four rings of two ranks leave each node at once.
    ((between, _),) = hybrid.groups("dp_replicate")
    assert (between.ranks, between.nodes, between.per_node) == (2, 2, 1)
    assert between.bytes_per_s == pytest.approx(RATE / 4)
    assert between.link == "1/4 of the network of 'synthetic'"


def test_shards_over_two_nodes_are_one_ring_of_each_pair_of_them() -> None:
    hybrid = mesh("4x2:m", "fsdp:shard=4")
    ((across, _),) = hybrid.groups("dp_shard")
    assert (across.ranks, across.nodes, across.per_node) == (4, 2, 2)
    assert across.bytes_per_s == pytest.approx(RATE)
    # Ranks 0 and 4 are on the first and the third node, 1 and 5 as well: two flows leave each.
    ((between, _),) = hybrid.groups("dp_replicate")
    assert between.bytes_per_s == pytest.approx(RATE / 2)


def test_groups_that_cut_through_a_node_share_its_network() -> None:
    # Three nodes of two ranks in groups of three: 0, 1, 2 and 3, 4, 5. The middle node is in both.
    ((cut, _),) = mesh("3x2:m", "fsdp:shard=3").groups("dp_shard")
    assert (cut.ranks, cut.nodes, cut.per_node) == (3, 2, 2)
    assert cut.bytes_per_s == pytest.approx(RATE / 2)


def test_groups_of_two_racks_share_the_uplink_between_them() -> None:
    gbit = 1e9 / 8
    switches = {
        "spine": Switch(),
        "r1": Switch(parent="spine", uplink_bytes_per_s=gbit),
        "r2": Switch(parent="spine", uplink_bytes_per_s=gbit),
    }
    nodes = {
        name: Node(machine="m", switch="r1" if name < "c" else "r2", uplink_bytes_per_s=4 * gbit)
        for name in "abcd"
    }
    cluster = Cluster(nodes=nodes, switches=switches)
    # Replicates a-c and b-d both cross the racks: each gets half of an uplink.
    hybrid = mesh("a[0]+b[0]+c[0]+d[0]", "fsdp:shard=2", cluster)
    ((between, _),) = hybrid.groups("dp_replicate")
    assert between.bytes_per_s == pytest.approx(gbit / 2 * TCP)
    assert between.link.startswith("1/2 of the uplink of switch 'r")
    # Shards stay in their racks.
    ((inside, _),) = hybrid.groups("dp_shard")
    assert inside.bytes_per_s == pytest.approx(4 * gbit * TCP)


def test_axes_that_do_not_multiply_to_the_ranks_are_refused() -> None:
    placement = place("1x4:m", profile=Machine().profile())
    with pytest.raises(StrategyError, match="multiply to 6 ranks, but '1x4:m' has 4"):
        Mesh(placement=placement, layout=Layout(tp=2), dp_replicate=3)


def test_the_global_batch_counts_data_parallel_ranks_and_micro_batches() -> None:
    placement = place("1x4:m+1x2:m", profile=Machine().profile())
    both = Mesh(placement=placement, dp_replicate=6, micro_batches=5)
    assert both.global_batch((8, 8)) == 8 * 6 * 5
    assert both.global_batch((8, 2)) == (4 * 8 + 2 * 2) * 5


def test_experts_divide_the_ranks_of_shards_and_contexts() -> None:
    eight = place("1x8:m", profile=Machine(devices=8).profile())
    shared = Mesh(placement=eight, layout=Layout(cp=2, ep=8), dp_shard=4)
    assert shared.members("ep").tolist() == [list(range(8))]
    four = place("1x4:m", profile=Machine().profile())
    with pytest.raises(StrategyError, match="ep=3 does not divide the 4 ranks"):
        Mesh(placement=four, layout=Layout(ep=3), dp_shard=4)


@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from((1, 2, 4)), st.sampled_from(_MACHINES)),
        min_size=1,
        max_size=3,
    ),
    data=st.data(),
)
@settings(deadline=None)  # The first one loads machines.
def test_groups_that_are_alike_are_followed_once(
    shapes: list[tuple[int, int, str]], data: st.DataObject
) -> None:
    placement = place("+".join(f"{n}x{g}:{name}" for n, g, name in shapes))
    sizes = [size for size in range(1, placement.ranks + 1) if placement.ranks % size == 0]
    size, ranks = data.draw(st.sampled_from(sizes)), np.arange(placement.ranks)
    strided = data.draw(st.booleans())
    members = ranks.reshape(size, -1).T if strided else ranks.reshape(-1, size)
    # Without nodes' names all that counts is which of them are one, and what leaves each.
    found = groups_along(placement, members)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("estimator.placement.mesh._unlike", lambda node, *_: list(range(len(node))))
        every = groups_along(placement, members)
    assert [(group, group.link, kind) for group, kind in found] == [
        (group, group.link, kind) for group, kind in every
    ]


GBIT = 1e9 / 8
# TCP with timestamps at MTU 1500: 1448 bytes of payload in 1514 on the wire.


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


def test_several_flows_at_once_that_older_probes_measured_count_for_nothing() -> None:
    box = load_profile("dgx-h100")
    (link,) = box.network
    faster = replace(link, flows=2, bandwidth_bytes_per_s=2 * link.bandwidth_bytes_per_s)
    older = replace(box, network=(faster, link))
    assert network_of(MachineProfile.from_dict(older.to_dict())) == network_of(box)


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
    step = perceptron([512, 512], target="cuda")
    answer = est.estimate(step, "2x1:dgx-h100")
    assert any("1 rank on a node of 'dgx-h100' uses 1 of its 8" in a for a in answer.assumptions)
