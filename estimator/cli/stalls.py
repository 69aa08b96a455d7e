"""The command that says what a step waits for, predicted for a model or measured of a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from estimator.cli.console import print_json, print_sections, progress
from estimator.cli.options import on_option, traced, workload_options
from estimator.cli.request import Request
from estimator.probe.option_types import Count, Duration


class Stalls(click.Group):
    """The commands below `stalls`; a MODEL without one of them is predicted."""

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        """Put in the sub-command that was left out."""
        if "--run" in arguments:
            raise click.UsageError("'stalls --run SCRIPT' is now 'stalls run SCRIPT'")
        known = {*self.commands, "-h", "--help"}
        if arguments and arguments[0] not in known:
            arguments = ["predict", *arguments]
        return super().parse_args(context, arguments)


@click.group(cls=Stalls)
def stalls() -> None:
    """Say what a training step waits for: its data, the other devices of a node, other nodes.

    'stalls MODEL --on ALLOCATION' predicts it, 'stalls run SCRIPT.py' measures it here.
    """


@stalls.command(epilog="Example: estimator stalls predict gpt2.graph --on 2x8:h100-sxm")
@workload_options
@on_option
@click.option(
    "--against",
    metavar="ALLOCATION",
    help="Measure the network stall against these devices rather than one node of --on.",
)
@click.option("--json", "as_json", is_flag=True, help="Print base units, unrounded.")
def predict(on: str, against: str | None, as_json: bool, **options: Any) -> None:
    """Predict what a step of MODEL waits for, with the same batch on every device.

    The interconnect stall is what a node's devices take beyond one device, as a share of the node's
    step; the network stall what all nodes take beyond one. With --loader also what other loaders
    would give.
    """
    from estimator.report.plans import predicted_sections
    from estimator.waits.predicted import input_answers, predict_stalls

    request = Request(**options)
    graph = traced(request, (on,) if against is None else (on, against))
    wanted = request.of(graph, on)
    predicted = predict_stalls(wanted, against=against)
    data = None if wanted.loader is None else input_answers(wanted)
    if as_json:
        print_json(predicted.to_dict() | {"input": data.to_dict() if data else None})
    else:
        print_sections(predicted_sections(predicted, data))


@stalls.command(epilog="Example: estimator stalls run train.py --on 1x2:local -- --epochs 1")
@click.argument("script", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@on_option
@click.option("--steps", type=Count(2), default=35, help="Steps of each run.")
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
@click.argument("arguments", nargs=-1, metavar="[-- ARGS]")
def run(
    script: Path,
    on: str,
    arguments: tuple[str, ...],
    as_json: bool,
    steps: int,
    warmup: int,
    repeats: int,
    timeout: float,
    data: tuple[Path, ...],
    nodes: tuple[str, ...],
    address: str,
) -> None:
    """Run a training script on this machine, unchanged, in ways that leave out one thing each.

    What follows -- goes to the script.
    """
    if steps < warmup + 2:
        raise click.UsageError(f"--steps {steps} leaves too few after --warmup {warmup}; give more")
    from estimator.report.plans import measured_sections
    from estimator.waits.measured import measure_stalls
    from estimator.waits.runs import Script, cores_of

    timed_script = Script(
        path=script,
        arguments=arguments,
        cores=cores_of(on),
        steps=steps,
        warmup=warmup,
        timeout_s=timeout,
        node_commands=nodes,
        address=address,
    )
    with progress("running") as report:
        measured = measure_stalls(timed_script, repeats=repeats, data=data, report=report)
    if as_json:
        print_json(measured.to_dict())
    else:
        print_sections(measured_sections(measured))
