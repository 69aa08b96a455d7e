"""Cut a traced graph into the stages of a pipeline: one graph for each, and what passes between.

A stage is a run of the forward pass from the beginning of a module on, and the part of the backward
pass that belongs to it. What a later stage needs of an earlier one and has a gradient is sent from
stage to stage; what has none (masks, positions) every stage computes for itself, as the models of
torch.distributed.pipelining do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from estimator.errors import WorkloadError, quoted
from estimator.graph.op_graph import BoundGraph, OpGraph
from estimator.graph.ops import Op, Parameter, ValueKind
from estimator.graph.shards import unit_path
from estimator.graph.stage_passes import weight_ops
from estimator.graph.structure import GraphStructure

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: its own graph, the ops of the whole one that are in it, and what it sends on.

    Stages that compute the same have the same graph, whose names are those of the first of them;
    `parameters` are the stage's own names. `point` is the module that it begins at, "" for the
    first stage. `sent` are values of the whole graph; the gradients of the same come back;
    `outputs` are those of them that the stage makes, in its own graph. `weight_ops` are those of
    `weight_ops(graph)`.
    """

    graph: OpGraph
    point: str
    ops: tuple[int, ...]
    sent: tuple[int, ...]
    outputs: tuple[int, ...]
    weight_ops: frozenset[int]
    parameters: tuple[str, ...]

    def sent_bytes(self, whole: BoundGraph) -> int:
        """Bytes of one micro-batch that go to the next stage, and come back as gradients."""
        return sum(whole.specs[value].nbytes for value in self.sent)


def split_points(graph: OpGraph) -> tuple[str, ...]:
    """The repeated blocks at which a pipeline may begin a stage, in the order of the model."""
    paths = dict.fromkeys(unit_path(op.module) for op in graph.ops if op.phase == "forward")
    return tuple(path for path in paths if path)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """The points at which stages may begin, and the block of each op.

    What stands before the first block and behind the last one goes with them.
    """

    name: str
    points: tuple[str, ...]
    owner: NDArray[np.intp]

    @classmethod
    def of(cls, graph: OpGraph) -> Blocks:
        points = split_points(graph)
        return cls(name=graph.name, points=points, owner=_owners(graph, points[1:]))

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
        begins = []
        for _ in range(stages):
            last = before[None, :] - before[:, None]
            found = np.maximum(slowest[:, None], last)
            found[np.tril_indices(len(points) + 1)] = np.inf
            begins.append(found.argmin(axis=0))
            slowest = found.min(axis=0)
        ends, end = [], len(points)
        for begin in begins[:0:-1]:
            end = int(begin[end])
            ends.append(points[end])
        return tuple(ends[::-1])


def stage_graphs(
    graph: OpGraph, points: Sequence[str], structure: GraphStructure | None = None
) -> tuple[Stage, ...]:
    """The stages of a graph that begin at these modules; the first stage begins with the model.

    `structure` is that of the graph where it is at hand. Raises WorkloadError for a name that is no
    module or out of order, and for a stage without ops.
    """
    known = structure or GraphStructure.of(graph)
    owner = _owners(graph, points)
    flow = _Flow.of(graph, owner, len(points) + 1)
    alike: dict[Hashable, Stage] = {}
    found = []
    for number, (point, sent) in enumerate(zip(("", *points), flow.sent, strict=True)):
        cutting = _Cutting(graph, flow.ops_of(graph, owner, number), known)
        first = alike.get(cutting.content)
        if first is None:
            first = alike[cutting.content] = cutting.stage(number, point)
        found.append(
            replace(
                first,
                point=point,
                ops=cutting.ops,
                sent=sent,
                outputs=cutting.outputs(sent),
                parameters=cutting.parameter_names,
            )
        )
    return tuple(found)


def _owners(graph: OpGraph, points: Sequence[str]) -> NDArray[np.intp]:
    """The stage of each op."""
    forward = [index for index, op in enumerate(graph.ops) if op.phase == "forward"]
    begins = [0, *(_begin(graph, forward, point) for point in points)]
    for (one, two), point in zip(pairwise(begins), points, strict=True):
        if two <= one:
            raise WorkloadError(
                f"a stage that begins at {quoted(point)} would leave the one before without "
                "operators; name split points in the order of the model"
            )
    owner = np.zeros(len(graph.ops), dtype=np.intp)
    of_module: dict[str, int] = {}
    for place, index in enumerate(forward):
        owner[index] = bisect_right(begins, place) - 1
        # Modules that are met again later belong to the later stage: backward meets it first.
        of_module[graph.ops[index].module] = int(owner[index])
    latest = _latest_stage(graph, owner)
    current = len(points)
    for index, op in enumerate(graph.ops):
        if op.phase == "backward":
            known = [latest[value] for value in op.inputs if value in latest]
            current = min([current, of_module.get(op.module, current), *known])
            owner[index] = current
    return owner


