"""Say how far an estimate can be trusted: train for real, or list what was only assumed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from estimator.cli.console import end_with_no, print_json, print_tables, progress
from estimator.cli.options import (
    OF_LAYOUTS,
    counting_told_drifts,
    on_option,
    told_slowdowns,
    traced,
    workload_options,
)
from estimator.cli.request import Request
from estimator.errors import ModelError
from estimator.probe.option_types import Count
from estimator.units import format_ratio

if TYPE_CHECKING:
    from estimator.estimates import Estimate

# A measurement this close counts as predicted even outside the interval (TARGETS A2, worst case).
TOLERATED_ERROR_RATIO = 0.25
# `check` fails if more of the time than this rests on datasheets and assumptions.
TOLERATED_UNMEASURED_RATIO = 0.1


@click.command()
@partial(workload_options, without=(*OF_LAYOUTS, "loader"))
@click.option(
    "--on", required=True, multiple=True, metavar="ALLOCATION", help="Such as 1x2:local; repeat."
)
@click.option("--repeats", type=Count(3), default=5, help="Fresh runs of each.")
@click.option("--steps", type=Count(), default=15, help="Steps timed in a run.")
@click.option("--warmup", type=Count(2), default=3, help="Steps before those.")
@click.option("--json", "as_json", is_flag=True, help="Print base units, unrounded.")
def validate(
    on: tuple[str, ...], repeats: int, steps: int, warmup: int, as_json: bool, **options: Any
) -> None:
    """Train MODEL for real on this machine and print predicted beside measured.

    Predictions are made first. Exit code 1: some measurement lies outside its prediction's
    interval and more than 25 % away.
    """
    from estimator.graph.files import is_saved_graph
    from estimator.graph.summary_files import is_summary_file
    from estimator.report.validation import validate as run_all

    request = Request(**options)
    if is_saved_graph(request.model) or is_summary_file(request.model):
        what = "summary" if is_summary_file(request.model) else "saved graph"
        raise ModelError(
            f"{request.model} is a {what}, which cannot be trained; name the model itself"
        )
    request.check_trainable_here(on)
    graph = traced(request, on)
    told_slowdowns(request, on)
    predictions = [request.estimate(graph, text) for text in on]
    train = request.trainer(graph, steps=steps, warmup_steps=warmup)
    with progress("training") as tell:
        total = repeats * len(predictions)

        def report(run: int, predicted: Estimate, step_s: float) -> None:
            tell(f"{predicted.allocation}", run / total)

        cases = run_all(predictions, train, repeats=repeats, report=report)
    if as_json:
        print_json([case.to_dict() for case in cases])
    else:
        from estimator.cli.render import validation_report

        print_tables(validation_report(cases))
    missed = [
        str(case.predicted.allocation)
        for case in cases
        if not case.is_within_interval and abs(case.error_ratio) > TOLERATED_ERROR_RATIO
    ]
    if missed:
        tolerated = format_ratio(TOLERATED_ERROR_RATIO)
        end_with_no(
            f"what was measured on {', '.join(missed)} is outside the interval of its prediction "
            f"and more than {tolerated} away"
        )


@click.command()
@workload_options
@on_option
@click.option("--json", "as_json", is_flag=True, help="Print base units, unrounded.")
def check(on: str, as_json: bool, **options: Any) -> None:
    """Say what an estimate of MODEL lacks: what is missing or only assumed, with its share.

    Exit code 1: more than 10 % of the time rests on datasheets and assumptions, the machine was too
    busy when it was probed or its probe was cut short, or the model does not fit.
    """
    request = Request(**options)
    graph = traced(request, (on,))
    request, _ = counting_told_drifts(request, graph, (on,))
    answer = request.estimate(graph, on)
    unmeasured_ratio = sum(
        share_ratio
        for _, source, share_ratio, _ in answer.provenance
        if source in ("assumed", "datasheet")
    )
    profiles = [kind.profile for kind in answer.plan.placement.kinds]
    disturbed = [p.name for p in profiles if p.interference and p.interference.matters]
    cut = [p.name for p in profiles if p.is_cut]
    tolerated = format_ratio(TOLERATED_UNMEASURED_RATIO)
    is_failed = {
        f"more than {tolerated} of the time rests on datasheets and assumptions": (
            unmeasured_ratio > TOLERATED_UNMEASURED_RATIO
        ),
        f"{', '.join(disturbed)} was disturbed when it was probed": bool(disturbed),
        f"the probe of {', '.join(cut)} was cut short": bool(cut),
        "the model does not fit": answer.fits == "no",
    }
    failed = [reason for reason, applies in is_failed.items() if applies]
    if as_json:
        machines = {"disturbed_machines": disturbed, "cut_machines": cut}
        more = {"unmeasured_ratio": unmeasured_ratio, **machines, "passed": not failed}
        print_json(answer.to_dict() | more)
    else:
        from estimator.cli.render import check_report

        print_tables(
            check_report(
                answer,
                unmeasured_ratio=unmeasured_ratio,
                disturbed_machines=disturbed,
                cut_machines=cut,
            )
        )
    if failed:
        end_with_no("; ".join(failed))
