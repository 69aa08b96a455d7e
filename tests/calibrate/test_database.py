"""A file of an older schema is brought up to date without losing what it holds."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from estimator.calibrate.database import Database

FIRST = ("CREATE TABLE things (name TEXT)", "INSERT INTO things VALUES ('old')")
SECOND = ("ALTER TABLE things ADD COLUMN size INTEGER NOT NULL DEFAULT 7",)


def test_a_file_of_an_older_schema_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "things.db"
    older = Database(path, application_id=1, migrations=[FIRST])
    older.write(lambda connection: connection.execute("INSERT INTO things VALUES ('new')"))
    older.close()
    newer = Database(path, application_id=1, migrations=[FIRST, SECOND])
    rows = newer.read(lambda found: found.execute("SELECT * FROM things").fetchall(), [])
    assert rows == [("old", 7), ("new", 7)]
    assert newer.read(lambda found: found.execute("PRAGMA user_version").fetchone(), None) == (2,)


def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "things.db"
    older = Database(path, application_id=1, migrations=[FIRST])
    older.write(lambda connection: connection.execute("DELETE FROM things WHERE name = 'none'"))
    older.close()
    broken = ("ALTER TABLE things ADD COLUMN size INTEGER", "ALTER TABLE missing ADD COLUMN x")
    with pytest.raises(OSError, match="no such table"):
        Database(path, application_id=1, migrations=[FIRST, broken])
    again = Database(path, application_id=1, migrations=[FIRST])
    assert again.read(lambda found: found.execute("SELECT * FROM things").fetchall(), []) == [
        ("old",)
    ]


def test_a_change_that_fails_half_way_is_undone(tmp_path: Path) -> None:
    store = Database(tmp_path / "things.db", application_id=1, migrations=[FIRST])

    def fail(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO things VALUES ('half')")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.write(fail)
    assert store.read(lambda found: found.execute("SELECT * FROM things").fetchall(), []) == [
        ("old",)
    ]


WRITES_LITTLE = """
import resource, sys
from pathlib import Path
from estimator.calibrate.database import Database
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
store = Database(Path(sys.argv[1]), application_id=1, migrations=[["CREATE TABLE a (b TEXT)"]])
try:
    store.write(lambda found: found.execute("INSERT INTO a VALUES ('x')"))
except OSError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("most_bytes", [0, 4096, 8192, 20_000])
def test_a_disk_without_space_keeps_no_half_made_store(most_bytes: int, tmp_path: Path) -> None:
    # A process that may write files of so few bytes meets what a full disk answers.
    path = tmp_path / "full.db"
    ended = subprocess.run(
        [sys.executable, "-c", WRITES_LITTLE, path, str(most_bytes)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "bytes are free there); free space or choose another place" in ended.stderr
    assert not list(tmp_path.glob("full.db*"))
