"""Cost what sharded strategies and parameter servers add to a step beside bucketed all-reduces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from estimator.errors import ProfileError
from estimator.placement import nic_of
from estimator.profile import CollectiveName, MachineProfile
from estimator.timeline.collectives import (
    NO_CORRECTIONS,
    CollectiveModel,
    collective_model,
    network_latency_s,
)
from estimator.timeline.program import LaneUnit, StepProgram
from estimator.timeline.rings import Ring
from estimator.workload import Strategy

# What carries one bucket of gradients; parameter servers have a formula of their own.
REDUCE_OPS: dict[str, CollectiveName] = {
    "ddp": "all_reduce",
    "zero1": "all_reduce",
    "zero2": "reduce_scatter",
    "fsdp": "reduce_scatter",
    "ps": "all_reduce",
}


@dataclass(frozen=True, slots=True)
class Sharding:
    """What a strategy adds: exposed before the update, after it, and how much of it a rank does.

    `gathers_s` are the exposed gatherings and scatterings of FSDP's units; `after_s` follows the
    update; a rank's update takes launch + `update_share` · the rest.
    """

    gathers_s: float = 0.0
    after_s: float = 0.0
    update_share: float = 1.0


NO_SHARDING = Sharding()


def needed_model(profile: MachineProfile, op: CollectiveName, ring: Ring) -> CollectiveModel:
    """The cost of a collective that the strategy cannot do without; raises ProfileError."""
    found = collective_model(profile, op, ring)
    if found is None:
        raise ProfileError(
            f"profile '{profile.name}' has no {op.replace('_', '-')} costs; run 'estimator probe' "
            "with a larger --budget"
        )
    return found


def reduce_model(program: StepProgram, profile: MachineProfile, ring: Ring) -> CollectiveModel:
    """What merges one bucket of gradients under the program's strategy."""
    strategy = program.strategy
    if strategy.kind == "ps":
        return server_model(strategy, profile, ring)
    return needed_model(profile, REDUCE_OPS[strategy.kind], ring)


def server_model(strategy: Strategy, profile: MachineProfile, ring: Ring) -> CollectiveModel:
    """A bucket pushed to parameter servers, its update pulled while the next one is pushed.

    Each server, on a node of its own, holds an equal part of every tensor. The workers of a node
    share its network; synchronous workers push together and share the servers' links, asynchronous
    ones mostly push alone (BytePS: Jiang et al., OSDI 2020). Raises ProfileError.
    """
    node_bytes_per_s, latency_s = ring.bytes_per_s, ring.latency_s
    if ring.nodes == 1:
        found = nic_of(profile, ring.per_node)
        if found is None:
            raise ProfileError(
                f"profile '{profile.name}' has no network, over which parameter servers are "
                "reached; probe several nodes together, as 'estimator probe --launch' says"
            )
        node_bytes_per_s, latency_s = found, network_latency_s(profile)
    together = 1 if strategy.asynchronous else ring.ranks
    server_bytes_per_s = strategy.server_bytes_per_s or node_bytes_per_s
    beta = max(ring.per_node / node_bytes_per_s, together / (strategy.servers * server_bytes_per_s))
    return CollectiveModel("all_reduce", 2 * latency_s, beta, NO_CORRECTIONS, "fitted", 0.3)


def sharding_of(
    program: StepProgram, profile: MachineProfile, ring: Ring, ratio: float = 1.0
) -> Sharding:
    """What the strategy of a program adds on a group of ranks; `ratio` scales its collectives."""
    kind, ranks = program.strategy.kind, ring.ranks
    if ranks <= 1 or kind == "ddp":
        return NO_SHARDING
    sizes = [float(p.spec.nbytes) for p in program.bound.graph.parameters if p.gradient is not None]
    if kind == "zero1":
        # ZeroRedundancyOptimizer broadcasts every tensor from the rank that has updated it.
        model = needed_model(profile, "broadcast", ring)
        after_s = float(model.times_s(np.array(sizes)).sum()) * ratio
        return Sharding(after_s=after_s, update_share=1.0 / ranks)
    if kind == "zero2":
        model = needed_model(profile, "all_gather", ring)
        after_s = float(model.times_s(program.bucket_bytes).sum()) * ratio
        return Sharding(after_s=after_s, update_share=1.0 / ranks)
    if kind == "fsdp" and not program.units:
        return Sharding(update_share=1.0 / ranks)
    if kind == "fsdp":
        gather = needed_model(profile, "all_gather", ring)
        scatter = needed_model(profile, "reduce_scatter", ring)
        unit_bytes = np.array([float(unit.parameter_bytes) for unit in program.units])
        gather_s = gather.times_s(unit_bytes) * ratio
        scatter_s = scatter.times_s(unit_bytes) * ratio
        exposed = blocking_s if program.bound.graph.target == "cpu" else prefetching_s
        return Sharding(
            gathers_s=exposed(program.units, gather_s.tolist(), scatter_s.tolist()),
            update_share=1.0 / ranks,
        )
    # A server updates a bucket while the next ones come in; the last one's update and its way back
    # are exposed.
    last, whole = float(program.bucket_bytes[-1:].sum()), float(program.bucket_bytes.sum())
    last_s = server_model(program.strategy, profile, ring).time_s(last) * ratio
    return Sharding(after_s=last_s, update_share=last_share(program.strategy, last, whole))


def last_share(strategy: Strategy, last_bytes: float, whole_bytes: float) -> float:
    """The part of an update that a parameter server does after the last push."""
    return last_bytes / whole_bytes / strategy.servers if whole_bytes > 0 else 0.0


def blocking_s(
    units: Sequence[LaneUnit], gather_s: Sequence[float], scatter_s: Sequence[float]
) -> float:
    """Exposed seconds where every collective blocks its rank, as FSDP's do on CPUs.

    The first unit, the rest of the model, is gathered once, all others in either phase.
    """
    return 2 * sum(gather_s) - gather_s[0] + sum(scatter_s)


def prefetching_s(
    units: Sequence[LaneUnit], gather_s: Sequence[float], scatter_s: Sequence[float]
) -> float:
    """Exposed seconds where the next unit is gathered while one computes, on one network queue.

    torch.distributed.fsdp (FSDP2): a unit's gathering begins with the compute of the unit before
    it; its gradients are scattered once its backward pass has ended, behind the gathering that was
    issued before.
    """
    count = len(units)
    compute = network = started = gather_s[0]
    for index in range(count):
        if index:
            network = max(network, started) + gather_s[index]
            compute = max(compute, network)
        started = compute
        compute += units[index].forward_s
    gathered = compute
    for index in reversed(range(count)):
        if index == count - 1 and index:
            network = gathered = max(network, compute) + gather_s[index]
        if index:
            compute = max(compute, gathered)
        started = compute
        if index > 1:
            network = gathered = max(network, started) + gather_s[index - 1]
        compute += units[index].backward_s
        network = max(network, compute) + scatter_s[index]
    alone = sum(unit.forward_s + unit.backward_s for unit in units)
    return max(compute, network) - alone
