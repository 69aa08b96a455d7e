"""The commands that say by which layout or order to train, and what to rent."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from estimator.cli.console import (
    end_with_no,
    json_option,
    print_answer,
    progress,
    remark,
    waiting,
)
from estimator.cli.option_types import Amount, Count, Duration
from estimator.cli.options import (
    OF_LAYOUTS,
    RESTART,
    OutFile,
    amount_options,
    on_option,
    picture_option,
    prices_option,
    refuse_given,
    traced,
    workload_options,
)
from estimator.cli.request import Request
from estimator.units import parse_knobs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from estimator.advise.rent.offers import Choice
    from estimator.advise.rent.transient import Spot
    from estimator.graph.ir.op_graph import OpGraph

# What is chosen here, or belongs to a step that is not.
_CHOSEN = (*OF_LAYOUTS, "accumulation", "loader", "strategy")
# Beside a model as it is, where its activation checkpoints are left open.
_CHECKPOINTS = ("full", "selective:op")
_REVOKED = ("checkpoint_time", "restart", "warning", "start_hour")
# As the function that answers takes them.
_PASSED = ("max_nodes", "mixed", "samples", "tokens", "deadline_s", "budget_usd", "prices")
_TAKEN = ("revoked_every", "revocations", "lifetime")
_RENT = (*_PASSED, "spot", "strategies", *_TAKEN, *_REVOKED)
_strategies_option = click.option("--strategies", help="To choose from, as in 'ddp zero2'.")


class DurationByMachine(Duration):
    """A time for all, or one for each machine: 8h, or t4-g4dn=8h,a100-p4d=20h."""

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> Any:
        """Its seconds, by machine where machines are named; fails for any other text."""
        if "=" not in str(value):
            return super().convert(value, param, context)
        try:
            times = parse_knobs(str(value))
        except ValueError as error:
            self.fail(str(error))
        convert = super().convert
        return {machine: convert(text, param, context) for machine, text in times.items()}


def rent_options(command: Any) -> Any:
    """Give a command what it takes to choose machines that are rented."""
    for option in (
        picture_option,
        click.option("--restart", type=Duration(), default="5min", help=RESTART.format("5min")),
        click.option("--checkpoint-time", type=Duration(), default="1min", help="To keep one."),
        click.option(
            "--warning",
            type=Duration(least_s=0.0),
            default="0s",
            help="Before a revocation: 30s, 2min. A checkpoint that fits is written then.",
        ),
        click.option(
            "--start-hour",
            type=Amount(least=0.0, most=24.0),
            default=0.0,
            help="Of the day, for --revocations; default 0.",
        ),
        click.option(
            "--lifetime", type=Duration(), help="An instance is stopped after it, as in 24h."
        ),
        click.option(
            "--revocations",
            metavar="RATES",
            help="An hour: 24 numbers with commas, or a .csv with hour,per_hour[,machine].",
        ),
        click.option(
            "--revoked-every",
            type=DurationByMachine(),
            help="How long a spot instance stays, on average, as in 8h or MACHINE=8h,OTHER=20h.",
        ),
        click.option("--spot", is_flag=True, help="At spot prices."),
        prices_option,
        click.option(
            "--budget", "budget_usd", type=Amount(least=0.0), help="Spend at most so many USD."
        ),
        click.option(
            "--deadline", "deadline_s", type=Duration(), help="Such as 12h or 14d, at most."
        ),
        amount_options,
        _strategies_option,
        click.option("--mixed", is_flag=True, help="Nodes of two machines together, too."),
        click.option("--max-nodes", type=Count(most=4096), default=4, help="Default 4."),
        click.option("--machines", required=True, help="To choose from: a100-p4d,t4-g4dn."),
    ):
        command = option(command)
    return command


@click.command(epilog="Example: estimator layouts gpt2.graph --on 1x8:h100-sxm --global-batch 64")
@partial(workload_options, without=(*_CHOSEN, "batch"))
@_strategies_option
@on_option
@json_option
def layouts(on: str, strategies: str | None, as_json: bool, **options: Any) -> None:
    """Rank the layouts by which MODEL trains fastest.

    Layouts (tensor parallel, pipeline, data parallel), strategies, activation checkpoints and
    micro-batches that share the samples of a --global-batch, by step time.
    """
    from estimator.advise.layouts.search import best_layouts
    from estimator.report.plans import layouts_sections
    from estimator.workload.strategies import SEARCHED_WITH_LAYOUTS

    request = Request(**options)
    if request.global_batch is None:
        raise click.UsageError("layouts share the samples of a step; give --global-batch")
    graphs = _checkpointed(request, [on])
    with progress("layouts") as report:
        layouts = best_layouts(
            graphs,
            on,
            global_batch=request.global_batch,
            strategies=tuple(strategies.split()) if strategies else SEARCHED_WITH_LAYOUTS,
            cluster=request.cluster,
            calibration=request.calibration,
            profile=request.machine(on),
            report=report,
        )
    about: dict[str, Any] = {
        "model": graphs[0].name,
        "allocation": on,
        "global_batch": request.global_batch,
    }
    print_answer(
        as_json, lambda: about | layouts.to_dict(), lambda: layouts_sections(layouts, **about)
    )


@click.command(epilog="Example: estimator order links.csv --devices 8 --hostfile hosts.txt")
@click.argument("matrix")
@click.option("--algorithm", default="ring", help="Or tree, halving-doubling; default ring.")
@click.option("--size", default="25MiB", help="What an all-reduce sums; default 25MiB.")
@click.option("--cluster", "cluster_file", metavar="FILE", help="Whose uplinks hops share.")
@click.option("--devices", type=Count(most=4096), default=1, help="Of each host; default 1.")
@click.option("--hostfile", type=OutFile(), help="To write for mpirun, srun.")
@click.option("--rankfile", type=OutFile(), help="To write for mpirun.")
@json_option
def order(
    matrix: str,
    algorithm: str,
    size: str,
    cluster_file: str | None,
    devices: int,
    hostfile: Path | None,
    rankfile: Path | None,
    as_json: bool,
) -> None:
    """Order hosts for the fastest all-reduce over unlike links.

    MATRIX is a CSV with from,to,bandwidth,latency (a,b,10GB/s,5us), one direction a line, or a
    machine that was probed with --pairs all.
    """
    from estimator.advise.rank_order import rank_order, read_pairs
    from estimator.files import write_text_atomically
    from estimator.machines.catalogue import load_profile
    from estimator.placement.topology import Cluster
    from estimator.report.plans import order_sections
    from estimator.units import parse_size_bytes

    pairs = read_pairs(matrix) if matrix.endswith(".csv") else load_profile(matrix).pairs
    if pairs is None:
        raise click.UsageError(f"'{matrix}' has no links between pairs; probe it with --pairs all")
    try:
        size_bytes = parse_size_bytes(size)
    except ValueError as error:
        raise click.UsageError(f"--size: {error}") from None
    cluster = Cluster.given(cluster_file)
    order = rank_order(pairs, size_bytes=size_bytes, cluster=cluster, algorithm=algorithm)
    slots = [(host, slot) for host in order.hosts for slot in range(devices)]
    ranks = (f"rank {rank}={host} slot={slot}\n" for rank, (host, slot) in enumerate(slots))
    for path, lines in (
        (hostfile, (f"{host} slots={devices}\n" for host in order.hosts)),
        (rankfile, ranks),
    ):
        if path is not None:
            write_text_atomically(path, "".join(lines))
    print_answer(as_json, lambda: asdict(order), lambda: order_sections(order, size))


@click.command(
    epilog="Example: estimator rent gpt2.graph --machines a100-p4d,t4-g4dn --samples 1e7"
)
@partial(workload_options, without=(*OF_LAYOUTS, "accumulation", "strategy", "cluster", "network"))
@rent_options
@json_option
@click.pass_context
def rent(
    context: click.Context,
    /,
    machines: str,
    picture: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Say what to rent to train MODEL, from cheapest to fastest.

    With --global-batch ranks share it, by the best layout; else each takes --batch samples, by
    default as many as train fastest, and the global batch grows with the ranks. Instances are paid
    whole, by the second or hour as they are sold. --revoked-every adds what revocations,
    checkpoints and restarts cost.

    Exit code 1: nothing fits, or nothing keeps the deadline and the budget.
    """
    from estimator.report.plans import rent_sections

    rented = {name: options.pop(name) for name in _RENT}
    if options["global_batch"] is not None:
        refuse_given(context, ("batch",), "is what ranks take where no --global-batch is given")
    if all(rented[name] is None for name in _TAKEN):
        refuse_given(
            context,
            _REVOKED,
            "is of machines that are revoked, as --revoked-every, --revocations or --lifetime says",
        )
    names = [name.strip() for name in machines.split(",") if name.strip()]
    if not names:
        raise click.UsageError("--machines names none; write such as a100-p4d,t4-g4dn")
    model, choice = _chosen(Request(**options), names, rented)
    if picture is not None and not choice.offers:
        remark(f"{picture} is not drawn: there is no offer to draw")
    elif picture is not None:
        from estimator.report.pictures import draw_offers

        with waiting("drawing"):
            draw_offers(choice, picture)
    print_answer(
        as_json,
        lambda: {"model": model, "spot": rented["spot"]} | choice.to_dict(),
        lambda: rent_sections(choice, model, spot=rented["spot"]),
    )
    if choice.cheapest is None:
        end_with_no(
            "nothing keeps the deadline and the budget"
            if choice.offers
            else "the model fits on none of these machines"
        )


