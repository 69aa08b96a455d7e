"""Tell how torch has divided a module over ranks before it is traced (DTensor).

``parallelize_module`` leaves parameters of which each rank of a mesh holds a part. What a rank does
with its parts is recorded by `rank_record`; the graph keeps the layout that it is of, and of a
module that ``fully_shard`` has sharded the strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from estimator.errors import ModelError
from estimator.graph.op_graph import OpGraph
from estimator.graph.ops import Op, Parameter
from estimator.graph.rank_record import RankRecorder
from estimator.graph.record import Recorder
from estimator.graph.sharded_modules import sharding_of, unshard
from estimator.machines.profile import DeviceKind
from estimator.workload import Strategy


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

    def precision(self, asked: str) -> str:
        """The precision of what is gathered of a sharded model, which is otherwise as asked."""
        gathered = None if self.strategy is None else self.strategy.param
        return gathered if gathered is not None and asked == "fp32" else asked

    def gather(self, model: nn.Module) -> None:
        """Have a model that is sharded hold whole parameters; the caller puts it back."""
        if self.strategy is not None:
            unshard(model)

    def recorder(self, model: nn.Module, fake_mode: Any, target: DeviceKind) -> Recorder:
        """A recorder of what one rank does."""
        return RankRecorder(model, fake_mode, target, self.axes)

    def marked(self, graph: OpGraph) -> OpGraph:
        """A rank's graph, told what of it DTensor runs and which layout it is of."""
        entered: set[tuple[str, str]] = set()
        assumptions = []
        if self.tp > 1:
            assumptions.append(
                f"tp={self.tp} divides layers as the module was divided before it was traced; its "
                "collectives overlap nothing, as in eager torch"
            )
        if self.strategy is not None:
            assumptions.append(f"'{self.strategy}' as the module was sharded before it was traced")
        return replace(
            graph,
            ops=tuple([self._marked(op, entered) for op in graph.ops]),
            parameters=tuple([self._of(parameter) for parameter in graph.parameters]),
            layout=f"tp={self.tp},dp=*" if self.tp > 1 else None,
            strategy=None if self.strategy is None else str(self.strategy),
            assumptions=(*graph.assumptions, *assumptions),
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


def division_of(model: nn.Module, name: str) -> Division:
    """How the parameters of a model are divided; raises ModelError."""
    sharding = sharding_of(model, name)
    if sharding is not None:
        meshes = {path: spec.mesh for path, spec in sharding.divided.items()}
    else:
        meshes = {
            path: parameter.device_mesh
            for path, parameter in model.named_parameters(remove_duplicate=False)
            if isinstance(parameter, DTensor)
        }
    strategy = None if sharding is None else sharding.strategy
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
