"""The command that says what a step waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from estimator.cli.console import print_json, print_tables
from estimator.cli.options import on_option, traced, training_options
from estimator.cli.request import Request

if TYPE_CHECKING:
    from estimator.estimates import Estimate
    from estimator.placement.allocation import Allocation


@click.command()
@training_options
@on_option
@click.option(
    "--against",
    metavar="ALLOCATION",
    help="Measure the network stall against these devices rather than one node of --on.",
)
@click.option("--json", "as_json", is_flag=True, help="Print base units, unrounded.")
@click.argument("model")
def stalls(on: str, against: str | None, as_json: bool, **options: Any) -> None:
    """Predict what a step of MODEL waits for the other devices of a node and for other nodes.

    Every device has the same batch. The interconnect stall is what a node's devices take beyond one
    device, as a share of the node's step; the network stall what all nodes take beyond one.
    """
    from estimator.cli.render_stalls import predicted_report
    from estimator.stalls.predicted import predict_stalls

    request = Request(**options)
    graph = traced(request, (on,) if against is None else (on, against))

    def answer_of(allocation: Allocation, batches: Sequence[int] | None) -> Estimate:
        # A device alone synchronises nothing, and cannot be divided as some strategies ask.
        alone = replace(request, strategy="ddp") if allocation.ranks == 1 else request
        return alone.estimate(graph, str(allocation), batches)

    found = predict_stalls(on, answer_of, against=against)
    if as_json:
        print_json(found.to_dict())
    else:
        print_tables(predicted_report(found))
