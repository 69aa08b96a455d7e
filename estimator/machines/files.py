"""Say where the user's store and the shipped data stand, and write files whole or not at all."""

from __future__ import annotations

import os
import tempfile
from functools import lru_cache
from importlib import resources
from pathlib import Path

from estimator.errors import StoreError

# How many files this process has written: what was read before may have changed since.
written = 0


def check_writable(path: Path) -> None:
    """Refuse a place that cannot be written before the work starts, not after it."""
    if path.is_dir():
        raise StoreError(f"{path} is a folder; name a file in it")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise StoreError(f"{folder} is no folder that can be written to; choose another place")


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` through a temporary file beside it; raises StoreError."""
    write_bytes_atomically(path, text.encode("utf-8"))


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` through a temporary file beside it; raises StoreError."""
    global written
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise StoreError(
            f"cannot write {path} ({error.strerror}); choose another place with --out or "
            "ESTIMATOR_HOME"
        ) from None
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        written += 1
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise StoreError(
            f"cannot write {path} ({error.strerror}); choose another place with --out or "
            "ESTIMATOR_HOME"
        ) from None


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
