"""Predict what a step waits for other devices and for other nodes, without running it.

After Stash (Sharma et al., ICDCS 2023): with the same batch on every device, the interconnect stall
is what one node's devices take beyond one device, as a share of the node's step; the network stall
is what all nodes take beyond one node, as a share of that node's step. The host stall is what one
device waits for its host to issue kernels, as a share of its step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from estimator.accuracy import Z_80
from estimator.estimates import OVERLAP_ERROR, Estimate
from estimator.placement.allocation import Allocation, DeviceGroup
from estimator.timeline.plan import answer_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Seconds of a step beyond those of a step without what it waits for; 80 % lie in the bounds.

    `ratio` is `stall_s` over the step that stalls are measured against.
    """

    stall_s: float
    low_s: float
    high_s: float
    ratio: float


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
    allocation: str | Allocation,
    answer_of: Callable[[Allocation, Sequence[int] | None], Estimate],
    *,
    against: str | Allocation | None = None,
) -> PredictedStalls:
    """Predict the stalls of an allocation by the estimates of it, of a node and of a device.

    `answer_of` estimates an allocation with a batch for each of its groups, None for its own.
    `against` stands for one node where a network stall is measured against another machine, as two
    nodes of four devices against one of eight. Of unlike machines the slowest is taken.
    """
    asked = Allocation.parse(allocation)
    whole = answer_of(asked, None)
    batches = whole.batches

    def slowest(groups: Sequence[DeviceGroup]) -> Estimate:
        each = [
            answer_of(Allocation((group,)), None if batches is None else (batches[number],))
            for number, group in enumerate(groups)
        ]
        return max(each, key=lambda answer: answer.step_time_s)

    nodes = [replace(group, nodes=1) for group in asked.groups]
    if against is not None:
        nodes = list(Allocation.parse(against).groups)
        batches = None if batches is None else (max(batches),) * len(nodes)
        node = answer_of(Allocation(tuple(nodes)), batches)
    else:
        node = slowest(nodes) if asked.nodes > 1 else whole
    device = slowest([_one_device(group) for group in nodes])
    return PredictedStalls(
        model=whole.model,
        batch_per_gpu=whole.batch_per_gpu,
        allocation=str(asked),
        one_node=str(node.allocation),
        one_device=str(device.allocation),
        step_s=whole.step_time_s,
        node_s=node.step_time_s,
        device_s=device.step_time_s,
        host=_host_stall(device),
        interconnect=_stall(node, device, of=node) if node.ranks > 1 else None,
        network=_stall(whole, node, of=node) if node is not whole else None,
    )


def _one_device(group: DeviceGroup) -> DeviceGroup:
    return replace(group, nodes=1, devices_per_node=1, devices=group.devices[:1])


def _host_stall(device: Estimate) -> Stall:
    stall_s = float(device.breakdown.host_exposed_s)
    error_s = stall_s * (device.high_s - device.low_s) / (2 * device.step_time_s)
    return Stall(
        stall_s=stall_s,
        low_s=stall_s - error_s,
        high_s=stall_s + error_s,
        ratio=stall_s / device.step_time_s,
    )


def _stall(longer: Estimate, shorter: Estimate, *, of: Estimate) -> Stall:
    """What one step takes beyond another; they compute alike, so only waiting is uncertain."""
    stall_s = longer.step_time_s - shorter.step_time_s
    error_s = Z_80 * _waiting_error_s(longer)
    return Stall(
        stall_s=stall_s,
        low_s=min(stall_s, max(0.0, stall_s - error_s)),
        high_s=stall_s + error_s,
        ratio=stall_s / of.step_time_s,
    )


def _waiting_error_s(answer: Estimate) -> float:
    found = answer_of(answer.plan).communication
    if found is None:
        return 0.0
    error = max(float(found.relative_error), OVERLAP_ERROR)
    return max(error * float(answer.breakdown.waiting_s), float(found.slower_s))
