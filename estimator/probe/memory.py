"""Measure memory: the first touch of fresh pages, cold reads, the allocator's mmap threshold."""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time
from typing import Any

from estimator.machines.profile import Device
from estimator.probe.backend import Backend, allocator_name, allocator_text
from estimator.probe.jobs import Emit
from estimator.probe.source import TensorSource

_TOUCHED_SIZES = (1 << 20, 8 << 20, 32 << 20, 128 << 20)
_TOUCH_ROUNDS = 5
# So long that a read of it takes a device far longer than to start.
_READ_BYTES = {"cpu": 512 << 10, "cuda": 16 << 20}
_LARGEST_TESTED_BLOCK_BYTES = 1 << 30


def measure_first_touch(backend: Backend, emit: Emit, *, budget_s: float) -> None:
    """Emit the cost of pages fresh from the kernel, and from which block size every one is fresh.

    Needs a process with the allocator's default settings. Writing once to as much memory as is
    used below, before timing, keeps the hypervisor's own first-touch cost out of the figures.
    """
    end = time.monotonic() + budget_s
    _touch_s(_TOUCHED_SIZES[-1])
    points = []
    for size in _TOUCHED_SIZES:
        seconds: list[float] = []
        while len(seconds) < _TOUCH_ROUNDS and (not seconds or time.monotonic() < end):
            seconds.append(_touch_s(size))
        points.append((size, statistics.median(seconds)))
    emit(
        {
            # Sizes disagree little; the middle of them is robust against a busy moment.
            "first_touch_s_per_byte": statistics.median(s / size for size, s in points),
            "page_bytes": mmap.PAGESIZE,
            "allocator": allocator_text(),
            "mmap_threshold_bytes": mmap_threshold_bytes(),
            "points": points,
        }
    )


def _touch_s(size_bytes: int) -> float:
    """Seconds that writing to fresh memory takes beyond writing to it again."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, size_bytes, flags=flags) as block:
        handle = ctypes.c_char.from_buffer(block)
        address = ctypes.addressof(handle)
        begin = time.perf_counter()
        ctypes.memset(address, 1, size_bytes)
        middle = time.perf_counter()
        ctypes.memset(address, 2, size_bytes)
        end = time.perf_counter()
        del handle
    return max((middle - begin) - (end - middle), 1e-9)


class _Mallinfo2(ctypes.Structure):
    """struct mallinfo2 of malloc.h (glibc ≥ 2.33)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def mmap_threshold_bytes() -> int | None:
    """The block size from which glibc maps every block afresh, even when one was freed before.

    Freeing a mapped block raises glibc's threshold up to a maximum (mallopt(3), M_MMAP_THRESHOLD),
    so a size counts only if it is still mapped the second time. None for other allocators.
    """
    libc = ctypes.CDLL(None)
    if allocator_name() != "glibc" or not hasattr(libc, "mallinfo2"):
        return None
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.mallinfo2.restype = _Mallinfo2

    def always_mapped(size: int) -> bool:
        libc.free(libc.malloc(size))
        before = libc.mallinfo2().hblks
        block = libc.malloc(size)
        mapped = libc.mallinfo2().hblks > before
        libc.free(block)
        return bool(mapped)

    size = 64 << 10
    while size <= _LARGEST_TESTED_BLOCK_BYTES:
        # One page less leaves room for malloc's own header, so that powers of two come out even.
        if always_mapped(size + mmap.PAGESIZE):
            return size
        size *= 2
    return None


def measure_cold_read(backend: Backend, emit: Emit, *, budget_s: float) -> None:
    """Emit what reading a byte from main memory costs beyond reading it from cache."""
    import torch

    count = _READ_BYTES[backend.kind] // 4
    block = torch.ones(TensorSource(backend).block_bytes // 4, device=backend.device)
    pieces = block.split(count)[:-1]
    cold = backend.time_calls(lambda number: pieces[number].sum(), repeats=len(pieces))
    warm = backend.time_calls(lambda _: pieces[0].sum(), repeats=len(pieces))
    more_s = statistics.median(cold) - statistics.median(warm)
    found: dict[str, float] = {"cold_read_s_per_byte": max(0.0, more_s) / (4 * count)}
    if (
        backend.kind == "cuda"
    ):  # an accelerator has a cache of its own, whatever the host's cores have
        found |= {"private_cache_bytes": 0, "shared_cache_bytes": backend.last_level_cache_bytes()}
    emit(found)


def cache_sizes(hardware: dict[str, Any], device: Device) -> tuple[int, int]:
    """(private, shared) bytes of cache that one device can use alone.

    A core group's private cache is the second level of each of its cores, its shared one the last
    level, once per group of cores that share it.
    """
    cores = max(1, len(device.cores))
    levels = [
        (int(hardware[f"l{level}_cache_bytes"]), int(hardware[f"l{level}_cache_shared_by_threads"]))
        for level in (2, 3, 4)
        if hardware.get(f"l{level}_cache_bytes")
    ]
    if not levels:
        return 0, 0
    private, last = levels[0], levels[-1]
    private_bytes = private[0] * max(1, cores // private[1])
    return private_bytes, last[0] * max(1, cores // last[1]) if len(levels) > 1 else private_bytes
