"""A ring inside a node crosses the links that join as many devices as take part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from estimator.machines.catalogue import load_profile
from estimator.machines.profile import Device, Link, MachineProfile, Provenance
from estimator.placement.mesh import ProcessGroup
from estimator.timeline.collectives.algorithms import (
    LinksByDevices,
    links_over,
    pace_of,
    widest_link,
)
from estimator.timeline.collectives.costs import GroupCollective

MEASURED = Provenance(source="measured")


def link(kind: str, rate: float, ring_devices: int | None = None) -> Link:
    return Link(
        kind=kind,  # type: ignore[arg-type]
        latency_s=1e-6,
        bandwidth_bytes_per_s=rate,
        ring_devices=ring_devices,
        provenance=MEASURED,
    )


def machine(*links: Link, capability: str = "8.6") -> MachineProfile:
    devices = tuple(
        Device(
            kind="cuda",
            index=index,
            name="card",
            memory_bytes=1 << 34,
            details={"compute_capability": capability},
        )
        for index in range(8)
    )
    return MachineProfile(name="box", devices=devices, links=links, provenance=MEASURED)


BRIDGED = machine(link("pcie", 10e9), link("pcie", 20e9, 4), link("nvlink", 50e9, 2))


def all_reduce_s(profile: MachineProfile, ranks: int, size: float) -> float:
    group = ProcessGroup(ranks=ranks, nodes=1, per_node=ranks)
    found = GroupCollective.of(profile, "all_reduce", group)
    return found.time_s(size)


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
    assert (
        GroupCollective.of(bare, "all_reduce", ProcessGroup(ranks=2, nodes=1, per_node=2)) is None
    )


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


def test_without_peer_to_peer_eight_devices_are_no_faster_than_four() -> None:
    profile = load_profile("rtx-3090")
    assert all_reduce_s(profile, 8, 25e6) >= all_reduce_s(profile, 4, 25e6)


def test_the_hybrid_cube_mesh_gives_pairs_one_link_and_all_six() -> None:
    profile = load_profile("dgx-1")
    pair, whole = (widest_link(profile, used) for used in (2, 8))
    assert whole.bandwidth_bytes_per_s == 6 * pair.bandwidth_bytes_per_s


def test_a_profile_of_an_earlier_version_has_one_class_of_links() -> None:
    plain = replace(BRIDGED, links=(link("nvlink", 100e9),))
    assert all_reduce_s(plain, 8, 1e9) > all_reduce_s(plain, 2, 1e9)
