"""Cut a traced graph into the stages of a pipeline: one graph for each, and what passes between.

A stage is a run of the forward pass from the beginning of a module on, and the part of the backward
pass that belongs to it. What a later stage needs of an earlier one and has a gradient is sent from
stage to stage; what has none (masks, positions) every stage computes for itself, as the models of
torch.distributed.pipelining do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from estimator.errors import WorkloadError, quoted
from estimator.graph.op_graph import BoundGraph, OpGraph
from estimator.graph.ops import Op, Parameter, Value
from estimator.graph.optimizer_memory import block_bytes
from estimator.graph.shards import unit_path
from estimator.graph.structure import GraphStructure

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: its own graph, the ops of the whole one that are in it, and what it sends on.

    `point` is the module that it begins at, "" for the first stage. `sent` are values of the whole
    graph; the gradients of the same come back. `weight_ops` are those of `weight_ops(graph)`.
    """

    graph: OpGraph
    point: str
    ops: tuple[int, ...]
    sent: tuple[int, ...]
    weight_ops: frozenset[int]

    def sent_bytes(self, whole: BoundGraph) -> int:
        """Bytes of one micro-batch that go to the next stage, and come back as gradients."""
        return sum(whole.specs[value].nbytes for value in self.sent)


def split_points(graph: OpGraph) -> tuple[str, ...]:
    """The repeated blocks at which a pipeline may begin a stage, in the order of the model."""
    paths = dict.fromkeys(unit_path(op.module) for op in graph.ops if op.phase == "forward")
    return tuple(path for path in paths if path)


def balanced_points(graph: OpGraph, stages: int, seconds: Sequence[float] | Array) -> list[str]:
    """The blocks at which stages begin so that the slowest one takes least.

    `seconds` are those of each op. Raises WorkloadError where there are fewer blocks than stages.
    """
    points = split_points(graph)
    if stages > len(points):
        raise WorkloadError(
            f"{graph.name} has {len(points)} repeated blocks, which cannot make {stages} stages of "
            "a pipeline; choose a smaller pp"
        )
    # What stands before the first block and behind the last one goes with them.
    owner = _owners(graph, points[1:])
    spent = np.bincount(owner, weights=np.asarray(seconds), minlength=len(points))
    before = np.concatenate([[0.0], np.cumsum(spent)])
    # best[k][j]: the slowest of k stages that hold the first j blocks, and where the last begins.
    best = [[(0.0, 0)] + [(np.inf, 0)] * len(points)]
    for count in range(1, stages + 1):
        row: list[tuple[float, int]] = [(np.inf, 0)] * count
        for end in range(count, len(points) + 1):
            row.append(
                min(
                    (max(best[-1][begin][0], float(before[end] - before[begin])), begin)
                    for begin in range(count - 1, end)
                )
            )
        best.append(row[: len(points) + 1])
    begins, end = [], len(points)
    for count in range(stages, 1, -1):
        end = best[count][end][1]
        begins.append(points[end])
    return begins[::-1]


