"""List how ranks can share a model: axes, schedules, strategies, micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from estimator.errors import StrategyError
from estimator.graph.op_graph import OpGraph
from estimator.graph.stages import split_points
from estimator.placement.placement import Placement
from estimator.workload import Strategy
from estimator.workload.layout import Layout
from estimator.workload.schedules import DEFAULT_SCHEDULE, Schedule

# Gradients of a pipeline's micro-batches add up where they are whole; parameters, which all of them
# read, stay gathered, as torchtitan's do by default.
_BESIDE_STAGES = ("ddp", "zero1", "distributed-optimizer")
_GATHERED = Strategy.parse("fsdp:no_reshard")


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
    for shared in shares:
        left = ranks // shared.tp
        for pp in divisors(left):
            dp = left // pp
            if global_batch % dp or dp * shared.tp % shared.ep:
                continue
            for layout in _pipelines(shared, pp, dp, schedules, blocks):
                for batch in _batches(global_batch // dp, graph):
                    micro_batches = global_batch // dp // batch
                    if pp > 1 and not layout.schedule.runs(pp, micro_batches):
                        continue
                    able = [each for each in strategies if _takes(layout, each, ranks)]
                    for strategy in _strategies(able, layout, dp, placement):
                        if _takes(layout, strategy, ranks):
                            yield Candidate(0, layout, strategy, batch, micro_batches)


def divisors(number: int) -> list[int]:
    """All that divide a number, the smallest first.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


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
    in_node = min(placement.ranks_per_node) // (layout.tp * layout.pp)
    for strategy in strategies:
        if layout.pp > 1 and str(strategy) == "fsdp":
            yield _GATHERED
            continue
        if layout.pp > 1 and not (strategy.kind in _BESIDE_STAGES or strategy == _GATHERED):
            continue
        yield strategy
        if str(strategy) == "fsdp" and 1 < in_node < dp and dp % in_node == 0:
            yield Strategy.parse(f"fsdp:shard={in_node}")


def _takes(layout: Layout, strategy: Strategy, ranks: int) -> bool:
    """Whether a strategy can go with experts that ranks divide, if they do."""
    if layout.ep > 1:
        try:
            layout.parallelism(ranks, strategy)
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
