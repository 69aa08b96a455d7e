"""Parameter servers: workers push gradients, servers update, workers pull parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from estimator.elementwise import maximum, where
from estimator.errors import ProfileError
from estimator.graph.memory.sizes import StepTensors
from estimator.graph.memory.step import Update
from estimator.machines.profile import MachineProfile
from estimator.placement.mesh import ProcessGroup
from estimator.placement.topology import Cluster, network_of, rates_by_ranks
from estimator.timeline.collectives.algorithms import Line
from estimator.timeline.collectives.costs import (
    FORMULA_ERROR,
    NO_CORRECTIONS,
    CollectiveModel,
    Lookup,
    SizedCollective,
    network_latency_s,
)
from estimator.timeline.rank.rules import DP, Groups, Ranks, rules_for
from estimator.timeline.strategies.ddp import BucketedNetwork, BucketedRules
from estimator.workload.strategies import ParameterServers


class ServerCosts:
    """A bucket pushed to parameter servers, its update pulled while the next one is pushed.

    Each server, on a node of its own, holds an equal part of every tensor. The workers of a node
    share its network; synchronous workers push together and share the servers' links, asynchronous
    ones mostly push alone (BytePS: Jiang et al., OSDI 2020).
    """

    corrections = (NO_CORRECTIONS,)

    def __init__(self, profiles: Sequence[MachineProfile], strategy: ParameterServers) -> None:
        self.profiles, self._strategy = profiles, strategy
        # What workers of one node reach the servers over, which their ring does not cross.
        self._networks = [network_of(profile) for profile in profiles]
        most = max((len(profile.devices) for profile in profiles), default=0)
        self._sent = rates_by_ranks(self._networks, most)
        self._latency_s = Lookup([network_latency_s(profile) for profile in profiles])

    def model(self, group: ProcessGroup) -> CollectiveModel:
        """Seconds of a bucket on its way to the servers and back."""
        alone, network = group.nodes == 1, group.network
        own_rate = self._sent[network, where(alone, group.per_node, 0)]
        rate = where(alone, own_rate, group.bytes_per_s)
        latency_s = where(alone, self._latency_s[network], group.latency_s)
        together = where(self._strategy.asynchronous, 1, group.ranks)
        server_rate = self._strategy.servers * (self._strategy.server_bytes_per_s or rate)
        return CollectiveModel(
            lines=(Line(2 * latency_s, maximum(group.per_node / rate, together / server_rate)),),
            reference=0 if isinstance(group.ranks, int) else np.zeros(len(group.ranks), np.intp),
            unlike=1.0,
            relative_error=FORMULA_ERROR,
            unknown=rate == np.inf,
        )

    def source(self, group: ProcessGroup) -> str:
        return "fitted"


class ServerNetwork(BucketedNetwork):
    """The queue of pushes and pulls, and the last bucket's way back."""

    @cached_property
    def _last(self) -> SizedCollective:
        return SizedCollective((NO_CORRECTIONS,), self._rules.bucket_bytes[-1:])

    def _after_s(self, ranks: Ranks, reduce: CollectiveModel) -> tuple[Any, Any]:
        return self._last.time_s(reduce) * ranks.ratio, False

    def missing(self, groups: Groups) -> ProfileError:
        return ProfileError(
            f"profile '{self._profiles[groups[DP][0].network].name}' has no network, over which "
            "parameter servers are reached; probe several nodes together, as 'estimator probe "
            "--launch' says"
        )


@rules_for(ParameterServers)
class ServerRules(BucketedRules[ParameterServers]):
    """Servers hold and update parameters; a rank holds a copy and no optimizer state."""

    network_class = ServerNetwork
    reduced_by = "push, pull"
    unmeasured = "its bytes over the slowest link of a worker or of the servers"

    def reduce_costs(self, profiles: Sequence[MachineProfile], cluster: Cluster | None) -> Any:
        return ServerCosts(profiles, self.strategy)

    def updates(self, tensors: StepTensors) -> tuple[Update, ...]:
        """A worker updates nothing."""
        return (Update(),)

    def update_share(self, ranks: Any) -> Any:
        # A server updates a bucket while the next ones come in; the last one's update is exposed.
        total_bytes = float(self.bucket_bytes.sum())
        last = float(self.bucket_bytes[-1:].sum())
        share = last / total_bytes / self.strategy.servers if total_bytes > 0 else 0.0
        return where(ranks > 1, share, 1.0)

    def words(self, ranks: int) -> str:
        servers = self.strategy.servers
        plural = "s" if servers > 1 else ""
        return (
            f"sending gradients of {ranks} ranks to {servers} parameter server{plural} and "
            "parameters back"
        )
