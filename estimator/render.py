"""Lay out estimates, profiles and comparisons as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from estimator.comparison import Compared, Unit, median_difference_ratio
from estimator.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_ratio,
    format_seconds,
    format_split,
)

if TYPE_CHECKING:
    from estimator.advise.balance import Balance
    from estimator.advise.scaling import Scaling
    from estimator.advise.strategies import StrategyRow
    from estimator.advise.sweeps import SweepRow
    from estimator.estimates import Estimate
    from estimator.profile import CollectiveCost, Device, Link, MachineProfile, Provenance
    from estimator.validation import Validation

BAR_WIDTH = 32
FITS_WORDS = {"yes": "fits", "no": "does not fit", "uncertain": "may not fit"}


def format_interval(answer: Estimate) -> str:
    """Step time with half the width of its interval: ``412 ms ± 6 %``."""
    half_ratio = (answer.high_s - answer.low_s) / 2 / answer.step_time_s
    return f"{format_seconds(answer.step_time_s)} ± {format_ratio(half_ratio)}"


def _facts(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def grid(title: str, *columns: str, numbers: int = 0) -> Table:
    """A table whose last `numbers` columns are right-aligned figures."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for index, column in enumerate(columns):
        is_number = index >= len(columns) - numbers
        table.add_column(column, justify="right" if is_number else "left", no_wrap=is_number)
    return table


def _bar(ratio: float, width: int = BAR_WIDTH) -> str:
    return "█" * round(max(0.0, ratio) * width)


def _listed(heading: str, lines: Sequence[str]) -> Table | None:
    if not lines:
        return None
    table = Table(
        title=heading, title_justify="left", box=None, show_header=False, padding=(0, 1, 0, 0)
    )
    for line in lines:
        table.add_row("-", line)
    return table


def _stacked(*parts: RenderableType | None) -> Group:
    """The parts that there are, below each other with a blank line between."""
    shown = [part for part in parts if part is not None]
    return Group(*(item for part in shown for item in (part, Text())))


def _part_name(field_name: str) -> str:
    return field_name.removesuffix("_s").replace("_", " ")


def estimate_report(
    answer: Estimate,
    *,
    duration_s: float | None = None,
    scaling: Scaling | None = None,
    balance: Balance | None = None,
) -> Group:
    """Everything a person wants of one estimate, the time first."""
    rows = [("step time", format_interval(answer))]
    if answer.samples_per_s is not None:
        rows.append(("throughput", f"{format_count(answer.samples_per_s)}samples/s"))
    if answer.tokens_per_s is not None:
        rows.append(("", f"{format_count(answer.tokens_per_s)}tokens/s"))
    if answer.batches is not None:
        batch = f"{format_split(answer.batches)} per device, {answer.global_batch} in all"
        rows.append(("batch", batch))
    if balance is not None:
        rows.append(("balance", _balance_words(balance)))
    rows += [
        ("bottleneck", answer.bottleneck),
        ("peak memory", f"{format_bytes(answer.peak_memory_bytes)} ({FITS_WORDS[answer.fits]})"),
    ]
    if answer.mfu_ratio is not None:
        rows.append(("MFU", format_ratio(answer.mfu_ratio)))
    if duration_s is not None:
        rows.append(("duration", format_seconds(duration_s)))
    if scaling is not None:
        rows.append(("scaling", _scaling_words(scaling)))
    heading = f"{answer.model} on {answer.allocation}, {_trained_how(answer)}"
    return _stacked(
        Group(Text(heading, style="bold"), _facts(rows)),
        _breakdown_table(answer),
        _provenance_table(answer),
        _listed("assumptions", answer.assumptions),
    )


def _balance_words(balance: Balance) -> str:
    even = balance.even
    return (
        f"split by speed, {format_ratio(balance.gain_ratio)} faster than {even.batch_per_gpu} on "
        f"every device ({format_seconds(even.step_time_s)})"
    )


def _scaling_words(scaling: Scaling) -> str:
    words = f"{format_ratio(scaling.efficiency_ratio)} of linear"
    if not scaling.link or scaling.link_bytes_per_s is None:
        return words
    wanted = format_ratio(scaling.wanted_ratio)
    rate = f"{scaling.link}, {format_bandwidth(scaling.link_bytes_per_s)}"
    if scaling.efficiency_ratio >= scaling.wanted_ratio:
        return f"{words}; the slowest link is {rate}"
    if scaling.needed_bytes_per_s is None:
        return f"{words}; no faster link alone gives {wanted} (the slowest is {rate})"
    needed = format_bandwidth(scaling.needed_bytes_per_s)
    return f"{words}, held back by {rate}; {wanted} needs {needed}"


