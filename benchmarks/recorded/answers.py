"""Ask the package in use for every estimate and keep its answers as plain values."""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import random
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from records import Progress, say

from .cases import BATCHES, Case, column_questions, ranks_of, scalar_cases, table_questions
from .graphs import SOURCES, Source
from .machines import write_clusters, write_machines

# What is unknown by nature, such as the MFU without a peak; None is a field that a version lacks.
UNKNOWN = "unknown"
COLUMN_ROWS = 150
# One scalar estimate in so many is also played as events, if it is of few ranks.
PLAYED, MOST_PLAYED_RANKS = 5, 16
# What a defect may raise; it is written down like a refusal, so that a record is always whole.
FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
Values = dict[str, Any]

SCALAR_NUMBERS = (
    "ranks",
    "batch_per_gpu",
    "global_batch",
    "step_time_s",
    "low_s",
    "high_s",
    "samples_per_s",
    "tokens_per_s",
    "mfu_ratio",
    "hfu_ratio",
    "peak_memory_bytes",
    "op_time_in_grid_ratio",
)
SCALAR_TEXTS = ("fits", "bottleneck", "strategy", "mode", "optimizer")
TABLE_COLUMNS = (
    *SCALAR_NUMBERS[:-1],
    "nodes",
    "fits",
    "bottleneck",
    "forward_s",
    "backward_s",
    "host_exposed_s",
    "communication_exposed_s",
    "straggler_s",
    "update_s",
    "copies_exposed_s",
    "idle_s",
)


def plain(value: Any) -> Any:
    """A value as JSON holds it; what is not known by nature becomes a word."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return UNKNOWN
    if isinstance(value, np.generic):
        return plain(value.item())
    return list(value) if isinstance(value, tuple) else value


def _field(answer: Any, name: str) -> Any:
    return plain(getattr(answer, name)) if hasattr(answer, name) else None


def scalar_values(answer: Any, *, is_played: bool) -> Values:
    """Everything that an estimate says."""
    found = {name: _field(answer, name) for name in (*SCALAR_NUMBERS, *SCALAR_TEXTS, "batches")}
    for owner in ("breakdown", "memory"):
        part = getattr(answer, owner)
        found |= {
            f"{owner}.{item.name}": plain(getattr(part, item.name))
            for item in dataclasses.fields(part)
        }
    found["assumptions"] = "\n".join(answer.assumptions)
    found["assumptions_count"] = len(answer.assumptions)
    rows = sorted(answer.provenance, key=lambda row: row[:2])
    found["provenance"] = "\n".join(f"{part}: {source}" for part, source, *_ in rows)
    found["provenance.shares"] = [share for _, _, share, _ in rows]
    found["provenance.errors"] = [plain(error) for *_, error in rows]
    if is_played:
        found["timeline.step_time_s"] = answer.timeline.step_time_s
    return found


def table_values(table: Any) -> list[Values]:
    """Every row of a table."""
    columns = {
        name: np.asarray(getattr(table, name)).tolist() if hasattr(table, name) else None
        for name in TABLE_COLUMNS
    }
    shown = {
        f"breakdown.{name}" if name in TABLE_COLUMNS[-8:] else name: column
        for name, column in columns.items()
    }
    return [
        {name: None if column is None else plain(column[row]) for name, column in shown.items()}
        for row in range(len(table))
    ]


def _of_package(name: str, *homes: str) -> Any:
    """A class by the first of the modules that has it; versions keep it in different places."""
    for home in homes:
        try:
            return getattr(importlib.import_module(home), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"none of {', '.join(homes)} has {name}; add where this version keeps it")


class AskedCalibration:
    """Factors that depend on everything that an estimate tells calibration."""

    def __init__(self, coefficients: Any) -> None:
        self._coefficients = coefficients

    def coefficients_for(
        self, questions: Sequence[Any], allocations: Sequence[Any], engine: Any
    ) -> list[Any]:
        """Of each step; see the package's `coefficients.Calibration`."""
        return [self._of(question) for question in questions]

    def _of(self, question: Any) -> Any:
        job = zlib.crc32(f"{question.workload} {question.machines}".encode()) % 10
        return self._coefficients(
            compute_ratio=1 + question.batch / 64 + job / 100,
            update_ratio=1 + 1 / question.most_on_node + question.nodes / 50,
            communication_ratio=0.5 + question.ranks % 3,
            relative_error=0.2 if question.ranks % 2 else None,
        )


