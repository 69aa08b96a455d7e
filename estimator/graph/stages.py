"""Cut a traced graph into the stages of a pipeline: one graph for each, and what passes between.

A stage is a run of the forward pass from the beginning of a module on, and the part of the backward
pass that belongs to it. What a later stage needs of an earlier one and depends on weights, frozen
ones too, is sent from stage to stage; what does not (masks, positions) every stage computes for
itself, as the models of torch.distributed.pipelining do.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from estimator.errors import WorkloadError, quoted
from estimator.graph.dataflow import Dataflow, Flags, Indices
from estimator.graph.op_graph import BoundGraph, OpGraph
from estimator.graph.shards import unit_path
from estimator.graph.stage_cutting import Cutting
from estimator.graph.stage_passes import weight_shares
from estimator.graph.structure import GraphStructure

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stage:
    """One stage: its own graph, the ops of the whole one that are in it, and what it sends on.

    Stages that compute the same have the same graph, whose names are those of the first of them;
    `parameters` are the stage's own names. `point` is the module that it begins at, "" for the
    first stage. `sent` are values of the whole graph; the gradients of the same come back;
    `outputs` are those of them that the stage makes, in its own graph. `weight_shares` are those of
    its ops.
    """

    graph: OpGraph
    point: str
    ops: tuple[int, ...]
    sent: tuple[int, ...]
    outputs: tuple[int, ...]
    weight_shares: Array
    parameters: tuple[str, ...]

    def sent_bytes(self, whole: BoundGraph) -> int:
        """Bytes of one micro-batch that go to the next stage, and come back as gradients."""
        return sum(whole.specs[value].nbytes for value in self.sent)


def split_points(graph: OpGraph) -> tuple[str, ...]:
    """The repeated blocks at which a pipeline may begin a stage, in the order of the model.

    There are none where a step goes forward again after a backward pass.
    """
    phases = [op.phase for op in graph.ops]
    if "backward" in phases and "forward" in phases[phases.index("backward") :]:
        return ()
    modules = dict.fromkeys([op.module for op in graph.ops if op.phase == "forward"])
    return tuple(path for path in dict.fromkeys(map(unit_path, modules)) if path)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """The points at which stages may begin, and the block of each op.

    What stands before the first block and behind the last one goes with them.
    """

    name: str
    points: tuple[str, ...]
    owner: NDArray[np.intp]

    @classmethod
    def of(cls, graph: OpGraph, flow: Dataflow | None = None) -> Blocks:
        """Those of a graph; `flow` is its own where it is at hand."""
        points, flow = split_points(graph), flow or Dataflow.of(graph)
        return cls(name=graph.name, points=points, owner=_owners(graph, flow, points[1:]))

    def balanced(self, stages: int, seconds: Sequence[float] | Array) -> tuple[str, ...]:
        """Where stages begin so that the slowest one takes least, by the seconds of each op.

        Raises WorkloadError where there are fewer blocks than stages.
        """
        points = self.points
        if stages > len(points):
            raise WorkloadError(
                f"{self.name} has {len(points)} repeated blocks, which cannot make {stages} stages "
                "of a pipeline; choose a smaller pp"
            )
        spent = np.bincount(self.owner, weights=np.asarray(seconds), minlength=len(points))
        before = np.concatenate([[0.0], np.cumsum(spent)])
        # slowest[j]: that of some stages that hold the first j blocks; begins: where the last does.
        slowest = np.where(np.arange(len(points) + 1) == 0, 0.0, np.inf)
        # Of a stage that begins at one block and ends before another: no stage is empty.
        last = before[None, :] - before[:, None]
        last[np.tril_indices(len(points) + 1)] = np.inf
        begins = []
        for _ in range(stages):
            found = np.maximum(slowest[:, None], last)
            begins.append(found.argmin(axis=0))
            slowest = found.min(axis=0)
        ends, end = [], len(points)
        for begin in begins[:0:-1]:
            end = int(begin[end])
            ends.append(points[end])
        return tuple(ends[::-1])


def stage_graphs(
    graph: OpGraph,
    points: Sequence[str],
    structure: GraphStructure | None = None,
    flow: Dataflow | None = None,
) -> tuple[Stage, ...]:
    """The stages of a graph that begin at these modules; the first stage begins with the model.

    `structure` and `flow` are those of the graph where they are at hand. Raises WorkloadError for a
    name that is no module or out of order, and for a stage without ops.
    """
    known, flow = structure or GraphStructure.of(graph), flow or Dataflow.of(graph)
    owner = _owners(graph, flow, points)
    sending = _sent(flow, owner, len(points) + 1)
    lent = _Lent.of(flow)
    alike: dict[Hashable, Stage] = {}
    found = []
    for number, (point, sent) in enumerate(zip(("", *points), sending, strict=True)):
        cutting = Cutting(graph, lent.with_lent(owner == number), flow, known)
        first = alike.get(cutting.content)
        if first is None:
            own = cutting.graph(f"{graph.name}, stage {number}")
            first = alike[cutting.content] = Stage(
                graph=own,
                point=point,
                ops=(),
                sent=(),
                outputs=(),
                weight_shares=weight_shares(own),
                parameters=(),
            )
        found.append(
            replace(
                first,
                point=point,
                ops=tuple(cutting.ops.tolist()),
                sent=sent,
                outputs=cutting.outputs(sent),
                parameters=cutting.parameter_names,
            )
        )
    return tuple(found)


def _owners(graph: OpGraph, flow: Dataflow, points: Sequence[str]) -> Indices:
    """The stage of each op."""
    begins = [0, *(_begin(graph, flow, point) for point in points)]
    for (one, two), point in zip(pairwise(begins), points, strict=True):
        if two <= one:
            raise WorkloadError(
                f"a stage that begins at {quoted(point)} would leave the one before without "
                "operators; name split points in the order of the model"
            )
    return np.searchsorted(begins, flow.place, side="right") - 1


def _begin(graph: OpGraph, flow: Dataflow, point: str) -> int:
    """The place in the forward pass of the first op of a module."""
    found = flow.first_place.get(point)
    if found is None:
        blocks = split_points(graph)
        known = f"; its blocks are {blocks[0]} to {blocks[-1]}" if blocks else ""
        raise WorkloadError(f"{quoted(point)} names no module of {graph.name} that computes{known}")
    return found


def _sent(flow: Dataflow, owner: Indices, stages: int) -> list[tuple[int, ...]]:
    """What each stage sends to the next one: what later ones read and depends on weights."""
    reads = flow.is_forward[flow.touched_by] & ~flow.is_made
    values = flow.touched[reads]
    last = np.full(len(flow.maker), -1, dtype=np.intp)
    last[values] = owner[flow.touched_by[reads]]
    passes = flow.from_weights & (flow.maker >= 0) & (owner[flow.maker] < last)
    sent: list[list[int]] = [[] for _ in range(stages)]
    for value in dict.fromkeys(values[passes[values]].tolist()):
        for stage in range(int(owner[flow.maker[value]]), int(last[value])):
            sent[stage].append(value)
    return [tuple(each) for each in sent]


class _Lent(NamedTuple):
    """By forward op: the ops that make what it reads and what depends on no weight."""

    makers: dict[int, list[int]]
    readers: Indices

    @classmethod
    def of(cls, flow: Dataflow) -> _Lent:
        made_by = flow.maker[flow.touched]
        lends = flow.is_forward[flow.touched_by] & ~flow.is_made & (made_by >= 0)
        lends &= ~flow.from_weights[flow.touched]
        makers: dict[int, list[int]] = {}
        for reader, maker in zip(flow.touched_by[lends], made_by[lends], strict=True):
            makers.setdefault(int(reader), []).append(int(maker))
        return cls(makers, np.array(list(makers), dtype=np.intp))

    def with_lent(self, is_own: Flags) -> Indices:
        """The ops of a stage, those of earlier ones that it repeats, without weights, too."""
        inside = is_own.copy()
        waiting = self.readers[is_own[self.readers]].tolist()
        while waiting:
            for made in self.makers.get(waiting.pop(), ()):
                if not inside[made]:
                    inside[made] = True
                    waiting.append(made)
        return np.flatnonzero(inside)
