"""Record what one rank does of a step whose tensors torch divides over a mesh (DTensor).

Operators are those on the rank's own parts. Collectives are noted where DTensor asks torch's
functional ones for them, each with the copies that it makes and no other operator of its own: what
else these cost the host is probed with them (`HostCost.dtensor_exchange_s`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from estimator.errors import TraceError
from estimator.graph.exchanges import collective_call
from estimator.graph.ops import ValueKind
from estimator.graph.record import RecordedOp, Recorder
from estimator.machines.profile import CollectiveName, DeviceKind
from estimator.tensors import OpCall

# By each of their names: `*_tensor` is deprecated since torch 2.13.
_FUNCTIONS: dict[str, CollectiveName] = {
    "all_reduce": "all_reduce",
    "all_gather_single": "all_gather",
    "all_gather_tensor": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
# What torch issues inside of the functions above.
_NAMESPACES = ("_c10d_functional", "c10d", "_dtensor")
_VIEW = torch.ops.aten.view.default
_DTENSOR = "torch.distributed.tensor."
# Where calls pass on their way to a mode.
_BELOW = ("estimator.", "torch.overrides", "torch.utils._", "torch._compile", "torch._dynamo.")


class RankRecorder(Recorder):
    """A recorder of the parts that one rank has; `axes` names the axis of each process group."""

    def __init__(
        self, model: nn.Module, fake_mode: Any, target: DeviceKind, axes: Mapping[str, str]
    ) -> None:
        super().__init__(model, fake_mode, target)
        self._axes = axes
        self._patches = ExitStack()
        self._exchanging = False

    def __enter__(self) -> Any:
        self._replace(ShardingPropagator, "_propagate_tensor_meta_non_cached", _unseen)
        for name, kind in _FUNCTIONS.items():
            if hasattr(functional, name):
                self._replace(functional, name, partial(self._exchange, kind))
        return super().__enter__()

    def _replace(self, owner: Any, name: str, made: Callable[[Any], Any]) -> None:
        """Put what is made of a function of torch in its place, until the recording ends."""
        original = getattr(owner, name)
        setattr(owner, name, made(original))
        self._patches.callback(setattr, owner, name, original)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def place(self, tensor: Tensor, kind: ValueKind) -> int:
        """As of any recorder; of a divided tensor the rank's part is placed."""
        return super().place(local_part(tensor), kind)

    def index_of(self, tensor: Tensor) -> int | None:
        """As of any recorder, by the rank's part."""
        return super().index_of(local_part(tensor))

    def gradient_of(self, name: str, parameter: Tensor) -> int | None:
        """The value of a gradient; what ranks have terms of is summed first.

        An optimizer of torch does so when it takes the gradient.
        """
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            self._open.append(name.rpartition(".")[0])
            gradient = gradient.redistribute(placements=parameter.placements)
            self._open.pop()
        return None if gradient is None else self.index_of(gradient)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, Tensor) and each not in _PLAIN for each in types):
            # A subclass works first; its operators on plain tensors come here then.
            return NotImplemented
        if self._exchanging:
            return func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") in _NAMESPACES:
            raise TraceError(
                f"module '{self.module}' calls {func}, which no rule tells the cost of; trace the "
                "module before it is divided, and name the layout in the estimate"
            )
        if func is _VIEW and _called_in().startswith(_DTENSOR):
            # DTensor takes a tensor in, and gives it out, as a view of the same shape; what that
            # costs the host is probed with its calls (`HostCost.dtensor_forward_s`).
            return self._pass_through(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    # Collectives

    def _exchange(self, kind: CollectiveName, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def exchanged(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._exchanging:
                return original(tensor, *args, **kwargs)
            self._exchanging = True
            try:
                found = original(tensor, *args, **kwargs)
            finally:
                self._exchanging = False
            given = signature.bind(tensor, *args, **kwargs).arguments
            along = given.get("gather_dim", given.get("scatter_dim", 0))
            self._note(kind, tensor, found, self._axis_of(given["group"]), along=along)
            return found

        return exchanged

    def _axis_of(self, group: Any) -> str:
        found = self._axes.get(functional._resolve_group_name(group))
        if found is None:
            raise TraceError(
                f"module '{self.module}' exchanges within a process group that is no axis of the "
                "mesh of its parameters; trace it before it is divided"
            )
        return found

    def _note(
        self, kind: CollectiveName, given: Tensor, found: Tensor, axis: str, *, along: int
    ) -> None:
        """A collective, with the copy of what it sums and of parts along another dimension."""
        index, spec = self._seen(given)
        if kind == "all_reduce" or (kind == "reduce_scatter" and along):
            index = self._copied(index)
        ordered = kind == "all_gather" and along
        result = self._spec_of(found)
        got = self._added(index) if ordered else self._new_value(found, "activation", None)
        if ordered:
            self.values[got] = self.values[got]._replace(spec=result)
        call = collective_call(kind, axis, spec, result)
        self._record(call, (index,), (got,), is_view=True)
        if ordered:
            final = self._new_value(found, "activation", None)
            self._record(OpCall("aten.clone.default", (result,), (), (result,)), (got,), (final,))

    def _copied(self, index: int) -> int:
        spec, new = self.values[index].spec, self._added(index)
        self._record(OpCall("aten.clone.default", (spec,), (), (spec,)), (index,), (new,))
        return new

    def _added(self, index: int) -> int:
        self.values.append(self.values[index]._replace(kind="activation", base=None))
        return len(self.values) - 1

    def _record(
        self,
        call: OpCall,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        *,
        is_view: bool = False,
    ) -> None:
        call = self._calls.setdefault(call, call)
        module = self._module_of_op()
        self.ops.append(RecordedOp(call, self.phase, module, inputs, outputs, is_view))


_PLAIN = (Tensor, nn.Parameter, FakeTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What one rank holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _called_in() -> str:
    """The module of the Python function that an operator is called in."""
    frame: FrameType | None = sys._getframe(1)
    name = ""
    while frame is not None and (not name or name.startswith(_BELOW)):
        name, frame = frame.f_globals.get("__name__", ""), frame.f_back
    return name


def _unseen(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function that finds the shapes of whole tensors, which no rank computes."""

    def unseen(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(*args, **kwargs)

    return unseen
