"""Say what a layout takes at least, in time and memory, before its step is worked out.

No operator takes less on its device than with all that it reads in cache, and the ranks of a
pipeline share the operators of a micro-batch however it is cut: one of them has at least its share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from estimator.advise.block_costs import BlockCosts, Stages
from estimator.elementwise import expected_maximum
from estimator.engine import Engine
from estimator.graph.op_graph import BoundGraph, OpGraph
from estimator.graph.optimizer_memory import optimizer_memory
from estimator.graph.stage_passes import held_between_passes
from estimator.machines.device_memory import device_memory
from estimator.placement.mesh import Mesh
from estimator.placement.placement import NodeKind, Placement
from estimator.timeline.durations import bound_of, costed, least_device_s, structure_of
from estimator.timeline.exchanges import exchanges_of
from estimator.timeline.pipelines.stage_plans import balanced_points, blocks_of
from estimator.timeline.plan import groups_of
from estimator.timeline.ranks import StepShape
from estimator.timeline.strategies import rules_of
from estimator.timeline.strategies.registry import DP_REPLICATE, Ranks
from estimator.workload import Strategy
from estimator.workload.layout import Layout
from estimator.workload.schedules import Schedule

Array = NDArray[np.float64]

# Schedules whose ranks begin once all before them have, and end before these do.
_ONE_WAY = ("gpipe", "1f1b")
_FSDP = Strategy(kind="fsdp")


class _NoBuckets:
    """Gradients that are not reduced in buckets; see `bucket_queue.Ready`."""

    alike = None

    def slack_s(self, rows: NDArray[np.intp] | None) -> Array:
        return np.zeros(0)


class Held(NamedTuple):
    """Bytes of all parameters and buffers, of gradients and of optimizer state."""

    parameters: int
    gradients: int
    states: int


class LayoutBounds:
    """Bounds of a graph's layouts on one placement."""

    def __init__(self, graph: OpGraph, placement: Placement, engine: Engine) -> None:
        self._graph, self._placement, self._engine = graph, placement, engine
        self._usable_bytes = max(
            device_memory(kind.profile, 0).usable_bytes for kind in placement.kinds
        )
        # What the slowest of so many ranks takes longer than one, at least.
        self._spread_ratio = expected_maximum(placement.ranks) * min(
            costed(kind.profile, engine.cache).rank_jitter_ratio or 0.0 for kind in placement.kinds
        )
        self._held: dict[int, Held] = {}
        self._passes: dict[tuple[Layout, int], _MicroBatch] = {}
        self._stages: dict[tuple[Layout, int], Stages] = {}

    def step_s(self, layout: Layout, batch: int, micro_batches: int) -> float:
        """Seconds that a step takes at least."""
        each_s, ranks = self._micro_batch(layout, batch).seconds, layout.pp
        if ranks == 1:
            return each_s * micro_batches * (1 + self._spread_ratio)
        if layout.pp > 1 and layout.schedule.name in _ONE_WAY:
            # The one that begins as number s waits for the passes of those before it, then has m of
            # its own: x ≥ T0 + … + m·Ts for each. The least such x, over all ways to share the
            # seconds of a micro-batch, has these equal.
            return each_s / (1 - (1 - 1 / micro_batches) ** ranks)
        return each_s * micro_batches / ranks

    def memory_ratio(
        self, layout: Layout, strategy: Strategy, dp: int, batch: int, micro_batches: int
    ) -> float:
        """The share of a device's memory that the fullest rank needs at least."""
        part = self._engine.split(self._graph, layout)
        held = self._held.get(id(part))
        if held is None:
            held = self._held[id(part)] = _held(part)
        shards = strategy.shard or dp
        states = held.states if strategy.kind in ("ddp", "ps") else held.states / dp
        gradients = held.gradients / (shards if strategy.kind in ("zero2", "fsdp") else 1)
        parameters = held.parameters / (shards if strategy.kind == "fsdp" else 1)
        if strategy.kind == "fsdp":
            states = held.states / shards
        one = self._micro_batch(layout, batch)
        kept = one.kept_bytes
        if layout.pp > 1 and layout.schedule.name == "gpipe":
            kept *= micro_batches
        each = (parameters + states + max(gradients, kept)) / layout.pp
        return max(each, one.touched_bytes) / self._usable_bytes

    def closer(
        self, layout: Layout, strategy: Strategy, batch: int, micro_batches: int
    ) -> tuple[float, float]:
        """(seconds of a step, share of a device's memory) at least, by more work than before.

        Of a pipeline they are those of the stages into which it is cut, of FSDP those of what it
        gathers and reduces, one after the other.
        """
        if layout.pp == 1:
            return self._exchanged_s(layout, strategy, batch, micro_batches), 0.0
        stages = self._stages_of(layout, batch)
        shards = 1 if strategy.kind in ("ddp", "ps") else layout.dp or 1
        # How much of what is gathered is there at once, and how wide it is, is not known.
        whole = 1 if strategy.kind != "fsdp" else shards
        pipeline = layout.schedule, layout.pp, micro_batches
        held = stages.memory_bytes(*pipeline, shards, whole)
        return stages.step_s(*pipeline, self._spread_ratio), held / self._usable_bytes

    def _stages_of(self, layout: Layout, batch: int) -> Stages:
        # Where stages begin depends on how many there are, whoever holds them.
        each = layout.schedule.model_stages(layout.pp) // layout.pp
        key = replace(layout, schedule=Schedule("interleaved", each)), batch
        found = self._stages.get(key)
        if found is None:
            cache, graph = self._engine.cache, self._engine.split(self._graph, layout)
            mesh = Mesh.laid_out(self._placement, layout, Strategy())
            exchanges = exchanges_of(mesh, cache) if layout.divides_layers else None
            of = graph, mesh, batch, exchanges, layout.schedule, cache
            costs = self._blocks(layout, batch)
            found = self._stages[key] = costs.stages(balanced_points(*of))
        return found

    def _blocks(self, layout: Layout, batch: int) -> BlockCosts:
        cache, graph = self._engine.cache, self._engine.split(self._graph, layout)
        one, structure = self._micro_batch(layout, batch), structure_of(graph, cache)
        blocks = blocks_of(graph, cache)
        return cache.get(
            "block costs",
            (one.bound, self._placement),
            lambda: BlockCosts.of(one.bound, structure, blocks, one.each_s),
            layout.of_layers,
        )

    def _exchanged_s(
        self, layout: Layout, strategy: Strategy, batch: int, micro_batches: int
    ) -> float:
        """Seconds of FSDP's collectives that wait for each other."""
        if strategy.kind != "fsdp" or (layout.dp or 1) == 1:
            return 0.0
        graph, cache = self._engine.split(self._graph, layout), self._engine.cache
        mesh = Mesh.laid_out(self._placement, layout, strategy, micro_batches=micro_batches)
        rules = rules_of(graph, StepShape(strategy, micro_batches), cache)
        groups, profiles = groups_of(mesh, rules)
        cluster = self._placement.cluster
        network = cache.get(
            "network", (rules, cluster, *profiles), lambda: rules.network(profiles, cluster)
        )
        # All-reduces between replicas have a lane of their own.
        groups = {**groups, DP_REPLICATE: ()}
        ranks = Ranks(groups, _NoBuckets(), [], lane_s=0.0, compute_ratio=1.0, ratio=1.0)
        return float(network.alone_s(ranks))

    def _micro_batch(self, layout: Layout, batch: int) -> _MicroBatch:
        found = self._passes.get((layout.of_layers, batch))
        if found is None:
            found = self._passes[layout.of_layers, batch] = self._worked_out(layout, batch)
        return found

    def _worked_out(self, layout: Layout, batch: int) -> _MicroBatch:
        cache, placement = self._engine.cache, self._placement
        graph = self._engine.split(self._graph, layout)
        bound = bound_of(graph, batch, cache)
        structure = structure_of(graph, cache)
        kept = cache.get(
            "held between passes",
            (bound,),
            lambda: held_between_passes(bound, structure),
        )
        touches, sizes = structure.touches, structure.storage_bytes(bound)
        touched = float(np.bincount(touches.op, weights=sizes[touches.storage]).max())
        each_s = np.zeros(len(graph.ops))
        # What was timed depends on what stands beside it.
        if not graph.timings and not graph.has_step_times:
            each_s = np.minimum.reduce([self._least_s(bound, node) for node in placement.kinds])
            if layout.divides_layers:
                mesh = Mesh.laid_out(placement, replace(layout.of_layers, dp=None), Strategy())
                # Gradients of experts may be reduced with all others, or among fewer ranks.
                exchanged = exchanges_of(mesh, cache, _FSDP).seconds(bound)
                alone_s = exchanged.each_s.copy()
                # What runs beside a kernel may add nothing.
                alone_s[[place for place, _ in exchanged.hidden_by]] = 0.0
                each_s = each_s + alone_s
        return _MicroBatch(bound, each_s, float(each_s.sum()), kept, touched)

    def _least_s(self, bound: BoundGraph, node: NodeKind) -> Array:
        cache, busy = self._engine.cache, node.ranks_per_node
        profile, blocks = costed(node.profile, cache), blocks_of(bound.graph, cache).owner
        least_s = least_device_s(bound, profile, blocks=blocks, devices_busy=busy, cache=cache)
        return np.asarray(node.slowdown_ratio * least_s)


class _MicroBatch(NamedTuple):
    """A graph at a batch: least seconds of each op and of all, bytes that wait for the backward
    pass, most that one op touches.
    """

    bound: BoundGraph
    each_s: Array
    seconds: float
    kept_bytes: int
    touched_bytes: float


def _held(graph: OpGraph) -> Held:
    trained = [each for each in graph.parameters if each.gradient is not None]
    return Held(
        parameters=graph.parameter_bytes + graph.frozen_parameter_bytes + graph.buffer_bytes,
        gradients=sum(each.spec.nbytes for each in trained),
        states=optimizer_memory(graph, graph.optimizer).state_bytes,
    )
