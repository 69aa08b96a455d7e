"""List how ranks can share a model, and the least that each layout takes.

No operator takes less on its device than with all that it reads in cache, and the ranks of a
pipeline share the operators of a micro-batch however it is cut: one of them has at least its share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from estimator.elementwise import Array, Indices, expected_maximum
from estimator.errors import StrategyError
from estimator.estimates.engine import Engine
from estimator.graph.ir.op_graph import BoundGraph, OpGraph
from estimator.graph.ir.structure import GraphStructure
from estimator.graph.memory.sizes import block_bytes, optimizer_memory, trained_tensors
from estimator.graph.partition.stages import Blocks, held_between_passes, split_points
from estimator.kernels.durations import bound_of, costed, least_device_s, structure_of
from estimator.machines.typical import device_memory
from estimator.placement.mesh import Mesh
from estimator.placement.placement import NodeKind, Placement
from estimator.timeline.pipelines.simulation import StageCosts, last_ends_s
from estimator.timeline.pipelines.stage_plans import blocks_of, default_points
from estimator.timeline.rank.layer_collectives import layer_collectives_of
from estimator.timeline.rank.updates import sums_s
from estimator.workload.layouts import Layout
from estimator.workload.optimizers import check_optimizer, state_sizes
from estimator.workload.schedules import DEFAULT_SCHEDULE, Schedule
from estimator.workload.strategies import DDP, FSDP, Strategy


class Candidate(NamedTuple):
    """One way to train; `graph` is the number of the graph, as its activation checkpoints are."""

    graph: int
    layout: Layout
    strategy: Strategy
    batch: int
    micro_batches: int


def candidates(
    graph: OpGraph,
    placement: Placement,
    global_batch: int,
    strategies: Sequence[Strategy],
    schedules: Sequence[Schedule],
    shares: Sequence[Layout],
) -> Iterator[Candidate]:
    """Every candidate of one graph; `shares` has layouts of ranks that share layers or experts."""
    ranks, blocks = placement.ranks, len(split_points(graph))
    if graph.recipe is not None:
        # Megatron-LM's pipelines run these, in stages of as many layers each.
        schedules = [schedule for schedule in schedules if schedule.name in ("1f1b", "interleaved")]
    for shared in shares:
        layer_ranks = shared.tp * shared.cp
        for pp in divisors(ranks // layer_ranks):
            dp = ranks // layer_ranks // pp
            if global_batch % dp or dp * layer_ranks % shared.ep:
                continue
            for layout in _pipelines(shared, pp, dp, _virtual(schedules, pp, blocks), blocks):
                if graph.recipe is not None and layout.tp * pp > 1:
                    layout = replace(layout, megatron=True)
                    if blocks % layout.schedule.model_stages(pp):
                        continue
                for batch in _batches(global_batch // dp, graph):
                    micro_batches = global_batch // dp // batch
                    if pp > 1 and not layout.schedule.runs(pp, micro_batches):
                        continue
                    able = [strategy for strategy in strategies if _takes(layout, strategy, ranks)]
                    for strategy in _strategies(able, layout, dp, placement):
                        if _takes(layout, strategy, ranks):
                            yield Candidate(0, layout, strategy, batch, micro_batches)


def divisors(number: int) -> list[int]:
    """All that divide a number, the smallest first.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _virtual(schedules: Sequence[Schedule], pp: int, blocks: int) -> list[Schedule]:
    """Some schedules and, where several are interleaved, all whose stages have as many blocks."""
    kept = dict.fromkeys(schedules)
    if sum(schedule.name == "interleaved" for schedule in schedules) > 1 and blocks % pp == 0:
        kept |= dict.fromkeys(Schedule("interleaved", v) for v in divisors(blocks // pp)[1:])
    return list(kept)


def _pipelines(
    shared: Layout, pp: int, dp: int, schedules: Sequence[Schedule], blocks: int
) -> Iterator[Layout]:
    for schedule in schedules if pp > 1 else (DEFAULT_SCHEDULE,):
        if pp == 1 or schedule.model_stages(pp) <= blocks:
            yield replace(shared, pp=pp, schedule=schedule, dp=dp)


def _strategies(
    strategies: Sequence[Strategy], layout: Layout, dp: int, placement: Placement
) -> Iterator[Strategy]:
    """Those that differ on so many data-parallel ranks."""
    if dp == 1:
        yield from strategies[:1]
        return
    in_node = min(placement.ranks_per_node) // (layout.tp * layout.cp * layout.pp)
    for strategy in strategies:
        if layout.pp > 1:
            if (beside := strategy.beside_pipeline()).goes_with("pp"):
                yield Strategy.parse(beside)
            continue
        yield strategy
        if not 1 < in_node < dp or dp % in_node or strategy.shard_ranks is not None:
            continue
        over = strategy.sharded_over(in_node)
        if over != strategy:
            yield Strategy.parse(over)


def _takes(layout: Layout, strategy: Strategy, ranks: int) -> bool:
    """Whether a strategy can go with experts that ranks divide, if they do."""
    if layout.ep > 1:
        try:
            layout.data_axes(ranks, strategy)
        except StrategyError:
            return False
    return True


def _batches(share: int, graph: OpGraph) -> Iterator[int]:
    """Samples of a micro-batch of a rank that has `share` of them in a step."""
    if graph.other_batch is None:
        yield from [graph.batch] if graph.batch and share % graph.batch == 0 else []
        return
    for batch in divisors(share):
        if not (batch & (batch - 1) and (share // batch) & (share // batch - 1)):
            yield batch


class Stages(NamedTuple):
    """What the stages of a pipeline take at least: seconds of a micro-batch, bytes.

    `kept_bytes` wait between the passes of a micro-batch; with what its backward pass makes, that
    holds `passing_bytes`. Adding its gradients to those of the ones before takes `added_s`.
    """

    forward_s: Array
    backward_s: Array
    kept_bytes: Array
    parameters_bytes: Array
    states_bytes: Array
    passing_bytes: Array
    added_s: Array

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
        own = self._held(schedule, ranks)
        passes = schedule.passes_of(micro_batches)
        passes_s = passes * both_s[own].sum(axis=1)
        own_s = passes_s + (passes - 1) * self.added_s[own].sum(axis=1)
        least_s = before_s[own].min(axis=1) + own_s + passes_s * spread_ratio
        if schedule.backward_is_whole:
            first_s = passes_s[0] * spread_ratio
            least_s = np.maximum(least_s, around_s[own[:, 0]] + own_s + first_s)
        return float(least_s.max())

    def played_s(
        self, schedule: Schedule, ranks: int, micro_batches: int, spread_ratio: float = 0.0
    ) -> float:
        """The same by playing all passes; nothing where backward passes are in two parts.

        How a part of these compares with the other in the step itself is not known.
        """
        if not schedule.backward_is_whole:
            return 0.0
        both_s, passes = self.forward_s + self.backward_s, schedule.passes_of(micro_batches)
        spreads_s = spread_ratio * passes * both_s[self._held(schedule, ranks)].sum(axis=1)
        each = np.stack([self.forward_s, self.backward_s, self.added_s], axis=1).tolist()
        costs = [StageCosts(one_s, back_s, 0.0, added_s=sum_s) for one_s, back_s, sum_s in each]
        ends_s = last_ends_s(schedule, ranks, micro_batches, costs)
        return float((np.array(ends_s) + spreads_s).max())

    def memory_bytes(
        self,
        schedule: Schedule,
        ranks: int,
        micro_batches: int,
        state_shards: float,
        parameter_shards: float = 1,
    ) -> float:
        """Bytes of the fullest rank at least; so many share the optimizer's state, parameters."""
        parameters_bytes = self.parameters_bytes / parameter_shards
        fixed = parameters_bytes + self.states_bytes / state_shards
        own, held = self._held(schedule, ranks), _held_at_least(schedule, ranks, micro_batches)
        kept, passing = self.kept_bytes[own], self.passing_bytes[own]
        if own.shape[1] == 1:
            # The last micro-batch whose backward pass ends leaves gradients in its place.
            passing = np.maximum(passing, parameters_bytes[own])
        # Of stages that all hold one, some stage goes back through its own.
        beside = np.where(held.min(axis=1) > 0, passing.max(axis=1) - kept.max(axis=1), 0.0)
        return float((fixed[own].sum(axis=1) + (held * kept).sum(axis=1) + beside).max())

    def _held(self, schedule: Schedule, ranks: int) -> Indices:
        """The stages of the model that each rank holds, of both copies where it has two."""
        return _stages_of_ranks(schedule, ranks) % len(self.forward_s)


@lru_cache(maxsize=1024)
def _stages_of_ranks(schedule: Schedule, ranks: int) -> Indices:
    return np.array([schedule.stages_of(rank, ranks) for rank in range(ranks)])


@lru_cache(maxsize=4096)
def _held_at_least(schedule: Schedule, ranks: int, micro_batches: int) -> Indices:
    return np.array([schedule.held_at_least(rank, ranks, micro_batches) for rank in range(ranks)])


class BlockCosts(NamedTuple):
    """The same of each block of a graph at one batch, as if it were a stage.

    All are at most those of the stage that holds the block, beside what its other blocks have;
    `passing_bytes` beside what those before it in the stage keep.
    """

    blocks: Blocks
    each: Stages

    @classmethod
    def of(
        cls, bound: BoundGraph, structure: GraphStructure, blocks: Blocks, seconds: Array
    ) -> BlockCosts:
        """The costs by `seconds` of each op."""
        graph, owner, count = bound.graph, blocks.owner, len(blocks.points)
        is_forward = structure.columns.is_forward
        parameters, states = np.zeros(count), np.zeros(count)
        trained = [p for p in graph.parameters if p.gradient is not None]
        optimizer = check_optimizer(graph.optimizer)
        for parameter, tensor in zip(trained, trained_tensors(graph), strict=True):
            if parameter.ready_after is not None:
                block = owner[parameter.ready_after]
                parameters[block] += parameter.spec.nbytes
                states[block] += sum(state_sizes(optimizer, tensor))
        forward_s = _by(owner, np.where(is_forward, seconds, 0.0), count)
        backward_s = _by(owner, np.where(is_forward, 0.0, seconds), count)
        kept, passing = _kept_and_passing(bound, structure, blocks)
        # What of a stage is added up takes less together than block by block.
        each = Stages(
            forward_s, backward_s, kept, parameters, states, passing, added_s=np.zeros(count)
        )
        return cls(blocks, each)

    def stages(self, points: Sequence[str]) -> Stages:
        """The sums of the stages that begin with the model and at these blocks."""
        number = {point: place for place, point in enumerate(self.blocks.points)}
        begins = [0, *(number[point] for point in points)]
        sums = Stages(*(np.add.reduceat(values, begins) for values in self.each))
        before = np.cumsum(self.each.kept_bytes) - self.each.kept_bytes
        passing = np.maximum.reduceat(before + self.each.passing_bytes, begins) - before[begins]
        return sums._replace(passing_bytes=np.maximum(passing, sums.kept_bytes))


def _kept_and_passing(
    bound: BoundGraph, structure: GraphStructure, blocks: Blocks
) -> tuple[Array, Array]:
    """(bytes that wait in each block for its own backward pass, and that its forward pass knows;
    most that no other block touches during its backward pass).

    The latter is 0 where not all that earlier blocks keep is there still.
    """
    begin, owner, touches = int(structure.columns.is_forward.sum()), blocks.owner, structure.touches
    count, born, dies = len(blocks.points), structure.born, structure.dies
    block = block_bytes(bound.graph)
    sizes = (-(-structure.storage_bytes(bound) // block) * block).astype(np.float64)
    activation = structure.kinds == "activation"
    reader = owner[np.minimum(dies, len(owner) - 1)]
    known = np.zeros(len(born), dtype=np.bool_)
    forward = touches.op < begin
    storage = touches.storage[forward]
    known[storage[owner[touches.op[forward]] == reader[storage]]] = True
    waits = np.flatnonzero(activation & (born < begin) & (dies >= begin) & known)
    kept = _by(reader[waits], sizes[waits], count)
    gone = np.full(count, len(owner))
    np.minimum.at(gone, reader[waits], dies[waits])

    inner = activation & (born >= 0)
    inner[touches.storage[owner[touches.op] != reader[touches.storage]]] = False
    own = np.flatnonzero(inner)
    # What is freed before an op goes first; the changes of a block sum to nothing.
    ops, changes = np.append(dies[own] + 1, born[own]), np.append(-sizes[own], sizes[own])
    of_block = np.tile(reader[own], 2)
    order = np.lexsort((changes, ops, of_block))
    levels = np.cumsum(changes[order])
    passing = np.zeros(count)
    there = np.append(len(owner), np.minimum.accumulate(gone)[:-1])[of_block[order]]
    counts = (changes[order] > 0) & (ops[order] >= begin) & (ops[order] <= there)
    np.maximum.at(passing, of_block[order][counts], levels[counts])
    return kept, passing


def _by(owner: Indices, values: Array, count: int) -> Array:
    return np.asarray(np.bincount(owner, weights=values, minlength=count), dtype=np.float64)


class Held(NamedTuple):
    """Bytes of all parameters and buffers, of gradients, of optimizer state, and that the update
    makes of all parameters together.
    """

    parameters: int
    gradients: int
    states: int
    temporaries: int


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

    def step_s(self, candidate: Candidate) -> float:
        """Seconds that a step takes at least."""
        _, layout, _, batch, micro_batches = candidate
        each_s, ranks = self._micro_batch(layout, batch).seconds, layout.pp
        if ranks == 1:
            return each_s * micro_batches * (1 + self._spread_ratio)
        return each_s * micro_batches / ranks

    def memory_ratio(self, candidate: Candidate) -> float:
        """The share of a device's memory that the fullest rank needs at least."""
        one = self._micro_batch(candidate.layout, candidate.batch)
        return self._ratio(candidate, one, one.kept_bytes)

    def _ratio(self, candidate: Candidate, one: _MicroBatch, passing_bytes: float) -> float:
        """The same where the activations of a micro-batch take so many bytes at once."""
        _, layout, strategy, _, micro_batches = candidate
        dp = (layout.dp or 1) * layout.cp
        part = self._engine.split(self._graph, layout)
        held = self._held.get(id(part))
        if held is None:
            held = self._held[id(part)] = _held(part)
        shards = _shards(strategy, strategy.shard_ranks or dp)
        of_states: float = dp if strategy.keeps.state == "shard" else 1
        gradients = held.gradients / (shards if strategy.keeps.gradients == "shard" else 1)
        parameters = held.parameters / (shards if strategy.keeps.parameters == "shard" else 1)
        if strategy.keeps.parameters == "shard":
            of_states = shards
        if layout.pp > 1 and layout.schedule.name == "gpipe":
            passing_bytes *= micro_batches
        updating = held.temporaries / of_states + gradients
        own = parameters + held.states / of_states
        if layout.pp > 1 and layout.schedule.is_two_way:
            own *= 2
        rank_bytes = (own + max(passing_bytes, updating)) / layout.pp
        return max(rank_bytes, one.touched_bytes) / self._usable_bytes

    def closer(self, candidate: Candidate) -> tuple[float, float]:
        """(seconds of a step, share of a device's memory) at least, by more work than before.

        Of a pipeline they are those of the stages into which it is cut.
        """
        _, layout, strategy, batch, micro_batches = candidate
        if layout.pp == 1:
            graph, ratio = self._engine.split(self._graph, layout), 0.0
            # Of a graph without blocks no more is known than before.
            if blocks_of(graph, self._engine.cache).points:
                passing = self._blocks(layout, batch).stages(()).passing_bytes
                one = self._micro_batch(layout, batch)
                ratio = self._ratio(candidate, one, float(passing[0]))
            return 0.0, ratio
        stages = self._stages_of(layout, batch)
        dp = (layout.dp or 1) * layout.cp
        shards = _shards(strategy, dp) if strategy.keeps.state == "shard" else 1
        # How much of what is gathered is there at once, and how wide it is, is not known.
        unsharded = 1 if strategy.keeps.parameters == "whole" else shards
        pipeline = layout.schedule, layout.pp, micro_batches
        held = stages.memory_bytes(*pipeline, shards, unsharded)
        return stages.step_s(*pipeline, self._spread_ratio), held / self._usable_bytes

    def played(self, candidate: Candidate) -> tuple[float, float]:
        """The same of a pipeline's seconds, by playing its passes."""
        _, layout, _, batch, micro_batches = candidate
        if layout.pp == 1:
            return 0.0, 0.0
        stages = self._stages_of(layout, batch)
        pipeline = layout.schedule, layout.pp, micro_batches
        return stages.played_s(*pipeline, self._spread_ratio), 0.0

    def _stages_of(self, layout: Layout, batch: int) -> Stages:
        # Where stages begin depends on how many there are, whoever holds them.
        per_rank = layout.schedule.model_stages(layout.pp) // layout.pp
        key = replace(layout, schedule=Schedule("interleaved", per_rank)), batch
        stages = self._stages.get(key)
        if stages is None:
            cache, graph = self._engine.cache, self._engine.split(self._graph, layout)
            mesh = Mesh.laid_out(self._placement, layout, DDP())
            layer_collectives = layer_collectives_of(mesh, cache) if layout.divides_layers else None
            parts = graph, mesh, batch, layer_collectives, cache
            stages = self._blocks(layout, batch).stages(default_points(*parts))
            if not layout.megatron:
                stages = stages._replace(added_s=self._added_s(stages.parameters_bytes))
            self._stages[key] = stages
        return stages

    def _added_s(self, gradients_bytes: Array) -> Array:
        """Seconds of adding up so many bytes of gradients at least, on one busy device."""
        words, cache = (gradients_bytes // 4).astype(np.intp).tolist(), self._engine.cache
        each_s = [
            node.slowdown_ratio * sums_s(costed(node.profile, cache), words, 1, cache)
            for node in self._placement.kinds
        ]
        return np.asarray(np.minimum.reduce(each_s))

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

    def _micro_batch(self, layout: Layout, batch: int) -> _MicroBatch:
        passes = self._passes.get((layout.of_layers, batch))
        if passes is None:
            passes = self._passes[layout.of_layers, batch] = self._worked_out(layout, batch)
        return passes

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
                mesh = Mesh.laid_out(placement, replace(layout.of_layers, dp=None), DDP())
                # Gradients of experts may be reduced with all others, or among fewer ranks.
                exchanged = layer_collectives_of(mesh, cache, FSDP()).seconds(bound)
                alone_s = exchanged.each_s.copy()
                # What runs beside a kernel may add nothing.
                alone_s[[place for place, _ in exchanged.hidden_by]] = 0.0
                each_s = each_s + alone_s
        return _MicroBatch(bound, each_s, float(each_s.sum()), kept, touched)

    def _least_s(self, bound: BoundGraph, node: NodeKind) -> Array:
        cache = self._engine.cache
        profile, blocks = costed(node.profile, cache), blocks_of(bound.graph, cache).owner
        # In a bubble of the others a stage computes alone.
        least_s = least_device_s(bound, profile, blocks=blocks, cache=cache)
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


def _shards(strategy: Strategy, ranks: int) -> float:
    """How many share what is sharded; without end where the host holds it, and no device."""
    return math.inf if strategy.updates_on_host else ranks


def _held(graph: OpGraph) -> Held:
    trained = [parameter for parameter in graph.parameters if parameter.gradient is not None]
    optimizer = optimizer_memory(graph)
    return Held(
        parameters=graph.parameter_bytes + graph.frozen_parameter_bytes + graph.buffer_bytes,
        gradients=sum(parameter.spec.nbytes for parameter in trained),
        states=optimizer.state_bytes,
        temporaries=optimizer.together_bytes,
    )
