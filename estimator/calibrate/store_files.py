"""Tell a store from other files by its first bytes, before SQLite opens it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from estimator.errors import StoreError

# https://sqlite.org/fileformat.html: the header has 100 bytes, the application's number from byte
# 68 on; behind it the first page says from byte 3 on how many entries the schema has.
_MAGIC = b"SQLite format 3\0"
_OWNER, _ENTRIES, _START_BYTES = slice(68, 72), slice(103, 105), 108


def file_at(path: Path) -> tuple[int, int] | None:
    """Which file goes by that name (device, inode); None if there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def size_of(path: Path) -> int:
    """Bytes of a file, 0 if there is none; raises StoreError for what is no regular file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise StoreError(
            f"cannot use the store {path} ({error.strerror}); choose another place with --store or "
            "ESTIMATOR_HOME"
        ) from None
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"{path} is no regular file; choose another place for the store")
    return found.st_size


def remove(path: Path) -> None:
    """Remove a store that was never whole, with its log and the index of that."""
    for suffix in ("-wal", "-shm", ""):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def log_bytes(path: Path) -> int:
    """Bytes that a writer has put into the log beside a store and not yet into the store."""
    return size_of(Path(f"{path}-wal"))


def may_be_written(path: Path) -> bool:
    """Whether a store, and the log beside it, can be written."""
    return os.access(path, os.W_OK) and os.access(path.absolute().parent, os.W_OK)


def is_owned(path: Path, application_id: int) -> bool:
    """Whether a file is a database that says it belongs to the application."""
    start = _start(path)
    return start.startswith(_MAGIC) and int.from_bytes(start[_OWNER]) == application_id


def check_owner(path: Path, application_id: int) -> None:
    """Raise StoreError for a file of anyone else; one that is empty or missing is nobody's."""
    if size_of(path) == 0 or is_owned(path, application_id):
        return
    start = _start(path)
    if not start.startswith(_MAGIC):
        raise StoreError(
            f"{path} is not a database; choose another place, or remove it if it was a store"
        )
    if any(start[_OWNER]) or (any(start[_ENTRIES]) and not log_bytes(path)):
        raise StoreError(f"{path} holds the tables of another program; choose another place")
    # A store whose first writer was killed may have nothing but a log yet.


def _start(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(_START_BYTES)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StoreError(
            f"cannot read the store {path} ({error.strerror}); choose another place with --store "
            "or ESTIMATOR_HOME"
        ) from None
