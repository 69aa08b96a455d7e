"""A machine known by its datasheet gets usual costs; one that was measured keeps its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.machines.catalogue import load_profile
from estimator.machines.profile import Device, Link, LinkKind, MachineProfile, Provenance
from estimator.machines.typical import (
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


@pytest.mark.parametrize(
    ("kind", "ratio"),
    [
        # nccl-tests on 8 A100: 235 of 300 GB/s each way.
        ("nvlink", 0.78),
        ("infinity_fabric", 0.70),
        # Peer copies of 12 to 13 GB/s over the 15.75 of PCIe 3.0 x16.
        ("pcie", 0.76),
        ("infiniband", 0.93),
        ("roce", 0.90),
        ("efa", 0.80),
        ("tcp", 0.75),
    ],
)
def test_a_line_rate_gives_its_usual_share_and_a_measured_rate_all_of_it(
    kind: LinkKind, ratio: float
) -> None:
    assert achieved_bytes_per_s(link(kind, DATASHEET)) == ratio * 1e10
    assert achieved_bytes_per_s(link(kind, Provenance(source="measured"))) == 1e10


def test_a_nodes_network_by_its_datasheet_is_less_than_its_line_rate() -> None:
    found = nic_of(replace(machine(), network=(link("infiniband", DATASHEET),)), 1)
    assert found == 0.93e10


@pytest.mark.parametrize(
    ("optimizer", "moved_bytes", "per_tensor_s"),
    [
        # Bytes of each kernel of the foreach form (torch/optim/adam.py, sgd.py).
        ("adamw", 8 + 12 + 8 + 12 + 8 + 8 + 8 + 16, 1e-5),
        ("adam", 12 + 8 + 12 + 8 + 8 + 8 + 16, 1e-5),
        ("sgd-momentum", 8 + 12 + 12, 3e-6),
        ("sgd", 12, 1e-6),
    ],
)
def test_an_update_moves_the_bytes_of_its_foreach_kernels(
    optimizer: str, moved_bytes: int, per_tensor_s: float
) -> None:
    known = with_typical_costs(machine()).updates
    (cost,) = [u for u in known if (u.optimizer, u.form) == (optimizer, "foreach")]
    # 0.8 of 1 TB/s
    assert cost.per_parameter_s == pytest.approx(moved_bytes / 0.8e12)
    assert (cost.per_tensor_s, cost.launch_s) == (per_tensor_s, 5e-5)
    assert cost.provenance.source == "datasheet"


def test_a_host_typically_issues_60_000_operators_a_second_from_python() -> None:
    host = with_typical_costs(machine()).host
    # An operator, the view before it and what its module's call takes: 8.5, 5 and 3 µs.
    assert host.forward_op_s + host.forward_view_s + host.module_call_s == pytest.approx(1.65e-5)
    assert (host.backward_op_s, host.bare_op_s) == (4.5e-6, 7.5e-6)


def test_the_host_of_a_box_that_is_not_named_is_less_sure_and_its_gpu_says_nothing_of_it() -> None:
    named, bare = load_profile("h100-p5"), load_profile("a100-sxm-80gb")
    assert bare.host is None
    errors = [with_typical_costs(each).host.provenance.relative_error for each in (named, bare)]  # type: ignore[union-attr]
    assert errors == [0.4, 0.6]
    assert with_typical_costs(bare).host.forward_op_s == with_typical_costs(named).host.forward_op_s  # type: ignore[union-attr]


def test_hosts_of_later_pcie_stage_a_larger_share_of_it() -> None:
    # nccl-tests, bus bandwidth of large all-reduces over 8: TITAN RTX 5.3 GB/s, RTX 4090 15.0.
    for rate, measured in ((15.754e9, 5.3e9), (31.508e9, 15.0e9)):
        staged = replace(link("pcie", DATASHEET), bandwidth_bytes_per_s=rate, peer_to_peer=False)
        assert achieved_bytes_per_s(staged) == pytest.approx(measured, rel=0.1)


def test_a_measured_machine_is_left_as_it_is(small_profile: MachineProfile) -> None:
    assert not is_known_by_datasheet(small_profile)
    assert with_typical_costs(small_profile) is small_profile


def test_measured_host_costs_stay_where_only_kernels_are_missing(
    small_profile: MachineProfile,
) -> None:
    found = with_typical_costs(replace(machine(), host=small_profile.host))
    assert found.host is small_profile.host
    assert found.updates
