"""Read tables of published step times, and say of a row why it cannot be judged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from estimator.calibrate.observation_files import MeasuredStep, Row, measured_step, read_rows
from estimator.errors import ObservationError

# A table without these is in columns of its own.
NEEDED_COLUMNS = frozenset(("source", "model", "gpu", "gpus", "parallelism", "step_time_s"))
_OTHER_FRAMEWORKS = re.compile(
    r"tensorflow|tensor2tensor|mxnet|paddle|mindspore|oneflow|jax", re.IGNORECASE
)


class NotQualified(Exception):
    """The row is no training step under a strategy that the engine has."""


class NotMapped(Exception):
    """The row qualifies, but this benchmark has not its model, its machine or its settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One row of a table in the standard columns: its cells, and the step that they describe."""

    table: str
    line: int
    cells: Row
    step: MeasuredStep

    @property
    def id(self) -> str:
        """What names the row in every run."""
        return f"{self.table}:{self.line}"

    @property
    def seq_len(self) -> int | None:
        """Tokens of a sample, where the row says so."""
        text = self.cells.get("seq_len")
        return int(float(text)) if text else None

    @property
    def notes(self) -> Mapping[str, str]:
        """The ``key=value`` parts of the notes; a part without a value maps to itself."""
        parts = (part.strip() for part in self.cells.get("notes", "").split(";"))
        pairs = (part.partition("=") for part in parts if part)
        return {key: value if equals else key for key, equals, value in pairs}

    def text(self, name: str) -> str:
        """A cell, empty where it is blank."""
        return self.cells.get(name, "")


def other_framework(cells: Row) -> str | None:
    """The framework that a row was measured with, where that is not PyTorch."""
    version = cells.get("framework_version", "")
    if "torch" in version.lower():
        return None
    found = _OTHER_FRAMEWORKS.search(version)
    return version if found else None


def standard_tables(folder: Path) -> Iterator[tuple[str, list[tuple[int, Row]]]]:
    """(name, lines with their cells) of every table of a directory in the standard columns."""
    for path in sorted(folder.glob("*.csv")):
        with path.open(encoding="utf-8-sig") as stream:
            names = {name.strip().lower() for name in stream.readline().split(",")}
        if names >= NEEDED_COLUMNS:
            yield path.stem, read_rows(path)


def parsed(table: str, line: int, cells: Row) -> PublishedRow:
    """The row with its step; raises NotQualified where that is no data-parallel training step."""
    try:
        step = measured_step(line, cells, Counter())
    except ObservationError as error:
        raise NotQualified(str(error)) from None
    return PublishedRow(table=table, line=line, cells=cells, step=step)
