"""Find the secret that the ranks of one launch share, or make one where all run on this host."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from estimator.errors import ProbeError, cause

VARIABLE = "ESTIMATOR_PROBE_SECRET"
FILE_VARIABLE = "ESTIMATOR_PROBE_SECRET_FILE"
# 128 bits in hexadecimal digits.
LEAST_CHARACTERS = 32
_MOST_CHARACTERS = 4096
MAKE_ONE = "python -c 'import secrets; print(secrets.token_hex(32))'"
_POLL_S = 0.05


def given_secret(environment: Mapping[str, str]) -> bytes | None:
    """The secret in the environment, or in the file that it names; None without either.

    Raises ProbeError where it is too short, or others than the owner may read the file.
    """
    text, where = environment.get(VARIABLE), VARIABLE
    path = environment.get(FILE_VARIABLE)
    if text is None and path is not None:
        text, where = _read_private(Path(path)), f"the file {path}"
    if text is None:
        return None
    text = text.strip()
    if not LEAST_CHARACTERS <= len(text) <= _MOST_CHARACTERS:
        raise ProbeError(
            f"the secret in {where} has {len(text)} characters, not {LEAST_CHARACTERS} to "
            f"{_MOST_CHARACTERS}; make one with {MAKE_ONE}"
        )
    return text.encode()


def _read_private(path: Path) -> str:
    """The text of a file that only its owner, this user or root, may open."""
    try:
        # Not to wait for the other end where this is a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, encoding="utf-8") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ProbeError(f"{path} is no regular file; write the secret to one of mode 0600")
            if found.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(found.st_mode) & 0o077:
                raise ProbeError(
                    f"{path} is of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o},"
                    " so that others can read the secret; own it and run chmod 600 on it"
                )
            return file.read(_MOST_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ProbeError(
            f"the secret cannot be read from {path} ({cause(error)}); write one there, mode 0600"
        ) from None


@contextlib.contextmanager
def shared_on_this_host(port: int, attempt: str) -> Iterator[bytes]:
    """A new secret, in a file that ranks of this user on this host can read while this lasts.

    Called by rank 0 once it listens on `port`, so that no other launch has the same file.
    """
    secret = secrets.token_hex(32).encode()
    path = _file_of(port, attempt)
    try:
        descriptor = _write_locked(path, secret)
    except OSError as error:
        raise ProbeError(
            f"no secret can be shared in {path.parent} ({cause(error)}); give all ranks one "
            f"{VARIABLE}"
        ) from None
    try:
        yield secret
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _write_locked(path: Path, secret: bytes) -> int:
    """Put the file there whole; the descriptor that holds its lock."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent)
    # Held while rank 0 lives, however it ends: a file without the lock is a dead launch's.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, secret)
        os.rename(draft, path)
    except OSError:
        os.close(descriptor)
        os.unlink(draft)
        raise
    return descriptor


def await_secret_of_this_host(port: int, attempt: str, timeout_s: float) -> bytes:
    """The secret that rank 0 of this launch shares; raises ProbeError where there is none."""
    path = _file_of(port, attempt)
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(FileNotFoundError):
            if not _is_abandoned(path):
                return _read_private(path).encode()
        if time.monotonic() > deadline:
            raise ProbeError(
                f"rank 0 shares no secret in {path}; start all ranks as one user on this host, or "
                f"give them all the same {VARIABLE}"
            )
        time.sleep(_POLL_S)


def _is_abandoned(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _file_of(port: int, attempt: str) -> Path:
    """The file of one launch, in a folder that nobody but this user can enter."""
    folder = Path(tempfile.gettempdir(), f"estimator-{os.geteuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ProbeError(
            f"no secret can be shared in {folder} ({cause(error)}); give all ranks the same "
            f"{VARIABLE}"
        ) from None
    is_private = stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
    if not is_private or found.st_uid != os.geteuid():
        raise ProbeError(
            f"{folder} is open to other users, so no secret can be shared there; remove it, or "
            f"give all ranks the same {VARIABLE}"
        )
    name = hashlib.sha256(f"{port} {attempt}".encode()).hexdigest()[:16]
    return folder / f"{name}.secret"
