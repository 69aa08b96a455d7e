"""Keep timed operator calls in a file, by call and machine."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from estimator.errors import StoreError, cause
from estimator.graph.ops import OpTiming
from estimator.tensors import OpCall

_TABLE = """
CREATE TABLE IF NOT EXISTS timings (
    machine TEXT NOT NULL,
    call TEXT NOT NULL,
    seconds REAL NOT NULL,
    spread_ratio REAL NOT NULL,
    PRIMARY KEY (machine, call)
) WITHOUT ROWID
"""


class TimingStore:
    """Timings of one machine in an SQLite file that several processes may share."""

    def __init__(self, path: Path, machine: str) -> None:
        self.path, self.machine = path, machine

    def read(self, calls: Iterable[OpCall]) -> dict[OpCall, OpTiming]:
        """The calls that were timed on this machine before; raises StoreError."""
        if not self.path.exists():
            return {}
        found: dict[OpCall, OpTiming] = {}
        with self._open() as connection:
            for call in calls:
                row = connection.execute(
                    "SELECT seconds, spread_ratio FROM timings WHERE machine = ? AND call = ?",
                    (self.machine, _key(call)),
                ).fetchone()
                if row is not None:
                    found[call] = OpTiming(seconds=row[0], noise_ratio=row[1])
        return found

    def write(self, timings: Mapping[OpCall, OpTiming]) -> None:
        """Keep timings, in place of older ones of the same calls; raises StoreError."""
        rows = [
            (self.machine, _key(call), timing.seconds, timing.noise_ratio)
            for call, timing in timings.items()
        ]
        with self._open() as connection:
            connection.executemany("INSERT OR REPLACE INTO timings VALUES (?, ?, ?, ?)", rows)

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.closing(sqlite3.connect(self.path, timeout=30.0)) as connection:
                connection.execute("PRAGMA journal_mode=WAL")
                with connection:
                    connection.execute(_TABLE)
                    yield connection
        except (sqlite3.Error, OSError) as error:
            raise StoreError(
                f"cannot use the timing store {self.path} ({cause(error)}); delete it, or choose "
                "another place with ESTIMATOR_HOME"
            ) from None


def _key(call: OpCall) -> str:
    return json.dumps(call.encode(), sort_keys=True, separators=(",", ":"))
