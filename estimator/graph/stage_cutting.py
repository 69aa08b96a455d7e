"""Make the graph of one stage of a pipeline: its ops and the values that they touch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace

import numpy as np

from estimator.graph.dataflow import KINDS, Dataflow, Indices, by_first
from estimator.graph.op_graph import OpGraph
from estimator.graph.ops import Op, Parameter, Value
from estimator.graph.shards import unit_path
from estimator.graph.structure import GraphStructure

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
        # What another stage makes is an input here.
        comes = (flow.kind == _ACTIVATION) & ~self._made
        self._kind = np.where(comes, _INPUT, flow.kind)
        base = np.where(comes, -1, flow.base)
        self._number, self._values = _numbered(self._touched, base)
        own = base[self._values]
        self._base = np.where(own < 0, -1, self._number[own])
        self._held, self._held_by = self._holds()
        self._parameters = list(self._trained())
        self.parameter_names = tuple(each.name for each in self._parameters)
        self.content = self._content(structure)

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
            *(each.tobytes() for each in arrays),
            tuple((bool(unit), unit_numbers[unit]) for unit in units),
            tuple((each.gradient, each.ready_after) for each in self._parameters),
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
                replace(each, value=int(self._number[each.value]))
                for each in graph.inputs
                if self._number[each.value] >= 0
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
        own = self._values[self._kind[self._values] == KINDS.index(kind)]
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
