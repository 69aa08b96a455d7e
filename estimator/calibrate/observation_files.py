"""Read observations from CSV and JSON-lines tables of others, refusing bad rows one by one."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from estimator.calibrate.observed import Observation, ObservedWorkload
from estimator.calibrate.tables import ALIASES, MOST_ROWS, Row, measured_step, read_rows
from estimator.errors import EstimatorError, ObservationError, quoted
from estimator.files import parse_json, read_text
from estimator.placement.allocation import Allocation

Value = TypeVar("Value")
# An observation has some twenty fields.
_MOST_ITEMS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationTable:
    """What a file holds: observations, what it says of their workloads, and (line, why not)."""

    observations: tuple[Observation, ...]
    summaries: tuple[ObservedWorkload, ...]
    refused: tuple[tuple[int, str], ...]


def read_observations(path: str | os.PathLike[str]) -> ObservationTable:
    """Read a ``.csv`` or ``.jsonl`` table with a row per observation.

    Columns are those of `Observation` and `ObservedWorkload`; where they are missing, the standard
    ones that `estimator.calibrate.tables.read_steps` knows. Of these, `model`, `precision` and
    `seq_len` together name the workload; the allocation follows from `gpu` (in lower case the name
    of its machine), `gpus`, `nodes`, `gpus_per_node` and `placement`. Times without a zone are UTC;
    where there is no time, the file's own counts.

    A row's identity follows from its cells and from how many rows before it were equal, so that the
    same table read twice is stored once. Raises ObservationError where no row can be used.
    """
    file = Path(path)
    rows = _rows(file)
    at = datetime.fromtimestamp(file.stat().st_mtime, UTC)
    observations: list[Observation] = []
    summaries: dict[str, ObservedWorkload] = {}
    refused: list[tuple[int, str]] = []
    seen: Counter[str] = Counter()
    for line, row in rows:
        try:
            if isinstance(row, str):
                raise ObservationError(row)
            summary = _summary(row)
            observations.append(_observation(line, row, summary.name, at, seen))
        except EstimatorError as error:
            refused.append((line, str(error)))
        else:
            summaries[summary.name] = summary
    if not observations:
        line, reason = refused[0]
        raise ObservationError(
            f"{file} holds no observation that can be used ({len(refused)} rows refused, the first "
            f"in line {line}: {reason}); correct the table"
        )
    return ObservationTable(
        observations=tuple(observations),
        summaries=tuple(summaries.values()),
        refused=tuple(refused),
    )


def _rows(file: Path) -> Iterable[tuple[int, Row | str]]:
    """(line, cells) of each row, or (line, why it cannot be read); at least one."""
    if file.suffix in (".csv", ".tsv"):
        return read_rows(file)
    if file.suffix not in (".jsonl", ".ndjson"):
        raise ObservationError(f"{file} is no table that can be read; name a .csv or .jsonl file")
    try:
        rows = list(_json_rows(read_text(file)))
    except OSError as error:
        raise ObservationError(f"cannot read {file} ({error.strerror}); check the file") from None
    except ValueError as error:
        raise ObservationError(f"{file} is no table ({error}); cut it in parts") from None
    if not rows:
        raise ObservationError(f"{file} holds no row; write one JSON object for each observation")
    return rows


def _json_rows(text: str) -> Iterator[tuple[int, Row | str]]:
    if text.count("\n") > MOST_ROWS:
        raise ValueError(f"more than {MOST_ROWS} rows")
    # Not splitlines: JSON may hold other characters that end a line to Python.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            values = parse_json(line, most_items=_MOST_ITEMS)
        except ValueError:
            yield number, "it is not JSON; write one object a line"
            continue
        if not isinstance(values, dict):
            yield number, "it is no JSON object; write names and values"
            continue
        cells = {name.strip().lower(): str(value).strip() for name, value in values.items()}
        known = {name for name, value in values.items() if value is not None}
        yield number, {name: cells[name.strip().lower()] for name in known}


def _summary(row: Row) -> ObservedWorkload:
    name = row.get("workload")
    if name is None:
        if "model" not in row:
            raise ObservationError("it names no workload; fill in 'workload' or 'model'")
        sequence = f"sequence {row['seq_len']}" if "seq_len" in row else None
        name = ", ".join(filter(None, (row["model"], row.get("precision"), sequence)))
    return ObservedWorkload(
        name=name,
        parameter_bytes=_read(row, "parameter_bytes", int),
        tensors=_read(row, "tensors", int),
        flops_per_sample=_read(row, "flops_per_sample", float),
        optimizer=row.get("optimizer"),
        precision=row.get("precision"),
    )


def _observation(
    line: int, row: Row, workload: str, at: datetime, seen: Counter[str]
) -> Observation:
    identity = _identity(row, seen)
    allocation = row.get("allocation")
    if allocation is not None:
        sizes = [devices for _, devices in Allocation.parse(allocation).node_sizes()]
        row = {**row, "gpus": "", "nodes": "", "placement": "+".join(map(str, sizes))}
    elif not any(name in row for name in ALIASES["gpu"]):
        raise ObservationError("it names no devices; fill in 'allocation', or 'gpu' and 'gpus'")
    assumed: Counter[str] = Counter()
    step = measured_step(line, row, assumed)
    if assumed:
        # Evaluation may assume a number of nodes; an observation with a wrong one would bias fits.
        raise ObservationError("it does not say on how many nodes; fill in 'nodes' or 'placement'")
    batch = step.batch_per_gpu
    if batch != int(batch):
        raise ObservationError(f"{batch:g} samples per device are not a whole number; correct them")
    strategy = row.get("strategy", step.strategy)
    return Observation(
        workload=workload,
        allocation=allocation or step.allocation,
        batch_per_gpu=int(batch),
        accumulation_steps=step.accumulation_steps,
        step_time_s=step.step_time_s,
        # Tables add how it was set, as in 'fsdp FULL_SHARD'.
        strategy="fsdp" if strategy.startswith("fsdp") else strategy,
        layout=row.get("layout"),
        steps=_read(row, "steps", int) or 1,
        spread_ratio=_read(row, "spread_ratio", float),
        source=step.source,
        at=_read(row, "at", _time) or at,
        identity=identity,
    )


def _identity(row: Row, seen: Counter[str]) -> str:
    cells = json.dumps(sorted((name, cell) for name, cell in row.items() if cell))
    digest = hashlib.sha256(cells.encode()).hexdigest()[:32]
    seen[digest] += 1
    return f"{digest}-{seen[digest]}"


def _read(row: Row, name: str, convert: Callable[[str], Value]) -> Value | None:
    text = row.get(name)
    try:
        return None if text is None else convert(text)
    except (ValueError, OverflowError):
        raise ObservationError(f"{name} cannot be read, found {quoted(text)}; correct it") from None


def _time(text: str) -> datetime:
    at = datetime.fromisoformat(text)
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
