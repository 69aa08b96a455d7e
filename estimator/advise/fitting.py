"""Say what would make a step fit that does not, and what each remedy costs in device time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from estimator.advise.swap_problem import swap_problem
from estimator.advise.swap_search import Means, Planned, plan_within
from estimator.engine import estimate_graph
from estimator.errors import AllocationError, ProfileError, StrategyError, WorkloadError
from estimator.estimates import NOT_FIT_MARGIN_RATIO, Estimate
from estimator.graph.added_checkpoints import with_checkpoints
from estimator.graph.op_graph import OpGraph
from estimator.placement.allocation import Allocation

_STRATEGIES = ("zero1", "zero2", "fsdp")
_MOST_DEVICES_FACTOR = 64
_PLANS = (
    ("compute activations again", Means(swap=False, kinds=("activation",))),
    ("swap activations or compute them again", Means(kinds=("activation",))),
    ("swap optimizer state to the host", Means(recompute=False, kinds=("state",))),
    ("swap anything, compute activations again", Means()),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change after which the step fits: its peak, and the seconds of the same global batch.

    `cost_ratio` is how much more device time that takes, devices times seconds, than the step that
    does not fit would: twice the devices for half as long cost nothing.
    """

    change: str
    peak_bytes: int
    step_time_s: float
    cost_ratio: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values in base units."""
        return asdict(self)


def remedies(graph: OpGraph, answer: Estimate, **more: Any) -> list[Remedy]:
    """What would make an estimated step fit, cheapest first; each is the smallest of its kind.

    `more` goes to `estimate` (cluster, calibration, profile).
    """
    found = quick_remedies(graph, answer, **more)
    return sorted([*found, *_plans(answer)], key=lambda remedy: remedy.cost_ratio)


def quick_remedies(graph: OpGraph, answer: Estimate, **more: Any) -> list[Remedy]:
    """Those of `remedies` that need no plan of what to swap and to compute again."""
    more = {"loader": answer.loader, **more}
    found = [*_checkpoints(graph, answer, more), *_smaller_batches(graph, answer, more)]
    found += [*_strategies(graph, answer, more), *_more_devices(graph, answer, more)]
    return sorted(found, key=lambda remedy: remedy.cost_ratio)


def _remedy(change: str, other: Estimate, answer: Estimate) -> Remedy:
    return Remedy(
        change=change,
        peak_bytes=other.peak_memory_bytes,
        step_time_s=other.step_time_s,
        cost_ratio=other.ranks * other.step_time_s / (answer.ranks * answer.step_time_s) - 1,
    )


def _checkpoints(graph: OpGraph, answer: Estimate, more: dict[str, Any]) -> Iterator[Remedy]:
    """Every repeated block computed again in the backward pass, all else as it is."""
    checkpointed = with_checkpoints(graph)
    if checkpointed is None:
        return
    same = {"layout": answer.layout, **more}
    other = _tried(checkpointed, answer, answer.allocation, answer.strategy, same)
    if other is not None and other.fits == "yes":
        yield _remedy("activation checkpointing of every block (--checkpoint full)", other, answer)


def _smaller_batches(graph: OpGraph, answer: Estimate, more: dict[str, Any]) -> Iterator[Remedy]:
    """The largest micro-batch that fits, accumulated to the same global batch."""
    batch = answer.batch_per_gpu
    if graph.batch is None or batch is None:
        return
    for parts in range(2, batch + 1):
        if batch % parts:
            continue
        steps = answer.accumulation_steps * parts
        other = estimate_graph(
            graph,
            answer.allocation,
            batch_per_gpu=batch // parts,
            accumulation_steps=steps,
            strategy=answer.strategy,
            **more,
        )
        if other.fits == "yes":
            yield _remedy(f"micro-batches of {batch // parts}, {steps} accumulated", other, answer)
            return


def _strategies(graph: OpGraph, answer: Estimate, more: dict[str, Any]) -> Iterator[Remedy]:
    """Every strategy that shards something, on the same ranks."""
    if answer.ranks == 1:
        return
    for strategy in _STRATEGIES:
        if strategy == answer.strategy:
            continue
        other = _tried(graph, answer, answer.allocation, strategy, more)
        if other is not None and other.fits == "yes":
            yield _remedy(f"strategy {strategy}", other, answer)


def _more_devices(graph: OpGraph, answer: Estimate, more: dict[str, Any]) -> Iterator[Remedy]:
    """Twice the devices as often as needed, for the same global batch: replicas, then sharded."""
    groups = answer.allocation.groups
    if len(groups) > 1 or groups[0].machine is None:
        return
    for strategy in (answer.strategy, "fsdp"):
        factor = 2
        while factor <= _MOST_DEVICES_FACTOR:
            other = None
            for wider in _wider(answer.allocation, factor):
                other = other or _tried(graph, answer, wider, strategy, more)
            if other is not None and other.fits == "yes":
                yield _remedy(f"{other.allocation} with {strategy}", other, answer)
                break
            factor *= 2


def _wider(allocation: Allocation, factor: int) -> Iterator[Allocation]:
    """The same machine with `factor` times the devices, on as few nodes as have them first."""
    group, more_nodes = allocation.groups[0], 1
    while more_nodes <= factor:
        devices = group.devices_per_node * (factor // more_nodes)
        named = () if more_nodes < factor else group.devices
        wider = replace(group, devices_per_node=devices, devices=named)
        yield Allocation((replace(wider, nodes=group.nodes * more_nodes),))
        more_nodes *= 2


def _tried(
    graph: OpGraph, answer: Estimate, allocation: Allocation, strategy: str, more: dict[str, Any]
) -> Estimate | None:
    """The same global batch elsewhere; None where that is impossible or unknown."""
    try:
        return estimate_graph(
            graph,
            allocation,
            global_batch=answer.global_batch,
            accumulation_steps=answer.accumulation_steps,
            strategy=strategy,
            **more,
        )
    except (AllocationError, ProfileError, StrategyError, WorkloadError):
        return None


def _plans(answer: Estimate) -> Iterator[Remedy]:
    """Plans that move tensors to the host or compute them again, for one rank."""
    if answer.ranks > 1 or answer.accumulation_steps > 1:
        return
    device_bytes = answer.plan.kinds[0].device.usable_bytes
    budget = int(device_bytes * (1 - 2 * NOT_FIT_MARGIN_RATIO))
    try:
        problem = swap_problem(answer)
    except (ProfileError, WorkloadError):
        return
    for change, means in _PLANS:
        found = plan_within(problem, budget, means=means)
        if found.played.peak_bytes <= budget and (found.plan.swaps or found.plan.recomputes):
            yield _planned_remedy(change, found)


def _planned_remedy(change: str, found: Planned) -> Remedy:
    played = found.played
    moved = len(found.plan.swaps), len(found.plan.recomputes)
    words = " and ".join(
        text
        for count, text in zip(
            moved, (f"{moved[0]} swapped", f"{moved[1]} computed again"), strict=True
        )
        if count
    )
    return Remedy(
        change=f"{change} ({words})",
        peak_bytes=played.peak_bytes,
        step_time_s=played.step_s,
        cost_ratio=played.overhead_ratio,
    )
