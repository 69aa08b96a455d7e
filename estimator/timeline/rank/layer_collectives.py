"""Cost the collectives inside a micro-batch, of ranks that share its layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from estimator.cache import Cache
from estimator.elementwise import Array, Flags, Indices
from estimator.errors import ProfileError
from estimator.graph.ir.collectives import (
    WORLD,
    Collective,
    adds_in_switch,
    collectives_of,
    own_ranks,
)
from estimator.graph.ir.op_graph import BoundGraph, OpGraph
from estimator.graph.ir.ops import GraphColumns
from estimator.graph.partition.experts import EXPERT_DP
from estimator.kernels.durations import Durations, columns_of
from estimator.machines.profile import CollectiveName, MachineProfile
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

    def _alike(self, bound: BoundGraph) -> list[_AlikeCollectives]:
        def found() -> tuple[_AlikeCollectives, ...]:
            return tuple(_AlikeCollectives.of(bound, columns_of(bound.graph, self.cache)))

        every = self.cache.get("collectives", (bound,), found)
        # A group of one rank exchanges nothing.
        return [some for some in every if some.axis in self.groups]

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
        collectives = self._alike(bound)
        windows_s = (
            None if durations is None else _before_s([c.ops for c in collectives], durations)
        )
        host_s = self.profile.host.dtensor_exchange_s if self.profile.host else 0.0
        error_s, sources = 0.0, {"measured"}
        reads, summed_again = RULES[graph.optimizer].gradient_reads, 0
        gradients: list[int] = []
        for some in collectives:
            costs, model = self._model(some, graph)
            before_s = None if windows_s is None else windows_s[some.ops]
            times_s = some.shares * _blocking_s(costs, model, some, before_s)
            if some.axis == EXPERT_DP:
                # Gradients of experts are reduced with the last micro-batch, as all others are.
                times_s = times_s / self.micro_batches
                gradients += some.ops.tolist()
            if durations is None:
                # One sum for many micro-batches.
                times_s = np.where(some.of_update, 0.0, times_s)
            elif not self.merges:
                sums = np.where(some.of_update, reads / micro_batches, 1.0)
                times_s = sums * times_s + np.maximum(sums - 1.0, 0.0) * host_s
                summed_again += int(some.of_update.sum()) if reads > 1 else 0
            each_s[some.ops] = times_s
            group = self.groups[some.axis]
            error_s += float(times_s.sum()) * float(costs.relative_error(group, model))
            sources.add(costs.source(group))
        source = max(sources - {"measured"}, default="measured")
        rings = tuple([op for c in collectives for op in c.rings])
        passing = [op for c in collectives for op in c.passing]
        # By place: two may run beside one kernel.
        beside = sorted(chain.from_iterable(c.beside for c in collectives), key=itemgetter(0))
        if graph.recipe is not None and gradients:
            each_s[gradients] *= self._not_hidden(each_s[gradients], graph, durations)
        timed = LayerCollectiveSeconds(each_s, error_s, source, tuple(beside), rings, summed_again)
        if durations is not None:
            return self._beside_passes(timed.exposed(durations), durations, passing)
        # Beside another micro-batch they may add nothing.
        each_s[passing] = 0.0
        return timed

    def _model(
        self, some: _AlikeCollectives, graph: OpGraph
    ) -> tuple[CollectiveCosts, CollectiveModel]:
        """What alike collectives cost; raises ProfileError if unknown."""
        op, axis = some.op, some.axis
        of = op, graph.target, self.cluster, self.cache, some.copies, adds_in_switch(graph)
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


class _AlikeCollectives(NamedTuple):
    """The collectives of a graph that one model costs, in order of issue.

    `size_of` are the numbers of each one's among the distinct sizes, `beside` (operator of a
    collective, kernel that runs meanwhile).
    """

    op: CollectiveName
    axis: str
    copies: int
    ops: Indices
    sizes_bytes: Array
    size_of: Indices
    shares: Array
    of_update: Flags
    beside: list[tuple[int, int]]
    rings: list[int]
    passing: list[int]

    @classmethod
    def of(cls, bound: BoundGraph, columns: GraphColumns) -> Iterator[_AlikeCollectives]:
        """Those of a graph, in order of the first of each."""
        groups: dict[tuple[CollectiveName, str, int], list[Collective]] = {}
        for one in collectives_of(bound, columns):
            groups.setdefault((one.op, one.axis, one.copies), []).append(one)
        # On CPUs a collective is work for the cores that compute.
        hides = bound.graph.target == "cuda"
        for alike, some in groups.items():
            sizes, size_of = np.unique([float(c.size_bytes) for c in some], return_inverse=True)
            yield cls(
                *alike,
                ops=np.array([c.op_index for c in some], dtype=np.intp),
                sizes_bytes=sizes,
                size_of=size_of,
                shares=np.array([c.share for c in some]),
                of_update=np.array([c.of_update for c in some], dtype=np.bool_),
                beside=[
                    (c.op_index, kernel)
                    for c in some
                    for kernel in (c.beside if hides else None, *c.pieces)
                    if kernel is not None
                ],
                rings=[c.op_index for c in some if c.pieces],
                passing=[c.op_index for c in some if c.beside_passes],
            )


def _before_s(ops: Sequence[Indices], durations: Durations) -> Array:
    """For each of `ops` how long a rank computes before it since the one before."""
    computed_s = np.cumsum(durations.device_s + durations.host_s)
    windows_s = np.zeros(len(computed_s))
    places = np.sort(np.concatenate([np.zeros(0, dtype=np.intp), *ops]))
    windows_s[places] = np.diff(computed_s[places], prepend=-np.inf)
    return windows_s


def _blocking_s(
    costs: CollectiveCosts,
    model: CollectiveModel,
    some: _AlikeCollectives,
    windows_s: Array | None,
) -> Array:
    """Seconds of collectives over one group that ranks wait for, each after computing so long.

    Between the windows that were measured on a line, after longer ones as after the longest; after
    any (None) the least of all. As calls in a row where the nearest measured group has no blocking
    ones.
    """
    sizes, size_of = some.sizes_bytes, some.size_of
    known = model.reference < len(costs.references)
    blocking = costs.references[model.reference].blocking if known else ()
    if not blocking:
        return SizedCollective(costs.corrections, sizes).times_s(model)[size_of]
    alone = model._replace(reference=0)
    # (windows, sizes)
    times_s = np.array(
        [SizedCollective((collective,), sizes).times_s(alone) for _, collective in blocking]
    )
    if windows_s is None:
        return np.asarray(times_s.min(axis=0)[size_of])
    measured_s, rows = [window_s for window_s, _ in blocking], np.arange(len(blocking))
    after = np.interp(windows_s, measured_s, rows)
    before = after.astype(np.intp)
    shorter_s, longer_s = (
        times_s[before, size_of],
        times_s[np.minimum(before + 1, rows[-1]), size_of],
    )
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
    # What is exchanged beside passes, and once in a step, is of experts alone.
    micro_batches, alone = (mesh.micro_batches, _passes_alone(mesh)) if mesh.ep > 1 else (1, 1.0)
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
