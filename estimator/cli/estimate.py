"""Predict a step time on one allocation or on many, and say how far that can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from estimator.cli.console import (
    end_with_no,
    print_json,
    print_sections,
    print_text,
    progress,
    remark,
    waiting,
)
from estimator.cli.options import (
    OF_LAYOUTS,
    OF_STEPS,
    Batches,
    check_amounts,
    counting_told_drifts,
    on_option,
    refuse_given,
    told_slowdowns,
    traced,
    workload_options,
)
from estimator.cli.request import Request
from estimator.errors import ModelError
from estimator.probe.option_types import Amount, Count
from estimator.units import format_ratio

if TYPE_CHECKING:
    from estimator.advise.memory import ModuleCost, Remedy
    from estimator.advise.scaling import SweepRow
    from estimator.estimates.estimate import Estimate
    from estimator.graph.ir.op_graph import OpGraph
    from estimator.machines.profile import DeviceKind
    from estimator.report.sections import Section


@click.command(epilog="Example: estimator estimate gpt2.graph --on 2x8:h100-sxm")
@workload_options
@on_option
@click.option("--samples", type=Amount(), help="Also say how long these take.")
@click.option("--tokens", type=Amount(), help="Also say how long these take.")
@click.option("--json", "as_json", is_flag=True, help="Print base units, unrounded.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a Perfetto timeline here.")
@click.option(
    "--verbose",
    is_flag=True,
    help="Also the smallest parts, what is known by what, and what is only assumed.",
)
@click.option("--by-module", is_flag=True, help="Also time, FLOPs and memory of each module.")
def estimate(
    on: str,
    samples: float | None,
    tokens: float | None,
    as_json: bool,
    trace: Path | None,
    verbose: bool,
    by_module: bool,
    **options: Any,
) -> None:
    """Predict the step time of MODEL on an allocation, and say why.

    Exit code 1: it does not fit into the devices' memory.
    """
    from estimator.advise.scaling import scaling_of
    from estimator.report.facts import checked_of
    from estimator.report.sections import Section, estimate_sections

    _check(samples, tokens, trace)
    request = Request(**options)
    graph = traced(request, (on,))
    slowdowns = told_slowdowns(request, (on,))
    request, drifts = counting_told_drifts(request, graph, (on,))
    balance = request.balance(graph, on)
    answer = balance.answer
    has_amount = samples is not None or tokens is not None
    duration_s = answer.duration_s(samples=samples, tokens=tokens) if has_amount else None
    if trace is not None:
        _write_trace(answer, trace)
    with waiting("estimating"):
        scaling = scaling_of(answer)
    remedies = _remedies(answer) if answer.fits == "no" and answer.layout is None else []
    modules = _modules(answer) if by_module else []
    if as_json:
        more = {
            "duration_s": duration_s,
            "scaling": asdict(scaling) if scaling else None,
            "balance_gain_ratio": balance.gain_ratio if balance.is_uneven else None,
            "remedies": [remedy.to_dict() for remedy in remedies],
            "modules": [asdict(row) for row in modules] or None,
            "drifts": drifts,
            "slowdown_ratios": slowdowns,
            "checked": asdict(checked_of(answer)),
        }
        print_json(answer.to_dict() | more)
    else:
        sections = estimate_sections(
            answer,
            duration_s=duration_s,
            scaling=scaling,
            balance=balance if balance.is_uneven else None,
            remedies=remedies,
            modules=modules,
            verbose=verbose,
        )
        hint = [] if verbose else ["--verbose says what each number is known by"]
        print_sections([*sections, Section(sentences=hint)])
    if answer.fits == "no":
        end_with_no(f"{answer.model} does not fit on {answer.allocation}")


def _check(samples: float | None, tokens: float | None, trace: Path | None) -> None:
    """Refuse what cannot be answered before anything is traced."""
    check_amounts(samples, tokens)
    if trace is not None:
        from estimator.files import check_writable

        check_writable(trace)


@waiting("looking for what would make it fit")
def _remedies(answer: Estimate) -> list[Remedy]:
    from estimator.advise.memory import quick_remedies

    return quick_remedies(answer)


@waiting("estimating modules")
def _modules(answer: Estimate) -> list[ModuleCost]:
    from estimator.advise.memory import costs_by_module

    return costs_by_module(answer)


def _sweep_options(command: Any) -> Any:
    batch = click.option(
        "--batch", "batches", type=Batches(), help="Per device: one, or such as 1..64 or 8,12,16."
    )
    return workload_options(command, batch=batch)


@click.command(epilog="Example: estimator trace hf:gpt2 -o gpt2.graph --precision bf16-amp")
@click.option(
    "-o",
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="The file, such as gpt2.graph.",
)
@click.option(
    "--target",
    type=click.Choice(["cuda", "cpu"]),
    help="The kind of devices it is for; default cuda.",
    default="cuda",
)
@partial(workload_options, without=(*OF_STEPS, "cluster", "network"))
def trace(out: Path, target: DeviceKind, **options: Any) -> None:
    """Trace MODEL once and save its graph, which stands for MODEL in every other command.

    A saved graph needs neither torch nor the model's own code, and holds for every batch and
    optimizer, compiled or not.
    """
    from estimator.files import check_writable

    request = Request(**options)
    check_writable(out)
    graph = traced(request, (), target=target)
    graph.save(out)
    remark(
        f"{out}: {graph.name}, {graph.mode}, for {graph.target} devices, {len(graph.ops)} "
        f"operators; ask 'estimator estimate {out} --on …'"
    )


@click.command(epilog="Example: estimator sweep gpt2.graph --on 1..4x1,8:h100-sxm")
@_sweep_options
@click.option(
    "--on",
    "patterns",
    required=True,
    multiple=True,
    metavar="PATTERN",
    help="Such as 1..8x1..8:local; repeat.",
)
@click.option("--json", "as_json", is_flag=True, help="Print base units, unrounded.")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated base units.")
@click.option("--picture", type=click.Path(path_type=Path), help="Draw it, as .png or .svg.")
@click.option("--strategies", help="Compare these instead, as in 'ddp zero1 ps:2,async'.")
@click.pass_context
def sweep(
    context: click.Context,
    /,
    patterns: tuple[str, ...],
    batches: tuple[int, ...] | None,
    as_json: bool,
    as_csv: bool,
    picture: Path | None,
    strategies: str | None,
    **options: Any,
) -> None:
    """Predict MODEL on every allocation of a PATTERN and print how it scales.

    Ranges such as 1..8 or lists such as 1,2,4 stand where an allocation has a number of nodes or
    devices. "Of linear" is throughput per rank over that of the smallest allocation, with the same
    share of the update. With --strategies every allocation lists them by step time, the fastest
    first; with several batches it lists these, doubled from the first to the last of a range, and
    marks the largest that fits.
    """
    from estimator.advise.scaling import sweep_csv
    from estimator.report.sections import batches_sections, strategies_sections, sweep_sections

    if as_json and as_csv:
        raise click.UsageError("give --json or --csv, not both")
    if strategies is not None:
        refuse_given(context, ("strategy",), "is one of those that --strategies lists")
    several = batches if batches and len(batches) > 1 else None
    request = Request(**options, batch=batches[0] if batches else None)
    if several and (strategies is not None or picture is not None):
        raise click.UsageError("several batches go with neither --strategies nor --picture")
    rows: Sequence[SweepRow]
    describe: Callable[[Sequence[SweepRow]], Sequence[Section]]
    if several:
        rows, describe = _by_batch(request, patterns, several), batches_sections
    elif strategies is not None:
        if picture is not None:
            raise click.UsageError("--picture draws one strategy; leave out --strategies")
        rows, describe = _by_strategy(request, patterns, strategies.split()), strategies_sections
    else:
        rows, describe = _by_allocation(request, patterns, picture), sweep_sections
    if as_json:
        print_json([row.to_dict() for row in rows])
    elif as_csv:
        print_text(sweep_csv(rows))
    else:
        print_sections(describe(rows))


def _swept(
    request: Request, patterns: Sequence[str], traced_as: Request
) -> tuple[list[str], OpGraph, Request]:
    """The allocations of patterns, the graph for the first, and the request with drifts counted."""
    from estimator.advise.scaling import existing

    allocations = existing(patterns, replace(request, global_batch=traced_as.global_batch).exists)
    graph = traced(traced_as, allocations[:1])
    return allocations, graph, counting_told_drifts(request, graph, allocations)[0]


def _by_allocation(
    request: Request, patterns: Sequence[str], picture: Path | None
) -> list[SweepRow]:
    from estimator.advise.scaling import sweep as run_all

    if picture is not None:
        from estimator.files import check_writable

        check_writable(picture)
    _, graph, counting = _swept(request, patterns, request)
    with waiting("estimating"):
        rows = run_all(patterns, lambda text: counting.estimate(graph, text))
    if picture is not None:
        from estimator.report.pictures import draw_scaling

        with waiting("drawing"):
            draw_scaling(rows, picture)
    return rows


def _by_batch(
    request: Request, patterns: Sequence[str], batches: Sequence[int]
) -> Sequence[SweepRow]:
    from estimator.advise.scaling import sweep_batches

    # Operators treat a dimension of 1 unlike others: of one sample no other batch can be told.
    traced_as = replace(request, batch=max(batches[0], 2), global_batch=None)
    allocations, graph, counting = _swept(request, patterns, traced_as)

    def answer_of(text: str, batch: int) -> Estimate:
        return replace(counting, batch=batch).estimate(graph, text)

    with waiting("estimating"):
        return sweep_batches(allocations, batches, answer_of)


def _by_strategy(
    request: Request, patterns: Sequence[str], strategies: Sequence[str]
) -> list[SweepRow]:
    from estimator.workload import Strategy

    wanted = [Strategy.parse(text) for text in strategies]
    allocations, graph, counting = _swept(request, patterns, request)
    return [row for text in allocations for row in counting.ranked(graph, text, wanted)]


@waiting("writing the timeline")
def _write_trace(answer: Estimate, path: Path) -> None:
    from estimator.integrations.viewers import write_trace

    write_trace(answer.timeline, path)


# A measurement this close counts as predicted even outside the interval.
TOLERATED_ERROR_RATIO = 0.25


@click.command(epilog="Example: estimator validate train.py:model --on 1x2:local")
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
    from estimator.graph.files import is_saved_graph, is_summary_file
    from estimator.report.sections import validation_sections
    from estimator.validate.training import validate as run_all

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
        print_sections(validation_sections(cases))
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
