"""Cut a traced graph into the stages of a pipeline: one graph each, and what goes between.

A stage is a run of the forward pass from the beginning of a module on, and the part of the backward
pass that belongs to it. What a later stage needs of an earlier one and depends on weights, frozen
ones too, is sent from stage to stage; what does not (masks, positions) every stage computes for
itself, as the models of torch.distributed.pipelining do.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from estimator.elementwise import Array, Flags, Indices
from estimator.errors import WorkloadError, quoted
from estimator.graph.ir.op_graph import BoundGraph, OpGraph, unit_path
from estimator.graph.ir.ops import ACTIVATION, INPUT, KINDS, GraphColumns, Parameter, by_first
from estimator.graph.ir.structure import GraphStructure, owners
from estimator.graph.memory.sizes import block_bytes


class Cutting:
    """Some ops of a graph as a graph of their own, its values numbered anew.

    `content` is equal for those that compute the same, whatever their modules are called.
    """

    def __init__(
        self,
        graph: OpGraph,
        ops: Indices,
        flow: GraphColumns,
        roots: Indices,
        trained: _Trained,
    ) -> None:
        self.ops = ops
        self._graph, self._flow, self._roots = graph, flow, roots
        self._place = np.full(len(graph.ops), -1, dtype=np.intp)
        self._place[ops] = np.arange(len(ops))
        is_own = self._place[flow.touched_by] >= 0
        self._touched, self._by = flow.touched[is_own], self._place[flow.touched_by[is_own]]
        self._is_made = flow.is_made[is_own]
        count = len(graph.values)
        self._made = np.zeros(count, dtype=np.bool_)
        self._made[self._touched[self._is_made]] = True
        comes, base = self._arriving()
        self._kind = np.where(comes, INPUT, flow.kind)
        self._number, self._values = _numbered(self._touched, base)
        own = base[self._values]
        self._base = np.where(own < 0, -1, self._number[own])
        self._held, self._held_by = self._holds()
        self._parameters = self._of_stage(trained)
        self.parameter_names = tuple([parameter.name for parameter, *_ in self._parameters])
        self.content = self._content()

    def _arriving(self) -> tuple[Flags, Indices]:
        """(whether each value comes from another stage, what each is a view of here, -1: nothing).

        What another stage makes is an input. A tensor that no operator makes, since the view that
        did was fused into its readers, is one of what the stage makes or of what has come of the
        same storage.
        """
        flow, root = self._flow, self._roots
        is_made_here = np.zeros(len(root), dtype=np.bool_)
        is_made_here[root[self._made]] = True
        is_absent = (flow.kind == ACTIVATION) & (flow.kind[root] == ACTIVATION) & ~self._made
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

    def _content(self) -> Hashable:
        flow, ops, values = self._flow, self.ops, self._values
        modules, numbers = by_first(flow.module_of[ops], len(flow.modules))
        names = [flow.modules[module] for module in modules.tolist()]
        names += [name.rpartition(".")[0] for name in self.parameter_names]
        units = [unit_path(name) for name in names]
        unit_numbers = {unit: number for number, unit in enumerate(dict.fromkeys(units))}
        arrays = (
            *(flow.call_of[ops], flow.is_forward[ops], flow.is_repeated[ops], numbers),
            *(self._number[self._touched], self._by, self._is_made, self._held, self._held_by),
            *(flow.spec_of[values], self._kind[values], self._base),
        )
        return (
            *(array.tobytes() for array in arrays),
            tuple((bool(unit), unit_numbers[unit]) for unit in units),
            tuple([own[1:] for own in self._parameters]),
        )

    def outputs(self, sent: tuple[int, ...]) -> tuple[int, ...]:
        """The numbers in the stage of what it makes and sends on."""
        return tuple([int(self._number[value]) for value in sent if self._made[value]])

    def graph(self, name: str) -> OpGraph:
        """The ops as a graph of their own."""
        graph = self._graph
        frozen = self._bytes_of("parameter") - sum(p.spec.nbytes for p, *_ in self._parameters)
        share = len(self.ops) / max(len(graph.ops), 1)
        is_buffer = self._kind[self._values] == KINDS.index("buffer")
        columns = self._columns()
        return replace(
            graph,
            name=name,
            ops=columns.ops(),
            parameters=tuple(
                replace(parameter, gradient=gradient, ready_after=ready)
                for parameter, gradient, ready in self._parameters
            ),
            values=columns.values(),
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

    def _columns(self) -> GraphColumns:
        flow, ops, values = self._flow, self.ops, self._values
        calls, call_of = by_first(flow.call_of[ops], len(flow.calls))
        specs, spec_of = by_first(flow.spec_of[values], len(flow.specs))
        modules, module_of = by_first(flow.module_of[ops], len(flow.modules))
        return GraphColumns(
            **flow.of_ops(ops) | {"call_of": call_of, "module_of": module_of},
            calls=tuple([flow.calls[number] for number in calls.tolist()]),
            specs=tuple([flow.specs[number] for number in specs.tolist()]),
            spec_of=spec_of,
            modules=tuple([flow.modules[number] for number in modules.tolist()]),
            touched=self._number[self._touched],
            touched_by=self._by,
            is_made=self._is_made,
            held=self._held,
            held_by=self._held_by,
            base=self._base,
            kind=self._kind[values],
        )

    def _bytes_of(self, kind: str) -> int:
        is_own = (self._kind[self._values] == KINDS.index(kind)) & (self._base < 0)
        of_spec = self._flow.spec_of[self._values[is_own]].tolist()
        return sum(self._flow.specs[number][0].nbytes for number in of_spec)

    def _of_stage(self, trained: _Trained) -> list[tuple[Parameter, int, int]]:
        """Trained parameters whose gradients, or parts of them, the stage computes, and when.

        Of a tied one a stage computes a part, which another adds to its own.
        """
        ready = self._place[trained.ready]
        own = np.flatnonzero(ready >= 0)
        numbers = self._number[trained.gradients[own]]
        found = list(zip(own.tolist(), numbers.tolist(), ready[own].tolist(), strict=True))
        for parameter, part in trained.parts:
            if ready[parameter] < 0 and self._made[part]:
                made = self._by[self._is_made & (self._touched == part)]
                found.append((parameter, int(self._number[part]), int(made[0])))
        found.sort(key=itemgetter(0))
        return [(trained.parameters[number], value, op) for number, value, op in found]


class _Trained(NamedTuple):
    """Parameters that have a gradient: that, the op that makes it, and what this adds up to it.

    `parts` are (number of a parameter, value).
    """

    parameters: tuple[Parameter, ...]
    gradients: Indices
    ready: Indices
    parts: list[tuple[int, int]]

    @classmethod
    def of(cls, graph: OpGraph, columns: GraphColumns) -> _Trained:
        """Those of a graph."""
        trained = [p for p in graph.parameters if None not in (p.gradient, p.ready_after)]
        gradients, ready = (
            np.array([getattr(p, name) for p in trained], dtype=np.intp)
            for name in ("gradient", "ready_after")
        )
        shapes = [spec for spec, _ in columns.specs]
        touched, spec_of = columns.touched.tolist(), columns.spec_of.tolist()
        read = zip(columns.begins[ready].tolist(), columns.made_begins[ready].tolist(), strict=True)
        parts = [
            (number, value)
            for number, (parameter, part) in enumerate(zip(trained, read, strict=True))
            for value in touched[slice(*part)]
            if shapes[spec_of[value]] == parameter.spec
        ]
        return cls(tuple(trained), gradients, ready, parts)


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
    columns = GraphColumns.of(graph)
    gradients = {p.gradient for p in graph.parameters if p.gradient is not None}
    # Values that something of the input's gradient needs.
    needed: set[int] = set()
    read: set[int] = set()
    shares = np.zeros(len(columns.call_of))
    turn = int(np.flatnonzero(columns.is_forward).max(initial=-1)) + 1
    touched, begins = columns.touched.tolist(), columns.begins.tolist()
    made_begins = columns.made_begins.tolist()
    for index in range(len(shares) - 1, turn - 1, -1):
        inputs = touched[begins[index] : made_begins[index]]
        outputs = touched[made_begins[index] : begins[index + 1]]
        ends = not gradients.isdisjoint(outputs)
        if needed.isdisjoint(outputs) and (ends or not read.isdisjoint(outputs)):
            shares[index] = 1.0
        else:
            shares[index] = 0.5 if ends else 0.0
            needed.update(inputs)
        read.update(inputs)
    return shares


def held_between_passes(
    bound: BoundGraph, known: GraphStructure, outputs: Sequence[int] = ()
) -> int:
    """Bytes that a micro-batch whose backward pass has not begun holds: what that will read.

    Gradients that other stages give to that pass have not come yet. `outputs` are held as well: a
    stage of torch.distributed.pipelining keeps what it has sent.
    """
    begin = int(known.columns.is_forward.sum())
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
    `outputs` are those of them that the stage makes, in its own graph.
    """

    graph: OpGraph
    point: str
    ops: Indices
    sent: tuple[int, ...]
    outputs: tuple[int, ...]
    parameters: tuple[str, ...]

    def sent_bytes(self, bound: BoundGraph) -> int:
        """Bytes of one micro-batch that go to the next stage, and come back as gradients."""
        return sum(bound.specs[value].nbytes for value in self.sent)


