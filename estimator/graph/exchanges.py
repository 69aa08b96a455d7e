"""Find the collectives among the operators of a rank's graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from estimator.graph.op_graph import BoundGraph
from estimator.graph.ops import Phase
from estimator.machines.profile import CollectiveName
from estimator.tensors import OpCall, TensorSpec

# They go by the names of torch's functional collectives.
_NAMESPACE = "_c10d_functional"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a micro-batch, of the ranks along an axis of the mesh.

    `size_bytes` is what all ranks have together after a gather or before a scatter, and what each
    of them has of a reduction; `op_index` is its place among the operators.
    """

    op: CollectiveName
    axis: str
    size_bytes: int
    phase: Phase
    module: str
    op_index: int


def collective_call(op: CollectiveName, axis: str, given: TensorSpec, found: TensorSpec) -> OpCall:
    """The call of a collective, from what a rank gives to what it gets."""
    return OpCall(f"{_NAMESPACE}.{op}.default", (given, axis), (), (found,))


def is_collective(call: OpCall) -> bool:
    """Whether ranks exchange something in a call."""
    return call.target.startswith(_NAMESPACE)


def collectives_of(bound: BoundGraph) -> tuple[Collective, ...]:
    """The collectives of a graph at a batch size, in issue order."""
    return tuple(
        Collective(
            op=cast(CollectiveName, call.target.split(".")[1]),
            axis=call.arguments[1],
            size_bytes=max(call.inputs[0].nbytes, call.outputs[0].nbytes),
            phase=op.phase,
            module=op.module,
            op_index=index,
        )
        for index, (op, call) in enumerate(zip(bound.graph.ops, bound.calls, strict=True))
        if is_collective(call)
    )
