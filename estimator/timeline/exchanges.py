"""Cost the collectives inside a micro-batch, of ranks that share its layers."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from estimator.cache import Cache
from estimator.errors import ProfileError
from estimator.graph.exchanges import Collective, collectives_of
from estimator.graph.op_graph import BoundGraph
from estimator.machines.profile import CollectiveName, MachineProfile
from estimator.placement.mesh import Mesh
from estimator.placement.process_groups import ProcessGroup
from estimator.placement.topology import Cluster
from estimator.timeline.collectives import CollectiveCosts, SizedCollective
from estimator.timeline.durations import Durations
from estimator.workload import Strategy

Array = NDArray[np.float64]
_DDP = Strategy()


class ExchangeSeconds(NamedTuple):
    """Seconds of the collectives of a micro-batch, by operator, and what they are off together.

    `hidden_by` are (operator of a collective, kernel that runs meanwhile).
    """

    each_s: Array
    error_s: float
    source: str
    hidden_by: tuple[tuple[int, int], ...] = ()

    def exposed(self, durations: Durations) -> ExchangeSeconds:
        """What is left of those that run beside a kernel."""
        if not self.hidden_by:
            return self
        each_s, kernels_s = self.each_s.copy(), durations.device_s.copy()
        for place, kernel in self.hidden_by:
            hidden_s = min(each_s[place], kernels_s[kernel])
            each_s[place] -= hidden_s
            kernels_s[kernel] -= hidden_s
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


class Exchanges:
    """The process groups along the axes that share a micro-batch, on their links.

    Compared by identity, and kept in the engine's cache: one object for equal groups.
    """

    def __init__(
        self,
        groups: tuple[tuple[str, ProcessGroup], ...],
        profile: MachineProfile,
        cluster: Cluster | None,
        cache: Cache,
    ) -> None:
        self.groups = dict(groups)
        self._profile, self._cluster, self._cache = profile, cluster, cache

    def seconds(self, bound: BoundGraph) -> ExchangeSeconds:
        """What every collective of a graph takes alone; raises ProfileError where none tells."""
        each_s = np.zeros(len(bound.calls))
        found: dict[tuple[CollectiveName, str], list[Collective]] = {}
        beside = []
        for collective in self._cache.get("collectives", (bound,), lambda: collectives_of(bound)):
            # On CPUs a collective is work for the cores that compute.
            if collective.axis not in self.groups:
                # A group of one rank.
                continue
            if collective.beside is not None and bound.graph.target == "cuda":
                beside.append((collective.op_index, collective.beside))
            found.setdefault((collective.op, collective.axis), []).append(collective)
        error_s, sources = 0.0, {"measured"}
        for (op, axis), some in found.items():
            group, kind = self.groups[axis], bound.graph.target
            costs = CollectiveCosts((self._profile,), op, kind, self._cluster, self._cache)
            model = costs.model(group)
            if model.unknown:
                raise ProfileError(
                    f"profile '{self._profile.name}' has no {op.replace('_', '-')} costs, which "
                    f"{axis} needs; run 'estimator probe' with a larger --budget"
                )
            sizes = np.array([float(each.size_bytes) for each in some])
            times_s = SizedCollective(costs.corrections, sizes).times_s(model)
            times_s = times_s * np.array([each.share for each in some])
            each_s[[each.op_index for each in some]] = times_s
            error_s += float(times_s.sum()) * float(model.relative_error)
            sources.add(costs.source(group))
        source = max(sources - {"measured"}, default="measured")
        return ExchangeSeconds(each_s, error_s, source, tuple(beside))


def exchanges_of(mesh: Mesh, cache: Cache, strategy: Strategy = _DDP) -> Exchanges:
    """Those of a mesh: of the groups along an axis, which work at once, the slowest counts.

    Gradients of experts are exchanged among the operators, but where FSDP does it with all others.
    """
    axes = ["tp", "cp"] + ["ep"] * (mesh.parallelism.ep > 1)
    axes += ["expert_dp"] * (mesh.parallelism.ep > 1 and strategy.kind != "fsdp")
    found = [
        (axis, *min(groups, key=lambda each: each[0].bytes_per_s))
        for axis in axes
        if (groups := mesh.groups(axis))
    ]
    named = tuple((axis, group) for axis, group, _ in found)
    profile, cluster = found[0][2].profile, mesh.placement.cluster
    return cache.get(
        "exchanges",
        (profile, cluster),
        lambda: Exchanges(named, profile, cluster, cache),
        named,
    )


NO_EXCHANGES = ExchangeSeconds(np.zeros(0), 0.0, "measured")
