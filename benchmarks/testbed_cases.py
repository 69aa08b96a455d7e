"""The testbeds and the cases that `testbed_accuracy` predicts and then measures on them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from testbed.description import TestbedDescription, TestbedNode

from estimator.placement.allocation import Allocation
from estimator.units import parse_bandwidth_bytes_per_s
from estimator.workload.layouts import Layout

TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
COMPUTING = ("gpt2", "resnet", "llama", "convnext", "t5", "lstm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to train on one testbed; a paced model unless its name is in `COMPUTING`."""

    bed: str
    model: str
    allocation: str
    strategy: str = "ddp"
    accumulation_steps: int = 1
    batch: int | None = None
    layout: str | None = None
    # What the products of a rank take a step, of models of `layout_paces`.
    rank_s: float | None = None
    title: str = ""

    @property
    def is_paced(self) -> bool:
        return self.model not in COMPUTING

    @property
    def method(self) -> str:
        """The group of cases that this one is judged in."""
        if not self.is_paced:
            return "computing"
        if self.layout and Layout.parse(self.layout).pp > 1:
            return "paced pipelines"
        if self.layout:
            return "paced layouts"
        return "paced fsdp" if self.strategy.startswith("fsdp") else "paced"

    @property
    def key(self) -> str:
        parts = [self.bed, self.model, self.allocation, self.layout or self.strategy]
        parts += [self.strategy] if self.layout and self.strategy.startswith("fsdp") else []
        parts += [f"a{self.accumulation_steps}"] if self.accumulation_steps > 1 else []
        return " ".join([*parts, *([f"b{self.batch}"] if self.batch else [])])

    def fields(self, machine: str) -> dict[str, Any]:
        """What an accuracy case says of it, before anything was predicted or measured."""
        return {
            "id": self.key,
            "source": "testbed",
            "bed": self.bed,
            "title": self.title,
            "model": self.model,
            "machine": machine,
            "allocation": self.allocation,
            "ranks": self.ranks,
            "nodes": self.nodes,
            "strategy": self.strategy,
            "layout": self.layout,
            "precision": "fp32",
            "method": self.method,
            "k": 0,
            "draw": 0,
        }

    @property
    def ranks(self) -> int:
        return Allocation.parse(self.allocation).ranks

    @property
    def nodes(self) -> int:
        return len({group.host for group in Allocation.parse(self.allocation).groups})


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """A job, and another that trains on the same nodes meanwhile."""

    job: Case
    other: Case

    @property
    def bed(self) -> str:
        return self.job.bed

    @property
    def key(self) -> str:
        return f"{self.job.key} beside {self.other.model} {self.other.allocation}"


def beds() -> dict[str, TestbedDescription]:
    """The testbeds by name; the sum of uplinks stays below 8 Gbit/s but for `fast`.

    Nodes that are not alike are listed: devices, uplink, and how much slower they compute.
    """
    return {
        name: TestbedDescription.uniform(**about) if isinstance(about, dict) else _unlike(about)
        for name, about in TABLE["beds"].items()
    }


def _unlike(nodes: Sequence[Sequence[Any]]) -> TestbedDescription:
    return TestbedDescription(
        nodes=tuple(
            TestbedNode(
                name=f"n{number}",
                devices=devices,
                uplink_bytes_per_s=parse_bandwidth_bytes_per_s(uplink),
                slowdown_ratio=slower[0] if slower else 1.0,
            )
            for number, (devices, uplink, *slower) in enumerate(nodes)
        )
    )


def cases() -> list[Case]:
    """All cases, those of one bed together.

    Layouts with two stages and dp ranks leave schedules out. Under `gpipe` and `interleaved` torch
    2.13's DDP stops in the second step (reducer.cpp, "rebuilt parameter indices size is not same as
    original model parameters size"). Under zero-bubble ones torch's DDP reduces nothing of backward
    passes in two parts (pytorch/pytorch, issue 144530), of which that for weights finds none that
    ranks divide. `rank_s` is at least 0.2 s a rank: the more share a core, the longer each leaves
    it alone.
    """
    return _expanded(TABLE["cases"])


def _expanded(entries: Iterable[Mapping[str, Any]]) -> list[Case]:
    """A case for each choice of the fields of an entry that are lists."""
    found = []
    for entry in entries:
        choices = (each if isinstance(each, list) else [each] for each in entry.values())
        for values in product(*choices):
            fields = dict(zip(entry, values, strict=True))
            # Paced ranks have no core to copy reduced buckets back on.
            usual = "ddp" if fields["model"] in COMPUTING else "ddp:view"
            found.append(Case(**{"strategy": usual, **fields}))
    return found


# Batches to be split over unlike nodes; the batch of a case is that of the even split.
SPLITS = tuple(_expanded(TABLE["splits"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Rates of the links of four workers and two servers, between which strategies are compared."""

    bed: str = "grid"
    workers: str
    servers: str
    method: str = "paced"

    @property
    def key(self) -> str:
        return f"workers {self.workers}, servers {self.servers}"


# What reduces gradients and keeps parameters, on a grid of workers' and servers' links.
STRATEGIES = (
    "ddp:view",
    "ddp:bucket=2000000,view",
    "zero1:bucket=2000000,view",
    "ps:1",
    "ps:1,bucket=2000000",
    "ps:2,bucket=2000000",
)
WORKER_RATES = ("200 Mbit/s", "300 Mbit/s", "400 Mbit/s", "600 Mbit/s", "800 Mbit/s")
SERVER_RATES = ("200 Mbit/s", "400 Mbit/s", "800 Mbit/s", "1600 Mbit/s", "2400 Mbit/s")
CELLS = tuple(Cell(workers=w, servers=s) for w in WORKER_RATES for s in SERVER_RATES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An order of the hosts of two oversubscribed racks: ours, or the number of a random one."""

    bed: str = "oversubscribed"
    how: str
    method: str = "paced"

    @property
    def key(self) -> str:
        return f"{self.bed} {self.how}"


OURS, PAIRS_ALONE = "ours", "ours, from the pairs alone"
ORDERS = tuple(Order(how=how) for how in (OURS, PAIRS_ALONE, *(f"random {n}" for n in range(4))))


# One link each way in common, both links, and of models whose steps are unlike.
NEIGHBOURS = tuple(
    Together(job=job, other=other) for job, other in map(_expanded, TABLE["neighbours"])
)
# Caps of DDP's buckets, whose exposed communication is judged.
OVERLAPS = tuple(_expanded(TABLE["overlaps"]))
