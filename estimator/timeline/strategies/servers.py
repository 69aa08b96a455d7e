"""Parameter servers: workers push gradients, servers update, workers pull parameters.

Of a byte of gradients, with w pushes of it from n nodes, p of each, the network of a node of
workers carries p·(1 − x) + (w − p)·x each way, where its own server has the share x of all tensors,
and that of a server elsewhere w·y, where it has y: n·x + k·y = 1 over k of these, and x makes both
take as long (Jiang et al., "A Unified Architecture for Accelerating Distributed DNN Training"
(BytePS), OSDI 2020, section 4.1, whose formula it is where all networks are alike and p = 1).
Pushes pass through the host's memory, where a server beside workers adds them up.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from estimator.elementwise import maximum, minimum, where
from estimator.errors import ProfileError
from estimator.graph.ir.collectives import adds_in_switch
from estimator.graph.memory.sizes import StepTensors
from estimator.graph.memory.step import Update
from estimator.kernels.durations import costed
from estimator.machines.profile import MachineProfile
from estimator.placement.mesh import ProcessGroup
from estimator.placement.placement import hop_locality, network_latency_s
from estimator.placement.topology import Cluster, network_of, rates_by_ranks
from estimator.timeline.collectives.algorithms import Line
from estimator.timeline.collectives.costs import (
    FORMULA_ERROR,
    NO_CORRECTIONS,
    CollectiveCosts,
    CollectiveModel,
    Lookup,
    SizedCollective,
)
from estimator.timeline.rank.lanes import host_links
from estimator.timeline.rank.rules import DP, Groups, Ranks, rules_for
from estimator.timeline.rank.updates import moved_by_host_s
from estimator.timeline.strategies.ddp import BucketedNetwork, BucketedRules
from estimator.workload.optimizers import RULES
from estimator.workload.strategies import ParameterServers

# To add one buffer to another in memory, two are read and one is written.
_ADDED_PASSES = 3
_FP32_BYTES = 4


class _Stages(NamedTuple):
    """Seconds of a byte of gradients in each stage on its way to the servers and back.

    `network_s` is one way, and so is `copy_s`, between a device and its host; `host_s` adds up and
    updates, `local_s` adds up within a node and spreads there. `latency_s` is that of both ways.
    """

    network_s: Any
    latency_s: Any
    copy_s: Any = 0.0
    host_s: Any = 0.0
    local_s: Any = 0.0
    unknown: Any = False

    @property
    def slowest_s(self) -> Any:
        """Of bytes that follow each other, all stages at work at once, both ways too."""
        slowest_s = self.network_s
        for stage_s in self[2:5]:
            slowest_s = maximum(slowest_s, stage_s)
        return slowest_s

    @property
    def drained_s(self) -> Any:
        """Of the last bytes, which pass the other stages, and come back, with nothing behind."""
        both_ways_s = 2.0 * (self.network_s + self.copy_s) + self.host_s + self.local_s
        return both_ways_s - self.slowest_s


class ServerCosts:
    """A bucket pushed to parameter servers, its update pulled while the next one is pushed.

    The workers of a node share its network; synchronous workers push together and share the
    servers' links, asynchronous ones mostly push alone.
    """

    corrections = (NO_CORRECTIONS,)

    def __init__(
        self, rules: ServerRules, profiles: Sequence[MachineProfile], cluster: Cluster | None
    ) -> None:
        graph, strategy = rules.graph, rules.strategy
        self.profiles, self._rules, self._strategy = profiles, rules, strategy
        # What workers of one node reach the servers over, which their ring does not cross.
        self._networks = [network_of(profile) for profile in profiles]
        most = max((len(profile.devices) for profile in profiles), default=0)
        self._sent = rates_by_ranks(self._networks, most)
        self._latency_s = Lookup(
            [network_latency_s(each, hop_locality(cluster)) for each in profiles]
        )
        self._whole_bytes = float(rules.bucket_bytes.sum())
        self._local = None
        if strategy.local and self._whole_bytes:
            of = graph.target, cluster, rules.cache
            in_switch = adds_in_switch(graph)
            costs = CollectiveCosts(profiles, "all_reduce", *of, in_switch=in_switch)
            sized = SizedCollective(costs.corrections, np.array([self._whole_bytes]))
            self._local = costs, sized
        self._copied: tuple[Lookup, Lookup] | None = None
        if strategy.on_workers:
            if graph.target == "cuda":
                self._copied = host_links(profiles, "d2h")
            # The memory of the host is that of all devices of the node together.
            costs_of = [costed(profile, rules.cache) for profile in profiles]
            moved_s = [moved_by_host_s(1.0, graph, p) / len(p.devices) for p in costs_of]
            self._moved_s = Lookup(moved_s)

    def model(self, group: ProcessGroup) -> CollectiveModel:
        """Seconds of a bucket on its way to the servers and back, others before and behind it."""
        stages = self._stages(group)
        return self._model(group, stages, stages.slowest_s)

    def last(self, group: ProcessGroup) -> CollectiveModel:
        """Seconds of the last bytes, when nothing is behind them any more."""
        stages = self._stages(group)
        return self._model(group, stages, stages.drained_s)

    def _model(self, group: ProcessGroup, stages: _Stages, byte_s: Any) -> CollectiveModel:
        return CollectiveModel(
            lines=(Line(stages.latency_s, byte_s),),
            reference=0 if isinstance(group.ranks, int) else np.zeros(len(group.ranks), np.intp),
            unlike=1.0,
            unknown=stages.unknown,
        )

    def relative_error(self, group: ProcessGroup, model: CollectiveModel) -> Any:
        return FORMULA_ERROR

    def _stages(self, group: ProcessGroup) -> _Stages:
        alone, network, strategy = group.nodes == 1, group.network, self._strategy
        own_rate = self._sent[network, where(alone, group.per_node, 0)]
        rate = where(alone, own_rate, group.bytes_per_s)
        latency_s = 2 * where(alone, self._latency_s[network], group.latency_s)
        of_node = 1 if strategy.local else group.per_node
        pushes = 1 if strategy.asynchronous else group.nodes if strategy.local else group.ranks
        server_rate = max(strategy.servers, 1) * (strategy.server_bytes_per_s or rate)
        local_s, unknown = self._local_s(group)
        if not strategy.on_workers:
            skew = self._rules.skew(strategy.servers)
            network_s = maximum(of_node / rate, pushes * skew / server_rate)
            unknown = unknown | (rate == math.inf)
            return _Stages(network_s, latency_s, local_s=local_s, unknown=unknown)
        share = 1.0 / group.nodes
        if strategy.servers:
            share = _balanced_share(group.nodes, pushes, of_node, rate, server_rate)
        skew = self._rules.skew(strategy.servers + group.nodes)
        received = maximum(pushes - of_node, 0)
        network_s = (of_node * (1.0 - share) + received * share * skew) / rate
        if strategy.servers:
            others = 1.0 - group.nodes * share
            network_s = maximum(network_s, pushes * others * skew / server_rate)
        copy_s: Any = 0.0
        copy_latency_s: Any = 0.0
        if self._copied is not None:
            copy_latency_s, copy_rate = (known[network] for known in self._copied)
            copy_s = 1.0 / (copy_rate * (group.per_node if strategy.local else 1))
        passes: Any = _ADDED_PASSES * (pushes - 1)
        if not strategy.sums_only:
            passes = passes + self._rules.update_passes
        return _Stages(
            network_s=network_s,
            latency_s=where(network_s > 0, latency_s, 0.0) + 2 * copy_latency_s,
            copy_s=copy_s,
            host_s=passes * share * skew * self._moved_s[network],
            local_s=local_s,
            unknown=unknown | ((rate == math.inf) & ((group.nodes > 1) | (strategy.servers > 0))),
        )

    def _local_s(self, group: ProcessGroup) -> tuple[Any, Any]:
        """Seconds of a byte within a node: reduced to one device each, and spread again."""
        several = group.per_node > 1
        if self._local is None or (isinstance(group.ranks, int) and not several):
            return 0.0, False
        costs, sized = self._local
        per_node = maximum(group.per_node, 2)
        ranks = int(per_node) if isinstance(group.ranks, int) else per_node
        nodes = group.nodes * 0 + 1
        node = ProcessGroup(ranks=ranks, nodes=nodes, per_node=per_node, network=group.network)
        model = costs.model(node)
        seconds = sized.time_s(model) / self._whole_bytes
        return where(several, seconds, 0.0), several & model.unknown

    def source(self, group: ProcessGroup) -> str:
        return "fitted"


def _balanced_share(nodes: Any, pushes: Any, of_node: Any, rate: Any, server_rate: Any) -> Any:
    """The share of all tensors that the server of each worker's node has beside servers elsewhere.

    By it the networks of nodes and of servers elsewhere, which together carry `server_rate`, take
    as long.
    """
    received = maximum(pushes - of_node, 0)
    least = pushes / server_rate - of_node / rate
    both = pushes * nodes / server_rate + (received - of_node) / rate
    balanced = least / where(both > 0, both, 1.0)
    share = minimum(maximum(balanced, 0.0), 1.0 / nodes)
    # A server on the only node of workers needs no network.
    return where(nodes > 1, share, 1.0)


class ServerNetwork(BucketedNetwork):
    """The queue of pushes and pulls, and the last bytes' way back."""

    _rules: ServerRules

    def _reducing(self) -> Any:
        return ServerCosts(self._rules, self._profiles, self._cluster)

    def _after_s(self, ranks: Ranks, reduce: CollectiveModel) -> tuple[Any, Any]:
        last = self._rules.bucket_bytes[-1:]
        part_bytes = self._rules.strategy.part_bytes
        if part_bytes is not None:
            last = np.minimum(last, part_bytes)
        costs: Any = self.reduce
        sized = SizedCollective((NO_CORRECTIONS,), last)
        return sized.time_s(costs.last(ranks.groups[DP][0])) * ranks.ratio, False

    def missing(self, groups: Groups) -> ProfileError:
        return ProfileError(
            f"profile '{self._profiles[groups[DP][0].network].name}' has no network, over which "
            "parameter servers are reached; probe several nodes together by 'torchrun -m "
            "estimator.probe'"
        )


