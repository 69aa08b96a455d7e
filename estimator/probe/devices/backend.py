"""The one seam between CPU and CUDA: timing calls, caches, allocator, versions."""

from __future__ import annotations

import ctypes
import importlib.metadata
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from estimator.errors import ProbeError
from estimator.machines.profile import Device, DeviceKind

# mallopt parameters of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_TOP_PAD_BYTES = 64 << 20
_TOUCH_BLOCK_BYTES = 64 << 20

# CUDA events bracket a call on the device; the host must run ahead of it, or the gap between two
# launches is timed too. So a spinning kernel is queued first, for longer than the host needs.
_CALLS_PER_FLIGHT = 64
# How often, and how many calls at a time, the host is watched issuing them.
_ISSUE_ROUNDS, _ISSUED_CALLS = 3, 8
_HIGHEST_CLOCK_HZ = 2.5e9
_LONGEST_SPIN_S = 0.2
# Some launches long, so that the first call is queued before the spin ends.
_LEAST_SPIN_S = 50e-6
# What is kept of a sequence's host time from one flight to the next.
_REMEMBERED_RATIO = 0.5
_SPARE_SPIN = 2.0
# Host time of one operator of a replayed graph, Python included, until one flight has told.
_HOST_ALLOWANCE_S = 60e-6
_SHORTEST_S = 1e-7


def _nothing(_number: int) -> None:
    pass


class CpuBackend:
    """Times calls with perf_counter; the calling process is expected to be pinned already."""

    kind: DeviceKind = "cpu"

    index = 0

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    @property
    def device(self) -> Any:
        """The torch.device that tensors are made on."""
        import torch

        return torch.device("cpu")

    def synchronize(self) -> None:
        """Nothing is in flight: every CPU operator has finished when it returns."""

    def time_calls(
        self,
        call: Callable[[int], object],
        *,
        repeats: int,
        before: Callable[[int], object] = _nothing,
        after: Callable[[int], object] = _nothing,
        once: bool = False,
    ) -> list[float]:
        """Seconds of call(0), call(1), …; before(i) and after(i) run untimed ahead and behind.

        Where each must be made `once`, none is made before; on a CPU that is always so.
        """
        clock, seconds = self._clock, []
        for number in range(repeats):
            before(number)
            begin = clock()
            result = call(number)
            seconds.append(clock() - begin)
            del result
            after(number)
        return seconds

    def issue_s(self, call: Callable[[int], object]) -> float | None:
        """Host seconds of issuing a call; None on a CPU, which computes it meanwhile."""
        return None

    def last_level_cache_bytes(self) -> int:
        """Size of the cache that must be flushed before a read is cold."""
        from estimator.probe.devices.inventory import read_cpu

        return max((size for size, _ in read_cpu().caches.values()), default=32 << 20)

    def warm_up(self, seconds: float) -> None:
        """Work until the clocks are where sustained work keeps them."""
        import torch

        block = torch.randn(256, 256)
        end = self._clock() + seconds
        while self._clock() < end:
            torch.mm(block, block)

    def is_lost(self) -> bool:
        """Whether this process cannot use the device any more."""
        return False


