"""Read what the machine is made of: cores, caches, memory, NUMA nodes, GPUs and their links."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from estimator.errors import ProbeError
from estimator.machines.profile import Device, DeviceKind

Fact = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """The processors this process may use.

    `numa_cores` lists one hardware thread per physical core: numeric kernels gain nothing from a
    second thread on the same core. `caches` are (bytes, hardware threads that share them) of one
    instance, by level.
    """

    model: str
    threads: int
    numa_cores: Mapping[int, tuple[int, ...]]
    memory_bytes: int
    caches: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def cores(self) -> tuple[int, ...]:
        """Every usable physical core, node by node."""
        return tuple(core for node in sorted(self.numa_cores) for core in self.numa_cores[node])

    def facts(self) -> dict[str, Fact]:
        """The same as flat values for a profile."""
        facts: dict[str, Fact] = {
            "cpu": self.model,
            "cores": len(self.cores),
            "threads": self.threads,
            "numa_nodes": len(self.numa_cores),
            "memory_bytes": self.memory_bytes,
        }
        for level, (size, shared_by) in sorted(self.caches.items()):
            facts[f"l{level}_cache_bytes"] = size
            facts[f"l{level}_cache_shared_by_threads"] = shared_by
        return facts


def read_cpu(root: Path = Path("/"), *, usable: set[int] | None = None) -> Cpu:
    """Read /proc and /sys below `root`; `usable` defaults to the cores this process may run on."""
    if usable is None:
        usable = usable_threads()
    info = _read(root / "proc/cpuinfo")
    model = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", info, re.MULTILINE)
    system = root / "sys/devices/system"
    return Cpu(
        model=model.group(1).strip() if model else platform.processor() or platform.machine(),
        threads=len(usable),
        numa_cores=_read_numa(system, usable),
        memory_bytes=_memory_bytes(root),
        caches=_read_caches(system / f"cpu/cpu{min(usable)}/cache"),
    )


def usable_threads() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@contextlib.contextmanager
def pinned(cores: Collection[int] = (), *, threads: int | None = None) -> Iterator[None]:
    """Within the block compute on `cores`, where any are given, and with so many threads.

    So do processes started within it, and libraries loaded within it.
    """
    usable, before = usable_threads(), {name: os.environ.get(name) for name in _THREADS}
    can_pin = bool(cores) and hasattr(os, "sched_setaffinity")
    if can_pin:
        os.sched_setaffinity(0, cores)
    if threads is not None:
        import torch

        known = torch.get_num_threads()
        torch.set_num_threads(threads)
        os.environ.update(dict.fromkeys(_THREADS, str(threads)))
    try:
        yield
    finally:
        if threads is not None:
            torch.set_num_threads(known)
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        if can_pin:
            os.sched_setaffinity(0, usable)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def parse_core_list(text: str) -> tuple[int, ...]:
    """Read the kernel's list of cores.

    >>> parse_core_list("0-2,5")
    (0, 1, 2, 5)
    """
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def _read_caches(folder: Path) -> dict[int, tuple[int, int]]:
    caches: dict[int, tuple[int, int]] = {}
    for entry in sorted(folder.glob("index*")):
        level, size = _read(entry / "level").strip(), _read(entry / "size").strip()
        # The kernel writes all sizes in KiB (drivers/base/cacheinfo.c).
        if _read(entry / "type").strip() != "Instruction" and level.isdigit() and size[-1:] == "K":
            sharing = parse_core_list(_read(entry / "shared_cpu_list"))
            caches[int(level)] = int(size[:-1]) << 10, len(sharing) or 1
    return caches


def _read_numa(system: Path, usable: set[int]) -> dict[int, tuple[int, ...]]:
    siblings = "topology/thread_siblings_list"
    first_threads = {
        min(set(parse_core_list(_read(system / f"cpu/cpu{core}" / siblings))) & usable or {core})
        for core in usable
    }
    nodes: dict[int, tuple[int, ...]] = {}
    for folder in (system / "node").glob("node[0-9]*"):
        members = sorted(set(parse_core_list(_read(folder / "cpulist"))) & first_threads)
        if members:
            nodes[int(folder.name[4:])] = tuple(members)
    placed = {core for members in nodes.values() for core in members}
    if placed != first_threads:
        return {0: tuple(sorted(first_threads))}
    return nodes


def _memory_bytes(root: Path) -> int:
    match = re.search(r"^MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    total = int(match.group(1)) << 10 if match else 1 << 30
    limit = _read(root / "sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() and int(limit) > 0 else total


def core_groups(cpu: Cpu, devices: int | None = None) -> tuple[Device, ...]:
    """Split the cores into equal pinned groups, the devices of a machine without accelerators.

    By default one group per NUMA node, at least two where there are two cores. Raises ProbeError
    where there are fewer cores than groups.
    """
    cores = cpu.cores
    if devices is None:
        devices = max(len(cpu.numa_cores), min(2, len(cores)))
    if not 1 <= devices <= len(cores):
        raise ProbeError(
            f"{devices} devices were asked for, and this machine has {len(cores)} usable cores; "
            f"choose --devices from 1 to {len(cores)}"
        )
    size = len(cores) // devices
    return tuple(
        core_device(
            cpu,
            index,
            cores[index * size : (index + 1) * size],
            memory_bytes=max(1, cpu.memory_bytes // devices),
        )
        for index in range(devices)
    )


def core_device(cpu: Cpu, index: int, cores: tuple[int, ...], *, memory_bytes: int) -> Device:
    """Some cores as one device."""
    nodes = {node for node, members in cpu.numa_cores.items() if set(members) & set(cores)}
    return Device(
        kind="cpu",
        index=index,
        name=f"{cpu.model}, {len(cores)} core{'s' if len(cores) > 1 else ''}",
        memory_bytes=memory_bytes,
        cores=cores,
        numa_node=nodes.pop() if len(nodes) == 1 else None,
    )


def read_gpus(
    nvml: Any = None,
    *,
    environment: Mapping[str, str] | None = None,
    root: Path = Path("/"),
) -> tuple[Device, ...]:
    """The NVIDIA GPUs that torch sees here, in its order; empty where there is no driver.

    CUDA_VISIBLE_DEVICES of the `environment` chooses and orders them. One that is divided into
    MIG instances is left out beside others, and stands for its first instance alone. Raises
    ProbeError where there is a driver and it does not answer.
    """
    nvml = import_module("pynvml") if nvml is None else nvml
    environment = os.environ if environment is None else environment
    try:
        nvml.nvmlInit()
        handles = visible_handles(nvml, environment.get("CUDA_VISIBLE_DEVICES"))
        gpus = tuple(_read_gpu(nvml, index, handles, root) for index in range(len(handles)))
        nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        if type(error).__name__ in ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"):
            return ()
        raise ProbeError(
            f"the NVIDIA driver does not answer ({error}); run nvidia-smi and mend what it reports"
        ) from None
    return gpus


def nvml_answer(nvml: Any, question: str, *arguments: Any) -> Any:
    """One NVML answer, or None where this GPU or driver does not know (NVLink on a PCIe card…)."""
    function = getattr(nvml, question, None)
    if function is None:
        return None
    try:
        answer = function(*arguments)
    except nvml.NVMLError:
        return None
    return answer.decode() if isinstance(answer, bytes) else answer


def visible_handles(nvml: Any, visible: str | None) -> list[Any]:
    """The driver's handles of the GPUs that a value of CUDA_VISIBLE_DEVICES leaves, in its order.

    Its entries are numbers or beginnings of the UUIDs of GPUs or MIG instances; the first that
    names none hides all behind it (CUDA C++ programming guide, environment variables).
    """
    count = nvml.nvmlDeviceGetCount()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    if visible is None:
        whole = [handle for handle in handles if not _has_mig(nvml, handle)]
        return whole or [each for each in handles[:1] for each in _instances(nvml, each)[:1]]
    by_uuid = {nvml_answer(nvml, "nvmlDeviceGetUUID", handle): handle for handle in handles}
    for handle in handles:
        for instance in _instances(nvml, handle):
            by_uuid[nvml_answer(nvml, "nvmlDeviceGetUUID", instance)] = instance
    found: list[Any] = []
    for entry in (each.strip() for each in visible.split(",")):
        if entry.isdecimal() and int(entry) < count:
            handle = handles[int(entry)]
            found += _instances(nvml, handle)[:1] if _has_mig(nvml, handle) else [handle]
            continue
        alike = [each for uuid, each in by_uuid.items() if uuid and uuid.startswith(entry)]
        if not entry or len(alike) != 1:
            break
        found += alike
    return found


def _has_mig(nvml: Any, handle: Any) -> bool:
    modes = nvml_answer(nvml, "nvmlDeviceGetMigMode", handle)
    return bool(modes and modes[0])


def _instances(nvml: Any, handle: Any) -> list[Any]:
    """The MIG instances of a GPU that is divided into them."""
    most = nvml_answer(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0
    if not _has_mig(nvml, handle):
        return []
    found = (
        nvml_answer(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, n) for n in range(most)
    )
    return [each for each in found if each is not None]


def _numa_node(nvml: Any, handle: Any, root: Path) -> int | None:
    """The node that a GPU hangs on, by its PCI address; the driver itself knows it on few hosts."""
    bus = nvml_answer(nvml, "nvmlDeviceGetPciInfo", handle)
    address = getattr(bus, "busId", b"")
    address = address.decode() if isinstance(address, bytes) else str(address)
    # NVML writes the PCI domain in eight digits, the kernel in four.
    text = _read(root / f"sys/bus/pci/devices/{address.lower()[-12:]}/numa_node").strip()
    if not text:
        text = str(nvml_answer(nvml, "nvmlDeviceGetNumaNodeId", handle))
    return int(text) if text.isdecimal() else None


def _read_gpu(nvml: Any, index: int, handles: list[Any], root: Path) -> Device:
    handle = handles[index]
    name = nvml.nvmlDeviceGetName(handle)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    # What an instance shares with the others of its GPU, the driver tells of the GPU alone.
    whole = nvml_answer(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
    is_instance = whole is not None and bool(
        nvml_answer(nvml, "nvmlDeviceIsMigDeviceHandle", handle)
    )
    whole = whole if is_instance else handle
    return Device(
        kind="cuda",
        index=index,
        name=name.decode() if isinstance(name, bytes) else name,
        memory_bytes=int(memory.total),
        numa_node=_numa_node(nvml, whole, root),
        details={
            **_bus_facts(nvml, whole),
            **clock_facts(nvml, whole),
            **_peer_facts(nvml, index, handles),
            **_error_facts(nvml, whole),
            "nvlink_links": _nvlinks(nvml, whole),
            "other_processes": _other_processes(nvml, handle),
            "mig_instance": is_instance,
            "driver_version": nvml_answer(nvml, "nvmlSystemGetDriverVersion"),
        },
    )


def _bus_facts(nvml: Any, handle: Any) -> dict[str, Fact]:
    return {
        f"pcie_{what.lower()}{ending}": nvml_answer(
            nvml, f"nvmlDeviceGet{of}PcieLink{what}", handle
        )
        for what in ("Generation", "Width")
        for ending, of in (("", "Curr"), ("_most", "Max"))
    }


def _error_facts(nvml: Any, handle: Any) -> dict[str, Fact]:
    """Whether memory is corrected, what could not be since the driver was loaded, and what waits
    for a reset to be replaced."""
    modes = nvml_answer(nvml, "nvmlDeviceGetEccMode", handle)
    # NVML_MEMORY_ERROR_TYPE_UNCORRECTED is 1, NVML_VOLATILE_ECC 0.
    uncorrected = nvml_answer(nvml, "nvmlDeviceGetTotalEccErrors", handle, 1, 0)
    rows = nvml_answer(nvml, "nvmlDeviceGetRemappedRows", handle)
    return {
        "ecc": bool(modes[0]) if modes else None,
        "ecc_uncorrected_errors": uncorrected,
        # (corrected, uncorrected, whether one is pending, whether one failed)
        "row_remapping": None
        if rows is None
        else "failed"
        if rows[3]
        else "pending"
        if rows[2]
        else "",
    }


def clock_facts(nvml: Any, handle: Any) -> dict[str, Fact]:
    """Clocks, power and what holds them back, at this moment."""
    streaming = getattr(nvml, "NVML_CLOCK_SM", 1)
    memory = getattr(nvml, "NVML_CLOCK_MEM", 2)
    power = nvml_answer(nvml, "nvmlDeviceGetPowerUsage", handle)
    limit = nvml_answer(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle)
    usual = nvml_answer(nvml, "nvmlDeviceGetPowerManagementDefaultLimit", handle)
    return {
        "sm_clock_mhz": nvml_answer(nvml, "nvmlDeviceGetClockInfo", handle, streaming),
        "sm_clock_most_mhz": nvml_answer(nvml, "nvmlDeviceGetMaxClockInfo", handle, streaming),
        "memory_clock_mhz": nvml_answer(nvml, "nvmlDeviceGetClockInfo", handle, memory),
        "power_draw_w": None if power is None else power / 1000,
        "power_limit_w": None if limit is None else limit / 1000,
        "power_limit_default_w": None if usual is None else usual / 1000,
        "throttle_reasons": _throttle_reasons(nvml, handle),
    }


def _throttle_reasons(nvml: Any, handle: Any) -> str | None:
    mask = nvml_answer(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    if mask is None:
        return None
    prefix = "nvmlClocksThrottleReason"
    reasons = [
        name[len(prefix) :]
        for name in dir(nvml)
        if name.startswith(prefix)
        and isinstance(bit := getattr(nvml, name), int)
        and bit & mask
        and name[len(prefix) :] not in ("All", "None", "GpuIdle")
    ]
    return ", ".join(sorted(reasons))


def _nvlinks(nvml: Any, handle: Any) -> int:
    most = getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)
    states = (nvml_answer(nvml, "nvmlDeviceGetNvLinkState", handle, link) for link in range(most))
    return sum(1 for state in states if state)


def _peer_facts(nvml: Any, index: int, handles: list[Any]) -> dict[str, Fact]:
    """Which other GPUs this one reads directly, over what, as ``1:nvlink 2:pcie 3:no``."""
    read_index = getattr(nvml, "NVML_P2P_CAPS_INDEX_READ", 0)
    link_index = getattr(nvml, "NVML_P2P_CAPS_INDEX_NVLINK", 2)
    peers = []
    for other, handle in enumerate(handles):
        if other == index:
            continue
        over_nvlink = nvml_answer(
            nvml, "nvmlDeviceGetP2PStatus", handles[index], handle, link_index
        )
        readable = nvml_answer(nvml, "nvmlDeviceGetP2PStatus", handles[index], handle, read_index)
        # NVML_P2P_STATUS_OK is 0.
        way = "nvlink" if over_nvlink == 0 else "pcie" if readable == 0 else "no"
        peers.append(f"{other}:{way}")
    return {"peer_access": " ".join(peers)}


def _other_processes(nvml: Any, handle: Any) -> int:
    running = nvml_answer(nvml, "nvmlDeviceGetComputeRunningProcesses", handle) or ()
    return sum(1 for process in running if process.pid != os.getpid())


def choose_devices(
    cpu: Cpu, *, devices: int | None = None, kind: DeviceKind | None = None
) -> tuple[Device, ...]:
    """The accelerators if there are any that torch can use, else groups of cores."""
    gpus = () if kind == "cpu" else read_gpus()
    if gpus and not torch_sees_cuda():
        if kind == "cuda":
            raise ProbeError("this torch cannot use the GPUs; install a CUDA build of torch")
        gpus = ()
    if kind == "cuda" and not gpus:
        raise ProbeError("this machine has no NVIDIA GPU; probe it without asking for cuda")
    if not gpus:
        return core_groups(cpu, devices)
    if devices is not None and not 1 <= devices <= len(gpus):
        raise ProbeError(
            f"{devices} devices were asked for, and this machine has {len(gpus)} GPUs; "
            f"choose --devices from 1 to {len(gpus)}"
        )
    return gpus[:devices]


def torch_sees_cuda() -> bool:
    """Whether this torch can use a GPU of this machine."""
    import torch

    return bool(torch.cuda.is_available())
