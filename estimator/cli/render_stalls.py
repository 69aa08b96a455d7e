"""Show stalls to people."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from estimator.cli.render import grid, listed, stacked
from estimator.stalls.measured import STALLS, MeasuredStalls, RunName
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
    between = f"{format_seconds(stall.low_s)} to {format_seconds(stall.high_s)}"
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


_RUNS: dict[RunName, str] = {
    "T0": "synthetic batches, one device",
    "T1": "synthetic batches, all devices",
    "T3": "real batches, warm page cache",
    "T2": "real batches, cold page cache",
    "T5": "synthetic batches, two nodes",
}


def measured_report(found: MeasuredStalls) -> Group:
    """What each run took, the stalls that their differences are, and why some are not known."""
    devices = "1 device" if found.devices == 1 else f"{found.devices} devices"
    runs = grid(f"{found.script} on {devices}: measured", "run", "", "step", "noise", numbers=2)
    for name, meaning in _RUNS.items():
        if name in found.runs:
            run = found.runs[name]
            noise = f"± {format_ratio(run.noise_s / run.step_s)}"
            runs.add_row(name, meaning, format_seconds(run.step_s), noise)
    table = grid("what a step waits for", "stall", "", "waits", "between", "share", numbers=3)
    for stall, (longer, shorter, of) in STALLS.items():
        if stall in found.stalls:
            difference = f"{longer} - {shorter}, of {of}"
            table.add_row(stall, difference, *_cells(found.stalls[stall]))
    why = [f"{name}: {reason}" for name, reason in found.missing.items()]
    loader = f"{found.workers} workers" if found.workers else "no workers"
    waiting = (
        f"The loader has {loader}; the script waits {format_seconds(found.waited_s)} a step for it."
    )
    return stacked(runs, table, Text(waiting), listed("not measured", why))
