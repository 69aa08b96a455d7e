"""Read tables of step times that others measured into jobs, refusing bad rows one by one."""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from estimator.calibrate.observation_files import MeasuredStep, measured_step, read_rows
from estimator.errors import ObservationError

Array = NDArray[np.float64]


# Facts in notes that tell jobs of one model apart: nnU-Net in 2 or 3 dimensions, a layer's sample
# ratio, XLA; and what such a fact says of batches or logs alone.
_FACTS = frozenset({"Dimension", "Model size", "Dataset", "section"})
_NO_SETTING = re.compile(
    r"batch[ _]?size ?= ?\d+(\(max\))?|\d+ logs|(final|finial|all) results", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All steps of one model on one kind of GPU under one setting."""

    label: str
    gpu: str
    model: str
    steps: tuple[MeasuredStep, ...]

    def X(self) -> Array:
        """The features of every step, one row each."""
        return np.array([step.features for step in self.steps], dtype=float)

    def y(self) -> Array:
        """The step times, in seconds."""
        return np.array([step.step_time_s for step in self.steps])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """The jobs of one or several files, and how many rows were left out or completed, and why."""

    jobs: tuple[Job, ...]
    refused: Mapping[str, int]
    assumed: Mapping[str, int]


def read_steps(paths: Sequence[str | os.PathLike[str]]) -> StepTable:
    """Read tables in the standard columns, of which others may be missing or more present.

    A row needs `model` or `gpu`; `gpus`, else `placement` (devices used per node, such as ``1+3``);
    `local_batch`, else `global_batch`; and `step_time_s`, else `throughput` with its unit. Where
    `placement` is blank the devices are spread evenly over `nodes`. The words of `interconnect`,
    such as ``NVLink; 2x 100Gb IB``, say which network to expect. Rows of other parallelism than
    data parallel, and rows that their notes call suspect, derived or inferred, are left out. Steps
    are one job where source, GPU, model and setting are equal; notes that name a setting, as in
    ``Dimension=2``, count. Raises ObservationError where a file is no table or no row of them all
    can be used.
    """
    refused: Counter[str] = Counter()
    assumed: Counter[str] = Counter()
    first: dict[str, str] = {}
    steps: list[MeasuredStep] = []
    for path in paths:
        for line, row in read_rows(path):
            try:
                step = measured_step(line, row, assumed)
            except ObservationError as error:
                refused[str(error)] += 1
                first.setdefault(str(error), f"{Path(path).name} line {line}")
            else:
                setting = _noted_setting(row.get("notes", ""))
                model = _LARGER_NETWORK if _is_of_larger_network(step) else step.model
                steps.append(replace(step, model=model, variant=(*step.variant, setting)))
    if not steps:
        reason, count = refused.most_common(1)[0]
        raise ObservationError(
            f"no row of {', '.join(map(str, paths))} can be used: {reason} ({count} rows, such as "
            f"{first[reason]}); give gpus, nodes, local_batch and step_time_s"
        )
    counts = {f"{reason} (first: {first[reason]})": count for reason, count in refused.items()}
    return StepTable(jobs=_jobs(steps), refused=counts, assumed=assumed)


# OneFlow's page of DLPerf (Oneflow-Inc/DLPerf@c89430bac64f, OneFlow/Recognition/insightface) has
# two networks, which the table calls by the smaller one's name: up to 120 samples at 230 to 257
# samples/s on a GPU, as R100 has in MXNet (186 to 288), and from 256 on at 1,961 to 1,970. A step
# of 256 samples takes half as long as one of 64: no one network does.
_SMALLER_NETWORK, _LARGER_NETWORK, _LARGER_MOST_BATCH = "InsightFace Y1", "InsightFace R100", 120


def _is_of_larger_network(step: MeasuredStep) -> bool:
    """Whether a row that is called by the name of OneFlow's smaller face network is the larger."""
    return (
        step.model == _SMALLER_NETWORK
        and "OneFlow" in step.variant
        and step.batch_per_gpu <= _LARGER_MOST_BATCH
    )


def _noted_setting(notes: str) -> str:
    """What the notes of a row say of its job."""
    facts = (note.partition("=") for note in notes.split(";"))
    values = [value.split("&") for name, _, value in facts if name.strip() in _FACTS]
    parts = (" ".join(_NO_SETTING.sub("", part).split()) for value in values for part in value)
    return " ".join(filter(None, parts))


def _jobs(steps: Sequence[MeasuredStep]) -> tuple[Job, ...]:
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


COLUMNS = ("workers", "parameter_servers", "steps_per_s")


def read_workers(path: Path) -> dict[str, tuple[Array, Array]]:
    """(workers, parameter servers) and seconds between two updates of each GPU, model and servers.

    Raises ObservationError where a file is no table with these columns.
    """
    found: defaultdict[str, list[Array]] = defaultdict(list)
    for line, row in read_rows(path):
        try:
            numbers = np.array([float(row.get(name, "nan")) for name in COLUMNS])
        except ValueError:
            numbers = np.full(len(COLUMNS), math.nan)
        if not (np.isfinite(numbers) & (numbers > 0)).all():
            raise ObservationError(
                f"{path.name} line {line} has no positive {', '.join(COLUMNS)}; correct it"
            )
        label = f"{row.get('gpu', 'unknown GPU')}, {row.get('model', 'unknown model')}"
        found[f"{label}, {numbers[1]:g} servers"].append(numbers)
    tables = {label: np.array(numbers) for label, numbers in found.items()}
    return {label: (table[:, :2], 1 / table[:, 2]) for label, table in tables.items()}
