"""Predict what a step waits for, and what another loader would give, without running it.

After Stash (Sharma et al., ICDCS 2023): with the same batch on every device, the interconnect stall
is what one node's devices take beyond one device, as a share of the node's step; the network stall
is what all nodes take beyond one node, as a share of that node's step. The host stall is what one
device waits for its host to issue kernels, as a share of its step.

The queue model of the estimate answers; beside it stands DS-Analyzer's baseline (Mohan et al., VLDB
2021), the least of three rates: G without loading, P of the loader alone from a warm cache, F of
storage, where a share x of the bytes comes from memory and the rest from the disk.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from estimator.coefficients import Z_80
from estimator.errors import WorkloadError
from estimator.estimates.balance import balance
from estimator.estimates.engine import DEFAULT
from estimator.estimates.estimate import OVERLAP_ERROR, Estimate
from estimator.estimates.request import EstimateRequest
from estimator.placement.allocation import Allocation, DeviceGroup
from estimator.timeline.rank.lanes import with_rates
from estimator.units import format_bandwidth, format_ratio
from estimator.workload.loader import MOST_WORKERS, Loader


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Seconds of a step beyond those of a step without what it waits for; 80 % lie in the bounds.

    `ratio` is `stall_s` over the step that stalls are measured against.
    """

    stall_s: float
    low_s: float
    high_s: float
    ratio: float

    @classmethod
    def within(cls, stall_s: float, error_s: float, *, step_s: float) -> Stall:
        """So many seconds of a step, give or take an error."""
        low_s, high_s = stall_s - error_s, stall_s + error_s
        return cls(stall_s=stall_s, low_s=low_s, high_s=high_s, ratio=stall_s / step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStalls:
    """The steps of an allocation, of one of its nodes and of one of its devices, and their stalls.

    `interconnect` is None for single devices, `network` where one node holds all ranks.
    """

    model: str
    batch_per_gpu: int | None
    allocation: str
    one_node: str
    one_device: str
    step_s: float
    node_s: float
    device_s: float
    host: Stall
    interconnect: Stall | None
    network: Stall | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        return asdict(self)


def predict_stalls(
    request: EstimateRequest, *, against: str | Allocation | None = None
) -> PredictedStalls:
    """Predict the stalls of a request's allocation by estimates of it, of a node and of a device.

    Its loader is left out. `against` stands for one node where a network stall is measured against
    another machine, as two nodes of four devices against one of eight. Of unlike machines the
    slowest is taken.
    """
    request = request.changed(loader=None)
    predicted = balance(request).answer
    allocation, batches = predicted.allocation, predicted.batches

    def answer_of(groups: Sequence[DeviceGroup], batches: Sequence[int] | None) -> Estimate:
        own = Allocation(tuple(groups))
        # A device alone synchronises nothing, and cannot be divided as some strategies ask.
        strategy = "ddp" if own.ranks == 1 else request.strategy
        other = request.changed(
            allocation=own, strategy=strategy, batch_per_gpu=batches, global_batch=None
        )
        return DEFAULT.estimate(other)

    def slowest(groups: Sequence[DeviceGroup]) -> Estimate:
        alternative = [
            answer_of((group,), None if batches is None else (batches[number],))
            for number, group in enumerate(groups)
        ]
        return max(alternative, key=lambda answer: answer.step_time_s)

    nodes = [replace(group, nodes=1) for group in allocation.groups]
    if against is not None:
        nodes = list(Allocation.parse(against).groups)
        batches = None if batches is None else (max(batches),) * len(nodes)
        node = answer_of(nodes, batches)
    else:
        node = slowest(nodes) if allocation.nodes > 1 else predicted
    device = slowest([_one_device(group) for group in nodes])
    return PredictedStalls(
        model=predicted.model,
        batch_per_gpu=predicted.batch_per_gpu,
        allocation=str(allocation),
        one_node=str(node.allocation),
        one_device=str(device.allocation),
        step_s=predicted.step_time_s,
        node_s=node.step_time_s,
        device_s=device.step_time_s,
        host=_host_stall(device),
        interconnect=_stall(node, device, step=node) if node.ranks > 1 else None,
        network=_stall(predicted, node, step=node) if node is not predicted else None,
    )


def _one_device(group: DeviceGroup) -> DeviceGroup:
    return replace(group, nodes=1, devices_per_node=1, devices=group.devices[:1])


def _host_stall(device: Estimate) -> Stall:
    stall_s = float(device.breakdown.host_exposed_s)
    error_s = stall_s * (device.high_s - device.low_s) / (2 * device.step_time_s)
    return Stall.within(stall_s, error_s, step_s=device.step_time_s)


def _stall(longer: Estimate, shorter: Estimate, *, step: Estimate) -> Stall:
    """What one step takes beyond another; they compute alike, so only waiting is uncertain."""
    stall_s = longer.step_time_s - shorter.step_time_s
    error_s = Z_80 * _waiting_error_s(longer)
    stall = Stall.within(stall_s, error_s, step_s=step.step_time_s)
    return replace(stall, low_s=min(stall_s, max(0.0, stall.low_s)))


def _waiting_error_s(answer: Estimate) -> float:
    communication = answer.plan.communication()
    if communication is None:
        return 0.0
    error = max(float(communication.relative_error), OVERLAP_ERROR)
    return max(error * float(answer.breakdown.waiting_s), float(communication.slower_s))


CACHED_RATIOS = (0.0, 0.35, 0.5, 0.65, 1.0)
# Data that makes a step less than this share longer does not hold it back.
HIDDEN_RATIO = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One change of the loader: the throughput by the queue model, and by the least of G, P, F."""

    change: str
    samples_per_s: float
    input_stall_s: float
    baseline_samples_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InputAnswers:
    """What a loader gives as it is, and what others would.

    `workers_needed` are the fewest per rank that hide all that workers can hide, `cached_needed`
    the least share of the samples in the page cache that hides the disk; None: none would.
    """

    as_it_is: WhatIf
    changes: tuple[WhatIf, ...]
    without_samples_per_s: float
    prep_samples_per_s: float
    fetch_samples_per_s: float
    workers_needed: int | None
    cached_needed: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units; rates that nothing limits are None."""
        plain = asdict(self)
        for name in ("prep_samples_per_s", "fetch_samples_per_s"):
            plain[name] = None if math.isinf(plain[name]) else plain[name]
        return plain


def input_answers(request: EstimateRequest) -> InputAnswers:
    """What a request's loader and its changes give.

    Raises WorkloadError for a graph without a batch size.
    """

    def answer_of(loader: Loader | None) -> Estimate:
        return balance(request.changed(loader=loader)).answer

    without = answer_of(None)
    if request.loader is None:
        raise WorkloadError("there is no loader to ask about; give one such as prep=8ms,workers=4")
    loader = with_rates(request.loader, without.plan.placement.kinds[0].profile)
    if without.samples_per_s is None:
        raise WorkloadError(
            f"{without.model} has no samples to count; trace it with a batch whose first dimension "
            "is the sample"
        )
    compute_per_s: float = without.samples_per_s

    def tried(change: str, other: Loader) -> WhatIf:
        answer = answer_of(other)
        assert answer.samples_per_s is not None
        return WhatIf(
            change=change,
            samples_per_s=answer.samples_per_s,
            input_stall_s=float(answer.breakdown.input_stall_s),
            baseline_samples_per_s=min(compute_per_s, *_rates(other, without)),
        )

    def stall_s(other: Loader) -> float:
        return float(answer_of(other).breakdown.input_stall_s)

    prep_per_s, fetch_per_s = _rates(loader, without)
    hidden_s = HIDDEN_RATIO * without.step_time_s
    return InputAnswers(
        as_it_is=tried("as it is", loader),
        changes=tuple(tried(change, other) for change, other in _changes(loader)),
        without_samples_per_s=compute_per_s,
        prep_samples_per_s=prep_per_s,
        fetch_samples_per_s=fetch_per_s,
        workers_needed=_workers_needed(loader, stall_s, hidden_s),
        cached_needed=_cached_needed(loader, stall_s, hidden_s),
    )


def _rates(loader: Loader, answer: Estimate) -> tuple[float, float]:
    """(P, F): samples per second of all ranks that workers prepare, and that storage gives."""
    makers = answer.ranks * max(loader.workers, 1)
    warm = replace(loader, cached_ratio=1.0)
    made_s, read_s = warm.made_s(1.0), loader.read_s(1.0)
    return (
        makers / made_s if made_s else math.inf,
        answer.plan.placement.nodes / read_s if loader.disk_s(1.0) else math.inf,
    )


def _changes(loader: Loader) -> Iterator[tuple[str, Loader]]:
    more = max(2 * loader.workers, 1)
    yield f"{more} workers", replace(loader, workers=more)
    disk = loader.disk_bytes_per_s
    if disk is not None:
        faster = f"a disk of {format_bandwidth(2 * disk)}"
        yield faster, replace(loader, disk_bytes_per_s=2 * disk)
        for ratio in CACHED_RATIOS:
            yield f"{format_ratio(ratio)} cached", replace(loader, cached_ratio=ratio)
    if loader.cores is not None:
        yield f"{2 * loader.cores} cores", replace(loader, cores=2 * loader.cores)


def _workers_needed(
    loader: Loader, stall_s: Callable[[Loader], float], hidden_s: float
) -> int | None:
    """By bisection, since more workers never wait longer; None where the most of them still do."""

    def waits_s(workers: int) -> float:
        return stall_s(replace(loader, workers=workers))

    alone_s, least_s = waits_s(0), waits_s(MOST_WORKERS)
    if alone_s <= hidden_s:
        return 0
    workers = range(1, MOST_WORKERS)
    enough = 1 + bisect_left(workers, True, key=lambda n: waits_s(n) <= least_s + hidden_s)
    return enough if waits_s(enough) < alone_s else None


def _cached_needed(
    loader: Loader, stall_s: Callable[[Loader], float], hidden_s: float
) -> float | None:
    """In steps of a thousandth; None without a disk."""
    if loader.disk_bytes_per_s is None:
        return None

    def waits_s(thousandths: int) -> float:
        return stall_s(replace(loader, cached_ratio=thousandths / 1000))

    most_s = waits_s(1000) + hidden_s
    return bisect_left(range(1000), True, key=lambda n: waits_s(n) <= most_s) / 1000
