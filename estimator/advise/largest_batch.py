"""Find the largest batch whose training step fits into the memory of every device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from estimator.engine import estimate_graph
from estimator.errors import WorkloadError
from estimator.estimates import Estimate
from estimator.graph.op_graph import OpGraph
from estimator.placement.allocation import Allocation
from estimator.workload import Strategy

# No step of any model on any device has more samples.
_MOST = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The most samples per device: those that surely fit, and those whose predicted peak does.

    Between the two lies the margin that a prediction needs; 0 where not even one sample fits.
    `answer` is the estimate of the first, None for 0.
    """

    batch_per_gpu: int
    at_most: int
    answer: Estimate | None


def largest_batch(
    graph: OpGraph,
    allocation: str | Allocation,
    *,
    accumulation_steps: int = 1,
    strategy: str | Strategy = "ddp",
    **more: Any,
) -> LargestBatch:
    """The largest batch per device and micro-batch on an allocation.

    `more` goes to `estimate` (cluster, calibration, profile). Raises WorkloadError for a graph with
    a fixed batch or without known activations.
    """
    if graph.batch is None:
        raise WorkloadError(
            f"{graph.name} has a fixed batch; trace it with a batch whose first dimension is the "
            "sample"
        )
    if not graph.knows_activations:
        raise WorkloadError(
            f"{graph.name} says nothing of activations; give activation_bytes_per_sample or name "
            "the model itself"
        )

    def answer_of(batch: int) -> Estimate:
        return estimate_graph(
            graph,
            allocation,
            batch_per_gpu=batch,
            accumulation_steps=accumulation_steps,
            strategy=strategy,
            **more,
        )

    sure = _largest(lambda batch: answer_of(batch).fits == "yes", start=graph.batch)
    most = _largest(lambda batch: _used_ratio(answer_of(batch)) <= 1, start=max(sure, 1))
    return LargestBatch(batch_per_gpu=sure, at_most=most, answer=answer_of(sure) if sure else None)


def _used_ratio(answer: Estimate) -> float:
    return answer.plan.memory()[1]


def _largest(fits: Callable[[int], bool], *, start: int) -> int:
    """The largest number that fits, where all smaller ones do too; 0 for none."""
    low, high = 0, start
    while high <= _MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
