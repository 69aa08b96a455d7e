"""Say where the user's store and shipped data stand; read files up to a size, write them whole."""

from __future__ import annotations

import contextlib
import csv
import errno
import gzip
import io
import json
import os
import secrets
import stat
import time
import zlib
from collections.abc import Iterator
from functools import lru_cache
from importlib import resources
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from estimator.errors import StoreError
from estimator.units import MIB

# No file of ours or of other tools that people name is as large.
MOST_BYTES = 64 * MIB
# A value of a JSON file takes some 100 bytes once read, and as few as 2 in the file.
MOST_ITEMS = 5_000_000
_PARTIAL = ".partial"
# A write takes seconds; what is older was left by a process that was killed.
_ABANDONED_S = 3600.0


def read_file(path: str | os.PathLike[str], *, most_bytes: int = MOST_BYTES) -> bytes:
    """What a file holds; raises OSError, also for what is no regular file and for one too large.

    Named pipes and devices never end, or never begin.
    """
    content = read_start(path, most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes // MIB} MiB")
    return content


def read_start(path: str | os.PathLike[str], size: int) -> bytes:
    """The first bytes of a regular file, or as many as it has; raises OSError."""
    try:
        # Opening a named pipe would wait for its writer.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # a null character in its name
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from None
    with os.fdopen(handle, "rb") as stream:
        mode = os.fstat(stream.fileno()).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        content: bytes | None = stream.read(size)
    if content is None:  # a log of the kernel looks regular, and has nothing yet
        raise OSError(errno.EINVAL, "it is no regular file")
    return content


def read_text(path: str | os.PathLike[str], *, most_bytes: int = MOST_BYTES) -> str:
    """What a UTF-8 file holds; raises OSError, also where it is no text."""
    try:
        return read_file(path, most_bytes=most_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, f"it is no UTF-8 text at byte {error.start}") from None


def read_csv(
    path: str | os.PathLike[str], *, most_rows: int, most_bytes: int = MOST_BYTES
) -> Iterator[list[str]]:
    """The cells of each row, the header first; raises OSError and ValueError.

    Cells are separated by commas, semicolons or tabs, whichever the header has most of.
    """
    # Read line by line: text and rows together would take many times the bytes of the file.
    content = io.BytesIO(read_file(path, most_bytes=most_bytes))
    stream = io.TextIOWrapper(content, encoding="utf-8-sig", newline="")
    try:
        header = stream.readline()
        delimiter = max(",;\t", key=header.count)
        rows = csv.reader(chain([header], stream), delimiter=delimiter)
        yield from islice(rows, most_rows + 1)
        if next(rows, None) is not None:
            raise ValueError(f"more than {most_rows} rows")
    except UnicodeDecodeError:
        raise OSError(errno.EILSEQ, "it is no UTF-8 text") from None
    except csv.Error as error:
        raise ValueError(str(error)) from None


def unpack(content: bytes, *, most_bytes: int = MOST_BYTES) -> bytes:
    """What gzip has packed; raises ValueError where it is damaged or unpacks to too much."""
    try:
        with gzip.open(io.BytesIO(content)) as stream:
            unpacked = stream.read(most_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot be unpacked: {error}") from None
    if len(unpacked) > most_bytes:
        raise ValueError(f"unpacks to more than {most_bytes // MIB} MiB")
    return unpacked


def parse_json(content: str | bytes, *, most_items: int = MOST_ITEMS) -> Any:
    """The values of a JSON text; raises ValueError, in words for people, where there are none.

    >>> parse_json("[1")
    Traceback (most recent call last):
    ...
    ValueError: not JSON at line 1
    """
    if isinstance(content, bytes):
        content = content.decode("utf-8-sig")
    # Names of objects take as much as their values.
    items = sum(map(content.count, ",:[{"))
    if items > most_items:
        raise ValueError(f"more than {most_items} values")
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at line {error.lineno}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError:
        raise ValueError("a number of more than 4300 digits") from None


def write_file(path: Path, content: bytes) -> None:
    """Write a file through a temporary one beside it, so that it is whole whenever it is there.

    A symbolic link is followed, the mode and owner of a file that was there are kept, a new one
    obeys the umask, and what is no regular file (a device, a pipe) is written to as it is. Raises
    OSError.
    """
    if _is_written_through(path):
        _write_through(path, content)
        return
    target = Path(os.path.realpath(path))
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    target.parent.mkdir(parents=True, exist_ok=True)
    _clear_abandoned(target)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}{_PARTIAL}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as stream:
            _keep_mode_and_owner(stream.fileno(), target)
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _is_written_through(path: Path) -> bool:
    # What /dev/stdout leads to is open already: another file in its place would not be seen.
    # Shared memory alone is a folder of files there.
    top = path.parts[1:3] if path.is_absolute() else ()
    if top[:1] in (("dev",), ("proc",)) and top != ("dev", "shm"):
        return True
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False


def _write_through(path: Path, content: bytes) -> None:
    # Without a reader a pipe refuses at once, rather than wait for one.
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "wb") as stream:
        os.set_blocking(stream.fileno(), True)
        stream.write(content)


