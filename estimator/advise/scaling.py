"""Compute the scaling efficiency of a job, its slowest link, and the link rate that it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from estimator.coefficients import Calibration
from estimator.engine import estimate_graph
from estimator.estimates import Estimate
from estimator.graph.op_graph import OpGraph
from estimator.placement.allocation import Allocation, DeviceGroup
from estimator.placement.topology import Cluster
from estimator.timeline.plan import answer_of, at_link_rate

# The usual target when a network is sized (Goyal et al. 2017 report about 90 %).
WANTED_EFFICIENCY_RATIO = 0.9
_FASTEST_FACTOR = 2.0**40
# The rate found is within this ratio of the one that is needed.
_CLOSE_RATIO = 1.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Efficiency of an allocation against one device of its slowest kind, and its slowest link.

    `against` is that device, as an allocation of its own, calibrated like the answer itself.
    100 % is a step without communication or waiting: see `linear_step_s` for a sharded update.
    `needed_bytes_per_s` is the payload rate of `link` from which the efficiency would reach
    `wanted_ratio`; None where no rate would do, or nothing is sent between nodes.
    """

    efficiency_ratio: float
    against: str
    wanted_ratio: float
    link: str
    link_bytes_per_s: float | None
    needed_bytes_per_s: float | None


def scaling_of(
    graph: OpGraph,
    answer: Estimate,
    *,
    cluster: Cluster | None = None,
    calibration: Calibration | None = None,
    wanted_ratio: float = WANTED_EFFICIENCY_RATIO,
) -> Scaling:
    """The scaling of an estimate of `graph`, at its batch per device and accumulation.

    `cluster` and `calibration` are those that the estimate was asked under.
    """
    # A single device holds all shards.
    alone = replace(answer.plan.members.table.shape.strategy, shard=None)
    singles = [
        estimate_graph(
            graph,
            single,
            batch_per_gpu=batch,
            accumulation_steps=answer.accumulation_steps,
            strategy=alone,
            cluster=cluster,
            calibration=calibration,
            profile=None if named else answer.plan.ranks_by_kind[0].program.profile,
            loader=answer.loader,
        )
        for single, batch, named in _single_devices(answer, cluster)
    ]
    linear_s, against = max(
        (linear_step_s(single, share=answer.plan.share), str(single.allocation))
        for single in singles
    )
    group = answer.plan.slowest_group
    across = group.nodes > 1
    return Scaling(
        efficiency_ratio=linear_s / answer.step_time_s,
        against=against,
        wanted_ratio=wanted_ratio,
        link=group.link,
        link_bytes_per_s=group.bytes_per_s if across else None,
        needed_bytes_per_s=_needed_bytes_per_s(answer, linear_s / wanted_ratio) if across else None,
    )


def linear_step_s(smaller: Estimate, *, share: float) -> float:
    """Seconds of a smaller allocation's step of which each rank does a `share` of the update.

    Where the update is sharded, a single device updates all parameters: compared with its whole
    step, sharded training would seem to scale superlinearly.
    """
    return float(answer_of(smaller.plan._replace(share=share)).parts.total_s)


def _single_devices(
    answer: Estimate, cluster: Cluster | None
) -> list[tuple[Allocation, int | None, bool]]:
    """One device of each group, its batch, and whether its machine must be looked up by name."""
    groups = answer.allocation.groups
    batches = answer.batches or (None,) * len(groups)
    kinds = {
        (group.machine or group.host, batch): group
        for group, batch in zip(groups, batches, strict=True)
    }
    several = len({name for name, _ in kinds}) > 1
    return [
        (
            Allocation(
                (
                    DeviceGroup(
                        nodes=1,
                        devices_per_node=1,
                        machine=group.machine,
                        host=group.host,
                        devices=group.devices[:1],
                    ),
                )
            ),
            batch,
            cluster is not None or several,
        )
        for (_, batch), group in kinds.items()
    ]


def _needed_bytes_per_s(answer: Estimate, step_s: float) -> float | None:
    """The rate of the slowest link at which the step takes `step_s`, by bisection."""
    rate = answer.plan.slowest_group.bytes_per_s

    def is_reached(factor: float) -> bool:
        return float(answer_of(at_link_rate(answer.plan, factor)).parts.total_s) <= step_s

    if not is_reached(_FASTEST_FACTOR):
        return None
    low, high = 1.0 / _FASTEST_FACTOR, _FASTEST_FACTOR
    while high / low > _CLOSE_RATIO:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_reached(middle) else (middle, high)
    return float(rate * high)
