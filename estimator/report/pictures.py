"""Draw answers as matplotlib figures: sweeps, timelines, memory, offers, replays."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from estimator.advise.memory import MemoryReport
from estimator.advise.rent.offers import Choice
from estimator.advise.scaling import SweepRow
from estimator.advise.swap.search import Planned
from estimator.errors import StoreError, cause
from estimator.estimates.estimate import Estimate
from estimator.files import write_bytes_atomically
from estimator.replay.replay import Ran, held_over_time
from estimator.timeline.simulator.tasks import LANES, Span, Timeline, flat_tracks
from estimator.units import GIB, format_seconds, time_unit


def empty_figure(*, width_inches: float, height_inches: float) -> Any:
    """A figure without axes; raises StoreError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise StoreError(
            "a picture needs matplotlib; install throughput-estimator[report]"
        ) from None
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def shades(count: int, *, brightest: float) -> list[Any]:
    """So many colours from dark up to the `brightest`; 1 is hard to see on white."""
    from matplotlib import colormaps

    return [colormaps["viridis"](brightest * n / max(count - 1, 1)) for n in range(count)]


def title_of(text: str, *, characters: int) -> str:
    """A title in lines of so many characters at most, as matplotlib shows it.

    Names of models may be longer than a picture is wide; between two dollars it would read a
    formula.
    """
    return "\n".join(textwrap.wrap(text, characters)).replace("$", r"\$")


