"""Find batches: what each brings, the largest that fits, what one more device is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from estimator.elementwise import Array, Flags, Sizes
from estimator.errors import (
    AllocationError,
    WorkloadError,
    quoted,
)
from estimator.estimates.engine import DEFAULT
from estimator.estimates.estimate import Estimate
from estimator.estimates.request import EstimateRequest, Options
from estimator.estimates.table import estimate_many
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.catalogue import named_profile
from estimator.placement.allocation import Allocation, DeviceGroup
from estimator.workload import check_count

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
    graph: OpGraph, allocation: str | Allocation, **options: Unpack[Options]
) -> LargestBatch:
    """The largest batch per device and micro-batch on an allocation.

    `options` are those of `estimate`; no batch among them counts. Raises WorkloadError for a graph
    with a fixed batch or without known activations.
    """
    request = EstimateRequest.of(graph, allocation, **options)
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
        return DEFAULT.estimate(request.changed(batch_per_gpu=batch, global_batch=None))

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Elasticity:
    """Arrays of a row per allocation, a column per batch and a layer per number of micro-batches.

    Where a step cannot be taken, throughput is NaN; `fits` says whether it fits into memory surely.
    `largest_batch` is the most samples per device and micro-batch that surely fit, by allocation.
    """

    allocations: tuple[str, ...]
    batches: tuple[int, ...]
    accumulation_steps: tuple[int, ...]
    samples_per_s: Array
    step_time_s: Array
    global_batch: Sizes
    fits: Flags
    largest_batch: Sizes

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units; null where there is none."""
        return {
            "allocations": list(self.allocations),
            "batches": list(self.batches),
            "accumulation_steps": list(self.accumulation_steps),
            "samples_per_s": _plain(self.samples_per_s),
            "step_time_s": _plain(self.step_time_s),
            "global_batch": self.global_batch.tolist(),
            "fits": self.fits.tolist(),
            "largest_batch": self.largest_batch.tolist(),
        }


def elasticity(
    graph: OpGraph,
    allocations: Sequence[str | Allocation],
    batches: Sequence[int],
    *,
    accumulation_steps: Sequence[int] = (1,),
    **options: Any,
) -> Elasticity:
    """The grid of every allocation at every batch per device and number of micro-batches.

    `options` are those of `estimate_many`, as `strategy` and `calibration`. Raises WorkloadError,
    AllocationError.
    """
    for name, given in (
        ("allocations", allocations),
        ("batches", batches),
        ("accumulation_steps", accumulation_steps),
    ):
        if isinstance(given, str) or not len(given):
            raise WorkloadError(f"{name} are {given!r}; give a list of at least one")
    shape = len(allocations), len(batches)
    rows = [allocation for allocation in allocations for _ in batches]
    column = np.tile(np.asarray(batches, dtype=np.int64), len(allocations))
    tables = [
        estimate_many(graph, rows, batch_per_gpu=column, accumulation_steps=steps, **options)
        for steps in accumulation_steps
    ]

    def grid(name: str) -> NDArray[Any]:
        layers = [np.asarray(getattr(table, name)).reshape(shape) for table in tables]
        return np.stack(layers, axis=-1)

    return Elasticity(
        allocations=tuple(str(Allocation.parse(text)) for text in allocations),
        batches=tuple(batches),
        accumulation_steps=tuple(accumulation_steps),
        samples_per_s=grid("samples_per_s"),
        step_time_s=grid("step_time_s"),
        global_batch=grid("global_batch"),
        fits=grid("fits") == "yes",
        largest_batch=np.array(
            [
                largest_batch(graph, allocation, **options).batch_per_gpu
                for allocation in allocations
            ]
        ),
    )


def _plain(cells: Array) -> list[Any]:
    """Nested lists, with None where there is no number."""
    return [
        [[None if math.isnan(value) else value for value in layer] for layer in row]
        for row in cells.tolist()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class NextGpu:
    """An allocation with one device more, and what that adds to the samples a second."""

    allocation: str
    answer: Estimate
    gain_samples_per_s: float

    @property
    def gain_ratio(self) -> float:
        """Over the throughput of one device of the allocation, on average: 1 scales linearly."""
        total = self.answer.samples_per_s or 0.0
        before = (total - self.gain_samples_per_s) / (self.answer.ranks - 1)
        return self.gain_samples_per_s / before


def next_gpu(
    graph: OpGraph,
    allocation: str | Allocation,
    *,
    machines: Sequence[str] = (),
    **options: Unpack[Options],
) -> list[NextGpu]:
    """Where one more device helps most: on the last node, on another, or of other machines.

    The most gained first; `options` are those of `estimate`, as `batch_per_gpu` and `strategy`.
    Raises AllocationError where there is no such device.
    """
    if isinstance(machines, str):
        raise AllocationError(f"machines are the text {quoted(machines)}; give a list of names")
    held = Allocation.parse(allocation)
    request = EstimateRequest.of(graph, held, **options)
    now = DEFAULT.estimate(request).samples_per_s or 0.0
    rows = []
    refusal: AllocationError | None = None
    for more in _with_one_more(held, machines):
        try:
            answer = DEFAULT.estimate(request.changed(allocation=more))
        except AllocationError as error:
            refusal = error
            continue
        rows.append(
            NextGpu(
                allocation=str(more),
                answer=answer,
                gain_samples_per_s=(answer.samples_per_s or 0.0) - now,
            )
        )
    if not rows:
        raise refusal or AllocationError(
            f"'{held}' names hosts, which have no next device; name its machine type"
        )
    return sorted(rows, key=lambda row: -row.gain_samples_per_s)


def _with_one_more(held: Allocation, machines: Sequence[str]) -> Iterator[Allocation]:
    last = held.groups[-1]
    if last.machine is not None and last.devices_per_node < len(
        named_profile(last.machine).devices
    ):
        one, others = replace(last, nodes=1, devices_per_node=last.devices_per_node + 1), last.nodes
        before = (replace(last, nodes=others - 1),) if others > 1 else ()
        yield Allocation((*held.groups[:-1], *before, one))
    own = [group.machine for group in held.groups if group.machine is not None]
    for machine in dict.fromkeys([*own, *machines]):
        node = DeviceGroup(nodes=1, devices_per_node=1, machine=machine)
        yield Allocation((*held.groups, node))


def best_batch(
    graph: OpGraph,
    allocation: str | Allocation,
    *,
    most_per_gpu: int | None = None,
    **options: Unpack[Options],
) -> Estimate:
    """The batch per device and micro-batch with most samples a second that surely fits.

    Tried are 1, 2, 4, … samples up to the largest that fits (see `largest_batch`), or
    `most_per_gpu`. Raises WorkloadError.
    """
    if most_per_gpu is not None:
        check_count(most_per_gpu, "most_per_gpu")
    limit = largest_batch(graph, allocation, **options)
    most = min(limit.batch_per_gpu, most_per_gpu or limit.batch_per_gpu)
    if not most:
        raise AllocationError(
            f"not even one sample of {graph.name} fits on '{allocation}'; give devices with more "
            "memory, or another strategy"
        )
    tried = {1 << power for power in range(most.bit_length())} | {most}
    request = EstimateRequest.of(graph, allocation, **options)
    answers = [DEFAULT.estimate(request.changed(batch_per_gpu=batch)) for batch in sorted(tried)]
    return max(answers, key=lambda answer: answer.samples_per_s or 0.0)
