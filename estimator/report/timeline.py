"""Draw the timeline of a step: what each lane of a rank does and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from estimator.report.pictures import empty_figure
from estimator.timeline.spans import LANES, Span, Timeline, flat_tracks
from estimator.units import format_seconds, time_unit

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
