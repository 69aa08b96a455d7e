"""Say, operator by operator, where results are if tensors are divided over ranks.

Rules follow the shapes that operators state: what is pointwise keeps its shards, a product over a
divided dimension gives terms of a sum. An operator without a rule asks for whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from estimator.errors import StrategyError
from estimator.graph.costs.call_costs import family_of
from estimator.graph.costs.matmuls import ATTENTION
from estimator.graph.costs.registry import argument
from estimator.tensors import OpCall, TensorSpec


@dataclass(frozen=True, slots=True)
class Shard:
    """An equal part of each rank along `dim`.

    A dimension may be several merged ones (a view of tokens of all samples as rows): what is
    divided has `size` elements, which stand `inner` apart. Plain ones have all elements, 1 apart.
    """

    dim: int
    size: int
    inner: int = 1

    @classmethod
    def along(cls, spec: TensorSpec, dim: int) -> Shard:
        """All of one dimension, which may be counted from the end."""
        dim %= len(spec.shape)
        return cls(dim, spec.shape[dim])

    def at(self, dim: int) -> Shard:
        """The same shard where its dimension has another place."""
        return Shard(dim, self.size, self.inner)


@dataclass(frozen=True, slots=True)
class Routed:
    """Rows along `dim` that are with their experts: `load` times as many on the busiest rank."""

    dim: int
    load: float = 1.0


# A term of a sum over all ranks; a mean of equal parts counts as one.
PARTIAL: Literal["partial"] = "partial"
# None: every rank holds all of it.
Placement = Shard | Routed | Literal["partial"] | None


def local_spec(spec: TensorSpec, placement: Placement, degree: int) -> TensorSpec:
    """What one of `degree` ranks holds of a tensor."""
    if isinstance(placement, Routed):
        shape = list(spec.shape)
        shape[placement.dim] = math.ceil(shape[placement.dim] * placement.load)
        return TensorSpec(tuple(shape), spec.dtype)
    if not isinstance(placement, Shard):
        return spec
    dim = placement.dim
    shape = list(spec.shape)
    shape[dim] = -(-shape[dim] // degree)
    strides = spec.strides
    if strides is not None:
        # What lies outside the divided dimension moves closer together.
        own = strides[dim]
        strides = tuple(
            stride // degree if own < stride and stride % degree == 0 else stride
            for stride in strides
        )
    return TensorSpec(tuple(shape), spec.dtype, strides)


def viewed(shard: Shard, old: Sequence[int], new: Sequence[int], degree: int) -> Shard | None:
    """Where a shard is after a view of shape `old` as `new`; None where no dimension holds it.

    >>> viewed(Shard(1, 8), (4, 8, 6), (32, 6), 2)
    Shard(dim=0, size=8, inner=1)
    >>> viewed(Shard(0, 8), (32, 6), (4, 8, 6), 2)
    Shard(dim=1, size=8, inner=1)
    >>> viewed(Shard(2, 64), (4, 8, 64), (4, 8, 16, 4), 2)
    Shard(dim=2, size=16, inner=1)
    """
    # Elements of the whole tensor between neighbours of the divided part, and past all of it.
    step = shard.inner * math.prod(old[shard.dim + 1 :])
    end = step * shard.size
    behind = 1
    place: tuple[int, int, int] | None = None
    for dim in range(len(new) - 1, -1, -1):
        first, behind = behind, behind * new[dim]
        # The outermost dimension that holds some of it is the one that is divided.
        if first < end and behind > step and new[dim] > 1:
            start = max(step, first)
            place = dim, min(end, behind) // start, start // first
    if place is None:
        return None
    dim, size, inner = place
    if size % degree or new[dim] % (inner * size):
        return None
    # The outermost part of a dimension divides it as the whole would be.
    return Shard(dim, new[dim]) if inner * size == new[dim] else Shard(dim, size, inner)


class Placed(NamedTuple):
    """Where an operator wants its inputs, and where its outputs then are.

    `reduced` are tensors that are summed over the ranks inside of it. `is_known` is false where no
    rule says what becomes of shards.
    """

    wants: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    reduced: tuple[TensorSpec, ...] = ()
    is_known: bool = True


class Given(NamedTuple):
    """A call, where its tensors are (none is a term of a sum), and over how many ranks."""

    call: OpCall
    at: tuple[Placement, ...]
    degree: int
    module: str
    axis: str

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.call.inputs

    @property
    def shard(self) -> Shard | None:
        """The first input's."""
        return self.at[0] if isinstance(self.at[0], Shard) else None

    def whole(self, *, is_known: bool = True) -> Placed:
        """All tensors whole."""
        return Placed((None,) * len(self.at), (None,) * len(self.call.outputs), (), is_known)

    def same(self, outputs: Sequence[Placement] | None = None) -> Placed:
        """Inputs as they are; outputs as given, by default as the first input."""
        outputs_at = (self.at[0],) * len(self.call.outputs) if outputs is None else tuple(outputs)
        return Placed(self.at, outputs_at)


