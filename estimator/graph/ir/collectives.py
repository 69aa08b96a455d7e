"""Find the collectives among the operators of a rank's graph."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal, cast

from estimator.graph.ir.op_graph import BoundGraph, OpGraph
from estimator.graph.ir.ops import Op, Phase
from estimator.machines.profile import CollectiveName
from estimator.tensors import OpCall, TensorSpec

# They go by the names of torch's functional collectives.
_NAMESPACE = "_c10d_functional"
_RING = f"{_NAMESPACE}.permute_tensor.default"
_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten._scaled_mm.default")

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
    `share` of the gather that all its hops make, one of narrower numbers so much less. It runs
    beside the operator `beside`, if any, and as a ring beside those of `pieces`.
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


def collectives_of(bound: BoundGraph) -> tuple[Collective, ...]:
    """The collectives of a graph at a batch size, in issue order."""
    calls, ops = bound.calls, bound.graph.ops
    # Thousands of calls have few targets.
    targets = [call.target for call in calls]
    exchanging = {target for target in set(targets) if target.startswith(_NAMESPACE)}
    exchanges = [index for index, target in enumerate(targets) if target in exchanging]
    overlaps = {index: dict(calls[index].keywords).get("overlaps") for index in exchanges}
    attentions = [index for index, target in enumerate(targets) if "attention" in target]
    products = _Products(bound) if "product" in overlaps.values() else None
    dtensors = {parameter.gradient for parameter in bound.graph.parameters if parameter.is_dtensor}
    beside: dict[int, int | None] = {}
    for index, kind in overlaps.items():
        if kind == "attention":
            beside[index] = next(iter(attentions[bisect(attentions, index) :]), None)
        elif kind == "product" and products:
            beside[index] = products.beside(index)
    rings = [index for index, kind in overlaps.items() if kind == "ring"]
    pieces = _ring_pieces(bound, rings) if rings else {}
    return tuple(
        [
            replace(
                _collective(calls[index], ops[index], index, beside.get(index), dtensors),
                pieces=pieces.get(index, ()),
            )
            for index in exchanges
        ]
    )


def _ring_pieces(bound: BoundGraph, rings: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The products after each gather that share a factor, or the one before each scatter."""
    ops = bound.graph.ops
    products = [index for index, call in enumerate(bound.calls) if call.target in _PRODUCTS]
    pieces = {}
    for index in rings:
        place = bisect(products, index)
        if "reduce" in bound.calls[index].target:
            pieces[index] = tuple(products[max(place - 1, 0) : place])
            continue
        after = products[place : place + _MOST_PIECES]
        shared = [later for later in after if set(ops[later].inputs) & set(ops[after[0]].inputs)]
        pieces[index] = tuple(shared)
    return pieces


class _Products:
    """The two products of each layer's backward pass, one of which a collective runs beside."""

    def __init__(self, bound: BoundGraph) -> None:
        self.ops = bound.graph.ops
        self.maker = {value: index for index, op in enumerate(self.ops) for value in op.outputs}
        self.of_module: dict[str, list[int]] = {}
        for index, op in enumerate(self.ops):
            if bound.calls[index].target in _PRODUCTS and makes_gradients(op):
                self.of_module.setdefault(op.module, []).append(index)

    def beside(self, index: int) -> int | None:
        """The product that neither makes what a collective sends nor takes what it gathers."""
        own = self._made_by(index)
        module = self.ops[index if own is None else own].module
        both = self.of_module.get(module, [])
        if own is None:
            own = next((place for place in both if place > index), None)
        return next((place for place in both if place != own), None)

    def _made_by(self, index: int) -> int | None:
        """The product whose result a collective sends, if it is one's."""
        made = self.maker.get(self.ops[index].inputs[0])
        while made is not None and (op := self.ops[made]).is_view:
            # A file may say that an operator reads what it makes.
            before = self.maker.get(op.inputs[0]) if op.inputs else None
            made = before if before is not None and before < made else None
        is_product = made is not None and made in self.of_module.get(self.ops[made].module, [])
        return made if is_product else None


def makes_gradients(op: Op) -> bool:
    """Whether an operator is of the backward pass itself, and not what it runs again."""
    return op.phase == "backward" and not op.is_repeated


def _collective(
    call: OpCall, op: Op, index: int, beside: int | None, dtensors: Set[int | None]
) -> Collective:
    size_bytes = max(call.inputs[0].nbytes, call.outputs[0].nbytes)
    keywords = dict(call.keywords)
    name, share = call.target.split(".")[1], float(keywords.get("share", 1.0))
    if call.target == _RING:
        # The hops of a ring of n ranks, n - 1 of them, gather what all have.
        degree = call.arguments[2]
        name, share, size_bytes = "all_gather", 1.0 / (degree - 1), degree * size_bytes
    return Collective(
        op=cast(CollectiveName, name),
        axis=call.arguments[1],
        size_bytes=size_bytes,
        phase=op.phase,
        module=op.module,
        op_index=index,
        share=share,
        beside=beside,
        copies=int(keywords.get("copies", 0)),
        beside_passes=keywords.get("overlaps") == "micro-batch",
        of_update=name == "all_reduce" and not dtensors.isdisjoint(op.outputs),
    )
