"""Write predicted memory as the viewer of `torch.cuda.memory._snapshot` opens it, without a GPU.

The viewer (pytorch.org/memory_viz) reads a pickle of plain values: `device_traces` lists, for each
device, what was allocated and freed in order (torch/cuda/_memory_viz.py, torch 2.13).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from estimator.advise.memory import MemoryReport
from estimator.graph.memory_curve import LiveTensor, MemoryKind
from estimator.machines.files import write_bytes_atomically


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