def _checkpointed(request: Request, allocations: Sequence[str]) -> list[OpGraph]:
    """The model as it is, and with activation checkpoints where that is left open."""
    from estimator.errors import ModelError
    from estimator.graph.files import is_saved_graph, is_summary_file

    request = replace(request, global_batch=None)
    graphs = [traced(request, allocations)]
    if request.checkpoint or is_saved_graph(request.model) or is_summary_file(request.model):
        return graphs
    for checkpoint in _CHECKPOINTS:
        # A model without repeated blocks has none.
        with suppress(ModelError):
            graphs.append(traced(replace(request, checkpoint=checkpoint), allocations))
    return graphs


def _chosen(
    request: Request, machines: Sequence[str], rent: Mapping[str, Any]
) -> tuple[str, Choice]:
    """The model's name, and what to rent for it."""
    from estimator.advise.rent.offers import rent as what_to_rent
    from estimator.workload.strategies import SEARCHED

    spot = _spot(machines, rent)
    for machine in machines:
        # Before a model is traced, which can take long.
        rent["prices"].price(machine, spot=rent["spot"])
    named = [f"1x1:{machine}" for machine in machines]
    shares = request.global_batch is not None
    graphs = _checkpointed(request, named) if shares else [traced(request, named)]
    if spot is True:
        remark("revocations are left out; --revoked-every adds what they cost")
    with progress("allocations") as report:
        choice = what_to_rent(
            graphs[0],
            machines,
            **{name: rent[name] for name in _PASSED},
            spot=spot,
            strategies=tuple(rent["strategies"].split()) if rent["strategies"] else SEARCHED,
            batch_per_gpu=request.batch,
            global_batch=request.global_batch,
            loader=request.loader,
            calibration=request.calibration,
            layouts_of=graphs if shares else (),
            report=report,
        )
    if not shares and request.batch is None:
        remark("batches are those that train fastest; --global-batch keeps that of a step")
    return graphs[0].name, choice


