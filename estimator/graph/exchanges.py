"""Find the collectives among the operators of a rank's graph."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from typing import cast

from estimator.graph.op_graph import BoundGraph
from estimator.graph.ops import Op, Phase
from estimator.machines.profile import CollectiveName
from estimator.tensors import OpCall, TensorSpec

# They go by the names of torch's functional collectives.
_NAMESPACE = "_c10d_functional"
_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
_RING = f"{_NAMESPACE}.permute_tensor.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a micro-batch, of the ranks along an axis of the mesh.

    `size_bytes` is what all ranks have together after a gather or before a scatter, and what each
    of them has of a reduction; `op_index` is its place among the operators. A hop of a ring takes
    `share` of the gather that all its hops make. It runs beside the operator `beside`, if any.
    """

    op: CollectiveName
    axis: str
    size_bytes: int
    phase: Phase
    module: str
    op_index: int
    share: float = 1.0
    beside: int | None = None


def collective_call(
    op: CollectiveName,
    axis: str,
    given: TensorSpec,
    found: TensorSpec,
    *,
    overlaps: bool = False,
    product_of: str = "",
) -> OpCall:
    """The call of a collective, from what a rank gives to what it gets.

    One that `overlaps` runs beside the next attention, or a `product_of` a module in its pass.
    """
    named = (("overlaps", overlaps), ("product_of", product_of))
    keywords = tuple(each for each in named if each[1])
    return OpCall(f"{_NAMESPACE}.{op}.default", (given, axis), keywords, (found,))


def ring_call(axis: str, sent: TensorSpec, degree: int, *, overlaps: bool) -> OpCall:
    """The call in which every rank of `degree` sends to the next one."""
    keywords = (("overlaps", True),) if overlaps else ()
    return OpCall(_RING, (sent, axis, degree), keywords, (sent,))


def is_collective(call: OpCall) -> bool:
    """Whether ranks exchange something in a call."""
    return call.target.startswith(_NAMESPACE)


def collectives_of(bound: BoundGraph) -> tuple[Collective, ...]:
    """The collectives of a graph at a batch size, in issue order."""
    found = []
    calls, ops = bound.calls, bound.graph.ops
    attention: int | None = None
    products = _products(bound)
    for index in range(len(calls) - 1, -1, -1):
        call = calls[index]
        if "attention" in call.target:
            attention = index
        if is_collective(call):
            keywords = dict(call.keywords)
            beside = attention if keywords.get("overlaps") else None
            if "product_of" in keywords:
                some = products.get((ops[index].phase, keywords["product_of"]), ())
                beside = some[max(bisect(some, index) - 1, 0)] if some else None
            found.append(_collective(call, ops[index], index, beside))
    return tuple(reversed(found))


def _products(bound: BoundGraph) -> dict[tuple[Phase, str], list[int]]:
    """The matmuls of each module in each pass."""
    found: dict[tuple[Phase, str], list[int]] = {}
    for index, op in enumerate(bound.graph.ops):
        if op.call.target in _PRODUCTS:
            found.setdefault((op.phase, op.module), []).append(index)
    return found


def _collective(call: OpCall, op: Op, index: int, beside: int | None) -> Collective:
    size_bytes = max(call.inputs[0].nbytes, call.outputs[0].nbytes)
    name, share = call.target.split(".")[1], 1.0
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
    )
