"""Hold what is known of a machine's devices and of the memory that they work on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from estimator.errors import quoted
from estimator.machines.provenance import (
    LEAST,
    MOST,
    Provenance,
    check_not_negative,
    check_positive,
    check_rising_shares,
)

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one pinned group of CPU cores that acts as a device.

    `memory_bytes` of a core group is its share of the machine's memory; `peak_flops_per_s` holds
    dense peaks by dtype, from the datasheet or (for cores) the best rate the probe saw.
    """

    kind: DeviceKind
    index: int
    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float | None = None
    peak_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    numa_node: int | None = None
    details: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_positive(self, "memory_bytes", "memory_bandwidth_bytes_per_s")
        for dtype, rate in self.peak_flops_per_s.items():
            if not LEAST <= rate <= MOST:
                raise ValueError(
                    f"Device.peak_flops_per_s[{quoted(dtype)}] must be positive, found {rate}"
                )

    @property
    def threads(self) -> int:
        """How many threads compute its operators: one a core, none for an accelerator."""
        return max(len(self.cores), 1) if self.kind == "cpu" else 0

    @property
    def compute_capability(self) -> float | None:
        """NVIDIA's number for what a chip can do, such as 8.0; None where it is not known."""
        text = str(self.details.get("compute_capability", ""))
        # AMD's are names, such as gfx90a.
        return float(text) if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,3})?", text) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCost:
    """What the probe saw of memory: page faults, caches, allocator settings.

    `first_touch_s_per_byte` is the cost of memory the process has not touched since it got it from
    the operating system; `mmap_threshold_bytes` the size from which an allocation always is such
    memory (glibc: 32 MiB once warmed up). `cold_read_s_per_byte` is what a byte read from main
    memory costs beyond one read from cache. `reuse_points` are (reuse distance in bytes, share of
    that cost): what a byte costs to read again once so many other bytes were touched. Cache sizes
    are those that one device can use alone.
    """

    first_touch_s_per_byte: float = 0.0
    page_bytes: int = 4096
    allocator: str = "unknown"
    mmap_threshold_bytes: int | None = None
    cold_read_s_per_byte: float = 0.0
    private_cache_bytes: int = 0
    shared_cache_bytes: int = 0
    reuse_points: tuple[tuple[float, float], ...] = ()
    provenance: Provenance

    def __post_init__(self) -> None:
        check_rising_shares(self, "reuse_points")
        check_not_negative(
            self,
            "first_touch_s_per_byte",
            "cold_read_s_per_byte",
            "private_cache_bytes",
            "shared_cache_bytes",
        )
        check_positive(self, "page_bytes", "mmap_threshold_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputCost:
    """What the probe saw of feeding a loader; None: not measured.

    `disk_bytes_per_s` is what several readers of files that are not in the page cache get together,
    `cache_bytes_per_s` what one gets of those that are. One core copies `copy_bytes_per_s` in
    memory, decodes `jpeg_pixels_per_s` and makes batches of `tokens_per_s` from stored records.
    """

    disk_bytes_per_s: float | None = None
    cache_bytes_per_s: float | None = None
    copy_bytes_per_s: float | None = None
    jpeg_pixels_per_s: float | None = None
    tokens_per_s: float | None = None
    provenance: Provenance

    def __post_init__(self) -> None:
        check_positive(
            self, *(item.name for item in dataclasses.fields(self) if item.name != "provenance")
        )
