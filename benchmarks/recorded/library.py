"""What no command prints: tables of many allocations, and advice that is asked for from Python."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import estimator as est
from estimator.advise.rank_order import rank_order
from estimator.advise.rent.transient import Revocations, TransientCluster, Worker
from estimator.advise.scaling import best_batch, elasticity, next_gpu
from estimator.integrations.schedulers.sizes import sizes

from .inputs import need
from .questions import CPUS, GPUS, HALLS, LAYOUTS, RACKS, STRATEGIES

ROWS = 60
_DEVICES = {"slow": 4, "fast": 8, "jammed": 2, "bare": 3, "railed": 6}
_GPUS = {"h100-sxm": 8, "a100-sxm-80gb": 8, "t4-g4dn": 4, "fast-gpu": 8}
Question = Callable[[], Any]


def questions() -> dict[str, Question]:
    """What is asked, by name."""
    return dict((*_tables(), *_advice()))


def _graph(name: str) -> est.OpGraph:
    need(f"{name}.graph")
    return est.OpGraph.load(f"{name}.graph")


def _table(graph: str, allocations: Any, *, store: str = "", **asked: Any) -> Question:
    def answer() -> Any:
        need(store)
        learnt = {"calibration": est.Calibrator(store)} if store else {}
        return est.estimate_many(_graph(graph), allocations, **asked, **learnt).to_dict()

    return answer


def _drawn(draw: random.Random, machines: dict[str, int]) -> str:
    """One to four groups of nodes."""
    return "+".join(
        f"{draw.choice((1, 2, 3, 5, 12, 40))}x{draw.randint(1, machines[name])}:{name}"
        for name in draw.choices(list(machines), k=draw.randint(1, 4))
    )


def _tables() -> Iterator[tuple[str, Question]]:
    for graph, machines, listed in (
        ("gpt2-cpu", _DEVICES, CPUS),
        ("llama", _GPUS, GPUS),
        ("resnet", _GPUS, GPUS),
    ):
        for strategy in STRATEGIES:
            draw = random.Random(f"{graph} {strategy}")
            rows = [*listed, *(_drawn(draw, machines) for _ in range(ROWS))]
            if strategy == "fsdp:offload":
                # Made-up machines know neither a link to the host nor its updates.
                rows = [row for row in rows if not re.search("slow|fast", row)]
            batches = [draw.choice((1, 3, 8, 64)) for _ in rows]
            yield (
                f"table {graph} {strategy}",
                _table(
                    graph,
                    rows,
                    strategy=strategy,
                    batch_per_gpu=batches,
                    accumulation_steps=draw.choice((1, 2, 5)),
                ),
            )
        yield f"table {graph} global", _table(graph, listed, global_batch=960)
        yield (
            f"table {graph} loader",
            _table(graph, listed, loader="sample=110kB,prep=9ms,workers=1"),
        )
        yield (
            f"table {graph} layouts",
            _table(graph, [listed[2]] * 12, layout=LAYOUTS[:12], accumulation_steps=8),
        )
    for graph, name, hosts in (("gpt2-cpu", "racks", RACKS), ("gpt2-amp", "halls", HALLS)):
        for strategy in ("ddp", "fsdp", "ps:2"):
            asked = {"cluster": f"{name}.toml", "strategy": strategy}
            yield f"table {graph} {name} {strategy}", _table(graph, hosts, **asked)
    for graph, machine in (("gpt2-cpu", "slow"), ("gpt2-amp", "h100-sxm")):
        rows = [f"{nodes}x{devices}:{machine}" for nodes in (1, 2, 3, 8) for devices in (1, 2, 4)]
        for strategy in ("ddp", "zero1", "fsdp"):
            asked = {"store": f"{graph}.db", "strategy": strategy}
            yield f"table {graph} learnt {strategy}", _table(graph, rows, **asked)
    yield "grid", _grid


def _grid() -> Any:
    """The tables of a grid's pieces."""
    allocations = est.AllocationGrid("1..4x1..8:h100-sxm+1..3x1,4:t4-g4dn")
    pieces = est.estimate_chunks(_graph("gpt2-amp"), allocations, rows=50, strategy="zero2")
    return [piece.to_dict() for piece in pieces]


def _advice() -> Iterator[tuple[str, Question]]:
    for place in ("1x4:t4-g4dn", "1x8:a100-p4d"):
        yield (
            f"next GPU {place}",
            lambda place=place: next_gpu(_graph("gpt2-amp"), place, machines=["a100-p4d"]),
        )
        yield f"best batch {place}", lambda place=place: best_batch(_graph("gpt2-amp"), place)
    yield "elasticity", _elasticity
    yield "sizes", lambda: sizes(_graph("gpt2-amp"), "t4-g4dn", max_nodes=16)
    yield "rank order", lambda: rank_order(est.load_profile("jammed").pairs)
    yield "transient", _transient


def _elasticity() -> Any:
    places = ["1x1:t4-g4dn", "2x4:t4-g4dn", "1x8:h100-sxm"]
    return elasticity(_graph("gpt2-amp"), places, [8, 16, 32], accumulation_steps=(1, 4)).to_dict()


def _transient() -> Any:
    """The seconds of training with workers that are revoked, more often by day."""
    by_hour = Revocations(per_hour=(0.05,) * 8 + (0.2,) * 16)
    workers = (Worker(steps_per_s=9.0, revocations=by_hour),) * 4 + (Worker(steps_per_s=20.0),)
    cluster = TransientCluster(
        workers=workers, replace_s=90.0, checkpoint_s=20.0, checkpoint_every_steps=4000
    )
    return [cluster.asynchronous_s(1e6), cluster.synchronous_s(1e6)]


def plain(value: Any) -> Any:
    """A value as JSON has it: an estimate as what it prints, a dataclass as its fields."""
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float):
        # Digits beyond the twelfth are those of the order in which terms were added.
        return float(f"{value:.12g}")
    return value if value is None or isinstance(value, str | int) else str(value)
