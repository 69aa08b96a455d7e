"""Hold the parts of a traced step: operators, tensors between them, parameters.

They are plain values, and columns of a graph's operators and values, which each stand in an array:
graphs of thousands of operators are cut and divided again and again, most of which only needs who
reads what. Graphs made so make an operator when it is asked for; equal calls stand once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args, overload

import numpy as np
from numpy.typing import NDArray

from estimator.elementwise import Flags, Indices
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
    """What a call must compute and move at least; costs add."""

    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0

    def __add__(self, other: OpCost) -> OpCost:
        return OpCost(
            self.flops + other.flops,
            self.read_bytes + other.read_bytes,
            self.written_bytes + other.written_bytes,
        )

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


Item = TypeVar("Item")
KINDS: tuple[ValueKind, ...] = get_args(ValueKind)
ACTIVATION, INPUT = KINDS.index("activation"), KINDS.index("input")
_OF_OPS = (
    *("names", "call_of", "module_of", "is_forward", "is_repeated", "is_view"),
    "enters_dtensor",
)


class _Graph(Protocol):
    """What columns are of, as an `OpGraph` is."""

    @property
    def ops(self) -> Sequence[Op]: ...
    @property
    def values(self) -> Sequence[Value]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphColumns:
    """The operators and values of a graph; what there is none of is -1.

    `calls` and `specs` are the distinct ones, each at both traced batch sizes, `call_of` and
    `spec_of` the numbers of those of each op and value. `touched` are the values that ops read and
    then make, op by op, `held` those that they hold, `maker` is the op that makes each value first.
    An op's part of `touched` begins at `begins`, what it makes at `made_begins`.
    """

    names: NDArray[np.object_]
    calls: tuple[tuple[OpCall, OpCall], ...]
    call_of: Indices
    specs: tuple[tuple[TensorSpec, TensorSpec], ...]
    spec_of: Indices
    modules: tuple[str, ...]
    module_of: Indices
    is_forward: Flags
    is_repeated: Flags
    is_view: Flags
    enters_dtensor: Flags
    touched: Indices
    touched_by: Indices
    is_made: Flags
    held: Indices
    held_by: Indices
    base: Indices
    kind: Indices
    begins: Indices = field(init=False)
    made_begins: Indices = field(init=False)
    maker: Indices = field(init=False)

    def __post_init__(self) -> None:
        ops = len(self.call_of)
        begins = np.searchsorted(self.touched_by, np.arange(ops + 1))
        read = np.bincount(self.touched_by[~self.is_made], minlength=ops)
        maker = np.full(len(self.spec_of), -1, dtype=np.intp)
        # Of several the first one: the last that is written here.
        maker[self.touched[self.is_made][::-1]] = self.touched_by[self.is_made][::-1]
        object.__setattr__(self, "begins", begins)
        object.__setattr__(self, "made_begins", begins[:-1] + read)
        object.__setattr__(self, "maker", maker)

    @classmethod
    def of(cls, graph: _Graph) -> GraphColumns:
        """Those of a graph."""
        ops, values = graph.ops, graph.values
        known = ops.source if isinstance(ops, Deferred) else None
        if isinstance(known, cls) and isinstance(values, Deferred) and values.source is known:
            return known
        calls, call_of = _numbered([op.calls for op in ops])
        specs, spec_of = _numbered([value.specs for value in values])
        read, made, held = (
            _array(len(getattr(op, name)) for op in ops) for name in ("inputs", "outputs", "holds")
        )
        numbers: dict[str, int] = {}
        codes = {kind: code for code, kind in enumerate(KINDS)}
        bases = [value.base for value in values]
        places = np.arange(len(ops))
        return cls(
            names=np.array([op.name for op in ops], dtype=np.object_),
            calls=calls,
            call_of=call_of,
            specs=specs,
            spec_of=spec_of,
            # Numbers first: they fill the names.
            module_of=_array(numbers.setdefault(op.module, len(numbers)) for op in ops),
            modules=tuple(numbers),
            is_forward=_flags(op.phase == "forward" for op in ops),
            is_repeated=_flags(op.is_repeated for op in ops),
            is_view=_flags(op.is_view for op in ops),
            enters_dtensor=_flags(op.enters_dtensor for op in ops),
            touched=_array(chain.from_iterable((*op.inputs, *op.outputs) for op in ops)),
            touched_by=np.repeat(places, read + made),
            is_made=np.repeat(
                np.tile([False, True], len(places)), np.stack([read, made], axis=1).ravel()
            ),
            held=_array(chain.from_iterable(op.holds for op in ops)),
            held_by=np.repeat(places, held),
            base=_array(
                -1 if base is None or base == number else base for number, base in enumerate(bases)
            ),
            kind=_array(codes[value.kind] for value in values),
        )

    def distinct_calls(self, calls: Sequence[OpCall]) -> tuple[OpCall, ...]:
        """The distinct ones of the calls of all ops at a batch size, by number."""
        return _distinct(calls, self.call_of, len(self.calls))

    def distinct_specs(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """The same of the shapes of all values."""
        return _distinct(specs, self.spec_of, len(self.specs))

    @property
    def held_begins(self) -> Indices:
        """Where in `held` the part of each op begins, and where that of the last one ends."""
        return np.asarray(np.searchsorted(self.held_by, np.arange(len(self.call_of) + 1)))

    def of_ops(self, ops: Indices) -> dict[str, Any]:
        """The columns of some ops, but for what they read, make and hold."""
        return {name: getattr(self, name)[ops] for name in _OF_OPS}

    def of_calls(self, facts: Iterable[bool]) -> Flags:
        """For each op what is known of its call."""
        return np.fromiter(facts, dtype=np.bool_, count=len(self.calls))[self.call_of]

    def read_by(self, op: int) -> list[int]:
        """The values that an op reads."""
        read: list[int] = self.touched[self.begins[op] : self.made_begins[op]].tolist()
        return read

    def ops(self) -> Deferred[Op]:
        """The operators."""
        return Deferred(len(self.call_of), self, self._ops)

    def values(self) -> Deferred[Value]:
        """The values."""
        return Deferred(len(self.spec_of), self, self._values)

    def _ops(self) -> Iterator[Op]:
        columns: tuple[NDArray[Any], ...] = (
            *(self.names, self.call_of, self.is_forward, self.module_of, self.is_view),
            *(self.is_repeated, self.enters_dtensor, self.begins[:-1], self.made_begins),
            self.begins[1:],
        )
        touched, held = self.touched.tolist(), self.held.tolist()
        holds = self.held_begins.tolist()
        rows = zip(*(column.tolist() for column in columns), holds, holds[1:], strict=False)
        for name, call, forward, module, view, again, enters, begin, made, end, *held_in in rows:
            one, other = self.calls[call]
            yield Op(
                name=name,
                call=one,
                other_call=other,
                phase="forward" if forward else "backward",
                module=self.modules[module],
                inputs=tuple(touched[begin:made]),
                outputs=tuple(touched[made:end]),
                is_view=view,
                is_repeated=again,
                holds=tuple(held[slice(*held_in)]),
                enters_dtensor=enters,
            )

    def _values(self) -> Iterator[Value]:
        columns = self.spec_of.tolist(), self.kind.tolist(), self.base.tolist()
        for number, kind, base in zip(*columns, strict=True):
            spec, other = self.specs[number]
            own = None if base < 0 else base
            yield Value(spec=spec, other_spec=other, kind=KINDS[kind], base=own)


class Deferred(Sequence[Item]):
    """Items of some `source`, made once, when the first of them is asked for."""

    __slots__ = ("_count", "_items", "_make", "source")

    def __init__(self, count: int, source: object, make: Callable[[], Iterable[Item]]) -> None:
        self._count, self._make = count, make
        self._items: tuple[Item, ...] | None = None
        self.source = source

    @property
    def items(self) -> tuple[Item, ...]:
        if self._items is None:
            self._items = tuple(self._make())
        return self._items

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        if self._items is None and type(index) is int and isinstance(self.source, Numbered):
            # One of them is there already.
            one: Item = self.source.items[self.source.numbers[index]]
            return one
        return self.items[index]

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Sequence) and self.items == tuple(other))

    def __hash__(self) -> int:
        return hash(self.items)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.items,)


class Numbered(NamedTuple):
    """Some distinct `items`, and the number of the one that stands in each place."""

    items: tuple[Any, ...]
    numbers: Indices

    def gathered(self) -> Deferred[Any]:
        """The item of each place."""
        picked = self.numbers.tolist
        return Deferred(len(self.numbers), self, lambda: map(self.items.__getitem__, picked()))


def _distinct(items: Sequence[Item], numbers: Indices, count: int) -> tuple[Item, ...]:
    source = items.source if isinstance(items, Deferred) else None
    if isinstance(source, Numbered) and source.numbers is numbers:
        return source.items
    return tuple([items[place] for place in first_places(numbers, count).tolist()])


def by_first(items: Indices, count: int) -> tuple[Indices, Indices]:
    """(the distinct ones of items below `count` in order of appearance, the number of each)."""
    first = first_places(items, count)
    distinct = items[first[items] == np.arange(len(items))]
    numbers = np.zeros(count, dtype=np.intp)
    numbers[distinct] = np.arange(len(distinct))
    return distinct, numbers[items]


def first_places(items: Indices, count: int) -> Indices:
    """Where each number below `count` comes first among items; 0 for those that do not."""
    first = np.zeros(count, dtype=np.intp)
    # Of several the first one: the last that is written here.
    first[items[::-1]] = np.arange(len(items))[::-1]
    return first


def _array(numbers: Iterable[int]) -> Indices:
    return np.fromiter(numbers, dtype=np.intp)


def _flags(facts: Iterable[bool]) -> Flags:
    return np.fromiter(facts, dtype=np.bool_)


Pair = TypeVar("Pair", bound=tuple[Hashable, Hashable])


def _numbered(items: Sequence[Pair]) -> tuple[tuple[Pair, ...], Indices]:
    """(the distinct ones in order of appearance, the number of each)."""
    # Equal calls of a saved graph are one object, which is found much faster than an equal one.
    by_object: dict[tuple[int, int], int] = {}
    by_value: dict[Pair, int] = {}
    numbers: list[int] = []
    for item in items:
        objects = id(item[0]), id(item[1])
        number = by_object.get(objects)
        if number is None:
            number = by_object[objects] = by_value.setdefault(item, len(by_value))
        numbers.append(number)
    return tuple(by_value), np.array(numbers, dtype=np.intp)
