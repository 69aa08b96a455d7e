"""Compare predicted with measured stalls of two gloo ranks, by tensors and by bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from records import Record
from stall_bench import Bench, Case
from stall_scripts.exchange import layers

import estimator as est
from estimator.estimates.request import EstimateRequest
from estimator.waits.predicted import predict_stalls

# (tensors, width): 40 MB in all in 10 to 200 tensors, then 10 equal tensors of 1 to 100 MB in all.
EQUAL_BYTES = ((10, 1000), (25, 632), (50, 447), (100, 316), (200, 224))
EQUAL_TENSORS = ((10, 158), (10, 354), (10, 707), (10, 1581))
STRATEGIES = {"bucketed": "ddp", "unbucketed": "ddp:unbucketed"}


def exchange(bench: Bench) -> Iterator[Case]:
    """The stall of each model: within 20 %."""
    for group, shapes in (("equal bytes", EQUAL_BYTES), ("equal tensors", EQUAL_TENSORS)):
        for tensors, width in shapes:
            for how in STRATEGIES:
                name = f"{tensors} x {4 * width * width / 1e6:.2f} MB, {how}"
                yield Case(name, partial(_exchange, bench, tensors, width, how, group))


def _exchange(bench: Bench, tensors: int, width: int, how: str, group: str) -> Record:
    predicted_s = _predicted_s(tensors, width, STRATEGIES[how])
    # Alone, a rank exchanges nothing.
    alone = bench.script("exchange.py", [tensors, width, "bucketed"], devices=2)
    alone_s = bench.step_s(alone, is_synthetic=True, devices=1)
    both = bench.script("exchange.py", [tensors, width, how], devices=2)
    both_s = bench.step_s(both, is_synthetic=True)
    return {
        "group": f"{group}, {how}",
        "predicted_s": predicted_s,
        "measured_s": both_s - alone_s,
        "alone_s": alone_s,
        "step_s": both_s,
        "of_value": 0.20,
        "of_step": 0.0,
    }


def _predicted_s(tensors: int, width: int, strategy: str) -> float:
    model, batch = layers(tensors, width)
    graph = est.trace_model(model, batch, optimizer="sgd", name=f"{tensors} layers")
    request = EstimateRequest.of(graph, "1x2:local", strategy=strategy)
    found = predict_stalls(request).interconnect
    assert found is not None
    return found.stall_s
