"""Cost the collectives inside a micro-batch, of ranks that share its layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from estimator.cache import Cache
from estimator.elementwise import Array
from estimator.errors import ProfileError
from estimator.graph.ir.collectives import (
    WORLD,
    Collective,
    adds_in_switch,
    collectives_of,
    own_ranks,
)
from estimator.graph.ir.op_graph import BoundGraph, OpGraph
from estimator.graph.partition.experts import EXPERT_DP
from estimator.kernels.durations import Durations, columns_of
from estimator.machines.profile import CollectiveName, DeviceKind, MachineProfile
from estimator.placement.mesh import Mesh, ProcessGroup, slowest_network
from estimator.placement.topology import Cluster
from estimator.timeline.collectives.costs import CollectiveCosts, CollectiveModel, SizedCollective
from estimator.workload.optimizers import RULES
from estimator.workload.strategies import DDP, Strategy

_DDP = DDP()
# HybridEP is given 32 (Megatron-Bridge, scripts/performance/utils/overrides.py).
_DISPATCH_MULTIPROCESSORS = 32.0
# What userbuffers' rings leave uncovered: no figure is published; of four ranks' pieces the last
# one waits for nothing, and copies take some of the multiprocessors.
_RING_EXPOSED_RATIO = 0.25


class LayerCollectiveSeconds(NamedTuple):
    """Seconds of the collectives of a micro-batch, by operator, and what they are off together.

    `hidden_by` are (operator of a collective, kernel that runs meanwhile), `rings` the collectives
    that go around in pieces, the last of which nothing hides. `summed_again` are the gradients
    that DTensor sums for each operator of the update that reads them.
    """

    each_s: Array
    error_s: float
    source: str
    hidden_by: tuple[tuple[int, int], ...] = ()
    rings: tuple[int, ...] = ()
    summed_again: int = 0

    def exposed(self, durations: Durations) -> LayerCollectiveSeconds:
        """What is left of those that run beside a kernel."""
        if not self.hidden_by:
            return self
        each_s, kernels_s = self.each_s.copy(), durations.device_s.copy()
        shown_s = _RING_EXPOSED_RATIO * each_s[list(self.rings)]
        for place, kernel in self.hidden_by:
            hidden_s = min(each_s[place], kernels_s[kernel])
            each_s[place] -= hidden_s
            kernels_s[kernel] -= hidden_s
        each_s[list(self.rings)] = np.maximum(each_s[list(self.rings)], shown_s)
        return self._replace(each_s=each_s)

    @property
    def total_s(self) -> float:
        return float(self.each_s.sum())

    def beside(self, durations: Durations) -> Durations:
        """The durations with what ranks exchange, which they wait for as for a kernel."""
        return replace(durations, device_s=durations.device_s + self.each_s)

    @property
    def relative_error(self) -> float | None:
        return self.error_s / self.total_s if self.total_s else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCollectives:
    """The process groups along the axes that share a micro-batch, on their links.

    Where nothing `merges` gradients before the update, DTensor sums those of vectors that ranks
    have in parts for each operator of the update that reads them. Compared by identity, and kept in
    the engine's cache: one object for equal groups.
    """

    groups: Mapping[str, ProcessGroup]
    profile: MachineProfile
    cluster: Cluster | None
    cache: Cache
    merges: bool = True
    micro_batches: int = 1
    passes_alone: float = 1.0

    def _collectives(self, bound: BoundGraph) -> list[Collective]:
        columns = columns_of(bound.graph, self.cache)
        every = self.cache.get("collectives", (bound,), lambda: collectives_of(bound, columns))
        # A group of one rank exchanges nothing.
        return [collective for collective in every if collective.axis in self.groups]

    def seconds(
        self, bound: BoundGraph, durations: Durations | None = None, micro_batches: int = 1
    ) -> LayerCollectiveSeconds:
        """What ranks wait for every collective of a graph, in one of the micro-batches of a step.

        The operators between two collectives are the computing before the second; none is known
        to stand shortly before the first. Without durations each takes the least that it does after
        any computing, and those that run beside a kernel are not hidden by it. Raises ProfileError
        where nothing tells what one costs.
        """
        each_s, graph = np.zeros(len(bound.calls)), bound.graph
        of_groups: dict[tuple[CollectiveName, str, int], list[Collective]] = {}
        collectives = self._collectives(bound)
        places = [collective.op_index for collective in collectives]
        windows_s = None if durations is None else _before_s(places, durations)
        host_s = self.profile.host.dtensor_exchange_s if self.profile.host else 0.0
        for collective in collectives:
            alike = collective.op, collective.axis, collective.copies
            of_groups.setdefault(alike, []).append(collective)
        error_s, sources = 0.0, {"measured"}
        reads, summed_again = RULES[graph.optimizer].gradient_reads, 0
        gradients: list[int] = []
        for (op, axis, copies), some in of_groups.items():
            costs, model = self._model(op, axis, copies, graph)
            sizes = np.array([float(collective.size_bytes) for collective in some])
            own = [collective.op_index for collective in some]
            before_s = None if windows_s is None else windows_s[own]
            times_s = _blocking_s(costs, model, sizes, before_s)
            times_s = times_s * np.array([collective.share for collective in some])
            if axis == EXPERT_DP:
                # Gradients of experts are reduced with the last micro-batch, as all others are.
                times_s = times_s / self.micro_batches
                gradients += own
            of_update = np.array([collective.of_update for collective in some])
            if durations is None:
                # One sum for many micro-batches.
                times_s = np.where(of_update, 0.0, times_s)
            elif not self.merges:
                sums = np.where(of_update, reads / micro_batches, 1.0)
                times_s = sums * times_s + np.maximum(sums - 1.0, 0.0) * host_s
                summed_again += int(of_update.sum()) if reads > 1 else 0
            each_s[own] = times_s
            error_s += float(times_s.sum()) * float(costs.relative_error(self.groups[axis], model))
            sources.add(costs.source(self.groups[axis]))
        source = max(sources - {"measured"}, default="measured")
        rings = tuple(collective.op_index for collective in collectives if collective.pieces)
        beside = _kernels_beside(collectives, graph.target)
        if graph.recipe is not None and gradients:
            each_s[gradients] *= self._not_hidden(each_s[gradients], graph, durations)
        timed = LayerCollectiveSeconds(each_s, error_s, source, beside, rings, summed_again)
        passing = [collective.op_index for collective in collectives if collective.beside_passes]
        if durations is not None:
            return self._beside_passes(timed.exposed(durations), durations, passing)
        # Beside another micro-batch they may add nothing.
        each_s[passing] = 0.0
        return timed

    def _model(
        self, op: CollectiveName, axis: str, copies: int, graph: OpGraph
    ) -> tuple[CollectiveCosts, CollectiveModel]:
        """What collectives of a kind cost along an axis; raises ProfileError if unknown."""
        of = op, graph.target, self.cluster, self.cache, copies, adds_in_switch(graph)
        costs = CollectiveCosts((self.profile,), *of)
        model = costs.model(self.groups[axis])
        if model.unknown:
            asker = "the model itself" if axis == WORLD else axis
            raise ProfileError(
                f"profile '{self.profile.name}' has no {op.replace('_', '-')} costs, which "
                f"{asker} needs; run 'estimator probe' with a larger --budget"
            )
        return costs, model

    def _not_hidden(self, gradients_s: Array, graph: OpGraph, durations: Durations | None) -> float:
        """The share of exchanges of experts' gradients, and weights, that no pass hides.

        Megatron-LM scatters sums beside the last backward pass, and gathers weights beside the next
        forward one (overlap_grad_reduce, overlap_param_gather); the last gradients are ready when
        that has ended, and the first weights are needed when this begins.
        """
        if durations is None or not gradients_s.any():
            return 0.0
        total_s = float(gradients_s.sum()) * self.micro_batches
        is_forward = np.array([op.phase == "forward" for op in graph.ops])
        one_way_s, alone_s = total_s / 2, total_s / len(gradients_s)
        left_s = sum(
            max(one_way_s - float(durations.device_s[phase].sum()), 0.0)
            for phase in (is_forward, ~is_forward)
        )
        return min(max(left_s, alone_s) / total_s, 1.0)

    def _beside_passes(
        self, timed: LayerCollectiveSeconds, durations: Durations, passing: list[int]
    ) -> LayerCollectiveSeconds:
        """What is left of exchanges that run while another micro-batch is computed.

        They take multiprocessors from it. Passes before the first backward one, and after the last
        forward one, have none beside them.
        """
        sent_s = float(timed.each_s[passing].sum())
        if not sent_s:
            return timed
        computed_s = float(durations.device_s.sum())
        taken = _DISPATCH_MULTIPROCESSORS / _multiprocessors(self.profile)
        left = max(sent_s - computed_s, min(taken, 1.0) * sent_s) / sent_s
        each_s, alone = timed.each_s.copy(), min(self.passes_alone, 1.0)
        each_s[passing] *= alone + (1.0 - alone) * left
        return timed._replace(each_s=each_s)


def _kernels_beside(
    collectives: Sequence[Collective], target: DeviceKind
) -> tuple[tuple[int, int], ...]:
    """(operator of a collective, kernel that runs meanwhile) of all that run beside one."""
    pairs = []
    for collective in collectives:
        # On CPUs a collective is work for the cores that compute.
        if collective.beside is not None and target == "cuda":
            pairs.append((collective.op_index, collective.beside))
        pairs += [(collective.op_index, piece) for piece in collective.pieces]
    return tuple(pairs)


def _before_s(places: Sequence[int], durations: Durations) -> Array:
    """For each of `places`, in order, how long a rank computes before it since the one before."""
    computed_s = np.cumsum(durations.device_s + durations.host_s)
    windows_s = np.zeros(len(computed_s))
    windows_s[list(places)] = np.diff(computed_s[list(places)], prepend=-np.inf)
    return windows_s


def _blocking_s(
    costs: CollectiveCosts, model: CollectiveModel, sizes_bytes: Array, windows_s: Array | None
) -> Array:
    """Seconds of collectives over one group that ranks wait for, each after computing so long.

    Between the windows that were measured on a line, after longer ones as after the longest; after
    any (None) the least of all. As calls in a row where the nearest measured group has no blocking
    ones.
    """
    known = model.reference < len(costs.references)
    blocking = costs.references[model.reference].blocking if known else ()
    if not blocking:
        return SizedCollective(costs.corrections, sizes_bytes).times_s(model)
    alone = model._replace(reference=0)
    # (windows, sizes)
    times_s = np.array(
        [SizedCollective((collective,), sizes_bytes).times_s(alone) for _, collective in blocking]
    )
    if windows_s is None:
        return np.asarray(times_s.min(axis=0))
    measured_s, rows = [window_s for window_s, _ in blocking], np.arange(len(blocking))
    after, size = np.interp(windows_s, measured_s, rows), np.arange(len(sizes_bytes))
    before = after.astype(np.intp)
    shorter_s, longer_s = times_s[before, size], times_s[np.minimum(before + 1, rows[-1]), size]
    return np.asarray(shorter_s + (after - before) * (longer_s - shorter_s))


def ranks_of_own(graph: OpGraph, cache: Cache) -> int | None:
    """Among how many ranks collectives that the model calls itself were traced, if any."""
    return cache.get("own ranks", (graph,), lambda: own_ranks(graph))


def layer_collectives_of(
    mesh: Mesh, cache: Cache, strategy: Strategy = _DDP, *, of_all: bool = False
) -> LayerCollectives:
    """Those of a mesh: of the groups along an axis, which work at once, the slowest counts.

    Gradients of experts are exchanged among the operators, but where FSDP does it with all others.
    `of_all` says that the model calls collectives of all ranks itself.
    """
    axes = ["tp", "cp"] + ["ep"] * (mesh.ep > 1)
    axes += [EXPERT_DP] * (mesh.ep > 1 and strategy.keeps.parameters == "whole")
    by_axis = [
        (axis, *min(groups, key=lambda group_of_kind: group_of_kind[0].bytes_per_s))
        for axis in axes
        if (groups := mesh.groups(axis))
    ]
    if of_all:
        by_axis.append((WORLD, mesh.whole_group, slowest_network(mesh.placement)))
    named = tuple((axis, group) for axis, group, _ in by_axis)
    merges = strategy.keeps.parameters == "shard" or mesh.dp > 1
    profile, cluster = by_axis[0][2].profile, mesh.placement.cluster
    micro_batches, alone = mesh.micro_batches, _passes_alone(mesh)
    return cache.get(
        "exchanges",
        (profile, cluster),
        lambda: LayerCollectives(
            groups=dict(named),
            profile=profile,
            cluster=cluster,
            cache=cache,
            merges=merges,
            micro_batches=micro_batches,
            passes_alone=alone,
        ),
        *(named, merges, micro_batches, alone),
    )


def _multiprocessors(profile: MachineProfile) -> float:
    count = profile.devices[0].details.get("sm_count")
    return float(count) if isinstance(count, int | float) and count > 0 else math.inf


def _passes_alone(mesh: Mesh) -> float:
    """The share of a rank's passes in a direction beside which it has none in the other.

    Those of the first rank before its first backward pass, in Megatron-LM's schedules: one more
    than it has in flight to fill the pipeline (schedules.py, get_pp_rank_microbatches).
    """
    virtual = mesh.layout.schedule.virtual if mesh.pp > 1 else 1
    first = 2 * (mesh.pp - 1) + (virtual - 1) * mesh.pp + 1
    return first / (virtual * mesh.micro_batches)


NO_LAYER_COLLECTIVES = LayerCollectiveSeconds(np.zeros(0), 0.0, "measured")
