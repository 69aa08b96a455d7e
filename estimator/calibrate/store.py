"""Keep observed step times in an SQLite file that many processes write at once."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from estimator.calibrate.database import PATIENCE_S, Database
from estimator.calibrate.observed import (
    Observation,
    ObservedWorkload,
    latest_noise_samples,
)
from estimator.errors import StoreError, quoted
from estimator.files import home

if TYPE_CHECKING:
    from estimator.graph.ir.op_graph import OpGraph

__all__ = ["Observation", "ObservationStore", "ObservedWorkload"]

logger = logging.getLogger(__name__)

Read = TypeVar("Read")

# Marks the file as ours ("Thru" in ASCII).
_APPLICATION_ID = 0x54687275
_MIGRATIONS = (
    (
        """CREATE TABLE workloads (
            name TEXT PRIMARY KEY NOT NULL,
            parameter_bytes INTEGER,
            tensors INTEGER,
            flops_per_sample REAL,
            optimizer TEXT,
            precision TEXT
        )""",
        """CREATE TABLE observations (
            number INTEGER PRIMARY KEY,
            identity TEXT NOT NULL UNIQUE,
            revision INTEGER NOT NULL,
            at TEXT NOT NULL,
            workload TEXT NOT NULL REFERENCES workloads (name),
            allocation TEXT NOT NULL,
            ranks INTEGER NOT NULL,
            nodes INTEGER NOT NULL,
            most_on_node INTEGER NOT NULL,
            strategy TEXT NOT NULL,
            batch_per_gpu INTEGER NOT NULL,
            accumulation_steps INTEGER NOT NULL,
            step_time_s REAL NOT NULL CHECK (step_time_s > 0),
            steps INTEGER NOT NULL,
            spread_ratio REAL,
            source TEXT NOT NULL
        )""",
        "CREATE INDEX observations_of_workload ON observations (workload, step_time_s)",
        "CREATE INDEX observations_by_revision ON observations (revision)",
        "CREATE TABLE state (revision INTEGER NOT NULL)",
        "INSERT INTO state VALUES (0)",
    ),
    # A job is what it computes: of what was kept before, only the name is known.
    (
        "ALTER TABLE observations ADD COLUMN fingerprint TEXT",
        "CREATE INDEX observations_of_job ON observations (fingerprint, step_time_s)",
        """CREATE TABLE jobs (
            name TEXT NOT NULL,
            parameter_bytes INTEGER,
            tensors INTEGER,
            flops_per_sample REAL,
            optimizer TEXT,
            precision TEXT,
            fingerprint TEXT NOT NULL,
            PRIMARY KEY (name, fingerprint)
        )""",
        """INSERT INTO jobs SELECT
            name, parameter_bytes, tensors, flops_per_sample, optimizer, precision, ''
        FROM workloads""",
        "DROP TABLE workloads",
    ),
    # All steps that were kept before are of data-parallel ranks.
    ("ALTER TABLE observations ADD COLUMN layout TEXT",),
    ("ALTER TABLE observations ADD COLUMN gradient_noise_samples REAL",),
)
# Of the observations too: a file whose state was deleted is still of use.
_REVISION = """SELECT MAX(
    COALESCE((SELECT MAX(CAST(revision AS INTEGER)) FROM state), 0),
    COALESCE((SELECT MAX(CAST(revision AS INTEGER)) FROM observations), 0)
)"""
# What is read of each table; the other columns are of earlier versions, or of use to queries.
_COLUMNS = (
    "identity",
    "at",
    "workload",
    "allocation",
    "strategy",
    "batch_per_gpu",
    "accumulation_steps",
    "step_time_s",
    "steps",
    "source",
    "fingerprint",
    "layout",
    "gradient_noise_samples",
)
_KNOWN_OF_JOBS = ("parameter_bytes", "optimizer", "precision")


class ObservationStore:
    """Observations in one SQLite file, by default ``observations.db`` in the user's store.

    Any number of processes of one machine may write at once. What `add` has returned for stays,
    whenever the process is killed. A damaged file is moved to NAME.corrupt-DATE with a warning in
    the log. Everything raises StoreError where the file cannot be used.

    >>> import tempfile
    >>> store = ObservationStore(Path(tempfile.mkdtemp()) / "observations.db")
    >>> store.add(
    ...     Observation(workload="gpt2", allocation="1x2:local", batch_per_gpu=8, step_time_s=0.4)
    ... )
    True
    >>> [(one.ranks, one.step_time_s) for one in store], store.revision
    ([(2, 0.4)], 1)
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        if path is not None and not isinstance(path, str | os.PathLike):
            raise StoreError(f"a store is a path, found {quoted(path)}; write one")
        self.path = Path(path) if path is not None else home() / "observations.db"
        self._database = Database(self.path, application_id=_APPLICATION_ID, migrations=_MIGRATIONS)

    def add(self, observation: Observation, *, patience_s: float = PATIENCE_S) -> bool:
        """Keep one observation; False: it was known already, by its identity."""
        return self.add_many([observation], patience_s=patience_s) == 1

    def add_many(
        self,
        observations: Iterable[Observation],
        *,
        summaries: Iterable[ObservedWorkload] = (),
        patience_s: float = PATIENCE_S,
    ) -> int:
        """Keep observations in one transaction; how many were new.

        What `summaries` know of their workloads takes the place of what was known. Waits at most
        `patience_s` for other writers.
        """
        given, described = list(observations), list(summaries)
        if not given and not described:
            return 0
        return self._database.write(
            lambda connection: _insert(connection, given, described), patience_s=patience_s
        )

    def observations(
        self,
        *,
        workload: str | None = None,
        of_job: ObservedWorkload | None = None,
        added_after: int | None = None,
        of_known_content: bool = False,
    ) -> list[Observation]:
        """What was observed, in the order of arrival.

        `added_after` is a revision: what has come since it was read. `of_job` is a job by its
        content: also what was observed of its name where the content is unknown, unless what is
        known contradicts that. `of_known_content` leaves out the latter.
        """
        wanted = {"workload = ?": workload, "revision > ?": added_after}
        chosen = {text: value for text, value in wanted.items() if value is not None}
        conditions, values = list(chosen), list[Any](chosen.values())
        if of_known_content:
            conditions.append("fingerprint IS NOT NULL")
        if of_job is not None:
            by_name = "" if of_job.contradicts(self._known_by_name(of_job.name)) else of_job.name
            conditions.append("(fingerprint = ? OR fingerprint IS NULL AND workload = ?)")
            values += [of_job.fingerprint, by_name]
        rows = self._query(
            f"SELECT {', '.join(_COLUMNS)} FROM observations "
            f"WHERE {' AND '.join(conditions) or 'TRUE'} ORDER BY number",
            values,
        )
        return _read_all(rows, _observation)

    def gradient_noise_samples(self, workload: str | ObservedWorkload | OpGraph) -> float | None:
        """The gradient noise scale of a job when it was last measured; None where it never was."""
        job = ObservedWorkload.of(workload)
        known = {"of_job": job} if job.fingerprint else {"workload": job.name}
        return latest_noise_samples(self.observations(**known))

    def __iter__(self) -> Iterator[Observation]:
        return iter(self.observations())

    def __len__(self) -> int:
        return self._number("SELECT COUNT(*) FROM observations")

    @property
    def revision(self) -> int:
        """A number that rises whenever something is added: whether a refit is due."""
        return self._number(_REVISION)

    def jobs_since(self, since: datetime, *, least: int) -> list[tuple[str, str]]:
        """The jobs, as `Observation.job` has them, seen so often since a moment; the last last."""
        rows = self._query(
            """SELECT fingerprint, workload FROM observations WHERE at >= ?
            GROUP BY fingerprint, CASE WHEN fingerprint IS NULL THEN workload END
            HAVING COUNT(*) >= ? ORDER BY MAX(at)""",
            (_time_text(since), least),
        )
        return [("name", name) if known is None else ("content", known) for known, name in rows]

    def workloads(self) -> dict[str, ObservedWorkload]:
        """Every workload observed or described, by name; the last described of several."""
        return {workload.name: workload for workload in self._described()}

    def _known_by_name(self, name: str) -> ObservedWorkload:
        """What is known of a job of which only the name is."""
        described = self._described("WHERE name = ? AND fingerprint = ''", name)
        return described[0] if described else ObservedWorkload(name=name)

    def _described(self, which: str = "", *values: str) -> list[ObservedWorkload]:
        names = ("name", *_KNOWN_OF_JOBS, "fingerprint")
        query = f"SELECT {', '.join(names)} FROM jobs {which} ORDER BY name, rowid"
        return _read_all(self._query(query, values), _workload)

    def close(self) -> None:
        """Let go of the file; the next use opens it again."""
        self._database.close()

    def __enter__(self) -> ObservationStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _query(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows that are found, none where there is no file."""
        return self._database.read(
            lambda connection: connection.execute(query, values).fetchall(), list[Any]()
        )

    def _number(self, query: str) -> int:
        rows = self._query(query)
        return int(rows[0][0]) if rows else 0


def opened(store: ObservationStore | str | os.PathLike[str] | None) -> ObservationStore:
    """A store as it is, that of a path, or the user's own."""
    return store if isinstance(store, ObservationStore) else ObservationStore(store)


def _insert(
    connection: sqlite3.Connection,
    observations: Iterable[Observation],
    summaries: Iterable[ObservedWorkload],
) -> int:
    revision = connection.execute(_REVISION).fetchone()[0] + 1
    before = connection.total_changes
    known = _KNOWN_OF_JOBS
    connection.executemany(
        # Unknown fields keep what is known; a description that says nothing new changes nothing.
        f"INSERT INTO jobs (name, {', '.join(known)}, fingerprint) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT (name, fingerprint) DO UPDATE SET "
        + ", ".join(f"{name} = COALESCE(excluded.{name}, {name})" for name in known)
        + " WHERE "
        + " OR ".join(f"COALESCE(excluded.{name}, {name}) IS NOT {name}" for name in known),
        [(*astuple(one)[:-1], one.fingerprint or "") for one in summaries],
    )
    connection.executemany(
        "INSERT INTO jobs (name, fingerprint) VALUES (?, ?) ON CONFLICT DO NOTHING",
        {(one.workload, one.fingerprint or "") for one in observations},
    )
    described = connection.total_changes
    columns = (*_COLUMNS, "ranks", "nodes", "most_on_node")
    connection.executemany(
        f"INSERT INTO observations ({', '.join(columns)}, revision) "
        f"VALUES ({'?, ' * len(columns)}?) ON CONFLICT (identity) DO NOTHING",
        [(*(_cell(getattr(one, name)) for name in columns), revision) for one in observations],
    )
    added = connection.total_changes - described
    if connection.total_changes > before:
        connection.execute("DELETE FROM state")
        connection.execute("INSERT INTO state VALUES (?)", (revision,))
    return added


def _cell(value: Any) -> Any:
    return _time_text(value) if isinstance(value, datetime) else value


def _read_all(rows: Iterable[Sequence[Any]], read: Callable[[Sequence[Any]], Read]) -> list[Read]:
    """What rows say, without those that were altered to say what cannot be, told in the log.

    One such row must not keep all others from being used.
    """
    readings, reasons = list[Read](), list[tuple[str, str]]()
    for row in rows:
        try:
            readings.append(read(row))
        except (ValueError, TypeError, OverflowError) as error:
            reasons.append((quoted(row[0]), str(error)))
    if reasons:
        _tell_left_out(len(reasons), *reasons[0])
    return readings


# Rows never change, and checking one costs more than reading it.
@lru_cache(maxsize=16384, typed=True)
def _observation(row: tuple[Any, ...]) -> Observation:
    fields = dict(zip(_COLUMNS, row, strict=True))
    return Observation(**fields | {"at": datetime.fromisoformat(fields["at"])})


def _workload(row: Sequence[Any]) -> ObservedWorkload:
    name, *known, fingerprint = row
    fields = dict(zip(_KNOWN_OF_JOBS, known, strict=True))
    return ObservedWorkload(name=name, fingerprint=fingerprint or None, **fields)


@lru_cache(maxsize=1024)
def _tell_left_out(count: int, first: str, reason: str) -> None:
    """Once in a process: a store is read again and again."""
    logger.warning(
        "%d of the store's rows are left out, such as %s (%s); delete them from the store",
        count,
        first,
        reason,
    )


def _time_text(at: datetime) -> str:
    # One length and one zone, so that texts sort as times do.
    return at.astimezone(UTC).isoformat(timespec="microseconds")
