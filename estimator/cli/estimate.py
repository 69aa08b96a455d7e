"""Predict a step time on one allocation or on many, how far that can be trusted, what takes memory
and what a step waits for; trace a model, and train it for real to compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from estimator.cli.console import (
    end_with_no,
    json_option,
    print_answer,
    print_json,
    print_sections,
    print_text,
    progress,
    remark,
    waiting,
)
from estimator.cli.option_types import Count, Duration
from estimator.cli.options import (
    OF_LAYOUTS,
    OF_STEPS,
    OutFile,
    amount_options,
    check_amounts,
    counting_told_drifts,
    duration_of,
    on_option,
    picture_option,
    refuse_given,
    several_batches_option,
    told_slowdowns,
    traced,
    workload_options,
)
from estimator.cli.request import Request
from estimator.errors import ModelError
from estimator.units import format_ratio

if TYPE_CHECKING:
    from estimator.advise.memory import ModuleCost, Remedy
    from estimator.advise.scaling import SweepRow
    from estimator.advise.swap.search import Planned
    from estimator.estimates.estimate import Estimate
    from estimator.graph.ir.op_graph import OpGraph
    from estimator.machines.profile import DeviceKind


@click.command(epilog="Example: estimator estimate gpt2.graph --on 2x8:h100-sxm")
@workload_options
@on_option
@click.option(
    "--neighbour",
    "neighbours",
    multiple=True,
    metavar="ALLOCATION=RATE",
    help="Another job on links in common, and what each of its nodes sends; repeat.",
)
@amount_options
@json_option
@click.option("--trace", type=OutFile(), help="Write a Perfetto timeline here.")
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

    MODEL is file.py:function or package.module:function, returning (model, batch[, loss]), a saved
    graph, a job.json, hf:TYPE[:TASK][,key=value...] or hf:PATH/config.json; ALLOCATION is
    NODESxDEVICES:MACHINE, joined by +. Exit code 1: it does not fit into the devices' memory.
    """
    from estimator.advise.scaling import scaling_of
    from estimator.report.facts import checked_of
    from estimator.report.sections import Section, estimate_sections

    check_amounts(samples, tokens)
    request = Request(**options)
    graph = traced(request, (on,))
    slowdowns = told_slowdowns(request, (on,))
    request, drifts = counting_told_drifts(request, (on,))
    balance = request.balance(graph, on)
    answer, uneven = balance.answer, balance if balance.is_uneven else None
    duration_s = duration_of(answer, samples, tokens)
    if trace is not None:
        _write_trace(answer, trace)
    with waiting("estimating"):
        scaling = scaling_of(answer)
    modules = _modules(answer) if by_module else []
    remedies = _remedies(answer) if answer.fits == "no" and answer.layout is None else []
    if as_json:
        more = {
            "duration_s": duration_s,
            "scaling": asdict(scaling) if scaling else None,
            "balance_gain_ratio": uneven and uneven.gain_ratio,
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
            balance=uneven,
            remedies=remedies,
            modules=modules,
            verbose=verbose,
        )
        hint = [] if verbose else ["--verbose says what each number is known by"]
        print_sections([*sections, Section(sentences=hint)])
    if answer.fits == "no":
        end_with_no(f"{answer.model} does not fit on {answer.allocation}")


@waiting("looking for what would make it fit")
def _remedies(answer: Estimate) -> list[Remedy]:
    from estimator.advise.memory import quick_remedies

    return quick_remedies(answer)


@waiting("estimating modules")
def _modules(answer: Estimate) -> list[ModuleCost]:
    from estimator.advise.memory import costs_by_module

    return costs_by_module(answer)


@waiting("writing the timeline")
def _write_trace(answer: Estimate, path: Path) -> None:
    from estimator.integrations.viewers import write_trace

    write_trace(answer.timeline, path)


@click.command(epilog="Example: estimator trace hf:gpt2 -o gpt2.graph --precision bf16-amp")
@click.option(
    "-o",
    "--out",
    required=True,
    type=OutFile(),
    help="The file, such as gpt2.graph.",
)
@click.option(
    "--target",
    type=click.Choice(["cuda", "cpu"]),
    help="The kind of devices it is for; default cuda.",
    default="cuda",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="Of a model that calls collectives itself: among how many.",
)
@partial(workload_options, without=(*OF_STEPS, "cluster", "network"))
def trace(out: Path, target: DeviceKind, ranks: int | None, **options: Any) -> None:
    """Trace MODEL once and save its graph, to be asked about instead.

    A saved graph stands for MODEL in every other command, needs neither torch nor the model's own
    code, and holds for every batch and optimizer, compiled or not.
    """
    request = Request(**options)
    graph = traced(request, (), target=target, ranks=ranks)
    graph.save(out)
    remark(
        f"{out}: {graph.name}, {graph.mode}, for {graph.target} devices, {len(graph.ops)} "
        f"operators; ask 'estimator estimate {out} --on …'"
    )