# (graph, machine, devices of a node) → seconds of a micro-batch, of each of its samples, of merging
# gradients within a node, and of merging them between nodes on top.
OBSERVED = {
    ("mlp-blocks", "slow", 4): (1.2e-3, 6e-5, 6e-3, 2.5e-2),
    ("mlp-blocks", "fast", 8): (9e-4, 1e-5, 3e-3, 2e-3),
    ("gpt2", "slow", 4): (2e-2, 0.13, 5e-2, 0.3),
    ("gpt2-amp", "t4-g4dn", 4): (4e-3, 1.2e-3, 4e-3, 3e-2),
    ("gpt2-amp", "h100-sxm", 8): (3e-3, 5e-5, 1e-3, 1e-3),
    ("summary-gpu", "h100-sxm", 8): (1e-3, 1.7e-3, 1e-2, 5e-3),
}
_OBSERVED_AT = datetime(2026, 1, 1, tzinfo=UTC)


def observe(calibrator: Any, graph: Any, name: str) -> None:
    """Keep step times by a plain rule, so that what is observed does not depend on the version."""
    for (seen, machine, devices), (start_s, sample_s, within_s, between_s) in OBSERVED.items():
        if seen != name:
            continue
        draw = random.Random(f"{name} {machine}")
        for number in range(16):
            used, nodes = draw.choice((1, 2, devices)), draw.choice((1, 1, 2))
            batch, accumulation = draw.choice(BATCHES), draw.choice((1, 1, 2))
            step_s = (start_s + sample_s * batch) * accumulation
            step_s += within_s * (used > 1) + between_s * (nodes > 1)
            calibrator.observe(
                graph,
                f"{nodes}x{used}:{machine}",
                step_time_s=step_s * draw.lognormvariate(0, 0.03),
                batch_per_gpu=batch,
                accumulation_steps=accumulation,
                strategy=draw.choice(("ddp", "ddp", "zero2", "zero1")),
                at=_OBSERVED_AT,
                identity=f"{name} {machine} {number}",
            )