def _keep_mode_and_owner(handle: int, target: Path) -> None:
    try:
        known = target.stat()
    except FileNotFoundError:
        return
    # Only root may give a file away.
    with contextlib.suppress(PermissionError):
        os.fchown(handle, known.st_uid, known.st_gid)
    os.fchmod(handle, stat.S_IMODE(known.st_mode))


def _clear_abandoned(target: Path) -> None:
    """Remove what writers of the same file that were killed have left."""
    oldest = time.time() - _ABANDONED_S
    start = f".{target.name}."
    for name in os.listdir(target.parent):
        if name.startswith(start) and name.endswith(_PARTIAL):
            with contextlib.suppress(OSError):
                if os.lstat(target.parent / name).st_mtime < oldest:
                    os.unlink(target.parent / name)


# How many files this process has written: what was read before may have changed since.
written = 0


def check_writable(path: Path) -> None:
    """Refuse a place that cannot be written before the work starts, not after it."""
    if path.is_dir():
        raise StoreError(f"{path} is a folder; name a file in it")
    if path.exists() and not path.is_file():  # a device or a pipe is written to as it is
        if not os.access(path, os.W_OK):
            raise StoreError(f"{path} cannot be written to; choose another place")
        return
    path = Path(os.path.realpath(path))
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    try:
        # Rights alone do not tell: a root without them on a network's disk, a virtual file system.
        with TemporaryFile(dir=folder):
            return
    except OSError:
        raise StoreError(
            f"{folder} is no folder that can be written to; choose another place"
        ) from None


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all; raises StoreError."""
    write_bytes_atomically(path, text.encode("utf-8"))


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path`, whole or not at all; raises StoreError."""
    global written
    try:
        write_file(path, content)
    except OSError as error:
        raise StoreError(
            f"cannot write {path} ({error.strerror}); choose another place with --out or "
            "ESTIMATOR_HOME"
        ) from None
    written += 1


def home() -> Path:
    """The user's store: $ESTIMATOR_HOME, by default the platform's user-data folder."""
    chosen = os.environ.get("ESTIMATOR_HOME")
    if chosen:
        return Path(chosen)
    return _platform_home(os.environ.get("XDG_DATA_HOME"), os.environ.get("HOME"))


@lru_cache(maxsize=8)
def _platform_home(*_environment: str | None) -> Path:
    from platformdirs import user_data_path

    return user_data_path("throughput-estimator", appauthor=False)


@lru_cache(maxsize=4)
def shipped_data(name: str) -> Path:
    """A folder or file of the shipped data: inside the package once installed, else beside it."""
    packaged = Path(str(resources.files("estimator"))) / "data" / name
    checkout = Path(__file__).resolve().parents[1] / "data" / name
    return packaged if packaged.exists() else checkout
