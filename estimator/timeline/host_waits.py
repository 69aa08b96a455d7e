"""Find the operators at which the host waits for a GPU: a number or a shape depends on values.

Those are what ``torch.cuda.set_sync_debug_mode("warn")`` names in a step: reading a tensor's value
in Python, and operators whose result is as long as its values say (PyTorch, "CUDA semantics").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from estimator.graph.op_graph import OpGraph
from estimator.graph.structure import GraphStructure
from estimator.tensors import OpCall, TensorSpec

_WAITING = frozenset(
    {
        "_local_scalar_dense",
        "_unique",
        "_unique2",
        "bincount",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
    }
)
# These count the elements of a mask where one indexes.
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})
_MASKS = frozenset({"bool", "uint8"})


def awaited_ops(structure: GraphStructure) -> tuple[int, ...]:
    """The ops after which the host issues nothing before the device has done them."""
    if structure.graph.target != "cuda":
        return ()
    ops = structure.graph.ops
    waits = np.array([_waits(ops[op].call) for op in structure.first_op], dtype=np.bool_)
    return tuple(np.flatnonzero(waits[structure.call_of]).tolist()) if len(ops) else ()


def _waits(call: OpCall) -> bool:
    name, _, overload = call.target.removeprefix("aten.").partition(".")
    if name == "repeat_interleave":
        return overload == "Tensor" and not dict(call.keywords).get("output_size")
    if name in _INDEXING:
        by_mask = any(spec.dtype in _MASKS for spec in _indices(call))
        return by_mask and not _fills(call)
    return name in _WAITING


def _fills(call: OpCall) -> bool:
    """Whether one number is put where a mask says: torch has masked_fill_ do that."""
    value = call.arguments[2] if len(call.arguments) > 2 else None
    return isinstance(value, TensorSpec) and value.numel == 1 and not any(call.arguments[3:4])


def _indices(call: OpCall) -> list[TensorSpec]:
    given = call.arguments[1] if len(call.arguments) > 1 else ()
    return [spec for spec in given if isinstance(spec, TensorSpec)]


def described(graph: OpGraph, awaited: Sequence[int]) -> str:
    """The commonest of them by name and module, for a sentence."""
    ops = graph.ops
    named = Counter((ops[op].call.target, ops[op].module) for op in awaited)
    (target, module), _ = named.most_common(1)[0]
    return f"{target} in '{module}'" if module else target
