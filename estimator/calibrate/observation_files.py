"""Read observations from CSV and JSON-lines tables of others, refusing bad rows one by one."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from estimator.calibrate.observed import Observation, ObservedWorkload
from estimator.errors import EstimatorError, ObservationError, quoted
from estimator.files import parse_json, read_csv, read_text
from estimator.placement.allocation import Allocation

Row = Mapping[str, str]
Value = TypeVar("Value")
# An observation has some twenty fields.
_MOST_ITEMS = 1000
# Other names of the standard columns; the first that is filled in counts.
ALIASES: dict[str, tuple[str, ...]] = {
    "gpu": ("gpu", "machine", "device"),
    "model": ("model", "workload"),
    "gpus": ("gpus", "ranks", "world_size", "num_gpus"),
    "nodes": ("nodes", "num_nodes"),
    "local_batch": ("local_batch", "batch_per_gpu"),
    "grad_accum": ("grad_accum", "accumulation_steps"),
}
# Words in the notes of rows that their author did not measure or does not trust.
_UNSOUND = re.compile(r"\b(suspect|derived|inferred)\b", re.IGNORECASE)
_PLACEMENT = re.compile(r"[0-9]{1,7}(\+[0-9]{1,7})*")
_SHARES = re.compile(r"([a-z]+)\s*=?\s*([0-9]{1,9})", re.IGNORECASE)
_SHARDED = re.compile(r"(fsdp|hsdp|zero[-_ ]?[123])\b.*|fsdp\d+", re.IGNORECASE)
_DATA_PARALLEL = {"", "single", "ddp", "dp", "data", "data parallel", "horovod", "none"}
_OTHER_DEGREES = ("tp", "pp", "cp", "ep")
# Units in which global batch / throughput is the time of a step.
_SAMPLES_PER_S = {"samples/s", "images/s", "sequences/s", "examples/s"}
_STEPS_PER_S = {"steps/s", "iterations/s", "it/s"}
MOST_ROWS = 200_000
# Numbers beyond these are taken for typing errors.
SHORTEST_S, LONGEST_S = 1e-6, 1e6
MOST_GPUS, LARGEST_BATCH = 10**6, 1e9
# Devices of a node where a table says nothing of nodes: the most common machine of all sources.
USUAL_GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One row of a table: a step time, and on what it was measured."""

    line: int
    source: str
    gpu: str
    model: str
    precision: str
    strategy: str
    variant: tuple[str, ...]
    node_sizes: tuple[int, ...]
    batch_per_gpu: float
    accumulation_steps: int
    step_time_s: float
    gpus_per_node: int | None = None
    interconnect: str = ""

    @property
    def ranks(self) -> int:
        """Devices in all."""
        return sum(self.node_sizes)

    @property
    def global_batch(self) -> float:
        """Samples of one step."""
        return self.batch_per_gpu * self.ranks * self.accumulation_steps

    @property
    def allocation(self) -> str:
        """The placement as an allocation's text, its machine called as the GPU in lower case."""
        machine = re.sub(r"[^\w.\-]+", "-", self.gpu.lower(), flags=re.ASCII).strip("-._")
        sizes = [(len(list(same)), size) for size, same in groupby(self.node_sizes)]
        return "+".join(f"{count}x{size}:{machine or 'unknown'}" for count, size in sizes)

    @property
    def features(self) -> tuple[float, ...]:
        """(ranks, nodes, batch per rank, micro-batches, most devices on one node)."""
        nodes = len(self.node_sizes)
        most = max(self.node_sizes)
        return (self.ranks, nodes, self.batch_per_gpu, self.accumulation_steps, most)

    def about(self) -> dict[str, Any]:
        """The fields of an accuracy case that identify the row."""
        return {
            "source": self.source,
            "model": self.model,
            "machine": self.gpu,
            "allocation": self.allocation,
            "ranks": self.ranks,
            "nodes": len(self.node_sizes),
            "strategy": self.strategy,
            "precision": self.precision or None,
            "batch_per_gpu": self.batch_per_gpu,
            "accumulation_steps": self.accumulation_steps,
            "global_batch": self.global_batch,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationTable:
    """What a file holds: observations, what it says of their workloads, and (line, why not)."""

    observations: tuple[Observation, ...]
    summaries: tuple[ObservedWorkload, ...]
    refused: tuple[tuple[int, str], ...]


def read_observations(path: str | os.PathLike[str]) -> ObservationTable:
    """Read a ``.csv`` or ``.jsonl`` table with a row per observation.

    Columns are those of `Observation` and `ObservedWorkload`; where they are missing, the standard
    ones of tables of others (`measured_step`). Of these, `model`, `precision` and
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


def _rows(file: Path) -> Sequence[tuple[int, Row | str]]:
    """(line, cells) of each row, or (line, why it cannot be read); at least one."""
    if file.suffix in (".csv", ".tsv"):
        return read_rows(file)
    if file.suffix not in (".jsonl", ".ndjson"):
        raise ObservationError(f"{file} is no table that can be read; name a .csv or .jsonl file")
    return _checked(file, lambda: _json_rows(read_text(file)))


def _checked(file: Path, rows: Callable[[], Iterable[Value]]) -> list[Value]:
    """What is read of a file, at least one row; raises ObservationError."""
    try:
        found = list(rows())
    except OSError as error:
        raise ObservationError(f"cannot read {file} ({error.strerror}); check the file") from None
    except ObservationError:
        raise
    except ValueError as error:
        raise ObservationError(f"{file} is no table ({error}); correct it, or cut it") from None
    if not found:
        raise ObservationError(f"{file} holds no row; give one for each step time")
    return found


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
        gradient_noise_samples=_read(row, "gradient_noise_samples", float),
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


def read_rows(path: str | os.PathLike[str]) -> list[tuple[int, Row]]:
    """(line, cells by column name) of a table with a header; cells that are blank are missing.

    Cells are separated by commas, semicolons or tabs, whichever the header has most of. Raises
    ObservationError for what is no table or has no row.
    """
    file = Path(path)
    return _checked(file, lambda: _cells(file, read_csv(file, most_rows=MOST_ROWS)))


def _cells(file: Path, rows: Iterator[list[str]]) -> Iterator[tuple[int, Row]]:
    names = [name.strip().lower() for name in next(rows, [])]
    twice = [name for name, count in Counter(filter(None, names)).items() if count > 1]
    if twice:
        raise ObservationError(f"{file} has two columns '{twice[0]}'; give each its own name")
    for number, cells in enumerate(rows, start=2):
        if any(cell.strip() for cell in cells):
            yield number, {name: text.strip() for name, text in zip(names, cells) if text.strip()}


def measured_step(line: int, row: Row, assumed: Counter[str]) -> MeasuredStep:
    """What a row says, other columns filled in from those present; raises ObservationError."""
    unsound = _UNSOUND.search(row.get("notes", ""))
    if unsound is not None:
        raise ObservationError(f"its notes call it {unsound[0].lower()}")
    gpu, model = _text(row, "gpu"), _text(row, "model")
    if not gpu and not model:
        raise ObservationError("it names neither model nor GPU")
    strategy = _strategy(row.get("parallelism", ""))
    sizes = _node_sizes(row, assumed)
    accumulation_steps = _count(row, "grad_accum") or 1
    batch = _batch_per_gpu(row, sum(sizes) * accumulation_steps)
    return MeasuredStep(
        line=line,
        source=row.get("source", "table"),
        gpu=gpu or "unknown GPU",
        model=model or "unknown model",
        precision=row.get("precision", ""),
        strategy=strategy,
        variant=(
            *(row.get(name, "") for name in ("task", "precision", "seq_len", "optimizer")),
            strategy,
            *(row.get(name, "") for name in ("framework_version", "source")),
        ),
        node_sizes=sizes,
        batch_per_gpu=batch,
        accumulation_steps=accumulation_steps,
        step_time_s=_plausible_s(_step_time_s(row, batch * sum(sizes) * accumulation_steps)),
        gpus_per_node=_count(row, "gpus_per_node"),
        interconnect=row.get("interconnect", ""),
    )


def _strategy(parallelism: str) -> str:
    """The kind of data parallelism; one device alone belongs to every kind, written plain."""
    text = parallelism.strip()
    if text.lower() in _DATA_PARALLEL:
        return "ddp"
    degrees = {name.lower(): int(degree) for name, degree in _SHARES.findall(text)}
    others = [f"{name}{degrees[name]}" for name in _OTHER_DEGREES if degrees.get(name, 1) > 1]
    if others:
        raise ObservationError(f"it is not data parallel alone but {', '.join(others)}")
    if "dp" in degrees:
        return "ddp"
    if _SHARDED.fullmatch(text):
        # The degree of sharding follows from the placement.
        return re.sub(r"^fsdp\d+", "fsdp", text, flags=re.IGNORECASE)
    raise ObservationError(f"its parallelism {quoted(text)} is not known to be data parallel")


def _node_sizes(row: Row, assumed: Counter[str]) -> tuple[int, ...]:
    """Devices used of each node."""
    gpus, nodes = _count(row, "gpus"), _count(row, "nodes")
    placement = row.get("placement", "").replace(" ", "")
    sizes: tuple[int, ...] = ()
    if _PLACEMENT.fullmatch(placement):
        sizes = tuple(int(size) for size in placement.split("+"))
        if gpus not in (None, sum(sizes)) or nodes not in (None, len(sizes)) or min(sizes) < 1:
            raise ObservationError("its placement contradicts its GPUs or nodes")
        gpus = sum(sizes)
    if gpus is None:
        raise ObservationError("it does not say how many GPUs")
    if gpus > MOST_GPUS:
        raise ObservationError("it has more than a million GPUs")
    if sizes:
        return sizes
    if nodes is None:
        nodes = _assumed_nodes(row, gpus, placement, assumed)
    if nodes > gpus:
        raise ObservationError("it has more nodes than GPUs")
    share, rest = divmod(gpus, nodes)
    return (share + 1,) * rest + (share,) * (nodes - rest)


def _assumed_nodes(row: Row, gpus: int, placement: str, assumed: Counter[str]) -> int:
    if gpus == 1:
        return 1
    # Gavel's words: packed into as few nodes as possible, or a node for each.
    if placement.lower() == "unconsolidated":
        return gpus
    gpus_per_node = _count(row, "gpus_per_node")
    if gpus_per_node is None:
        gpus_per_node = USUAL_GPUS_PER_NODE
        assumed[f"nodes not given, taken as full nodes of {USUAL_GPUS_PER_NODE}"] += 1
    return math.ceil(gpus / gpus_per_node)


def _batch_per_gpu(row: Row, shares: int) -> float:
    local_batch = _number(row, "local_batch")
    if local_batch is None:
        global_batch = _number(row, "global_batch")
        if global_batch is None:
            raise ObservationError("it has no batch size")
        local_batch = global_batch / shares
    if not 0 < local_batch < math.inf:
        raise ObservationError("its batch size is not a positive number")
    if not 1 / LARGEST_BATCH <= local_batch <= LARGEST_BATCH:
        raise ObservationError("its batch size is below 10^-9 or above 10^9")
    return local_batch


def _plausible_s(step_time_s: float) -> float:
    if not SHORTEST_S <= step_time_s <= LONGEST_S:
        raise ObservationError("its step time is below 1 µs or above 10^6 s")
    return step_time_s


def _step_time_s(row: Row, global_batch: float) -> float:
    step_time_s = _number(row, "step_time_s")
    if step_time_s is not None:
        if not 0 < step_time_s < math.inf:
            raise ObservationError("its step time is not a positive number")
        return step_time_s
    throughput, unit = _number(row, "throughput"), row.get("throughput_unit", "").lower()
    if throughput is None:
        raise ObservationError("it has neither step time nor throughput")
    if not 0 < throughput < math.inf:
        raise ObservationError("its throughput is not a positive number")
    if unit in _STEPS_PER_S:
        return 1 / throughput
    if unit in _SAMPLES_PER_S:
        return (_number(row, "global_batch") or global_batch) / throughput
    seq_len = _number(row, "seq_len")
    if unit == "tokens/s" and seq_len is not None and 0 < seq_len < math.inf:
        return (_number(row, "global_batch") or global_batch) * seq_len / throughput
    raise ObservationError(f"its throughput in '{unit or 'no unit'}' gives no step time")


def _text(row: Row, name: str) -> str:
    return next((row[alias] for alias in ALIASES.get(name, (name,)) if alias in row), "")


def _number(row: Row, name: str) -> float | None:
    text = _text(row, name)
    try:
        return float(text) if text else None
    except ValueError:
        raise ObservationError(f"its {name} is no number") from None


def _count(row: Row, name: str) -> int | None:
    number = _number(row, name)
    if number is None:
        return None
    # Tables written through floats say 8.0.
    if not 1 <= number < 2**53 or number != int(number):
        raise ObservationError(f"its {name} is not a whole number above 0")
    return int(number)