@click.command(epilog="Example: estimator sweep gpt2.graph --on 1..4x1,8:h100-sxm")
@partial(workload_options, batch=several_batches_option)
@click.option(
    "--on",
    "patterns",
    required=True,
    multiple=True,
    metavar="PATTERN",
    help="Such as 1..8x1..8:local; repeat.",
)
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated base units.")
@picture_option
@click.option("--strategies", help="To choose from, as in 'ddp zero1 ps:2,async', or 'places'.")
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
    """Predict MODEL on every allocation of a PATTERN.

    Ranges such as 1..8 or lists such as 1,2,4 stand where an allocation has a number of nodes or
    devices. "Of linear" is throughput per rank over that of the smallest allocation, with the same
    share of the update. With --strategies every allocation lists them by step time, the fastest
    first; 'places' are one for each place where gradients are merged and parameters updated:
    device, host, server. With several batches it lists these, doubled from the first to the last of
    a range, and marks the largest that fits.
    """
    from estimator.advise.scaling import sweep_csv
    from estimator.report.sections import sweep_sections

    if as_json and as_csv:
        raise click.UsageError("give --json or --csv, not both")
    if strategies is not None:
        refuse_given(context, ("strategy",), "is one of those that --strategies lists")
    several = batches if batches and len(batches) > 1 else None
    request = Request(**options, batch=batches[0] if batches else None)
    if several and (strategies is not None or picture is not None):
        raise click.UsageError("several batches go with neither --strategies nor --picture")
    if several:
        rows = _by_batch(request, patterns, several)
    elif strategies is not None:
        if picture is not None:
            raise click.UsageError("--picture draws one strategy; leave out --strategies")
        rows = _by_strategy(request, patterns, strategies.split())
    else:
        rows = _by_allocation(request, patterns, picture)
    if as_json:
        print_json([row.to_dict() for row in rows])
    elif as_csv:
        print_text(sweep_csv(rows))
    else:
        print_sections(sweep_sections(rows))


def _swept(
    request: Request, patterns: Sequence[str], traced_as: Request
) -> tuple[list[str], OpGraph, Request]:
    """The allocations of patterns, the graph for the first, and the request with drifts counted."""
    from estimator.advise.scaling import existing

    allocations = existing(patterns, replace(request, global_batch=traced_as.global_batch).exists)
    graph = traced(traced_as, allocations[:1])
    return allocations, graph, counting_told_drifts(request, allocations)[0]


def _by_allocation(
    request: Request, patterns: Sequence[str], picture: Path | None
) -> list[SweepRow]:
    from estimator.advise.scaling import sweep as run_all

    _, graph, counting = _swept(request, patterns, request)
    with waiting("estimating"):
        rows = run_all(patterns, lambda text: counting.estimate(graph, text))
    if picture is not None:
        from estimator.report.pictures import save_figure, scaling_figure

        with waiting("drawing"):
            save_figure(scaling_figure(rows), picture)
    return rows


