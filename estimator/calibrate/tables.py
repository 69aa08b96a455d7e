"""Read tables of step times that others measured into jobs, refusing bad rows one by one."""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from estimator.errors import ObservationError, quoted
from estimator.files import read_csv

Array = NDArray[np.float64]
Row = Mapping[str, str]

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
    def placement(self) -> str:
        """Devices used of each node, such as ``1+3``."""
        return "+".join(map(str, self.node_sizes))

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
        """The fields of an accuracy case that identify the row (see `estimator.accuracy`)."""
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


class Step(Protocol):
    """What every kind of row offers."""

    @property
    def step_time_s(self) -> float:
        """What was measured."""
        ...

    @property
    def features(self) -> tuple[float, ...]:
        """What a regressor predicts it from."""
        ...

    def about(self) -> dict[str, Any]:
        """The fields of an accuracy case that identify the row (see `estimator.accuracy`)."""
        ...


StepT = TypeVar("StepT", bound=Step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Generic[StepT]):
    """All steps of one model on one kind of GPU under one setting."""

    label: str
    gpu: str
    model: str
    steps: tuple[StepT, ...]

    def X(self) -> Array:
        """The features of every step, one row each."""
        return np.array([step.features for step in self.steps], dtype=float)

    def y(self) -> Array:
        """The step times, in seconds."""
        return np.array([step.step_time_s for step in self.steps])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable(Generic[StepT]):
    """The jobs of one or several files, and how many rows were left out or completed, and why."""

    jobs: tuple[Job[StepT], ...]
    refused: Mapping[str, int]
    assumed: Mapping[str, int]


def read_rows(path: str | os.PathLike[str]) -> list[tuple[int, Row]]:
    """(line, cells by column name) of a table with a header; cells that are blank are missing.

    Cells are separated by commas, semicolons or tabs, whichever the header has most of. Raises
    ObservationError for what is no table or has no row.
    """
    file = Path(path)
    try:
        rows = list(_cells(file, read_csv(file, most_rows=MOST_ROWS)))
    except OSError as error:
        raise ObservationError(f"cannot read {file} ({error.strerror}); check the file") from None
    except ValueError as error:
        if isinstance(error, ObservationError):
            raise
        raise ObservationError(f"{file} is no table ({error}); check the file") from None
    if not rows:
        raise ObservationError(f"{file} holds no row; give a header and one row for each step time")
    return rows


def _cells(file: Path, rows: Iterator[list[str]]) -> Iterator[tuple[int, Row]]:
    names = [name.strip().lower() for name in next(rows, [])]
    twice = [name for name, count in Counter(filter(None, names)).items() if count > 1]
    if twice:
        raise ObservationError(f"{file} has two columns '{twice[0]}'; give each its own name")
    for number, cells in enumerate(rows, start=2):
        if any(cell.strip() for cell in cells):
            yield number, {name: text.strip() for name, text in zip(names, cells) if text.strip()}


def read_steps(paths: Sequence[str | os.PathLike[str]]) -> StepTable[MeasuredStep]:
    """Read tables in the standard columns, of which others may be missing or more present.

    A row needs `model` or `gpu`; `gpus`, else `placement` (devices used per node, such as ``1+3``);
    `local_batch`, else `global_batch`; and `step_time_s`, else `throughput` with its unit. Where
    `placement` is blank the devices are spread evenly over `nodes`. The words of `interconnect`,
    such as ``NVLink; 2x 100Gb IB``, say which network to expect. Rows of other parallelism than
    data parallel, and rows that their notes call suspect, derived or inferred, are left out. Steps
    are one job where source, GPU, model and setting are equal. Raises ObservationError where a file
    is no table or no row of them all can be used.
    """
    refused: Counter[str] = Counter()
    assumed: Counter[str] = Counter()
    first: dict[str, str] = {}
    steps: list[MeasuredStep] = []
    for path in paths:
        for line, row in read_rows(path):
            try:
                steps.append(measured_step(line, row, assumed))
            except ObservationError as error:
                refused[str(error)] += 1
                first.setdefault(str(error), f"{Path(path).name} line {line}")
    if not steps:
        reason, count = refused.most_common(1)[0]
        raise ObservationError(
            f"no row of {', '.join(map(str, paths))} can be used: {reason} ({count} rows, such as "
            f"{first[reason]}); give gpus, nodes, local_batch and step_time_s"
        )
    counts = {f"{reason} (first: {first[reason]})": count for reason, count in refused.items()}
    return StepTable(jobs=_jobs(steps), refused=counts, assumed=assumed)


def measured_step(line: int, row: Row, assumed: Counter[str]) -> MeasuredStep:
    """What a row says, its own columns filled in as `read_steps` does; raises ObservationError."""
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


def _jobs(steps: Sequence[MeasuredStep]) -> tuple[Job[MeasuredStep], ...]:
    """Steps of one GPU, model and setting together, labelled by what tells them apart."""
    found: defaultdict[tuple[str, str, tuple[str, ...]], list[MeasuredStep]] = defaultdict(list)
    for step in steps:
        found[step.gpu, step.model, step.variant].append(step)
    alike: defaultdict[tuple[str, str], list[tuple[str, ...]]] = defaultdict(list)
    for gpu, model, variant in found:
        alike[gpu, model].append(variant)
    jobs = []
    for (gpu, model, variant), members in found.items():
        others = alike[gpu, model]
        differing = (
            part
            for index, part in enumerate(variant)
            if len({other[index] for other in others}) > 1
        )
        label = ", ".join([gpu, model, *filter(None, differing)])
        jobs.append(Job(label=label, gpu=gpu, model=model, steps=tuple(members)))
    return tuple(jobs)
