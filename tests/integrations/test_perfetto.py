"""The trace file obeys the rules by which Perfetto draws it."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as some

from estimator.integrations.viewers import trace_events, write_trace
from estimator.timeline.simulator.tasks import LANES, Span, Timeline
from tests.integrations.trace_flaws import trace_flaws

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
