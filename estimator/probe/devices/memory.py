"""Measure memory: the first touch of fresh pages, and cold reads.

Cold reads by their reuse distance: on virtual machines what is read again after 8 MiB of others may
cost a fifth of main memory's price, and after 128 MiB half of it, whatever the size of the cache
that they are told of (neighbours, several levels, page tables beyond a TLB).
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from estimator.machines.profile import Device
from estimator.probe.devices.backend import Backend, allocator_text
from estimator.probe.devices.calls import TensorSource
from estimator.probe.devices.inventory import Cpu
from estimator.probe.devices.jobs import Emit

_TOUCHED_SIZES = (1 << 20, 8 << 20, 32 << 20, 128 << 20)
_TOUCH_ROUNDS = 5
# So long that a read of it takes a device far longer than to start.
_READ_BYTES = {"cpu": 512 << 10, "cuda": 16 << 20}
_PIECES_A_ROUND = 64
# Reuse distances are doubled from this one on, each read so often in a round.
_SHORTEST_REUSE_BYTES = 1 << 20
_READS_A_ROUND = 3
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 12


def measure_first_touch(backend: Backend, emit: Emit, *, budget_s: float) -> None:
    """Emit the cost of pages fresh from the kernel.

    Writing once to as much memory as is used below, before timing, keeps the hypervisor's own
    first-touch cost out of the figures.
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
            "allocator": allocator_text(),
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


def measure_cold_read(backend: Backend, emit: Emit, *, budget_s: float) -> None:
    """Emit what reading a byte from main memory costs beyond reading it from cache.

    On CPUs also the share of it that is paid after shorter reuse distances. A CUDA kernel of a few
    MiB takes less than it takes to start.
    """
    import torch

    end = time.monotonic() + budget_s
    count = _READ_BYTES[backend.kind] // 4
    block = torch.ones(TensorSource(backend).block_bytes // 4, device=backend.device)
    pieces = block.split(count)[:-1]
    cold: list[float] = []
    warm: list[float] = []
    # Not all of them where others leave the device little time, and what is found first is kept.
    while len(cold) < len(pieces) and (not cold or time.monotonic() < end):
        some = pieces[len(cold) :][:_PIECES_A_ROUND]
        cold += backend.time_calls(partial(_read_one, some), repeats=len(some))
        warm += backend.time_calls(partial(_read, some[-1:]), repeats=len(some))
    more_s = statistics.median(cold) - statistics.median(warm)
    costs: dict[str, Any] = {"cold_read_s_per_byte": max(0.0, more_s) / (4 * count)}
    if backend.kind == "cuda":
        # An accelerator has a cache of its own, whatever the host's cores have.
        costs |= {"private_cache_bytes": 0, "shared_cache_bytes": backend.last_level_cache_bytes()}
    emit(costs)
    if backend.kind == "cpu" and more_s > 0:
        emit({"reuse_points": _reuse_points(backend, pieces[0], block[count:], end=end)})


def _reuse_points(
    backend: Backend, piece: Any, others: Any, *, end: float
) -> list[tuple[float, float]]:
    """(reuse distance in bytes, share of a cold read's cost) of a `piece` after `others`.

    What is read last before the piece must not lie next to it: the hardware would prefetch it.
    Rounds over all distances until a time, so that a busy moment is met by all of them.
    """
    distances = [0]
    while (following := max(_SHORTEST_REUSE_BYTES, 2 * distances[-1])) <= others.nbytes // 2:
        distances.append(following)
    distances.append(others.nbytes)
    seconds: list[list[float]] = [[] for _ in distances]
    rounds = 0
    while rounds < _LEAST_ROUNDS or (rounds < _MOST_ROUNDS and time.monotonic() < end):
        for distance, seen in zip(distances, seconds, strict=True):
            before = partial(_read, [piece, others[: distance // others.itemsize]])
            seen += backend.time_calls(
                partial(_read, [piece]), repeats=_READS_A_ROUND, before=before
            )
        rounds += 1
    shares = _shares([statistics.median(seen) for seen in seconds])
    return list(zip(map(float, distances[1:]), shares, strict=True))


def _read_one(tensors: Sequence[Any], number: int) -> None:
    tensors[number].sum()


def _read(tensors: Sequence[Any], _: int) -> None:
    for tensor in tensors:
        tensor.sum()


def _shares(seconds: Sequence[float]) -> list[float]:
    """What each but the first takes beyond the first, as a share of what the last does.

    What falls is noise of the measurement.

    >>> _shares([2.0, 2.5, 2.4, 3.0, 4.0])
    [0.25, 0.25, 0.5, 1.0]
    """
    warm_s, *others_s = seconds
    most_s = max(others_s[-1] - warm_s, 1e-12)
    shares = (min(max((each_s - warm_s) / most_s, 0.0), 1.0) for each_s in others_s)
    return list(itertools.accumulate(shares, max))


def cache_sizes(cpu: Cpu, device: Device) -> tuple[int, int]:
    """(private, shared) bytes of cache that one device can use alone.

    A core group's private cache is the second level of each of its cores, its shared one the last
    level, once per group of cores that share it.
    """
    cores = max(1, len(device.cores))
    sizes = [
        size * max(1, cores // shared_by)
        for level, (size, shared_by) in sorted(cpu.caches.items())
        if level > 1
    ]
    return (sizes[0], sizes[-1]) if sizes else (0, 0)
