"""What is read of a CUDA device, from a runtime and a driver that the test makes up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from estimator.machines.profile import Device
from estimator.probe.devices.accelerator import device_facts, half_attention, sustained_facts
from estimator.probe.devices.backend import CpuBackend
from estimator.probe.findings import Findings


class FakeNvml:
    """One GPU at 1.7 GHz and 650 W, found by its UUID only."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    nvmlClocksThrottleReasonSwPowerCap = 4

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetClockInfo(self, handle: str, domain: int) -> int:
        assert handle == "GPU-abc"
        return {1: 1700, 2: 2600}[domain]

    def nvmlDeviceGetPowerUsage(self, _handle: str) -> int:
        return 650_000  # milliwatts

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _handle: str) -> int:
        return 4


class FakeTorch:
    """torch, but for its CUDA runtime."""

    bfloat16, nn = torch.bfloat16, torch.nn
    version = SimpleNamespace(cuda="13.0")
    backends = SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 91900))
    cuda = SimpleNamespace(
        get_device_properties=lambda _index: SimpleNamespace(
            multi_processor_count=132, L2_cache_size=50 << 20, major=9, minor=0, uuid="abc"
        ),
        nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
    )

    def randn(self, *_shape: int, device: Any = None, dtype: Any = None) -> Any:
        return torch.ones(2, 2)

    def mm(self, left: Any, right: Any) -> Any:
        return torch.mm(left, right)


def test_the_runtime_is_asked_for_what_a_device_is() -> None:
    facts = device_facts(FakeTorch(), 0)
    assert facts["sm_count"] == 132
    assert facts["l2_cache_bytes"] == 52_428_800
    assert facts["compute_capability"] == "9.0"
    assert facts["nccl_version"] == "2.28.9"


def test_clocks_and_power_are_read_at_work_from_the_gpu_that_torch_uses() -> None:
    found = sustained_facts(FakeTorch(), CpuBackend(), seconds=0.0, nvml=FakeNvml())
    assert found["sm_clock_mhz_at_work"] == 1700
    assert found["power_draw_w_at_work"] == 650.0
    assert found["throttle_reasons_at_work"] == "SwPowerCap"


def test_the_operator_of_attention_is_the_one_that_is_dispatched() -> None:
    found = half_attention(torch, torch.device("cpu"))
    assert found == "aten._scaled_dot_product_flash_attention_for_cpu.default"


def test_all_devices_get_the_facts_and_the_first_what_it_ran_at() -> None:
    devices = [
        Device(kind="cuda", index=n, name="gpu", memory_bytes=1, details={"pcie_width": 16})
        for n in range(2)
    ]
    findings = Findings(at="2026-01-01")
    findings.take("device", {"facts": {"sm_count": 132}})
    findings.take("device", {"sustained": {"power_draw_w_at_work": 650.0}})
    first, second = findings.described(devices)
    assert first.details == {"pcie_width": 16, "sm_count": 132, "power_draw_w_at_work": 650.0}
    assert second.details == {"pcie_width": 16, "sm_count": 132}
