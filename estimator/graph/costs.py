"""Tell what an operator call costs, and by which features its time can be predicted.

A cost is the least that a call must compute and move; it knows no machine. Formulas are in
`cost_kernels`, `cost_families`, `cost_indexing` and `cost_pooling`, one per operator; that of
kernels fused by a compiler is in `fused_calls`, that of parts of a step known by its time in
`step_parts`.
"""

from __future__ import annotations

from dataclasses import dataclass

from estimator.errors import WorkloadError, printable
from estimator.graph import (
    cost_families,
    cost_indexing,
    cost_kernels,
    cost_pooling,
    fused_calls,
    step_parts,
)
from estimator.graph.cost_kernels import is_channels_last, matmul_layout
from estimator.graph.cost_registry import Family, Formula, cost_of, formula_of
from estimator.graph.ops import OpCost
from estimator.tensors import OpCall, TensorSpec

__all__ = ["Family", "Features", "cost_of", "family_of", "features_of", "op_cost"]

# Training the largest models takes some 1e26 flops in all; squares of it are floats still.
_MOST_WORK = 1e30
# Importing these registers their formulas.
FORMULAS = (cost_kernels, cost_families, cost_indexing, cost_pooling, fused_calls, step_parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What the time of a call depends on.

    `dims` by family: matmul (batch, m, n, k); convolution (images, channels in per group, channels
    out per group, groups, output positions, kernel elements, input positions, stride); attention
    (batch x heads, queries, keys, head size, 1 if causal); recurrent (steps x batch,
    multiplications per step and sample, recurrences one after another, as many at once, columns
    and rows of the weights that multiply a state, steps); index (rows touched, row length); every
    other (rows, row length), a row being what one mean, sum or softmax is taken over, one row of
    all elements where there is no such thing.
    `layout` is "nn", "nt", "tn" or "tt" for a matmul ("t": that factor is stored by columns),
    "channels last" for a convolution whose image or filters lie so, "contiguous" or "strided"
    otherwise. `innermost_run` is how many elements stand side by side in
    the memory of every tensor of the call.
    """

    target: str
    family: Family
    dtype: str
    cost: OpCost
    dims: tuple[float, ...]
    contiguous: bool
    innermost_run: int
    layout: str


def family_of(target: str) -> Family:
    """The family of an operator, "other" if it has no formula.

    >>> family_of("aten.addmm.default"), family_of("aten.add_.Tensor")
    ('matmul', 'elementwise')
    """
    formula = formula_of(target)
    return "other" if formula is None else formula.family


def op_cost(call: OpCall) -> OpCost | None:
    """The least work of a call; None if its operator has no formula, never zero for that.

    >>> call = OpCall("aten.mm.default", (TensorSpec((2, 3)), TensorSpec((3, 4))),
    ...               outputs=(TensorSpec((2, 4)),))
    >>> op_cost(call)
    OpCost(flops=48.0, read_bytes=72.0, written_bytes=32.0)
    """
    formula = formula_of(call.target)
    return None if formula is None else formula.cost(call)


def features_of(call: OpCall) -> Features | None:
    """The features of a call; None if its operator has no formula.

    Raises WorkloadError for a call that its formula cannot read: one of a file, or at a batch far
    from those traced.
    """
    formula = formula_of(call.target)
    if formula is None:
        return None
    try:
        found = _features(call, formula)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = printable(f"{type(error).__name__}: {error}")
        raise WorkloadError(
            f"the arguments of {printable(call.target)} are none of its own ({reason}); trace the "
            "model again"
        ) from error
    work = (found.cost.flops, found.cost.moved_bytes, *found.dims)
    if not all(0 <= value <= _MOST_WORK for value in work):
        raise WorkloadError(
            f"the work of {printable(call.target)} is no number from 0 to {_MOST_WORK:g}; trace "
            "the model again"
        )
    return found


def _features(call: OpCall, formula: Formula) -> Features:
    run, whole = innermost_run(call)
    contiguous = run >= whole
    if formula.family == "matmul" and "backward" not in call.target:
        layout = matmul_layout(call)
    elif formula.family == "convolution" and is_channels_last(call):
        layout = "channels last"
    else:
        layout = "contiguous" if contiguous else "strided"
    return Features(
        target=call.target,
        family=formula.family,
        dtype=call.dtype,
        cost=formula.cost(call),
        dims=formula.dims(call),
        contiguous=contiguous,
        innermost_run=run,
        layout=layout,
    )


def innermost_run(call: OpCall) -> tuple[int, int]:
    """(elements that stand side by side in every tensor of the call, elements of the largest one).

    Tensors of the largest one's shape are walked together, in the order of its own strides;
    tensors broadcast to it stand still or move with it; those of unlike shapes are walked alone.
    """
    sized = [(spec.numel, spec) for spec in (*call.outputs, *call.inputs)]
    sized = [each for each in sized if each[0] > 1]
    if not sized:
        return 1, 1
    whole, largest = max(sized, key=lambda each: each[0])
    if all(spec.strides is None and spec.shape == largest.shape for _, spec in sized):
        return whole, whole
    together, alone = [], []
    for numel, spec in sized:
        fitted = _broadcast_strides(spec, largest.shape)
        if fitted is None:
            alone.append((numel, spec))
        else:
            together.append(fitted)
    run = _common_run(largest.shape, together)
    for numel, spec in alone:
        own = _common_run(spec.shape, [_strides(spec)])
        # A small tensor in one piece does not cut the run of a large one.
        if own < numel:
            run = min(run, own)
    return run, whole


def _strides(spec: TensorSpec) -> tuple[int, ...]:
    if spec.strides is not None:
        return spec.strides
    strides, step = [], 1
    for size in reversed(spec.shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _broadcast_strides(spec: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides of a tensor seen in a larger shape, None if it does not broadcast to it."""
    missing = len(shape) - len(spec.shape)
    if missing < 0:
        return None
    strides = [0] * missing
    for size, wanted, stride in zip(spec.shape, shape[missing:], _strides(spec), strict=True):
        if size != wanted and size != 1:
            return None
        strides.append(0 if size == 1 else stride)
    return tuple(strides)


def _common_run(shape: tuple[int, ...], operands: list[tuple[int, ...]]) -> int:
    """Elements of the innermost loop after merging dimensions, as torch's TensorIterator does."""
    order = sorted(
        (axis for axis, size in enumerate(shape) if size > 1),
        key=lambda axis: [strides[axis] for strides in operands],
    )
    if not order:
        return 1
    inner = order[0]
    if any(strides[inner] not in (0, 1) for strides in operands):
        return 1
    run = shape[inner]
    for outer in order[1:]:
        if any(strides[outer] != strides[inner] * shape[inner] for strides in operands):
            break
        run *= shape[outer]
        inner = outer
    return run