def sweep_report(rows: Sequence[SweepRow]) -> Group:
    """One row an allocation: step, throughput, efficiency and what holds it back."""
    first = next(row.answer for row in rows if row.answer is not None)
    table = grid(
        f"{first.model}, {first.strategy}, {first.optimizer}, {first.precision}",
        "allocation",
        "bottleneck",
        "ranks",
        "step",
        "samples/s",
        "of linear",
        numbers=4,
    )
    for row in rows:
        if row.answer is None:
            continue
        answer = row.answer
        table.add_row(
            row.allocation,
            answer.bottleneck if answer.fits != "no" else "does not fit",
            str(answer.ranks),
            format_interval(answer),
            format_count(answer.samples_per_s).strip() if answer.samples_per_s else "",
            "" if row.efficiency_ratio is None else format_ratio(row.efficiency_ratio),
        )
    refused = [row for row in rows if row.answer is None]
    reasons = dict.fromkeys(row.refusal for row in refused)
    lines = [f"{len(refused)} allocations do not exist, such as: {why}" for why in reasons][:1]
    return _stacked(table, _listed("left out", lines) if refused else None)


def strategies_report(rows: Sequence[StrategyRow]) -> Group:
    """One row a strategy, the fastest of each allocation first."""
    first = next(row.answer for row in rows if row.answer is not None)
    table = grid(
        f"{first.model}, {first.optimizer}, {first.precision}",
        "allocation",
        "strategy",
        "bottleneck",
        "step",
        "samples/s",
        numbers=2,
    )
    for row in rows:
        answer = row.answer
        if answer is not None:
            table.add_row(
                row.allocation,
                str(row.strategy),
                answer.bottleneck if answer.fits != "no" else "does not fit",
                format_interval(answer),
                format_count(answer.samples_per_s).strip() if answer.samples_per_s else "",
            )
    refused = dict.fromkeys(f"{row.strategy}: {row.refusal}" for row in rows if not row.answer)
    return _stacked(table, _listed("left out", list(refused)) if refused else None)


def _trained_how(answer: Estimate) -> str:
    ranks = "1 rank" if answer.ranks == 1 else f"{answer.ranks} ranks"
    return f"{ranks}, {answer.strategy}, {answer.optimizer}, {answer.precision}"


def _breakdown_table(answer: Estimate) -> Table:
    table = grid("where the time goes", "part", "", "time", "share", numbers=2)
    for field in fields(answer.breakdown):
        seconds = getattr(answer.breakdown, field.name)
        if seconds > 0:
            ratio = seconds / answer.step_time_s
            table.add_row(
                _part_name(field.name), _bar(ratio), format_seconds(seconds), format_ratio(ratio)
            )
    return table


def _provenance_table(answer: Estimate) -> Table:
    table = grid(
        "where the numbers come from", "part", "source", "share of time", "error", numbers=2
    )
    for part, source, share_ratio, relative_error in answer.provenance:
        error = "?" if relative_error is None else f"± {format_ratio(relative_error)}"
        table.add_row(part, source, format_ratio(share_ratio), error)
    return table


def check_report(answer: Estimate, *, unmeasured_ratio: float) -> Group:
    """What an estimate lacks: parts not measured, assumptions, gaps of the profile."""
    heading = f"{answer.model} on {answer.allocation}: {format_interval(answer)}"
    in_grid = format_ratio(answer.op_time_in_grid_ratio)
    rows = [
        ("time that nothing measured backs", format_ratio(unmeasured_ratio)),
        ("kernel time of shapes in the probe's grid", in_grid),
        ("memory", FITS_WORDS[answer.fits]),
    ]
    return _stacked(
        Group(Text(heading, style="bold"), _facts(rows)),
        _provenance_table(answer),
        _listed("assumed or missing", answer.assumptions),
    )


def validation_report(cases: Iterable[Validation]) -> Group:
    """Predicted beside measured, one row an allocation, then where the time was expected to go."""
    cases = tuple(cases)
    table = grid(
        f"{cases[0].predicted.model}: predicted first, then measured",
        "allocation",
        "predicted",
        "measured",
        "noise",
        "error",
        "within interval",
        numbers=5,
    )
    for case in cases:
        table.add_row(
            str(case.predicted.allocation),
            format_interval(case.predicted),
            format_seconds(case.measured_s),
            f"± {format_ratio(case.noise_ratio)}",
            format_ratio(case.error_ratio),
            "yes" if case.is_within_interval else "no",
        )
    return Group(table, Text(), *(_validated_breakdown(case) for case in cases))


