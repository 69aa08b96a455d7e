"""Tell how torch has divided a module over ranks before it is traced (DTensor).

``parallelize_module`` leaves parameters of which each rank of a mesh holds a part. What a rank does
with its parts is recorded by `rank_record`; the graph keeps the layout that it is of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from estimator.errors import ModelError
from estimator.graph.op_graph import OpGraph
from estimator.graph.ops import Op, Parameter
from estimator.graph.rank_record import RankRecorder
from estimator.machines.profile import DeviceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How a module is divided: the axis of each process group, the modules that DTensor runs."""

    tp: int
    axes: Mapping[str, str]
    modules: frozenset[str]

    @property
    def layout(self) -> str:
        """The text of the layout that a rank's graph is of."""
        return f"tp={self.tp},dp=*"

    def recorder(self, model: nn.Module, fake_mode: Any, target: DeviceKind) -> RankRecorder:
        """A recorder of what one rank does."""
        return RankRecorder(model, fake_mode, target, self.axes)

    def marked(self, graph: OpGraph) -> OpGraph:
        """A rank's graph, told what of it DTensor runs and which layout it is of."""
        entered: set[tuple[str, str]] = set()
        ops = tuple([self._marked(op, entered) for op in graph.ops])
        words = f"{self.layout.removesuffix(',dp=*')} divides layers as the module was divided "
        words += "before it was traced; its collectives overlap nothing, as in eager torch"
        return replace(
            graph,
            ops=ops,
            parameters=tuple([self._of(parameter) for parameter in graph.parameters]),
            layout=self.layout,
            assumptions=(*graph.assumptions, words),
        )

    def _marked(self, op: Op, entered: set[tuple[str, str]]) -> Op:
        call = op.module, op.phase
        if op.module not in self.modules or call in entered:
            return op
        entered.add(call)
        return replace(op, enters_dtensor=True)

    def _of(self, parameter: Parameter) -> Parameter:
        owner = parameter.name.rpartition(".")[0]
        return replace(parameter, is_dtensor=owner in self.modules)


def division_of(model: nn.Module, name: str) -> Division | None:
    """How the parameters of a model are divided, None where they are whole; raises ModelError."""
    found = {
        path: parameter
        for path, parameter in model.named_parameters(remove_duplicate=False)
        if isinstance(parameter, DTensor)
    }
    if not found:
        return None
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ModelError(
            f"{name} is sharded by fully_shard already; trace it before that, and say how it is "
            "sharded by strategy, such as strategy='fsdp'"
        )
    meshes = {parameter.device_mesh for parameter in found.values()}
    if len(meshes) > 1 or next(iter(meshes)).ndim > 1:
        some = ", ".join(sorted({_words(mesh) for mesh in meshes}))
        raise ModelError(
            f"{name} has parameters that are divided over {some}, where one axis of ranks that "
            "share layers can be traced; trace it before it is divided, and name its layout in the "
            "estimate"
        )
    (mesh,) = meshes
    return Division(
        tp=mesh.size(),
        axes={functional._resolve_group_name((mesh, 0)): "tp"},
        modules=frozenset(path.rpartition(".")[0] for path in found),
    )


def _words(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or tuple(f"dimension {each}" for each in range(mesh.ndim))
    sizes = (f"{name} of {size}" for name, size in zip(names, mesh.shape, strict=True))
    return f"a mesh with {' and '.join(sizes)}"


def fake_part(real: Any, fake_of: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor divided as `real` is, of which the rank's part is a fake."""
    return DTensor.from_local(
        fake_of(real.to_local()),
        real.device_mesh,
        real.placements,
        run_check=False,
        shape=real.shape,
        stride=real.stride(),
    )