def inline_svg(figure: Any, name: str) -> str:
    """A figure as an SVG element for a page; `name` keeps its ids apart from other figures'."""
    from matplotlib import rc_context

    drawn = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    text = drawn.getvalue()
    return text[text.index("<svg") :]


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure to `path`, whole or not at all; raises StoreError."""
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, format=path.suffix.removeprefix(".") or path.name)
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot draw {path} ({cause(error)}); name a .png or .svg file") from None
    write_bytes_atomically(path, drawn.getvalue())


# Of the legend, beside a picture of this height.
_LINES_OF_COLUMN = 18
# Of the title.
_MOST_MACHINES = 3
_MOST_LARGE_MARKERS = 20


class _Point(NamedTuple):
    devices: int
    samples_per_s: float
    low_per_s: float
    high_per_s: float
    efficiency_ratio: float


class _Shape(NamedTuple):
    """The composition of an allocation; `per_node` is a mean where nodes differ."""

    machines: str
    nodes: int
    per_node: float


def scaling_figure(rows: Sequence[SweepRow]) -> Any:
    """The picture of a sweep, with lines by `lines_of`; raises StoreError without matplotlib."""
    lines = lines_of(rows)
    columns = -(-(len(lines) + 1) // _LINES_OF_COLUMN)
    figure = empty_figure(width_inches=9.0 + columns, height_inches=4.0)
    speed, efficiency = figure.subplots(1, 2)
    colours = shades(len(lines), brightest=0.85)
    for number, (label, points) in enumerate(lines.items()):
        colour = colours[number]
        devices, throughput, low, high, ratio = zip(*sorted(points), strict=True)
        marker = {"marker": "o", "markersize": 5 if len(points) <= _MOST_LARGE_MARKERS else 2}
        speed.plot(devices, throughput, label=label, color=colour, **marker)
        if len(points) == 1:
            speed.vlines(devices, low, high, color=colour, alpha=0.3, linewidth=4)
        else:
            speed.fill_between(devices, low, high, color=colour, alpha=0.15, linewidth=0)
        efficiency.plot(devices, [100 * value for value in ratio], color=colour, **marker)
    title = _title([row.answer for row in rows if row.answer is not None])
    # The legend stands beside it.
    figure.suptitle(title_of(title, characters=70))
    speed.set(xlabel="devices", ylabel="samples/s", xlim=(0, None), ylim=(0, None))
    # The smallest allocation counts as linear; one on faster devices may be above it.
    highest = max([1.0, *(point.efficiency_ratio for line in lines.values() for point in line)])
    efficiency.set(xlabel="devices", ylabel="% of linear", xlim=(0, None), ylim=(0, 105 * highest))
    for axes in (speed, efficiency):
        axes.xaxis.get_major_locator().set_params(integer=True)
    efficiency.axhline(100, color="grey", linewidth=0.8, linestyle=":", label="linear")
    figure.legend(
        loc="outside right upper", title="80 % interval shaded", ncols=columns, fontsize="small"
    )
    return figure


def _title(answers: Sequence[Estimate]) -> str:
    """The model, how it is trained, and on which machines."""
    first = answers[0]
    machines = list(dict.fromkeys(_shape(answer).machines for answer in answers))
    if len(machines) > _MOST_MACHINES:
        machines = [f"{len(machines)} machines"]
    batch = "as traced" if first.global_batch is None else f"{first.global_batch} a step"
    if first.batch_per_gpu is not None and len({answer.batch_per_gpu for answer in answers}) == 1:
        batch = f"{first.batch_per_gpu} per device"
    where = f"{first.model} on {', '.join(machines)}"
    return f"{where}: {first.precision}, batch {batch}, {first.strategy}"


def lines_of(rows: Sequence[SweepRow]) -> dict[str, list[_Point]]:
    """The points of each line by its label; rows without a rate have none.

    A line has the same machines and the same number of nodes, or of devices on each: whichever
    has fewer values, and so makes fewer lines.
    """
    rated = [(row, row.answer) for row in rows if row.answer and row.answer.samples_per_s]
    shapes = [_shape(answer) for _, answer in rated]
    by_nodes = len({shape.nodes for shape in shapes}) <= len({shape.per_node for shape in shapes})
    is_one_type = len({shape.machines for shape in shapes}) <= 1
    lines: dict[tuple[str, float], list[_Point]] = {}
    for (row, answer), shape in zip(rated, shapes, strict=True):
        key = shape.machines, shape.nodes if by_nodes else shape.per_node
        lines.setdefault(key, []).append(_point(row, answer))
    noun, of_each = ("node", "") if by_nodes else ("device", " a node")
    return {
        ("" if is_one_type else f"{machines}, ")
        + f"{count:g} {noun}{'' if count == 1 else 's'}{of_each}": lines[machines, count]
        for machines, count in sorted(lines)
    }


def _shape(answer: Estimate) -> _Shape:
    allocation = answer.allocation
    machines = sorted({group.machine or group.host or "" for group in allocation.groups})
    return _Shape("+".join(machines), allocation.nodes, answer.ranks / allocation.nodes)


def _point(row: SweepRow, answer: Estimate) -> _Point:
    samples = (answer.samples_per_s or 0.0) * answer.step_time_s
    return _Point(
        devices=answer.ranks,
        samples_per_s=answer.samples_per_s or 0.0,
        low_per_s=samples / answer.high_s,
        high_per_s=samples / answer.low_s,
        efficiency_ratio=row.efficiency_ratio or 0.0,
    )


# Ranks that differ, the first of each kind.
_MOST_RANKS = 4
# Spans shorter than this share of the step are drawn together with their neighbours.
_LEAST_RATIO = 1 / 1500
COLOURS = {
    "forward": "#4c9f70",
    "backward": "#3b6fb6",
    "update": "#8a5fb5",
    "network": "#d98032",
    "host": "#8a8f98",
    "copies": "#c9a227",
    "other": "#b0b5bd",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One span, or several of a kind too short to be told apart; `kind` is one of `COLOURS`."""

    start_s: float
    end_s: float
    kind: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """The bars of one lane of a rank, none over another."""

    label: str
    bars: tuple[Bar, ...]


def tracks_of(timeline: Timeline) -> list[Track]:
    """What is drawn of a timeline, top to bottom."""
    ranks = list(dict.fromkeys(timeline.ranks_like))[:_MOST_RANKS]
    by_lane: dict[tuple[int, str], list[Span]] = {}
    for span in timeline.spans:
        by_lane.setdefault((span.rank, span.lane), []).append(span)
    least_s = timeline.step_time_s * _LEAST_RATIO
    return [
        Track(label=f"rank {rank}, {lane}" if len(ranks) > 1 else lane, bars=bars)
        for rank in ranks
        for lane in LANES
        for track in flat_tracks(by_lane.get((rank, lane), ()))
        if (bars := tuple(_merged(track, least_s)))
    ]