Rule = Callable[[Given], Placed]
ShardRule = Callable[[Given, Shard], Placed]
RULES: dict[str, Rule] = {}


def rule_of(names: str) -> Callable[[Rule], Rule]:
    """Register the rule of operators by their bare names."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), rule))
        return rule

    return register


def shard_rule_of(names: str) -> Callable[[ShardRule], ShardRule]:
    """Register what becomes of the first input's shard; without one all is whole."""

    def register(rule: ShardRule) -> ShardRule:
        def placed_by(given: Given) -> Placed:
            shard = given.shard
            return given.whole() if shard is None else rule(given, shard)

        rule_of(names)(placed_by)
        return rule

    return register


@rule_of("clone _to_copy copy fill bernoulli normal uniform random empty_like ones_like zeros_like")
@rule_of("rand_like randn_like full_like native_dropout masked_fill where tril triu alias detach")
def pointwise(given: Given) -> Placed:
    """Tensors broadcast to one shape from the last dimension on."""
    for spec, at in zip(given.inputs, given.at, strict=True):
        if isinstance(at, Shard) and spec.shape[at.dim] > 1:
            place = at.dim - len(spec.shape)
            return Placed(
                tuple(broadcast(spec_in, place, at, spec) for spec_in in given.inputs),
                tuple(broadcast(spec_out, place, at, spec) for spec_out in given.call.outputs),
            )
    return given.whole()


def broadcast(spec: TensorSpec, place: int, shard: Shard, other: TensorSpec) -> Shard | None:
    """The shard of a tensor that is broadcast with another, `place` counted from the end."""
    if len(spec.shape) < -place or spec.shape[place] != other.shape[place]:
        return None
    return shard.at(len(spec.shape) + place)


@shard_rule_of("view _unsafe_view reshape _reshape_alias")
def _view(given: Given, shard: Shard) -> Placed:
    old, new = given.inputs[0].shape, given.call.outputs[0].shape
    moved = viewed(shard, old, new, given.degree)
    if moved is None:
        heads = [size for size in new if size % given.degree]
        where = f" of module '{given.module}'" if given.module else ""
        raise StrategyError(
            f"{given.axis}={given.degree} does not divide the view {old} as {new}{where} "
            f"({', '.join(map(str, heads)) or 'no dimension'} not divisible); choose a degree that "
            "divides its heads"
        )
    return given.same((moved,))


@shard_rule_of("all_reduce all_gather reduce_scatter all_to_all permute_tensor")
def _along_another_axis(given: Given, shard: Shard) -> Placed:
    """What ranks of another axis exchange are parts alike."""
    return given.same((Shard.along(given.call.outputs[0], shard.dim),))


