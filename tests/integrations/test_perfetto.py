"""The trace file obeys the rules by which Perfetto draws it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as some

from estimator.integrations.viewers import trace_events, write_trace
from estimator.timeline.simulator.tasks import LANES, Span, Timeline


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


spans = some.builds(
    Span,
    name=some.just("op"),
    rank=some.integers(0, 1),
    lane=some.sampled_from(LANES),
    start_s=some.floats(0, 1),
    duration_s=some.floats(0, 1),
)


def complete(events):
    return [event for event in events if event["ph"] == "X"]


@given(some.lists(spans, max_size=30))
def test_any_spans_become_a_sound_trace(listed):
    events = trace_events(Timeline(2.0, tuple(listed), ranks_like=(0, 1)))
    assert trace_flaws(events) == []
    assert len(complete(events)) == len(listed)


def test_two_all_reduces_at_once_stand_on_two_tracks_of_the_network_lane():
    listed = (
        Span(name="bucket 0", rank=0, lane="network", start_s=0.0, duration_s=3.0),
        Span(name="bucket 1", rank=0, lane="network", start_s=1.0, duration_s=3.0),
    )
    events = trace_events(Timeline(4.0, listed, ranks_like=(0,)))
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["network", "network 2"]


def test_a_rank_like_another_shows_the_others_spans():
    step = Timeline(
        1.0,
        (Span(name="mm", rank=0, lane="compute", start_s=0.25, duration_s=0.5),),
        ranks_like=(0, 0),
    )
    shown = [(event["pid"], event["ts"], event["dur"]) for event in complete(trace_events(step))]
    assert shown == [(0, 250_000.0, 500_000.0), (1, 250_000.0, 500_000.0)]


def test_the_checker_finds_time_going_back_and_events_that_outlast_their_parent():
    def event(start, duration):
        return {"ph": "X", "name": "op", "pid": 0, "tid": 0, "ts": start, "dur": duration}

    assert trace_flaws([event(0.0, 5.0), event(1.0, 4.0), event(5.0, 1.0)]) == []
    assert "outlasts" in trace_flaws([event(0.0, 5.0), event(1.0, 5.0)])[0]
    assert "before" in trace_flaws([event(3.0, 1.0), event(1.0, 1.0)])[0]
    assert "negative" in trace_flaws([event(0.0, -1.0)])[0]


def test_the_file_is_json_with_microseconds(tmp_path: Path):
    write_trace(
        Timeline(
            1.0, (Span(name="mm", rank=0, lane="compute", start_s=0.0, duration_s=1.5e-6),), (0,)
        ),
        tmp_path / "t.json",
    )
    content = json.loads((tmp_path / "t.json").read_text())
    assert complete(content["traceEvents"])[0]["dur"] == 1.5
