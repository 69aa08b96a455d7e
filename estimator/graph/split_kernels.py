"""The rules of operators that mix elements: products, sums, normalization, attention, losses."""

from __future__ import annotations

from typing import Any

from estimator.errors import StrategyError
from estimator.graph.cost_registry import argument
from estimator.graph.costs import family_of
from estimator.graph.split_placements import PARTIAL, Placement, Shard
from estimator.graph.split_rules import RULES, Given, Placed, broadcast, pointwise, rule_of
from estimator.tensors import TensorSpec


def placed(given: Given) -> Placed:
    """What the rule of an operator says; raises StrategyError where a degree divides no heads."""
    if not any(given.at):
        return given.whole()
    name = given.call.target.split(".")[1]
    rule = RULES.get(name) or RULES.get(name.rstrip("_"))
    if rule is None and family_of(given.call.target) in ("elementwise", "fill", "copy"):
        rule = pointwise
    if rule is None:
        return given.whole(is_known=False)
    return rule(given)


@rule_of("mm addmm bmm baddbmm")
def _matmul(given: Given) -> Placed:
    """(rows, inner) x (inner, columns), batched or not; a bias goes with the result."""
    first = len(given.inputs) - 2
    a, b = given.at[first:]
    out = given.call.outputs[0]
    batched = len(out.shape) > 2
    shard_a, shard_b = (at if isinstance(at, Shard) else None for at in (a, b))
    if shard_a is None and shard_b is None:
        return given.whole()
    if batched and 0 in {shard.dim for shard in (shard_a, shard_b) if shard is not None}:
        # Samples and heads, multiplied each by themselves.
        found: Placement = shard_a if shard_a is not None and shard_a.dim == 0 else shard_b
        wants: tuple[Placement, Placement] = (found, found)
    else:
        wants, found = _divided_product(shard_a, shard_b, len(out.shape))
    bias: list[Placement] = [None] * first
    if first and isinstance(found, Shard):
        bias = [broadcast(given.inputs[0], found.dim - len(out.shape), found, out)]
    return Placed((*bias, *wants), (found,))


def _divided_product(
    a: Shard | None, b: Shard | None, rank: int
) -> tuple[tuple[Placement, Placement], Placement]:
    """((where it wants the factors), where the product is) of (…, rows, inner) x (…, inner, n)."""
    rows, last = rank - 2, rank - 1
    if b is not None and b.dim == last:
        # Rows, or the summed tokens, of the other factor are gathered first.
        return (None, b), b
    if a is not None and a.dim == rows:
        return (a, None), a
    if a is not None:
        return (a, a.at(rows)), PARTIAL
    assert b is not None
    return (b.at(last), b), PARTIAL


@rule_of("softmax")
def _fused_softmax(given: Given) -> Placed:
    """A fused kernel over rows, which must be whole."""
    shards = [at for at in given.at if isinstance(at, Shard)]
    if any(shard.dim == len(given.call.outputs[0].shape) - 1 for shard in shards):
        return given.whole()
    return pointwise(given)


@rule_of("sum mean amax amin max min argmax argmin any all prod var std")
def _reduction(given: Given) -> Placed:
    shard = given.shard
    if shard is None:
        return given.whole()
    rank, name = len(given.inputs[0].shape), given.call.target.split(".")[1]
    dims: Any = argument(given.call, 1, "dim")
    if not isinstance(dims, (int, tuple)) or isinstance(dims, bool) or dims == ():
        dims = tuple(range(rank))
    gone = {dim % rank for dim in ((dims,) if isinstance(dims, int) else dims)}
    if shard.dim in gone:
        if name not in ("sum", "mean"):
            return given.whole()
        return given.same((PARTIAL,) * len(given.call.outputs))
    kept = len(given.call.outputs[0].shape) == rank
    found = shard if kept else shard.at(shard.dim - sum(dim < shard.dim for dim in gone))
    return given.same((found,) * len(given.call.outputs))


@rule_of("_softmax _log_softmax _safe_softmax cumsum cumprod sort topk logsumexp histc")
@rule_of(
    "_softmax_backward_data _log_softmax_backward_data gather scatter scatter_add index_select"
)
def _along(given: Given) -> Placed:
    """Works along one dimension, which must be whole; those beside it may be divided."""
    name = given.call.target.split(".")[1]
    place = 2 if name.endswith(("backward_data", "topk")) else 1
    found = next((each for each in given.at if isinstance(each, Shard)), None)
    if found is None:
        return given.whole()
    rank = len(given.inputs[0].shape)
    dim: Any = argument(given.call, place, "dim", -1)
    if name == "histc" or not isinstance(dim, int):
        return given.whole(is_known=False)
    if dim % rank == found.dim:
        if name in _OF_LOSS and given.axis == "tp":
            return _vocabulary(given, found, name)
        return given.whole()
    return _with_shapes(given, found)


_OF_LOSS = ("_log_softmax", "_log_softmax_backward_data")


