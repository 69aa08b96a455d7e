"""Say what each block of a graph takes at least, so that any cut into stages is a few sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from estimator.graph.op_graph import BoundGraph
from estimator.graph.optimizer_memory import block_bytes, trained_tensors
from estimator.graph.stages import Blocks
from estimator.graph.structure import GraphStructure
from estimator.workload.optimizers import check_optimizer, state_sizes
from estimator.workload.schedules import Schedule

Array = NDArray[np.float64]
Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockCosts:
    """Of each block of a graph at one batch: seconds of a micro-batch's passes, and bytes.

    All are at most those of the stage that holds the block, beside what its other blocks have.
    `kept_bytes` wait between the passes of a micro-batch.
    """

    blocks: Blocks
    forward_s: Array
    backward_s: Array
    kept_bytes: Array
    parameters_bytes: Array
    states_bytes: Array

    @classmethod
    def of(
        cls, bound: BoundGraph, structure: GraphStructure, blocks: Blocks, seconds: Array
    ) -> BlockCosts:
        """The costs by `seconds` of each op."""
        graph, owner, count = bound.graph, blocks.owner, len(blocks.points)
        is_forward = structure.is_forward
        parameters, states = np.zeros(count), np.zeros(count)
        trained = [p for p in graph.parameters if p.gradient is not None]
        optimizer = check_optimizer(graph.optimizer)
        for parameter, tensor in zip(trained, trained_tensors(graph), strict=True):
            if parameter.ready_after is not None:
                block = owner[parameter.ready_after]
                parameters[block] += parameter.spec.nbytes
                states[block] += sum(state_sizes(optimizer, tensor))
        return cls(
            blocks=blocks,
            forward_s=_by(owner, np.where(is_forward, seconds, 0.0), count),
            backward_s=_by(owner, np.where(is_forward, 0.0, seconds), count),
            kept_bytes=_kept(bound, structure, blocks),
            parameters_bytes=parameters,
            states_bytes=states,
        )

    def stages(self, points: Sequence[str]) -> Stages:
        """The sums of the stages that begin with the model and at these blocks."""
        number = {point: place for place, point in enumerate(self.blocks.points)}
        begins = [0, *(number[point] for point in points), len(number)]

        def sums(values: Array) -> Array:
            return np.array([values[begin:end].sum() for begin, end in pairwise(begins)])

        return Stages(
            forward_s=sums(self.forward_s),
            backward_s=sums(self.backward_s),
            kept_bytes=sums(self.kept_bytes),
            parameters_bytes=sums(self.parameters_bytes),
            states_bytes=sums(self.states_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stages:
    """What the stages of a pipeline take at least: seconds of a micro-batch, bytes."""

    forward_s: Array
    backward_s: Array
    kept_bytes: Array
    parameters_bytes: Array
    states_bytes: Array

    def step_s(
        self, schedule: Schedule, ranks: int, micro_batches: int, spread_ratio: float = 0.0
    ) -> float:
        """Seconds that a step takes at least.

        A rank begins once a micro-batch has come through the stages before its first one, and then
        has all its passes to do. Where a backward pass is whole, its last one is followed by those
        of the same stages, the first rank's at the end. The slowest of the ranks that hold the same
        takes longer by `spread_ratio` of its passes.
        """
        both_s = self.forward_s + self.backward_s
        before_s = np.concatenate([[0.0], np.cumsum(self.forward_s)])
        around_s = np.concatenate([[0.0], np.cumsum(both_s)])
        least_s, first_s, passes = [], 0.0, schedule.passes_of(micro_batches)
        for rank in range(ranks):
            own = self._held(schedule, rank, ranks)
            passes_s = passes * float(both_s[own].sum())
            least_s.append(float(before_s[own].min()) + passes_s * (1 + spread_ratio))
            first_s = first_s or passes_s * spread_ratio
            if schedule.backward_is_whole:
                least_s.append(float(around_s[own[0]]) + passes_s + first_s)
        return max(least_s)

    def memory_bytes(
        self,
        schedule: Schedule,
        ranks: int,
        micro_batches: int,
        state_shards: int,
        parameter_shards: int = 1,
    ) -> float:
        """Bytes of the fullest rank at least; so many share the optimizer's state, parameters."""
        parameters_bytes = self.parameters_bytes / parameter_shards
        fixed = parameters_bytes + self.states_bytes / state_shards
        most = 0.0
        for rank in range(ranks):
            own = self._held(schedule, rank, ranks)
            held = schedule.held_at_least(rank, ranks, micro_batches)
            waiting = float(np.dot(held, self.kept_bytes[own]))
            if len(own) == 1:
                # The last micro-batch whose backward pass ends leaves gradients in its place.
                left = float(parameters_bytes[own[0]] - self.kept_bytes[own[0]])
                waiting += max(left, 0.0)
            most = max(most, float(fixed[own].sum()) + waiting)
        return most

    def _held(self, schedule: Schedule, rank: int, ranks: int) -> list[int]:
        """The stages of the model that a rank holds, of both copies where it has two."""
        return [number % len(self.forward_s) for number in schedule.stages_of(rank, ranks)]


def _kept(bound: BoundGraph, structure: GraphStructure, blocks: Blocks) -> Array:
    """Bytes that wait in each block for its own backward pass, and that its forward pass knows."""
    begin, owner, touches = int(structure.is_forward.sum()), blocks.owner, structure.touches
    activation = structure.kinds == "activation"
    waits = activation & (structure.born < begin) & (structure.dies >= begin)
    reader = owner[np.minimum(structure.dies, len(owner) - 1)]
    known = np.zeros(len(waits), dtype=np.bool_)
    forward = touches.op < begin
    storage = touches.storage[forward]
    known[storage[owner[touches.op[forward]] == reader[storage]]] = True
    counts = np.flatnonzero(waits & known)
    block = block_bytes(bound.graph)
    sizes = -(-structure.storage_bytes(bound)[counts] // block) * block
    return _by(reader[counts], sizes.astype(np.float64), len(blocks.points))


def _by(owner: Indices, values: Array, count: int) -> Array:
    return np.asarray(np.bincount(owner, weights=values, minlength=count), dtype=np.float64)