def _validated_breakdown(case: Validation) -> Text:
    step_s = case.predicted.step_time_s
    shares = [
        f"{_part_name(field.name)} {format_ratio(seconds / step_s)}"
        for field in fields(case.predicted.breakdown)
        if (seconds := getattr(case.predicted.breakdown, field.name)) > 0.0005 * step_s
    ]
    return Text(f"{case.predicted.allocation} spends: {', '.join(shares)}")


def machines_table(machines: Mapping[str, tuple[Path, MachineProfile | None]]) -> Table:
    """Every machine that can be named; a damaged profile says so, with its file."""
    table = grid("", "machine", "devices", "memory", "between nodes", "made")
    for name, (path, profile) in machines.items():
        if profile is None:
            table.add_row(name, f"damaged; probe again ({path})", "", "", "")
        else:
            memory = format_bytes(profile.devices[0].memory_bytes)
            made = f"{profile.provenance.source} {profile.provenance.at[: len('2026-01-01')]}"
            table.add_row(
                name, _devices_in_words(profile), memory, _network_in_words(profile), made
            )
    return table


def _network_in_words(profile: MachineProfile) -> str:
    if not profile.network:
        return ""
    best = max(profile.network, key=lambda link: link.bandwidth_bytes_per_s)
    return f"{format_bandwidth(best.bandwidth_bytes_per_s)} {best.kind.replace('_', ' ')}"


def _devices_in_words(profile: MachineProfile) -> str:
    return f"{len(profile.devices)} x {profile.devices[0].name}"


def _origin(provenance: Provenance) -> str:
    return f"{provenance.source} {provenance.at}".strip()


def profile_report(profile: MachineProfile) -> Group:
    """A profile group by group, fastest kernels first."""
    rows = [("made", _origin(profile.provenance))]
    rows += [(key, str(value)) for key, value in profile.hardware.items() if value is not None]
    rows += [(key, value) for key, value in profile.software.items()]
    heading = f"{profile.name}: {_devices_in_words(profile)}"
    return _stacked(
        Group(Text(heading, style="bold"), _facts(rows)),
        _devices_table(profile),
        _host_facts(profile),
        _kernels_table(profile),
        _links_table(profile),
        _collectives_table(profile),
        _updates_table(profile),
        _listed("missing", profile.missing),
        _listed("sources", _sources(profile)),
    )


def _devices_table(profile: MachineProfile) -> Table:
    table = grid("devices", "device", "name", "cores", "memory", "bandwidth", "peak", numbers=3)
    for indices, device in _alike_devices(profile.devices):
        bandwidth = device.memory_bandwidth_bytes_per_s
        peaks = (
            f"{dtype} {format_count(rate)}FLOP/s" for dtype, rate in device.peak_flops_per_s.items()
        )
        table.add_row(
            f"{device.kind}:{indices}",
            device.name,
            ",".join(map(str, device.cores)),
            format_bytes(device.memory_bytes),
            "" if bandwidth is None else format_bandwidth(bandwidth),
            "\n".join(peaks),
        )
    return table


def _alike_devices(devices: Sequence[Device]) -> Iterator[tuple[str, Device]]:
    """Runs of devices that differ in their index alone, as ("0-7", the first of them)."""
    for _, run in groupby(devices, key=lambda device: replace(device, index=0)):
        first, *others = run
        yield (f"{first.index}-{others[-1].index}" if others else str(first.index)), first


def _sources(profile: MachineProfile) -> list[str]:
    """What a profile says of where its numbers come from, each remark once."""
    notes = [profile.provenance.note]
    notes += [str(device.details.get("source", "")) for device in profile.devices]
    notes += [link.provenance.note for link in (*profile.links, *profile.network)]
    return list(dict.fromkeys(note for note in notes if note))


def _host_facts(profile: MachineProfile) -> Table:
    rows = []
    if profile.host is not None:
        rows += [
            (f"host, {_part_name(field.name)}", format_seconds(getattr(profile.host, field.name)))
            for field in fields(profile.host)
            if field.name.endswith("_s")
        ]
    if profile.memory is not None:
        per_gib_s = profile.memory.first_touch_s_per_byte * 2**30
        rows.append(("first touch of 1 GiB", format_seconds(per_gib_s)))
        rows.append(("allocator", profile.memory.allocator))
    if profile.rank_spread_ratio is not None:
        rows.append(("spread between ranks", format_ratio(profile.rank_spread_ratio)))
    return _facts(rows)


