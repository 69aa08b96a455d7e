"""Describe what feeds a training step: samples read, prepared by workers, queued and copied."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from estimator.errors import WorkloadError, quoted
from estimator.units import (
    parse_bandwidth_bytes_per_s,
    parse_number,
    parse_seconds,
    parse_size_bytes,
    parse_whole,
)
from estimator.workload.knobs import option, read_options

MOST_WORKERS = 4096


def _yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(f"{quoted(text)} is neither yes nor no; write one of them")
    return text == "yes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """One rank's loader, as ``torch.utils.data.DataLoader`` works; seconds and bytes of a sample.

    A worker reads `stored_bytes` (None: `sample_bytes`) of a sample, then prepares it for `prep_s`,
    in which a core works `cpu_ratio` of the time; `workers` make whole batches ahead of the step,
    and 0 workers is the training process itself. `sample_bytes` reach the device.
    A share `cached_ratio` of the samples is in the page cache, read at `cache_bytes_per_s`; the
    rest comes from a disk that gives all ranks of a node `disk_bytes_per_s` together. None: what
    the machine's probe measured; where it did not, reading is part of `prep_s`. A sample has also
    `jpeg_pixels` to decode and `tokens` to make a tensor of, at the probe's rates. Batches are
    copied to the device from `pinned` memory or from pageable. `take_s` is what the training
    process spends on a batch that workers made. `cores` are those that a rank's workers have, None:
    enough, or on CPUs those of the device.

    >>> Loader(sample_bytes=1e5, prep_s=0.01, workers=4).made_s(32)
    0.32
    """

    sample_bytes: float = option("sample", parse_size_bytes, 0.0)
    prep_s: float = option("prep", parse_seconds, 0.0)
    workers: int = option("workers", parse_whole, 0)
    cached_ratio: float = option("cached", parse_number, 1.0)
    stored_bytes: float | None = option("stored", parse_size_bytes, None)
    cpu_ratio: float = option("cpu", parse_number, 1.0)
    take_s: float = option("take", parse_seconds, 0.0)
    disk_bytes_per_s: float | None = option("disk", parse_bandwidth_bytes_per_s, None)
    cache_bytes_per_s: float | None = option("cache", parse_bandwidth_bytes_per_s, None)
    cores: int | None = option("cores", parse_whole, None)
    jpeg_pixels: float = option("pixels", parse_number, 0.0)
    tokens: float = option("tokens", parse_number, 0.0)
    pinned: bool = option("pinned", _yes, True)
    relative_error: float = 0.1
    source: Literal["assumed", "measured"] = "assumed"

    def __post_init__(self) -> None:
        for name, least, most in _RANGES:
            value = getattr(self, name)
            if value is not None and not (least <= value <= most and math.isfinite(value)):
                raise WorkloadError(
                    f"a loader's {name} is from {least:g} to {most:g}, found {quoted(value)}; "
                    "correct it"
                )

    def read_s(self, samples: float) -> float:
        """Seconds that one worker alone reads `samples` samples."""
        cached = self.cached_ratio / (self.cache_bytes_per_s or math.inf)
        stored = self.sample_bytes if self.stored_bytes is None else self.stored_bytes
        return samples * stored * cached + self.disk_s(samples)

    def disk_s(self, samples: float) -> float:
        """Seconds of the disk for `samples` samples."""
        if self.disk_bytes_per_s is None:
            return 0.0
        stored = self.sample_bytes if self.stored_bytes is None else self.stored_bytes
        return samples * stored * (1.0 - self.cached_ratio) / self.disk_bytes_per_s

    def made_s(self, samples: float) -> float:
        """Seconds of a worker to read and prepare `samples` samples."""
        return self.read_s(samples) + samples * self.prep_s

    def cpu_s(self, samples: float) -> float:
        """Seconds of a core in that."""
        return samples * self.prep_s * self.cpu_ratio + self.read_s(samples) - self.disk_s(samples)

    @classmethod
    def parse(cls, text: str | Loader) -> Loader:
        """Read ``sample=150kB,prep=8ms,workers=4``; raises WorkloadError.

        Further: cached=0.35, disk=500MB/s, cache=5GB/s, stored=, cpu=, take=, cores=,
        pixels=190e3, tokens=1024, pinned=no.

        >>> Loader.parse("sample=150kB,prep=8ms,workers=4").prep_s
        0.008
        """
        if isinstance(text, Loader):
            return text
        if not isinstance(text, str) or not text.strip():
            raise WorkloadError(
                f"a loader is text such as sample=150kB,prep=8ms,workers=4, found {quoted(text)}; "
                "write one or leave it out"
            )
        try:
            return cls(**read_options(cls, text, "a loader"))
        except ValueError as error:
            raise WorkloadError(f"loader {quoted(text)}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("sample_bytes", 0, 1e15),
    ("stored_bytes", 0, 1e15),
    ("prep_s", 0, 1e6),
    ("take_s", 0, 1e6),
    ("workers", 0, MOST_WORKERS),
    ("jpeg_pixels", 0, 1e12),
    ("tokens", 0, 1e12),
    ("cached_ratio", 0, 1),
    ("cpu_ratio", 0, 1),
    ("relative_error", 0, 10),
    ("cores", 1, 1e6),
    ("disk_bytes_per_s", 1, 1e15),
    ("cache_bytes_per_s", 1, 1e15),
)