def _vocabulary(given: Given, shard: Shard, name: str) -> Placed:
    """Of divided classes, the maximum and the sum of every row are reduced.

    torch/distributed/tensor/parallel/loss.py, _log_softmax; the backward pass needs neither.
    """
    source = given.inputs[0]
    row = TensorSpec((*source.shape[: shard.dim], 1, *source.shape[shard.dim + 1 :]), source.dtype)
    reduced = (row, row) if name == "_log_softmax" else ()
    return Placed((shard,) * len(given.at), (shard,), reduced)


def _with_shapes(given: Given, shard: Shard) -> Placed:
    """Every tensor of that many dimensions is divided alike."""
    rank = max(len(spec.shape) for spec in given.inputs)

    def at(spec: TensorSpec) -> Placement:
        fits = len(spec.shape) == rank and spec.shape[shard.dim] % given.degree == 0
        return shard if fits and spec.shape[shard.dim] > 1 else None

    return Placed(tuple(map(at, given.inputs)), tuple(map(at, given.call.outputs)))


@rule_of("nll_loss_forward nll_loss_backward")
def _loss(given: Given) -> Placed:
    """Rows by classes, and a target for every row."""
    backward = given.call.target.endswith("backward.default")
    place = 1 if backward else 0
    shard = given.at[place]
    if not isinstance(shard, Shard):
        return given.whole()
    outputs = len(given.call.outputs)
    wants: list[Placement] = [None] * len(given.at)
    wants[place] = shard
    if shard.dim == 1 and len(given.inputs[place].shape) == 2:
        # Each rank picks the targets among its own classes; their sum is that of all rows.
        rows = TensorSpec(given.inputs[place].shape[:1], given.inputs[place].dtype)
        if backward:
            return Placed(tuple(wants), (shard,))
        return Placed(tuple(wants), (None,) * outputs, (rows,))
    wants[place + 1] = shard if shard.dim == 0 else shard.at(shard.dim - 1)
    return Placed(tuple(wants), (shard,) if backward else (PARTIAL,) * outputs)


@rule_of("native_layer_norm _fused_rms_norm")
def _norm(given: Given) -> Placed:
    shard = given.shard
    normalized = len(given.call.arguments[1])
    if shard is None or shard.dim >= len(given.inputs[0].shape) - normalized:
        return given.whole()
    wants = (shard, *(None for _ in given.at[1:]))
    return Placed(wants, (shard,) * len(given.call.outputs))


@rule_of("native_layer_norm_backward _fused_rms_norm_backward")
def _norm_backward(given: Given) -> Placed:
    rank = len(given.inputs[0].shape)
    normalized = len(given.call.arguments[2])
    shard = next((each for each in given.at[:2] if isinstance(each, Shard)), None)
    if shard is None or shard.dim >= rank - normalized:
        return given.whole()
    wants = tuple(shard if len(spec.shape) == rank else None for spec in given.inputs)
    # Which gradients there are is the caller's choice: those of weights are sums over all tokens.
    outputs = [shard if len(spec.shape) == rank else PARTIAL for spec in given.call.outputs]
    return Placed(wants, tuple(outputs))


@rule_of("embedding")
def _embedding(given: Given) -> Placed:
    weight, ids = given.at
    if isinstance(weight, Shard) and weight.dim == 0:
        return Placed((weight, None), (PARTIAL,))
    if isinstance(weight, Shard):
        return Placed((weight, None), (Shard.along(given.call.outputs[0], -1),))
    return Placed((None, ids), (ids,))


@rule_of("embedding_dense_backward")
def _embedding_backward(given: Given) -> Placed:
    gradient, ids = given.at
    if isinstance(gradient, Shard) and gradient.dim == len(given.inputs[0].shape) - 1:
        return Placed((gradient, None), (Shard.along(given.call.outputs[0], 1),))
    shard = gradient if isinstance(gradient, Shard) else ids
    if not isinstance(shard, Shard):
        return given.whole()
    return Placed((shard, shard), (PARTIAL,))


def attention_names() -> tuple[str, ...]:
    """The fused attention of every backend."""
    kinds = (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
    )
    return tuple(f"_scaled_dot_product_{kind}{way}" for kind in kinds for way in ("", "_backward"))


@rule_of(" ".join(attention_names()))
def _attention(given: Given) -> Placed:
    """(samples, heads, tokens, width): samples and heads are worked on each by itself."""
    shards = [at for at in given.at if isinstance(at, Shard)]
    dim = min((shard.dim for shard in shards), default=2)
    if dim > 1:
        return given.whole(is_known=not shards)

    def at(spec: TensorSpec) -> Placement:
        if len(spec.shape) < 3 or spec.shape[dim] == 1:
            return None
        if spec.shape[dim] % given.degree:
            raise StrategyError(
                f"{given.axis}={given.degree} does not divide the {spec.shape[dim]} heads of "
                f"module '{given.module}'; choose a divisor"
            )
        return Shard.along(spec, dim)

    return Placed(tuple(map(at, given.inputs)), tuple(map(at, given.call.outputs)))
