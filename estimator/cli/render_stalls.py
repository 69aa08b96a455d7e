"""Show stalls to people."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from estimator.cli.render import grid, listed, stacked
from estimator.stalls.measured import STALLS, MeasuredStalls, RunName
from estimator.stalls.predicted import PredictedStalls, Stall
from estimator.stalls.what_if import InputAnswers
from estimator.units import format_count, format_error, format_ratio, format_seconds


def predicted_report(found: PredictedStalls, data: InputAnswers | None = None) -> Group:
    """The steps of one device, one node and all nodes: what each takes beyond the one before."""
    batch = "" if found.batch_per_gpu is None else f", batch {found.batch_per_gpu} per device"
    table = grid(
        f"{found.model} on {found.allocation}{batch}: predicted stalls",
        "devices",
        "stall",
        "step",
        "waits",
        "between",
        "of its step",
        "of a node's step",
        numbers=5,
    )
    for devices, name, stall, step_s in (
        (found.one_device, "host", found.host, found.device_s),
        (found.one_node, "interconnect", found.interconnect, found.node_s),
        (found.allocation, "network", found.network, found.step_s),
    ):
        if stall is not None:
            table.add_row(devices, name, format_seconds(step_s), *_cells(name, stall, step_s))
    if data is None:
        return stacked(table, Text(_in_words(found)))
    return stacked(table, Text(_in_words(found)), _input_table(data), Text(_input_words(data)))


def _input_table(data: InputAnswers) -> Table:
    table = grid(
        "with its loader", "loader", "samples/s", "waits for data", "least of G, P, F", numbers=3
    )
    for each in (data.as_it_is, *data.changes):
        table.add_row(
            each.change,
            format_count(each.samples_per_s).strip(),
            format_seconds(each.input_stall_s),
            format_count(each.baseline_samples_per_s).strip(),
        )
    return table


def _input_words(data: InputAnswers) -> str:
    said = [f"Without loading: {format_count(data.without_samples_per_s).strip()} samples/s."]
    if data.workers_needed is None:
        said.append("No number of workers would hide the loading.")
    else:
        said.append(f"{data.workers_needed} workers would hide what workers can hide.")
    if data.cached_needed is not None:
        said.append(f"{format_ratio(data.cached_needed)} cached is as good as all of it.")
    return " ".join(said)


# Stalls whose ratio is of a node's step, whatever the step that they lengthen.
_OF_A_NODE = ("interconnect", "network")


def _cells(name: str, stall: Stall, step_s: float) -> tuple[str, str, str, str]:
    """What a stall takes, as a share of the step that it lengthens and of that of one node."""
    between = f"{format_seconds(stall.low_s)} to {format_seconds(stall.high_s)}"
    of_node = format_ratio(stall.ratio) if name in _OF_A_NODE else ""
    return format_seconds(stall.stall_s), between, format_ratio(stall.stall_s / step_s), of_node


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
            noise = format_error(run.noise_s / run.step_s)
            runs.add_row(name, meaning, format_seconds(run.step_s), noise)
    columns = ("stall", "", "waits", "between", "of its step", "of a node's step")
    table = grid("what a step waits for", *columns, numbers=4)
    for stall, (longer, shorter, _) in STALLS.items():
        if stall in found.stalls:
            cells = _cells(stall, found.stalls[stall], found.runs[longer].step_s)
            table.add_row(stall, f"{longer} - {shorter}", *cells)
    if "host" in found.stalls:
        alone_s = found.runs["T0" if "T0" in found.runs else "T1"].step_s
        cells = _cells("host", found.stalls["host"], alone_s)
        table.add_row("host", "one device - its work", *cells)
    why = [f"{name}: {reason}" for name, reason in found.missing.items()]
    loader = f"{found.workers} workers" if found.workers else "no workers"
    waiting = (
        f"The loader has {loader}; the script waits {format_seconds(found.waited_s)} a step for it."
    )
    rates = [f"{name} {format_count(rate).strip()}" for name, rate in found.rates.items()]
    waiting += f" In samples/s: {', '.join(rates)}."
    return stacked(runs, table, Text(waiting), listed("not measured", why))
