"""The commands that look inside a step: what takes memory, and what it waits for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from estimator.cli.console import end_with_no, print_json, print_sections, progress, waiting
from estimator.cli.options import on_option, traced, workload_options
from estimator.cli.request import Request
from estimator.probe.option_types import Count, Duration

if TYPE_CHECKING:
    from estimator.advise.swap.search import Planned
    from estimator.estimates.estimate import Estimate


@click.command(epilog="Example: estimator memory gpt2.graph --on 1x8:h100-sxm")
@partial(workload_options, without=("loader",))
@on_option
@click.option("--picture", type=click.Path(path_type=Path), help="Draw it, as .png or .svg.")
@click.option(
    "--snapshot",
    type=click.Path(path_type=Path),
    help="Write what the viewer of torch.cuda.memory._snapshot opens, as .pickle.",
)
@click.option(
    "--plans", "with_plans", is_flag=True, help="Trade its peak for time: swap, compute again."
)
@click.option("--json", "as_json", is_flag=True, help="Print base units, unrounded.")
def memory(
    on: str,
    picture: Path | None,
    snapshot: Path | None,
    with_plans: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Say what MODEL holds in memory over a step, by kind and module, and what is alive at the
    peak; where it does not fit, what would make it fit and how much longer that takes.

    With --plans, how low the peak of one device gets, and at what slow-down, where tensors are
    swapped to the host or computed again; the picture shows that curve too.

    Exit code 1: it does not fit into the devices' memory.
    """
    from estimator.advise.memory import memory_of, remedies
    from estimator.report.sections import memory_sections, plans_section, remedies_section

    request = Request(**options)
    for path in (picture, snapshot):
        if path is not None:
            from estimator.files import check_writable

            check_writable(path)
    graph = traced(request, (on,))
    report = memory_of(request.estimate(graph, on))
    plans = _plans(report.answer) if with_plans else []
    if picture is not None:
        from estimator.report.pictures import draw_memory

        with waiting("drawing"):
            draw_memory(report, picture, plans)
    if snapshot is not None:
        from estimator.integrations.viewers import write_snapshot

        write_snapshot(report, snapshot)
    suggested = []
    if report.answer.fits == "no":
        with waiting("looking for what would make it fit"):
            suggested = remedies(report.answer)
    if as_json:
        more = {"remedies": [remedy.to_dict() for remedy in suggested]}
        more["plans"] = [planned.to_dict() for planned in plans]
        print_json(report.to_dict() | more)
    else:
        print_sections(
            [*memory_sections(report), remedies_section(suggested), plans_section(plans)]
        )
    if report.answer.fits == "no":
        end_with_no(f"{report.answer.model} does not fit on {report.answer.allocation}")


def _plans(answer: Estimate) -> list[Planned]:
    from estimator.advise.swap.problem import swap_problem
    from estimator.advise.swap.search import pareto

    problem = swap_problem(answer)
    with progress("planning") as report:
        return pareto(problem, report=lambda done: report("budgets", done))


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
