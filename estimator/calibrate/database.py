"""Open an SQLite file that many processes write, whatever has happened to it since."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from estimator.errors import StoreError, cause
from estimator.files import read_start

# https://sqlite.org/fileformat.html: how the header begins, and where it has the number of the
# application.
_MAGIC = b"SQLite format 3\0"
_OWNER = slice(68, 72)


def file_at(path: Path) -> tuple[int, int] | None:
    """Which file goes by that name (device, inode); None if there is none."""
    try:
        state = os.stat(path)
    except FileNotFoundError:
        return None
    return state.st_dev, state.st_ino


def size_of(path: Path) -> int:
    """Bytes of a file, 0 if there is none; raises StoreError for what is no regular file."""
    try:
        state = os.stat(path)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise StoreError(
            f"cannot use the store {path} ({error.strerror}); choose another place with --store or "
            "ESTIMATOR_HOME"
        ) from None
    if not stat.S_ISREG(state.st_mode):
        raise StoreError(f"{path} is no regular file; choose another place for the store")
    return state.st_size


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
    """Whether a damaged file says that it belongs to the application.

    Of one that SQLite can read, SQLite is asked: closing a file that it has open drops its locks.
    """
    with contextlib.suppress(OSError):
        start = read_start(path, _OWNER.stop)
        return start.startswith(_MAGIC) and int.from_bytes(start[_OWNER]) == application_id
    return False


logger = logging.getLogger(__name__)

Result = TypeVar("Result")
PATIENCE_S = 30.0
# After so long a wait for another process it is said that there is one.
_MOMENT_S = 1.0
# A file that is moved aside while it is written is written again; more than that is no accident.
_MOST_ATTEMPTS = 4
# What SQLite says of a full disk: the second of a log or its index.
_NO_SPACE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


@dataclass(frozen=True, slots=True)
class _Opened:
    connection: sqlite3.Connection
    # Which file it is (device, inode), since another may have taken its name.
    file: tuple[int, int] | None
    # SQLite forbids to carry a connection over a fork.
    pid: int
    # Cannot be written, and may not see what others write from now on: is used once.
    is_fixed: bool


class _DamagedError(sqlite3.DatabaseError):
    sqlite_errorcode = sqlite3.SQLITE_CORRUPT


class _UnreadableStoreError(StoreError):
    """The file is damaged, and nothing was to be written."""


class Database:
    """One file in WAL mode whose schema is `migrations`, each a list of statements.

    `PRAGMA user_version` counts the migrations that a file has seen. A damaged file with our
    `application_id` is moved to NAME.corrupt-DATE with a warning once something is to be written,
    and a new one takes its place; reading moves and makes nothing. A file of a newer schema or of
    another program is refused. A write that returned survives the death of
    the process at any time (`synchronous = NORMAL`; a power failure may cost the last moments, but
    does no damage). WAL needs shared memory: all writers run on one machine.
    """

    def __init__(
        self, path: Path, *, application_id: int, migrations: Sequence[Sequence[str]]
    ) -> None:
        self.path = path
        self._application_id, self._migrations = application_id, migrations
        self._lock = threading.RLock()
        self._opened: _Opened | None = None
        self._left_to_parent: list[_Opened] = []
        # Damage can be told when it matters: the first write may mend it.
        with contextlib.suppress(_UnreadableStoreError):
            self.read(lambda _: None, None)

    def read(self, query: Callable[[sqlite3.Connection], Result], default: Result) -> Result:
        """What the query finds, or the default where there is no file; raises StoreError."""
        is_there = size_of(self.path) > 0
        return self._attempt(query, PATIENCE_S, is_writing=False) if is_there else default

    def write(
        self, change: Callable[[sqlite3.Connection], Result], *, patience_s: float = PATIENCE_S
    ) -> Result:
        """Make a change wholly or not at all; raises StoreError.

        Waits for other writers for `patience_s`. `change` runs again if the file is lost while it
        runs, so it must not matter how often.
        """

        def transaction(connection: sqlite3.Connection) -> Result:
            with _transaction(connection):
                return change(connection)

        return self._attempt(transaction, patience_s, is_writing=True)

    def close(self) -> None:
        """Let go of the file; the next use opens it again."""
        with self._lock:
            opened, self._opened = self._opened, None
            if opened is not None and opened.pid == os.getpid():
                opened.connection.close()
            elif opened is not None:
                # Closing would drop the parent's files; so would losing the last reference.
                self._left_to_parent.append(opened)

    def _attempt(
        self,
        work: Callable[[sqlite3.Connection], Result],
        patience_s: float,
        *,
        is_writing: bool,
    ) -> Result:
        until = time.monotonic() + patience_s
        attempts, has_told = 0, False
        with self._lock:
            while attempts < _MOST_ATTEMPTS:
                file = file_at(self.path)
                try:
                    opened = self._current(until, is_writing=is_writing)
                    file = opened.file
                    result = work(opened.connection)
                    if opened.is_fixed:
                        self.close()
                    # Another process may have moved the file aside, and our change with it.
                    if opened.file == file_at(self.path):
                        return result
                except UnicodeDecodeError as error:
                    # A damaged schema whose damage SQLite quotes.
                    self._recover(_DamagedError(str(error)), file, is_writing=is_writing)
                except (sqlite3.Error, OSError) as error:
                    if _is_busy(error) and time.monotonic() < until:
                        if not has_told:
                            logger.warning(
                                "waiting for %s, which another process holds (at most %.0f s)",
                                self.path,
                                patience_s,
                            )
                        has_told = True
                        continue
                    self._recover(error, file, is_writing=is_writing)
                attempts += 1
        raise StoreError(
            f"{self.path} keeps being moved or found damaged; check the disk, or choose another "
            "place"
        )

    def _current(self, until: float, *, is_writing: bool) -> _Opened:
        opened = self._opened
        file = file_at(self.path)
        if opened is None or opened.pid != os.getpid() or opened.file != file:
            self.close()
            opened = self._opened = self._open(is_writing=is_writing)
        moment_s = min(max(until - time.monotonic(), 0.0), _MOMENT_S)
        opened.connection.execute(f"PRAGMA busy_timeout = {int(1000 * moment_s)}")
        return opened

    def _open(self, *, is_writing: bool) -> _Opened:
        if not is_writing and not may_be_written(self.path):
            return self._open_fixed()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked_folder(self.path.parent):
            is_new = size_of(self.path) == 0
            connection = sqlite3.connect(
                self.path, timeout=_MOMENT_S, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare(connection)
            except BaseException as error:
                connection.close()
                is_empty = size_of(self.path) == 0
                if is_new and (is_empty or _kind(error) in _NO_SPACE):
                    remove(self.path)
                raise
            file = file_at(self.path)
            return _Opened(connection, file, os.getpid(), is_fixed=False)

    def _open_fixed(self) -> _Opened:
        """Read a file that may not be written, in a folder where SQLite may make none."""
        # Where a writer's log is, its index is too; else the file is whole as it is.
        how = "mode=ro" if log_bytes(self.path) else "mode=ro&immutable=1"
        connection = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?{how}",
            uri=True,
            timeout=_MOMENT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            self._check(connection)
        except BaseException:
            connection.close()
            raise
        return _Opened(connection, file_at(self.path), os.getpid(), is_fixed=True)

    def _check(self, connection: sqlite3.Connection) -> int:
        """The version of a file that is sound and ours; raises StoreError, sqlite3.Error."""
        version = _pragma(connection, "user_version")
        owner = _pragma(connection, "application_id")
        kinds = {kind for (kind,) in connection.execute("SELECT type FROM sqlite_master")}
        is_ours = owner == self._application_id and (version > 0 or not kinds)
        if not is_ours and (owner or kinds):
            raise StoreError(
                f"{self.path} holds the tables of another program; choose another place"
            )
        # Ours have none, and SQLite would run what they say.
        if not kinds <= {"table", "index"}:
            raise StoreError(
                f"{self.path} has views or triggers, which no store has; choose another place"
            )
        if version > len(self._migrations):
            raise StoreError(
                f"{self.path} was written by a newer version (schema {version}, this one knows "
                f"{len(self._migrations)}); upgrade throughput-estimator, or choose another place"
            )
        verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise _DamagedError(verdict)
        # One text that is none must not keep all others from being read.
        connection.text_factory = _readable
        return version

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Check the file and bring its schema up to date."""
        version = self._check(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
        if version < len(self._migrations):
            # First, so that the file says whose it is however early its writer is killed.
            connection.execute(f"PRAGMA application_id = {self._application_id}")
            connection.execute("PRAGMA journal_mode = WAL")
            with _transaction(connection):
                for statements in self._migrations[version:]:
                    for statement in statements:
                        connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {len(self._migrations)}")

    def _recover(
        self, error: sqlite3.Error | OSError, file: tuple[int, int] | None, *, is_writing: bool
    ) -> None:
        """Move a damaged file out of the way; raises StoreError for all that this cannot mend."""
        if isinstance(error, StoreError):
            raise error
        if file is not None and file != file_at(self.path):
            return  # it was moved meanwhile; the next attempt opens what took its place
        is_damaged = _kind(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
        if is_damaged and not is_owned(self.path, self._application_id):
            raise StoreError(
                f"{self.path} is no store ({error}); choose another place with --store or "
                "ESTIMATOR_HOME"
            ) from None
        if is_damaged and is_writing:
            self.close()
            self._move_aside(file, str(error))
        elif is_damaged:
            raise _UnreadableStoreError(
                f"{self.path} is damaged ({error}); the next observation moves it aside and begins "
                "a new one"
            ) from None
        elif _is_busy(error):
            raise StoreError(
                f"{self.path} is busy (another process holds it); end that process or try again"
            ) from None
        else:
            reason, mend = cause(error), ""
            if _kind(error) in _NO_SPACE:
                free = shutil.disk_usage(self.path.absolute().parent).free
                reason, mend = f"{reason}, {free} bytes are free there", "free space or "
            raise StoreError(
                f"cannot use the store {self.path} ({reason}); {mend}choose another place with "
                "--store or ESTIMATOR_HOME"
            ) from None

    def _move_aside(self, file: tuple[int, int] | None, reason: str) -> None:
        with _locked_folder(self.path.parent):
            if file != file_at(self.path):
                return  # another process was faster
            date = datetime.now(UTC).strftime("%Y-%m-%dT%H%M%S.%fZ")
            aside = self.path.with_name(f"{self.path.name}.corrupt-{date}")
            # The log first: found beside a new file, it would be replayed into that one.
            for suffix in ("-wal", "-shm", ""):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(f"{self.path}{suffix}", f"{aside}{suffix}")
        logger.warning(
            "%s was damaged (%s); it is kept as %s and a new one takes its place",
            self.path,
            reason,
            aside.name,
        )


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _kind(error: BaseException) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _is_busy(error: BaseException) -> bool:
    return _kind(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


# Called for every text of every row.
_readable = partial(str, encoding="utf-8", errors="replace")


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # SQLite rolls back by itself when the disk is full.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Keep other processes from opening or moving the file meanwhile; leaves nothing behind."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