def _merged(track: Sequence[Span], least_s: float) -> Iterator[Bar]:
    group: list[Span] = []
    for span in track:
        if group and not _is_drawn_with(span, group, least_s):
            yield _bar(group)
            group = []
        if span.duration_s > 0:
            group.append(span)
    if group:
        yield _bar(group)


def _is_drawn_with(span: Span, group: Sequence[Span], least_s: float) -> bool:
    first, last = group[0], group[-1]
    return (
        _kind(span) == _kind(first)
        and span.duration_s < least_s
        and last.end_s - first.start_s < least_s
        and span.start_s - last.end_s < least_s / 2
    )


def _bar(group: Sequence[Span]) -> Bar:
    first, last = group[0], group[-1]
    kind = _kind(first)
    if len(group) > 1:
        words = f"{len(group)} short operators, {kind}"
    else:
        words = first.name + (f" of {first.module}" if first.module else "")
    busy = format_seconds(sum(span.duration_s for span in group))
    words = f"{words}: {busy} from {format_seconds(first.start_s)}"
    return Bar(start_s=first.start_s, end_s=last.end_s, kind=kind, words=words)


def _kind(span: Span) -> str:
    if span.lane == "compute":
        return span.phase if span.phase in COLOURS else "other"
    return {"network": "network", "host": "host"}.get(span.lane, "copies")


