"""Keep a record as compressed JSON: a line about it, then one line an estimate."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = "estimate-record"
VERSION = 1
Values = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Estimates by the names of their cases, and where they come from."""

    about: dict[str, Any]
    rows: dict[str, Values]


def write_record(path: Path, about: Mapping[str, Any], rows: Mapping[str, Values]) -> None:
    """Write the estimates; a field that one has and another lacks becomes null."""
    columns = sorted({name for values in rows.values() for name in values})
    header = {"format": FORMAT, "version": VERSION, **about, "columns": columns}
    # Without a time stamp, equal records are equal files but for the first line.
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as stream:
        stream.write(json.dumps(header).encode() + b"\n")
        for name, values in rows.items():
            line = [name, *(values.get(column) for column in columns)]
            stream.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


def read_record(path: Path) -> Record:
    """The record of a file; raises ValueError if it is none."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        about = json.loads(next(stream))
        if about.get("format") != FORMAT or about.get("version") != VERSION:
            raise ValueError(f"{path} is no estimate record of version {VERSION}; write it again")
        columns = about.pop("columns")
        rows = {
            name: dict(zip(columns, values, strict=True))
            for name, *values in map(json.loads, stream)
        }
    return Record(about=about, rows=rows)
