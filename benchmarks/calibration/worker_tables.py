"""Read tables of asynchronous training: workers, parameter servers, updates a second."""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibration.tables import Job, StepTable
from estimator.calibrate.observation_files import Row, read_rows
from estimator.errors import ObservationError

COLUMNS = ("workers", "parameter_servers", "steps_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStep:
    """One row: the time between two updates, whichever of the workers they come from."""

    source: str
    gpu: str
    model: str
    workers: int
    parameter_servers: int
    step_time_s: float

    @property
    def features(self) -> tuple[float, ...]:
        """(workers, parameter servers)."""
        return (self.workers, self.parameter_servers)

    def about(self) -> dict[str, Any]:
        """The fields of an accuracy case that identify the row (see `summary`)."""
        return {
            "source": self.source,
            "model": self.model,
            "machine": self.gpu,
            "allocation": None,
            "ranks": self.workers,
            "nodes": None,
            "strategy": f"ps:{self.parameter_servers},async",
            "precision": None,
            "batch_per_gpu": None,
            "accumulation_steps": 1,
            "global_batch": None,
        }


def is_worker_table(path: str | os.PathLike[str]) -> bool:
    """Whether a table's rows count workers and parameter servers; raises ObservationError."""
    return any(all(name in row for name in COLUMNS) for _, row in read_rows(path))


def read_workers(paths: Sequence[str | os.PathLike[str]]) -> StepTable[WorkerStep]:
    """Read tables with the columns `gpu, model, workers, parameter_servers, steps_per_s`.

    Raises ObservationError where a file is no table or no row of them all can be used.
    """
    refused: Counter[str] = Counter()
    found: defaultdict[tuple[str, str, int], list[WorkerStep]] = defaultdict(list)
    for path in paths:
        for _, row in read_rows(path):
            try:
                step = _worker_step(row, Path(path).stem)
            except ObservationError as error:
                refused[str(error)] += 1
            else:
                found[step.gpu, step.model, step.parameter_servers].append(step)
    if not found:
        reason, count = refused.most_common(1)[0]
        raise ObservationError(
            f"no row of {', '.join(map(str, paths))} can be used: {reason} ({count} rows); give "
            f"{', '.join(COLUMNS)}"
        )
    jobs = tuple(
        Job(
            label=f"{gpu}, {model}, {servers} server{'s' if servers > 1 else ''}",
            gpu=gpu,
            model=model,
            steps=tuple(steps),
        )
        for (gpu, model, servers), steps in found.items()
    )
    return StepTable(jobs=jobs, refused=refused, assumed={})


def _worker_step(row: Row, source: str) -> WorkerStep:
    return WorkerStep(
        source=row.get("source", source),
        gpu=row.get("gpu", "unknown GPU"),
        model=row.get("model", "unknown model"),
        workers=int(_positive(row, "workers", whole=True)),
        parameter_servers=int(_positive(row, "parameter_servers", whole=True)),
        step_time_s=1 / _positive(row, "steps_per_s"),
    )


def _positive(row: Row, name: str, *, whole: bool = False) -> float:
    try:
        number = float(row.get(name, "nan"))
    except ValueError:
        raise ObservationError(f"its {name} is no number") from None
    if not 0 < number < math.inf or (whole and number != int(number)):
        kind = "a whole number above 0" if whole else "a positive number"
        raise ObservationError(f"its {name} is not {kind}")
    return number