class CudaBackend:
    """Times calls with CUDA events behind a spinning kernel, so that launch gaps do not count."""

    kind: DeviceKind = "cuda"

    def __init__(
        self,
        index: int | None = None,
        *,
        cuda: Any = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if cuda is None:
            import torch

            cuda = torch.cuda
        if not cuda.is_available():
            raise ProbeError("torch sees no CUDA device; install a CUDA build of torch or use cpu")
        self.index = cuda.current_device() if index is None else index
        self._cuda = cuda
        self._clock = clock
        self._sequence_host_s = _HOST_ALLOWANCE_S
        # What two events add to the time between them, beyond what the kernels take back to back.
        self.event_s = 0.0
        cuda.set_device(self.index)

    @property
    def device(self) -> Any:
        """The torch.device that tensors are made on."""
        import torch

        return torch.device("cuda", self.index)

    def synchronize(self) -> None:
        """Wait until all work issued so far is done."""
        self._cuda.synchronize()

    def time_calls(
        self,
        call: Callable[[int], object],
        *,
        repeats: int,
        before: Callable[[int], object] = _nothing,
        after: Callable[[int], object] = _nothing,
        once: bool = False,
    ) -> list[float]:
        """Device seconds of call(0), call(1), …; before(i) and after(i) run untimed beside each.

        call(0) is made first to learn how long the host takes, unless each must be made `once`:
        then that is remembered from calls before.
        """
        host_s = self._sequence_host_s
        if not once:
            begin = self._clock()
            before(0)
            call(0)
            host_s = self._clock() - begin
            self.synchronize()
        seconds: list[float] = []
        for first in range(0, repeats, _CALLS_PER_FLIGHT):
            flight = range(first, min(repeats, first + _CALLS_PER_FLIGHT))
            flown, issued_s = self._fly(call, flight, host_s, before, after)
            seconds += flown
            if once:
                # One slow flight (memory from the driver, modules loaded) is forgotten by halves.
                host_s = self._sequence_host_s = max(issued_s, _REMEMBERED_RATIO * host_s)
        return seconds

    def _fly(
        self,
        call: Callable[[int], object],
        flight: range,
        host_s: float,
        before: Callable[[int], object],
        after: Callable[[int], object],
    ) -> tuple[list[float], float]:
        """(device seconds of each call, host seconds per call), queued behind a spinning kernel."""
        spin_s = min(_LONGEST_SPIN_S, _SPARE_SPIN * host_s * len(flight) + _LEAST_SPIN_S)
        self._cuda._sleep(int(spin_s * _HIGHEST_CLOCK_HZ))
        spans = []
        begin = self._clock()
        for number in flight:
            before(number)
            begun = self._mark()
            call(number)
            spans.append((begun, self._mark()))
            after(number)
        issued_s = (self._clock() - begin) / len(flight)
        self.synchronize()
        # Event.elapsed_time is in milliseconds and resolves about 0.5 µs.
        elapsed_s = [one.elapsed_time(two) * 1e-3 for one, two in spans]
        return [max(flight_s - self.event_s, _SHORTEST_S) for flight_s in elapsed_s], issued_s

    def issue_s(self, call: Callable[[int], object]) -> float | None:
        """Host seconds of issuing a call, the least of three rounds; the device is idle before."""
        rounds = []
        for _ in range(_ISSUE_ROUNDS):
            self.synchronize()
            begin = self._clock()
            for number in range(_ISSUED_CALLS):
                call(number)
            rounds.append((self._clock() - begin) / _ISSUED_CALLS)
        self.synchronize()
        return min(rounds)

    def measure_events(self, call: Callable[[int], object]) -> None:
        """Learn what a pair of events adds to a short `call`, so that it is not charged to calls.

        Calls with events around each are compared with as many between two events.
        """
        self.event_s = 0.0
        self.time_calls(call, repeats=_CALLS_PER_FLIGHT)
        single_s = statistics.median(self.time_calls(call, repeats=_CALLS_PER_FLIGHT))

        def several(_: int) -> None:
            for number in range(_CALLS_PER_FLIGHT):
                call(number)

        together_s = statistics.median(self.time_calls(several, repeats=3)) / _CALLS_PER_FLIGHT
        self.event_s = max(0.0, single_s - together_s)

    def _mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def last_level_cache_bytes(self) -> int:
        """Size of the cache that must be flushed before a read is cold."""
        facts = self._cuda.get_device_properties(self.index)
        return int(getattr(facts, "L2_cache_size", 0)) or 64 << 20

    def warm_up(self, seconds: float) -> None:
        """Work until the clocks are where sustained work keeps them."""
        import torch

        block = torch.randn(4096, 4096, device=self.device)
        end = self._clock() + seconds
        while self._clock() < end:
            for _ in range(10):
                torch.mm(block, block)
            self.synchronize()
        tiny = torch.ones(16, device=self.device)
        self.measure_events(lambda _: torch.neg(tiny))

    def is_lost(self) -> bool:
        """After an error of a kernel (an illegal address, a failed assertion) every call fails.

        Not after one that a library returned, nor where memory ran out: the context lives on. Only
        asking for something tells them apart (cudaGetLastError in the CUDA runtime's manual,
        "sticky" errors).
        """
        try:
            self._cuda.synchronize()
            self._mark()
            self._cuda.synchronize()
        except RuntimeError:
            return True
        return False


# How to time a call on one device and how to make tensors there.
Backend = CpuBackend | CudaBackend


# Cycles of a GPU in which the host queues some tens of calls of NCCL.
_SPUN_AHEAD = 3_000_000


def device_seconds(call: Callable[[], object], cuda: Any, *, meet: Callable[[], object]) -> float:
    """Seconds from what `meet` queues to the end of `call`, by the device's own clock.

    Both are queued behind a spinning kernel: how long the host takes to issue them does not count.
    """
    cuda.synchronize()
    cuda._sleep(_SPUN_AHEAD)
    meet()
    begun, ended = (cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    call()
    ended.record()
    cuda.synchronize()
    # Event.elapsed_time is in milliseconds.
    return max(float(begun.elapsed_time(ended)) * 1e-3, _SHORTEST_S)


# Dense bfloat16 products of a multiprocessor and clock, by the first number of the compute
# capability (architecture whitepapers of V100, A100, H100 and Blackwell).
_FLOPS_PER_CLOCK = {7: 1024, 8: 2048, 9: 4096}
_FLOPS_PER_CLOCK_LATER = 8192
_USUAL_CLOCK_HZ = 1.8e9
_FILLING_S = 1e-3
_SIDE_STEP = 256


def filling_side(backend: Backend) -> int:
    """The side of square bfloat16 matrices whose product takes a GPU a millisecond at its peak."""
    import torch

    facts = torch.cuda.get_device_properties(backend.index)
    per_clock = _FLOPS_PER_CLOCK.get(facts.major, _FLOPS_PER_CLOCK_LATER)
    flops = _FILLING_S * facts.multi_processor_count * per_clock * _USUAL_CLOCK_HZ
    return math.ceil((flops / 2) ** (1 / 3) / _SIDE_STEP) * _SIDE_STEP


def square_matmul(backend: Backend, side: int) -> Callable[[int], object]:
    """A product of float32 matrices of a side on CPUs, on GPUs of bfloat16 ones that fill them."""
    import torch

    on_cuda = backend.kind == "cuda"
    side = filling_side(backend) if on_cuda else side
    dtype = torch.bfloat16 if on_cuda else torch.float32
    left, right, out = (
        torch.randn(side, side, device=backend.device, dtype=dtype) for _ in range(3)
    )
    return lambda _: torch.mm(left, right, out=out)


def open_backend(kind: str, index: int | None = None) -> Backend:
    """The backend of one device, by default the current one; raises ProbeError without a GPU."""
    return CudaBackend(index) if kind == "cuda" else CpuBackend()


def keep_memory_resident() -> bool:
    """Make this process keep freed memory, so that later allocations cause no page faults.

    Without mmap and without trimming every block comes from the heap, and stays there once touched.
    False where the allocator is not glibc's, or is told otherwise by the environment.
    """
    if allocator_name() != "glibc":
        return False
    return all(
        ctypes.CDLL(None).mallopt(option, value) == 1
        for option, value in (
            (_M_MMAP_MAX, 0),
            (_M_TRIM_THRESHOLD, -1),
            (_M_TOP_PAD, _TOP_PAD_BYTES),
        )
    )


def touch_memory(size_bytes: int) -> None:
    """Write to `size_bytes` of fresh memory once and free it.

    In a virtual machine the first write since boot also makes the hypervisor find a page, which
    costs several times a page fault and would otherwise be charged to whatever comes first.
    """
    import torch

    blocks = [
        torch.zeros(_TOUCH_BLOCK_BYTES // 8, dtype=torch.int64)
        for _ in range(max(1, size_bytes // _TOUCH_BLOCK_BYTES))
    ]
    for block in blocks:
        block.fill_(1)


def allocator_name(maps: str | None = None) -> str:
    """Which malloc this process uses: glibc, jemalloc, tcmalloc, mimalloc, musl or unknown."""
    if maps is None:
        try:
            maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "unknown"
    for name in ("jemalloc", "tcmalloc", "mimalloc"):
        if name in maps:
            return name
    if "ld-musl" in maps:
        return "musl"
    return "glibc" if "libc.so" in maps or "libc-2" in maps else "unknown"


def allocator_text() -> str:
    """The allocator with its version and every setting that changes it, in one line."""
    name = allocator_name()
    version = platform.libc_ver()[1] if name == "glibc" else ""
    settings = [
        f"{key}={os.environ[key]}"
        for key in sorted(os.environ)
        if key.startswith("MALLOC_") or key in ("GLIBC_TUNABLES", "LD_PRELOAD")
    ]
    return " ".join(filter(None, [name, version, *settings]))


_SETTINGS = ("OMP_", "MKL_", "KMP_", "GOMP_", "TORCH_", "NCCL_", "GLOO_", "CUDA_")


def software_versions(device: Device) -> dict[str, str]:
    """By name; the threads are those of one device."""
    versions = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "allocator": allocator_text(),
        "threads": str(max(1, len(device.cores))),
    }
    for package in ("torch", "numpy", "nvidia-ml-py"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    settings = [
        f"{key}={os.environ[key]}" for key in sorted(os.environ) if key.startswith(_SETTINGS)
    ]
    if settings:
        versions["settings"] = " ".join(settings)
    return versions
