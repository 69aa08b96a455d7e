"""Read published traces of clusters: who came when, asked for how many devices, ran how long."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from estimator.errors import WorkloadError, cause
from estimator.files import parse_json, read_csv, read_text

Row = Mapping[str, str]
# More than a replay plays in a day.
_MOST_JOBS = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedJob:
    """One job of a trace; arrivals count from its first. Pollux' workloads have no run times."""

    name: str
    arrival_s: float
    devices: int
    run_s: float | None


def read_trace(path: Path) -> list[TracedJob]:
    """Jobs of a trace in any known form, in the order of arrival.

    Philly's JSON (`jobid, submitted_time, attempts[start_time, end_time, detail[ip, gpus]]`), CSVs
    of Helios (`job_id, gpu_num, submit_time, duration`), of Alibaba PAI (`job_name, plan_gpu,
    inst_num, start_time, end_time`; plan_gpu in percent of a GPU) and of Pollux' workloads (`name,
    time, application, num_replicas, batch_size`). Jobs without devices, or that ran for no time,
    are left out. Raises WorkloadError.
    """
    try:
        is_philly = path.suffix == ".json"
        found = list(_philly(parse_json(read_text(path))) if is_philly else _csv(path))
    except OSError as error:
        raise WorkloadError(
            f"cannot read the trace {path} ({error.strerror}); check the path"
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise WorkloadError(
            f"{path} is no trace that is known ({cause(error)}); give Philly's JSON or a "
            "CSV of Helios, Alibaba PAI or Pollux"
        ) from None
    jobs = [job for job in found if job.devices >= 1 and job.run_s != 0]
    if not jobs:
        raise WorkloadError(f"{path} has no job with devices and a run time; give another trace")
    first = min(job.arrival_s for job in jobs)
    shifted = [replace(job, arrival_s=job.arrival_s - first) for job in jobs]
    return sorted(shifted, key=lambda job: job.arrival_s)


def _philly(entries: Any) -> Iterable[TracedJob]:
    """The run time of a job is that of all its attempts; its devices are the last attempt's."""
    for entry in entries:
        attempts = [a for a in entry["attempts"] if a.get("start_time") and a.get("end_time")]
        if not attempts:
            continue
        run_s = sum(_seconds(a["end_time"]) - _seconds(a["start_time"]) for a in attempts)
        devices = sum(len(node["gpus"]) for node in attempts[-1].get("detail", []))
        yield TracedJob(
            name=str(entry["jobid"]),
            arrival_s=_seconds(entry["submitted_time"]),
            devices=devices,
            run_s=run_s,
        )


def _csv(path: Path) -> Iterable[TracedJob]:
    lines = read_csv(path, most_rows=_MOST_JOBS)
    names = next(lines, [])
    for needed, read in _FORMS:
        if needed <= set(names):
            rows = (dict(zip(names, cells, strict=False)) for cells in lines)
            return (read(row) for row in rows if _is_complete(row, needed))
    raise ValueError(f"its columns are {', '.join(sorted(names)) or 'none'}")


def _is_complete(row: Row, needed: frozenset[str]) -> bool:
    return all(row.get(column) not in (None, "", "None") for column in needed)


def _helios(row: Row) -> TracedJob:
    return TracedJob(
        name=row["job_id"],
        arrival_s=_seconds(row["submit_time"]),
        devices=int(float(row["gpu_num"])),
        run_s=float(row["duration"]),
    )


def _pai(row: Row) -> TracedJob:
    # A share of a GPU takes a whole one here: jobs do not share devices.
    instances = int(float(row.get("inst_num") or 1))
    return TracedJob(
        name=row["job_name"],
        arrival_s=float(row["start_time"]),
        devices=instances * math.ceil(float(row["plan_gpu"]) / 100),
        run_s=float(row["end_time"]) - float(row["start_time"]),
    )


def _pollux(row: Row) -> TracedJob:
    return TracedJob(
        name=row["name"],
        arrival_s=float(row["time"]),
        devices=int(row["num_replicas"]),
        run_s=None,
    )


_FORMS: tuple[tuple[frozenset[str], Callable[[Row], TracedJob]], ...] = (
    (frozenset({"job_id", "gpu_num", "submit_time", "duration"}), _helios),
    (frozenset({"job_name", "plan_gpu", "start_time", "end_time"}), _pai),
    (frozenset({"name", "time", "application", "num_replicas"}), _pollux),
)


def _seconds(text: str) -> float:
    """A time stamp such as ``2017-10-09 10:33:15``, of UTC unless it says otherwise, in seconds."""
    found = datetime.fromisoformat(text)
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
