"""Which estimates a record holds: readable names for them, drawn with fixed seeds."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from .graphs import Kind, Source

STRATEGIES = (
    "ddp",
    "ddp:unbucketed",
    "ddp:view",
    "ddp:bucket=64KiB,first=4KiB,view",
    "zero1",
    "zero1:bucket=1MiB,view",
    "zero2",
    "zero2:bucket=256KiB",
    "fsdp",
    "ps:1",
    "ps:2,bucket=64KiB",
    "ps:2,async",
    "ps:3,async,link=2Gbit/s",
)
# Refused by versions that know no groups of shards.
GROUPED = "fsdp:shard=2"
ACCUMULATIONS = (1, 2, 5)
BATCHES = (1, 3, 8, 64)

CPU_ALLOCATIONS = (
    "1x1:slow",
    "1x2:slow",
    "1x4:slow",
    "2x1:slow",
    "2x4:slow",
    "5x3:slow",
    "40x4:slow",
    "1x1:fast",
    "1x8:fast",
    "2x8:fast",
    "3x5:fast",
    "1x2:jammed",
    "2x2:jammed",
    "4x1:jammed",
    "1x3:bare",
    "3x2:bare",
    "1x2:lone",
    "2x1:lone",
    "1x6:railed",
    "2x6:railed",
    "4x5:railed",
    "1x1:slow+1x1:fast",
    "1x4:slow+1x8:fast",
    "1x3:slow+1x4:slow",
    "9x2:slow+1x4:slow",
    "2x8:fast+1x2:slow+1x2:jammed",
    "3x4:slow+2x8:fast+1x2:jammed",
    "2x6:railed+2x3:bare",
    "1x2:lone+1x2:slow",
    "12x4:fast+4x3:bare+2x2:jammed+1x6:railed",
)
_SYNTHETIC_GPUS = (
    "1x1:slow",
    "1x4:slow",
    "3x4:slow",
    "1x8:fast",
    "2x8:fast",
    "2x2:jammed",
    "3x2:bare",
    "2x6:railed",
    "1x4:slow+1x8:fast",
    "2x8:fast+1x2:slow+1x2:jammed",
    "2x6:railed+2x3:bare",
)
_CATALOGUE = (
    "1x1:h100-sxm",
    "1x8:h100-sxm",
    "2x8:h100-sxm",
    "64x8:h100-sxm",
    "1x1:a100-sxm-80gb",
    "1x4:a100-sxm-80gb",
    "16x8:a100-sxm-80gb",
    "1x1:t4-g4dn",
    "4x4:t4-g4dn",
    "2x4:v100-p3",
    "1x8:dgx-1",
    "1x2:rtx-3090",
    "2x2:rtx-3090",
    "2x8:h100-sxm+4x8:a100-sxm-80gb",
    "1x8:v100-p3+2x4:t4-g4dn",
    "1x5:h100-p5+1x8:h100-p5",
    "1x8:h100-sxm+2x8:fast-gpu",
)
_ON_RACKS = (
    "a1[0]",
    "a3[1,0]",
    "a2[0,1]+a1[3]+a3[0]+a1[0]",
    "a5[0,1]+a2[2]+a4[0,1,2,3]",
    "a6[0,1]+a7[1]",
    "a7[0]+a1[2]+a6[0]",
    "a8[0,2,4]+a9[5]+a8[1]",
    "1x4:slow",
    "3x4:slow",
    "2x8:fast",
    "2x8:fast+2x2:jammed",
    "a3[0,1,2,3]+a4[0,1,2,3,4,5,6,7]+a2[1,3]+a5[0]+a8[0,1]+a6[0]",
    "2x6:railed+a2[0,1]",
)
_IN_HALLS = (
    "b4[0,1,2,3]",
    "b1[0,1]+b4[0,1]+b2[6,7]",
    "4x8:h100-sxm",
    "2x8:h100-sxm+2x8:a100-sxm-80gb",
    "d5[0,1]+d1[2]+d5[2,3]",
    "5x4:t4-g4dn",
    "c2[0,1,2,3,4,5,6,7]+b3[0,1,2,3]+d2[3]",
)
# For graphs whose every batch and every count of busy devices takes long to look at.
_FEW_ON_CPU = (
    "1x1:slow",
    "1x4:slow",
    "2x4:slow",
    "40x4:slow",
    "1x8:fast",
    "2x8:fast",
    "2x2:jammed",
    "1x4:slow+1x8:fast",
    "3x4:slow+2x8:fast+1x2:jammed",
    "3x4:slow+2x6:railed",
)
_FEW_GPUS = (
    "1x1:h100-sxm",
    "1x8:h100-sxm",
    "2x8:h100-sxm",
    "64x8:h100-sxm",
    "16x8:a100-sxm-80gb",
    "4x4:t4-g4dn",
    "2x8:h100-sxm+4x8:a100-sxm-80gb",
    "1x8:h100-sxm+2x4:t4-g4dn",
    "1x4:slow-gpu",
    "2x8:fast-gpu",
    "1x8:h100-sxm+2x8:fast-gpu+1x4:slow-gpu",
)
_FEW_ON_RACKS = (
    "a4[3,2,1,0,7,6,5,4]",
    "3x4:slow",
    "2x8:fast+2x2:jammed",
    "a3[0,1,2,3]+a4[0,1,2,3,4,5,6,7]+a2[2,0,3,1]+a6[1,0]",
)
_FEW_IN_HALLS = (
    "4x8:h100-sxm",
    "2x8:h100-sxm+2x8:a100-sxm-80gb",
    "5x4:t4-g4dn",
    "d5[0,1,2,3]+b4[7,6,5,4,3,2,1,0]+d1[3,2,1,0]",
)
CALIBRATIONS = ("-", "-", "-", "asked", "learnt")
Form = Literal["scalar", "table", "columns"]


class Case(NamedTuple):
    """One estimate; its name is these words, joined."""

    graph: str
    allocation: str
    strategy: str
    accumulation: int
    # "-" as traced, "8" per device, "8/1" for each group, "g96" for all together
    batch: str
    cluster: str
    calibration: str
    form: Form

    @property
    def name(self) -> str:
        return "|".join(map(str, self))

    @classmethod
    def named(cls, name: str) -> Case:
        """The case of a name."""
        graph, allocation, strategy, accumulation, *others = name.split("|")
        return cls(graph, allocation, strategy, int(accumulation), *others)  # type: ignore[arg-type]


def ranks_of(allocation: str) -> int:
    """The devices that an allocation text names."""
    return sum(
        int(nodes) * int(devices) if nodes else len(listed.split(","))
        for nodes, devices, listed in re.findall(r"(\d+)x(\d+):|\[([\d,]+)\]", allocation)
    )


def _on_gpus(text: str) -> str:
    return re.sub(r":(\w+)", r":\1-gpu", text)


def allocations_of(source: Source) -> dict[str, tuple[str, ...]]:
    """Allocations by the cluster they are on; "-" is none."""
    if source.target == "cpu":
        if source.is_costly:
            return {"-": _FEW_ON_CPU, "racks": _FEW_ON_RACKS}
        return {"-": CPU_ALLOCATIONS, "racks": _ON_RACKS}
    if source.is_costly:
        return {"-": _FEW_GPUS, "halls": _FEW_IN_HALLS}
    return {
        "-": (*map(_on_gpus, _SYNTHETIC_GPUS), *_CATALOGUE),
        "racks-gpu": tuple(map(_on_gpus, _ON_RACKS)),
        "halls": _IN_HALLS,
    }


def _drawn_loads(source: Source, strategy: str) -> tuple[Sequence[int], Sequence[int]]:
    """(accumulation steps, batches) that a graph is asked about under a strategy."""
    if not source.is_costly:
        return ACCUMULATIONS, BATCHES
    draw = random.Random(f"{source.name} {strategy}")
    return draw.choices(ACCUMULATIONS), draw.sample(BATCHES, 2)


def scalar_cases(source: Source) -> Iterator[Case]:
    """Every allocation under every strategy, the rest drawn."""
    for cluster, allocations in allocations_of(source).items():
        for allocation in allocations:
            grouped = (GROUPED,) if ranks_of(allocation) in (4, 12, 16) else ()
            for strategy in (*STRATEGIES, *grouped):
                draw = random.Random(f"{source.name} {allocation} {strategy} {cluster}")
                accumulations, batches = _drawn_loads(source, strategy)
                accumulation = draw.choice(accumulations)
                yield Case(
                    source.name,
                    allocation,
                    strategy,
                    accumulation,
                    _scalar_batch(draw, allocation, accumulation, batches),
                    cluster,
                    draw.choice(CALIBRATIONS),
                    "scalar",
                )


def _scalar_batch(
    draw: random.Random, allocation: str, accumulation: int, batches: Sequence[int]
) -> str:
    kind = draw.choice(("traced", "even", "even", "even", "uneven", "global"))
    groups, ranks = allocation.count("+") + 1, ranks_of(allocation)
    if kind == "uneven" and groups > 1:
        return "/".join(str(draw.choice(batches)) for _ in range(groups))
    # Over unlike devices it is split by speed, which asks for many batches.
    if kind == "global" and (groups == 1 or len(batches) > 2) and ranks <= 64:
        return f"g{ranks * accumulation * draw.choice(batches)}"
    return "-" if kind == "traced" else str(draw.choice(batches))


def table_questions(source: Source) -> Iterator[tuple[Case, ...]]:
    """Tables of all allocations, under every strategy."""
    for cluster, allocations in allocations_of(source).items():
        for strategy in STRATEGIES:
            for turn in range(2 if cluster == "-" else 1):
                draw = random.Random(f"{source.name} {strategy} {cluster} {turn}")
                accumulations, batches = _drawn_loads(source, strategy)
                accumulation = draw.choice(accumulations)
                calibration = draw.choice(CALIBRATIONS)
                is_global = draw.random() < 0.2
                cases = []
                for allocation in allocations:
                    batch = draw.choice(batches)
                    total = batch * accumulation * ranks_of(allocation)
                    cases.append(
                        Case(
                            source.name,
                            allocation,
                            strategy,
                            accumulation,
                            f"g{total}" if is_global else str(batch),
                            cluster,
                            calibration,
                            "table",
                        )
                    )
                yield tuple(cases)


def column_questions(source: Source, *, rows: int) -> Iterator[tuple[Case, ...]]:
    """Tables of drawn allocations of one to four groups, to be given as columns."""
    for strategy in STRATEGIES if not source.is_costly else ():
        draw = random.Random(f"{source.name} {strategy} columns")
        accumulation, calibration = draw.choice(ACCUMULATIONS), draw.choice(CALIBRATIONS)
        yield tuple(
            Case(
                source.name,
                _drawn_allocation(draw, source.target),
                strategy,
                accumulation,
                str(draw.choice(BATCHES)),
                "-",
                calibration,
                "columns",
            )
            for _ in range(rows)
        )


_DEVICES = {"slow": 4, "fast": 8, "jammed": 2, "bare": 3, "railed": 6}
_GPUS = {"h100-sxm": 8, "a100-sxm-80gb": 8, "t4-g4dn": 4}


def _drawn_allocation(draw: random.Random, target: Kind) -> str:
    machines: dict[str, int] = dict(_DEVICES)
    if target == "cuda":
        machines = {f"{name}-gpu": count for name, count in _DEVICES.items()} | _GPUS
    groups: Sequence[str] = [
        f"{draw.choice((1, 2, 3, 5, 12, 40))}x{draw.randint(1, machines[name])}:{name}"
        for name in draw.choices(list(machines), k=draw.randint(1, 4))
    ]
    return "+".join(groups)