def _latest_stage(graph: OpGraph, owner: NDArray[np.intp]) -> dict[int, int]:
    """The last stage whose forward pass makes or reads each activation: its backward pass is there.

    Masks and the like, which have no gradient, tell nothing.
    """
    trained = _trained_values(graph)
    found: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        if op.phase == "forward":
            for value in (*op.inputs, *op.outputs):
                if value in trained and graph.values[value].kind == "activation":
                    found[value] = int(owner[index])
    return found


def _begin(graph: OpGraph, forward: Sequence[int], point: str) -> int:
    """The place in the forward pass of the first op of a module."""
    inside = point + "."
    for place, index in enumerate(forward):
        module = graph.ops[index].module
        if module == point or module.startswith(inside):
            return place
    blocks = split_points(graph)
    known = f"; its blocks are {blocks[0]} to {blocks[-1]}" if blocks else ""
    raise WorkloadError(f"{quoted(point)} names no module of {graph.name} that computes{known}")


@dataclass(frozen=True, slots=True)
class _Flow:
    """What passes between stages: the op that makes each value, what each sends to the next one.

    `trained` are the values of the forward pass that have a gradient.
    """

    maker: dict[int, int]
    sent: list[tuple[int, ...]]
    trained: set[int]

    @classmethod
    def of(cls, graph: OpGraph, owner: NDArray[np.intp], stages: int) -> _Flow:
        maker: dict[int, int] = {}
        last_use: dict[int, int] = {}
        for index, op in enumerate(graph.ops):
            if op.phase == "forward":
                for value in op.inputs:
                    last_use[value] = int(owner[index])
            for value in op.outputs:
                maker.setdefault(value, index)
        trained = _trained_values(graph)
        sent: list[list[int]] = [[] for _ in range(stages)]
        for value, last in last_use.items():
            if value in maker and value in trained:
                for stage in range(int(owner[maker[value]]), last):
                    sent[stage].append(value)
        return cls(maker, [tuple(values) for values in sent], trained)

    def ops_of(self, graph: OpGraph, owner: NDArray[np.intp], stage: int) -> tuple[int, ...]:
        """The ops of a stage, those of earlier ones that it repeats for want of a gradient too."""
        found = set(np.flatnonzero(owner == stage).tolist())
        waiting = [op for op in found if graph.ops[op].phase == "forward"]
        while waiting:
            for value in graph.ops[waiting.pop()].inputs:
                made = self.maker.get(value)
                if made is not None and made not in found and value not in self.trained:
                    found.add(made)
                    waiting.append(made)
        return tuple(sorted(found))


def _trained_values(graph: OpGraph) -> set[int]:
    """Values of the forward pass that have a gradient."""
    trained = {parameter.spec for parameter in graph.parameters if parameter.gradient is not None}
    found = {
        index
        for index, value in enumerate(graph.values)
        if value.kind == "parameter" and value.spec in trained
    }
    for op in graph.ops:
        if op.phase == "forward" and not found.isdisjoint(op.inputs):
            found.update(v for v in op.outputs if "float" in graph.values[v].spec.dtype)
    return found