def _by_batch(request: Request, patterns: Sequence[str], batches: Sequence[int]) -> list[SweepRow]:
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
    from estimator.advise.scaling import PLACES
    from estimator.workload.strategies import Strategy

    wanted = [text if text == PLACES else Strategy.parse(text) for text in strategies]
    allocations, graph, counting = _swept(request, patterns, request)
    return [row for text in allocations for row in counting.ranked(graph, text, wanted)]


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
@json_option
def validate(
    on: tuple[str, ...], repeats: int, steps: int, warmup: int, as_json: bool, **options: Any
) -> None:
    """Train MODEL for real here, and print predicted beside measured.

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
    print_answer(
        as_json, lambda: [case.to_dict() for case in cases], lambda: validation_sections(cases)
    )
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


@click.command(epilog="Example: estimator memory gpt2.graph --on 1x8:h100-sxm")
@partial(workload_options, without=("loader",))
@on_option
@picture_option
@click.option(
    "--snapshot",
    type=OutFile(),
    help="Write what the viewer of torch.cuda.memory._snapshot opens, as .pickle.",
)
@click.option(
    "--plans", "with_plans", is_flag=True, help="Trade its peak for time: swap, compute again."
)
@click.option(
    "--beside",
    multiple=True,
    metavar="MODEL",
    help="Trains on the same device at once, alike or as 'trace' saved it; repeat.",
)
@json_option
@click.pass_context
def memory(
    context: click.Context,
    /,
    on: str,
    beside: tuple[str, ...],
    picture: Path | None,
    snapshot: Path | None,
    with_plans: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Say what MODEL holds in memory, and what would make it fit.

    By kind and module over a step, and what is alive at the peak.
    With --plans, how low the peak of one device gets, and at what slow-down, where tensors are
    swapped to the host or computed again, and parameters updated as soon as their gradients are
    ready, with what a script has to do for it. The picture shows that curve too.

    With --beside, of several jobs on one device: their steps, which share it as their speeds are,
    what they hold together, and plans of swapping and recomputing with which all fit.

    Exit code 1: it does not fit into the devices' memory.
    """
    from estimator.advise.memory import memory_of, remedies
    from estimator.report.sections import memory_sections, plans_section, remedies_section

    request = Request(**options)
    if beside:
        refuse_given(context, ("picture", "snapshot", "with_plans"), "is of one job")
        _show_shared([request, *_others(request, beside)], on, as_json=as_json)
        return
    graph = traced(request, (on,))
    report = memory_of(request.estimate(graph, on))
    plans = _plans(report.answer) if with_plans else []
    if picture is not None:
        from estimator.report.pictures import memory_figure, save_figure

        with waiting("drawing"):
            save_figure(memory_figure(report, plans), picture)
    if snapshot is not None:
        from estimator.integrations.viewers import write_snapshot

        write_snapshot(report, snapshot)
    suggested = []
    if report.answer.fits == "no":
        with waiting("looking for what would make it fit"):
            suggested = remedies(report.answer)
    more = {
        "remedies": [remedy.to_dict() for remedy in suggested],
        "plans": [planned.to_dict() for planned in plans],
    }
    curve = plans_section(report.answer, plans)
    print_answer(
        as_json,
        lambda: report.to_dict() | more,
        lambda: [*memory_sections(report), remedies_section(suggested), curve],
    )
    if report.answer.fits == "no":
        end_with_no(f"{report.answer.model} does not fit on {report.answer.allocation}")


def _others(request: Request, models: Sequence[str]) -> Iterator[Request]:
    """Other models trained alike; graphs that were saved know how they are trained."""
    from estimator.graph.files import is_saved_graph, is_summary_file

    for model in models:
        if is_saved_graph(model) or is_summary_file(model):
            yield Request(model=model, cluster=request.cluster, calibration=request.calibration)
        else:
            yield replace(request, model=model, batch=None)


def _show_shared(requests: Sequence[Request], on: str, *, as_json: bool) -> None:
    """Several jobs on one device: print, or end with no."""
    from estimator.advise.shared_device import share_device
    from estimator.report.sections import shared_device_sections

    answers = [request.estimate(traced(request, (on,)), on) for request in requests]
    with progress("planning") as report:
        shared = share_device(answers, report=lambda done: report("jobs", done))
    print_answer(as_json, shared.to_dict, lambda: shared_device_sections(shared))
    if shared.fits == "no":
        end_with_no(f"{len(shared.jobs)} jobs do not fit on {on} together")


def _plans(answer: Estimate) -> list[Planned]:
    from estimator.advise.swap.problem import swap_problems
    from estimator.advise.swap.search import pareto

    problems = swap_problems(answer)
    with progress("planning") as report:
        return pareto(*problems, report=lambda done: report("budgets", done))


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
    """Say what a step waits for: data, other devices, other nodes.

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
@json_option
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
    print_answer(
        as_json,
        lambda: predicted.to_dict() | {"input": data.to_dict() if data else None},
        lambda: predicted_sections(predicted, data),
    )


@stalls.command(epilog="Example: estimator stalls run train.py --on 1x2:local -- --epochs 1")
@click.argument("script", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@on_option
@click.option("--steps", type=Count(2), default=30, help="Steps timed in a run.")
@click.option("--warmup", type=Count(), default=5, help="Steps before those.")
@click.option("--repeats", type=Count(), default=3, help="Fresh runs of each.")
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
@json_option
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
    from estimator.report.plans import measured_sections
    from estimator.waits.measured import measure_stalls
    from estimator.waits.runs import Script, cores_of

    timed_script = Script(
        path=script,
        arguments=arguments,
        cores=cores_of(on),
        steps=warmup + steps,
        warmup=warmup,
        timeout_s=timeout,
        node_commands=nodes,
        address=address,
    )
    with progress("running") as report:
        measured = measure_stalls(timed_script, repeats=repeats, data=data, report=report)
    print_answer(as_json, measured.to_dict, lambda: measured_sections(measured))
