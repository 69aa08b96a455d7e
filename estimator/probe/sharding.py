"""Shard a model for real: FSDP over all ranks, or over groups of them that replicate each other."""

from __future__ import annotations

from typing import Any

from estimator.errors import StrategyError
from estimator.workload import Strategy


def shard_model(model: Any, world_size: int, strategy: Strategy, *, kind: str) -> None:
    """FSDP2 on every unit that `shard_units` names, and on the rest of `model`.

    With a number of shards, each group of that many successive ranks holds a whole model, and equal
    places in the groups hold the same (HSDP). Collectives are those of a device of `kind`. Raises
    StrategyError if the shards do not divide the ranks.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from estimator.graph.shards import unit_path

    mesh, shard = None, strategy.shard
    if shard is not None and shard != world_size:
        if world_size % shard:
            raise StrategyError(
                f"{world_size} ranks cannot shard a model over {shard} each; choose a divisor of "
                f"{world_size}"
            )
        # The last axis goes fastest through the ranks.
        names = ("dp_replicate", "dp_shard")
        mesh = init_device_mesh(kind, (world_size // shard, shard), mesh_dim_names=names)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    policy = MixedPrecisionPolicy(
        param_dtype=dtypes[strategy.param] if strategy.param else None,
        reduce_dtype=dtypes[strategy.reduce] if strategy.reduce else None,
    )
    for path, module in list(model.named_modules()):
        if path and unit_path(path) == path and any(True for _ in module.parameters()):
            reshard = strategy.reshard_after_forward
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
