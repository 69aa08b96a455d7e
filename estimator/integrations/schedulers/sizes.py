"""How many nodes a job can use, and sizes of elastic jobs as torchrun and Ray Train take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from estimator.errors import ModelError, WorkloadError
from estimator.estimates.estimate import Estimate
from estimator.estimates.table import estimate_many
from estimator.graph.ir.op_graph import OpGraph
from estimator.machines.catalogue import named_profile

# The usual target when a network is sized (Goyal et al. 2017 report about 90 %).
WANTED_RATIO = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The fewest and the most nodes of a machine type, each with all of `devices`."""

    machine: str
    devices: int
    least: Estimate
    most: Estimate

    @property
    def least_nodes(self) -> int:
        return self.least.allocation.nodes

    @property
    def most_nodes(self) -> int:
        return self.most.allocation.nodes


def sizes(
    graph: OpGraph,
    machine: str,
    *,
    max_nodes: int,
    devices: int | None = None,
    wanted_ratio: float = WANTED_RATIO,
    **options: Any,
) -> Sizes:
    """The fewest nodes on which a step fits, and the most with `wanted_ratio` of linear speed.

    Linear is the throughput per node of the fewest. `options` go to `estimate_many`, as `strategy`
    and `calibration` do. Raises WorkloadError where it fits on no number of nodes, or why none has
    an answer.
    """
    on_node = devices or len(named_profile(machine).devices)
    nodes = range(1, max_nodes + 1)
    table = estimate_many(graph, [f"{count}x{on_node}:{machine}" for count in nodes], **options)
    if not table.answered.any():
        raise WorkloadError(next(iter(table.errors.values())))
    fitting = [row for row in range(len(table)) if table.answered[row] and table.fits_code[row]]
    if not fitting:
        raise WorkloadError(
            f"{graph.name} fits on none of 1 to {max_nodes} nodes of {on_node} devices of "
            f"'{machine}'; shard it (strategy fsdp) or give more nodes"
        )
    per_node = table.samples_per_s / table.nodes
    linear = per_node[fitting[0]]
    used = [row for row in fitting if per_node[row] >= wanted_ratio * linear]
    return Sizes(machine=machine, devices=on_node, least=table[fitting[0]], most=table[max(used)])


def nnodes(elastic: Sizes) -> str:
    """What ``torchrun --nnodes`` takes: MIN:MAX, or one number where both are the same."""
    if elastic.least_nodes == elastic.most_nodes:
        return str(elastic.least_nodes)
    return f"{elastic.least_nodes}:{elastic.most_nodes}"


def torchrun(elastic: Sizes) -> list[str]:
    """The words of ``torchrun`` that say the size of a job."""
    return ["torchrun", f"--nnodes={nnodes(elastic)}", f"--nproc-per-node={elastic.devices}"]


def scaling_config(elastic: Sizes, **more: Any) -> Any:
    """The ``ray.train.ScalingConfig`` of the most nodes: one worker a device.

    `more` goes to ScalingConfig, as ``placement_strategy`` does. Raises ModelError without ray.
    """
    try:
        from ray.train import ScalingConfig
    except ImportError:
        raise ModelError("a ScalingConfig needs Ray Train; install 'ray[train]'") from None
    is_gpu = elastic.most.plan.kinds[0].program.profile.kind == "cuda"
    return ScalingConfig(num_workers=elastic.most.ranks, use_gpu=is_gpu, **more)
