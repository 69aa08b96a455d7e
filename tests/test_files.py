"""Files are written where they are named and as they were, and read only where they end."""

from __future__ import annotations

import io
import os
import stat
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from estimator.files import parse_json, read_csv, read_file, read_text, write_file
from estimator.graph.files import is_saved_graph


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_symbolic_link_leads_to_the_file_that_is_written(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"
    assert names(tmp_path) == {"real", "link"}


def test_a_dangling_link_leads_to_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "real")
    write_file(tmp_path / "link", b"new")
    assert (tmp_path / "folder" / "real").read_bytes() == b"new"


def test_links_in_a_circle_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError, match="symbolic links"):
        write_file(tmp_path / "one", b"new")


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_a_file_keeps_its_mode(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(mode)
    write_file(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_a_file_keeps_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    os.chown(path, 12345, 12345)
    write_file(path, b"new")
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12345)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_obeys_the_umask(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_file(tmp_path / "file", b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_file_that_may_not_be_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o400)
    with pytest.raises(PermissionError):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs Linux's shared memory")
def test_shared_memory_holds_files_as_any_folder_does() -> None:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        write_file(Path(folder) / "new", b"yes")
        assert read_file(Path(folder) / "new") == b"yes"


def test_a_device_is_written_to_and_stays_a_device(tmp_path: Path) -> None:
    write_file(Path("/dev/null"), b"new")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    (tmp_path / "link").symlink_to("/dev/null")
    write_file(tmp_path / "link", b"new")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert (tmp_path / "link").is_symlink()


def test_a_pipe_gets_what_is_written(tmp_path: Path) -> None:
    pipe, content = tmp_path / "pipe", b"much" * 100_000  # more than a pipe holds at once
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="No such device"):
        write_file(pipe, content)  # nobody reads
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    for _ in range(500):
        try:
            write_file(pipe, content)
            break
        except OSError:
            time.sleep(0.01)  # the reader has not opened it yet
    reader.join(timeout=60)
    assert found == [content]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_what_killed_writers_have_left_is_cleared(tmp_path: Path) -> None:
    path = tmp_path / "file"
    abandoned, fresh = tmp_path / ".file.0a1b2c3d.partial", tmp_path / ".file.11111111.partial"
    others = tmp_path / ".other.0a1b2c3d.partial"
    for each in (abandoned, fresh, others):
        each.write_bytes(b"half")
    for each in (abandoned, others):
        os.utime(each, (0, 0))
    write_file(path, b"new")
    assert names(tmp_path) == {"file", fresh.name, others.name}


def test_an_interrupted_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "file", b"new")
    assert names(tmp_path) == set()


def test_only_regular_files_up_to_a_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 1001)
    for path, reason in (
        ("/dev/zero", "no regular file"),
        (tmp_path / "pipe", "no regular file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "missing", "No such file"),
        ("a\0b", "No such file"),
    ):
        with pytest.raises(OSError, match=reason):
            read_file(path)
    with pytest.raises(OSError, match="larger than 0 MiB"):
        read_file(tmp_path / "large", most_bytes=1000)
    assert read_file(tmp_path / "large", most_bytes=1001) == b"x" * 1001


def test_what_looks_regular_and_has_nothing_yet_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As the kernel's log in /proc/kmsg is, once it was read.
    class Waiting(io.BufferedReader):
        def read(self, size: int | None = -1, /) -> bytes:
            return None  # type: ignore[return-value]

    (tmp_path / "log").touch()
    monkeypatch.setattr(os, "fdopen", lambda handle, _: Waiting(io.FileIO(handle)))
    with pytest.raises(OSError, match="no regular file"):
        read_file(tmp_path / "log")
    assert not is_saved_graph(tmp_path / "log")


def test_text_is_utf8_with_or_without_a_mark(tmp_path: Path) -> None:
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfyes")
    (tmp_path / "latin").write_bytes(b"ab\xe9")
    assert read_text(tmp_path / "marked") == "yes"
    with pytest.raises(OSError, match="no UTF-8 text at byte 2"):
        read_text(tmp_path / "latin")


def test_rows_are_read_one_by_one_up_to_a_number(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"\xef\xbb\xbfa;b\r\n1;'x'\n\n2;\"y;\n z\"\n")
    assert list(read_csv(path, most_rows=4)) == [["a", "b"], ["1", "'x'"], [], ["2", "y;\n z"]]
    with pytest.raises(ValueError, match="more than 2 rows"):
        list(read_csv(path, most_rows=2))
    path.write_text("a,b\n1," + "x" * 200_000)
    with pytest.raises(ValueError, match="field larger than field limit"):
        list(read_csv(path, most_rows=4))
    path.write_bytes(b"a,b\n1,\xff")
    with pytest.raises(OSError, match="no UTF-8 text"):
        list(read_csv(path, most_rows=4))


def test_names_of_values_count_as_the_values_do() -> None:
    assert parse_json('{"a": 1, "b": [2]}', most_items=5) == {"a": 1, "b": [2]}
    with pytest.raises(ValueError, match="more than 4 values"):
        parse_json('{"a": 1, "b": [2]}', most_items=4)
