"""Observations are kept whole, once each, whatever happens to their writers and their file."""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estimator.calibrate.database import Database
from estimator.calibrate.store import _MIGRATIONS, Observation, ObservationStore, ObservedWorkload
from estimator.errors import EstimatorError, ObservationError, StoreError
from tests.budgets import examples
from tests.fuzz.killed_writers import kill_writers, write_together


def seen(step_time_s: float = 0.4, **fields: Any) -> Observation:
    given = {"workload": "gpt2", "allocation": "1x2:t4", "batch_per_gpu": 8} | fields
    return Observation(step_time_s=step_time_s, **given)


@pytest.fixture
def kept(tmp_path: Path) -> ObservationStore:
    """A store without a file yet."""
    return ObservationStore(tmp_path / "observations.db")


def alter(kept: ObservationStore, statement: str) -> None:
    """Run a statement of SQL on the file of a store that nobody else has open."""
    kept.close()
    with contextlib.closing(sqlite3.connect(kept.path)) as connection, connection:
        connection.execute(statement)


def steps_of(store: ObservationStore, **conditions: Any) -> list[float]:
    return [one.step_time_s for one in store.observations(**conditions)]


def test_what_was_kept_is_read_back(kept: ObservationStore) -> None:
    at = datetime(2026, 1, 2, 3, tzinfo=timezone(timedelta(hours=1)))
    given = seen(
        allocation="a1[0,1] + a2[3] + a1[2]",
        accumulation_steps=2,
        strategy="zero3",
        steps=50,
        source="a table",
        at=at,
    )
    assert kept.add(given)
    (found,) = ObservationStore(kept.path)
    assert found == given
    assert (found.ranks, found.nodes, found.most_on_node) == (4, 2, 3)
    assert (found.strategy, found.accumulation_steps) == ("fsdp", 2)
    assert found.at == at


def test_the_same_observation_is_kept_once(kept: ObservationStore) -> None:
    first, second = seen(), seen()
    assert kept.add_many([first, second]) == 2
    revision = kept.revision
    assert kept.add_many([first, second, first]) == 0
    assert (len(kept), kept.revision) == (2, revision)


def test_the_revision_tells_what_has_come_since(kept: ObservationStore) -> None:
    assert kept.revision == 0
    assert not kept.path.exists(), "reading makes no file"
    kept.add(seen(0.4))
    before = kept.revision
    kept.add(seen(0.5))
    assert kept.revision > before
    assert steps_of(kept, added_after=before) == [0.5]


def test_observations_are_chosen_by_what_they_are_of(kept: ObservationStore) -> None:
    kept.add_many([seen(0.1), seen(0.2, workload="bert"), seen(0.3, fingerprint="f")])
    assert steps_of(kept, workload="gpt2") == [0.1, 0.3]
    assert steps_of(kept, of_known_content=True) == [0.3]


def test_what_is_known_of_a_workload_is_filled_in_and_kept(kept: ObservationStore) -> None:
    kept.add(seen())
    assert kept.workloads() == {"gpt2": ObservedWorkload(name="gpt2")}
    kept.add_many(
        [], summaries=[ObservedWorkload(name="gpt2", parameter_bytes=100, optimizer="sgd")]
    )
    revision = kept.revision
    kept.add_many([], summaries=[ObservedWorkload(name="gpt2", optimizer="sgd")])
    assert kept.revision == revision
    kept.add_many(
        [], summaries=[ObservedWorkload(name="gpt2", optimizer="adamw", precision="fp32")]
    )
    known = ObservedWorkload(name="gpt2", parameter_bytes=100, optimizer="adamw", precision="fp32")
    assert kept.workloads() == {"gpt2": known}


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_time_s": math.nan},
        {"step_time_s": 0.0},
        {"step_time_s": -0.4},
        {"step_time_s": math.inf},
        {"step_time_s": None},
        {"step_time_s": "0.4"},
        {"batch_per_gpu": 0},
        {"batch_per_gpu": 2.5},
        {"batch_per_gpu": 2**63},
        {"batch_per_gpu": 10**5000},
        {"batch_per_gpu": 10**9 + 1},
        {"accumulation_steps": 10**7},
        {"steps": 10**13},
        {"step_time_s": 1e-10},
        {"step_time_s": 1e10},
        {"step_time_s": 10**400},
        {"accumulation_steps": -1},
        {"steps": 0},
        {"workload": " "},
        {"workload": "two\nlines"},
        {"workload": "x" * 501},
        {"source": ""},
        {"allocation": "two GPUs"},
        {"strategy": "magic"},
        {"at": datetime(2026, 1, 2)},
        {"at": datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1)))},
        {"at": datetime(1969, 12, 31, tzinfo=UTC)},
        {"at": datetime.now(UTC) + timedelta(days=2)},
        {"at": datetime(2121, 1, 1, tzinfo=UTC)},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(EstimatorError, match=r".{30}"):
        seen(**wrong)


