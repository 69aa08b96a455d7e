"""Find the collectives among the operators of a rank's graph."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from estimator.graph.ir.op_graph import BoundGraph, OpGraph
from estimator.graph.ir.ops import GraphColumns, Op, Phase
from estimator.machines.profile import CollectiveName
from estimator.tensors import OpCall, TensorSpec

# They go by the names of torch's functional collectives.
_NAMESPACE = "_c10d_functional"
# The axis of all ranks, which a model's own collectives go along.
WORLD = "world"
_RING = f"{_NAMESPACE}.permute_tensor.default"
_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten._scaled_mm.")

# Queries, keys and values are three products of one factor.
_MOST_PIECES = 3

# What a collective runs beside: the next attention, the other product of its layer's gradients, in
# pieces ("ring") the products that take what it gathers, or give what it scatters, or the passes of
# another micro-batch.
Overlapped = Literal["attention", "product", "ring", "micro-batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a micro-batch, of the ranks along an axis of the mesh.

    `size_bytes` is what all ranks have together after a gather or before a scatter, and what each
    of them has of a reduction; `op_index` is its place among the operators. A hop of a ring takes
    `share` of the gather that all its hops make. It runs beside the operator `beside`, if any, and
    as a ring beside those of `pieces`.
    Of an all-to-all of tokens that have `copies` each, once for each of their experts, a rank or a
    node with several of these is sent one (0: all are sent); `beside_passes` is one that runs while
    another micro-batch is computed. `of_update` is a sum that DTensor leaves to the operators of
    the update that read the gradient.
    """

    op: CollectiveName
    axis: str
    size_bytes: int
    phase: Phase
    module: str
    op_index: int
    share: float = 1.0
    beside: int | None = None
    pieces: tuple[int, ...] = ()
    copies: int = 0
    beside_passes: bool = False
    of_update: bool = False


def collective_call(
    op: CollectiveName,
    axis: str,
    given: TensorSpec,
    spec: TensorSpec,
    *,
    overlaps: Overlapped | None = None,
) -> OpCall:
    """The call of a collective, from what a rank gives to what it gets, and what it runs beside."""
    keywords = (("overlaps", overlaps),) if overlaps else ()
    return OpCall(f"{_NAMESPACE}.{op}.default", (given, axis), keywords, (spec,))


def collective_call_of(
    op: CollectiveName, axis: str, call: OpCall, *, given: int, ranks: int
) -> OpCall:
    """The call of a collective that a model makes itself among so many ranks.

    `given` is the argument that a rank gives: a tensor or a list of them.
    """
    first = call.arguments[given]
    rest = [argument for place, argument in enumerate(call.arguments) if place != given]
    tensors = OpCall("", tuple(rest), (), ()).inputs
    target, keywords = f"{_NAMESPACE}.{op}.default", (("ranks", ranks),)
    return OpCall(target, (first, axis, *tensors), keywords, call.outputs)


def own_ranks(graph: OpGraph) -> int | None:
    """Among how many ranks a model's own collectives were traced; None: it has none."""
    for call, _ in GraphColumns.of(graph).calls:
        if call.target.startswith(_NAMESPACE) and call.arguments[1] == WORLD:
            return int(dict(call.keywords)["ranks"])
    return None


def ring_call(axis: str, sent: TensorSpec, degree: int, *, overlaps: bool) -> OpCall:
    """The call in which every rank of `degree` sends to the next one."""
    keywords = (("overlaps", "attention"),) if overlaps else ()
    return OpCall(_RING, (sent, axis, degree), keywords, (sent,))


def adds_in_switch(graph: OpGraph) -> bool:
    """Whether NCCL may have switches add: Megatron-Bridge runs with NCCL_NVLS_ENABLE=0.

    It saves the memory of its buffers (scripts/performance/utils/executors.py).
    """
    return graph.recipe is None


def is_collective(call: OpCall) -> bool:
    """Whether ranks exchange something in a call."""
    return call.target.startswith(_NAMESPACE)


