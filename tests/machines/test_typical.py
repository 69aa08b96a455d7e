"""A machine known by its datasheet gets usual costs; one that was measured keeps its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.machines.profile import Device, Link, LinkKind, MachineProfile, Provenance
from estimator.machines.typical import (
    LINK_RATIOS,
    STREAMED_RATIO,
    achieved_bytes_per_s,
    is_known_by_datasheet,
    with_typical_costs,
)
from estimator.placement.placement import nic_of

DATASHEET = Provenance(source="datasheet")


def machine() -> MachineProfile:
    """A GPU of 1 TB/s and 100 TFLOP/s of which nothing was measured."""
    device = Device(
        kind="cuda",
        index=0,
        name="card",
        memory_bytes=1 << 34,
        memory_bandwidth_bytes_per_s=1e12,
        peak_flops_per_s={"float32": 1e13, "bfloat16": 1e14},
    )
    return MachineProfile(name="card", devices=(device,), provenance=DATASHEET)


def link(kind: LinkKind, provenance: Provenance) -> Link:
    return Link(kind=kind, latency_s=1e-6, bandwidth_bytes_per_s=1e10, provenance=provenance)


def test_a_line_rate_gives_its_usual_share_and_a_measured_rate_all_of_it() -> None:
    measured = Provenance(source="measured")
    for kind, ratio in LINK_RATIOS.items():
        assert 0 < ratio < 1
        assert achieved_bytes_per_s(link(kind, DATASHEET)) == ratio * 1e10
        assert achieved_bytes_per_s(link(kind, measured)) == 1e10


def test_a_nodes_network_by_its_datasheet_is_less_than_its_line_rate() -> None:
    found = nic_of(replace(machine(), network=(link("infiniband", DATASHEET),)), 1)
    assert found == LINK_RATIOS["infiniband"] * 1e10


def test_an_update_moves_the_bytes_of_its_foreach_kernels() -> None:
    (adamw,) = [u for u in with_typical_costs(machine()).updates if u.optimizer == "adamw"]
    # mul 8, lerp 12, mul 8, addcmul 12, sqrt 8, div 8, add 8, addcdiv 16: 80 bytes a parameter
    assert adamw.per_parameter_s == pytest.approx(80 / (STREAMED_RATIO * 1e12))
    assert adamw.provenance.source == "datasheet"


def test_a_measured_machine_is_left_as_it_is(small_profile: MachineProfile) -> None:
    assert not is_known_by_datasheet(small_profile)
    assert with_typical_costs(small_profile) is small_profile


def test_measured_host_costs_stay_where_only_kernels_are_missing(
    small_profile: MachineProfile,
) -> None:
    found = with_typical_costs(replace(machine(), host=small_profile.host))
    assert found.host is small_profile.host
    assert found.updates
