"""Check a trace as Perfetto reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any


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
