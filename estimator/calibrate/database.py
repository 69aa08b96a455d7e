"""Open an SQLite file that many processes write, whatever has happened to it since."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from estimator.errors import StoreError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
PATIENCE_S = 30.0
_MAGIC = b"SQLite format 3\0"
_SUFFIXES = (".db", ".sqlite", ".sqlite3")
# A file that is moved aside while it is written is written again; more than that is no accident.
_MOST_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class _Opened:
    connection: sqlite3.Connection
    # Which file it is (device, inode), since another may have taken its name.
    file: tuple[int, int] | None
    # SQLite forbids to carry a connection over a fork.
    pid: int


class _DamagedError(sqlite3.DatabaseError):
    sqlite_errorcode = sqlite3.SQLITE_CORRUPT


class Database:
    """One file in WAL mode whose schema is `migrations`, each a list of statements.

    `PRAGMA user_version` counts the migrations that a file has seen. A damaged file is moved to
    NAME.corrupt-DATE with a warning, and a new one takes its place; a file of a newer schema or of
    another program is refused. A write that returned survives the death of the process at any time
    (`synchronous = NORMAL`; a power failure may cost the last moments, but does no damage). WAL
    needs shared memory: all writers run on one machine.
    """

    def __init__(
        self, path: Path, *, application_id: int, migrations: Sequence[Sequence[str]]
    ) -> None:
        self.path = path
        self._application_id, self._migrations = application_id, migrations
        self._lock = threading.RLock()
        self._opened: _Opened | None = None
        self._left_to_parent: list[_Opened] = []
        if path.exists():
            self._attempt(lambda _: None)

    def read(self, query: Callable[[sqlite3.Connection], Result], default: Result) -> Result:
        """What the query finds, or the default where there is no file; raises StoreError."""
        return self._attempt(query) if self.path.exists() else default

    def write(
        self, change: Callable[[sqlite3.Connection], Result], *, patience_s: float = PATIENCE_S
    ) -> Result:
        """Make a change wholly or not at all; raises StoreError.

        Waits for other writers for `patience_s`. `change` runs again if the file is lost while it
        runs, so it must not matter how often.
        """

        def transaction(connection: sqlite3.Connection) -> Result:
            connection.execute(f"PRAGMA busy_timeout = {int(1000 * patience_s)}")
            with _transaction(connection):
                return change(connection)

        return self._attempt(transaction)

    def close(self) -> None:
        """Let go of the file; the next use opens it again."""
        with self._lock:
            opened, self._opened = self._opened, None
            if opened is not None and opened.pid == os.getpid():
                opened.connection.close()
            elif opened is not None:
                # Closing would drop the parent's files; so would losing the last reference.
                self._left_to_parent.append(opened)

    def _attempt(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        with self._lock:
            for _ in range(_MOST_ATTEMPTS):
                file = _file_at(self.path)
                try:
                    opened = self._current()
                    file = opened.file
                    result = work(opened.connection)
                    # Another process may have moved the file aside, and our change with it.
                    if opened.file == _file_at(self.path):
                        return result
                except UnicodeDecodeError as error:
                    # A damaged schema whose damage SQLite quotes.
                    self._recover(_DamagedError(str(error)), file)
                except (sqlite3.Error, OSError) as error:
                    self._recover(error, file)
        raise StoreError(
            f"{self.path} keeps being moved or found damaged; check the disk, or choose another "
            "place"
        )

    def _current(self) -> _Opened:
        opened = self._opened
        if opened is not None and opened.pid == os.getpid() and opened.file == _file_at(self.path):
            return opened
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked_folder(self.path.parent):
            connection = sqlite3.connect(
                self.path, timeout=PATIENCE_S, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._opened = _Opened(connection, _file_at(self.path), os.getpid())
        return self._opened

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Check the file and bring its schema up to date."""
        version = _pragma(connection, "user_version")
        owner = _pragma(connection, "application_id")
        tables = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if tables and (owner != self._application_id or version < 1):
            raise StoreError(
                f"{self.path} holds the tables of another program; choose another place"
            )
        if version > len(self._migrations):
            raise StoreError(
                f"{self.path} was written by a newer version (schema {version}, this one knows "
                f"{len(self._migrations)}); upgrade throughput-estimator, or choose another place"
            )
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise _DamagedError(found)
        connection.execute("PRAGMA synchronous = NORMAL")
        if version < len(self._migrations):
            connection.execute("PRAGMA journal_mode = WAL")
            with _transaction(connection):
                for statements in self._migrations[version:]:
                    for statement in statements:
                        connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {self._application_id}")
                connection.execute(f"PRAGMA user_version = {len(self._migrations)}")

    def _recover(self, error: sqlite3.Error | OSError, file: tuple[int, int] | None) -> None:
        """Move a damaged file out of the way; raises StoreError for all that this cannot mend."""
        if isinstance(error, StoreError):
            raise error
        if file is not None and file != _file_at(self.path):
            return  # it was moved meanwhile; the next attempt opens what took its place
        code = getattr(error, "sqlite_errorcode", None)
        kind = None if code is None else code & 0xFF
        if kind in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) and self._may_be_ours():
            self.close()
            self._move_aside(file, str(error))
        elif kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise StoreError(
                f"{self.path} is busy (another process holds it); end that process or try again"
            ) from None
        else:
            raise StoreError(
                f"cannot use the store {self.path} ({error}); choose another place with --store "
                "or ESTIMATOR_HOME"
            ) from None

    def _may_be_ours(self) -> bool:
        """Whether this was a database, rather than someone's text named by mistake."""
        try:
            with self.path.open("rb") as stream:
                start = stream.read(len(_MAGIC))
        except FileNotFoundError:
            return True  # another process has moved it
        return start == _MAGIC or self.path.suffix in _SUFFIXES

    def _move_aside(self, file: tuple[int, int] | None, reason: str) -> None:
        with _locked_folder(self.path.parent):
            if file != _file_at(self.path):
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


def _file_at(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


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
