"""The command that says what a step waits for, predicted for a model or measured of a script."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from estimator.cli.console import print_json, print_tables, progress
from estimator.cli.options import on_option, refuse_given, traced, training_options
from estimator.cli.request import Request
from estimator.probe.option_types import Count, Duration

if TYPE_CHECKING:
    pass


_OF_RUNS = ("steps", "warmup", "repeats", "timeout", "data", "nodes", "address")


@click.command()
@training_options
@on_option
@click.option(
    "--against",
    metavar="ALLOCATION",
    help="Measure the network stall against these devices rather than one node of --on.",
)
@click.option(
    "--run",
    "script",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Run this training script, unchanged, in ways that leave out one thing each.",
)
@click.option("--steps", type=Count(2), default=35, help="Steps of each run of --run.")
@click.option("--warmup", type=Count(), default=5, help="Steps of these that are not timed.")
@click.option("--repeats", type=Count(), default=3, help="How often each run is made.")
@click.option(
    "--timeout",
    type=Duration(1.0, counts_seconds=True),
    default=600.0,
    help="What one run may take, such as 10min.",
)
@click.option(
    "--data",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    help="Files that the script reads, or folders of them; by default those that Python opens.",
)
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="COMMAND",
    help="Twice: what starts a program on each of two nodes, such as 'ssh n2'.",
)
@click.option("--address", default="127.0.0.1", help="Of the first --node, for the second.")
@click.option("--json", "as_json", is_flag=True, help="Print base units, unrounded.")
@click.argument("model", nargs=-1, metavar="MODEL | -- ARGS")
@click.pass_context
def stalls(
    context: click.Context,
    /,
    on: str,
    against: str | None,
    script: Path | None,
    model: tuple[str, ...],
    as_json: bool,
    steps: int,
    warmup: int,
    repeats: int,
    timeout: float,
    data: tuple[Path, ...],
    nodes: tuple[str, ...],
    address: str,
    **options: Any,
) -> None:
    """Say what a training step waits for: its data, the other devices of a node, other nodes.

    Of a MODEL it is predicted, with the same batch on every device. The interconnect stall is what
    a node's devices take beyond one device, as a share of the node's step; the network stall what
    all nodes take beyond one. With --loader it says what other loaders would give. With --run it is
    measured on this machine; what follows -- goes to the script.
    """
    if script is None:
        refuse_given(context, _OF_RUNS, "is of a script that --run runs")
        _predict(on, against, model, as_json, options)
        return
    refuse_given(context, ("against", *options), "is of a MODEL to predict, found --run")
    if steps < warmup + 2:
        raise click.UsageError(f"--steps {steps} leaves too few after --warmup {warmup}; give more")
    from estimator.cli.render.plans import measured_report
    from estimator.stalls.measured import measure_stalls
    from estimator.stalls.runs import Script, cores_of

    asked = Script(
        path=script,
        arguments=model,
        cores=cores_of(on),
        steps=steps,
        warmup=warmup,
        timeout_s=timeout,
        node_commands=nodes,
        address=address,
    )
    with progress("running") as report:
        found = measure_stalls(asked, repeats=repeats, data=data, report=report)
    if as_json:
        print_json(found.to_dict())
    else:
        print_tables(measured_report(found))


def _predict(
    on: str, against: str | None, model: tuple[str, ...], as_json: bool, options: dict[str, Any]
) -> None:
    from estimator.cli.render.plans import predicted_report
    from estimator.stalls.predicted import input_answers, predict_stalls

    if len(model) != 1:
        raise click.UsageError(f"give one MODEL or --run SCRIPT.py, found {len(model)} models")
    request = Request(model=model[0], **options)
    graph = traced(request, (on,) if against is None else (on, against))
    asked = request.of(graph, on)
    found = predict_stalls(asked, against=against)
    data = None if asked.loader is None else input_answers(asked)
    if as_json:
        print_json(found.to_dict() | {"input": data.to_dict() if data else None})
    else:
        print_tables(predicted_report(found, data))
