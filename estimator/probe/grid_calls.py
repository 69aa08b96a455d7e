"""Write down operator calls to be timed, and order them so that any first part covers them all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from estimator.tensors import OpCall, TensorSpec

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCall:
    """One call of the grid; its outputs are not described yet.

    Integer tensors get values below `index_high`; the tensors numbered in `positive` (in argument
    order) get positive values, those in `counting` 0, 1, 2, …. `flops` is 0 where moving bytes is
    all there is. A gradient that needs what only its forward call can make (a library's workspace)
    `follows` that call; its last tensor is then the one that call `handed` over, by default the
    last it returned. `math` is "tf32" where float32 matmuls shall run on tensor cores.
    """

    call: OpCall
    flops: float = 0.0
    index_high: int = 2
    positive: tuple[int, ...] = ()
    counting: tuple[int, ...] = ()
    follows: GridCall | None = None
    handed: int = -1
    math: str = ""

    @property
    def read_bytes(self) -> int:
        return sum(spec.storage_bytes for spec in self.call.inputs)


def tensor(
    *shape: int, dtype: str = "float32", strides: tuple[int, ...] | None = None
) -> TensorSpec:
    """A contiguous tensor of that shape, unless strides are given."""
    return TensorSpec(shape, dtype, strides)


def channels_innermost(batch: int, channels: int, side: int) -> TensorSpec:
    """Square images in channels-last layout."""
    strides = (channels * side * side, 1, side * channels, channels)
    return tensor(batch, channels, side, side, strides=strides)


def transposed(rows: int, columns: int) -> TensorSpec:
    """A matrix that is the transposed view of a contiguous one."""
    return TensorSpec((rows, columns), "float32", (1, rows))


def indices(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "int64")


def grid_call(
    target: str,
    *arguments: Any,
    flops: float = 0.0,
    index_high: int = 2,
    positive: tuple[int, ...] = (),
    counting: tuple[int, ...] = (),
    follows: GridCall | None = None,
    handed: int = -1,
    **keywords: Any,
) -> GridCall:
    """A call of ``aten.<target>``; lists stand for lists of the operator."""
    return GridCall(
        call=OpCall(
            target=f"aten.{target}",
            arguments=tuple(_tree(argument) for argument in arguments),
            keywords=tuple((name, _tree(value)) for name, value in keywords.items()),
        ),
        flops=flops,
        index_high=index_high,
        positive=positive,
        counting=counting,
        follows=follows,
        handed=handed,
    )


def _tree(value: Any) -> Any:
    return tuple(_tree(item) for item in value) if isinstance(value, list) else value


def spread(calls: Sequence[GridCall]) -> list[GridCall]:
    """The same calls, reordered so that every prefix is spread evenly over the list."""
    ranked = sorted(range(len(calls)), key=lambda number: (number * _GOLDEN_RATIO) % 1.0)
    return [calls[number] for number in ranked]


def interleave(families: Iterable[Sequence[GridCall]]) -> list[GridCall]:
    """Take from each family in proportion to its length, spread each, drop repeated calls."""
    placed = [
        ((position + 0.5) / len(family), order, call)
        for order, family in enumerate(families)
        for position, call in enumerate(spread(family))
    ]
    placed.sort(key=lambda item: item[:2])
    return list({(call.call, call.math): call for _, _, call in placed}.values())


def in_dtype(grid_calls: Iterable[GridCall], dtype: str) -> list[GridCall]:
    """The same calls with every float32 tensor, and every mention of it, in another dtype."""
    return [
        replace(each, call=replace(each.call, arguments=_retyped(each.call.arguments, dtype)))
        for each in grid_calls
        if not each.call.keywords
    ]


def _retyped(tree: Any, dtype: str) -> Any:
    if isinstance(tree, TensorSpec):
        return replace(tree, dtype=dtype) if tree.dtype == "float32" else tree
    if isinstance(tree, tuple):
        return tuple(_retyped(item, dtype) for item in tree)
    return f"torch.{dtype}" if tree == "torch.float32" else tree