def stage_graphs(graph: OpGraph, points: Sequence[str]) -> tuple[Stage, ...]:
    """The stages of a graph that begin at these modules; the first stage begins with the model.

    Raises WorkloadError for a name that is no module or out of order, and for a stage without ops.
    """
    owner = _owners(graph, points)
    flow = _Flow.of(graph, owner, len(points) + 1)
    return tuple(
        _Cutting(graph, flow.ops_of(graph, owner, number)).stage(number, point, sent)
        for number, (point, sent) in enumerate(zip(("", *points), flow.sent, strict=True))
    )


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
    """Makes the graph of one stage: its ops, the values that they touch, numbered anew."""

    def __init__(self, graph: OpGraph, ops: tuple[int, ...]) -> None:
        self._graph, self._ops = graph, ops
        self._place = {op: place for place, op in enumerate(ops)}
        self._maker = {value: op for op in reversed(ops) for value in graph.ops[op].outputs}
        self._numbers: dict[int, int] = {}
        self._values: list[Value] = []

    def stage(self, number: int, point: str, sent: tuple[int, ...]) -> Stage:
        graph = self._graph
        ops = tuple(self._op(graph.ops[index]) for index in self._ops)
        parameters = tuple(self._parameters())
        frozen = self._bytes_of("parameter") - sum(p.spec.nbytes for p in parameters)
        share = len(ops) / max(len(graph.ops), 1)
        own = replace(
            graph,
            name=f"{graph.name}, stage {number}",
            ops=ops,
            parameters=parameters,
            values=tuple(self._values),
            frozen_parameter_bytes=max(frozen, 0) if graph.frozen_parameter_bytes else 0,
            buffer_bytes=self._bytes_of("buffer"),
            buffers=sum(value.kind == "buffer" for value in self._values),
            inputs=tuple(
                replace(each, value=self._numbers[each.value])
                for each in graph.inputs
                if each.value in self._numbers
            ),
            module_calls=round(graph.module_calls * share),
            function_calls=round(graph.function_calls * share),
        )
        return Stage(graph=own, point=point, ops=self._ops, sent=sent, weight_ops=weight_ops(own))

    def _bytes_of(self, kind: str) -> int:
        return sum(value.spec.nbytes for value in self._values if value.kind == kind)

    def _op(self, op: Op) -> Op:
        return replace(
            op,
            inputs=tuple(map(self._value, op.inputs)),
            outputs=tuple(map(self._value, op.outputs)),
            holds=tuple(self._numbers[value] for value in op.holds if value in self._numbers),
        )

    def _value(self, value: int) -> int:
        """The number of a value in the stage; what another stage makes is an input here."""
        found = self._numbers.get(value)
        if found is not None:
            return found
        known = self._graph.values[value]
        base = None if known.base in (None, value) else known.base
        if known.kind == "activation" and value not in self._maker:
            known, base = replace(known, kind="input"), None
        own = None if base is None else self._value(base)
        self._values.append(replace(known, base=own))
        self._numbers[value] = len(self._values) - 1
        return self._numbers[value]

    def _parameters(self) -> Iterable[Parameter]:
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


def pass_seconds(stage: Stage, seconds: Callable[[int], float]) -> tuple[float, float, float]:
    """(forward, gradients of the input, gradients of weights) of a stage, by the seconds of ops.

    What the gradient of the stage's input does not need is of weights; in the first stage, whose
    input has none, all of the backward pass. A kernel that gives both, as of convolutions, is half
    of each.
    """
    graph = stage.graph
    trained = {p.gradient for p in graph.parameters}
    forward_s = input_s = weight_s = 0.0
    for index, op in enumerate(graph.ops):
        spent_s = seconds(index)
        if op.phase == "forward":
            forward_s += spent_s
            continue
        share = 1.0 if index in stage.weight_ops else 0.0 if trained.isdisjoint(op.outputs) else 0.5
        weight_s += share * spent_s
        input_s += (1.0 - share) * spent_s
    return forward_s, input_s, weight_s


def weight_ops(graph: OpGraph) -> frozenset[int]:
    """Ops of the backward pass whose results serve gradients of parameters alone."""
    only: set[int] = set()
    gradients = {p.gradient for p in graph.parameters if p.gradient is not None}
    used_by: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        for value in op.inputs:
            used_by.setdefault(value, []).append(index)
    for index in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[index]
        if op.phase != "backward":
            break
        readers = [reader for value in op.outputs for reader in used_by.get(value, ())]
        ends = bool(gradients.intersection(op.outputs))
        if (ends or readers) and all(reader in only for reader in readers):
            only.add(index)
    return frozenset(only)


def held_between_passes(bound: BoundGraph, known: GraphStructure) -> int:
    """Bytes that a micro-batch whose backward pass has not begun holds: what that will read."""
    begin = int(known.is_forward.sum())
    waits = (known.born < begin) & (known.dies >= begin)
    kinds = np.array([storage.kind for storage in known.storages])
    waits &= np.isin(kinds, ("activation", "input"))
    block = block_bytes(bound.graph)
    return int((-(-known.storage_bytes(bound)[waits] // block) * block).sum())
