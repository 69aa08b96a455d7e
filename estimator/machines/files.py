"""Say where the user's store and the shipped data stand, and write files whole or not at all."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib import resources
from pathlib import Path
from tempfile import TemporaryFile

from estimator.errors import StoreError
from estimator.files import write_file

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
    checkout = Path(__file__).resolve().parents[2] / "data" / name
    return packaged if packaged.exists() else checkout