def split_points(graph: OpGraph, columns: GraphColumns | None = None) -> tuple[str, ...]:
    """The repeated blocks at which a pipeline may begin a stage, in the order of the model.

    There are none where a step goes forward again after a backward pass.
    """
    columns = columns or GraphColumns.of(graph)
    is_forward = columns.is_forward
    if (is_forward[1:] > is_forward[:-1]).any():
        return ()
    own, _ = by_first(columns.module_of[is_forward], len(columns.modules))
    modules = [columns.modules[number] for number in own.tolist()]
    return tuple(path for path in dict.fromkeys(map(unit_path, modules)) if path)


def _places(columns: GraphColumns, tells: Flags) -> Indices:
    """The place in the forward pass that each op belongs to.

    The backward pass of a module is with the last forward op in it or in its parts (it meets the
    latest first), and where the last op stands that makes or reads any value that it takes, never
    behind the op before it.
    """
    is_forward, modules, module_of = columns.is_forward, columns.modules, columns.module_of
    touched, touched_by = columns.touched, columns.touched_by
    count = int(is_forward.sum())
    place = np.where(is_forward, np.cumsum(is_forward) - 1, count - 1)
    forward = is_forward[touched_by]
    last_touch = np.full(len(tells), count, dtype=np.intp)
    last_touch[touched[forward]] = place[touched_by[forward]]
    last_touch[~tells] = count
    last_in: dict[str, int] = {}
    for module, last in zip(
        module_of[is_forward].tolist(), place[is_forward].tolist(), strict=True
    ):
        last_in[modules[module]] = last
    for name, last in list(last_in.items()):
        while name := name.rpartition(".")[0]:
            last_in[name] = max(last_in.get(name, -1), last)
    anchor = np.array([last_in.get(name, count) for name in modules], dtype=np.intp)[module_of]
    reads = ~forward & ~columns.is_made
    np.minimum.at(anchor, touched_by[reads], last_touch[touched[reads]])
    behind = np.minimum.accumulate(np.minimum(anchor[~is_forward], max(count - 1, 0)))
    place[~is_forward] = behind
    return place


