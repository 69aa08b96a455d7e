"""Judge calibration on tables of measured steps.

python benchmarks/calibration_accuracy.py --data TABLE.csv [--protocol P] [--k 3,5,10] [--json]
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from calibration.evaluation import evaluate, processes
from calibration.protocols import PROTOCOLS, PROTOCOLS_WITH_K
from calibration.scores import evaluation_report, scores_of, to_dict
from calibration.tables import is_worker_table, read_steps, read_workers

from estimator.cli.console import progress, remark
from estimator.cli.option_types import Count
from estimator.errors import EstimatorError


def _counts(
    context: click.Context, option: click.Parameter, text: str | None
) -> tuple[int, ...] | None:
    if text is None:
        return None
    count = Count(0, 10**9)
    return tuple(dict.fromkeys(count.convert(part, option, context) for part in text.split(",")))


@click.command()
@click.option(
    "--data",
    "paths",
    required=True,
    multiple=True,
    metavar="FILE.csv",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A table of measured steps; repeat.",
)
@click.option("--protocol", type=click.Choice(tuple(PROTOCOLS)), help="Default k-shot, or workers.")
@click.option("--k", "ks", callback=_counts, metavar="N,N...", help="Numbers of observations.")
@click.option("--json", "as_json", is_flag=True, help="Print every prediction, in base units.")
def main(
    paths: tuple[Path, ...], protocol: str | None, ks: tuple[int, ...] | None, as_json: bool
) -> None:
    """Learn from some rows of a table of measured steps and predict the others, beside linear
    scaling and the models of Optimus, Pollux and ONES on the same draws.

    Columns: model, gpu, gpus, nodes, placement (devices used per node, as in 1+3), local_batch,
    grad_accum, step_time_s; others may be present, most may be missing. Rows that cannot be used
    are counted on stderr with the reason.

    \b
    k-shot    k rows, one of them on a single device
    online    all single-device rows and k others
    few-shot  single-device rows and six others
    cv        five folds
    pairs     which of two placements is faster, after few-shot
    workers   asynchronous parameter servers (workers, parameter_servers, steps_per_s)
    """
    try:
        if protocol is None:
            protocol = "workers" if is_worker_table(paths[0]) else "k-shot"
        if ks is not None and protocol not in PROTOCOLS_WITH_K:
            raise click.UsageError(f"--k goes with {' and '.join(PROTOCOLS_WITH_K)}; leave it out")
        table = read_workers(paths) if protocol == "workers" else read_steps(paths)
        _tell_rows("left out", table.refused)
        _tell_rows("completed", table.assumed)
        with processes() as executor, progress("evaluating") as report:
            evaluation = evaluate(table.jobs, protocol, ks=ks, executor=executor, report=report)
    except EstimatorError as error:
        raise click.ClickException(str(error)) from None
    if evaluation.skipped:
        few = f"{len(evaluation.skipped)} jobs, such as {evaluation.skipped[0]}"
        remark(f"too few rows for {protocol}: {few}")
    if not as_json:
        click.echo("\n".join(evaluation_report(evaluation)))
        return
    at = datetime.now(UTC).isoformat(timespec="seconds")
    about = {
        "machine": ", ".join(dict.fromkeys(job.gpu for job in evaluation.jobs)),
        "at": at,
        "protocol": protocol,
        "data": [path.name for path in paths],
        "refused": dict(table.refused),
        "skipped": list(evaluation.skipped),
        **to_dict(evaluation, scores_of(evaluation)),
    }
    _print_json(about, evaluation.cases(at))


def _print_json(about: Mapping[str, Any], cases: Iterable[Any]) -> None:
    """One JSON object whose last field is a list too long to be held as text."""
    head = json.dumps({**about, "cases": []}, allow_nan=False)
    click.echo(head.removesuffix("]}"), nl=False)
    for index, case in enumerate(cases):
        click.echo((",\n" if index else "\n") + json.dumps(case, allow_nan=False), nl=False)
    click.echo("\n]}")


def _tell_rows(what: str, counts: Mapping[str, int]) -> None:
    for reason, count in counts.items():
        remark(f"{count} row{'s' if count > 1 else ''} {what}: {reason}")


if __name__ == "__main__":
    main()
