"""Describe machine profiles, several side by side, and what calibration learnt, as sections."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING

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
from estimator.report.sections import Section, Table
from estimator.units import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_ratio,
    format_seconds,
)

if TYPE_CHECKING:
    from estimator.machines.profile import CollectiveCost, Device, Link, MachineProfile

    _Fitted = tuple[str, int, Link | CollectiveCost]
    from estimator.calibrate.calibrator import FittedStep
    from estimator.calibrate.review import Review

# What every device of its maker is called, and a list need not say in each row.
_MAKERS = ("NVIDIA ", "AMD ", "Tesla ", "GeForce ", "Instinct ")
_SHORT = ("float16", "bfloat16")


def machines_sections(
    machines: Mapping[str, tuple[Path, MachineProfile | None]], *, store: Path
) -> list[Section]:
    """Every machine that can be named, those of the user's `store` first.

    A damaged profile says so, with its file.
    """
    groups: dict[str, dict[str, MachineProfile]] = {
        name: {} for name in ("store", "chips", "systems", "rented")
    }
    damaged = []
    for name, (path, profile) in machines.items():
        if profile is None:
            damaged.append(f"{name}: {path}; probe that machine again")
        elif path.is_relative_to(store):
            groups["store"][name] = profile
        elif "instance_type" in profile.hardware:
            groups["rented"][name] = profile
        else:
            groups["systems" if "system" in profile.hardware else "chips"][name] = profile
    legend = (
        "GiB, GB/s and TFLOP/s are of one device: its memory, that memory's bandwidth, its dense "
        "peak in 16 bits (in 32 where there is no other). Gbit/s are what a node sends to others. "
        "'estimator machines show NAME' tells the rest and the sources."
    )
    return [
        _machines("in your store", groups["store"], "made"),
        _machines("chips, in a server of the usual size", groups["chips"], "GB/s", "TFLOP/s"),
        _machines("machines sold whole", groups["systems"], "GB/s", "TFLOP/s"),
        _machines("rented machines", groups["rented"], "instance"),
        Section("damaged", items=damaged),
        Section(sentences=[legend]),
    ]


def _machines(title: str, machines: Mapping[str, MachineProfile], *more: str) -> Section:
    """A table for 80 columns; `more` are its own."""
    order = ("machine", "instance", "devices", "made", "Gbit/s of a node", "GiB", "GB/s", "TFLOP/s")
    columns = [name for name in order if name in {"machine", "devices", *order[4:6], *more}]
    rows = []
    for name, profile in machines.items():
        device = profile.devices[0]
        bandwidth, peaks = device.memory_bandwidth_bytes_per_s, device.peak_flops_per_s
        best = max([peaks[dtype] for dtype in _SHORT if dtype in peaks] or peaks.values() or [0.0])
        cells = {
            "machine": name,
            "instance": str(profile.hardware.get("instance_type")),
            "devices": _short_devices(profile),
            "made": _made(profile, profile.provenance.at[: len("2026-01-01")]),
            "Gbit/s of a node": _network_in_words(profile),
            "GiB": f"{device.memory_bytes / 2**30:.3g}",
            "GB/s": "" if bandwidth is None else f"{bandwidth / 1e9:.0f}",
            "TFLOP/s": f"{best / 1e12:.3g}" if best < 1e15 else f"{best / 1e12:.0f}",
        }
        rows.append([cells[column] for column in columns])
    numbers = len(columns) - columns.index("GiB")
    return Section(title, table=Table(columns, rows, numbers=numbers))


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


def _made(profile: MachineProfile, at: str) -> str:
    """Where a profile as a whole comes from: a machine of the catalogue may have gained groups."""
    groups = (profile.links, profile.network, profile.collectives, profile.kernels)
    sources = {entry.provenance.source for group in groups for entry in group}
    if profile.provenance.source == "datasheet" and sources & {"imported", "measured"}:
        return f"catalogue with {'imported ' if 'measured' not in sources else ''}measurements"
    return f"{profile.provenance.source} {at}".strip()


def profile_sections(profile: MachineProfile) -> list[Section]:
    """A profile group by group, fastest kernels first."""
    rows = [("made", _made(profile, profile.provenance.at))]
    rows += [("meanwhile", str(profile.interference))] if profile.interference else []
    details = profile.devices[0].details.items()
    rows += [_fact(key, value) for key, value in profile.hardware.items() if value is not None]
    rows += [_fact(key, value) for key, value in details if value is not None and key != "source"]
    rows += [(key, value) for key, value in profile.software.items()]
    devices = f"{len(profile.devices)} x {profile.devices[0].name}"
    return [
        Section(f"{profile.name}: {devices}", facts=rows),
        _devices(profile),
        Section(facts=_host_facts(profile)),
        _kernels(profile),
        _links(profile),
        _collectives(profile),
        _updates(profile),
        Section("missing", items=profile.missing),
        Section("sources", items=_sources(profile)),
    ]


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


def _devices(profile: MachineProfile) -> Section:
    rows = []
    for indices, device in _alike_devices(profile.devices):
        bandwidth = device.memory_bandwidth_bytes_per_s
        peaks = (
            f"{dtype} {format_count(rate)}FLOP/s" for dtype, rate in device.peak_flops_per_s.items()
        )
        rows.append(
            (
                *(f"{device.kind}:{indices}", device.name, ",".join(map(str, device.cores))),
                format_bytes(device.memory_bytes),
                "" if bandwidth is None else format_bandwidth(bandwidth),
                "\n".join(peaks),
            )
        )
    columns = ("device", "name", "cores", "memory", "bandwidth", "peak")
    return Section("devices", table=Table(columns, rows, numbers=3))


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


def _host_facts(profile: MachineProfile) -> list[tuple[str, str]]:
    rows = []
    if profile.host is not None:
        rows += [
            (f"host, {part_name(item.name)}", format_seconds(seconds))
            for item in fields(profile.host)
            if item.name.endswith("_s")
            and (seconds := getattr(profile.host, item.name)) is not None
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
            (words, shown(rate))
            for words, rate, shown in (
                ("files, of the disk", profile.input.disk_bytes_per_s, format_bandwidth),
                ("files, cached", profile.input.cache_bytes_per_s, format_bandwidth),
                ("copies in memory, one core", profile.input.copy_bytes_per_s, format_bandwidth),
                ("JPEG decoding, one core", profile.input.jpeg_pixels_per_s, _per_s("pixels")),
                ("records of tokens, one core", profile.input.tokens_per_s, _per_s("tokens")),
            )
            if rate is not None
        ]
    if profile.rank_jitter_ratio is not None:
        rows.append(("spread between ranks", format_ratio(profile.rank_jitter_ratio)))
    if profile.kernels_timed_ratio is not None:
        rows.append(("kernel calls timed", format_ratio(profile.kernels_timed_ratio)))
    return rows


def _per_s(noun: str) -> Callable[[float], str]:
    return lambda rate: f"{format_count(rate).strip()} {noun}/s"


def _kernels(profile: MachineProfile) -> Section:
    """One row per family of operators: a probe times some hundred operators."""
    from estimator.graph.costs.call_costs import family_of, op_cost

    rates: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for kernel in profile.kernels:
        family = rates.setdefault((family_of(kernel.target), kernel.dtype), [])
        for point in kernel.points:
            cost = op_cost(point.call)
            flops, moved = (cost.flops, cost.moved_bytes) if cost else (0.0, 0.0)
            family.append((point.warm_s, flops / point.warm_s, moved / point.warm_s))
    rows = []
    for (name, dtype), calls in rates.items():
        seconds, flops_per_s, bytes_per_s = zip(*calls, strict=True)
        rows.append(
            (
                *(name, dtype, str(len(calls)), format_seconds(min(seconds))),
                f"{format_count(max(flops_per_s))}FLOP/s" if any(flops_per_s) else "",
                format_bandwidth(max(bytes_per_s)),
            )
        )
    columns = ("family", "dtype", "calls", "shortest", "best FLOP/s", "best bytes/s")
    return Section("kernels, inputs in cache", table=Table(columns, rows, numbers=4))


def _fitted(title: str, columns: tuple[str, str], rows: Iterator[_Fitted]) -> Section:
    """What was measured as a latency and a bandwidth, each with the error of that fit."""
    cells = [
        (
            *(name, str(count), format_seconds(cost.latency_s)),
            format_bandwidth(cost.bandwidth_bytes_per_s),
            "" if (error := cost.provenance.relative_error) is None else format_ratio(error),
        )
        for name, count, cost in rows
    ]
    table = Table((*columns, "latency", "bandwidth", "fit error"), cells, numbers=4)
    return Section(title, table=table)


def _links(profile: MachineProfile) -> Section:
    links = ((_link_name(link), link.flows, link) for link in (*profile.links, *profile.network))
    return _fitted("links", ("link", "flows"), links)


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


def _collectives(profile: MachineProfile) -> Section:
    costs = ((_collective_name(cost), cost.group_size, cost) for cost in profile.collectives)
    return _fitted("collectives", ("collective", "ranks"), costs)


def _updates(profile: MachineProfile) -> Section:
    rows = [
        (
            *(f"{update.optimizer}, {update.form}, {update.device}", update.dtype),
            *(format_seconds(update.launch_s), format_seconds(update.per_tensor_s)),
            format_seconds(update.per_parameter_s * 1e6),
        )
        for update in profile.updates
    ]
    columns = ("optimizer", "dtype", "launch", "per tensor", "per 1 M parameters")
    return Section("updates", table=Table(columns, rows, numbers=3))


def comparison_section(first: MachineProfile, second: MachineProfile) -> Section:
    """Two profiles side by side, group by group; a ratio is the second's number over the first's.

    Where a machine is known by its datasheet only, its host and updates are what estimates take.
    """
    one, other = with_typical_costs(first), with_typical_costs(second)
    common = compare_profiles(one, other)
    rows = [*_common_rows(common), *_lone_rows(only_in(one, other), 0)]
    rows += _lone_rows(only_in(other, one), 1)
    cells: list[tuple[str, ...]] = []
    for group in dict.fromkeys(group for group, _ in rows):
        cells.append((group,))
        cells += [row for of_group, row in rows if of_group == group]
    remarks = [f"'{first.name}' and '{second.name}' have no number in common"]
    if common:
        difference = format_ratio(median_difference_ratio(common))
        remarks = [f"{len(common)} numbers in common, median difference {difference}"]
    remarks += [
        f"host and updates of '{profile.name}' are usual ones: none of its own was measured"
        for profile, completed in ((first, one), (second, other))
        if completed is not profile
    ]
    remarks += _disturbed({first.name: first, second.name: second})
    table = Table(("quantity", first.name, second.name, "ratio"), cells, numbers=3)
    return Section(table=table, sentences=remarks)


def several_section(rows: Sequence[GroupRatio], profiles: Mapping[str, MachineProfile]) -> Section:
    """How long each of several machines takes, group by group, and which of them is odd."""
    machines = list(dict.fromkeys(row.machine for row in rows))
    cells = []
    for group in dict.fromkeys(row.group for row in rows):
        ratios = [row for row in rows if row.group == group]
        name = f"{group}, {ratios[0].quantities} numbers"
        cells.append((name, *(_factor(row.ratio) for row in ratios)))
    remarks = [
        f"{row.machine} is odd: {row.group} {_factor(max(row.ratio, 1 / row.ratio))} times as "
        f"{'slow' if row.ratio > 1 else 'fast'} as usual"
        for row in sorted(rows, key=lambda row: -abs(math.log(row.ratio)))
        if row.is_odd
    ]
    if not machines:
        remarks = ["these machines have no number in common"]
    remarks = remarks or ["none is odd: they differ as repeats do"]
    table = Table(("group", *machines), cells, numbers=len(machines))
    return Section(
        "times as long as usual", table=table, sentences=[*remarks, *_disturbed(profiles)]
    )


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
    table: list[_Row] = []
    for row in rows:
        if row.group.startswith("kernel "):
            calls.setdefault(row.group.removeprefix("kernel "), []).append(row.ratio)
        else:
            shown = _FORMATS[row.unit]
            cells = (f"  {row.name}", shown(row.first), shown(row.second), _factor(row.ratio))
            table.append((row.group, cells))
    for kernel, ratios in calls.items():
        name = f"  {kernel}, {len(ratios)} calls"
        table.append(("kernels in common", (name, "", "", _factor(geometric_mean(ratios)))))
    return table


def _lone_rows(quantities: Sequence[Quantity], column: int) -> list[_Row]:
    """(group, cells) of what one has alone, in its column; of kernels only how many."""
    kernels = [quantity.group for quantity in quantities if quantity.group.startswith("kernel ")]
    rows: list[_Row] = []
    for quantity in quantities:
        if not quantity.group.startswith("kernel "):
            rows.append(
                (
                    quantity.group,
                    _beside(quantity.name, _FORMATS[quantity.unit](quantity.value), column),
                )
            )
    if kernels:
        name = f"calls of {len(set(kernels))} kernels"
        rows.append(("kernels of one alone", _beside(name, str(len(kernels)), column)))
    return rows


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


def review_section(review: Review) -> Section:
    """The jobs of a store, drift, populations, and what counts little in fits."""
    rows = [
        (
            f"{job.workload} {f'#{job.fingerprint[:6]}' if job.fingerprint else '(by name)'}",
            _placed(job.machines, job.layout),
            *(str(job.observations), str(job.allocations)),
            *(f"{job.first:%Y-%m-%d}", f"{job.last:%Y-%m-%d}", format_ratio(job.error_ratio)),
            "-" if job.sync_share is None else format_ratio(job.sync_share),
        )
        for job in review.jobs
    ]
    figures = ("observed", "allocations", "since", "until", "median error", "sync share")
    lines = [str(drift) for drift in review.drifts] or ["no drift"]
    lines += [str(populations) for populations in review.populations]
    lines += [
        f"gradient noise scale of {job.workload}: {job.gradient_noise_samples:,.0f} samples"
        for job in review.jobs
        if job.gradient_noise_samples is not None
    ]
    alike = Counter(
        (f"{one.workload} on {one.allocation} with batch {one.batch_per_gpu}", why)
        for one, why in review.doubted
    )
    lines += [
        f"doubted, counts little: {what}{f', {times} observations' if times > 1 else ''}: {why}"
        for (what, why), times in alike.items()
    ]
    table = Table(("job", "machines", *figures), rows, numbers=len(figures))
    return Section("observed steps", table=table, sentences=lines)


def fitted_steps_section(workload: str, steps: Sequence[FittedStep]) -> Section:
    """Observed steps of a model beside the engine's predictions and the calibrated ones."""
    rows = [
        (
            *(_placed(step.allocation, step.layout), str(step.batch_per_gpu)),
            *(str(step.observations), format_seconds(step.observed_s)),
            _with_error(step.engine_s, step.observed_s),
            _with_error(step.calibrated_s, step.observed_s),
            *(f"× {step.compute_ratio:.2f}", f"× {step.communication_ratio:.2f}"),
        )
        for step in steps
    ]
    figures = ("batch", "seen", "observed", "engine", "calibrated", "compute", "network")
    table = Table(("allocation", *figures), rows, numbers=len(figures))
    return Section(f"{workload}: observed and predicted steps", table=table, name="calibration")


def _placed(where: str, layout: str | None) -> str:
    return where if layout is None else f"{where}, {layout}"


def _with_error(predicted_s: float, observed_s: float) -> str:
    return f"{format_seconds(predicted_s)} ({100 * (predicted_s / observed_s - 1):+.0f} %)"
