"""Machines, a model and distinct allocations whose estimates are timed."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from estimator import AllocationColumns, MachineProfile, OpGraph
from estimator.machines.profile import CollectiveCost
from tests.synthetic import CHOSEN, Machine, perceptron

DEVICES = 8
MOST_NODES = 200
# About 30 buckets of a model of 60 layers, 417 ops and 62 MB.
LAYERS, WIDTH, STRATEGY = 60, 512, "ddp:bucket=2MiB"
BATCHES = (4, 8, 16, 32)
Integers = NDArray[np.int32]


def model(layers: int = LAYERS) -> OpGraph:
    """A perceptron: two ops a layer forward, five backward."""
    return perceptron([WIDTH] * (layers + 1), batch=8)


class Machines:
    """A folder of machines m0, m1 … that differ in speed and network, each with measured groups."""

    def __init__(self, count: int = 16) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="speed-")
        os.environ["ESTIMATOR_HOME"] = self._folder.name
        self.names = [f"m{number}" for number in range(count)]
        for number, name in enumerate(self.names):
            path = Path(self._folder.name) / "machines" / f"{name}.json"
            _machine(name, 1 + number / 4).save(path)

    def texts(self, count: int, *, groups: int, machines: int = 4) -> list[str]:
        """Distinct allocations of some groups each, of the first few machines."""
        found: dict[str, None] = {}
        while len(found) < count:
            parts = (
                f"{random.randint(1, MOST_NODES)}x{random.randint(1, DEVICES)}:"
                f"{random.choice(self.names[:machines])}"
                for _ in range(groups)
            )
            found["+".join(parts)] = None
        return list(found)


def _machine(name: str, slower: float) -> MachineProfile:
    rate = 2.5e9 / slower
    shape = Machine(
        devices=DEVICES,
        flops_per_s=5e11 / slower,
        memory_bytes_per_s=5e10 / slower,
        network_bytes_per_s=rate,
    )
    profile = shape.profile()
    measured = tuple(
        CollectiveCost(
            op="all_reduce",
            backend="gloo",
            group_size=nodes * 4,
            nodes=nodes,
            points=tuple((4.0**k, 1e-4 * nodes + 2.2 * 4.0**k / rate) for k in range(5, 14)),
            latency_s=1e-4 * nodes,
            bandwidth_bytes_per_s=rate / 2.2,
            provenance=CHOSEN,
        )
        for nodes in (2, 4, 8)
    )
    return replace(profile, name=name, collectives=profile.collectives + measured)


def columns(rows: int, first: int = 0) -> tuple[AllocationColumns, Integers]:
    """Distinct uneven, mixed allocations of two to four groups, and a batch for each.

    The first two groups spell the row's number, so that no two rows are alike.
    """
    generator = np.random.default_rng(first)
    shape = (rows, 4)
    machine = generator.integers(0, 4, shape, dtype=np.int32)
    nodes = generator.integers(1, MOST_NODES + 1, shape, dtype=np.int32)
    devices = generator.integers(1, DEVICES + 1, shape, dtype=np.int32)
    code = np.arange(first, first + rows)
    for group in (0, 1):
        code, machine[:, group] = np.divmod(code, 4)
        code, devices[:, group] = np.divmod(code, DEVICES)
        code, nodes[:, group] = np.divmod(code, MOST_NODES)
    devices[:, :2] += 1
    nodes[:, :2] += 1
    groups = generator.integers(2, 5, rows)
    machine[np.arange(4) >= groups[:, None]] = -1
    found = AllocationColumns(
        machines=tuple(f"m{number}" for number in range(4)),
        machine=machine,
        nodes=nodes,
        devices=devices,
    )
    return found, generator.choice(np.array(BATCHES, dtype=np.int32), rows)


def texts(rows: int, at_once: int = 1 << 14) -> Iterator[str]:
    """The same allocations as texts, made as they are asked for."""
    for first in range(0, rows, at_once):
        part, _ = columns(min(at_once, rows - first), first)
        groups = zip(*(c.tolist() for c in (part.machine, part.nodes, part.devices)), strict=True)
        for machine, nodes, devices in groups:
            yield "+".join(
                f"{n}x{d}:m{s}" for s, n, d in zip(machine, nodes, devices, strict=True) if s >= 0
            )
