"""Time calls on a machine that others share, and tell what memory a process has held."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def seconds(call: Callable[[], Any]) -> float:
    """Wall seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def cpu_seconds(call: Callable[[], Any]) -> float:
    """Seconds of one call in which this thread computes."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


def medians(calls: Iterable[Callable[[], Any]], groups: int = 5) -> float:
    """The least of some medians of calls: what shares the machine slows whole stretches."""
    times = [cpu_seconds(call) for call in calls]
    size = max(len(times) // groups, 1)
    return min(
        statistics.median(times[first : first + size])
        for first in range(0, len(times) - size + 1, size)
    )


def resident_bytes() -> int:
    """The most memory this process has held."""
    # getrusage's maximum begins with what the parent held.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise LookupError("/proc/self/status has no VmHWM; run this on Linux")