def _kernels_table(profile: MachineProfile) -> Table | None:
    """One row per family of operators: a probe times some hundred operators."""
    from estimator.graph.costs import family_of, op_cost
    from estimator.tensors import OpCall

    rates: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for kernel in profile.kernels:
        family = rates.setdefault((family_of(kernel.target), kernel.dtype), [])
        for point in kernel.points:
            cost = op_cost(OpCall.decode(dict(point.call)))
            flops, moved = (cost.flops, cost.moved_bytes) if cost else (0.0, 0.0)
            family.append((point.warm_s, flops / point.warm_s, moved / point.warm_s))
    table = grid(
        "kernels, inputs in cache",
        "family",
        "dtype",
        "calls",
        "shortest",
        "best FLOP/s",
        "best bytes/s",
        numbers=4,
    )
    for (name, dtype), calls in rates.items():
        seconds, flops_per_s, bytes_per_s = zip(*calls, strict=True)
        table.add_row(
            name,
            dtype,
            str(len(calls)),
            format_seconds(min(seconds)),
            f"{format_count(max(flops_per_s))}FLOP/s" if any(flops_per_s) else "",
            format_bandwidth(max(bytes_per_s)),
        )
    return table if table.row_count else None


def _links_table(profile: MachineProfile) -> Table | None:
    table = grid("links", "link", "streams", "latency", "bandwidth", "fit error", numbers=4)
    for link in (*profile.links, *profile.network):
        error = link.provenance.relative_error
        table.add_row(
            _link_name(link),
            str(link.streams),
            format_seconds(link.latency_s),
            format_bandwidth(link.bandwidth_bytes_per_s),
            "" if error is None else format_ratio(error),
        )
    return table if table.row_count else None


_REACH_WORDS = {
    "device_switch": ", behind one switch",
    "socket": ", in one socket",
    "node": "",
    "rack": ", between nodes",
    "cluster": ", between racks",
}


def _link_name(link: Link) -> str:
    pinned = ", pinned" if link.pinned else ""
    return f"{link.kind.replace('_', ' ')}{pinned}{_REACH_WORDS[link.reach]}"


def _collective_name(cost: CollectiveCost) -> str:
    across = f", {cost.nodes} nodes" if cost.spans_nodes else ""
    return f"{cost.op.replace('_', '-')}, {cost.backend}{across}"


def _collectives_table(profile: MachineProfile) -> Table | None:
    table = grid(
        "collectives", "collective", "ranks", "latency", "bandwidth", "fit error", numbers=4
    )
    for cost in profile.collectives:
        error = cost.provenance.relative_error
        table.add_row(
            _collective_name(cost),
            str(cost.group_size),
            format_seconds(cost.latency_s),
            format_bandwidth(cost.bandwidth_bytes_per_s),
            "" if error is None else format_ratio(error),
        )
    return table if table.row_count else None


def _updates_table(profile: MachineProfile) -> Table | None:
    table = grid(
        "updates", "optimizer", "dtype", "launch", "per tensor", "per 1 M parameters", numbers=3
    )
    for update in profile.updates:
        table.add_row(
            f"{update.optimizer}, {update.form}, {update.device}",
            update.dtype,
            format_seconds(update.launch_s),
            format_seconds(update.per_tensor_s),
            format_seconds(update.per_parameter_s * 1e6),
        )
    return table if table.row_count else None


def comparison_report(rows: tuple[Compared, ...], *, first: str, second: str) -> RenderableType:
    """Two profiles side by side; the calls of a kernel are drawn together into one ratio."""
    if not rows:
        return Text(f"{first} and {second} have no number in common")
    table = grid("", "quantity", first, second, "ratio", numbers=3)
    calls: dict[str, list[float]] = {}
    for row in rows:
        if row.group.startswith("kernel "):
            calls.setdefault(row.group, []).append(row.ratio)
        else:
            table.add_row(
                f"{row.group}: {row.name}",
                _FORMATS[row.unit](row.first),
                _FORMATS[row.unit](row.second),
                f"{row.ratio:.2f}",
            )
    for group, ratios in calls.items():
        table.add_row(f"{group} ({len(ratios)} calls)", "", "", f"{geometric_mean(ratios):.2f}")
    difference = format_ratio(median_difference_ratio(rows))
    return Group(table, Text(f"{len(rows)} numbers in common, median difference {difference}"))


_FORMATS: Mapping[Unit, Callable[[float], str]] = {
    "s": format_seconds,
    "bytes": format_bytes,
    "bytes_per_s": format_bandwidth,
    "flops_per_s": lambda rate: f"{format_count(rate)}FLOP/s",
}
