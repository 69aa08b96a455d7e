"""The commands that hand estimates on: as a page, as a Slurm script, over HTTP."""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from estimator.cli.console import json_option, print_json, print_text, remark, waiting
from estimator.cli.option_types import Amount, Count
from estimator.cli.options import (
    OutFile,
    amount_options,
    check_amounts,
    duration_of,
    on_option,
    prices_option,
    read_store,
    traced,
    workload_options,
)
from estimator.cli.request import Request
from estimator.errors import ModelError, quoted
from estimator.files import write_text_atomically
from estimator.units import MIB

if TYPE_CHECKING:
    from estimator.calibrate.calibrator import Calibrator
    from estimator.estimates.estimate import Estimate
    from estimator.graph.ir.op_graph import OpGraph
    from estimator.machines.prices import PriceList
    from estimator.report.sections import Section


@click.command(epilog="Example: estimator report gpt2.graph --on 2x8:h100-sxm -o report.html")
@workload_options
@on_option
@click.option("-o", "--out", required=True, type=OutFile(), help="Such as report.html.")
@click.option(
    "--observed",
    callback=read_store,
    metavar="STORE",
    help="Also the steps observed in this store; - is the user's own.",
)
@prices_option
@amount_options
@click.option(
    "--figures",
    type=click.Path(path_type=Path, file_okay=False),
    help="A folder for the figures as .png and .svg.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def report(
    on: str,
    out: Path,
    observed: Calibrator | None,
    prices: PriceList,
    samples: float | None,
    tokens: float | None,
    figures: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Write a page about MODEL on an allocation, one HTML file.

    It loads nothing else, and has the answer, where the time goes, the timeline, scaling, memory
    over the step, layouts, cost, observed steps, and what is assumed.
    """
    from estimator.advise.scaling import scaling_of
    from estimator.report.facts import heading
    from estimator.report.page import page, write_figures
    from estimator.report.sections import estimate_sections

    check_amounts(samples, tokens)
    request = Request(**options)
    # Before a model is traced, which can take long.
    graph = traced(request, (on,))
    with waiting("estimating"):
        answer = request.estimate(graph, on)
        duration_s = duration_of(answer, samples, tokens)
        more = _more_sections(request, graph, answer, prices=prices, duration_s=duration_s)
        if observed is not None:
            from estimator.calibrate.calibrator import fitted_steps
            from estimator.report.profiles import fitted_steps_section

            steps = fitted_steps(graph, observed.store, observed, cluster=request.cluster)
            more.append(fitted_steps_section(graph.workload, list(steps)))
        sections = estimate_sections(
            answer,
            scaling=scaling_of(answer),
            duration_s=duration_s,
            more=more,
            verbose=True,
        )
        write_text_atomically(out, page(heading(answer), sections))
        drawn = [] if figures is None else write_figures(sections, figures)
    if as_json:
        print_json({"report": str(out), "figures": [str(path) for path in drawn]})
    else:
        remark(f"{out}: {heading(answer)}")


def _more_sections(
    request: Request,
    graph: OpGraph,
    answer: Estimate,
    *,
    prices: PriceList,
    duration_s: float | None,
) -> list[Section]:
    """What a page has beside the sections of the estimate itself."""
    from estimator.advise.scaling import sweep
    from estimator.report import sections

    rows = sweep(
        sections.smaller_allocations(answer.allocation),
        lambda text: request.estimate(graph, text),
    )

    def answer_as(strategy: str, layout: str | None) -> Estimate:
        other = replace(request, strategy=strategy, layout=layout, tp_plan=None)
        return other.estimate(graph, str(answer.allocation))

    # What is trained in that time, on whichever allocation.
    samples = (duration_s or 0.0) * (answer.samples_per_s or 0.0) or None
    return [
        sections.timeline_section(answer),
        sections.scaling_section(rows),
        *sections.drawn_memory_sections(answer),
        sections.layouts_section(answer, answer_as),
        sections.cost_section(rows, prices, samples=samples),
    ]


@click.command(epilog="Example: estimator slurm gpt2.graph --on 2x8:h100-sxm --samples 1e7")
@workload_options
@on_option
@amount_options
@click.option(
    "--margin", type=Amount(least=1.0), default=1.25, help="On the time limit; default 1.25."
)
@click.option(
    "--sinfo",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Partitions to choose from: what sinfo -h -o '%R|%l|%D|%G' wrote.",
)
@click.option("--run", "command", default="train.py", help="What torchrun runs; default train.py.")
@json_option
def slurm(
    on: str,
    samples: float | None,
    tokens: float | None,
    margin: float,
    sinfo: Path | None,
    command: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Print a Slurm job script for training MODEL.

    The time limit is the upper end of the estimate's interval times --margin.
    """
    import shlex

    from estimator.errors import ImportedFileError
    from estimator.files import read_text
    from estimator.integrations.schedulers.launchers import (
        job_script,
        partition_for,
        read_sinfo,
        time_text,
    )

    if (samples is None) == (tokens is None):
        raise click.UsageError("give --samples or --tokens, from which the time limit follows")
    try:
        words = shlex.split(command)
        partitions = None if sinfo is None else read_sinfo(read_text(sinfo, most_bytes=MIB))
    except OSError as error:
        raise ImportedFileError(f"cannot read {sinfo} ({error.strerror}); check --sinfo") from None
    except ValueError as error:
        if isinstance(error, ImportedFileError):
            raise
        raise click.UsageError(f"--run cannot be split into words ({error})") from None
    request = Request(**options)
    answer = request.estimate(traced(request, (on,)), on)
    upper_ratio = answer.high_s / answer.step_time_s
    time_s = answer.duration_s(samples=samples, tokens=tokens) * upper_ratio * margin
    partition = None
    if partitions is not None:
        nodes = answer.allocation.nodes
        gpus = max(group.devices_per_node for group in answer.allocation.groups)
        partition = partition_for(partitions, nodes=nodes, gpus=gpus, time_s=time_s)
    script = job_script(answer, time_s=time_s, command=words, partition=partition)
    if as_json:
        more = {"partition": partition.name if partition else None, "time_s": time_s}
        print_json({"script": script, "time": time_text(time_s)} | more)
        return
    if answer.fits == "no":
        remark(f"{answer.model} does not fit into the memory of {answer.allocation}")
    print_text(script)


_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@click.command(epilog="Example: estimator serve --port 8000")
@click.option("--port", type=click.IntRange(0, 65535), default=8321, help="Default 8321.")
@click.option("--host", default="127.0.0.1", help="Address to listen on; default 127.0.0.1.")
@click.option("--allow-host", "names", multiple=True, help="A name that it is asked by; repeat.")
@click.option("--workers", type=Count(most=64), default=1, help="Processes; default 1.")
@click.option(
    "--store", type=click.Path(path_type=Path, dir_okay=False), help="Not the user's store."
)
def serve(host: str, port: int, names: tuple[str, ...], workers: int, store: Path | None) -> None:
    """Answer estimates over HTTP to who has the ESTIMATOR_TOKEN.

    Graphs are uploaded once and named by the hash of their content; nothing is traced or read by
    path here. /openapi.json describes all that can be asked; / is a page for a browser, which logs
    in with the token at /login.
    """
    uvicorn = _uvicorn()
    from estimator.serve.guard import HOSTS, STORE, TOKEN, check_token

    check_token(os.environ.get(TOKEN))
    port = _free_port(host, port)
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    remark(f"listening on {where}; log in at {where}/login with the token in {TOKEN}")
    if host not in _LOOPBACK:
        remark(f"listening on {host}: put TLS before it, since the token is sent with each request")
    os.environ[HOSTS] = ",".join((host, *names))
    if store is not None:
        os.environ[STORE] = str(store.absolute())
    with tempfile.TemporaryDirectory() as folder:
        if workers > 1:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        uvicorn.run(
            "estimator.serve.app:from_environment",
            factory=True,
            host=host,
            port=port,
            workers=workers,
            loop="estimator.serve.guard:SharingLoop" if workers > 1 else "auto",
            http="estimator.serve.guard:Connection",
            ws="none",
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_keep_alive=30,
            limit_concurrency=512,
        )


def _free_port(host: str, port: int) -> int:
    """The port to listen on, one that is free for 0; uvicorn would end with a raw error."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind((host, port))
            number: int = free.getsockname()[1]
            return number
    except OSError as error:
        raise click.ClickException(
            f"cannot listen on {quoted(host)}, port {port} ({error.strerror}); choose another "
            "with --host or --port"
        ) from None


def _uvicorn() -> Any:
    try:
        import fastapi
        import orjson
        import prometheus_client
        import uvicorn
    except ImportError as error:
        raise ModelError(
            f"the service needs {error.name}; install throughput-estimator[serve]"
        ) from None
    return uvicorn if fastapi and orjson and prometheus_client else None
