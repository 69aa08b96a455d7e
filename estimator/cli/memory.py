"""The command that says where the memory of a step goes and what would make it fit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from estimator.cli.console import end_with_no, print_json, print_sections, progress, waiting
from estimator.cli.options import on_option, traced, workload_options
from estimator.cli.request import Request

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
