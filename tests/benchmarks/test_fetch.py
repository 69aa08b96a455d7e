"""Tables that do not ship: fetched from a server, checked, written whole or not at all."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import published_data
import pytest
from published_data import DamagedTableError, FetchError, fetch

# Two files of one source, and what they come to in common columns: of a placement "12" one GPU of
# a first and two of a second node, 3 · 8 samples in 0.5 s; of a count 4 GPUs on 2 nodes, 16 in 1 s.
FILES = {
    "a/placements-x.csv": "local_bsz,step_time,sync_time,placement\n8,0.5,0.25,12\n",
    "a/scalability-x.csv": "local_bsz,step_time,sync_time,num_nodes,num_replicas\n"
    "4,1.0,0.1234567,2,4\n",
}
TABLE = (
    "gpu,model,nodes,gpus,placement,global_batch,local_batch,step_time_s,sync_time_s,"
    "throughput,notes,provenance\n"
    "T4,net,2,3,1+2,24,8,0.5,0.25,48,placements,a/placements-x.csv\n"
    "T4,net,2,4,,16,4,1,0.123457,16,scalability,a/scalability-x.csv\n"
)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that a server of this machine serves, and a list of tables that names it."""
    folder = tmp_path / "served"
    (folder / "a").mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    table = {
        "what": "steps",
        "source": "here",
        "license": "none stated",
        "rows": 2,
        "sha256": hashlib.sha256(TABLE.encode()).hexdigest(),
        "url": f"http://127.0.0.1:{server.server_port}/{{app}}/{{table}}-{{on}}.csv",
        "columns": TABLE.splitlines()[0].split(","),
        "cells": {"notes": "{table}", "provenance": "{app}/{table}-{on}.csv"},
        "kinds": {"a": {"model": "net"}, "x": {"gpu": "T4"}},
        "files": [
            {"app": "a", "table": "placements", "on": "x"},
            {"app": "a", "table": "scalability", "on": "x"},
        ],
    }
    spread = {name: table[name] for name in ("what", "source", "license", "rows", "sha256")}
    (tmp_path / "elsewhere.json").write_text(json.dumps({"steps": table, "logs": spread}))
    monkeypatch.setattr(published_data, "SHIPPED", tmp_path)
    yield folder
    server.shutdown()
    server.server_close()


def test_files_of_a_source_become_one_table_in_common_columns(source: Path, tmp_path: Path) -> None:
    assert fetch("steps", tmp_path / "out").read_text() == TABLE


@pytest.mark.parametrize(
    ("name", "text", "error", "says"),
    [
        ("placements", FILES["a/placements-x.csv"].replace("0.25", "0.26"), DamagedTableError,
         "is not written; steps at its source is not the table of our figures"),
        ("placements", "local_bsz\n8\n", FetchError, "is not the table of steps that it was"),
        ("scalability", None, FetchError, "scalability-x.csv cannot be read: HTTP Error 404"),
    ],
)  # fmt: skip
def test_a_source_that_changed_is_refused_and_what_was_there_stays(
    name: str, text: str | None, error: type[Exception], says: str, source: Path, tmp_path: Path
) -> None:
    kept = fetch("steps", tmp_path / "out")
    changed = source / "a" / f"{name}-x.csv"
    changed.unlink() if text is None else changed.write_text(text)
    with pytest.raises(error, match=says):
        fetch("steps", tmp_path / "out")
    assert kept.read_text() == TABLE
    assert list(kept.parent.iterdir()) == [kept]


def test_a_table_kept_elsewhere_is_fetched_plain_or_compressed(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.csv.gz").write_bytes(gzip.compress(TABLE.encode()))
    path = fetch("logs", tmp_path / "out", from_url=str(tmp_path / "mine.csv.gz"))
    assert path.read_text() == TABLE
    with pytest.raises(FetchError, match=r"spread over logs of here, .* say --from URL"):
        fetch("logs", tmp_path / "out")


def test_every_table_that_does_not_ship_says_its_source_licence_and_checksum() -> None:
    for name, table in published_data.elsewhere().items():
        assert not (published_data.SHIPPED / f"{name}.csv.gz").exists()
        assert len(table["sha256"]) == 64
        assert table["license"].startswith("none stated")
        for file in table.get("files", ()):
            assert table["url"].format_map(file).startswith("https://")