def timeline_figure(timeline: Timeline) -> Any:
    """The picture of a timeline; raises StoreError if matplotlib is missing."""
    tracks = tracks_of(timeline)
    figure = empty_figure(width_inches=10.0, height_inches=1.2 + 0.45 * len(tracks))
    from matplotlib.patches import Patch  # there is matplotlib, or the line before had refused

    unit_s, unit = time_unit(timeline.step_time_s)
    axes = figure.subplots()
    for row, track in enumerate(tracks):
        axes.broken_barh(
            [(bar.start_s / unit_s, (bar.end_s - bar.start_s) / unit_s) for bar in track.bars],
            (row - 0.35, 0.7),
            facecolors=[COLOURS[bar.kind] for bar in track.bars],
        )
    axes.set(
        xlabel=unit,
        xlim=(0, timeline.step_time_s / unit_s),
        ylim=(len(tracks) - 0.5, -0.5),
    )
    axes.set_yticks(range(len(tracks)), [track.label for track in tracks])
    kinds = {bar.kind for track in tracks for bar in track.bars}
    shown = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in kinds]
    axes.legend(handles=shown, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure


# More than a picture has points across.
_MOST_PLACES = 1200


def memory_figure(report: MemoryReport, plans: Sequence[Planned] = ()) -> Any:
    """The picture of memory over a step, beside the curve of plans, if any; raises StoreError."""
    figure = empty_figure(width_inches=10.0, height_inches=9.0 if plans else 4.5)
    top, *below = figure.subplots(2 if plans else 1, squeeze=False)[:, 0]
    _draw_levels(top, report)
    for axes in below:
        _draw_plans(axes, report, plans)
    return figure


def _draw_levels(axes: Any, report: MemoryReport) -> None:
    shown = {kind: held for kind, held in report.curve.levels.items() if held.any()}
    drawn = _highest(report.curve.total)
    starts_s = report.times_s
    # Each level holds from the start of its op to its end.
    levels = [np.append(held[drawn], held[-1]) / GIB for held in shown.values()]
    colours = shades(len(shown), brightest=0.95)
    unit_s, unit = time_unit(float(starts_s[-1]))
    drawn_at = starts_s[np.append(drawn, -1)] / unit_s
    axes.stackplot(drawn_at, *levels, labels=list(shown), colors=colours, step="post", linewidth=0)
    peak = report.curve.peak_at
    axes.plot(
        starts_s[peak] / unit_s,
        report.curve.peak_bytes / GIB,
        marker="v",
        color="black",
        clip_on=False,
    )
    if report.curve.peak_bytes > 0.5 * report.device_bytes:
        axes.axhline(report.device_bytes / GIB, color="red", linewidth=1, label="device memory")
    title = f"{report.answer.model} on {report.answer.allocation}: peak in {report.peak_op}"
    steps = report.answer.accumulation_steps
    axes.set(
        xlabel=unit if steps == 1 else f"{unit} of the step, in the last of {steps} micro-batches",
        ylabel="GiB",
        xlim=(starts_s[0] / unit_s, starts_s[-1] / unit_s),
        ylim=(0, None),
    )
    axes.set_title(title_of(title, characters=70))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _highest(total: NDArray[np.int64]) -> NDArray[np.intp]:
    """The places that are drawn of many: of each stretch the one that holds most."""
    stretches = np.array_split(np.arange(len(total)), min(len(total), _MOST_PLACES))
    return np.array([places[total[places].argmax()] for places in stretches])


def _draw_plans(axes: Any, report: MemoryReport, plans: Sequence[Planned]) -> None:
    """The least peak found within each time: a step down wherever a plan is worth its time."""
    unit_s, unit = time_unit(max(plan.played.step_s for plan in plans))
    steps = [plan.played.step_s / unit_s for plan in plans]
    peaks = [plan.played.peak_bytes / GIB for plan in plans]
    axes.step(steps, peaks, where="post", color="black", linewidth=1)
    axes.plot(steps, peaks, "o", color="black", label="a plan")
    plain = plans[0].played
    plain_step = plain.vanilla_s / unit_s
    plain_gib = plain.vanilla_bytes / GIB
    axes.plot(plain_step, plain_gib, "ko", fillstyle="none", label="without a plan")
    if min(peaks) < report.device_bytes / GIB < 2 * max(peaks):
        axes.axhline(report.device_bytes / GIB, color="red", linewidth=1, label="device memory")
    axes.set(
        xlabel=f"{unit} per step",
        ylabel="GiB at the peak",
        ylim=(0, None),
        title="Peak against time: tensors swapped to the host or computed again",
    )
    ratios = (lambda x: 100 * (x / plain_step - 1), lambda ratio: plain_step * (1 + ratio / 100))
    axes.secondary_xaxis("top", functions=ratios).set_xlabel("% longer than without a plan")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def draw_offers(choice: Choice, path: Path) -> None:
    """Plot every offer to a .png or .svg file, those that no other beats joined and named.

    Raises StoreError if matplotlib is missing or the file cannot be written.
    """
    figure = empty_figure(width_inches=7.0, height_inches=4.5)
    axes = figure.subplots()
    hours = [offer.duration_s / 3600 for offer in choice.offers]
    axes.scatter(hours, [offer.usd for offer in choice.offers], s=12, color="0.7")
    front = [(offer.duration_s / 3600, offer.usd) for offer in choice.front]
    if front:
        axes.plot(*zip(*front, strict=True), marker="o")
    for number, (offer, at) in enumerate(zip(choice.front, front, strict=True)):
        axes.errorbar(
            *at,
            xerr=[[at[0] - offer.low_s / 3600], [offer.high_s / 3600 - at[0]]],
            yerr=[[at[1] - offer.low_usd], [offer.high_usd - at[1]]],
            color="0.6",
            zorder=0,
        )
        # Neighbours' names on either side of the line.
        beside = (4, 4 if number % 2 == 0 else -12)
        axes.annotate(offer.allocation, at, fontsize=8, xytext=beside, textcoords="offset points")
    axes.set(xlabel="time (h)", ylabel="cost (USD)", xscale="log", yscale="log")
    save_figure(figure, path)


def draw_replays(replays: Mapping[str, Sequence[Ran]], path: Path) -> None:
    """Write a picture of the replays of the same jobs under several policies, as .png or .svg.

    Raises StoreError if matplotlib is missing or the file cannot be written.
    """
    figure = empty_figure(width_inches=10.0, height_inches=4.0)
    over_time, completion = figure.subplots(1, 2)
    for name, ran in replays.items():
        held = held_over_time(ran)
        over_time.step(
            np.array(list(held)) / 3600, list(held.values()), where="post", label=name, linewidth=1
        )
        jct = np.sort([job.completion_s for job in ran]) / 3600
        completion.step(jct, 100 * np.arange(1, len(jct) + 1) / len(jct), where="post", linewidth=1)
    over_time.set(xlabel="hours", ylabel="devices held", xlim=(0, None), ylim=(0, None))
    completion.set(xlabel="completion time (hours)", ylabel="% of jobs", ylim=(0, 100))
    completion.set_xscale("log")
    figure.legend(loc="outside right upper")
    save_figure(figure, path)
