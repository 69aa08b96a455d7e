"""Trace modules that torch has divided (DTensor) or sharded (``fully_shard``) over ranks.

Operators are those on the rank's own parts. Collectives are noted where DTensor asks torch's
functional ones for them, each with the copies that it makes and no other operator of its own: what
else these cost the host is probed with them (`HostCost.dtensor_exchange_s`).

Between its collectives a sharded module computes with whole parameters, as it would unsharded: they
take their shards' place while it is traced, and its hooks, which gather and reduce, are left out.
What they do is played by the strategy that the graph keeps (`timeline.strategies.fsdp`).

``parallelize_module`` leaves parameters of which each rank of a mesh holds a part. What a rank does
with its parts is recorded by `RankRecorder`; the graph keeps the layout that it is of, and of a
module that ``fully_shard`` has sharded the strategy.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from estimator.errors import ModelError, TraceError
from estimator.graph.ir.collectives import collective_call
from estimator.graph.ir.op_graph import OpGraph, unit_path
from estimator.graph.ir.ops import ValueKind
from estimator.graph.trace.record import RecordedOp, Recorder
from estimator.machines.profile import CollectiveName, DeviceKind
from estimator.tensors import OpCall
from estimator.workload.strategies import FSDP, Strategy

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
        self._patches.enter_context(patch.object(owner, name, made(getattr(owner, name))))

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
        if any(issubclass(kind, Tensor) and kind not in _PLAIN for kind in types):
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
                exchanged_tensor = original(tensor, *args, **kwargs)
            finally:
                self._exchanging = False
            given = signature.bind(tensor, *args, **kwargs).arguments
            along = given.get("gather_dim", given.get("scatter_dim", 0))
            self._note(kind, tensor, exchanged_tensor, self._axis_of(given["group"]), along=along)
            return exchanged_tensor

        return exchanged

    def _axis_of(self, group: Any) -> str:
        axis = self._axes.get(functional._resolve_group_name(group))
        if axis is None:
            raise TraceError(
                f"module '{self.module}' exchanges within a process group that is no axis of the "
                "mesh of its parameters; trace it before it is divided"
            )
        return axis

    def _note(
        self, kind: CollectiveName, given: Tensor, exchanged: Tensor, axis: str, *, along: int
    ) -> None:
        """A collective, with the copy of what it sums and of parts along another dimension."""
        index, spec = self._seen(given)
        if kind == "all_reduce" or (kind == "reduce_scatter" and along):
            index = self._copied(index)
        ordered = kind == "all_gather" and along
        result = self._spec_of(exchanged)
        got = self._added(index) if ordered else self._new_value(exchanged, "activation", None)
        if ordered:
            self.values[got] = self.values[got]._replace(spec=result)
        call = collective_call(kind, axis, spec, result)
        self._record(call, (index,), (got,), is_view=True)
        if ordered:
            final = self._new_value(exchanged, "activation", None)
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


_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _sharding(
    model: nn.Module, groups: Sequence[tuple[str, Any]], name: str
) -> tuple[Strategy, dict[str, DeviceMesh]]:
    """(its strategy, the mesh of each parameter that is divided too); raises ModelError."""
    strategies = {_strategy(group, name) for path, group in groups if path} or {
        _strategy(group, name) for _, group in groups
    }
    if len(strategies) > 1:
        some = ", ".join(sorted(map(str, strategies)))
        raise ModelError(
            f"{name} has modules that are sharded unlike each other ({some}); shard all of them by "
            "the same arguments"
        )
    _check_units(model, [path for path, _ in groups], name)
    specs = {
        id(parameter.sharded_param): _spec_of(parameter)
        for _, group in groups
        for parameter in group.fsdp_params
    }
    meshes = {
        path: spec.mesh
        for path, parameter in model.named_parameters(remove_duplicate=False)
        if (spec := specs[id(parameter)]) is not None
    }
    return strategies.pop(), meshes


def _groups(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(path of its module, group of parameters that are gathered together), in order."""
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            # torch 2.13 keeps several to a state where it kept one.
            several = getattr(state, "_fsdp_param_groups", None)
            group = state._fsdp_param_group if several is None else None
            for one in several if several is not None else [group] if group else []:
                yield path, one


def _strategy(group: Any, name: str) -> Strategy:
    info, after = group.mesh_info, group.post_forward_mesh_info
    if after is not None and after is not info and after != info:
        raise ModelError(
            f"{name} is sharded over fewer ranks after its forward pass (reshard_after_forward="
            f"{after.shard_mesh_size}), which has no estimate; leave that to True or False"
        )
    policy = group.mp_policy
    for what in ("param_dtype", "reduce_dtype"):
        dtype = getattr(policy, what)
        if dtype is not None and dtype not in _DTYPES:
            raise ModelError(
                f"{name} is sharded with {what}={dtype}, found none of "
                f"{', '.join(_DTYPES.values())}; choose one of these"
            )
    return FSDP(
        shard=info.shard_mesh_size if info.replicate_mesh_dim is not None else None,
        reshard_after_forward=after is not None,
        param=_DTYPES.get(policy.param_dtype),
        reduce=_DTYPES.get(policy.reduce_dtype),
        offload=isinstance(group.offload_policy, CPUOffloadPolicy),
    )