class _Cutting:
    """Makes the graph of one stage: its ops, the values that they touch, numbered anew.

    `content` is equal for stages that compute the same, whatever their modules are called.
    """

    def __init__(self, graph: OpGraph, ops: tuple[int, ...], structure: GraphStructure) -> None:
        self.ops = ops
        self._graph = graph
        self._place = {op: place for place, op in enumerate(ops)}
        self._maker = {value: op for op in reversed(ops) for value in graph.ops[op].outputs}
        self._numbers: dict[int, int] = {}
        # (value of the whole graph, what it is here, what it shares the storage of here)
        self._values: list[tuple[int, ValueKind, int | None]] = []
        self._wiring = [self._wired(graph.ops[index]) for index in ops]
        self._parameters = list(self._trained())
        self.parameter_names = tuple(each.name for each in self._parameters)
        self.content = self._content(structure)

    def _wired(self, op: Op) -> tuple[tuple[int, ...], ...]:
        """The numbers of an op's inputs, outputs and of what it holds."""
        inputs, outputs = tuple(map(self._value, op.inputs)), tuple(map(self._value, op.outputs))
        held = tuple(self._numbers[value] for value in op.holds if value in self._numbers)
        return inputs, outputs, held

    def _value(self, value: int) -> int:
        """The number of a value in the stage; what another stage makes is an input here."""
        found = self._numbers.get(value)
        if found is not None:
            return found
        known = self._graph.values[value]
        kind, base = known.kind, None if known.base in (None, value) else known.base
        if kind == "activation" and value not in self._maker:
            kind, base = "input", None
        own = None if base is None else self._value(base)
        self._values.append((value, kind, own))
        self._numbers[value] = len(self._values) - 1
        return self._numbers[value]

    def _content(self, structure: GraphStructure) -> Hashable:
        graph, modules = self._graph, dict[str, int]()
        module_of = [modules.setdefault(graph.ops[op].module, len(modules)) for op in self.ops]
        names = [*modules, *(name.rpartition(".")[0] for name in self.parameter_names)]
        units = [unit_path(name) for name in names]
        unit_numbers = {unit: number for number, unit in enumerate(dict.fromkeys(units))}
        of_op, of_value = structure.call_of, structure.spec_of
        return (
            tuple(of_op[list(self.ops)].tolist()),
            tuple((graph.ops[op].phase, graph.ops[op].is_repeated) for op in self.ops),
            tuple(module_of),
            tuple((bool(unit), unit_numbers[unit]) for unit in units),
            tuple(self._wiring),
            tuple((int(of_value[value]), kind, base) for value, kind, base in self._values),
            tuple((each.gradient, each.ready_after) for each in self._parameters),
        )

    def outputs(self, sent: tuple[int, ...]) -> tuple[int, ...]:
        """The numbers in the stage of what it makes and sends on."""
        return tuple([self._numbers[value] for value in sent if value in self._maker])

    def stage(self, number: int, point: str) -> Stage:
        """The stage with a graph of its own, but for what it sends."""
        graph = self._graph
        wired = zip(self.ops, self._wiring, strict=True)
        ops = tuple(
            replace(graph.ops[index], inputs=inputs, outputs=outputs, holds=held)
            for index, (inputs, outputs, held) in wired
        )
        frozen = self._bytes_of("parameter") - sum(p.spec.nbytes for p in self._parameters)
        share = len(ops) / max(len(graph.ops), 1)
        own = replace(
            graph,
            name=f"{graph.name}, stage {number}",
            ops=ops,
            parameters=tuple(self._parameters),
            values=tuple(
                replace(graph.values[value], kind=kind, base=base)
                for value, kind, base in self._values
            ),
            frozen_parameter_bytes=max(frozen, 0) if graph.frozen_parameter_bytes else 0,
            buffer_bytes=self._bytes_of("buffer"),
            buffers=sum(kind == "buffer" for _, kind, _ in self._values),
            inputs=tuple(
                replace(each, value=self._numbers[each.value])
                for each in graph.inputs
                if each.value in self._numbers
            ),
            module_calls=round(graph.module_calls * share),
            function_calls=round(graph.function_calls * share),
        )
        return Stage(
            graph=own,
            point=point,
            ops=self.ops,
            sent=(),
            outputs=(),
            weight_ops=weight_ops(own),
            parameters=self.parameter_names,
        )

    def _bytes_of(self, kind: str) -> int:
        values = self._graph.values
        return sum(values[value].spec.nbytes for value, own, _ in self._values if own == kind)

    def _trained(self) -> Iterable[Parameter]:
        """Trained parameters whose gradients, or parts of them, the stage computes.

        Of a tied one a stage computes a part, which another adds to its own.
        """
        for parameter in self._graph.parameters:
            gradient, ready = parameter.gradient, parameter.ready_after
            if gradient is None or ready is None:
                continue
            if ready in self._place:
                yield replace(
                    parameter, gradient=self._numbers[gradient], ready_after=self._place[ready]
                )
                continue
            for part in self._graph.ops[ready].inputs:
                made = self._maker.get(part)
                if made is not None and self._graph.values[part].spec == parameter.spec:
                    yield replace(
                        parameter, gradient=self._numbers[part], ready_after=self._place[made]
                    )
