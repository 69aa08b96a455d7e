"""Compare predicted with measured stalls of two gloo ranks, by tensors and by bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from records import Record
from stall_scripts.exchange import layers

import estimator as est
from estimator.placement.allocation import Allocation
from estimator.stalls.devices import cores_of
from estimator.stalls.measured import measure_stalls
from estimator.stalls.predicted import predict_stalls
from estimator.stalls.runs import Script

SCRIPT = Path(__file__).parent / "stall_scripts" / "exchange.py"
# (tensors, width): 40 MB in all in 10 to 200 tensors, then 10 equal tensors of 1 to 100 MB in all.
EQUAL_BYTES = ((10, 1000), (25, 632), (50, 447), (100, 316), (200, 224))
EQUAL_TENSORS = ((10, 158), (10, 354), (10, 707), (10, 1581))


def exchange(steps: int, repeats: int) -> Iterator[Record]:
    """The stall of each model: within 20 %."""
    for tensors, width in (*EQUAL_BYTES, *EQUAL_TENSORS):
        for how in ("bucketed", "unbucketed"):
            predicted_s = _predicted_s(
                tensors, width, "ddp" if how == "bucketed" else "ddp:unbucketed"
            )
            script = Script(
                path=SCRIPT,
                arguments=(str(tensors), str(width), how),
                cores=cores_of("1x2:local"),
                steps=steps,
            )
            found = measure_stalls(script, repeats=repeats)
            yield {
                "case": f"{tensors} x {4 * width * width / 1e6:.2f} MB, {how}",
                "predicted_s": predicted_s,
                "measured_s": found.stalls["interconnect"].stall_s,
                "step_s": found.runs["T1"].step_s,
                "of_value": 0.20,
                "of_step": 0.0,
            }


def _predicted_s(tensors: int, width: int, strategy: str) -> float:
    model, batch = layers(tensors, width)
    graph = est.trace_model(model, batch, optimizer="sgd", name=f"{tensors} layers")

    def answer_of(allocation: Allocation, batches: Sequence[int] | None) -> est.Estimate:
        return est.estimate(graph, allocation, batch_per_gpu=batches, strategy=strategy)

    found = predict_stalls("1x2:local", answer_of).interconnect
    assert found is not None
    return found.stall_s
