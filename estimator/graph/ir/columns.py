"""Hold the operators and values of a graph in arrays, and make each of them when it is asked for.

A graph of thousands of operators is cut and divided again and again, most of which only needs who
reads what: graphs made so have their operators in columns, where equal calls stand once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, get_args, overload

import numpy as np
from numpy.typing import NDArray

from estimator.elementwise import Flags, Indices
from estimator.graph.ir.ops import Op, Value, ValueKind
from estimator.tensors import OpCall, TensorSpec

Item = TypeVar("Item")
KINDS: tuple[ValueKind, ...] = get_args(ValueKind)
ACTIVATION, INPUT = KINDS.index("activation"), KINDS.index("input")


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
        if (
            isinstance(ops, Deferred)
            and isinstance(values, Deferred)
            and ops.columns is values.columns
        ):
            return ops.columns
        calls, call_of = _numbered([op.calls for op in ops])
        specs, spec_of = _numbered([value.specs for value in values])
        inputs = _array(len(op.inputs) for op in ops)
        outputs = _array(len(op.outputs) for op in ops)
        modules: dict[str, int] = {}
        codes = {kind: code for code, kind in enumerate(KINDS)}
        numbers = np.arange(len(ops))
        return cls(
            names=_objects([op.name for op in ops]),
            calls=calls,
            call_of=call_of,
            specs=specs,
            spec_of=spec_of,
            # Numbers first: they fill the names.
            module_of=_array(modules.setdefault(op.module, len(modules)) for op in ops),
            modules=tuple(modules),
            is_forward=_flags(op.phase == "forward" for op in ops),
            is_repeated=_flags(op.is_repeated for op in ops),
            is_view=_flags(op.is_view for op in ops),
            enters_dtensor=_flags(op.enters_dtensor for op in ops),
            touched=_array(value for op in ops for value in (*op.inputs, *op.outputs)),
            touched_by=np.repeat(numbers, inputs + outputs),
            is_made=np.repeat(
                np.tile([False, True], len(ops)), np.stack([inputs, outputs], axis=1).ravel()
            ),
            held=_array(value for op in ops for value in op.holds),
            held_by=np.repeat(numbers, _array(len(op.holds) for op in ops)),
            base=_array(
                -1 if value.base is None or value.base == number else value.base
                for number, value in enumerate(values)
            ),
            kind=_array(codes[value.kind] for value in values),
        )

    def distinct_calls(self, calls: Sequence[OpCall]) -> tuple[OpCall, ...]:
        """The distinct ones of the calls of all ops at a batch size, by number."""
        return _distinct(calls, self.call_of, len(self.calls))

    def distinct_specs(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """The same of the shapes of all values."""
        return _distinct(specs, self.spec_of, len(self.specs))

    def of_calls(self, facts: Iterable[bool]) -> Flags:
        """For each op what is known of its call."""
        return np.fromiter(facts, dtype=np.bool_, count=len(self.calls))[self.call_of]

    def read_by(self, op: int) -> list[int]:
        """The values that an op reads."""
        read: list[int] = self.touched[self.begins[op] : self.made_begins[op]].tolist()
        return read

    def ops(self) -> Deferred[Op]:
        """The operators."""
        return Deferred(len(self.call_of), self, lambda: tuple(self._ops()))

    def values(self) -> Deferred[Value]:
        """The values."""
        return Deferred(len(self.spec_of), self, lambda: tuple(self._values()))

    def _ops(self) -> Iterator[Op]:
        columns: tuple[NDArray[Any], ...] = (
            *(self.names, self.call_of, self.is_forward, self.module_of, self.is_view),
            *(self.is_repeated, self.enters_dtensor, self.begins[:-1], self.made_begins),
            self.begins[1:],
        )
        touched, held = self.touched.tolist(), self.held.tolist()
        holds = np.searchsorted(self.held_by, np.arange(len(self.call_of) + 1)).tolist()
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


class Gathered(Sequence[Item]):
    """Some distinct `items`, each as often as its number comes in `numbers`."""

    __slots__ = ("items", "numbers")

    def __init__(self, items: Sequence[Item], numbers: Indices) -> None:
        self.items, self.numbers = items, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        if isinstance(index, slice):
            return tuple(Gathered(self.items, self.numbers[index]))
        return self.items[self.numbers[index]]

    def __iter__(self) -> Iterator[Item]:
        return map(self.items.__getitem__, self.numbers.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class Deferred(Sequence[Item]):
    """The items of some columns, made once, when the first of them is asked for."""

    __slots__ = ("_count", "_items", "_make", "columns")

    def __init__(
        self, count: int, columns: GraphColumns, make: Callable[[], tuple[Item, ...]]
    ) -> None:
        self._count, self._make = count, make
        self._items: tuple[Item, ...] | None = None
        self.columns = columns

    @property
    def items(self) -> tuple[Item, ...]:
        if self._items is None:
            self._items = self._make()
        return self._items

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        return self.items[index]

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            self.items == (other.items if isinstance(other, Deferred) else other)
        )

    def __hash__(self) -> int:
        return hash(self.items)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.items,)


def _distinct(items: Sequence[Item], numbers: Indices, count: int) -> tuple[Item, ...]:
    if isinstance(items, Gathered) and items.numbers is numbers:
        return tuple(items.items)
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


def _objects(items: Sequence[str]) -> NDArray[np.object_]:
    array = np.empty(len(items), dtype=np.object_)
    array[:] = items
    return array


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
