"""Show stalls to people."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from estimator.cli.render import grid, stacked
from estimator.stalls.predicted import PredictedStalls, Stall
from estimator.units import format_ratio, format_seconds


def predicted_report(found: PredictedStalls) -> Group:
    """The steps of one device, one node and all nodes: what each takes beyond the one before."""
    batch = "" if found.batch_per_gpu is None else f", batch {found.batch_per_gpu} per device"
    table = grid(
        f"{found.model} on {found.allocation}{batch}: predicted stalls",
        "devices",
        "stall",
        "step",
        "waits",
        "between",
        "of a node's step",
        numbers=4,
    )
    table.add_row(found.one_device, "", format_seconds(found.device_s), "", "", "")
    if found.interconnect is not None:
        table.add_row(
            found.one_node,
            "interconnect",
            format_seconds(found.node_s),
            *_cells(found.interconnect),
        )
    if found.network is not None:
        table.add_row(
            found.allocation, "network", format_seconds(found.step_s), *_cells(found.network)
        )
    return stacked(table, Text(_in_words(found)))


def _cells(stall: Stall) -> tuple[str, str, str]:
    between = f"{format_seconds(max(stall.low_s, 0.0))} to {format_seconds(stall.high_s)}"
    return format_seconds(stall.stall_s), between, format_ratio(stall.ratio)


def _in_words(found: PredictedStalls) -> str:
    if found.interconnect is None and found.network is None:
        return "One device waits for no other."
    said = []
    if found.interconnect is not None:
        slower = format_ratio(found.interconnect.ratio)
        said.append(f"{slower} of a node's step is waiting for its devices")
    if found.network is not None:
        said.append(f"the network makes the step {found.step_s / found.node_s:.3g} times as long")
    return "; ".join(said) + "."