def test_a_workload_beyond_all_measure_is_refused() -> None:
    for wrong in ({"parameter_bytes": 10**19}, {"parameter_bytes": 0}, {"optimizer": ""}):
        with pytest.raises(ObservationError, match=next(iter(wrong))):
            ObservedWorkload(name="gpt2", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        "accumulation_steps = 10000000",
        "at = '2130-01-01T00:00:00.000000+00:00'",
        "at = '0001-01-01T00:00:00.000000+14:00'",
        "at = 'yesterday'",
        "allocation = 'two GPUs'",
        "step_time_s = 'fast'",
        "batch_per_gpu = 1e300",
        "source = x'00ff'",
    ],
)
def test_a_row_that_no_observation_can_be_keeps_none_of_the_others_out(
    change: str, kept: ObservationStore, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = seen(0.4), seen(0.41)
    kept.add_many([one, other])
    alter(kept, f"UPDATE observations SET {change} WHERE number = 1")
    assert kept.observations(workload="gpt2") == [other]
    assert list(kept) == [other]
    # Said once, however often the store is read.
    assert len([line for line in caplog.messages if one.identity in line]) == 1


@pytest.mark.parametrize("column", ["workload", "fingerprint"])
def test_a_row_whose_job_is_no_text_is_read(column: str, kept: ObservationStore) -> None:
    kept.add_many([seen(0.4), seen(0.41)])
    alter(kept, f"UPDATE observations SET {column} = CAST(x'67ff' AS TEXT)")
    assert steps_of(kept) == [0.4, 0.41]


def test_a_store_without_its_state_is_read_and_written(kept: ObservationStore) -> None:
    kept.add_many([seen(), seen()])
    alter(kept, "DELETE FROM state")
    assert (kept.revision, len(kept)) == (1, 2)
    kept.add(seen())
    assert (kept.revision, len(kept)) == (2, 3)


def test_numbers_of_numpy_are_numbers(kept: ObservationStore) -> None:
    kept.add(seen(np.float32(0.5), batch_per_gpu=np.int64(8)))
    (found,) = kept
    assert (found.step_time_s, found.batch_per_gpu) == (0.5, 8)


# Files that something happened to


def damaged(path: Path, how: str) -> bytes:
    """Damage a store of 500 observations; what the file then holds."""
    with ObservationStore(path) as store:
        store.add_many([seen() for _ in range(500)])
    whole = path.read_bytes()
    middle = len(whole) // 2
    content = {
        "garbage": whole[:100] + b"garbage" * 1000,
        "cut off": whole[:middle],
        "zeroed": whole[:4096] + bytes(len(whole) - 4096),
        "overwritten": whole[:middle] + os.urandom(8192) + whole[middle + 8192 :],
    }[how]
    path.write_bytes(content)
    return content


@pytest.mark.parametrize("how", ["garbage", "cut off", "zeroed", "overwritten"])
def test_a_damaged_file_is_moved_aside_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    path = tmp_path / "observations.db"
    content = damaged(path, how)
    store = ObservationStore(path)
    assert store.add(seen())
    assert len(store) == 1
    (aside,) = tmp_path.glob("observations.db.corrupt-*Z")
    assert aside.read_bytes() == content
    assert aside.name in caplog.text


@pytest.mark.parametrize("how", ["garbage", "cut off", "zeroed", "overwritten"])
def test_a_damaged_file_that_is_only_read_stays_where_it_is(tmp_path: Path, how: str) -> None:
    path = tmp_path / "observations.db"
    content = damaged(path, how)
    with pytest.raises(StoreError, match="is damaged"):
        list(ObservationStore(path))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {path.name: content}


def test_whatever_bytes_are_altered_only_errors_of_the_package_are_raised(tmp_path: Path) -> None:
    with ObservationStore(tmp_path / "whole.db") as store:
        store.add_many([seen(0.1 + number, workload=f"w{number % 3}") for number in range(60)])
    whole = (tmp_path / "whole.db").read_bytes()
    chance = random.Random(0)
    for number in range(40):
        content = bytearray(whole)
        for _ in range(chance.choice((1, 8, 64))):
            content[chance.randrange(chance.choice((100, len(content))))] = chance.randrange(256)
        path = tmp_path / f"{number}.db"
        path.write_bytes(content)
        with contextlib.suppress(EstimatorError), ObservationStore(path) as store:
            store.add(seen())
            assert len(list(store)) >= 1
            store.workloads()


def test_damage_while_the_file_is_in_use_loses_no_later_observation(
    kept: ObservationStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept.add(seen(0.1))
    other = ObservationStore(kept.path)
    start = kept.path.read_bytes()[:100]
    for suffix, left in (("", start), ("-wal", b"")):
        Path(f"{kept.path}{suffix}").write_bytes(left + b"garbage" * 1000)
    kept.close()  # as a process that starts now
    assert kept.add(seen(0.2))
    assert other.add(seen(0.3))
    assert steps_of(ObservationStore(kept.path)) == [0.2, 0.3]
    assert len(list(tmp_path.glob("*.corrupt-*Z"))) == 1


def test_a_file_deleted_under_an_open_store_is_made_again(kept: ObservationStore) -> None:
    kept.add(seen(0.1))
    for file in kept.path.parent.iterdir():
        file.unlink()
    kept.add(seen(0.2))
    assert steps_of(ObservationStore(kept.path)) == [0.2]


TRIGGER = "CREATE TRIGGER gone AFTER INSERT ON observations BEGIN DELETE FROM observations; END"


@pytest.mark.parametrize(
    ("statement", "is_store", "said"),
    [
        ("PRAGMA user_version = 99", True, "schema 99"),
        (TRIGGER, True, "views or triggers"),
        ("CREATE TABLE timings (seconds REAL)", False, "another program"),
        # A text file named by mistake.
        (None, False, "not a database"),
    ],
)
def test_what_is_no_store_of_this_version_is_refused_and_stays(
    statement: str | None, is_store: bool, said: str, kept: ObservationStore
) -> None:
    if is_store:
        kept.add(seen())
    if statement is None:
        kept.path.write_text("not a store\n")
    else:
        alter(kept, statement)
    content = kept.path.read_bytes()
    with pytest.raises(StoreError, match=said):
        ObservationStore(kept.path).add(seen())
    assert kept.path.read_bytes() == content
    assert [file.name for file in kept.path.parent.iterdir()] == [kept.path.name]


@pytest.mark.parametrize("owner", [0, 7])
def test_reading_the_damaged_database_of_another_program_changes_nothing(
    owner: int, tmp_path: Path
) -> None:
    path = tmp_path / "notes.db"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"PRAGMA application_id = {owner}")
        connection.execute("CREATE TABLE notes (text TEXT)")
        connection.executemany("INSERT INTO notes VALUES (?)", [("note" * 100,)] * 100)
    content = path.read_bytes()
    content = content[:5000] + b"garbage" * 1000 + content[12000:]
    path.write_bytes(content)
    for use in (list, len, lambda store: store.add(seen())):
        with pytest.raises(StoreError, match="choose another place"):
            use(ObservationStore(path))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {path.name: content}


def test_a_store_in_a_place_that_cannot_be_written_is_read(
    kept: ObservationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.add(seen(0.1))
    with monkeypatch.context() as patch:
        # Root may write anywhere.
        patch.setattr("estimator.calibrate.database.may_be_written", lambda _: False)
        beside_a_writer = ObservationStore(kept.path)
        assert steps_of(beside_a_writer) == [0.1]
        kept.close()
        before = {file.name for file in kept.path.parent.iterdir()}
        reader = ObservationStore(kept.path)
        assert (steps_of(reader), reader.revision) == ([0.1], 1)
        # Nothing that SQLite keeps beside a store was made.
        assert {file.name for file in kept.path.parent.iterdir()} == before == {kept.path.name}
    kept.add(seen(0.2))
    assert steps_of(reader) == [0.1, 0.2]


def test_reading_an_empty_or_missing_store_makes_none(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    for name in ("empty.db", "missing.db"):
        store = ObservationStore(tmp_path / name)
        assert (list(store), store.revision, store.workloads()) == ([], 0, {})
    assert [(file.name, file.stat().st_size) for file in tmp_path.iterdir()] == [("empty.db", 0)]
    assert ObservationStore(tmp_path / "empty.db").add(seen())


def test_a_store_that_cannot_be_begun_leaves_no_file(
    kept: ObservationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("estimator.calibrate.database.Database._prepare", full)
        with pytest.raises(StoreError, match="disk is full"):
            kept.add(seen())
    assert list(kept.path.parent.iterdir()) == []
    assert kept.add(seen())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("pipe", "no regular file"),
        ("device", "no regular file"),
        ("folder", "choose another place"),
    ],
)
def test_what_is_no_regular_file_is_no_store(kind: str, said: str, tmp_path: Path) -> None:
    path = {"pipe": tmp_path / "pipe", "device": Path("/dev/zero"), "folder": tmp_path}[kind]
    if kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(StoreError, match=said):
        ObservationStore(path)


def test_a_wait_for_another_writer_is_said(
    kept: ObservationStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("estimator.calibrate.database._MOMENT_S", 0.01)
    kept.add(seen(0.1))
    holder = sqlite3.connect(kept.path, isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    end = threading.Timer(0.3, holder.close)
    end.start()
    assert kept.add(seen(0.2))
    end.join()
    (line,) = [line for line in caplog.messages if "waiting for" in line]
    assert "another process holds (at most 30 s)" in line


def test_a_busy_store_is_given_up_after_the_patience_allowed(kept: ObservationStore) -> None:
    kept.add(seen(0.1))
    holder = sqlite3.connect(kept.path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="busy"):
        kept.add(seen(0.2), patience_s=0.01)
    holder.close()
    assert kept.add(seen(0.3))
    assert steps_of(kept) == [0.1, 0.3]


# Many processes


def test_no_acknowledged_observation_is_lost_when_writers_are_killed(tmp_path: Path) -> None:
    assert kill_writers(tmp_path / "observations.db", kills=examples(3)).is_sound


def test_processes_that_write_at_once_lose_and_double_nothing(tmp_path: Path) -> None:
    found = write_together(tmp_path / "observations.db", writers=3, observations=400)
    assert found.written == 1200
    assert found.is_sound


WRITES_AND_ENDS = """
import sys
from pathlib import Path
from estimator.calibrate.store import Observation, ObservationStore
with ObservationStore(Path(sys.argv[1])) as store:
    job = {"workload": "gpt2", "allocation": "1x2:t4", "batch_per_gpu": 8}
    store.add(Observation(step_time_s=float(sys.argv[2]), **job))
    print(*(one.step_time_s for one in store))
"""


def written_elsewhere(path: Path, step_s: float) -> list[float]:
    """What a process of its own finds in a store once it has added a step."""
    command = [sys.executable, "-c", WRITES_AND_ENDS, str(path), str(step_s)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def test_two_stores_of_a_process_lose_nothing_that_either_keeps(kept: ObservationStore) -> None:
    # Whoever reads a database beside SQLite and closes it drops the locks of its whole process
    # (sqlite.org/howtocorrupt.html, 2.2): another that ends then takes itself for the last user
    # and removes the log that this one goes on writing.
    kept.add(seen(0.1))
    second = ObservationStore(kept.path)
    assert len(second) == 1
    assert written_elsewhere(kept.path, 0.2) == [0.1, 0.2]
    kept.add(seen(0.3))
    assert written_elsewhere(kept.path, 0.4) == [0.1, 0.2, 0.3, 0.4]


def test_a_forked_child_writes_through_its_own_connection(kept: ObservationStore) -> None:
    kept.add(seen(0.1))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            kept.add(seen(0.2))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    kept.add(seen(0.3))
    assert steps_of(kept) == [0.1, 0.2, 0.3]


def test_a_file_moved_by_another_process_is_not_written_any_more(
    kept: ObservationStore, tmp_path: Path
) -> None:
    kept.add(seen(0.1))
    (tmp_path / "away").mkdir()
    for file in list(tmp_path.glob("observations.db*")):
        shutil.move(file, tmp_path / "away" / file.name)
    other = ObservationStore(kept.path)
    other.add(seen(0.2))
    # SQLite removes the log of a file by its name when the last user lets go: not this one's.
    kept.add(seen(0.3))
    other.add(seen(0.4))
    kept.close()
    assert steps_of(ObservationStore(kept.path)) == [0.2, 0.3, 0.4]
    away = ObservationStore(tmp_path / "away" / kept.path.name)
    assert steps_of(away) == [0.1]


def test_a_store_of_the_first_schema_keeps_what_it_knows_by_name(tmp_path: Path) -> None:
    path = tmp_path / "observations.db"
    first = Database(path, application_id=0x54687275, migrations=_MIGRATIONS[:1])

    def fill(connection: sqlite3.Connection) -> None:
        connection.execute(
            "INSERT INTO workloads VALUES ('gpt2', 497759232, 148, NULL, 'adamw', 'fp32')"
        )
        connection.execute(
            "INSERT INTO observations VALUES (1, 'i', 1, '2026-01-02T03:00:00.000000+00:00',"
            " 'gpt2', '1x2:t4', 2, 1, 2, 'ddp', 8, 1, 0.4, 50, 0.02, 'observed')"
        )

    first.write(fill)
    first.close()
    kept = ObservationStore(path)
    (one,) = kept
    assert (one.workload, one.fingerprint, one.step_time_s) == ("gpt2", None, 0.4)
    known = ObservedWorkload(
        name="gpt2", parameter_bytes=497759232, optimizer="adamw", precision="fp32"
    )
    assert kept.workloads() == {"gpt2": known}
    # It may be of any graph of that name, but not of one with other parameters.
    same = replace(known, fingerprint="f")
    assert kept.observations(of_job=same) == [one]
    assert kept.observations(of_job=replace(same, parameter_bytes=6_230_000_000)) == []
    # What later schemas know of a step is unknown of it, and kept of others.
    assert one.gradient_noise_samples is None
    kept.add(seen(gradient_noise_samples=64.0))
    assert kept.gradient_noise_samples("gpt2") == 64.0


def test_jobs_of_one_name_are_told_apart_by_what_they_compute(kept: ObservationStore) -> None:
    kept.add_many([seen(0.1, fingerprint="short"), seen(90.0, fingerprint="long"), seen(0.2)])
    for job, times in (("short", [0.1, 0.2]), ("long", [90.0, 0.2]), ("none", [0.2])):
        of_job = ObservedWorkload(name="gpt2", fingerprint=job)
        assert steps_of(kept, of_job=of_job) == times


FIRST = ("CREATE TABLE things (name TEXT)", "INSERT INTO things VALUES ('old')")


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
