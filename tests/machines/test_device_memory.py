"""Drivers, contexts, communicators and allocators keep a part of a device's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

import estimator as est
from estimator.machines.catalogue import load_profile
from estimator.machines.profile import MachineProfile
from estimator.machines.typical import FRAGMENTATION_RATIO, DeviceMemory, device_memory
from tests.synthetic import perceptron

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