def _check_units(model: nn.Module, paths: list[str], name: str) -> None:
    """Raise ModelError unless each repeated block is a unit, and the rest of the model one."""
    owners = (path.rpartition(".")[0] for path, _ in model.named_parameters())
    expected = {unit_path(owner) for owner in owners}
    if set(paths) != expected:
        raise ModelError(
            f"{name} is sharded in the units {_listed(set(paths))}, found parameters of the "
            f"repeated blocks {_listed(expected)}; call fully_shard on each of these and on the "
            "model"
        )


def _listed(paths: set[str]) -> str:
    some = [f"'{path}'" if path else "the rest" for path in sorted(paths)]
    return ", ".join(some[:3]) + (f" and {len(some) - 3} more" if len(some) > 3 else "")


def _spec_of(parameter: Any) -> Any:
    """How what is gathered of a shard is divided over another axis; None where it is whole."""
    # By its names in torch up to 2.12, and since.
    for attribute in ("_tp_spec", "_unsharded_dtensor_spec"):
        if (spec := getattr(parameter, attribute, None)) is not None:
            return spec
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How a module is divided, and sharded by a strategy, over ranks.

    `axes` names the axis of each process group that layers' collectives are of, `modules` are those
    that DTensor runs.
    """

    tp: int = 1
    axes: Mapping[str, str] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()
    strategy: Strategy | None = None

    def precision(self, wanted: str) -> str:
        """The precision of what is gathered of a sharded model, which is otherwise as asked."""
        gathered = None if self.strategy is None else self.strategy.gathered_dtype
        return gathered if gathered is not None and wanted == "fp32" else wanted

    def gather(self, model: nn.Module) -> None:
        """Have a model that is sharded hold whole parameters, without hooks; the caller undoes it.

        Within a fake mode: what is put in place of shards holds no data.
        """
        made: dict[int, nn.Parameter] = {}
        for _, group in _groups(model):
            for parameter in group.fsdp_params:
                shard: Tensor = parameter.sharded_param
                local = torch.empty(parameter._orig_size, dtype=shard.dtype)
                spec = _spec_of(parameter)
                if spec is not None:
                    local = _divided(local, spec.mesh, spec.placements, spec.shape, spec.stride)
                made[id(shard)] = nn.Parameter(local, requires_grad=shard.requires_grad)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                state: Any = module._get_fsdp_state()
                state._pre_forward_hook_handle.remove()
                state._post_forward_hook_handle.remove()
            for key, held in module._parameters.items():
                if id(held) in made:
                    module._parameters[key] = made[id(held)]

    def recorder(self, model: nn.Module, fake_mode: Any, target: DeviceKind) -> Recorder:
        """A recorder of what one rank does."""
        return RankRecorder(model, fake_mode, target, self.axes)

    def marked(self, graph: OpGraph) -> OpGraph:
        """A rank's graph, told what of it DTensor runs and which layout it is of."""
        entered: set[tuple[str, str]] = set()
        ops, assumptions = [], []
        for op in graph.ops:
            if op.module in self.modules and (op.module, op.phase) not in entered:
                entered.add((op.module, op.phase))
                op = replace(op, enters_dtensor=True)
            ops.append(op)
        if self.tp > 1:
            assumptions.append(
                f"tp={self.tp} divides layers as the module was divided before it was traced; its "
                "collectives overlap nothing, as in eager torch"
            )
        if self.strategy is not None:
            assumptions.append(f"'{self.strategy}' as the module was sharded before it was traced")
        return replace(
            graph,
            ops=tuple(ops),
            parameters=tuple(
                replace(each, is_dtensor=each.name.rpartition(".")[0] in self.modules)
                for each in graph.parameters
            ),
            layout=f"tp={self.tp},dp=*" if self.tp > 1 else None,
            strategy=None if self.strategy is None else str(self.strategy),
            assumptions=(*graph.assumptions, *assumptions),
        )


def division_of(model: nn.Module, name: str) -> Division:
    """How the parameters of a model are divided; raises ModelError."""
    groups, strategy = list(_groups(model)), None
    if groups:
        strategy, meshes = _sharding(model, groups, name)
    else:
        meshes = {
            path: parameter.device_mesh
            for path, parameter in model.named_parameters(remove_duplicate=False)
            if isinstance(parameter, DTensor)
        }
    if not meshes:
        return Division(strategy=strategy)
    unlike = set(meshes.values())
    mesh = next(iter(unlike))
    if len(unlike) > 1 or mesh.ndim > 1:
        some = ", ".join(sorted(map(_words, unlike)))
        raise ModelError(
            f"{name} has parameters that are divided over {some}, where one axis of ranks that "
            "share layers can be traced; trace it before it is divided, and name its layout in the "
            "estimate"
        )
    return Division(
        tp=mesh.size(),
        axes={functional._resolve_group_name((mesh, 0)): "tp"},
        modules=frozenset(path.rpartition(".")[0] for path in meshes),
        strategy=strategy,
    )


def _words(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or tuple(f"dimension {number}" for number in range(mesh.ndim))
    sizes = (f"{name} of {size}" for name, size in zip(names, mesh.shape, strict=True))
    return f"a mesh with {' and '.join(sizes)}"


def fake_part(real: Any, fake_of: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor divided as `real` is, of which the rank's part is a fake."""
    part = fake_of(real.to_local())
    return _divided(part, real.device_mesh, real.placements, real.shape, real.stride())


def _divided(local: Tensor, mesh: DeviceMesh, placements: Any, shape: Any, stride: Any) -> Tensor:
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
