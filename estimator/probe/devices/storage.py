"""Measure what feeds a loader: reading files cold and cached, copying, decoding."""

from __future__ import annotations

import ctypes
import io
import itertools
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from estimator.errors import ProbeError
from estimator.probe.devices.backend import Backend
from estimator.probe.devices.inventory import pinned
from estimator.probe.devices.jobs import Emit

_PAGE = mmap.PAGESIZE
_EVICTED_AT_ONCE_BYTES = 1 << 20


def evict(paths: Iterable[Path]) -> None:
    """Write back what is dirty of the files and drop their pages from the cache.

    Pages that another process maps stay, and file systems in memory have no other place for theirs.
    """
    for path in paths:
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            continue
        finally:
            os.close(handle)


def load(paths: Iterable[Path]) -> None:
    """Read the files, so that their pages are in the cache."""
    for path in paths:
        try:
            with path.open("rb", buffering=0) as stream:
                while stream.read(_EVICTED_AT_ONCE_BYTES):
                    pass
        except OSError:
            continue


def resident_ratio(paths: Iterable[Path]) -> float:
    """The share of the files' pages that are in the page cache; 0 for no pages."""
    resident = pages = 0
    for path in paths:
        try:
            in_memory = _resident(path)
        except OSError:
            continue
        resident += sum(page & 1 for page in in_memory)
        pages += len(in_memory)
    return resident / pages if pages else 0.0


def _resident(path: Path) -> bytes:
    """One byte a page, whose lowest bit says that it is in memory (mincore(2))."""
    size = path.stat().st_size
    if not size:
        return b""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    # A private mapping that may be written is one that ctypes can take the address of.
    writable = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, **writable) as mapped:
        pages = ctypes.create_string_buffer(-(-size // _PAGE))
        address = ctypes.c_char.from_buffer(mapped)
        failed = libc.mincore(ctypes.addressof(address), size, pages)
        del address
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {path}")
    return pages.raw


_FILE_BYTES, _MOST_FILES = 1 << 20, 128
# Readers at once: a disk gives one of them less than it has.
_READERS = 4
_READ_BYTES = 1 << 18
_COPIED_BYTES = 64 << 20
_IMAGE, _DETAIL = (500, 375), 20.0  # about ImageNet's mean
_TOKENS, _RECORDS = 1024, 32
_FEWEST_REPEATS, _MOST_REPEATS = 3, 50
MOST_RESIDENT_RATIO = 0.05


def measure_input(backend: Backend, emit: Emit, *, budget_s: float) -> None:
    """Emit bytes, pixels and tokens per second, each as it is known, of this process's cores."""
    with pinned(threads=1):  # as DataLoader does in its workers
        for part in (copied, tokens_made, jpeg_decoded, files_read):
            try:
                emit(part(budget_s / 4))
            except (ProbeError, ImportError, OSError) as error:
                emit({"missing": [f"input: {error}"]})


def files_read(budget_s: float) -> dict[str, float]:
    """Bytes per second of new files in the folder of temporary files, and again from the cache."""
    with tempfile.TemporaryDirectory(prefix="estimator-probe-") as folder:
        paths = _written(Path(folder), budget_s / 3)
        evict(paths)
        if resident_ratio(paths) > MOST_RESIDENT_RATIO:
            raise ProbeError(
                f"files in {tempfile.gettempdir()} stay in memory, so that no disk could be read; "
                "set TMPDIR to a folder on the disk that data comes from"
            )
        cold = read_bytes_per_s(paths, readers=_READERS, budget_s=budget_s / 3)
        load(paths)
        return {"disk_bytes_per_s": cold, "cache_bytes_per_s": read_bytes_per_s(paths, readers=1)}


def _written(folder: Path, budget_s: float) -> list[Path]:
    """Files whose bytes no disk can leave out, as many as the time allows."""
    end = time.monotonic() + budget_s
    paths: list[Path] = []
    while len(paths) < _READERS or (len(paths) < _MOST_FILES and time.monotonic() < end):
        paths.append(folder / str(len(paths)))
        with paths[-1].open("wb") as stream:
            stream.write(os.urandom(_FILE_BYTES))
            os.fsync(stream.fileno())
    return paths


def read_bytes_per_s(
    paths: Iterable[Path], *, readers: int = 1, budget_s: float = float("inf")
) -> float:
    """The rate at which `readers` threads together read the files, as many as the time allows.

    One for each of them at least.
    """
    end = time.monotonic() + budget_s

    def read(number: int, path: Path) -> int:
        if number >= readers and time.monotonic() > end:
            return 0
        count = 0
        with path.open("rb", buffering=0) as stream:
            while some := stream.read(_READ_BYTES):
                count += len(some)
        return count

    with ThreadPoolExecutor(readers) as pool:
        begun = time.perf_counter()
        size_bytes = sum(pool.map(read, itertools.count(), paths))
        return size_bytes / (time.perf_counter() - begun)


def copied(budget_s: float) -> dict[str, float]:
    """Bytes per second that one core copies in memory, to where it has written before."""
    import numpy as np

    source = np.ones(_COPIED_BYTES, np.uint8)
    target = np.ones_like(source)
    seconds = _timed(lambda: np.copyto(target, source), budget_s)
    return {"copy_bytes_per_s": _COPIED_BYTES / seconds}


def tokens_made(budget_s: float) -> dict[str, float]:
    """Tokens per second that one core makes a batch of from stored records of 16-bit numbers."""
    import numpy as np
    import torch

    records = [np.arange(_TOKENS, dtype=np.uint16).tobytes() for _ in range(_RECORDS)]

    def batch() -> None:
        rows = [np.frombuffer(record, np.uint16).astype(np.int64) for record in records]
        torch.stack([torch.from_numpy(row) for row in rows])

    return {"tokens_per_s": _TOKENS * _RECORDS / _timed(batch, budget_s)}


def jpeg_decoded(budget_s: float) -> dict[str, float]:
    """Pixels per second of a photograph-like JPEG image that one core decodes."""
    import numpy as np

    try:
        from PIL import Image
    except ImportError:
        raise ProbeError("Pillow is not here, so that no JPEG was decoded; install it") from None
    draw = np.random.default_rng(0)
    coarse = Image.fromarray(draw.integers(0, 255, (24, 32, 3), dtype=np.uint8)).resize(_IMAGE)
    # As much detail as makes it as large as ImageNet's images are, some 110 kB.
    fine = np.asarray(coarse) + draw.normal(0, _DETAIL, (*_IMAGE[::-1], 3))
    stored = io.BytesIO()
    Image.fromarray(fine.clip(0, 255).astype(np.uint8)).save(stored, "jpeg", quality=90)

    def decode() -> None:
        with Image.open(io.BytesIO(stored.getvalue())) as image:
            image.convert("RGB").load()

    return {"jpeg_pixels_per_s": _IMAGE[0] * _IMAGE[1] / _timed(decode, budget_s)}


def _timed(call: Callable[[], object], budget_s: float) -> float:
    """The median seconds of a call after a first one."""
    call()
    seconds: list[float] = []
    end = time.monotonic() + budget_s
    while len(seconds) < _FEWEST_REPEATS or (
        len(seconds) < _MOST_REPEATS and time.monotonic() < end
    ):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)
