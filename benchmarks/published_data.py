"""Unpack the tables that others published and that ship in ``data/published``, and check them.

``data/published/tables.csv`` names each table's source, licence and checksum. What a licence does
not let us ship is read from a folder of one's own, in the same columns (``--data DIR``).
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import os
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "data" / "published"


class DamagedTableError(ValueError):
    """A shipped table is not what ``tables.csv`` says."""


@cache
def shipped_tables() -> Path:
    """The folder of the unpacked tables, written under ``build/`` where it is not there yet."""
    folder = ROOT / "build" / "published"
    folder.mkdir(parents=True, exist_ok=True)
    with (SHIPPED / "tables.csv").open(encoding="utf-8") as stream:
        for table in csv.DictReader(stream):
            unpacked = folder / f"{table['table']}.csv"
            if not unpacked.exists() or _checksum(unpacked.read_bytes()) != table["sha256"]:
                _unpack(table["table"], table["sha256"], unpacked)
    return folder


def _unpack(name: str, checksum: str, unpacked: Path) -> None:
    content = gzip.decompress((SHIPPED / f"{name}.csv.gz").read_bytes())
    if _checksum(content) != checksum:
        raise DamagedTableError(
            f"data/published/{name}.csv.gz has the checksum {_checksum(content)[:12]}…, and "
            f"tables.csv says {checksum[:12]}…; check it out again"
        )
    # Several benchmarks may unpack at once: each puts a whole file in its place.
    beside = unpacked.with_suffix(f".{os.getpid()}")
    beside.write_bytes(content)
    beside.replace(unpacked)


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
