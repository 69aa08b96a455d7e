"""Record every operator of a training step on fake tensors, at two batch sizes, and join both.

Autograd, user code and Python's frames hold fake tensors from when to when they hold real ones: a
node of autograd all that it saved until it has run, a caller the output of a model until its loss
is there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from estimator.graph.files import check_alike
from estimator.graph.ir.ops import Op, Phase, Value, ValueKind, with_repeated
from estimator.graph.trace.constant_propagation import Constants, flat_results
from estimator.graph.trace.fake_rules import FAKE_RULES, assume_choice, resolve
from estimator.machines.profile import DeviceKind
from estimator.tensors import OpCall, TensorSpec


class Lifetimes:
    """How many tensors stand for each value that owns memory, and after which op none does."""

    def __init__(self) -> None:
        self._alive: Counter[int] = Counter()
        self._released: dict[int, int] = {}

    def appeared(self, root: int) -> None:
        """One more tensor shares the memory of a value."""
        self._alive[root] += 1

    def vanished(self, root: int, op: int) -> None:
        """A tensor that shared it is gone after an op."""
        self._alive[root] -= 1
        if not self._alive[root]:
            self._released[root] = op

    def holds(self, ops: Sequence[RecordedOp], roots: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """By op, the values that are released after it although it does not touch them."""
        last_use: dict[int, int] = {}
        for index, op in enumerate(ops):
            for value in (*op.inputs, *op.outputs):
                last_use[roots[value]] = index
        held: dict[int, list[int]] = {}
        for root, index in self._released.items():
            if index > last_use.get(root, index):
                held.setdefault(index, []).append(root)
        # Autocast's cache lets go of its copies in the order of their addresses.
        return {index: tuple(sorted(values)) for index, values in held.items()}


aten = torch.ops.aten

# Fake tensors are asked for their device more often than operators run.
_DEVICE = torch.ops.prim.device.default
# Queries of fake tensors, and the ranges that optimizers mark for a profiler.
_NOT_RUN = frozenset({"prim", "profiler"})
# What a dispatch mode sees but a step does not run: autograd's shallow copies come past a mode as
# `detach` (c10/core/TensorImpl.cpp, shallow_copy_and_detach_core), literals as `lift_fresh`.
_SAME_TENSOR = frozenset(
    {
        aten.detach.default,
        aten.detach_.default,
        aten.lift.default,
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
    }
)
# Shares its input's storage although its schema does not say so.
_HIDDEN_VIEWS = frozenset(
    {aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default}
)


class RecordedValue(NamedTuple):
    """One tensor; its spec always has strides, as torch gave them."""

    spec: TensorSpec
    kind: ValueKind
    base: int | None


class RecordedOp(NamedTuple):
    """One operator call in issue order, before two batch sizes are joined."""

    call: OpCall
    phase: Phase
    module: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    is_view: bool


@dataclass(frozen=True, slots=True)
class _Traits:
    """What an operator's schema says of aliasing: for each return, the argument it shares."""

    shared: tuple[str | int | None, ...]
    written: tuple[str | int, ...]
    is_view: bool


class _ValueMark:
    """The mark that a recorder leaves on a tensor: which value it stands for.

    It goes with its tensor, which the recorder is told.
    """

    __slots__ = ("owner", "spec", "value")

    def __init__(self, owner: Recorder, value: int, spec: TensorSpec) -> None:
        self.owner, self.value, self.spec = owner, value, spec
        owner._lifetimes.appeared(owner._root(value))

    def __del__(self) -> None:
        self.owner.vanished(self.value)


