"""What the machine is made of, read from a made-up /proc, /sys and NVML."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from estimator.errors import ProbeError
from estimator.machines.profile import Device, MachineProfile, Provenance
from estimator.probe.devices.inventory import (
    Cpu,
    core_groups,
    pinned,
    read_cpu,
    read_gpus,
    usable_threads,
    visible_handles,
)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def two_nodes(root: Path) -> None:
    """Eight hardware threads on four cores (0+4, 1+5, 2+6, 3+7) in two NUMA nodes."""
    write(
        root,
        {
            "proc/cpuinfo": "model name\t: Test CPU\n",
            "proc/meminfo": "MemTotal:       16000000 kB\n",
            "sys/fs/cgroup/memory.max": "max\n",
            "sys/devices/system/node/node0/cpulist": "0-1,4-5\n",
            "sys/devices/system/node/node1/cpulist": "2-3,6-7\n",
            "sys/devices/system/cpu/cpu0/cache/index3/level": "3\n",
            "sys/devices/system/cpu/cpu0/cache/index3/type": "Unified\n",
            "sys/devices/system/cpu/cpu0/cache/index3/size": "32768K\n",
            "sys/devices/system/cpu/cpu0/cache/index3/shared_cpu_list": "0-1,4-5\n",
        },
    )
    for core in range(4):
        for thread in (core, core + 4):
            name = f"sys/devices/system/cpu/cpu{thread}/topology/thread_siblings_list"
            write(root, {name: f"{core},{core + 4}\n"})


def test_one_hardware_thread_per_core_is_used_node_by_node(tmp_path: Path) -> None:
    two_nodes(tmp_path)
    cpu = read_cpu(tmp_path, usable=set(range(8)))
    assert cpu.numa_cores == {0: (0, 1), 1: (2, 3)}
    assert cpu.model == "Test CPU"
    assert cpu.memory_bytes == 16000000 * 1024
    assert cpu.caches == {3: (32 << 20, 4)}


def test_a_process_bound_to_second_threads_uses_those(tmp_path: Path) -> None:
    two_nodes(tmp_path)
    assert read_cpu(tmp_path, usable={5, 7}).numa_cores == {0: (5,), 1: (7,)}


def test_a_memory_limit_below_the_machines_memory_counts(tmp_path: Path) -> None:
    two_nodes(tmp_path)
    write(tmp_path, {"sys/fs/cgroup/memory.max": "1000000\n"})
    assert read_cpu(tmp_path, usable={0}).memory_bytes == 1000000


def cpu_with(numa_cores: dict[int, tuple[int, ...]]) -> Cpu:
    threads = sum(map(len, numa_cores.values()))
    return Cpu(model="Test CPU", threads=threads, numa_cores=numa_cores, memory_bytes=12000)


def test_two_cores_of_one_node_are_two_devices_by_default() -> None:
    groups = core_groups(cpu_with({0: (0, 1)}))
    assert [group.cores for group in groups] == [(0,), (1,)]
    assert [group.memory_bytes for group in groups] == [6000, 6000]


def test_devices_are_whole_numa_nodes_where_there_are_several() -> None:
    groups = core_groups(cpu_with({0: (0, 1, 2), 1: (3, 4, 5), 2: (6, 7, 8)}))
    assert [group.cores for group in groups] == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert [group.numa_node for group in groups] == [0, 1, 2]


def test_devices_are_equal_and_left_over_cores_stay_idle() -> None:
    groups = core_groups(cpu_with({0: (0, 1, 2, 3, 4)}), 2)
    assert [group.cores for group in groups] == [(0, 1), (2, 3)]


def test_a_single_core_is_a_single_device() -> None:
    assert len(core_groups(cpu_with({0: (0,)}))) == 1


def test_more_devices_than_cores_are_refused() -> None:
    with pytest.raises(ProbeError, match="3 devices were asked for, and this machine has 2 usable"):
        core_groups(cpu_with({0: (0, 1)}), 3)


class FakeNvmlError(Exception):
    pass


class NVMLError_DriverNotLoaded(FakeNvmlError):
    pass


class FakeNvml:
    """Two GPUs joined by four NVLinks; the second is throttled by heat."""

    NVMLError = FakeNvmlError
    nvmlClocksThrottleReasonGpuIdle = 1
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonNone = 0

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure

    def nvmlInit(self) -> None:
        if self.failure:
            raise self.failure

    def nvmlShutdown(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.1"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"Test GPU"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=80 << 30)

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 8

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= 4:
            raise FakeNvmlError("no such link")
        return 1

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 70_500

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x41 if handle == 1 else 1

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=-1)]


def test_gpus_carry_bus_links_and_neighbours() -> None:
    first, second = read_gpus(FakeNvml())
    assert (first.kind, first.name, first.memory_bytes) == ("cuda", "Test GPU", 80 << 30)
    assert (first.details["pcie_width"], first.details["pcie_width_most"]) == (8, 16)
    assert first.details["nvlink_links"] == 4
    assert first.details["driver_version"] == "580.1"
    assert first.details["peer_access"] == "1:nvlink"
    assert first.details["power_draw_w"] == 70.5
    assert first.details["other_processes"] == 1
    assert first.details["throttle_reasons"] == ""
    assert second.details["throttle_reasons"] == "HwThermalSlowdown"


def test_a_gpu_hangs_on_the_numa_node_of_its_pci_address(tmp_path: Path) -> None:
    write(tmp_path, {"sys/bus/pci/devices/0000:1b:00.0/numa_node": "1\n"})
    write(tmp_path, {"sys/bus/pci/devices/0000:2b:00.0/numa_node": "-1\n"})

    class OnBus(FakeNvml):
        def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
            return SimpleNamespace(busId=b"00000000:%dB:00.0" % (handle + 1))

    assert [gpu.numa_node for gpu in read_gpus(OnBus(), root=tmp_path)] == [1, None]


class EightGpus(FakeNvml):
    """An H100 box: number 2 has memory errors, 3 is hot, 5 is divided into two instances."""

    def nvmlDeviceGetCount(self) -> int:
        return 8

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return handle if isinstance(handle, str) else f"GPU-{'abcdefgh'[handle]}"

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        return [int(handle == 5)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, number: int) -> str:
        if number >= 2:
            raise FakeNvmlError("not found")
        return f"MIG-{number}"

    def nvmlDeviceIsMigDeviceHandle(self, handle: Any) -> bool:
        return isinstance(handle, str)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: Any) -> int:
        if not isinstance(handle, str):
            raise FakeNvmlError("not an instance")
        return 5

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(total=(10 if isinstance(handle, str) else 80) << 30)

    def nvmlDeviceGetTotalEccErrors(self, handle: int, _kind: int, _counter: int) -> int:
        return 3 if handle == 2 else 0

    def nvmlDeviceGetRemappedRows(self, handle: int) -> list[int]:
        return [0, 1, int(handle == 2), 0]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x41 if handle == 3 else 1

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ["GPU-a", "GPU-b", "GPU-c", "GPU-d", "GPU-e", "GPU-g", "GPU-h"]),
        ("3,1", ["GPU-d", "GPU-b"]),
        ("GPU-h,0", ["GPU-h", "GPU-a"]),
        ("1,9,2", ["GPU-b"]),
        ("-1", []),
        ("", []),
        ("MIG-1", ["MIG-1"]),
        ("5", ["MIG-0"]),
    ],
)
def test_only_gpus_that_cuda_would_show_are_devices(visible: str | None, found: list[str]) -> None:
    nvml = EightGpus()
    handles = visible_handles(nvml, visible)
    assert [nvml.nvmlDeviceGetUUID(handle) for handle in handles] == found
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert len(read_gpus(nvml, environment=environment)) == len(found)


def test_an_instance_of_a_gpu_has_its_own_memory() -> None:
    (instance,) = read_gpus(EightGpus(), environment={"CUDA_VISIBLE_DEVICES": "MIG-1"})
    assert instance.memory_bytes == 10 << 30
    assert instance.details["mig_instance"] is True


def test_what_holds_a_gpu_back_is_said_of_the_profile() -> None:
    profile = MachineProfile(
        name="box",
        devices=read_gpus(EightGpus(), environment={}),
        provenance=Provenance(source="measured"),
    )
    assert [fault for fault in profile.device_faults if "PCIe" not in fault] == [
        "GPU 2 had memory errors that could not be corrected",
        "GPU 2 has memory rows whose replacement is pending",
        "GPU 3 was slowed down by heat",
    ]
    assert "GPU 0 has 8 of 16 PCIe lanes" in profile.device_faults


def test_a_full_power_limit_is_no_fault_and_a_lowered_one_is() -> None:
    def faults(**details: Any) -> tuple[str, ...]:
        gpu = Device(kind="cuda", index=0, name="gpu", memory_bytes=1, details=details)
        provenance = Provenance(source="measured")
        return MachineProfile(name="box", devices=(gpu,), provenance=provenance).device_faults

    usual = {"power_limit_default_w": 700.0, "throttle_reasons_at_work": "SwPowerCap"}
    assert faults(power_limit_w=700.0, **usual) == ()
    assert faults(power_limit_w=500.0, **usual) == (
        "GPU 0 has a power limit of 500 W, where 700 W is usual",
    )
    assert faults(throttle_reasons_at_work="ApplicationsClocksSetting, SwPowerCap") == (
        "GPU 0 ran at clocks that someone has set",
    )


def test_what_a_driver_does_not_answer_is_unknown_not_zero() -> None:
    assert read_gpus(FakeNvml())[0].details["pcie_generation"] is None


def test_no_driver_means_no_gpu() -> None:
    assert read_gpus(FakeNvml(NVMLError_DriverNotLoaded())) == ()


def test_a_broken_driver_is_said_aloud() -> None:
    with pytest.raises(ProbeError, match="does not answer \\(version mismatch\\); run nvidia-smi"):
        read_gpus(FakeNvml(FakeNvmlError("version mismatch")))


def test_cores_and_threads_hold_within_a_block_and_are_as_before_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    before = usable_threads(), torch.get_num_threads(), dict(os.environ)
    core = min(usable_threads())
    with pinned([core], threads=1):
        assert (usable_threads(), torch.get_num_threads()) == ({core}, 1)
        assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "1"
    assert (usable_threads(), torch.get_num_threads(), dict(os.environ)) == before
    with pinned():
        assert (usable_threads(), torch.get_num_threads(), dict(os.environ)) == before
