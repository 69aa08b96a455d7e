"""Divide the weights of a plan's modules, by the operators that take them."""

from __future__ import annotations

from estimator.errors import StrategyError
from estimator.graph.op_graph import OpGraph
from estimator.graph.ops import Op
from estimator.graph.split_placements import Shard
from estimator.graph.split_plan import Style
from estimator.tensors import TensorSpec

# What is made of one weight alone, and what multiplies with one.
_REMAKES = ("t", "transpose", "_to_copy")
_PRODUCTS = ("mm", "addmm", "embedding", "convolution", "_grouped_mm", "bmm", "baddbmm")
_DIVIDING = ("column", "gather", "row", "vocabulary")


def divided_weights(
    graph: OpGraph, styles: dict[str, Style | None], axis: str, degree: int
) -> dict[int, Shard]:
    """The shards of weights, by value; modules with weights and no style become "replicate".

    Raises StrategyError where the degree does not divide the features of a module.
    """
    found: dict[int, Shard] = {}
    # (parameter, whether its two dimensions are swapped) of what is made of one alone.
    weights = {
        index: (index, False)
        for index, value in enumerate(graph.values)
        if value.kind == "parameter"
    }
    for op in graph.ops:
        if op.phase != "forward":
            break
        name = _name(op)
        if name in _REMAKES and op.inputs[0] in weights:
            weight, swapped = weights[op.inputs[0]]
            weights[op.outputs[0]] = weight, swapped != (name != "_to_copy")
        elif name in _PRODUCTS and any(value in weights for value in op.inputs):
            style = styles[op.module] = styles[op.module] or "replicate"
            if style not in _DIVIDING:
                continue
            for weight, dim in _divided(op, style, weights):
                spec = graph.values[weight].spec
                _check(spec, dim, op.module, axis, degree, uneven=style == "vocabulary")
                found[weight] = Shard.along(spec, dim)
    return found


def dtensor_modules(graph: OpGraph, styles: dict[str, Style | None], *, sequence: bool) -> set[str]:
    """The modules that torch runs by DTensor: divided ones, and norms where tokens are divided."""
    found = {module for module, style in styles.items() if style in (*_DIVIDING, "sequence")}
    for op in graph.ops if sequence else ():
        own = [graph.values[value] for value in op.inputs]
        if any(value.kind == "parameter" and len(value.spec.shape) == 1 for value in own):
            found.add(op.module)
    return found


def _divided(op: Op, style: Style, weights: dict[int, tuple[int, bool]]) -> list[tuple[int, int]]:
    """(weight, dimension that is divided) of the weight and the bias of an operator."""
    by_output = style in ("column", "gather")
    if _name(op) == "embedding":
        # torch's RowwiseParallel and transformers' embedding_rowwise divide the vocabulary.
        return [(weights[op.inputs[0]][0], int(by_output))]
    if op.inputs[-1] not in weights:
        return []
    weight, swapped = weights[op.inputs[-1]]
    found = [(weight, int(by_output != swapped))]
    if _name(op) == "addmm" and by_output and op.inputs[0] in weights:
        found.append((weights[op.inputs[0]][0], 0))
    return found


def _check(
    spec: TensorSpec, dim: int, module: str, axis: str, degree: int, *, uneven: bool
) -> None:
    # Words are divided unevenly where they must be: the first rank has the most.
    if spec.shape[dim] % degree and not uneven:
        raise StrategyError(
            f"{axis}={degree} does not divide the {spec.shape[dim]} features of module "
            f"'{module}'; choose a divisor"
        )


def _name(op: Op) -> str:
    return op.call.target.split(".")[1]