class Recorder(TorchDispatchMode):
    """Records operators and the tensors between them while it is active inside a fake mode.

    Module paths come from forward hooks; a backward operator gets the module whose forward call
    created its autograd node, found by the node's sequence number.
    """

    def __init__(self, model: nn.Module, fake_mode: Any, target: DeviceKind) -> None:
        super().__init__()
        self.target = target
        self.ops: list[RecordedOp] = []
        self.values: list[RecordedValue] = []
        self.constants = Constants()
        self.fake_mode = fake_mode
        self.phase: Phase = "forward"
        self.module_calls = 0
        self.function_calls = 0
        self.placed = 0
        self._names = {id(module): name for name, module in model.named_modules()}
        self._open: list[str] = []
        self._boundaries: list[int] = [_get_sequence_nr()]
        self._owners: list[str] = [""]
        self._node_modules: dict[int, str] = {}
        self._specs: dict[tuple[Any, ...], TensorSpec] = {}
        self._calls: dict[OpCall, OpCall] = {}
        self._foreign: dict[int, tuple[Tensor, int]] = {}
        self._used: list[int] = []
        self._lifetimes = Lifetimes()
        self.holds: dict[int, tuple[int, ...]] = {}

    # Modules

    def enter_module(self, module: nn.Module, _inputs: Any) -> None:
        """A global forward-pre hook."""
        self.module_calls += 1
        self._open.append(self._names.get(id(module), self.module))
        self._mark_boundary()

    def leave_module(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        """A global forward hook that is always called."""
        if self._open:
            self._open.pop()
        self._mark_boundary()

    def _mark_boundary(self) -> None:
        self._boundaries.append(_get_sequence_nr())
        self._owners.append(self.module)

    @property
    def module(self) -> str:
        """The innermost module being called now."""
        return self._open[-1] if self._open else ""

    def _module_of_op(self) -> str:
        if self.phase == "forward" or self._open:
            return self.module
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ""
        number = node._sequence_nr()
        module = self._node_modules.get(number)
        if module is None:
            # Among boundaries at one sequence number the last one made is in force.
            module = self._owners[max(0, bisect_right(self._boundaries, number) - 1)]
            self._node_modules[number] = module
        return module

    # Tensors

    def place(self, tensor: Tensor, kind: ValueKind) -> int:
        """Give a tensor that exists before the step its value."""
        self.placed += 1
        return self._new_value(tensor, kind, None)

    def index_of(self, tensor: Tensor) -> int | None:
        """The value that a tensor stands for, None if this recorder never saw it."""
        seen: _ValueMark | None = getattr(tensor, "_estimator_value", None)
        return seen.value if seen is not None and seen.owner is self else None

    def gradient_of(self, name: str, parameter: Tensor) -> int | None:
        """The value that the gradient of a parameter stands for, None if it has none."""
        return None if parameter.grad is None else self.index_of(parameter.grad)

    def _spec_of(self, tensor: Tensor) -> TensorSpec:
        strided = tensor.layout is torch.strided
        key = (tensor.shape, tensor.dtype, tensor.stride() if strided else ())
        spec = self._specs.get(key)
        if spec is None:
            shape = tuple(int(size) for size in tensor.shape)
            strides = tuple(int(stride) for stride in key[2]) if strided else None
            spec = TensorSpec(shape, str(tensor.dtype).removeprefix("torch."), strides)
            self._specs[key] = spec
        return spec

    def _new_value(self, tensor: Tensor, kind: ValueKind, base: int | None) -> int:
        spec = self._spec_of(tensor)
        index = len(self.values)
        self.values.append(RecordedValue(spec, kind, base))
        tensor._estimator_value = _ValueMark(self, index, spec)  # type: ignore[attr-defined]
        return index

    def _seen(self, tensor: Tensor) -> tuple[int, TensorSpec]:
        seen: _ValueMark | None = getattr(tensor, "_estimator_value", None)
        if seen is not None and seen.owner is self:
            return seen.value, seen.spec
        held = self._foreign.get(id(tensor))
        if held is not None:
            return held[1], self.values[held[1]].spec
        # A real tensor that the model holds outside its parameters and buffers. It is kept alive,
        # so that its id stays its own, and not marked: it belongs to the user.
        spec = self._spec_of(tensor)
        index = len(self.values)
        self.values.append(RecordedValue(spec, "constant", None))
        self._foreign[id(tensor)] = (tensor, index)
        self.constants.hold(tensor)
        return index, spec

    def _root(self, index: int) -> int:
        base = self.values[index].base
        return index if base is None else base

    def vanished(self, value: int) -> None:
        """A tensor that stood for a value is gone."""
        self._lifetimes.vanished(self._root(value), len(self.ops) - 1)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        roots = [self._root(value) for value in range(len(self.values))]
        self.holds = self._lifetimes.holds(self.ops, roots)

    # Operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if not isinstance(func, OpOverload) or func.namespace in _NOT_RUN:
            return func(*args, **kwargs)
        if func in _SAME_TENSOR:
            return self._pass_through(func, args, kwargs)
        used = self._used = []
        tensors: list[Tensor] = []
        arguments = tuple([self._encode(argument, tensors) for argument in args])
        keywords = tuple([(name, self._encode(value, tensors)) for name, value in kwargs.items()])
        module = self._module_of_op()
        try:
            result = FAKE_RULES.get(func, func)(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            result = resolve(func, args, kwargs, self.constants, self.fake_mode, module)
        traits = _traits_of(func)
        result, produced = self._produced(result, traits, args, kwargs)
        outputs = [self._new_value(tensor, "activation", base) for _, tensor, base, _ in produced]
        self._follow_values(func, args, kwargs, tensors, produced, traits)
        specs = tuple([self.values[index].spec for index in outputs])
        call = OpCall(str(func), arguments, keywords, specs)
        call = self._calls.setdefault(call, call)
        self.ops.append(
            RecordedOp(call, self.phase, module, tuple(used), tuple(outputs), traits.is_view)
        )
        return result

    def _encode(self, argument: Any, tensors: list[Tensor]) -> Any:
        """An argument as a number, text, None, tensor's spec or a tuple of these.

        dtypes, layouts and memory formats become their torch names (``torch.float32``).
        """
        if isinstance(argument, Tensor):
            index, spec = self._seen(argument)
            self._used.append(index)
            tensors.append(argument)
            return spec
        if isinstance(argument, (list, tuple)):
            return tuple([self._encode(item, tensors) for item in argument])
        if argument is None or isinstance(argument, (bool, int, float, str)):
            return argument
        if isinstance(argument, torch.device):
            return self.target if argument.type == "cpu" else str(argument)
        # A repeated call draws from the default generator.
        return None if isinstance(argument, torch.Generator) else str(argument)

    def _pass_through(self, func: Any, args: Any, kwargs: Any) -> Any:
        result, source = func(*args, **kwargs), args[0]
        if source is result:
            return result
        index, spec = self._seen(source)
        result._estimator_value = _ValueMark(self, index, spec)
        constants = self.constants.of(source)
        if constants is not None:
            result._constant = constants
        return result

    def _produced(
        self, result: Any, traits: _Traits, args: Any, kwargs: Any
    ) -> tuple[Any, list[tuple[int, Tensor, int | None, Tensor | None]]]:
        """Each output tensor as (position, tensor, value it shares storage with, that input)."""
        result = _with_unlike_tensors(result)
        flat = flat_results(result)
        single = len(traits.shared) == 1
        produced: list[tuple[int, Tensor, int | None, Tensor | None]] = []
        for position, tensor in enumerate(flat):
            if not isinstance(tensor, Tensor):
                continue
            place = 0 if single else position
            where = traits.shared[place] if place < len(traits.shared) else None
            source = _argument(where, args, kwargs)
            if isinstance(source, (list, tuple)):
                source = source[position] if position < len(source) else None
            base = None
            if isinstance(source, Tensor):
                base = self._root(self._seen(source)[0])
            elif (index := self.index_of(tensor)) is not None:
                base, source = self._root(index), tensor
            produced.append((position, tensor, base, source))
        return result, produced

    def _follow_values(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        produced: list[tuple[int, Tensor, int | None, Tensor | None]],
        traits: _Traits,
    ) -> None:
        if self.phase == "backward" and not self._open:
            return
        if self.constants.knows_result(func, tensors):
            outputs = [(position, tensor, source) for position, tensor, _, source in produced]
            self.constants.follow(func, args, kwargs, outputs)
            return
        for where in traits.written:
            written = _argument(where, args, kwargs)
            for tensor in written if isinstance(written, (list, tuple)) else (written,):
                if isinstance(tensor, Tensor):
                    self.constants.spoil(tensor)
        assume_choice(func, args, kwargs, [tensor for _, tensor, _, _ in produced], self.constants)


def _with_unlike_tensors(result: Any) -> Any:
    """One fake tensor returned twice (mkldnn_rnn_layer_backward) stands for two real ones."""
    if not isinstance(result, tuple) or len({id(item) for item in result}) == len(result):
        return result
    met: set[int] = set()
    unlike = []
    for item in result:
        again = isinstance(item, Tensor) and id(item) in met
        met.add(id(item))
        unlike.append(torch.empty_like(item) if again else item)
    return tuple(unlike)


def _argument(where: str | int | None, args: Any, kwargs: Any) -> Any:
    if where is None:
        return None
    if isinstance(where, int):
        return args[where] if where < len(args) else None
    return kwargs.get(where)


@cache
def _traits_of(func: Any) -> _Traits:
    if func in _HIDDEN_VIEWS:
        return _Traits(shared=(0,), written=(), is_view=True)
    owners: dict[str, str | int] = {}
    written: list[str | int] = []
    list_owner: str | int | None = None
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None:
            where = argument.name if argument.kwarg_only else position
            owners.update(dict.fromkeys(argument.alias_info.before_set, where))
            # A list of views of one argument, as split gives: ``Tensor(a -> *) self``.
            if "*" in argument.alias_info.after_set and not argument.alias_info.is_write:
                list_owner = where
            if argument.alias_info.is_write:
                written.append(where)
    shared: list[str | int | None] = []
    for returned in func._schema.returns:
        names = returned.alias_info.before_set if returned.alias_info is not None else ()
        of_list = list_owner if returned.alias_info is not None and not names else None
        shared.append(next((owners[name] for name in names if name in owners), of_list))
    is_view = not written and any(where is not None for where in shared)
    return _Traits(shared=tuple(shared), written=tuple(written), is_view=is_view)


@contextmanager
def watched_calls(recorder: Recorder) -> Iterator[None]:
    """Note calls of modules, and in the forward pass those of autograd functions in Python."""
    function: Any = torch.autograd.Function
    original = function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        # Those of DTensor are part of what its calls of modules are probed to cost.
        own = not cls.__module__.startswith("torch.distributed.tensor")
        recorder.function_calls += recorder.phase == "forward" and own
        return original.__func__(cls, *args, **kwargs)

    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(recorder.enter_module).remove)
        after = register_module_forward_hook(recorder.leave_module, always_call=True)
        stack.callback(after.remove)
        stack.enter_context(patch.object(function, "apply", classmethod(apply)))
        yield


def unknown_ops(ops: Sequence[Op]) -> tuple[str, ...]:
    """The operators that no formula tells the cost of."""
    from estimator.graph.costs.call_costs import op_cost

    calls = {op.call: op.is_view for op in ops}
    unknown = {call.target for call, view in calls.items() if not view and op_cost(call) is None}
    return tuple(sorted(unknown))


def join_runs(
    first: Recorder, second: Recorder | None
) -> tuple[tuple[Op, ...], tuple[Value, ...], str | None]:
    """(operators, values, why the batch is fixed, if it is) of runs matched op by op.

    Without a match the first stands alone.
    """
    difference = None if second is None else _difference(first, second)
    if second is None or difference is not None:
        second = first
    pairs = _Pairs()
    counts: Counter[str] = Counter()
    ops = []
    for index, (one, two) in enumerate(zip(first.ops, second.ops, strict=True)):
        kind = one.call.name
        counts[kind] += 1
        call, other_call = pairs.calls(one.call, two.call)
        ops.append(
            Op(
                name=f"{kind}_{counts[kind]}",
                call=call,
                other_call=other_call,
                phase=one.phase,
                module=one.module,
                inputs=one.inputs,
                outputs=one.outputs,
                is_view=one.is_view,
                holds=first.holds.get(index, ()),
            )
        )
    values = []
    for left, right in zip(first.values, second.values, strict=True):
        spec, other_spec = pairs.specs(left.spec, right.spec)
        values.append(Value(spec=spec, other_spec=other_spec, kind=left.kind, base=left.base))
    return with_repeated(ops, values), tuple(values), difference


def _difference(first: Recorder, second: Recorder) -> str | None:
    if first.placed != second.placed:
        return "it holds tensors for every sample"
    for position, (one, two) in enumerate(zip(first.ops, second.ops, strict=False)):
        if not _alike(one, two):
            where = f" in module '{one.module}'" if one.module else ""
            target = one.call.target
            if two.call.target != one.call.target:
                target = f"{one.call.target} or {two.call.target}"
            return f"operator {position}{where} depends on it ({target})"
    if len(first.ops) != len(second.ops) or len(first.values) != len(second.values):
        return f"{len(first.ops)} operators become {len(second.ops)} at twice the batch"
    return None


def _alike(one: RecordedOp, two: RecordedOp) -> bool:
    try:
        check_alike(one.call, two.call)
    except ValueError:
        return False
    return (one.inputs, one.outputs) == (two.inputs, two.outputs)


class _Pairs:
    """Pairs of calls and specs in their final form: no strides where both are contiguous."""

    def __init__(self) -> None:
        self._specs: dict[tuple[TensorSpec, TensorSpec], tuple[TensorSpec, TensorSpec]] = {}
        self._calls: dict[tuple[int, int], tuple[OpCall, OpCall]] = {}
        self._unique: dict[OpCall, OpCall] = {}

    def specs(self, one: TensorSpec, two: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
        key = (one, two)
        known = self._specs.get(key)
        if known is None:
            if _is_contiguous(one) and _is_contiguous(two):
                left = TensorSpec(one.shape, one.dtype)
                known = (left, left if two.shape == one.shape else TensorSpec(two.shape, two.dtype))
            else:
                known = (one, one if two == one else two)
            self._specs[key] = known
        return known

    def calls(self, one: OpCall, two: OpCall) -> tuple[OpCall, OpCall]:
        # Recorders keep equal calls once, and alive, so identity stands for equality.
        key = (id(one), id(two))
        known = self._calls.get(key)
        if known is None:
            arguments = self._tree(one.arguments, two.arguments)
            keywords = self._tree(one.keywords, two.keywords)
            outputs = self._tree(one.outputs, two.outputs)
            left = OpCall(one.target, arguments[0], keywords[0], outputs[0])
            right = OpCall(two.target, arguments[1], keywords[1], outputs[1])
            left = self._unique.setdefault(left, left)
            known = self._calls[key] = (left, self._unique.setdefault(right, right))
        return known

    def _tree(self, one: Any, two: Any) -> tuple[Any, Any]:
        if isinstance(one, TensorSpec):
            return self.specs(one, two)
        if isinstance(one, tuple):
            pairs = [self._tree(a, b) for a, b in zip(one, two, strict=True)]
            return tuple([left for left, _ in pairs]), tuple([right for _, right in pairs])
        return one, two


def _is_contiguous(spec: TensorSpec) -> bool:
    if spec.strides is None:
        return True
    expected = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.strides), strict=True):
        if size == 0:
            return True
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
