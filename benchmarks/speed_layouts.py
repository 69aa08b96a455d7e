"""Time answers about layouts of a 70B transformer: a plan, a new layout, layouts known already."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

from clocks import cpu_seconds, medians, seconds

# A step of 2,048 samples of 2,048 tokens.
PLACE, GLOBAL_BATCH = "128x8:h100-sxm", 2048
PIPELINE = {"layout": "tp=8,pp=16,dp=*", "batch_per_gpu": 1, "accumulation_steps": 128}
DIVIDED = {"layout": "tp=8,dp=*", "batch_per_gpu": 1}


def times_of(text: str, repeats: int) -> dict[str, tuple[float, str, float | None]]:
    """One line of the report for each question; engines are new where something is new."""
    from estimator import best_layouts
    from estimator.estimates.engine import Engine
    from estimator.graph.models.model_text import load_model
    from estimator.graph.trace.trace import trace_graph

    model, batch, _, _ = load_model(text, batch=2, seq_len=2048, weights=False)
    graph = trace_graph(model, batch, target="cuda", precision="bf16")
    candidates = 0

    def plan() -> None:
        nonlocal candidates
        found = best_layouts(graph, PLACE, global_batch=GLOBAL_BATCH, engine=Engine())
        candidates = found.candidates

    plans_s = [seconds(plan) for _ in range(min(repeats, 3))]
    engine = Engine()
    ask = partial(engine.estimate, graph)
    ask("16x8:h100-sxm", **PIPELINE)
    ask(PLACE, **DIVIDED)
    new_s = [
        cpu_seconds(partial(ask, PLACE, layout=f"tp={tp},pp={pp},dp=*", batch_per_gpu=1))
        for tp, pp in ((8, 2), (8, 4), (4, 4), (2, 8))
    ]
    warm_s = medians(partial(ask, "16x8:h100-sxm", **PIPELINE) for _ in range(100))
    unseen_s = medians(partial(ask, place, **DIVIDED) for place in _unseen())
    return {
        f"best layout of {PLACE}, {candidates:,} candidates": (
            statistics.median(plans_s),
            "s",
            10,
        ),
        "new layout of a traced model, median of four": (
            1e3 * statistics.median(new_s),
            "ms",
            50,
        ),
        "16 stages x 128 micro-batches, warm": (1e3 * warm_s, "ms", 1),
        "warm layout, allocations not seen": (1e6 * unseen_s, "us", 200),
    }


def _unseen() -> Iterator[Any]:
    from estimator import Allocation

    for nodes in range(2, 102):
        yield Allocation.parse(f"{nodes}x8:h100-sxm")
