"""Read jobs from a file or from a published trace of a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from estimator.errors import WorkloadError, cause, first_fault, quoted
from estimator.files import parse_json, read_csv, read_text
from estimator.graph.files import is_saved_graph, is_summary_file
from estimator.graph.ir.op_graph import OpGraph
from estimator.replay.jobs import Job, check_names
from estimator.replay.nodes import Nodes
from estimator.replay.speeds import EngineSpeeds, Speeds

Row = Mapping[str, str]
# More than a replay gets through in a day.
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
        read = list(_philly(parse_json(read_text(path))) if is_philly else _csv(path))
    except OSError as error:
        raise WorkloadError(
            f"cannot read the trace {path} ({error.strerror}); check the path"
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise WorkloadError(
            f"{path} is no trace that is known ({cause(error)}); give Philly's JSON or a "
            "CSV of Helios, Alibaba PAI or Pollux"
        ) from None
    jobs = [job for job in read if job.devices >= 1 and job.run_s != 0]
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
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


MEDIAN_RUN_S = 3600.0
RUN_SPREAD = 1.3


def drawn_run_s(rng: np.random.Generator, jobs: int) -> NDArray[np.float64]:
    """Run times at the request: log-normal, median `MEDIAN_RUN_S`, spread `RUN_SPREAD`."""
    return MEDIAN_RUN_S * np.exp(RUN_SPREAD * rng.standard_normal(jobs))


def job_of_run_time(
    graph: OpGraph,
    nodes: Nodes,
    *,
    name: str,
    arrival_s: float,
    devices: int,
    run_s: float,
    speeds: Speeds,
    loader: str | None = None,
) -> Job:
    """A job that takes `run_s` at these speeds on the devices asked for.

    They are of the cluster's first machine type that has as many and on which the job fits. Raises
    WorkloadError where none is.
    """
    batch = (graph.batch or 1) * devices
    job = Job(
        name=name,
        arrival_s=arrival_s,
        graph=graph,
        samples=batch,
        devices=devices,
        global_batch=batch,
        loader=loader,
    )
    for machine in nodes.machines:
        if devices <= nodes.total(machine):
            (step_s,) = speeds.step_times_s(job, [nodes.packed(machine, devices)])
            if math.isfinite(step_s):
                return replace(job, samples=run_s / step_s * batch)
    sizes = ", ".join(f"{nodes.total(machine)} {machine}" for machine in nodes.machines)
    raise WorkloadError(
        f"job '{name}' asks for {devices} devices on which {graph.name} fits, and the cluster has "
        f"{sizes}; give a larger cluster"
    )


@lru_cache(maxsize=1)
def _entry() -> type[BaseModel]:
    """What a job's entry may have: the fields of `Job` with the text of a MODEL for its graph."""
    kinds = get_type_hints(Job)
    known: dict[str, Any] = {
        item.name: (kinds[item.name], ... if item.default is MISSING else item.default)
        for item in fields(Job)
    }
    del known["graph"]
    optional = {"name": (str, ""), "global_batch": (int | None, None)}
    strict = ConfigDict(extra="forbid", strict=True)
    return create_model("JobEntry", __config__=strict, model=(str, ...), **(known | optional))


def is_job_file(path: Path) -> bool:
    """Whether a file is one of jobs, a JSON object: Philly's trace is an array."""
    return isinstance(_read_json(path), dict) if path.suffix == ".json" else False


def read_jobs(
    path: Path,
    graph_of: Callable[[str], OpGraph],
    *,
    allow_code: bool = False,
    noise_of: Callable[[OpGraph], float | None] | None = None,
) -> list[Job]:
    """The jobs of a file ``{"jobs": [{"name", "arrival_s", "model", "samples", "devices", …}]}``.

    Other keys are those of `Job`; `model` is a MODEL text, which `graph_of` traces once each: a
    saved graph, a summary or an ``hf:`` type, with `allow_code` also a function, which is run. The
    global batch is by default the model's own on every device asked for, the gradient noise scale
    what `noise_of` knows of the graph. Raises WorkloadError.
    """
    content = _read_json(path)
    entries = content.get("jobs") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise WorkloadError(f'{path} lists no jobs; write {{"jobs": [{{"name": …}}, …]}}')
    graphs: dict[str, OpGraph] = {}
    jobs = []
    for number, entry in enumerate(entries):
        try:
            given = _entry().model_validate(entry).model_dump(exclude_none=True)
        except ValidationError as error:
            raise WorkloadError(
                f"{path}, job {number}: {first_fault(error)[0]}; see 'estimator replay --help'"
            ) from None
        model = given.pop("model")
        if model not in graphs:
            if not allow_code:
                _check_no_code(model, f"{path}, job {number}")
            graphs[model] = graph_of(model)
        graph = graphs[model]
        given.setdefault("global_batch", (graph.batch or 1) * given["devices"])
        if noise_of is not None:
            given.setdefault("gradient_noise_samples", noise_of(graph))
        try:
            jobs.append(Job(graph=graph, **given | {"name": given["name"] or str(number)}))
        except WorkloadError as error:
            raise WorkloadError(f"{path}: {error}") from None
    return jobs


def jobs_of_trace(
    rows: Sequence[TracedJob],
    graphs: Sequence[OpGraph],
    nodes: Nodes,
    *,
    seed: int,
    loader: str | None = None,
) -> list[Job]:
    """Jobs for what a trace says, which names no models: each takes one drawn by the seed.

    Samples are run time × the engine's throughput at the request; run times that the trace lacks
    are drawn as in the experiment. `loader` feeds every job. Rows that ask for more than the
    cluster has are refused with WorkloadError.
    """
    check_names(row.name for row in rows)
    rng, speeds = np.random.default_rng(seed), EngineSpeeds(nodes.cluster)
    jobs = []
    for row in rows:
        graph = graphs[int(rng.integers(len(graphs)))]
        drawn_s = float(drawn_run_s(rng, 1)[0])
        jobs.append(
            job_of_run_time(
                graph,
                nodes,
                name=row.name,
                arrival_s=row.arrival_s,
                devices=row.devices,
                run_s=drawn_s if row.run_s is None else row.run_s,
                speeds=speeds,
                loader=loader,
            )
        )
    return jobs


def _read_json(path: Path) -> Any:
    try:
        return parse_json(read_text(path))
    except OSError as error:
        raise WorkloadError(f"cannot read {path} ({error.strerror}); check the path") from None
    except ValueError as error:
        raise WorkloadError(f"{path} is damaged ({error}); correct it") from None


def _check_no_code(model: str, where: str) -> None:
    if not (model.startswith("hf:") or is_saved_graph(model) or is_summary_file(model)):
        raise WorkloadError(
            f"{where}: model {quoted(model)} is no saved graph, summary or hf: type, and a file is "
            "not let run code; name a graph that 'estimator trace' saved, or trust the file with "
            "--allow-code"
        )
