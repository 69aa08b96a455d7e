"""The command that replays jobs on a cluster: parse, call, print; computes nothing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from estimator.cli.console import (
    json_option,
    print_json,
    print_sections,
    printing_to_stderr,
    progress,
    remark,
    waiting,
)
from estimator.cli.option_types import Count, Duration
from estimator.cli.options import (
    LOADER,
    RESTART,
    OutFile,
    cluster_option,
    picture_option,
    read_store,
)
from estimator.cli.request import Request
from estimator.files import write_text_atomically

if TYPE_CHECKING:
    from collections.abc import Callable

    from estimator.calibrate.calibrator import Calibrator
    from estimator.graph.ir.op_graph import OpGraph
    from estimator.placement.topology import Cluster
    from estimator.replay.jobs import Job
    from estimator.replay.nodes import Nodes, PlacementRule
    from estimator.replay.replay import Outcome, Replay
    from estimator.replay.speeds import Speeds

RULES = ("pack", "even", "spread")
BELIEFS = ("engine", "calibrated", "perfect")


@click.command(epilog="Example: estimator replay jobs.json --on 8x8:dgx-a100 --policy fifo")
@click.argument("jobs_path", metavar="JOBS", type=click.Path(path_type=Path))
@click.option("--on", required=True, metavar="CLUSTER", help="Such as 64x8:dgx-a100.")
@cluster_option
@click.option(
    "--policy",
    "policies",
    required=True,
    multiple=True,
    metavar="P",
    help="fifo, srtf, max-min, max-min-uncapped, afs, optimus, tiresias, gavel, pollux, sia, ones "
    "or module:function; repeat.",
)
@click.option("--model", "models", multiple=True, help="For traces, which name none; repeat.")
@click.option("--loader", metavar="PARTS", help=LOADER)
@click.option(
    "--believed", type=click.Choice(BELIEFS), default="engine", help="What policies see of speeds."
)
@click.option(
    "--placement",
    type=click.Choice(RULES),
    default="pack",
    help="A job's devices on few nodes, on few evenly, or on many; near switches by --cluster.",
)
@click.option("--seed", type=Count(least=0), default=0, help="Of hidden factors.")
@click.option(
    "--restart",
    type=Duration(0.0, 1e9, counts_seconds=True),
    default=30.0,
    help=RESTART.format("30s"),
)
@click.option(
    "--checkpoint-every",
    "checkpoint",
    type=Duration(1.0, 1e9, counts_seconds=True),
    default=600.0,
    help="Default 10min.",
)
@click.option(
    "--node-mtbf",
    type=Duration(3600.0, counts_seconds=True),
    help="Nodes fail so often, such as 8w.",
)
@click.option(
    "--contention", is_flag=True, help="Jobs on the same nodes or uplinks share their links."
)
@click.option("--allow-code", is_flag=True, help="Run functions that JOBS names as models.")
@click.option(
    "--observed",
    callback=read_store,
    metavar="STORE",
    help="Jobs that name no gradient noise have that observed in this store; - is the user's own.",
)
@picture_option
@click.option(
    "--schedule",
    type=OutFile(),
    help="Write each job's life under each policy to this file, as JSON.",
)
@json_option
def replay(
    jobs_path: Path,
    on: str,
    cluster: Cluster | None,
    policies: tuple[str, ...],
    models: tuple[str, ...],
    loader: str | None,
    believed: str,
    placement: PlacementRule,
    seed: int,
    restart: float,
    checkpoint: float,
    node_mtbf: float | None,
    contention: bool,
    allow_code: bool,
    observed: Calibrator | None,
    picture: Path | None,
    schedule: Path | None,
    as_json: bool,
) -> None:
    """Replay JOBS on a cluster under scheduling policies.

    JOBS is a file {"jobs": [{"name", "arrival_s", "model", "samples", "devices", ...}]}, with what
    else each job has (strategy, layout, loader, least_devices, restart_s, ...), or a trace in the
    form of Philly, Helios, Alibaba PAI or Pollux, whose jobs take a model of --model each: a saved
    graph, a summary or an hf: type. Jobs advance at the engine's speeds times hidden factors
    (computing 12 %, network 25 %, each allocation 5 %).
    """
    from estimator.replay.nodes import Nodes
    from estimator.replay.policies import load_policy
    from estimator.replay.replay import Costs, outcome
    from estimator.replay.speeds import SharedLinks, TrueSpeeds

    nodes = Nodes.parse(on, cluster=cluster)
    if contention:
        cluster = (nodes := nodes.described()).cluster
    with printing_to_stderr():
        chosen = {policy: load_policy(policy) for policy in policies}
    noise_of = None if observed is None else observed.store.gradient_noise_samples
    jobs = _jobs(jobs_path, nodes, models, loader, seed, allow_code=allow_code, noise_of=noise_of)
    costs = Costs(restart_s=restart, checkpoint_s=checkpoint, node_mtbf_s=node_mtbf)
    true = TrueSpeeds(jobs, seed, cluster=cluster)
    links = SharedLinks(nodes, true) if contention else None
    options = {"true": true, "costs": costs, "seed": seed, "links": links}
    replays = {
        name: _replayed(
            name,
            *(jobs, Nodes.parse(on, placement, cluster), policy),
            believed=_believed(believed, true, cluster),
            **options,
        )
        for name, policy in chosen.items()
    }
    about = {"cluster": on, "believed": believed, "placement": placement, "seed": seed}
    outcomes = {name: outcome(list(run.ran.values()), nodes, true) for name, run in replays.items()}
    _show(about, replays, outcomes, picture, schedule, as_json=as_json)


def _replayed(name: str, *parts: Any, **options: Any) -> Replay:
    from estimator.replay.replay import Replay

    with progress(name) as report, printing_to_stderr():
        replay = Replay(*parts, **options, report=report)
        replay.run()
    return replay


def _show(
    about: dict[str, object],
    replays: dict[str, Replay],
    outcomes: dict[str, Outcome],
    picture: Path | None,
    schedule: Path | None,
    *,
    as_json: bool,
) -> None:
    """Draw, print and write what became of the jobs under each policy."""
    from estimator.replay.replay import schedule_of

    ran = {name: list(run.ran.values()) for name, run in replays.items()}
    if picture is not None:
        from estimator.report.pictures import draw_replays

        draw_replays(ran, picture)
    if not as_json:
        from estimator.report.plans import replay_section

        print_sections([replay_section(str(about["cluster"]), outcomes)])
        if schedule is None:
            return
    lives = {name: schedule_of(ran[name], run.outages) for name, run in replays.items()}
    if schedule is not None:
        text = json.dumps(about | {"policies": lives}, indent=1) + "\n"
        write_text_atomically(schedule, text)
    if as_json:
        numbers = {name: asdict(result) | lives[name] for name, result in outcomes.items()}
        print_json(about | {"policies": numbers})


def _jobs(
    path: Path,
    nodes: Nodes,
    models: tuple[str, ...],
    loader: str | None,
    seed: int,
    *,
    allow_code: bool,
    noise_of: Callable[[OpGraph], float | None] | None,
) -> list[Job]:
    from estimator.replay.job_files import is_job_file, jobs_of_trace, read_jobs, read_trace

    where = f"1x1:{nodes.machines[0]}"
    if is_job_file(path):
        if models or loader:
            raise click.UsageError(
                "--model and --loader are for traces, and each job of this file names its own; "
                "leave them out"
            )
        with waiting("tracing models"), printing_to_stderr():
            jobs = read_jobs(
                path,
                lambda model: Request(model=model).graph((where,)),
                allow_code=allow_code,
                noise_of=noise_of,
            )
        if noise_of is not None and not any(job.gradient_noise_samples for job in jobs):
            remark("no job of this file has a gradient noise scale, observed or its own")
        return jobs
    if noise_of is not None:
        raise click.UsageError("--observed is for a file of jobs; a trace lets no batch be chosen")
    rows = read_trace(path)
    if not models:
        raise click.UsageError("a trace names no models; give --model, once or more")
    with waiting("tracing models"), printing_to_stderr():
        graphs = [Request(model=model).graph((where,)) for model in models]
    return jobs_of_trace(rows, graphs, nodes, seed=seed, loader=loader)


def _believed(which: str, true: Speeds, cluster: Cluster | None) -> Speeds:
    if which == "perfect":
        return true
    if which == "calibrated":
        from estimator.replay.speeds import CalibratedSpeeds

        return CalibratedSpeeds(cluster=cluster)
    from estimator.replay.speeds import EngineSpeeds

    return EngineSpeeds(cluster)
