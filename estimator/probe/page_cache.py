"""Put files out of the page cache, as anyone may, and see what of them stays there."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_PAGE = mmap.PAGESIZE
_READ_BYTES = 1 << 20


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
                while stream.read(_READ_BYTES):
                    pass
        except OSError:
            continue


def resident_ratio(paths: Iterable[Path]) -> float:
    """The share of the files' pages that are in the page cache; 0 for no pages."""
    resident = pages = 0
    for path in paths:
        try:
            found = _resident(path)
        except OSError:
            continue
        resident += sum(each & 1 for each in found)
        pages += len(found)
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
