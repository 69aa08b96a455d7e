"""The command that says where the memory of a step goes and what would make it fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from estimator.cli.console import ANSWER_IS_NO, print_json, print_tables, waiting
from estimator.cli.options import on_option, traced, workload_options
from estimator.cli.request import Request


@click.command()
@workload_options
@on_option
@click.option("--picture", type=click.Path(path_type=Path), help="Draw it, as .png or .svg.")
@click.option(
    "--snapshot",
    type=click.Path(path_type=Path),
    help="Write what the viewer of torch.cuda.memory._snapshot opens, as .pickle.",
)
@click.option("--json", "as_json", is_flag=True, help="Print base units, unrounded.")
def memory(
    on: str, picture: Path | None, snapshot: Path | None, as_json: bool, **options: Any
) -> None:
    """Say what MODEL holds in memory over a step, by kind and module, and what is alive at the
    peak; where it does not fit, what would make it fit and how much longer that takes.

    Exit code 1: it does not fit into the devices' memory.
    """
    from estimator.advise.fitting import remedies
    from estimator.advise.memory import memory_of

    request = Request(**options)
    for path in (picture, snapshot):
        if path is not None:
            from estimator.machines.files import check_writable

            check_writable(path)
    graph = traced(request, (on,))
    report = memory_of(request.estimate(graph, on))
    if picture is not None:
        from estimator.report.memory import draw_memory

        draw_memory(report, picture)
    if snapshot is not None:
        from estimator.report.memory_snapshot import write_snapshot

        write_snapshot(report, snapshot)
    found = []
    if report.answer.fits == "no":
        with waiting("looking for what would make it fit"):
            found = remedies(
                graph, report.answer, cluster=request.cluster, calibration=request.calibration
            )
    if as_json:
        remedied = {"remedies": [remedy.to_dict() for remedy in found]}
        print_json(report.to_dict() | remedied)
    else:
        from estimator.cli.render_memory import memory_report, remedies_table

        print_tables(memory_report(report, remedies_table(found)))
    if report.answer.fits == "no":
        raise click.exceptions.Exit(ANSWER_IS_NO)
