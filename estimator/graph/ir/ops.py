"""Hold the parts of a traced step as plain values: operators, tensors between them, parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from estimator.tensors import OpCall, TensorSpec

Phase = Literal["forward", "backward"]
ValueKind = Literal["parameter", "buffer", "input", "constant", "activation"]
# One kernel after the other from Python; fused by torch.compile, or in each repeated block alone;
# fused and replayed as CUDA graphs.
Execution = Literal["eager", "compiled", "compiled-blocks", "cuda-graphs"]


def named(names: str) -> tuple[str, ...]:
    """Operators of aten by their bare names."""
    return tuple(f"aten.{name}" for name in names.split())


# Operators that touch no element: their results share the memory of an argument, or are no tensors.
VIEWS = frozenset(
    (
        *named(
            "view _unsafe_view reshape _reshape_alias alias as_strided detach diagonal expand t"
        ),
        *named("t expand_as lift_fresh narrow permute select slice split split_with_sizes"),
        *named("squeeze tensor_split transpose unbind unfold unsqueeze view_as view_as_complex"),
        *named("view_as_real unsafe_split unsafe_split_with_sizes conj _conj _neg_view movedim"),
        *named("sym_size sym_numel sym_stride sym_storage_offset is_pinned"),
        *named("_nested_view_from_buffer swapaxes chunk flatten unflatten requires_grad_"),
        *named("_assert_async _assert_tensor_metadata _functional_assert_async"),
    )
)


@lru_cache(maxsize=4096)
def gives_views(target: str) -> bool:
    """Whether an operator, in any overload and in place too, touches no element.

    >>> [gives_views(f"aten.{name}") for name in ("transpose.int", "detach_.default", "mm")]
    [True, True, False]
    """
    name = ".".join(target.split(".")[:2])
    return name in VIEWS or name.removesuffix("_") in VIEWS


@dataclass(frozen=True, slots=True)
class OpCost:
    """What a call must compute and move at least; costs add, and scale by a number."""

    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0

    def __add__(self, other: OpCost) -> OpCost:
        return OpCost(
            self.flops + other.flops,
            self.read_bytes + other.read_bytes,
            self.written_bytes + other.written_bytes,
        )

    def __mul__(self, factor: float) -> OpCost:
        return OpCost(self.flops * factor, self.read_bytes * factor, self.written_bytes * factor)

    __rmul__ = __mul__

    @property
    def moved_bytes(self) -> float:
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One tensor of the step; `base` is the value whose storage it shares (views, in-place)."""

    spec: TensorSpec
    other_spec: TensorSpec
    kind: ValueKind
    base: int | None = None

    @property
    def specs(self) -> tuple[TensorSpec, TensorSpec]:
        """The shapes at both traced batch sizes."""
        return self.spec, self.other_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator call of the step, in issue order.

    `call` holds the arguments at the traced batch size, `other_call` at the second one (the same
    object where nothing depends on the batch). The TensorSpec leaves of the arguments, positional
    then keyword, stand in the order of `inputs`, which are indices into `OpGraph.values`, as are
    `outputs`. A view computes nothing but still costs the host a dispatch. `module` is the dotted
    path of the innermost module; in the backward phase, that of the forward op it belongs to. An op
    that `is_repeated` computes in the backward phase what the forward phase has computed already.
    `holds` are values whose memory is released after it although it does not touch them: what a
    node of autograd saved, or the output of a model until its loss is there. An op that
    `enters_dtensor` is the first of a module's call that DTensor runs on one rank's part.
    """

    name: str
    call: OpCall
    other_call: OpCall
    phase: Phase
    module: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    is_view: bool = False
    is_repeated: bool = False
    holds: tuple[int, ...] = ()
    enters_dtensor: bool = False

    @property
    def calls(self) -> tuple[OpCall, OpCall]:
        """The calls at both traced batch sizes."""
        return self.call, self.other_call


def with_calls(op: Op, calls: Iterable[OpCall], **changes: Any) -> Op:
    """An op of the same module and phase that makes these calls, at each of the two batches."""
    one, two = calls
    return replace(op, call=one, other_call=one if one == two else two, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One trainable parameter (tied ones once).

    `ready_after` is the index in `OpGraph.ops` of the op after which its gradient is final;
    `gradient` is the value that holds it (None: it gets no gradient). Of one that `is_dtensor` a
    rank keeps its part in a DTensor. A step updates it `updates` times, with `optimizer` where that
    is not the graph's own. Of experts that are divided, the ranks that FSDP shards other
    weights over hold `expert_parts` unlike parts (0: it is no such weight); its gradient is reduced
    among the ranks with the same experts.
    """

    name: str
    spec: TensorSpec
    gradient: int | None
    ready_after: int | None
    is_dtensor: bool = False
    expert_parts: int = 0
    optimizer: str | None = None
    updates: int = 1

    @property
    def is_expert(self) -> bool:
        """Whether it is of experts that ranks divide among them."""
        return self.expert_parts > 0

    @property
    def sharded_parts(self) -> int:
        """How many such weights are sharded over the ranks that shard a whole model."""
        return max(self.expert_parts, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInput:
    """One tensor of the batch; integer inputs carry the smallest and largest value seen."""

    name: str
    value: int
    low: int | None = None
    high: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTiming:
    """Measured seconds of one exact call on one machine, memory already touched."""

    seconds: float
    noise_ratio: float = 0.0


def with_repeated(ops: Sequence[Op], values: Sequence[Value]) -> tuple[Op, ...]:
    """The operators of an eager step, those marked that activation checkpoints run a second time.

    A backward pass begins with the gradient of its loss. All that it is there for depends on that
    gradient; what does not, forward work on forward values, is computed again. A step has several
    backward passes where it calls them itself.
    """
    storages = [index if value.base is None else value.base for index, value in enumerate(values)]
    from_gradient: set[int] = set()
    marked = []
    for before, op in zip([None, *ops], ops, strict=False):
        if op.phase == "backward":
            begins = before is None or before.phase == "forward" or _is_seed(op)
            if begins or any(storages[value] in from_gradient for value in op.inputs):
                from_gradient.update(storages[value] for value in op.outputs)
            else:
                op = replace(op, is_repeated=True)
        marked.append(op)
    return tuple(marked)


def _is_seed(op: Op) -> bool:
    """Whether an op makes the gradient of a loss that another pass was just run for."""
    return op.call.target == "aten.ones_like.default" and op.call.outputs[0].numel == 1
