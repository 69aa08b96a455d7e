"""Keep one cost formula per operator, found by the operator's name.

Operators are registered by name (``aten.mm``: every overload and the in-place form) or by full
target (``aten.max.dim``), which goes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from estimator.graph.ir.ops import OpCost
from estimator.tensors import OpCall, TensorSpec, tensor_leaves

Family = Literal[
    "matmul",
    "convolution",
    "attention",
    "recurrent",
    "elementwise",
    "reduction",
    "softmax",
    "normalization",
    "index",
    "copy",
    "fill",
    "pooling",
    "loss",
    "fourier",
    "view",
    "step",
    "other",
]
CostFormula = Callable[[OpCall], OpCost]
DimsFormula = Callable[[OpCall], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Formula:
    """What is known of one operator: its family, its cost and its characteristic sizes."""

    family: Family
    cost: CostFormula
    dims: DimsFormula


_formulas: dict[str, Formula] = {}
_OF_PRODUCTS, _OF_COMPLEX = ("matmul", "convolution"), 4.0


def flat_dims(call: OpCall) -> tuple[float, ...]:
    """One row of all elements of the largest tensor."""
    sizes = [spec.numel for spec in (*call.outputs, *call.inputs)]
    return (1.0, float(max(sizes, default=0)))


def cost_of(
    *targets: str, family: Family, dims: DimsFormula = flat_dims
) -> Callable[[CostFormula], CostFormula]:
    """Register a cost formula for operators, as in ``@cost_of("aten.mm", family="matmul")``."""

    def register(formula: CostFormula) -> CostFormula:
        kept = _of_any_dtype(formula) if family in _OF_PRODUCTS else formula
        for target in targets:
            if target in _formulas:
                raise ValueError(f"{target} already has a cost formula; keep one")
            _formulas[target] = Formula(family, kept, dims)
        formula_of.cache_clear()
        return formula

    return register


def _of_any_dtype(formula: CostFormula) -> CostFormula:
    """The formula, also for complex numbers: a product of two takes 4 products of real ones."""

    def cost(call: OpCall) -> OpCost:
        real = formula(call)
        if not call.dtype.startswith("complex"):
            return real
        return OpCost(_OF_COMPLEX * real.flops, real.read_bytes, real.written_bytes)

    return cost


@lru_cache(maxsize=4096)
def formula_of(target: str) -> Formula | None:
    """The formula of ``aten.add_.Tensor``: under this name, ``aten.add_``, then ``aten.add``."""
    known = _formulas.get(target)
    if known is None and target.count(".") >= 1:
        name = ".".join(target.split(".")[:2])
        known = _formulas.get(name)
        if known is None and name.endswith("_") and not name.endswith("__"):
            known = _formulas.get(name[:-1])
    return known


def argument(call: OpCall, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or keyword; traces leave out trailing defaults."""
    if position < len(call.arguments):
        return call.arguments[position]
    return dict(call.keywords).get(name, default)


def bytes_of(specs: Iterable[TensorSpec | None]) -> float:
    """Bytes in memory of tensors, each element once however often it is expanded."""
    return float(sum(spec.storage_bytes for spec in specs if spec is not None))


def item_bytes(spec: TensorSpec) -> float:
    """Bytes of one element."""
    return spec.nbytes / spec.numel if spec.numel else 0.0


def written(call: OpCall) -> float:
    """Bytes of every output."""
    return float(sum(spec.nbytes for spec in call.outputs))


def elements(call: OpCall) -> float:
    """Elements of the largest output, or input where the outputs are smaller."""
    return flat_dims(call)[1]


def streamed(call: OpCall, flops_per_element: float = 1.0) -> OpCost:
    """Every input read once, every output written once, some work per element."""
    return OpCost(
        flops=flops_per_element * elements(call),
        read_bytes=bytes_of(call.inputs),
        written_bytes=written(call),
    )


def rows_of(total: float, row_length: float) -> tuple[float, float]:
    """(rows, row_length) of `total` elements in rows of `row_length`."""
    return (total / row_length if row_length else 0.0, float(row_length))


def extent(spec: TensorSpec, dims: Any) -> int:
    """Elements along one or several dimensions of a tensor; all of them for None or ()."""
    if dims is None or dims == ():
        return spec.numel
    listed = dims if isinstance(dims, tuple) else (dims,)
    if not spec.shape:
        return 1
    return math.prod(spec.shape[dim] for dim in listed)


def specs_in(tree: Any) -> tuple[TensorSpec, ...]:
    """Every tensor in an argument that is a list of tensors."""
    return tuple(tensor_leaves(tree))
