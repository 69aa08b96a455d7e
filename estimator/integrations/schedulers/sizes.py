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
    **asked: Any,
) -> Sizes:
    """The fewest nodes on which a step fits, and the most with `wanted_ratio` of linear speed.

    Linear is the throughput per node of the fewest. `asked` goes to `estimate_many`, as `strategy`
    and `calibration` do. Raises WorkloadError where it fits on no number of nodes, or why none has
    an answer.
    """
    each = devices or len(named_profile(machine).devices)
    nodes = range(1, max_nodes + 1)
    table = estimate_many(graph, [f"{count}x{each}:{machine}" for count in nodes], **asked)
    if not table.answered.any():
        raise WorkloadError(next(iter(table.errors.values())))
    fitting = [row for row in range(len(table)) if table.answered[row] and table.fits_code[row]]
    if not fitting:
        raise WorkloadError(
            f"{graph.name} fits on none of 1 to {max_nodes} nodes of {each} devices of "
            f"'{machine}'; shard it (strategy fsdp) or give more nodes"
        )
    per_node = table.samples_per_s / table.nodes
    linear = per_node[fitting[0]]
    used = [row for row in fitting if per_node[row] >= wanted_ratio * linear]
    return Sizes(machine=machine, devices=each, least=table[fitting[0]], most=table[max(used)])


def nnodes(found: Sizes) -> str:
    """What ``torchrun --nnodes`` takes: MIN:MAX, or one number where both are the same."""
    if found.least_nodes == found.most_nodes:
        return str(found.least_nodes)
    return f"{found.least_nodes}:{found.most_nodes}"


def torchrun(found: Sizes) -> list[str]:
    """The words of ``torchrun`` that say the size of a job."""
    return ["torchrun", f"--nnodes={nnodes(found)}", f"--nproc-per-node={found.devices}"]


def scaling_config(found: Sizes, **more: Any) -> Any:
    """The ``ray.train.ScalingConfig`` of the most nodes: one worker a device.

    `more` goes to ScalingConfig, as ``placement_strategy`` does. Raises ModelError without ray.
    """
    try:
        from ray.train import ScalingConfig
    except ImportError:
        raise ModelError("a ScalingConfig needs Ray Train; install 'ray[train]'") from None
    is_gpu = found.most.plan.kinds[0].program.profile.kind == "cuda"
    return ScalingConfig(num_workers=found.most.ranks, use_gpu=is_gpu, **more)
