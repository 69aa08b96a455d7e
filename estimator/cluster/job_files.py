"""Read jobs from a file of jobs, or from a published trace of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from estimator.cluster.experiment import drawn_run_s, job_of_run_time
from estimator.cluster.jobs import Job, check_names
from estimator.cluster.nodes import Nodes
from estimator.cluster.speeds import EngineSpeeds
from estimator.cluster.traces import TracedJob
from estimator.errors import WorkloadError, quoted
from estimator.files import parse_json, read_text
from estimator.graph.files import is_saved_graph
from estimator.graph.op_graph import OpGraph
from estimator.graph.summary_files import is_summary_file

_NUMBERS = {
    *("arrival_s", "samples", "devices", "global_batch", "most_devices", "most_batch_per_gpu"),
    *("most_global_batch", "gradient_noise_samples", "epoch_samples"),
}
_WHOLE = {"devices", "global_batch", "most_devices", "most_batch_per_gpu", "most_global_batch"}


def is_job_file(path: Path) -> bool:
    """Whether a file is one of jobs, a JSON object: Philly's trace is an array."""
    return isinstance(_read_json(path), dict) if path.suffix == ".json" else False


def read_jobs(
    path: Path, graph_of: Callable[[str], OpGraph], *, allow_code: bool = False
) -> list[Job]:
    """The jobs of a file ``{"jobs": [{"name", "arrival_s", "model", "samples", "devices", …}]}``.

    Other keys are those of `Job`; `model` is a MODEL text, which `graph_of` traces once each: a
    saved graph, a summary or an ``hf:`` type, with `allow_code` also a function, which is run. The
    global batch is by default the model's own on every device asked for. Raises WorkloadError.
    """
    content = _read_json(path)
    entries = content.get("jobs") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise WorkloadError(f'{path} lists no jobs; write {{"jobs": [{{"name": …}}, …]}}')
    graphs: dict[str, OpGraph] = {}
    jobs = []
    for number, entry in enumerate(entries):
        model = _checked_entry(entry, number, path)
        if model not in graphs:
            if not allow_code:
                _check_no_code(model, f"{path}, job {number}")
            graphs[model] = graph_of(model)
        graph = graphs[model]
        known = {key: value for key, value in entry.items() if key != "model"}
        known.setdefault("global_batch", (graph.batch or 1) * entry["devices"])
        try:
            jobs.append(Job(graph=graph, **{"name": str(number), **known}))
        except WorkloadError as error:
            raise WorkloadError(f"{path}: {error}") from None
    return jobs


def jobs_of_trace(
    rows: Sequence[TracedJob], graphs: Sequence[OpGraph], nodes: Nodes, *, seed: int
) -> list[Job]:
    """Jobs for what a trace says, which names no models: each takes one drawn by the seed.

    Samples are run time × the engine's throughput at the request; run times that the trace lacks
    are drawn as in the experiment. Rows that ask for more than the cluster has are refused with
    WorkloadError.
    """
    check_names(row.name for row in rows)
    rng, machine = np.random.default_rng(seed), nodes.machines[0]
    speeds = EngineSpeeds(nodes.cluster)
    jobs = []
    for row in rows:
        if row.devices > nodes.total(machine):
            raise WorkloadError(
                f"job '{row.name}' of the trace asks for {row.devices} devices and the cluster has "
                f"{nodes.total(machine)} {machine}; give a larger cluster"
            )
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
            )
        )
    return jobs


def job_entries(jobs: Sequence[Job], models: Mapping[str, str]) -> dict[str, Any]:
    """The content of a job file; `models` has the MODEL text of each graph by its name."""
    entries = []
    for job in jobs:
        given = {item.name: getattr(job, item.name) for item in fields(job) if item.name != "graph"}
        kept = {key: value for key, value in given.items() if value is not None}
        entries.append({**kept, "model": models[job.graph.name]})
    return {"jobs": entries}


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


def _checked_entry(entry: Any, number: int, path: Path) -> str:
    where = f"{path}, job {number}"
    if not isinstance(entry, dict):
        raise WorkloadError(f"{where} is not an object; write {{'name': …, 'model': …}}")
    unknown = set(entry) - _NUMBERS - {"name", "model"}
    if unknown:
        raise WorkloadError(
            f"{where} has an unknown key '{min(unknown)}'; see `estimator replay -h`"
        )
    for key in ("arrival_s", "model", "samples", "devices"):
        if key not in entry:
            raise WorkloadError(f"{where} has no {key}; add it")
    for key in _NUMBERS & set(entry):
        value = entry[key]
        kinds: tuple[type, ...] = (int,) if key in _WHOLE else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            noun = "a whole number" if key in _WHOLE else "a number"
            raise WorkloadError(f"{where}: {key} must be {noun}, found {quoted(value)}")
    for key in ("name", "model"):
        if not isinstance(entry.get(key, ""), str):
            raise WorkloadError(f"{where}: {key} must be text, found {quoted(entry[key])}")
    model: str = entry["model"]
    return model