@shard_rule_of("t transpose permute swapaxes movedim")
def _permuted(given: Given, shard: Shard) -> Placed:
    rank = len(given.inputs[0].shape)
    order = list(range(rank))
    name = given.call.name
    if name == "t":
        order.reverse()
    elif name == "permute":
        order = [dim % rank for dim in given.call.arguments[1]]
    else:
        one, two = (dim % rank for dim in given.call.arguments[1:3])
        order[one], order[two] = order[two], order[one]
    return given.same((shard.at(order.index(shard.dim)),))


@shard_rule_of("unsqueeze squeeze expand select unbind")
def _fewer_or_more(given: Given, shard: Shard) -> Placed:
    """Dimensions of one element come and go, or one index of a dimension is taken."""
    name = given.call.name
    old, new = given.inputs[0].shape, given.call.outputs[0].shape
    rank = len(old)
    if name == "expand":
        return given.same((shard.at(shard.dim + len(new) - rank),))
    dims: Any = argument(given.call, 1, "dim", 0)
    if name == "unsqueeze":
        dim = dims % (rank + 1)
        return given.same((shard.at(shard.dim + (dim <= shard.dim)),))
    if name == "squeeze" and not isinstance(dims, int):
        gone = [d for d in range(rank) if old[d] == 1 and len(new) < rank]
    else:
        gone = [dims % rank] if len(new) < rank else []
    if shard.dim in gone:
        return given.whole()
    kept_shard = shard.at(shard.dim - sum(dim < shard.dim for dim in gone))
    return given.same((kept_shard,) * len(given.call.outputs))


@shard_rule_of("view_as_complex view_as_real")
def _complex(given: Given, shard: Shard) -> Placed:
    """Pairs along a last dimension are complex numbers without it, and the other way round."""
    name = given.call.name
    if name == "view_as_complex" and shard.dim == len(given.inputs[0].shape) - 1:
        return given.whole()
    return given.same((shard,))


@shard_rule_of("slice constant_pad_nd flip roll narrow")
def _parts(given: Given, shard: Shard) -> Placed:
    """A part of one dimension; of a divided one only all of it."""
    old, new = given.inputs[0].shape, given.call.outputs[0].shape
    if old[shard.dim] != new[shard.dim]:
        return given.whole()
    return given.same()


@shard_rule_of("slice_backward select_backward")
def _parts_backward(given: Given, shard: Shard) -> Placed:
    rank = len(given.call.outputs[0].shape)
    dim = argument(given.call, 2, "dim") % rank
    if given.call.target.startswith("aten.select"):
        return given.same((shard.at(shard.dim + (dim <= shard.dim)),))
    is_undivided = given.call.outputs[0].shape[dim] == given.inputs[0].shape[dim]
    return given.same() if dim != shard.dim or is_undivided else given.whole()


@rule_of("split split_with_sizes chunk unsafe_split unsafe_split_with_sizes cat stack")
def _packed(given: Given) -> Placed:
    """Parts side by side along a divided dimension are divided each, as of a fused projection."""
    shards = [at for at in given.at if isinstance(at, Shard)]
    if len({shard.dim for shard in shards}) != 1:
        return given.whole()
    dim, name = shards[0].dim, given.call.name
    out = given.call.outputs[0]
    if name == "stack":
        along = argument(given.call, 1, "dim", 0) % len(out.shape)
        return Placed(given.at, (shards[0].at(dim + (along <= dim)),))
    if name == "cat":
        along = argument(given.call, 1, "dim", 0) % len(out.shape)
        if along == dim and len(shards) < len(given.at):
            return given.whole()
        wants = tuple(Shard.along(spec, dim) for spec in given.inputs)
        return Placed(wants, (Shard.along(out, dim),))
    if any(output.shape[dim] % given.degree for output in given.call.outputs):
        return given.whole()
    return given.same([Shard.along(output, dim) for output in given.call.outputs])


