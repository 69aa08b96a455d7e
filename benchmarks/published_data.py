"""The tables that others published: unpacked where they ship, fetched where they may not.

``data/published/tables.csv`` names the source, licence and checksum of each table that ships,
``data/published/elsewhere.json`` those of tables whose licence does not let us ship them, and the
files of their source that ``python -m benchmarks fetch`` turns into the same columns. Nothing else
here asks a network. Tables of one's own are read from a folder, ``--data DIR``.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "data" / "published"
TIMEOUT_S = 60
LARGEST_BYTES = 1 << 26


class DamagedTableError(ValueError):
    """A table is not what its checksum says."""


class FetchError(OSError):
    """A source does not answer, or not with what the table is made of."""


@cache
def shipped_tables() -> Path:
    """The folder of the unpacked tables, written under ``build/`` where it is not there yet.

    Tables that were fetched stand there too.
    """
    folder = ROOT / "build" / "published"
    folder.mkdir(parents=True, exist_ok=True)
    with (SHIPPED / "tables.csv").open(encoding="utf-8") as stream:
        for table in csv.DictReader(stream):
            unpacked = folder / f"{table['table']}.csv"
            if not unpacked.exists() or _checksum(unpacked.read_bytes()) != table["sha256"]:
                content = gzip.decompress((SHIPPED / f"{table['table']}.csv.gz").read_bytes())
                advice = "data/published differs from its tables.csv: check it out again"
                _put(unpacked, content, table["sha256"], advice)
    return folder


def elsewhere() -> Mapping[str, Mapping[str, Any]]:
    """Tables that do not ship, by name: what they are, their source, licence and checksum."""
    tables: Mapping[str, Mapping[str, Any]] = json.loads(
        (SHIPPED / "elsewhere.json").read_text(encoding="utf-8")
    )
    return tables


def fetch(name: str, folder: Path, *, from_url: str | None = None) -> Path:
    """The table `name` in `folder`, made of its source's files; written whole or not at all.

    `from_url` is where the table itself is kept, in the columns of data/published; a path, too.
    Raises FetchError where a source cannot be read, DamagedTableError where the table that comes of
    it is not the one behind the published figures.
    """
    table = elsewhere()[name]
    if from_url is not None:
        content = _read(from_url if "://" in from_url else Path(from_url).resolve().as_uri())
    elif "files" in table:
        content = _joined(table)
    else:
        raise FetchError(
            f"{name} is spread over logs of {table['source']}, which nothing here reads; say "
            "--from URL where the table itself is kept"
        )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.csv"
    _put(path, content, table["sha256"], f"{name} at its source is not the table of our figures")
    return path


def _joined(table: Mapping[str, Any]) -> bytes:
    """All files of a source, one after the other, as one table in the columns of data/published."""
    text = io.StringIO()
    lines = csv.DictWriter(text, table["columns"], restval="", lineterminator="\n")
    lines.writeheader()
    for file in table["files"]:
        url = table["url"].format_map(file)
        constant = {**table["cells"], **table["kinds"][file["app"]], **table["kinds"][file["on"]]}
        for name in ("notes", "provenance"):
            constant[name] = constant[name].format_map(file)
        try:
            rows = csv.DictReader(_read(url).decode().splitlines())
            lines.writerows({**constant, **cells} for cells in _measured(rows))
        except (KeyError, ValueError, TypeError) as error:
            raise FetchError(f"{url} is not the table of steps that it was ({error!r})") from error
    return text.getvalue().encode()


def _measured(rows: Iterator[Mapping[str, str]]) -> Iterator[dict[str, str]]:
    """Steps in the form of AdaptDL's profiles: of placements, one digit a node, or of counts."""
    for row in rows:
        used = row.get("placement", "")
        gpus = sum(map(int, used)) if used else int(row["num_replicas"])
        batch, step_s = gpus * int(row["local_bsz"]), float(row["step_time"])
        yield {
            "nodes": str(len(used)) if used else row["num_nodes"],
            "gpus": str(gpus),
            "placement": "+".join(used),
            "global_batch": str(batch),
            "local_batch": row["local_bsz"],
            "step_time_s": f"{step_s:.6g}",
            "sync_time_s": f"{float(row['sync_time']):.6g}",
            "throughput": f"{batch / step_s:.6g}",
        }


def _read(url: str) -> bytes:
    try:
        with urlopen(url, timeout=TIMEOUT_S) as answer:
            content: bytes = answer.read(LARGEST_BYTES + 1)
    except (URLError, OSError, ValueError) as error:
        raise FetchError(f"{url} cannot be read: {error}") from error
    if len(content) > LARGEST_BYTES:
        raise FetchError(f"{url} has more than {LARGEST_BYTES >> 20} MiB, which no table here has")
    return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content


def _put(path: Path, content: bytes, checksum: str, advice: str) -> None:
    """Write a table whose checksum is right, whole: several benchmarks may write it at once."""
    if _checksum(content) != checksum:
        raise DamagedTableError(
            f"{path.name} would have the checksum {_checksum(content)[:12]}… where "
            f"{checksum[:12]}… is asked, and is not written; {advice}"
        )
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_bytes(content)
    beside.replace(path)


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