def _first_places(modules: tuple[str, ...], forward: Indices) -> dict[str, int]:
    """The place in the forward pass of the first op in each module or in a part of it."""
    numbers, firsts = np.unique(forward, return_index=True)
    places: dict[str, int] = {}
    for first, number in sorted(zip(firsts.tolist(), numbers.tolist(), strict=True)):
        name = modules[number]
        while name:
            places.setdefault(name, first)
            name = name.rpartition(".")[0]
    return places


def _from_weights(columns: GraphColumns) -> Flags:
    is_float = np.array(["float" in spec.dtype for spec, _ in columns.specs], dtype=np.bool_)
    floats = is_float[columns.spec_of].tolist()
    weights = set(np.flatnonzero(columns.kind == KINDS.index("parameter")).tolist())
    touched, begins = columns.touched.tolist(), columns.begins.tolist()
    made_begins = columns.made_begins.tolist()
    for op in np.flatnonzero(columns.is_forward).tolist():
        if not weights.isdisjoint(touched[begins[op] : made_begins[op]]):
            made = touched[made_begins[op] : begins[op + 1]]
            weights.update([value for value in made if floats[value]])
    flags = np.zeros(len(floats), dtype=np.bool_)
    flags[list(weights)] = True
    return flags


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """The points at which stages may begin, the block of each op, and its place in the passes.

    What stands before the first block and behind the last one goes with them, in `owner`.
    `place` of an op is its place in the forward pass; of the backward pass, that of the forward
    op to whose stage it belongs. `first_place` has that of the first op of each module.
    `from_weights` are the parameters, frozen ones too, and what the forward pass makes of them:
    stages pass it on, and make masks and positions again.
    """

    name: str
    points: tuple[str, ...]
    place: Indices
    first_place: dict[str, int]
    from_weights: Flags
    owner: Indices = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "owner", self.stage_of(self.points[1:]))

    @classmethod
    def of(cls, graph: OpGraph, columns: GraphColumns | None = None) -> Blocks:
        """Those of a graph; `columns` are its own where they are at hand."""
        columns = columns or GraphColumns.of(graph)
        from_weights = _from_weights(columns)
        return cls(
            name=graph.name,
            points=split_points(graph, columns),
            place=_places(columns, from_weights & (columns.kind == ACTIVATION)),
            first_place=_first_places(columns.modules, columns.module_of[columns.is_forward]),
            from_weights=from_weights,
        )

    def stage_of(self, points: Sequence[str]) -> Indices:
        """The stage of each op where stages begin at these points; raises WorkloadError."""
        begins = [0, *map(self._begin, points)]
        for (one, two), point in zip(pairwise(begins), points, strict=True):
            if two <= one:
                raise WorkloadError(
                    f"a stage that begins at {quoted(point)} would leave the one before without "
                    "operators; name split points in the order of the model"
                )
        return np.searchsorted(begins, self.place, side="right") - 1

    def _begin(self, point: str) -> int:
        """The place in the forward pass of the first op of a module."""
        place = self.first_place.get(point)
        if place is None:
            points = self.points
            known = f"; its blocks are {points[0]} to {points[-1]}" if points else ""
            raise WorkloadError(
                f"{quoted(point)} names no module of {self.name} that computes{known}"
            )
        return place

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

    def balanced(self, stages: int, *lanes: Sequence[float] | Array) -> tuple[str, ...]:
        """Where stages begin so that the slowest one takes least, by the seconds of each op.

        Of several lanes that work beside each other (host and device) a stage takes the longest.
        Raises WorkloadError where there are fewer blocks than stages.
        """
        points = self.points
        if stages > len(points):
            raise WorkloadError(
                f"{self.name} has {len(points)} repeated blocks, which cannot make {stages} stages "
                "of a pipeline; choose a smaller pp"
            )
        spent = [
            np.bincount(self.owner, weights=np.asarray(seconds), minlength=len(points))
            for seconds in lanes
        ]
        before = np.concatenate([np.zeros((len(lanes), 1)), np.cumsum(spent, axis=1)], axis=1)
        # slowest[j]: that of some stages that hold the first j blocks; begins: where the last does.
        slowest = np.where(np.arange(len(points) + 1) == 0, 0.0, np.inf)
        # Of a stage that begins at one block and ends before another: no stage is empty.
        last = (before[:, None, :] - before[:, :, None]).max(axis=0)
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
    columns: GraphColumns | None = None,
    blocks: Blocks | None = None,
) -> tuple[Stage, ...]:
    """The stages of a graph that begin at these modules; the first stage begins with the model.

    `columns` and `blocks` are those of the graph where they are at hand. Raises WorkloadError for a
    name that is no module or out of order, and for a stage without ops.
    """
    flow = columns or GraphColumns.of(graph)
    blocks = blocks or Blocks.of(graph, flow)
    owner = blocks.stage_of(points)
    sending = _sent(flow, blocks.from_weights, owner, len(points) + 1)
    lenders = _lenders(flow, blocks.from_weights)
    alike: dict[Hashable, OpGraph] = {}
    roots, trained = owners(flow.base), _Trained.of(graph, flow)
    graphs = []
    for number, (point, sent) in enumerate(zip(("", *points), sending, strict=True)):
        cutting = Cutting(graph, _with_lent(owner == number, lenders), flow, roots, trained)
        if cutting.content not in alike:
            alike[cutting.content] = cutting.graph(f"{graph.name}, stage {number}")
        graphs.append(
            Stage(
                graph=alike[cutting.content],
                point=point,
                ops=cutting.ops,
                sent=sent,
                outputs=cutting.outputs(sent),
                parameters=cutting.parameter_names,
            )
        )
    return tuple(graphs)