class Recorder:
    """The package in use with its machines, clusters and calibrations; writes into `folder`."""

    def __init__(self, package: Any, folder: Path) -> None:
        self.package, self.folder = package, folder
        write_machines(folder / "home")
        os.environ["ESTIMATOR_HOME"] = str(folder / "home")
        kind = _of_package(
            "Cluster", "estimator", "estimator.topology", "estimator.placement.topology"
        )
        self.clusters = {name: kind.load(path) for name, path in write_clusters(folder).items()}
        self.asked = AskedCalibration(_of_package("Coefficients", "estimator.coefficients"))
        self.error = _of_package("EstimatorError", "estimator")
        self.found: dict[str, Values] = {}

    def record(self, source: Source, wanted: Callable[[str], bool]) -> None:
        """Every case of a graph whose name is wanted."""
        graph = source.graph(self.package, self.folder)
        # A fresh one for each way of asking, so that neither has learnt what the other asked.
        learnt = self._learnt(graph, source.name, "scalar")
        for case in scalar_cases(source):
            if wanted(case.name):
                self.found[case.name] = self._scalar(graph, case, learnt)
        learnt = self._learnt(graph, source.name, "table")
        columns = column_questions(source, rows=COLUMN_ROWS)
        for question in (*table_questions(source), *columns):
            cases = [case for case in question if wanted(case.name)]
            if cases:
                self._table(graph, cases, learnt)

    def _learnt(self, graph: Any, name: str, form: str) -> Any:
        calibrator = self.package.Calibrator(self.folder / f"{name}-{form}.db")
        observe(calibrator, graph, name)
        return calibrator

    def _options(self, case: Case, learnt: Any) -> dict[str, Any]:
        return {
            "strategy": case.strategy,
            "accumulation_steps": case.accumulation,
            "cluster": self.clusters.get(case.cluster),
            "calibration": {"-": None, "asked": self.asked, "learnt": learnt}[case.calibration],
        }

    def _scalar(self, graph: Any, case: Case, learnt: Any) -> Values:
        batch: dict[str, Any] = {}
        if case.batch.startswith("g"):
            batch["global_batch"] = int(case.batch[1:])
        elif "/" in case.batch:
            batch["batch_per_gpu"] = [int(part) for part in case.batch.split("/")]
        elif case.batch != "-":
            batch["batch_per_gpu"] = int(case.batch)
        is_played = (
            zlib.crc32(case.name.encode()) % PLAYED == 0
            and ranks_of(case.allocation) <= MOST_PLAYED_RANKS
        )
        try:
            answer = self.package.estimate(
                graph, case.allocation, **batch, **self._options(case, learnt)
            )
            return scalar_values(answer, is_played=is_played)
        except (self.error, *FAILURES) as error:
            return _refused(error)

    def _table(self, graph: Any, cases: Sequence[Case], learnt: Any) -> None:
        """Answers of a table; of its halves where it is refused, down to single rows."""
        batches = np.array([int(case.batch.removeprefix("g")) for case in cases])
        name = "global_batch" if cases[0].batch.startswith("g") else "batch_per_gpu"
        try:
            table = self.package.estimate_many(
                graph,
                self._allocations(cases),
                **{name: batches},
                **self._options(cases[0], learnt),
            )
            rows = table_values(table)
        except (self.error, *FAILURES) as error:
            if len(cases) > 1:
                middle = len(cases) // 2
                self._table(graph, cases[:middle], learnt)
                self._table(graph, cases[middle:], learnt)
                return
            rows = [_refused(error)]
        self.found.update(zip([case.name for case in cases], rows, strict=True))

    def _allocations(self, cases: Sequence[Case]) -> Any:
        texts = [case.allocation for case in cases]
        if cases[0].form == "table":
            return texts
        rows = [
            [self.package.Allocation.parse(group).groups[0] for group in text.split("+")]
            for text in texts
        ]
        names = tuple(sorted({group.machine for row in rows for group in row}))
        shape = (len(rows), max(map(len, rows)))
        name, nodes, devices = np.full(shape, -1), np.zeros(shape, int), np.zeros(shape, int)
        for row, groups in enumerate(rows):
            for column, group in enumerate(groups):
                name[row, column] = names.index(group.machine)
                nodes[row, column] = group.nodes
                devices[row, column] = group.devices_per_node
        columns = self.package.AllocationColumns
        # What the first two are called depends on the version.
        machines, machine = [field.name for field in fields(columns)][:2]
        return columns(**{machines: names, machine: name}, nodes=nodes, devices=devices)


def _refused(error: BaseException) -> Values:
    return {"refused": f"{type(error).__name__}: {error}"}


def recorded(wanted: Callable[[str], bool]) -> Iterator[tuple[str, Values]]:
    """(name, values) of every wanted case, by the package that is first on the path."""
    import estimator

    progress = Progress("graph", len(SOURCES))
    with tempfile.TemporaryDirectory(prefix="record-") as folder:
        recorder = Recorder(estimator, Path(folder))
        for source in SOURCES:
            begun_s = time.monotonic()
            recorder.record(source, wanted)
            progress.advance(f"{source.name}, {time.monotonic() - begun_s:.1f} s")
        say(f"{len(recorder.found)} estimates")
        # Paths of the store stand in some sentences.
        for name, values in recorder.found.items():
            if "refused" in values:
                values["refused"] = values["refused"].replace(folder, "STORE")
            yield name, values
