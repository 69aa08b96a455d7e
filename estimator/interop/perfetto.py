"""Write a timeline as the Chrome trace-event JSON that Perfetto and chrome://tracing open.

Format: "Trace Event Format", Google, 2016: complete events (``ph: X``) with ``ts`` and ``dur`` in
microseconds; a process is a rank, a thread is one of its lanes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from estimator.machines.files import write_text_atomically
from estimator.timeline.spans import LANES, Span, Timeline, flat_tracks, whole_ns

# Top to bottom as shown; a lane that runs several things at once (gloo's two slots) gets as many
# tracks, numbered within its block.
TRACKS_PER_LANE = 100

Event = dict[str, Any]


def trace_events(timeline: Timeline) -> list[Event]:
    """The events of every rank, track by track, in order of time.

    >>> span = Span(name="mm", rank=0, lane="compute", start_s=0.0, duration_s=2e-3)
    >>> step = Timeline(step_time_s=2e-3, spans=(span,), ranks_like=(0,))
    >>> [(event["name"], event["dur"]) for event in trace_events(step) if event["ph"] == "X"]
    [('mm', 2000.0)]
    """
    by_rank: defaultdict[int, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        by_rank[span.rank].append(span)
    events: list[Event] = []
    for rank, like in enumerate(timeline.ranks_like):
        events.extend(_rank_events(rank, by_rank[like]))
    return events


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the timeline to `path`, whole or not at all; raises StoreError."""
    content = {"traceEvents": trace_events(timeline), "displayTimeUnit": "ms"}
    write_text_atomically(path, json.dumps(content, separators=(",", ":"), allow_nan=False))


def trace_flaws(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """What Perfetto would drop or misplace, in words; empty for a sound trace.

    On each track times must not go back, and an event that starts within another must end in it.
    """
    flaws: list[str] = []
    open_ends: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    last_start: dict[tuple[int, int], int] = {}
    for event in events:
        if event["ph"] != "X":
            continue
        track = (event["pid"], event["tid"])
        start_ns, duration_ns = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
        if start_ns < 0 or duration_ns < 0:
            flaws.append(f"{event['name']} on {track} has a negative time")
        if start_ns < last_start.get(track, 0):
            flaws.append(f"{event['name']} on {track} starts before the event listed before it")
        last_start[track] = start_ns
        ends = open_ends[track]
        while ends and ends[-1] <= start_ns:
            ends.pop()
        if ends and start_ns + duration_ns > ends[-1]:
            flaws.append(f"{event['name']} on {track} outlasts the event it starts in")
        ends.append(start_ns + duration_ns)
    return flaws


def _rank_events(rank: int, spans: Iterable[Span]) -> Iterator[Event]:
    yield _name_event("process_name", rank, 0, f"rank {rank}")
    by_lane: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_lane[span.lane].append(span)
    for block, lane in enumerate(LANES):
        for slot, track in enumerate(flat_tracks(by_lane[lane])):
            thread = block * TRACKS_PER_LANE + slot
            yield _name_event("thread_name", rank, thread, lane + (f" {slot + 1}" if slot else ""))
            sort_index = {"sort_index": thread}
            yield _meta_event("thread_sort_index", rank, thread, sort_index)
            for span in track:
                yield _span_event(rank, thread, span)


def _span_event(rank: int, thread: int, span: Span) -> Event:
    start_ns, end_ns = whole_ns(span.start_s), whole_ns(span.end_s)
    details = {"module": span.module, "phase": span.phase}
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.lane,
        "pid": rank,
        "tid": thread,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": {key: value for key, value in details.items() if value},
    }


def _name_event(kind: str, rank: int, thread: int, name: str) -> Event:
    return _meta_event(kind, rank, thread, {"name": name})


def _meta_event(kind: str, rank: int, thread: int, arguments: dict[str, Any]) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": arguments}
