"""Count what lookups and scatters move: the rows they touch, not the table they touch them in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from estimator.graph.costs.registry import (
    argument,
    bytes_of,
    cost_of,
    extent,
    item_bytes,
    specs_in,
    streamed,
    written,
)
from estimator.graph.ir.ops import OpCost
from estimator.tensors import OpCall, TensorSpec

Dims = tuple[float, float]


def _looked_up(table_position: int, index_position: int) -> Callable[[OpCall], Dims]:
    """One row per index, as long as the table is wide; the table may be the output (-1)."""

    def dims(call: OpCall) -> Dims:
        table = call.outputs[0] if table_position < 0 else call.arguments[table_position]
        return float(call.arguments[index_position].numel), float(table.shape[-1])

    return dims


def _along_dim(call: OpCall) -> Dims:
    """index_select, index_add and the like: (table, dim, indices) take slices along dim."""
    table, dim, indices = call.arguments[:3]
    return float(indices.numel), table.numel / max(extent(table, dim), 1)


def _by_tensors(data: Callable[[OpCall], TensorSpec]) -> Callable[[OpCall], Dims]:
    """index and index_put: (table, index tensors); a boolean mask chooses the rows of the data."""

    def dims(call: OpCall) -> Dims:
        chosen, moved = specs_in(call.arguments[1]), data(call)
        rows = 1
        for spec in chosen:
            rows = max(rows, spec.numel)
        if any(spec.dtype in ("bool", "uint8") for spec in chosen):
            rows = moved.shape[0] if moved.shape else 1
        elif len(chosen) > 1:
            rows = max(rows, _broadcast_numel(chosen))
        return float(rows), max(moved.numel, rows) / max(rows, 1)

    return dims


def _broadcast_numel(specs: tuple[TensorSpec, ...]) -> int:
    """Elements of tensors broadcast against each other."""
    rank = max(len(spec.shape) for spec in specs)
    numel = 1
    for axis in range(1, rank + 1):
        numel *= max(spec.shape[-axis] if axis <= len(spec.shape) else 1 for spec in specs)
    return numel


def _by_element(call: OpCall) -> Dims:
    """gather and scatter move one element per index."""
    return float(_index_of(call).numel), 1.0


def _index_of(call: OpCall) -> TensorSpec:
    return call.arguments[2] if len(call.arguments) > 2 else call.arguments[1]


def _in_place(call: OpCall) -> bool:
    return call.target.split(".")[1].endswith("_")


def _read_rows(call: OpCall, indices: Any, table: TensorSpec, elements: float) -> OpCost:
    read_bytes = bytes_of(specs_in((indices,))) + elements * item_bytes(table)
    return OpCost(0.0, read_bytes, written(call))


@cost_of("aten.embedding", family="index", dims=_looked_up(0, 1))
def _embedding(call: OpCall) -> OpCost:
    table, indices = call.arguments[:2]
    return _read_rows(call, indices, table, call.outputs[0].numel)


@cost_of("aten.index_select", family="index", dims=_along_dim)
def _index_select(call: OpCall) -> OpCost:
    table, _, indices = call.arguments[:3]
    return _read_rows(call, indices, table, call.outputs[0].numel)


@cost_of(
    "aten.index", "aten._unsafe_index", family="index", dims=_by_tensors(lambda c: c.outputs[0])
)
def _index(call: OpCall) -> OpCost:
    table, indices = call.arguments[:2]
    return _read_rows(call, indices, table, call.outputs[0].numel)


@cost_of("aten.gather", "aten.take", "aten.take_along_dim", family="index", dims=_by_element)
def _gather(call: OpCall) -> OpCost:
    return _read_rows(call, _index_of(call), call.arguments[0], call.outputs[0].numel)


@cost_of(
    *("aten._embedding_bag", "aten._embedding_bag_forward_only"),
    family="index",
    dims=_looked_up(0, 1),
)
def _embedding_bag(call: OpCall) -> OpCost:
    """Every row looked up is read; the bags and their bookkeeping are written."""
    table, indices, offsets = call.arguments[:3]
    moved = indices.numel * table.shape[-1]
    return _read_rows(call, (indices, offsets), table, moved) + OpCost(flops=moved)


def _accumulated(call: OpCall, indices: TensorSpec, *, per_index: bool) -> OpCost:
    """A dense gradient of a table: zeros everywhere, then each row read, added to and written."""
    gradient, table = call.arguments[0], call.outputs[0]
    moved = indices.numel * table.shape[-1]
    rows_bytes = moved * item_bytes(table)
    gradient_bytes = moved * item_bytes(gradient) if per_index else bytes_of([gradient])
    read_bytes = bytes_of([indices]) + gradient_bytes + rows_bytes
    return OpCost(moved, read_bytes, written(call) + rows_bytes)


@cost_of("aten.embedding_dense_backward", family="index", dims=_looked_up(-1, 1))
def _embedding_backward(call: OpCall) -> OpCost:
    return _accumulated(call, call.arguments[1], per_index=True)


@cost_of(
    *("aten._embedding_bag_backward", "aten._embedding_bag_dense_backward"),
    family="index",
    dims=_looked_up(-1, 1),
)
def _embedding_bag_backward(call: OpCall) -> OpCost:
    return _accumulated(call, call.arguments[1], per_index=False)


def _placed(call: OpCall, touched: float, sources: list[Any], *, adds: bool) -> OpCost:
    """Values placed or added into a tensor, in place or into a fresh copy of it."""
    table = call.arguments[0]
    touched_bytes = touched * item_bytes(table)
    read_bytes = bytes_of(specs_in(sources)) + (touched_bytes if adds else 0.0)
    cost = OpCost(touched if adds else 0.0, read_bytes, touched_bytes)
    copy = OpCost(0.0, bytes_of([table]), written(call))
    return cost if _in_place(call) else cost + copy


@cost_of(
    *("aten.index_put", "aten._index_put_impl", "aten._unsafe_index_put"),
    family="index",
    dims=_by_tensors(lambda call: call.arguments[2]),
)
def _index_put(call: OpCall) -> OpCost:
    _, indices, values = call.arguments[:3]
    rows, row = _by_tensors(lambda each: each.arguments[2])(call)
    adds = bool(argument(call, 3, "accumulate", False))
    return _placed(call, rows * row, [indices, values], adds=adds)


@cost_of(
    *("aten.index_add", "aten.index_copy", "aten.index_fill", "aten.index_reduce"),
    family="index",
    dims=_along_dim,
)
def _index_add(call: OpCall) -> OpCost:
    rows, row = _along_dim(call)
    adds = "add" in call.target or "reduce" in call.target
    return _placed(call, rows * row, list(call.arguments[2:4]), adds=adds)


@cost_of(
    "aten.scatter", "aten.scatter_add", "aten.scatter_reduce", family="index", dims=_by_element
)
def _scatter(call: OpCall) -> OpCost:
    """(self, dim, index, source): as many elements as the index has."""
    index = _index_of(call)
    adds = "add" in call.target or "reduce" in call.target
    source = [spec for spec in call.arguments[3:4] if isinstance(spec, TensorSpec)]
    read = _placed(call, index.numel, [index], adds=adds)
    # Of a larger source only the elements that have an index are read.
    return read + OpCost(0.0, sum(index.numel * item_bytes(spec) for spec in source), 0.0)


@cost_of("aten.masked_scatter", "aten.masked_scatter_backward", "aten.put", family="index")
def _masked_scatter(call: OpCall) -> OpCost:
    return streamed(call, 1)


@cost_of("aten.nonzero", "aten.nonzero_static", "aten.masked_select", family="index")
def _nonzero(call: OpCall) -> OpCost:
    return streamed(call, 1)
