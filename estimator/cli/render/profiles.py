"""Lay out machine profiles, and two side by side, as tables for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from estimator.cli.render.answers import facts, grid, listed, stacked
from estimator.machines.comparison import (
    Compared,
    GroupRatio,
    Quantity,
    Unit,
    compare_profiles,
    disturbed_groups,
    median_difference_ratio,
    only_in,
)
from estimator.machines.typical import with_typical_costs
from estimator.report.facts import part_name
from estimator.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_ratio,
    format_seconds,
)

if TYPE_CHECKING:
    from estimator.machines.profile import CollectiveCost, Device, Link, MachineProfile


# What every device of its maker is called, and a list need not say in each row.
_MAKERS = ("NVIDIA ", "AMD ", "Tesla ", "GeForce ", "Instinct ")
_SHORT = ("float16", "bfloat16")


def machines_report(
    machines: Mapping[str, tuple[Path, MachineProfile | None]], *, store: Path
) -> Group:
    """Every machine that can be named, those of the user's `store` first.

    A damaged profile says so, with its file.
    """
    own: dict[str, MachineProfile] = {}
    chips: dict[str, MachineProfile] = {}
    whole: dict[str, MachineProfile] = {}
    rented: dict[str, MachineProfile] = {}
    damaged = []
    for name, (path, profile) in machines.items():
        if profile is None:
            damaged.append(f"{name}: {path}; probe that machine again")
        elif path.is_relative_to(store):
            own[name] = profile
        elif "instance_type" in profile.hardware:
            rented[name] = profile
        else:
            (whole if "system" in profile.hardware else chips)[name] = profile
    legend = (
        "GiB, GB/s and TFLOP/s are of one device: its memory, that memory's bandwidth, its dense "
        "peak in 16 bits (in 32 where there is no other). Gbit/s are what a node sends to others. "
        "'estimator machines show NAME' tells the rest and the sources."
    )
    return stacked(
        _own_machines(own),
        _catalogue("chips, in a server of the usual size", chips),
        _catalogue("machines sold whole", whole),
        _rented_machines(rented),
        listed("damaged", damaged),
        Text(legend),
    )


def _narrow(title: str, *columns: str, wide: str, numbers: int = 0) -> Table:
    """A table for 80 columns, of which only the column `wide` gives way."""
    table = grid(title, *columns, numbers=numbers)
    table.collapse_padding = True
    for column in table.columns:
        column.no_wrap = column.header != wide
        column.overflow = "fold"
    return table


def _own_machines(machines: Mapping[str, MachineProfile]) -> Table | None:
    columns = "machine", "devices", "made", "Gbit/s of a node", "GiB"
    table = _narrow("in your store", *columns, wide="devices", numbers=1)
    table.columns[columns.index("made")].no_wrap = False
    for name, profile in machines.items():
        made = _made(profile, profile.provenance.at[: len("2026-01-01")])
        table.add_row(
            name, _short_devices(profile), made, _network_in_words(profile), _memory_gib(profile)
        )
    return table if table.row_count else None


def _catalogue(title: str, machines: Mapping[str, MachineProfile]) -> Table | None:
    columns = "machine", "devices", "Gbit/s of a node", "GiB", "GB/s", "TFLOP/s"
    table = _narrow(title, *columns, wide="devices", numbers=3)
    for name, profile in machines.items():
        device = profile.devices[0]
        bandwidth = device.memory_bandwidth_bytes_per_s
        peaks = device.peak_flops_per_s
        best = max([peaks[dtype] for dtype in _SHORT if dtype in peaks] or peaks.values())
        table.add_row(
            name,
            _short_devices(profile),
            _network_in_words(profile),
            _memory_gib(profile),
            "" if bandwidth is None else f"{bandwidth / 1e9:.0f}",
            f"{best / 1e12:.3g}" if best < 1e15 else f"{best / 1e12:.0f}",
        )
    return table if table.row_count else None


def _rented_machines(machines: Mapping[str, MachineProfile]) -> Table | None:
    columns = "machine", "instance", "devices", "Gbit/s of a node", "GiB"
    table = _narrow("rented machines", *columns, wide="instance", numbers=1)
    for name, profile in machines.items():
        instance = str(profile.hardware["instance_type"])
        network, memory = _network_in_words(profile), _memory_gib(profile)
        table.add_row(name, instance, _short_devices(profile), network, memory)
    return table if table.row_count else None


def _memory_gib(profile: MachineProfile) -> str:
    return f"{profile.devices[0].memory_bytes / 2**30:.3g}"


def _short_devices(profile: MachineProfile) -> str:
    name = profile.devices[0].name
    for maker in _MAKERS:
        name = name.removeprefix(maker)
    return f"{len(profile.devices)} x {name}"


def _network_in_words(profile: MachineProfile) -> str:
    if not profile.network:
        return ""
    best = max(profile.network, key=lambda link: link.bandwidth_bytes_per_s)
    kind = best.kind.replace("_", " ")
    cards, rate = profile.hardware.get("nic_count"), profile.hardware.get("nic_bit_per_s")
    if isinstance(cards, int) and isinstance(rate, int | float):
        return f"{cards} x {rate / 1e9:g} {kind}"
    return f"{best.bandwidth_bytes_per_s * 8 / 1e9:.3g} {kind}"


def _devices_in_words(profile: MachineProfile) -> str:
    return f"{len(profile.devices)} x {profile.devices[0].name}"


def _made(profile: MachineProfile, at: str) -> str:
    """Where a profile as a whole comes from: a machine of the catalogue may have gained groups."""
    groups = (profile.links, profile.network, profile.collectives, profile.kernels)
    sources = {entry.provenance.source for group in groups for entry in group}
    if profile.provenance.source == "datasheet" and sources & {"imported", "measured"}:
        return f"catalogue with {'imported ' if 'measured' not in sources else ''}measurements"
    return f"{profile.provenance.source} {at}".strip()


def profile_report(profile: MachineProfile) -> Group:
    """A profile group by group, fastest kernels first."""
    rows = [("made", _made(profile, profile.provenance.at))]
    rows += [("meanwhile", str(profile.interference))] if profile.interference else []
    details = profile.devices[0].details.items()
    rows += [_fact(key, value) for key, value in profile.hardware.items() if value is not None]
    rows += [_fact(key, value) for key, value in details if value is not None and key != "source"]
    rows += [(key, value) for key, value in profile.software.items()]
    heading = f"{profile.name}: {_devices_in_words(profile)}"
    return stacked(
        Group(Text(heading, style="bold"), facts(rows)),
        _devices_table(profile),
        _host_facts(profile),
        _kernels_table(profile),
        _links_table(profile),
        _collectives_table(profile),
        _updates_table(profile),
        listed("missing", profile.missing),
        listed("sources", _sources(profile)),
    )


_UNITS: Mapping[str, Callable[[float], str]] = {
    "_bytes": format_bytes,
    "_bit_per_s": lambda rate: f"{rate / 1e9:g} Gbit/s",
    "_hz": lambda rate: f"{rate / 1e9:g} GHz",
    "_w": lambda power: f"{power:g} W",
    "_s": format_seconds,
}


def _fact(key: str, value: str | int | float | bool) -> tuple[str, str]:
    """A field of a profile and its value, in words and with its unit."""
    if isinstance(value, bool):
        return key.replace("_", " "), "yes" if value else "no"
    for suffix, shown in _UNITS.items():
        if key.endswith(suffix) and not isinstance(value, str):
            return key.removesuffix(suffix).replace("_", " "), shown(value)
    return key.replace("_", " "), str(value)


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


def _host_facts(profile: MachineProfile) -> Table | None:
    rows = []
    if profile.host is not None:
        rows += [
            (f"host, {part_name(field.name)}", format_seconds(seconds))
            for field in fields(profile.host)
            if field.name.endswith("_s")
            and (seconds := getattr(profile.host, field.name)) is not None
        ]
    if profile.memory is not None:
        per_gib_s = profile.memory.first_touch_s_per_byte * 2**30
        rows.append(("first touch of 1 GiB", format_seconds(per_gib_s)))
        if profile.memory.cold_read_s_per_byte:
            more_s = profile.memory.cold_read_s_per_byte * 2**30
            rows.append(("cold read of 1 GiB", f"{format_seconds(more_s)} more than from cache"))
        reached = [distance for distance, share in profile.memory.reuse_points if share >= 0.5]
        if reached:
            rows.append(("reads are half cold after", format_bytes(reached[0])))
        rows.append(("allocator", profile.memory.allocator))
    if profile.input is not None:
        rows += [
            (words, format_bandwidth(rate))
            for words, rate in (
                ("files, of the disk", profile.input.disk_bytes_per_s),
                ("files, cached", profile.input.cache_bytes_per_s),
                ("copies in memory, one core", profile.input.copy_bytes_per_s),
            )
            if rate is not None
        ]
        rows += [
            (words, f"{format_count(rate).strip()} {what}/s")
            for words, what, rate in (
                ("JPEG decoding, one core", "pixels", profile.input.jpeg_pixels_per_s),
                ("records of tokens, one core", "tokens", profile.input.tokens_per_s),
            )
            if rate is not None
        ]
    if profile.rank_jitter_ratio is not None:
        rows.append(("spread between ranks", format_ratio(profile.rank_jitter_ratio)))
    if profile.kernels_timed_ratio is not None:
        rows.append(("kernel calls timed", format_ratio(profile.kernels_timed_ratio)))
    return facts(rows) if rows else None


def _kernels_table(profile: MachineProfile) -> Table | None:
    """One row per family of operators: a probe times some hundred operators."""
    from estimator.graph.costs.call_costs import family_of, op_cost
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
    table = grid("links", "link", "flows", "latency", "bandwidth", "fit error", numbers=4)
    for link in (*profile.links, *profile.network):
        error = link.provenance.relative_error
        table.add_row(
            _link_name(link),
            str(link.flows),
            format_seconds(link.latency_s),
            format_bandwidth(link.bandwidth_bytes_per_s),
            "" if error is None else format_ratio(error),
        )
    return table if table.row_count else None


_LOCALITY_WORDS = {
    "device_switch": ", behind one switch",
    "socket": ", in one socket",
    "node": "",
    "rack": ", between nodes",
    "cluster": ", between racks",
}


def _link_name(link: Link) -> str:
    words = link.kind.replace("_", " ") + (", pinned" if link.pinned else "")
    words += _LOCALITY_WORDS[link.locality]
    if link.ring_devices is not None:
        words += f", rings of up to {link.ring_devices}"
    if not link.peer_to_peer:
        words += ", through host memory"
    return words + (", adds in its switch" if link.reduces else "")


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


def comparison_report(first: MachineProfile, second: MachineProfile) -> Group:
    """Two profiles side by side, group by group; a ratio is the second's number over the first's.

    Where a machine is known by its datasheet only, its host and updates are what estimates take.
    """
    one, other = with_typical_costs(first), with_typical_costs(second)
    common = compare_profiles(one, other)
    table = grid("", "quantity", first.name, second.name, "ratio", numbers=3)
    rows = [*_common_rows(common), *_lone_rows(only_in(one, other), 0)]
    rows += _lone_rows(only_in(other, one), 1)
    for group in dict.fromkeys(group for group, _ in rows):
        table.add_row(Text(group, style="bold"))
        for its, cells in rows:
            if its == group:
                table.add_row(*cells)
        table.add_section()
    remarks = [
        f"host and updates of '{profile.name}' are usual ones: none of its own was measured"
        for profile, completed in ((first, one), (second, other))
        if completed is not profile
    ]
    if common:
        difference = format_ratio(median_difference_ratio(common))
        remarks.insert(0, f"{len(common)} numbers in common, median difference {difference}")
    else:
        remarks.insert(0, f"'{first.name}' and '{second.name}' have no number in common")
    remarks += _disturbed({first.name: first, second.name: second})
    return Group(table, *map(Text, remarks))


def several_report(rows: Sequence[GroupRatio], profiles: Mapping[str, MachineProfile]) -> Group:
    """How long each of several machines takes, group by group, and which of them is odd."""
    machines = list(dict.fromkeys(row.machine for row in rows))
    table = grid("times as long as usual", "group", *machines, numbers=len(machines))
    for group in dict.fromkeys(row.group for row in rows):
        found = [row for row in rows if row.group == group]
        name = f"{group}, {found[0].quantities} numbers"
        table.add_row(name, *(_factor(row.ratio) for row in found))
    remarks = [
        f"{row.machine} is odd: {row.group} {_factor(max(row.ratio, 1 / row.ratio))} times as "
        f"{'slow' if row.ratio > 1 else 'fast'} as usual"
        for row in sorted(rows, key=lambda row: -abs(math.log(row.ratio)))
        if row.is_odd
    ]
    if not machines:
        remarks = ["these machines have no number in common"]
    remarks = remarks or ["none is odd: they differ as repeats do"]
    return Group(table, *map(Text, [*remarks, *_disturbed(profiles)]))


def _disturbed(profiles: Mapping[str, MachineProfile]) -> list[str]:
    """Of each machine that was disturbed when it was probed, what that touches and how far."""
    return [
        f"'{name}' was measured while {profile.interference}: its {', '.join(groups)} may be off "
        f"by {_factor(math.exp(profile.interference.relative_error))} times; probe it again"
        for name, profile in profiles.items()
        if profile.interference is not None and (groups := disturbed_groups(profile))
    ]


_Row = tuple[str, tuple[str, ...]]


def _common_rows(rows: Sequence[Compared]) -> list[_Row]:
    """(group, cells) of what both have; the calls of a kernel are drawn together into one ratio."""
    calls: dict[str, list[float]] = {}
    found: list[_Row] = []
    for row in rows:
        if row.group.startswith("kernel "):
            calls.setdefault(row.group.removeprefix("kernel "), []).append(row.ratio)
        else:
            shown = _FORMATS[row.unit]
            cells = (f"  {row.name}", shown(row.first), shown(row.second), _factor(row.ratio))
            found.append((row.group, cells))
    for kernel, ratios in calls.items():
        name = f"  {kernel}, {len(ratios)} calls"
        found.append(("kernels in common", (name, "", "", _factor(geometric_mean(ratios)))))
    return found


def _lone_rows(quantities: Sequence[Quantity], column: int) -> list[_Row]:
    """(group, cells) of what one has alone, in its column; of kernels only how many."""
    kernels = [each.group for each in quantities if each.group.startswith("kernel ")]
    found: list[_Row] = []
    for each in quantities:
        if not each.group.startswith("kernel "):
            found.append((each.group, _beside(each.name, _FORMATS[each.unit](each.value), column)))
    if kernels:
        name = f"calls of {len(set(kernels))} kernels"
        found.append(("kernels of one alone", _beside(name, str(len(kernels)), column)))
    return found


def _beside(name: str, value: str, column: int) -> tuple[str, ...]:
    return (f"  {name}", value, "–", "") if column == 0 else (f"  {name}", "–", value, "")


def _factor(ratio: float) -> str:
    return f"{ratio:.2f}" if 0.1 <= ratio < 100 else f"{ratio:.3g}"


_FORMATS: Mapping[Unit, Callable[[float], str]] = {
    "s": format_seconds,
    "bytes": format_bytes,
    "bytes_per_s": format_bandwidth,
    "flops_per_s": lambda rate: f"{format_count(rate)}FLOP/s",
}
