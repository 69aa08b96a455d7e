"""Say, operator by operator, where the results are if its tensors are divided over ranks.

Rules follow the shapes that operators state: what is pointwise keeps its shards, a product over a
divided dimension gives terms of a sum. An operator without a rule asks for whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from estimator.errors import StrategyError
from estimator.graph.cost_registry import argument
from estimator.graph.split_placements import Placement, Shard, viewed
from estimator.tensors import OpCall, TensorSpec


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
        found = (self.at[0],) * len(self.call.outputs) if outputs is None else tuple(outputs)
        return Placed(self.at, found)


Rule = Callable[[Given], Placed]
RULES: dict[str, Rule] = {}


def rule_of(names: str) -> Callable[[Rule], Rule]:
    """Register the rule of operators by their bare names."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), rule))
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
                tuple(broadcast(each, place, at, spec) for each in given.inputs),
                tuple(broadcast(each, place, at, spec) for each in given.call.outputs),
            )
    return given.whole()


def broadcast(spec: TensorSpec, place: int, shard: Shard, of: TensorSpec) -> Shard | None:
    """The shard of a tensor that is broadcast with another, `place` counted from the end."""
    if len(spec.shape) < -place or spec.shape[place] != of.shape[place]:
        return None
    return shard.at(len(spec.shape) + place)


@rule_of("view _unsafe_view reshape _reshape_alias")
def _view(given: Given) -> Placed:
    shard = given.shard
    if shard is None:
        return given.whole()
    old, new = given.inputs[0].shape, given.call.outputs[0].shape
    found = viewed(shard, old, new, given.degree)
    if found is None:
        heads = [size for size in new if size % given.degree]
        where = f" of module '{given.module}'" if given.module else ""
        raise StrategyError(
            f"{given.axis}={given.degree} does not divide the view {old} as {new}{where} "
            f"({', '.join(map(str, heads)) or 'no dimension'} not divisible); choose a degree that "
            "divides its heads"
        )
    return given.same((found,))


@rule_of("all_reduce all_gather reduce_scatter all_to_all permute_tensor")
def _along_another_axis(given: Given) -> Placed:
    """What ranks of another axis exchange are parts alike."""
    shard = given.shard
    if shard is None:
        return given.whole()
    return given.same((Shard.along(given.call.outputs[0], shard.dim),))


@rule_of("t transpose permute swapaxes movedim")
def _permuted(given: Given) -> Placed:
    shard, rank = given.shard, len(given.inputs[0].shape)
    if shard is None:
        return given.whole()
    order = list(range(rank))
    name = given.call.target.split(".")[1]
    if name == "t":
        order.reverse()
    elif name == "permute":
        order = [dim % rank for dim in given.call.arguments[1]]
    else:
        one, two = (dim % rank for dim in given.call.arguments[1:3])
        order[one], order[two] = order[two], order[one]
    return given.same((shard.at(order.index(shard.dim)),))


@rule_of("unsqueeze squeeze expand select unbind")
def _fewer_or_more(given: Given) -> Placed:
    """Dimensions of one element come and go, or one index of a dimension is taken."""
    shard = given.shard
    if shard is None:
        return given.whole()
    name = given.call.target.split(".")[1]
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
    found = shard.at(shard.dim - sum(dim < shard.dim for dim in gone))
    return given.same((found,) * len(given.call.outputs))


@rule_of("view_as_complex view_as_real")
def _complex(given: Given) -> Placed:
    """Pairs along a last dimension are complex numbers without it, and the other way round."""
    shard, name = given.shard, given.call.target.split(".")[1]
    if shard is None or (name == "view_as_complex" and shard.dim == len(given.inputs[0].shape) - 1):
        return given.whole()
    return given.same((shard,))


@rule_of("slice constant_pad_nd flip roll narrow")
def _parts(given: Given) -> Placed:
    """A part of one dimension; of a divided one only all of it."""
    shard = given.shard
    old, new = given.inputs[0].shape, given.call.outputs[0].shape
    if shard is None or old[shard.dim] != new[shard.dim]:
        return given.whole()
    return given.same()


@rule_of("slice_backward select_backward")
def _parts_backward(given: Given) -> Placed:
    shard, rank = given.shard, len(given.call.outputs[0].shape)
    if shard is None:
        return given.whole()
    dim = argument(given.call, 2, "dim") % rank
    if given.call.target.startswith("aten.select"):
        return given.same((shard.at(shard.dim + (dim <= shard.dim)),))
    whole = given.call.outputs[0].shape[dim] == given.inputs[0].shape[dim]
    return given.same() if dim != shard.dim or whole else given.whole()


@rule_of("split split_with_sizes chunk unsafe_split unsafe_split_with_sizes cat stack")
def _packed(given: Given) -> Placed:
    """Parts side by side along a divided dimension are divided each, as of a fused projection."""
    shards = [at for at in given.at if isinstance(at, Shard)]
    if not shards:
        return given.whole()
    dims = {shard.dim for shard in shards}
    name = given.call.target.split(".")[1]
    (dim,) = (dims.pop(),) if len(dims) == 1 else (-1,)
    if dim < 0:
        return given.whole()
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
    if any(each.shape[dim] % given.degree for each in given.call.outputs):
        return given.whole()
    return given.same([Shard.along(each, dim) for each in given.call.outputs])
