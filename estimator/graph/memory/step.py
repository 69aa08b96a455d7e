"""Simulate what a rank holds over a step, from what its strategy has it hold.

What is allocated follows the order in which the host issues, not what the device has finished: the
same on CPUs and on GPUs. Peaks for any number of shards and the curve over a step are views of one
simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from estimator.elementwise import Indices, Sizes
from estimator.graph.ir.op_graph import BoundGraph
from estimator.graph.ir.structure import GraphStructure
from estimator.graph.memory.peak import (
    Bytes,
    Envelope,
    MemoryCurve,
    ShardedMemory,
    is_saved,
    upper_lines,
)
from estimator.graph.memory.sizes import OptimizerMemory, StepTensors, optimizer_memory

# The instants around an op, in the order of issue. Before it a rank may allocate the buffer of an
# all-gather, allocate whole parameters and copy them out, drop a buffer, and prefetch what comes
# next. After it, it may free parameters and the input of a reduction, allocate the next one and
# copy gradients in, and replace them by their shard.
GATHER, COPY_OUT, DROP, PREFETCH, RUN, RAN, RESHARD, COPY_IN, REDUCE = range(9)
_INSTANTS = 9


Place = TypeVar("Place", int, Indices)


def at(op: Place, instant: int) -> Place:
    """The place of an instant around an op in the levels of a step."""
    return op * _INSTANTS + instant


class Ledger:
    """Bytes held at every instant of a micro-batch, from intervals."""

    def __init__(self, ops: int) -> None:
        self.end = (ops + 1) * _INSTANTS
        self._changes: Sizes = np.zeros(self.end + 1, dtype=np.int64)

    def hold(self, start: int, end: int, size_bytes: int) -> None:
        """Hold `size_bytes` from the instant `start` until just before `end`."""
        self._changes[start] += size_bytes
        self._changes[end] -= size_bytes

    def hold_each(self, born: Indices, dies: Indices, sizes_bytes: Sizes) -> None:
        """Hold several, each from the op that makes it to the last one that it is for."""
        np.add.at(self._changes, at(np.maximum(born, 0), RUN), sizes_bytes)
        dies = np.minimum(dies, self.end // _INSTANTS - 1)
        np.subtract.at(self._changes, at(dies, RAN), sizes_bytes)

    def levels(self) -> Sizes:
        """What is held at each instant."""
        return np.cumsum(self._changes[:-1])


_NOTHING = Bytes()


class Update(NamedTuple):
    """What a rank's optimizer holds between steps, and more while it updates."""

    state: Bytes = _NOTHING
    temporary: Bytes = _NOTHING

    @classmethod
    def of(cls, held: OptimizerMemory, *, sharded: bool) -> Update:
        """All of what an optimizer holds, on each rank or in even shards."""
        if sharded:
            return cls(Bytes(0, held.state_bytes), Bytes(0, held.update_bytes))
        return cls(Bytes(held.state_bytes), Bytes(held.update_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchMemory:
    """What a rank holds at every instant of a micro-batch beside activations; None: nothing.

    `gathered` are parameters, `buffers` those of collectives, `copied` gradients until they are in
    the buckets in which they live; `gradient_shards` are of all shards together.
    """

    gathered: Sizes | None = None
    buffers: Sizes | None = None
    gradients: Sizes | None = None
    copied: Sizes | None = None
    gradient_shards: Sizes | None = None


_ACTIVATIONS_ALONE = MicroBatchMemory()
_NO_UPDATE = Update()


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a strategy has a rank hold: throughout a step, during micro-batches, and in the update.

    `parameters`, `gradients` and `buckets` are held throughout; `updated` are the gradients that
    the update reads beside these. Of `updates` some rank has each. `micro_batches` are unlike ones,
    among which is the one with the peak.
    """

    parameters: Bytes
    gradients: Bytes = _NOTHING
    buckets: Bytes = _NOTHING
    updated: Bytes = _NOTHING
    updates: Sequence[Update] = (_NO_UPDATE,)
    micro_batches: Sequence[MicroBatchMemory] = (_ACTIVATIONS_ALONE,)


def held_whole(
    tensors: StepTensors,
    updates: Sequence[Update],
    *,
    bucket_bytes: int = 0,
    in_buckets: bool = False,
) -> Holding:
    """What a rank holds whose parameters and gradients are whole.

    Gradients are released before a step (`zero_grad(set_to_none=True)`, the default). Buckets are
    always there; where gradients live `in_buckets`, they are copied there as they get ready.
    """
    structure, own = tensors.structure, tensors.gradient_storages
    ledger = Ledger(tensors.ops)
    dies = structure.ready[own] if in_buckets else structure.dies[own]
    ledger.hold_each(structure.born[own], dies, tensors.size_bytes[own])
    levels, buckets = ledger.levels(), Bytes(bucket_bytes)
    holding = Holding(parameters=Bytes(tensors.parameters_bytes()), updates=updates)
    if in_buckets:
        return replace(holding, gradients=buckets, micro_batches=(MicroBatchMemory(copied=levels),))
    return replace(
        holding,
        buckets=buckets,
        updated=Bytes(_most(levels)),
        micro_batches=(MicroBatchMemory(gradients=levels),),
    )


def held_alone(tensors: StepTensors) -> Holding:
    """What a rank holds that trains by itself."""
    return held_whole(tensors, (Update.of(optimizer_memory(tensors.graph), sharded=False),))


class MemoryOverStep:
    """What a rank holds at every instant of a step, for any number of shards."""

    def __init__(self, tensors: StepTensors, holding: Holding) -> None:
        self.tensors, self.holding, self.ops = tensors, holding, tensors.ops
        structure = tensors.structure
        activations, own = Ledger(self.ops), tensors.activations
        activations.hold_each(structure.born[own], structure.dies[own], tensors.size_bytes[own])
        inside = np.flatnonzero(tensors.workspaces)
        activations.hold_each(inside, inside, tensors.workspaces[inside])
        self._activations = activations.levels()
        self._standing_bytes = tensors.inputs_bytes + tensors.buffers_bytes

    def peaks(self) -> ShardedMemory:
        """The most that is held, and its parts, by the number of shards."""
        held = self.holding
        standing = _sum(Bytes(self._standing_bytes), held.parameters, held.gradients, held.buckets)
        lines: list[Bytes] = []
        gradients = [_sum(held.gradients, held.updated)]
        places: list[int | None] = []
        for micro_batch in held.micro_batches:
            level = self._level(micro_batch)
            highest = [
                (p, _share(level, micro_batch, p))
                for p in _highest(level, micro_batch.gradient_shards)
            ]
            for update in held.updates:
                lines += [_sum(standing, share, update.state) for _, share in highest]
                places += [min(place // _INSTANTS, self.ops - 1) for place, _ in highest]
            if micro_batch.gradients is not None:
                gradients += [
                    _sum(held.gradients, _share(micro_batch.gradients, micro_batch, place))
                    for place in _highest(micro_batch.gradients, micro_batch.gradient_shards)
                ]
        passes = Envelope.through(lines)
        # In the update no parameters are gathered and nothing is sent any more.
        lines += [_sum(standing, held.updated, *update) for update in held.updates]
        places += [None] * len(held.updates)
        upper = upper_lines(lines)
        return ShardedMemory(
            total=Envelope(tuple(lines[index] for index in upper)),
            peak_ops=tuple(places[index] for index in upper),
            passes=passes,
            parameters=Envelope((_sum(held.parameters, self._most("gathered")),)),
            gradients=Envelope.through(gradients),
            optimizer_state=Envelope.through([update.state for update in held.updates]),
            buckets=Envelope((_sum(held.buckets, self._most("buffers")),)),
            update=Envelope.through([update.temporary for update in held.updates]),
            buffers_bytes=self.tensors.buffers_bytes,
            inputs_bytes=self.tensors.inputs_bytes,
            activations_bytes=max(
                _most(
                    self._activations
                    if micro_batch.copied is None
                    else self._activations + micro_batch.copied
                )
                for micro_batch in held.micro_batches
            ),
        )

    def curve(self, shards: int = 1) -> MemoryCurve:
        """What is held during each op where so many ranks share: of the fullest micro-batch."""
        curves = [self._curve(micro_batch, shards) for micro_batch in self.holding.micro_batches]
        return max(curves, key=lambda curve: curve.peak_bytes)

    def _curve(self, micro_batch: MicroBatchMemory, shards: int) -> MemoryCurve:
        """At each op the instant around it at which most is held, and last the update."""
        held = self.holding
        level = self._level(micro_batch)
        shares = np.zeros_like(level)
        if micro_batch.gradient_shards is not None:
            shares = -(-micro_batch.gradient_shards // shards)
        places = self._highest_instants(level + shares)

        def during(levels: Sizes | None, constant: int = 0, after: int = 0) -> Sizes:
            own = np.zeros(self.ops, dtype=np.int64) if levels is None else levels[places]
            return np.append(own, after) + constant

        activations, saved = self._activations[places], self._saved_levels()
        gradients = shares if micro_batch.gradients is None else micro_batch.gradients + shares
        # Of several ranks that hold unlike parts of an optimizer, the one with most in the update.
        state, temporary = max(
            ((u.state.at(shards), u.temporary.at(shards)) for u in held.updates), key=sum
        )
        # Before an op its own outputs are not there yet.
        others = np.append(np.maximum(activations - saved, 0), temporary) + during(
            micro_batch.copied
        )
        return MemoryCurve(
            levels={
                "parameters": during(micro_batch.gathered, held.parameters.at(shards)),
                "gradients": during(gradients, held.gradients.at(shards), held.updated.at(shards)),
                "optimizer state": during(None, state),
                "buffers and inputs": during(None, self._standing_bytes),
                "activations": np.append(np.minimum(saved, activations), 0),
                "temporaries": others,
                "communication buffers": during(micro_batch.buffers, held.buckets.at(shards)),
            }
        )

    def _level(self, micro_batch: MicroBatchMemory) -> Sizes:
        """All that is held whole at each instant of a micro-batch."""
        own = (micro_batch.gathered, micro_batch.buffers, micro_batch.gradients, micro_batch.copied)
        return sum((levels for levels in own if levels is not None), self._activations)

    def _most(self, kind: str) -> Bytes:
        levels = [getattr(micro_batch, kind) for micro_batch in self.holding.micro_batches]
        return Bytes(max((_most(own) for own in levels if own is not None), default=0))

    def _saved_levels(self) -> Sizes:
        """What the forward pass leaves for the backward pass, during each op."""
        tensors, structure = self.tensors, self.tensors.structure
        own = tensors.activations[is_saved(structure)[tensors.activations]]
        saved = Ledger(self.ops)
        saved.hold_each(structure.born[own], structure.dies[own], tensors.size_bytes[own])
        return saved.levels()[at(np.arange(self.ops), RUN)]

    def _highest_instants(self, levels: Sizes) -> Indices:
        rows = levels[: self.ops * _INSTANTS].reshape(self.ops, _INSTANTS)
        places = np.arange(self.ops) * _INSTANTS + rows.argmax(axis=1)
        # What follows the last op belongs to it.
        tail = (self.ops - 1) * _INSTANTS
        places[-1] = tail + int(levels[tail:].argmax())
        return places


def memory_alone(bound: BoundGraph) -> MemoryOverStep:
    """The memory of a rank that trains by itself."""
    tensors = StepTensors(bound, GraphStructure.of(bound.graph))
    return MemoryOverStep(tensors, held_alone(tensors))


def _most(levels: Sizes) -> int:
    """The highest level; 0 of none."""
    return int(levels.max(initial=0))


def _sum(*shares: Bytes) -> Bytes:
    return Bytes(sum(s.whole for s in shares), sum(s.sharded for s in shares))


def _share(levels: Sizes, micro_batch: MicroBatchMemory, place: int) -> Bytes:
    shards = micro_batch.gradient_shards
    return Bytes(int(levels[place]), 0 if shards is None else int(shards[place]))


def _highest(unsharded: Sizes, sharded: Sizes | None) -> list[int]:
    """Where most is held, once for every stretch of time in which the sharded part is constant."""
    if sharded is None:
        return [int(unsharded.argmax())]
    bounds = [0, *(np.flatnonzero(np.diff(sharded)) + 1).tolist(), len(sharded)]
    return [start + int(unsharded[start:end].argmax()) for start, end in pairwise(bounds)]
