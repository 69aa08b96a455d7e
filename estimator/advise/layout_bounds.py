"""Say what a layout takes at least, in time and memory, before its step is worked out.

No operator takes less on its device than with all that it reads in cache, and the ranks of a
pipeline share the operators of a micro-batch however it is cut: one of them has at least its share.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from estimator.engine import Engine
from estimator.graph.op_graph import OpGraph
from estimator.graph.optimizer_memory import optimizer_memory
from estimator.graph.stage_passes import held_between_passes
from estimator.machines.device_memory import device_memory
from estimator.placement.mesh import Mesh
from estimator.placement.placement import Placement
from estimator.timeline.durations import costed, least_device_s, structure_of
from estimator.timeline.exchanges import exchanges_of
from estimator.workload import Strategy
from estimator.workload.layout import Layout

# Schedules whose ranks begin once all before them have, and end before these do.
_ONE_WAY = ("gpipe", "1f1b")


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
        self._held: dict[int, Held] = {}
        self._passes: dict[tuple[Layout, int], tuple[float, int, float]] = {}

    def step_s(self, layout: Layout, batch: int, micro_batches: int) -> float:
        """Seconds that a step takes at least."""
        each_s, _, _ = self._micro_batch(layout, batch)
        ranks = layout.pp
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
        _, kept, touched = self._micro_batch(layout, batch)
        if layout.pp > 1 and layout.schedule.name == "gpipe":
            kept *= micro_batches
        each = (parameters + states + max(gradients, kept)) / layout.pp
        return max(each, touched) / self._usable_bytes

    def _micro_batch(self, layout: Layout, batch: int) -> tuple[float, int, float]:
        """(device seconds, bytes that wait for the backward pass, most that one op touches)."""
        alone = Layout(tp=layout.tp, sequence=layout.sequence, vocabulary=layout.vocabulary)
        found = self._passes.get((alone, batch))
        if found is None:
            found = self._passes[alone, batch] = self._worked_out(alone, batch)
        return found

    def _worked_out(self, layout: Layout, batch: int) -> tuple[float, int, float]:
        cache, placement = self._engine.cache, self._placement
        graph = self._engine.split(self._graph, layout)
        bound = cache.get("bound", (graph,), lambda: graph.at(batch), batch)
        structure = structure_of(graph, cache)
        kept = cache.get(
            "held between passes",
            (bound,),
            lambda: held_between_passes(bound, structure),
        )
        touches, sizes = structure.touches, structure.storage_bytes(bound)
        touched = float(np.bincount(touches.op, weights=sizes[touches.storage]).max())
        if graph.timings or graph.has_step_times:
            # What was timed depends on what stands beside it.
            return 0.0, kept, touched
        least = min(
            node.slowdown_ratio
            * least_device_s(
                bound, costed(node.profile, cache), devices_busy=node.ranks_per_node, cache=cache
            )
            for node in placement.kinds
        )
        if layout.divides_layers:
            mesh = Mesh.laid_out(placement, layout, Strategy())
            least += exchanges_of(mesh, cache).seconds(bound).total_s
        return least, kept, touched


def _held(graph: OpGraph) -> Held:
    trained = [each for each in graph.parameters if each.gradient is not None]
    return Held(
        parameters=graph.parameter_bytes + graph.frozen_parameter_bytes + graph.buffer_bytes,
        gradients=sum(each.spec.nbytes for each in trained),
        states=optimizer_memory(graph, graph.optimizer).state_bytes,
    )