def placed(given: Given) -> Placed:
    """What the rule of an operator says; raises StrategyError where a degree divides no heads."""
    if not any(given.at):
        return given.whole()
    name = given.call.name
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
        placement: Placement = shard_a if shard_a is not None and shard_a.dim == 0 else shard_b
        wants: tuple[Placement, Placement] = (placement, placement)
    else:
        wants, placement = _divided_product(shard_a, shard_b, len(out.shape))
    bias: list[Placement] = [None] * first
    if first and isinstance(placement, Shard):
        bias = [broadcast(given.inputs[0], placement.dim - len(out.shape), placement, out)]
    return Placed((*bias, *wants), (placement,))


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


@shard_rule_of("sum mean amax amin max min argmax argmin any all prod var std")
def _reduction(given: Given, shard: Shard) -> Placed:
    rank, name = len(given.inputs[0].shape), given.call.name
    dims: Any = argument(given.call, 1, "dim")
    if not isinstance(dims, (int, tuple)) or isinstance(dims, bool) or dims == ():
        dims = tuple(range(rank))
    gone = {dim % rank for dim in ((dims,) if isinstance(dims, int) else dims)}
    if shard.dim in gone:
        if name not in ("sum", "mean"):
            return given.whole()
        return given.same((PARTIAL,) * len(given.call.outputs))
    kept = len(given.call.outputs[0].shape) == rank
    result = shard if kept else shard.at(shard.dim - sum(dim < shard.dim for dim in gone))
    return given.same((result,) * len(given.call.outputs))


@rule_of("_softmax _log_softmax _safe_softmax cumsum cumprod sort topk logsumexp histc")
@rule_of(
    "_softmax_backward_data _log_softmax_backward_data gather scatter scatter_add index_select"
)
def _along(given: Given) -> Placed:
    """Works along one dimension, which must be whole; those beside it may be divided."""
    name = given.call.name
    place = 2 if name.endswith(("backward_data", "topk")) else 1
    shard = next((place for place in given.at if isinstance(place, Shard)), None)
    if shard is None:
        return given.whole()
    rank = len(given.inputs[0].shape)
    dim: Any = argument(given.call, place, "dim", -1)
    if name == "histc" or not isinstance(dim, int):
        return given.whole(is_known=False)
    if dim % rank == shard.dim:
        if name.startswith("_log_softmax") and given.axis == "tp":
            # Of divided classes, the maximum and the sum of every row are reduced; backward needs
            # neither (torch/distributed/tensor/parallel/loss.py, _log_softmax).
            source = given.inputs[0]
            shape = (*source.shape[: shard.dim], 1, *source.shape[shard.dim + 1 :])
            row = TensorSpec(shape, source.dtype)
            reduced = (row, row) if name == "_log_softmax" else ()
            return Placed((shard,) * len(given.at), (shard,), reduced)
        return given.whole()
    # Every tensor of that many dimensions is divided alike.
    rank, divided = max(len(spec.shape) for spec in given.inputs), shard.dim

    def at(spec: TensorSpec) -> Placement:
        fits = len(spec.shape) == rank and spec.shape[divided] % given.degree == 0
        return shard if fits and spec.shape[divided] > 1 else None

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


@shard_rule_of("native_layer_norm _fused_rms_norm")
def _norm(given: Given, shard: Shard) -> Placed:
    normalized = len(given.call.arguments[1])
    if shard.dim >= len(given.inputs[0].shape) - normalized:
        return given.whole()
    wants = (shard, *(None for _ in given.at[1:]))
    return Placed(wants, (shard,) * len(given.call.outputs))


@rule_of("native_layer_norm_backward _fused_rms_norm_backward")
def _norm_backward(given: Given) -> Placed:
    rank = len(given.inputs[0].shape)
    normalized = len(given.call.arguments[2])
    shard = next((place for place in given.at[:2] if isinstance(place, Shard)), None)
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


@rule_of(" ".join(ATTENTION))
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
