"""The commands about calibration: parse, call, print; compute nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from estimator.cli.console import (
    json_option,
    print_json,
    print_sections,
    print_text,
    remark,
    waiting,
)
from estimator.cli.options import cluster_option, trace_options, traced
from estimator.cli.request import Request

# More remarks of one kind than this are only counted.
MOST_REMARKS = 3


@click.group()
def calibrate() -> None:
    """Learn from observed steps."""


@calibrate.command(epilog="Example: estimator calibrate observe seen.csv")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--store", "place", type=click.Path(path_type=Path), help="Not the user's store.")
@click.option("--json", "as_json", is_flag=True, help="Print what was kept and refused as JSON.")
def observe(files: tuple[Path, ...], place: Path | None, as_json: bool) -> None:
    """Keep the observed step times of FILES, tables in .csv or .jsonl.

    A table that was kept before is not kept twice. Bad rows are refused one by one; what the other
    steps of a job contradict counts little; each with its reason. Columns, in base units:

    \b
    workload       as 'estimate' names the model; or model
    allocation     such as 2x8:h100-sxm; or gpu, gpus and nodes
                   (or placement, as in 1+3 devices per node)
    batch_per_gpu  samples per device and micro-batch; or global_batch
    step_time_s    seconds of a step; or throughput and throughput_unit
                   (samples/s, steps/s, tokens/s)

    \b
    and, where they are known:
    accumulation_steps  micro-batches of a step, 1 if not said
    strategy            ddp if not said
    layout              such as tp=2,pp=2, if ranks share the model
    optimizer, precision, seq_len
    steps               steps that the time is the median of
    at                  ISO time; if not said, the file's own
    source              where the row is from
    parameter_bytes, gradient_noise_samples
    """
    from estimator.calibrate.observation_files import read_observations
    from estimator.calibrate.review import doubted_since
    from estimator.calibrate.store import ObservationStore

    tables = {path: read_observations(path) for path in files}
    store = ObservationStore(place)
    before = store.revision
    new = {
        path: store.add_many(table.observations, summaries=table.summaries)
        for path, table in tables.items()
    }
    doubted = doubted_since(store, before)
    if as_json:
        kept = [
            {
                "file": str(path),
                "observations": len(table.observations),
                "new": new[path],
                "refused": [{"line": line, "reason": why} for line, why in table.refused],
            }
            for path, table in tables.items()
        ]
        set_aside = [{"identity": one.identity, "reason": why} for one, why in doubted]
        print_json({"store": str(store.path), "files": kept, "outliers": set_aside})
        return
    for path, table in tables.items():
        known = len(table.observations) - new[path]
        print_text(
            f"{path}: {new[path]} new observations, {known} known before, "
            f"{len(table.refused)} rows refused"
        )
        _tell_first(f"{path} line {line}: {why}" for line, why in table.refused)
    _tell_first(
        f"doubted, counts little: {one.workload} on {one.allocation}: {why}" for one, why in doubted
    )


_store_option = click.option(
    "--store",
    "place",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Not the user's store.",
)


@calibrate.command(epilog="Example: estimator calibrate fit gpt2.graph")
@click.argument("model")
@_store_option
@cluster_option
@trace_options
@json_option
def fit(model: str, place: Path | None, as_json: bool, **known: Any) -> None:
    """Fit the observed steps of MODEL, and compare each with the engine's prediction and the
    calibrated one, with the fitted factors on compute and communication.
    """
    from estimator.calibrate.calibrator import Calibrator, fitted_steps, observations_of
    from estimator.calibrate.store import ObservationStore

    request = Request(model=model, **known)
    # First: a calibrator reads, and tells of, what other jobs have.
    observed = observations_of(ObservationStore(place), model, request.precision or "fp32")
    calibrator = Calibrator(place)
    graph = traced(request, (observed[0].allocation,))
    with waiting("fitting"):
        corrections = list(fitted_steps(graph, observed, calibrator, cluster=request.cluster))
    if as_json:
        print_json({"workload": graph.workload, "steps": [asdict(step) for step in corrections]})
        return
    from estimator.report.profiles import fitted_steps_section

    print_sections([fitted_steps_section(graph.workload, corrections)])


@calibrate.command(epilog="Example: estimator calibrate show")
@_store_option
@json_option
def show(place: Path | None, as_json: bool) -> None:
    """Observed jobs, drift and since when, machine types of two kinds, observations that others
    contradict, which count little.
    """
    from estimator.calibrate.review import review
    from estimator.calibrate.store import ObservationStore

    store = ObservationStore(place)
    with waiting("reading the store"):
        reviewed = review(store)
    if as_json:
        print_json(
            {
                "store": str(store.path),
                "jobs": [_plain(job) for job in reviewed.jobs],
                "drifts": [_plain(drift) for drift in reviewed.drifts],
                "populations": [_plain(population) for population in reviewed.populations],
                "outliers": [
                    {"identity": one.identity, "reason": why} for one, why in reviewed.doubted
                ],
            }
        )
        return
    if not reviewed.jobs:
        print_text(f"no step was observed yet in {store.path}; see 'estimator calibrate observe'")
        return
    from estimator.report.profiles import review_section

    print_sections([review_section(reviewed)])


def _plain(noun: Any) -> dict[str, Any]:
    return {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in asdict(noun).items()
    }


def _tell_first(messages: Iterable[str]) -> None:
    every = list(messages)
    for message in every[:MOST_REMARKS]:
        remark(message)
    if len(every) > MOST_REMARKS:
        remark(f"{len(every) - MOST_REMARKS} more like these; --json lists them")