def _spot(machines: Sequence[str], rent: Mapping[str, Any]) -> bool | Spot:
    """Whether spot instances are rented, and how they are taken away where that is said."""
    from estimator.advise.rent.revocations import Revocations, read_revocations
    from estimator.advise.rent.transient import Spot

    given = [f"--{name.replace('_', '-')}" for name in _TAKEN if rent[name] is not None]
    if not given:
        return bool(rent["spot"])
    if not rent["spot"]:
        raise click.UsageError(f"{given[0]} is of spot instances; give --spot")
    every_s, rates, lifetime_s = (rent[name] for name in _TAKEN)
    if every_s is not None and rates is not None:
        raise click.UsageError("--revoked-every and --revocations say the same; give one of them")
    stays: dict[str, Any] = {"lifetime_s": lifetime_s or math.inf}
    if rates is not None:
        taken = read_revocations(rates, **stays)
    elif isinstance(every_s, dict):
        taken = {
            name: Revocations(per_hour=(3600 / one_s,), **stays) for name, one_s in every_s.items()
        }
    else:
        taken = Revocations(per_hour=(3600 / every_s if every_s else 0.0,), **stays)
    spot = Spot(
        revocations=taken,
        checkpoint_s=rent["checkpoint_time"],
        restart_s=rent["restart"],
        warning_s=rent["warning"],
        start_hour=rent["start_hour"],
    )
    spot.check_named(machines)
    return spot
