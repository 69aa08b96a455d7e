"""The testbeds and the cases that `testbed_accuracy` predicts and then measures on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from testbed.description import TestbedDescription, TestbedNode

from estimator.placement.allocation import Allocation
from estimator.units import parse_bandwidth_bytes_per_s
from estimator.workload.layouts import Layout

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


# Testbeds of 2 × 2 ranks that shard a model: the rate of their links, and the model.
_SHARDED = {
    "shard200": ("200 Mbit/s", "eight_even"),
    "shard500": ("500 Mbit/s", "language_model"),
    "shard1000": ("1 Gbit/s", "few_big"),
    "shard2000": ("2 Gbit/s", "transformer"),
}


def _node(name: str, uplink: str, devices: int = 2, **options: Any) -> TestbedNode:
    rate = parse_bandwidth_bytes_per_s(uplink)
    return TestbedNode(name=name, devices=devices, uplink_bytes_per_s=rate, **options)


def beds() -> dict[str, TestbedDescription]:
    """The testbeds by name; the sum of uplinks stays below 8 Gbit/s but for `fast`."""
    uniform = TestbedDescription.uniform
    even = uniform(nodes=4, devices=2, uplink="1 Gbit/s")
    return {
        "even": even,
        "uneven": TestbedDescription(
            nodes=(
                _node("n0", "2 Gbit/s", devices=3),
                _node("n1", "2 Gbit/s"),
                _node("n2", "500 Mbit/s"),
                _node("n3", "300 Mbit/s"),
            ),
            racks=(),
        ),
        "racks": uniform(nodes=4, devices=2, uplink="1 Gbit/s", racks=2, rack_uplink="600 Mbit/s"),
        "large": uniform(nodes=8, devices=2, uplink="800 Mbit/s"),
        "slow": replace(
            even,
            nodes=tuple(
                replace(node, slowdown_ratio=1.5) if node.name == "n3" else node
                for node in even.nodes
            ),
        ),
        "thin": uniform(nodes=2, devices=2, uplink="100 Mbit/s"),
        "pair": uniform(nodes=2, devices=1, uplink="1 Gbit/s"),
        "pair2": uniform(nodes=2, devices=1, uplink="2 Gbit/s"),
        "fast": uniform(nodes=2, devices=1, uplink="10 Gbit/s"),
        **{name: uniform(nodes=2, devices=2, uplink=rate) for name, (rate, _) in _SHARDED.items()},
        **_mixed_beds(),
        "eight200": uniform(nodes=4, devices=2, uplink="200 Mbit/s"),
        "sixteen200": uniform(nodes=8, devices=2, uplink="200 Mbit/s"),
        "grid": uniform(nodes=6, devices=1, uplink="400 Mbit/s"),
        "oversubscribed": uniform(
            nodes=8, devices=1, uplink="500 Mbit/s", racks=2, rack_uplink="500 Mbit/s"
        ),
    }


def _mixed_beds() -> dict[str, TestbedDescription]:
    """Testbeds whose nodes compute at unlike speeds."""

    def bed(uplink: str, *slowdowns: float, devices: int = 2) -> TestbedDescription:
        nodes = (
            _node(f"n{number}", uplink, devices=devices, slowdown_ratio=slowdown)
            for number, slowdown in enumerate(slowdowns)
        )
        return TestbedDescription(nodes=tuple(nodes))

    return {
        "mixed": bed("1 Gbit/s", 1.0, 1.0, 1.5, 3.0),
        "mixed_thin": bed("300 Mbit/s", 1.0, 2.0),
        "mixed_wide": TestbedDescription(
            nodes=(
                _node("n0", "2 Gbit/s", devices=3),
                _node("n1", "2 Gbit/s", slowdown_ratio=1.3),
                _node("n2", "2 Gbit/s", slowdown_ratio=2.0),
            )
        ),
        "mixed_pair": bed("1 Gbit/s", 1.0, 2.0, devices=1),
    }


def _case(bed: str, model: str, allocation: str, *rest: Any, **options: Any) -> Case:
    # Paced ranks have no core to copy reduced buckets back on.
    strategy = rest[0] if rest else "ddp" if model in COMPUTING else "ddp:view"
    return Case(bed=bed, model=model, allocation=allocation, strategy=strategy, **options)


def cases() -> list[Case]:
    """All cases, those of one bed together."""
    return [
        # 2 in a node against 3 over 2 nodes, and more of both.
        _case("even", "few_big", "n0[0,1]", title="2 in a node"),
        _case("even", "few_big", "n0[0,1]+n1[0]", title="3 over 2 nodes"),
        _case("even", "few_big", "n0[0,1]+n1[0,1]+n2[0,1]+n3[0,1]"),
        _case("even", "many_small", "n0[0]+n1[0]+n2[0]", "ddp:bucket=2MiB,view"),
        _case("even", "many_small", "n0[0,1]+n1[0,1]+n2[0,1]+n3[0,1]"),
        _case("even", "transformer", "n0[0,1]+n1[0,1]", "ddp:bucket=5MiB,view"),
        _case("even", "few_big", "n0[0]+n1[0]+n2[0]+n3[0]", accumulation_steps=2),
        _case("uneven", "few_big", "n0[0,1,2]+n1[0]", title="uneven, fast links"),
        _case("uneven", "few_big", "n0[0,1]+n2[0,1]"),
        _case("uneven", "many_small", "n0[0,1,2]+n1[0,1]+n2[0]+n3[0]"),
        _case("uneven", "big_first", "n0[0,1,2]+n1[0,1]"),
        _case("uneven", "big_first", "n1[0,1]+n3[0,1]", accumulation_steps=2),
        _case("racks", "few_big", "n0[0,1]+n1[0,1]", title="4 in one rack"),
        _case("racks", "few_big", "n0[0,1]+n2[0,1]", title="4 over two racks"),
        _case("racks", "few_big", "n0[0]+n2[0]+n1[0]+n3[0]", title="zigzag between racks"),
        _case("racks", "few_big", "n0[0]+n1[0]+n2[0]+n3[0]", title="in order of racks"),
        _case("racks", "many_small", "n0[0,1]+n1[0,1]+n2[0,1]+n3[0,1]", "ddp:bucket=2MiB,view"),
        _case("large", "few_big", "+".join(f"n{i}[0,1]" for i in range(8)), "ddp:bucket=6MiB,view"),
        _case("large", "few_big", "+".join(f"n{i}[0]" for i in range(8))),
        _case(
            "large", "many_small", "+".join(f"n{i}[0]" for i in range(5)), "ddp:bucket=4MiB,view"
        ),
        _case("slow", "many_small", "n0[0,1]+n3[0,1]", title="with the slow node"),
        _case("slow", "many_small", "n0[0,1]+n1[0,1]", title="without the slow node"),
        _case("slow", "few_big", "n0[0]+n1[0]+n2[0]+n3[0]"),
        _case("thin", "many_small", "n0[0]+n1[0]"),
        _case("thin", "many_small", "n0[0,1]+n1[0]", accumulation_steps=4),
        _case("pair", "gpt2", "n0[0]+n1[0]"),
        _case("pair", "resnet", "n0[0]+n1[0]"),
        _case("pair", "t5", "n0[0]+n1[0]", "ddp:bucket=5MiB"),
        _case("pair2", "llama", "n0[0]+n1[0]"),
        _case("pair2", "convnext", "n0[0]+n1[0]", "ddp:bucket=2MiB"),
        _case("pair2", "lstm", "n0[0]+n1[0]", accumulation_steps=2),
        _case("fast", "gpt2", "n0[0]+n1[0]"),
        _case("fast", "resnet", "n0[0]+n1[0]"),
        _case("fast", "few_big", "n0[0]+n1[0]"),
        *_sharded_cases(),
        *_pipelined_cases(),
        *_staged_cases(),
        *_divided_cases(),
    ]


def _sharded_cases() -> Iterator[Case]:
    """FSDP over all ranks, and HSDP with its groups inside nodes and across them."""
    inside, across = "n0[0,1]+n1[0,1]", "n0[0]+n1[0]+n0[1]+n1[1]"
    for bed, (_, model) in _SHARDED.items():
        for micro_batches in (1, 2):
            of = {"accumulation_steps": micro_batches}
            yield _case(bed, model, inside, "fsdp", **of)
            yield _case(bed, model, inside, "fsdp:shard=2", **of, title="groups in nodes")
    for bed in ("shard500", "shard2000"):
        _, model = _SHARDED[bed]
        yield _case(bed, model, across, "fsdp:shard=2", title="groups across nodes")


# Schedules of pipelines with the least micro-batches for each rank that fill them.
_SCHEDULES = ("gpipe", "1f1b", "interleaved:2", "zb", "zbv", "dualpipev")
_PIPES = {
    2: ("n0[0]+n1[0]", (4, 8)),
    4: ("n0[0]+n1[0]+n2[0]+n3[0]", (8, 16)),
    8: ("n0[0,1]+n1[0,1]+n2[0,1]+n3[0,1]", (16,)),
}


def _pipelined_cases() -> Iterator[Case]:
    """Stages on unlike numbers of nodes, under each schedule."""
    for bed in ("even", "thin"):
        for ranks, (allocation, counts) in _PIPES.items():
            if bed == "thin" and ranks > 2:
                continue
            for schedule in _SCHEDULES:
                for count in counts:
                    yield Case(
                        bed=bed,
                        model="wide",
                        allocation=allocation,
                        layout=f"pp={ranks},schedule={schedule},dp=1",
                        accumulation_steps=count,
                    )


def _staged_cases() -> Iterator[Case]:
    """Stages whose layers tp ranks of a node divide and, with two stages, dp ranks repeat.

    Not `gpipe` and `interleaved` with dp ranks: there torch 2.13's DDP stops in the second step
    (reducer.cpp, "rebuilt parameter indices size is not same as original model parameters size").
    Nor zero-bubble ones: torch's DDP reduces nothing of backward passes in two parts
    (pytorch/pytorch, issue 144530), of which that for weights finds none that ranks divide.
    """
    for bed in ("even", "eight200"):
        for layout, schedules, micro_batches in (
            ("tp=2,pp=2", ("1f1b",), (4, 8)),
            ("tp=2,pp=4", ("gpipe", "1f1b", "zb"), (4, 8)),
        ):
            for schedule, count in product(schedules, micro_batches):
                yield Case(
                    bed=bed,
                    model="deep",
                    allocation="n0[0,1]+n1[0,1]+n2[0,1]+n3[0,1]",
                    strategy="ddp:view",
                    layout=f"{layout},schedule={schedule},dp=*",
                    accumulation_steps=count,
                    rank_s=2.0,
                )


# Layouts that divide layers, by allocation, and those of them that FSDP shards too.
_LAYOUTS = {
    "n0[0]+n1[0]": ("tp=2", "tp=2,sp", "cp=2", "cp=2,ring", "ep=2"),
    "n0[0]+n1[0]+n2[0]+n3[0]": (
        *("tp=4", "tp=4,sp", "tp=2,dp=2", "tp=2,sp,dp=2"),
        *("cp=4", "cp=4,ring", "ep=4"),
    ),
    "n0[0,1]+n1[0,1]": ("tp=2,dp=2", "tp=2,sp,dp=2", "tp=4"),
    "n0[0]+n1[0]+n0[1]+n1[1]": ("tp=2,dp=2",),
    "+".join(f"n{node}[0,1]" for node in range(4)): ("tp=2,dp=4", "tp=4,dp=2", "tp=8", "ep=8"),
    "+".join(f"n{node}[0]" for node in range(8)): ("tp=4,dp=2", "tp=4,sp,dp=2"),
    "+".join(f"n{node}[0,1]" for node in range(8)): ("tp=4,dp=4", "tp=8,dp=2", "ep=16"),
}
_SHARDED_TOO = ("tp=2,dp=2", "tp=4,dp=2", "tp=2,dp=4", "tp=2,sp,dp=2")


def _divided_cases() -> Iterator[Case]:
    """Layers divided over ranks of one node, of several, and over all of a group."""
    for allocation, layouts in _LAYOUTS.items():
        ranks = Allocation.parse(allocation).ranks
        for layout in layouts:
            strategies = ["ddp:view"] + (["fsdp"] if layout in _SHARDED_TOO else [])
            models = ("decoder", "gpt") if layout in ("tp=2", "tp=2,sp") else ("decoder",)
            for strategy in strategies:
                for model in ("qwen3_moe",) if layout.startswith("ep") else models:
                    yield Case(
                        bed="eight200" if "n4" not in allocation else "sixteen200",
                        model=model,
                        allocation=allocation,
                        strategy=strategy,
                        layout=layout,
                        # The more ranks share a core, the longer each leaves it alone.
                        rank_s=max(0.6, 0.2 * ranks),
                    )


def _split(bed: str, model: str, allocation: str, even_batch: int) -> Case:
    strategy = "ddp" if bed == "mixed_pair" else "ddp:view"
    return Case(bed=bed, model=model, allocation=allocation, strategy=strategy, batch=even_batch)


# Batches to be split over unlike nodes; the batch of a case is that of the even split.
SPLITS = (
    _split("mixed", "few_big", "n0[0]+n2[0]", 8),
    _split("mixed", "many_small", "n0[0]+n3[0]", 12),
    _split("mixed", "few_big", "n0[0]+n2[0]+n3[0]", 8),
    _split("mixed", "many_small", "n0[0,1]+n3[0,1]", 10),
    _split("mixed", "big_first", "n0[0]+n1[0]+n2[0]+n3[0]", 7),
    _split("mixed_thin", "few_big", "n0[0]+n1[0]", 8),
    _split("mixed_wide", "many_small", "n0[0]+n1[0]", 20),
    _split("mixed_wide", "few_big", "n0[0,1,2]+n2[0]", 7),
    _split("mixed_pair", "gpt2", "n0[0]+n1[0]", 6),
)


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


def _together(first: tuple[str, str], second: tuple[str, str]) -> Together:
    job, other = (_case("even", model, allocation) for model, allocation in (first, second))
    return Together(job=job, other=other)


# One link each way in common, both links, and of models whose steps are unlike.
NEIGHBOURS = (
    _together(("few_big", "n0[0]+n1[0]"), ("few_big", "n0[1]+n1[1]")),
    _together(("many_small", "n0[0]+n1[0]"), ("few_big", "n0[1]+n1[1]")),
    _together(("few_big", "n0[0]+n1[0]"), ("transformer", "n1[1]+n2[0]")),
    _together(("transformer", "n0[0]+n1[0]+n2[0]"), ("many_small", "n2[1]+n3[0]")),
)
# Caps of DDP's buckets, whose exposed communication is judged.
OVERLAPS = tuple(
    Case(
        bed="even",
        model=model,
        allocation="n0[0]+n1[0]+n2[0]",
        strategy=f"ddp:bucket={megabytes * 10**6},view",
    )
    for model in ("few_big", "transformer")
    for megabytes in (1, 2, 5, 10, 25, 100)
)
