"""Cut a traced graph into the stages of a pipeline: one graph each, and what goes between.

A stage is a run of the forward pass from the beginning of a module on, and the part of the backward
pass that belongs to it. What a later stage needs of an earlier one and depends on weights, frozen
ones too, is sent from stage to stage; what does not (masks, positions) every stage computes for
itself, as the models of torch.distributed.pipelining do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from estimator.elementwise import Array, Flags, Indices
from estimator.errors import WorkloadError, quoted
from estimator.graph.ir.op_graph import BoundGraph, OpGraph, unit_path
from estimator.graph.ir.ops import Op, Parameter, Value
from estimator.graph.ir.structure import (
    KINDS,
    Dataflow,
    GraphStructure,
    by_first,
    owners,
)
from estimator.graph.memory.sizes import block_bytes

_ACTIVATION, _INPUT = KINDS.index("activation"), KINDS.index("input")


class Cutting:
    """Some ops of a graph as a graph of their own, its values numbered anew.

    `content` is equal for those that compute the same, whatever their modules are called.
    """

    def __init__(
        self, graph: OpGraph, ops: Indices, flow: Dataflow, structure: GraphStructure
    ) -> None:
        self.ops = ops
        self._graph, self._flow = graph, flow
        self._place = np.full(len(graph.ops), -1, dtype=np.intp)
        self._place[ops] = np.arange(len(ops))
        is_own = self._place[flow.touched_by] >= 0
        self._touched, self._by = flow.touched[is_own], self._place[flow.touched_by[is_own]]
        self._is_made = flow.is_made[is_own]
        count = len(graph.values)
        self._made = np.zeros(count, dtype=np.bool_)
        self._made[self._touched[self._is_made]] = True
        comes, base = self._arriving()
        self._kind = np.where(comes, _INPUT, flow.kind)
        self._number, self._values = _numbered(self._touched, base)
        own = base[self._values]
        self._base = np.where(own < 0, -1, self._number[own])
        self._held, self._held_by = self._holds()
        self._parameters = list(self._trained())
        self.parameter_names = tuple(parameter.name for parameter in self._parameters)
        self.content = self._content(structure)

    def _arriving(self) -> tuple[Flags, Indices]:
        """(whether each value comes from another stage, what each is a view of here, -1: nothing).

        What another stage makes is an input. A tensor that no operator makes, since the view that
        did was fused into its readers, is one of what the stage makes or of what has come of the
        same storage.
        """
        flow, root = self._flow, owners(self._flow.base)
        is_made_here = np.zeros(len(root), dtype=np.bool_)
        is_made_here[root[self._made]] = True
        is_absent = (flow.kind == _ACTIVATION) & (flow.kind[root] == _ACTIVATION) & ~self._made
        is_fused = is_absent & (flow.maker < 0)
        is_absent &= ~(is_fused & is_made_here[root])
        is_fused &= is_absent
        came = self._touched[is_absent[self._touched]][::-1]
        # Of several the first one: the last that is written here.
        of_root = np.full(len(root), -1, dtype=np.intp)
        for values in (came[is_fused[came]], came[~is_fused[came]]):
            of_root[root[values]] = values
        base = np.where(is_fused, of_root[root], flow.base)
        comes = is_absent & (~is_fused | (base < 0) | (base == np.arange(len(base))))
        return comes, np.where(comes, -1, base)

    def _holds(self) -> tuple[Indices, Indices]:
        """The numbers of values that ops hold, of those that there are by then, and the ops."""
        flow = self._flow
        met_by = np.zeros(len(self._number), dtype=np.intp)
        met_by[self._touched[::-1]] = self._by[::-1]
        by = self._place[flow.held_by]
        is_own = (by >= 0) & (self._number[flow.held] >= 0) & (met_by[flow.held] <= by)
        return self._number[flow.held[is_own]], by[is_own]

    def _content(self, structure: GraphStructure) -> Hashable:
        flow, ops, values = self._flow, self.ops, self._values
        modules, numbers = by_first(flow.module_of[ops], len(flow.modules))
        names = [flow.modules[module] for module in modules.tolist()]
        names += [name.rpartition(".")[0] for name in self.parameter_names]
        units = [unit_path(name) for name in names]
        unit_numbers = {unit: number for number, unit in enumerate(dict.fromkeys(units))}
        arrays = (
            *(structure.call_of[ops], flow.is_forward[ops], flow.is_repeated[ops], numbers),
            *(self._number[self._touched], self._by, self._is_made, self._held, self._held_by),
            *(structure.spec_of[values], self._kind[values], self._base),
        )
        return (
            *(array.tobytes() for array in arrays),
            tuple((bool(unit), unit_numbers[unit]) for unit in units),
            tuple((parameter.gradient, parameter.ready_after) for parameter in self._parameters),
        )

    def outputs(self, sent: tuple[int, ...]) -> tuple[int, ...]:
        """The numbers in the stage of what it makes and sends on."""
        return tuple([int(self._number[value]) for value in sent if self._made[value]])

    def graph(self, name: str) -> OpGraph:
        """The ops as a graph of their own."""
        graph = self._graph
        frozen = self._bytes_of("parameter") - sum(p.spec.nbytes for p in self._parameters)
        share = len(self.ops) / max(len(graph.ops), 1)
        is_buffer = self._kind[self._values] == KINDS.index("buffer")
        return replace(
            graph,
            name=name,
            ops=tuple(self._own_ops()),
            parameters=tuple(self._parameters),
            values=tuple(self._own_values()),
            frozen_parameter_bytes=max(frozen, 0) if graph.frozen_parameter_bytes else 0,
            buffer_bytes=self._bytes_of("buffer"),
            buffers=int(is_buffer.sum()),
            inputs=tuple(
                replace(given, value=int(self._number[given.value]))
                for given in graph.inputs
                if self._number[given.value] >= 0
            ),
            module_calls=round(graph.module_calls * share),
            function_calls=round(graph.function_calls * share),
        )

    def _own_ops(self) -> Iterator[Op]:
        every, places = self._number[self._touched].tolist(), np.arange(len(self.ops) + 1)
        begins = np.searchsorted(self._by, places).tolist()
        held, held_begins = self._held.tolist(), np.searchsorted(self._held_by, places).tolist()
        for place, index in enumerate(self.ops.tolist()):
            op = self._graph.ops[index]
            begin, end = begins[place], begins[place + 1]
            middle = begin + len(op.inputs)
            yield Op(
                name=op.name,
                call=op.call,
                other_call=op.other_call,
                phase=op.phase,
                module=op.module,
                inputs=tuple(every[begin:middle]),
                outputs=tuple(every[middle:end]),
                is_view=op.is_view,
                is_repeated=op.is_repeated,
                holds=tuple(held[held_begins[place] : held_begins[place + 1]]),
                enters_dtensor=op.enters_dtensor,
            )

    def _own_values(self) -> Iterator[Value]:
        kinds, bases = self._kind[self._values].tolist(), self._base.tolist()
        for index, kind, base in zip(self._values.tolist(), kinds, bases, strict=True):
            known = self._graph.values[index]
            yield Value(
                spec=known.spec,
                other_spec=known.other_spec,
                kind=KINDS[kind],
                base=None if base < 0 else base,
            )

    def _bytes_of(self, kind: str) -> int:
        is_own = (self._kind[self._values] == KINDS.index(kind)) & (self._base < 0)
        own = self._values[is_own]
        return sum(self._graph.values[value].spec.nbytes for value in own.tolist())

    def _trained(self) -> Iterator[Parameter]:
        """Trained parameters whose gradients, or parts of them, the stage computes.

        Of a tied one a stage computes a part, which another adds to its own.
        """
        graph, place, number = self._graph, self._place.tolist(), self._number
        for parameter in graph.parameters:
            gradient, ready = parameter.gradient, parameter.ready_after
            if gradient is None or ready is None:
                continue
            if place[ready] >= 0:
                own = int(number[gradient])
                yield replace(parameter, gradient=own, ready_after=place[ready])
                continue
            for part in graph.ops[ready].inputs:
                if self._made[part] and graph.values[part].spec == parameter.spec:
                    made = self._by[self._is_made & (self._touched == part)]
                    own = int(number[part])
                    yield replace(parameter, gradient=own, ready_after=int(made[0]))


def _numbered(touched: Indices, base: Indices) -> tuple[Indices, Indices]:
    """(the number of each value in a stage, -1 for none; the values by number).

    They stand in the order in which they are met; what they share the storage of comes last where
    nothing touches it.
    """
    values, _ = by_first(touched, len(base))
    number = np.full(len(base), -1, dtype=np.intp)
    more = values
    while len(more):
        number[more] = np.arange(len(values) - len(more), len(values))
        bases = base[more]
        more, _ = by_first(bases[(bases >= 0) & (number[bases] < 0)], len(base))
        values = np.concatenate([values, more])
    return number, values


def pass_seconds(
    is_forward: Flags, weight_shares: Array, seconds: Array
) -> tuple[float, float, float]:
    """(forward, gradients of the input, gradients of weights) of a stage, by the seconds of ops."""
    weight_s = float((weight_shares * seconds).sum())
    backward_s = float(seconds[~is_forward].sum())
    return float(seconds[is_forward].sum()), backward_s - weight_s, weight_s


def weight_shares(graph: OpGraph) -> Array:
    """The share of each op that is of gradients of weights, not of the stage's input.

    What the gradient of the stage's input does not need is of weights; in the first stage, whose
    input has none, all of the backward pass. A kernel that gives both, as of convolutions, is half
    of each.
    """
    gradients = {p.gradient for p in graph.parameters if p.gradient is not None}
    # Values that something of the input's gradient needs.
    needed: set[int] = set()
    read: set[int] = set()
    shares = np.zeros(len(graph.ops))
    for index in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[index]
        if op.phase != "backward":
            break
        ends = not gradients.isdisjoint(op.outputs)
        if needed.isdisjoint(op.outputs) and (ends or not read.isdisjoint(op.outputs)):
            shares[index] = 1.0
        else:
            shares[index] = 0.5 if ends else 0.0
            needed.update(op.inputs)
        read.update(op.inputs)
    return shares


def held_between_passes(
    bound: BoundGraph, known: GraphStructure, outputs: Sequence[int] = ()
) -> int:
    """Bytes that a micro-batch whose backward pass has not begun holds: what that will read.

    Gradients that other stages give to that pass have not come yet. `outputs` are held as well: a
    stage of torch.distributed.pipelining keeps what it has sent.
    """
    begin = int(known.is_forward.sum())
    waits = (known.born < begin) & (known.dies >= begin)
    kinds = known.kinds
    has_come = np.zeros(len(kinds), dtype=np.bool_)
    has_come[known.touches.storage[known.touches.op < begin]] = True
    waits &= (kinds == "activation") | ((kinds == "input") & has_come)
    waits[known.storage_of[list(outputs)]] = True
    block = block_bytes(bound.graph)
    return int((-(-known.storage_bytes(bound)[waits] // block) * block).sum())


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

    def sent_bytes(self, bound: BoundGraph) -> int:
        """Bytes of one micro-batch that go to the next stage, and come back as gradients."""
        return sum(bound.specs[value].nbytes for value in self.sent)


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
    owner: Indices

    @classmethod
    def of(cls, graph: OpGraph, flow: Dataflow | None = None) -> Blocks:
        """Those of a graph; `flow` is its own where it is at hand."""
        points, flow = split_points(graph), flow or Dataflow.of(graph)
        return cls(name=graph.name, points=points, owner=_owners(graph, flow, points[1:]))

    def even(self, stages: int) -> tuple[str, ...]:
        """Where stages of as many blocks each begin; nothing where the blocks do not divide."""
        per_stage, left = divmod(len(self.points), stages)
        return () if left else self.points[per_stage::per_stage]

    def of_layers(self, layers: Sequence[int]) -> tuple[str, ...]:
        """Where stages of so many blocks begin; raises WorkloadError for any other number."""
        if sum(layers) != len(self.points):
            raise WorkloadError(
                f"{self.name} has {len(self.points)} repeated blocks, found {sum(layers)} in the "
                "layout of its stages; write all of them"
            )
        return tuple(self.points[end] for end in np.cumsum(layers[:-1]).tolist())

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
            levels = np.maximum(slowest[:, None], last)
            begins.append(levels.argmin(axis=0))
            slowest = levels.min(axis=0)
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
    graphs = []
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
        graphs.append(
            replace(
                first,
                point=point,
                ops=tuple(cutting.ops.tolist()),
                sent=sent,
                outputs=cutting.outputs(sent),
                parameters=cutting.parameter_names,
            )
        )
    return tuple(graphs)


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
    place = flow.first_place.get(point)
    if place is None:
        blocks = split_points(graph)
        known = f"; its blocks are {blocks[0]} to {blocks[-1]}" if blocks else ""
        raise WorkloadError(f"{quoted(point)} names no module of {graph.name} that computes{known}")
    return place


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
    return [tuple(values) for values in sent]


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
