"""Write timelines and predicted memory as trace viewers and PyTorch's memory viewer open them.

Format: "Trace Event Format", Google, 2016: complete events (``ph: X``) with ``ts`` and ``dur`` in
microseconds; a process is a rank, a thread is one of its lanes.

The viewer (pytorch.org/memory_viz) reads a pickle of plain values: `device_traces` lists, for each
device, what was allocated and freed in order (torch/cuda/_memory_viz.py, torch 2.13).
"""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from estimator.advise.memory import MemoryReport
from estimator.files import write_bytes_atomically, write_text_atomically
from estimator.graph.memory.peak import LiveTensor, MemoryKind
from estimator.timeline.simulator.tasks import LANES, Span, Timeline, flat_tracks, whole_ns

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


def _rank_events(rank: int, spans: Iterable[Span]) -> Iterator[Event]:
    yield _meta_event("process_name", rank, 0, name=f"rank {rank}")
    by_lane: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_lane[span.lane].append(span)
    for block, lane in enumerate(LANES):
        for slot, track in enumerate(flat_tracks(by_lane[lane])):
            thread = block * TRACKS_PER_LANE + slot
            name = lane + (f" {slot + 1}" if slot else "")
            yield _meta_event("thread_name", rank, thread, name=name)
            yield _meta_event("thread_sort_index", rank, thread, sort_index=thread)
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


def _meta_event(kind: str, rank: int, thread: int, **arguments: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": arguments}


class _Block(NamedTuple):
    """Bytes held from the begin of op `born` (-1: from before the step) to the end of `dies`."""

    size_bytes: int
    born: int
    dies: int
    name: str
    kind: MemoryKind


def write_snapshot(report: MemoryReport, path: Path) -> None:
    """Write `memory_snapshot` as a pickle; raises StoreError where that fails."""
    write_bytes_atomically(path, pickle.dumps(memory_snapshot(report)))


def memory_snapshot(report: MemoryReport) -> dict[str, Any]:
    """The step of one micro-batch and its update as a snapshot of one device.

    Held together are at every op the bytes of the report's curve. Every block has an address of its
    own: where an allocator would put it is not predicted.
    """
    places = len(report.curve.total)
    starts_s = report.times_s
    blocks = [block for block in _blocks(report) if block.size_bytes]
    address = np.cumsum([0, *(block.size_bytes for block in blocks)]).tolist()
    events: list[tuple[int, int, dict[str, Any]]] = []
    for block, at in zip(blocks, address, strict=False):
        entry = {
            "addr": at,
            "size": block.size_bytes,
            "stream": 0,
            "frames": [{"name": block.name, "filename": block.kind, "line": 0}],
        }
        begin = max(block.born, 0)
        alloc = {"action": "alloc", "time_us": round(1e6 * starts_s[begin])}
        events.append((begin, 1, entry | alloc))
        if block.dies < places - 1:
            # What dies with an op is free before the next one allocates.
            time_us = round(1e6 * starts_s[block.dies + 1])
            events += [
                (block.dies + 1, 0, entry | {"action": action, "time_us": time_us})
                for action in ("free_requested", "free_completed")
            ]
    events.sort(key=lambda event: event[:2])
    return {"segments": [], "device_traces": [[entry for _, _, entry in events]]}


def _blocks(report: MemoryReport) -> Iterator[_Block]:
    """Tensors of each kind where they are known, and one block at a time for the rest of it."""
    places = len(report.curve.total)
    for kind, levels in report.curve.levels.items():
        own = [tensor for tensor in report.every_tensor if tensor.kind == kind]
        rest = levels - _held(own, places)
        if (rest < 0).any():
            # A strategy holds only a share of them.
            own, rest = [], levels
        for tensor in own:
            name = " ".join(word for word in (tensor.module, tensor.op) if word)
            yield _Block(tensor.size_bytes, tensor.born, tensor.dies, name, kind)
        bounds = [0, *(np.flatnonzero(np.diff(rest)) + 1).tolist(), places]
        for first, end in pairwise(bounds):
            yield _Block(int(rest[first]), first, end - 1, kind, kind)


def _held(tensors: list[LiveTensor], places: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    changes = np.zeros(places + 1, dtype=np.int64)
    for tensor in tensors:
        changes[max(tensor.born, 0)] += tensor.size_bytes
        changes[min(tensor.dies, places - 1) + 1] -= tensor.size_bytes
    return np.cumsum(changes)[:places]