def _sent(
    flow: GraphColumns, from_weights: Flags, owner: Indices, stages: int
) -> list[tuple[int, ...]]:
    """What each stage sends to the next one: what later ones read and depends on weights."""
    reads = flow.is_forward[flow.touched_by] & ~flow.is_made
    values = flow.touched[reads]
    last = np.full(len(flow.maker), -1, dtype=np.intp)
    last[values] = owner[flow.touched_by[reads]]
    passes = from_weights & (flow.maker >= 0) & (owner[flow.maker] < last)
    sent: list[list[int]] = [[] for _ in range(stages)]
    for value in dict.fromkeys(values[passes[values]].tolist()):
        for stage in range(int(owner[flow.maker[value]]), int(last[value])):
            sent[stage].append(value)
    return [tuple(values) for values in sent]


def _lenders(flow: GraphColumns, from_weights: Flags) -> dict[int, list[int]]:
    """By forward op: the ops that make what it reads and what depends on no weight."""
    made_by = flow.maker[flow.touched]
    lends = flow.is_forward[flow.touched_by] & ~flow.is_made & (made_by >= 0)
    lends &= ~from_weights[flow.touched]
    makers: dict[int, list[int]] = {}
    readers = flow.touched_by[lends].tolist()
    for reader, maker in zip(readers, made_by[lends].tolist(), strict=True):
        makers.setdefault(reader, []).append(maker)
    return makers


def _with_lent(is_own: Flags, lenders: dict[int, list[int]]) -> Indices:
    """The ops of a stage, those of earlier ones that it repeats, without weights, too."""
    inside = is_own.copy()
    waiting = [reader for reader in lenders if is_own[reader]]
    while waiting:
        for made in lenders.get(waiting.pop(), ()):
            if not inside[made]:
                inside[made] = True
                waiting.append(made)
    return np.flatnonzero(inside)
