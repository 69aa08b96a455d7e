"""How many nodes a job can use: from the fewest that hold it to the most that it uses well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from estimator.errors import WorkloadError
from estimator.estimates import Estimate
from estimator.graph.op_graph import OpGraph
from estimator.machines.catalogue import named_profile
from estimator.tables import estimate_many

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
    and `calibration` do. Raises WorkloadError where it fits on no number of nodes.
    """
    each = devices or len(named_profile(machine).devices)
    nodes = range(1, max_nodes + 1)
    table = estimate_many(graph, [f"{count}x{each}:{machine}" for count in nodes], **asked)
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