@rules_for(ParameterServers)
class ServerRules(BucketedRules[ParameterServers]):
    """Servers hold and update parameters; a rank holds a copy and no optimizer state."""

    network_class = ServerNetwork
    reduced_by = "push, pull"
    unmeasured = "its bytes over the slowest link of a worker or of the servers"

    def skew(self, servers: Any) -> Any:
        """How many times an equal share the fullest of some servers has, of one number or each."""
        if self.strategy.part_bytes is None:
            return 1.0
        if isinstance(servers, int):
            return self._skew_of(servers)
        counts, rows = np.unique(servers, return_inverse=True)
        return np.array([self._skew_of(int(count)) for count in counts])[rows]

    def _skew_of(self, servers: int) -> float:
        """Units go one by one to the server that has least; of servers alike."""
        key = self.graph, self.strategy
        return self.cache.get("servers", key, lambda: self._fullest(servers), servers)

    def _fullest(self, servers: int) -> float:
        part = self.strategy.part_bytes or 0
        sizes = [p.spec.nbytes for p in self.graph.parameters if p.gradient is not None]
        held = [0] * servers
        for size in sizes:
            for start in range(0, size, part):
                heapq.heapreplace(held, held[0] + min(part, size - start))
        return max(held) * servers / max(sum(sizes), 1)

    @property
    def update_passes(self) -> float:
        """Bytes that the optimizer moves for each byte of a parameter."""
        return RULES[self.graph.optimizer].bytes_of(_FP32_BYTES) / _FP32_BYTES

    def updates(self, tensors: StepTensors) -> tuple[Update, ...]:
        """A worker updates nothing but where servers only add up."""
        return super().updates(tensors) if self.strategy.sums_only else (Update(),)

    def update_share(self, ranks: Any) -> Any:
        # A server updates a bucket while the next ones come in; the last one's update is exposed.
        if self.strategy.sums_only:
            return 1.0
        total_bytes = float(self.bucket_bytes.sum())
        share = 0.0
        # What hosts update beside workers is in what a bucket takes.
        if total_bytes > 0 and not self.strategy.on_workers:
            last = float(self.bucket_bytes[-1:].sum())
            share = last / total_bytes / self.strategy.servers
        return where(ranks > 1, share, 1.0)

    def assumptions(self) -> Iterator[str]:
        yield from super().assumptions()
        if self.strategy.on_workers:
            yield (
                "servers beside workers add up in the host's memory, of which they have all; what "
                "they take from workers' own host time is not counted"
            )

    def words(self, ranks: int) -> str:
        servers = self.strategy.servers
        plural = "s" if servers > 1 else ""
        where_to = [f"{servers} parameter server{plural}"] if servers else []
        where_to += ["servers beside workers"] if self.strategy.on_workers else []
        what = "sums" if self.strategy.sums_only else "parameters"
        return f"sending gradients of {ranks} ranks to {' and '.join(where_to)} and {what} back"
