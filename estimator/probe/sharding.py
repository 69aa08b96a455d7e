"""Shard a model for real: FSDP over all ranks, or over groups of them that replicate each other."""

from __future__ import annotations

from typing import Any

from estimator.errors import StrategyError


def shard_model(model: Any, world_size: int, *, shard: int | None = None, kind: str) -> None:
    """FSDP2 on every unit that `shard_units` names, and on the rest of `model`.

    With `shard`, each group of that many successive ranks holds a whole model, and equal places in
    the groups hold the same (HSDP). Collectives are those of a device of `kind`. Raises
    StrategyError if `shard` does not divide the ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from estimator.graph.shards import unit_path

    mesh = None
    if shard not in (None, world_size):
        if shard < 1 or world_size % shard:
            raise StrategyError(
                f"{world_size} ranks cannot shard a model over {shard} each; choose a divisor of "
                f"{world_size}"
            )
        # The last axis goes fastest through the ranks.
        names = ("dp_replicate", "dp_shard")
        mesh = init_device_mesh(kind, (world_size // shard, shard), mesh_dim_names=names)
    for path, module in list(model.named_modules()):
        if path and unit_path(path) == path and any(True for _ in module.parameters()):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