def collectives_of(
    bound: BoundGraph, columns: GraphColumns | None = None
) -> tuple[Collective, ...]:
    """The collectives of a graph at a batch size, in issue order.

    `columns` are those of the graph where they are at hand.
    """
    columns = columns or GraphColumns.of(bound.graph)
    calls = columns.distinct_calls(bound.calls)
    exchanges = _ops_of(columns, [call.target.startswith(_NAMESPACE) for call in calls])
    own = columns.call_of[exchanges].tolist()
    known = {number: _facts(calls[number]) for number in dict.fromkeys(own)}
    overlaps = [dict(calls[number].keywords).get("overlaps") for number in own]
    attentions = _ops_of(columns, ["attention" in call.target for call in calls])
    products = _Products(columns) if "product" in overlaps else None
    rings = [op for op, kind in zip(exchanges, overlaps, strict=True) if kind == "ring"]
    pieces = _ring_pieces(columns, rings) if rings else {}
    dtensors = {parameter.gradient for parameter in bound.graph.parameters if parameter.is_dtensor}
    found = []
    of_ops = (columns.is_forward, columns.module_of, columns.made_begins, columns.begins[1:])
    rows = zip(*(column[exchanges].tolist() for column in of_ops), strict=True)
    for index, number, kind, (forward, module, *made) in zip(
        exchanges, own, overlaps, rows, strict=True
    ):
        beside = None
        if kind == "attention":
            beside = next(iter(attentions[bisect(attentions, index) :]), None)
        elif kind == "product" and products:
            beside = products.beside(index)
        facts = known[number]
        found.append(
            Collective(
                **facts,
                phase="forward" if forward else "backward",
                module=columns.modules[module],
                op_index=index,
                beside=beside,
                pieces=pieces.get(index, ()),
                of_update=facts["op"] == "all_reduce"
                and not dtensors.isdisjoint(columns.touched[slice(*made)].tolist()),
            )
        )
    return tuple(found)


def _ops_of(columns: GraphColumns, calls: Sequence[bool]) -> list[int]:
    """The ops of some of the distinct calls."""
    ops: list[int] = np.flatnonzero(columns.of_calls(calls)).tolist()
    return ops


def _are_products(columns: GraphColumns) -> list[bool]:
    return [call.target.startswith(_PRODUCTS) for call, _ in columns.calls]


def _ring_pieces(columns: GraphColumns, rings: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The products after each gather that share a factor, or the one before each scatter."""
    products = _ops_of(columns, _are_products(columns))
    pieces = {}
    for index in rings:
        place = bisect(products, index)
        if "reduce" in columns.calls[columns.call_of[index]][0].target:
            pieces[index] = tuple(products[max(place - 1, 0) : place])
            continue
        after = products[place : place + _MOST_PIECES]
        read = [set(columns.read_by(later)) for later in after]
        shared = [later for later, own in zip(after, read, strict=True) if own & read[0]]
        pieces[index] = tuple(shared)
    return pieces


class _Products:
    """The two products of each layer's backward pass, one of which a collective runs beside."""

    def __init__(self, columns: GraphColumns) -> None:
        self.columns = columns
        self.of_module: dict[int, list[int]] = {}
        is_own = columns.of_calls(_are_products(columns))
        is_own &= ~columns.is_forward & ~columns.is_repeated
        for index in np.flatnonzero(is_own).tolist():
            self.of_module.setdefault(int(columns.module_of[index]), []).append(index)

    def beside(self, index: int) -> int | None:
        """The product that neither makes what a collective sends nor takes what it gathers."""
        own = self._made_by(index)
        module = int(self.columns.module_of[index if own is None else own])
        both = self.of_module.get(module, [])
        if own is None:
            own = next((place for place in both if place > index), None)
        return next((place for place in both if place != own), None)

    def _made_by(self, index: int) -> int | None:
        """The product whose result a collective sends, if it is one's."""
        columns = self.columns
        made = self._maker(index)
        while made >= 0 and columns.is_view[made]:
            # A file may say that an operator reads what it makes.
            before = self._maker(made)
            made = before if before < made else -1
        is_product = made >= 0 and made in self.of_module.get(int(columns.module_of[made]), [])
        return made if is_product else None

    def _maker(self, index: int) -> int:
        """The op that makes what an op reads first, -1 for none."""
        read = self.columns.read_by(index)
        return int(self.columns.maker[read[0]]) if read else -1


def makes_gradients(op: Op) -> bool:
    """Whether an operator is of the backward pass itself, and not what it runs again."""
    return op.phase == "backward" and not op.is_repeated


def _facts(call: OpCall) -> dict[str, Any]:
    """What a call says of its collective."""
    given = OpCall("", call.arguments[:1], (), ()).inputs
    # What a dispatcher's exchange brings beside tokens is little; a model may exchange lists.
    made = call.outputs if call.arguments[1] == WORLD else call.outputs[:1]
    size_bytes = max(sum(spec.nbytes for spec in some) for some in (given, made))
    keywords = dict(call.keywords)
    name, share = call.name, 1.0
    if call.target == _RING:
        # The hops of a ring of n ranks, n - 1 of them, gather what all have.
        degree = call.arguments[2]
        name, share, size_bytes = "all_gather", 1.0 / (degree - 1), degree * size_bytes
    return {
        "op": name,
        "axis": call.arguments[1],
        "size_bytes": size_bytes,
        "share": share,
        "copies": int(keywords.get("copies", 0)),
        "beside_passes": keywords.get("overlaps") == "micro-batch",
    }
