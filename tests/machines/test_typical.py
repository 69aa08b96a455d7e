"""A machine known by its datasheet gets usual costs; one that was measured keeps its own.

Architectures are data: checked when read, and what a device does not say is assumed aloud. Drivers,
contexts, communicators and allocators keep a part of a device's memory.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import estimator as est
from estimator.errors import ProfileError
from estimator.kernels.datasheet_model import assumed_of, chip_of
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import Device, Link, LinkKind, MachineProfile, Provenance
from estimator.machines.typical import (
    FRAGMENTATION_RATIO,
    DeviceMemory,
    achieved_bytes_per_s,
    architectures,
    device_memory,
    is_known_by_datasheet,
    read_architectures,
    with_typical_costs,
)
from estimator.placement.placement import nic_of
from tests.synthetic import perceptron

DATASHEET = Provenance(source="datasheet")


def unknown_gpu(**details: Any) -> Device:
    return Device(
        kind="cuda",
        index=0,
        name="a GPU",
        memory_bytes=1 << 34,
        memory_bandwidth_bytes_per_s=1e12,
        peak_flops_per_s={"float32": 1e13, "bfloat16": 1e14},
        details=details,
    )


def machine() -> MachineProfile:
    """A GPU of 1 TB/s and 100 TFLOP/s of which nothing was measured."""
    return MachineProfile(name="card", devices=(unknown_gpu(),), provenance=DATASHEET)


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


ROW: dict[str, Any] = {
    "process_nm": 2,
    "tensor_cores": "asynchronous",
    "flops_per_clock": {"float32": 256},
    "source": "a whitepaper, 2027",
}


def test_every_architecture_names_its_source() -> None:
    assert all(re.search(r"20\d\d", each.source) for each in architectures().values())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"process_nm": 0}, "process_nm must be positive, found 0"),
        ({"tensor_cores": "many"}, "tensor_cores is 'many'"),
        ({"flops_per_clock": {"float32": -1}}, r"flops_per_clock\[float32\] must be positive"),
        ({"nvlinks": 4}, "go together"),
        ({"source": ""}, "source is empty"),
        ({"tensor_core": "none"}, "tensor_core"),
    ],
)
def test_an_architecture_that_cannot_be_is_refused_by_name(
    wrong: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "architectures.json"
    path.write_text(json.dumps({"good": ROW, "bad": ROW | wrong}), encoding="utf-8")
    with pytest.raises(ProfileError, match=f"bad: .*{said}"):
        read_architectures(path)


def test_what_a_chip_does_not_say_is_taken_of_v100_and_listed() -> None:
    device = unknown_gpu()
    assert assumed_of(device) == [
        "80 multiprocessors",
        "a power limit of 300 W",
        "a boost clock of 1.5 GHz",
        "a process of 5 nm and today's tensor cores",
    ]
    chip = chip_of(device, "bfloat16")
    assert chip.multiprocessors == 80
    # 300 W over 100 TFLOP/s are 3 pJ a flop, at 1.5 GHz.
    assert chip.headroom == pytest.approx(3.0 / 1.5)
    assert chip.process_ratio == pytest.approx(5 / 12)
    assert chip.is_tensor
    assert not chip.is_early_tensor


def test_a_device_that_says_all_has_nothing_assumed() -> None:
    device = unknown_gpu(
        architecture="gp100", sm_count=56, power_w=300, boost_clock_hz=1_480_000_000
    )
    assert assumed_of(device) == []
    assert chip_of(device, "float32").process_ratio == pytest.approx(16 / 12)


def test_a_device_without_memory_bandwidth_is_refused() -> None:
    device = replace(unknown_gpu(), memory_bandwidth_bytes_per_s=None)
    with pytest.raises(ProfileError, match="'a GPU' has no memory_bandwidth_bytes_per_s"):
        chip_of(device, "float32")


def test_an_estimate_lists_what_it_assumed_of_a_chip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESTIMATOR_HOME", str(tmp_path))
    profile = replace(load_profile("t4"), name="riddle", devices=(unknown_gpu(sm_count=40),))
    profile.save(tmp_path / "machines" / "riddle.json")
    graph = replace(perceptron([64, 64]), target="cuda")
    (text,) = (
        each for each in est.estimate(graph, "1x1:riddle").assumptions if "asks of a chip" in each
    )
    assert text == (
        "'riddle' does not say all that the kernel model asks of a chip: a power limit of 300 W, a "
        "boost clock of 1.5 GHz, a process of 5 nm and today's tensor cores assumed"
    )


GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "seen_gib"),
    [("a100-sxm-80gb", 79.25), ("a100-sxm-40gb", 39.5), ("rtx-3090", 23.7), ("rtx-2080-ti", 10.76)],
)
def test_torch_sees_less_than_the_box_says(name: str, seen_gib: float) -> None:
    # "total capacity" of CUDA's out-of-memory messages; sources in the module.
    capacity = device_memory(load_profile(name), 0).capacity_bytes / GIB
    assert capacity == pytest.approx(seen_gib, rel=0.01)


def test_tensors_share_with_all_that_is_kept() -> None:
    kept = DeviceMemory(
        capacity_bytes=1000,
        context_bytes=100,
        communicators_bytes=150,
        workspaces_bytes=50,
        fragmentation_ratio=0.25,
    )
    assert kept.usable_bytes == 560  # (1000 − 300) / 1.25


def test_every_communicator_keeps_its_buffers_and_pcie_keeps_fewer() -> None:
    nvlink, pcie = load_profile("a100-sxm-80gb"), load_profile("l40s")
    one, two = device_memory(nvlink, 1), device_memory(nvlink, 2)
    assert one.communicators_bytes == 688 * 10**6  # NVIDIA/nccl, issue 964
    assert two.communicators_bytes == 2 * one.communicators_bytes
    assert device_memory(nvlink, 0).communicators_bytes == 0
    assert 0 < device_memory(pcie, 1).communicators_bytes < one.communicators_bytes


def test_a_core_group_keeps_nothing(small_profile: MachineProfile) -> None:
    found = device_memory(small_profile, 1)
    assert found.usable_bytes == small_profile.devices[0].memory_bytes


def test_a_measured_device_has_what_was_measured() -> None:
    profile = load_profile("a100-sxm-80gb")
    probed = replace(profile, provenance=replace(profile.provenance, source="measured"))
    assert device_memory(probed, 0).capacity_bytes == profile.devices[0].memory_bytes


def test_an_estimate_says_by_how_much_it_fits() -> None:
    graph = replace(perceptron([512, 512, 512]), target="cuda")
    answer = est.estimate(graph, "1x8:a100-sxm-80gb")
    device = answer.device_memory
    assert device.communicators_bytes > 0
    assert answer.spare_memory_bytes == device.usable_bytes - answer.peak_memory_bytes
    alone = est.estimate(graph, "1x1:a100-sxm-80gb")
    assert alone.device_memory.communicators_bytes == 0
    assert answer.to_dict()["device_memory"]["fragmentation_ratio"] == FRAGMENTATION_RATIO
