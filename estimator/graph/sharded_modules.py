"""Tell how ``fully_shard`` (FSDP2) has sharded a module, and trace it as if it had not.

Between its collectives a sharded module computes with whole parameters, as it would unsharded: they
take their shards' place while it is traced, and its hooks, which gather and reduce, are left out.
What they do is played by the strategy that the graph keeps (`timeline.strategies.fsdp`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from estimator.errors import ModelError
from estimator.graph.shards import unit_path
from estimator.workload import Strategy

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a module is sharded: its strategy, and of its layers' mesh where they are divided too.

    `divided` are the whole parameters that ranks of another axis hold parts of, by name.
    """

    strategy: Strategy
    divided: dict[str, Any]


def sharding_of(model: nn.Module, name: str) -> Sharding | None:
    """How a model is sharded, None if ``fully_shard`` was not called; raises ModelError."""
    groups = list(_groups(model))
    if not groups:
        return None
    found = {_strategy(group, name) for path, group in groups if path} or {
        _strategy(group, name) for _, group in groups
    }
    if len(found) > 1:
        some = ", ".join(sorted(map(str, found)))
        raise ModelError(
            f"{name} has modules that are sharded unlike each other ({some}); shard all of them by "
            "the same arguments"
        )
    _check_units(model, [path for path, _ in groups], name)
    whole = {id(each.sharded_param): each for _, group in groups for each in group.fsdp_params}
    divided = {
        path: spec
        for path, parameter in model.named_parameters(remove_duplicate=False)
        if (spec := _spec_of(whole[id(parameter)])) is not None
    }
    return Sharding(strategy=found.pop(), divided=divided)


def unshard(model: nn.Module) -> None:
    """Put whole parameters in place of shards, and take the hooks away; the caller puts both back.

    Within a fake mode: what is put there holds no data.
    """
    made: dict[int, nn.Parameter] = {}
    for _, group in _groups(model):
        for each in group.fsdp_params:
            made[id(each.sharded_param)] = _whole(each)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
        for key, parameter in module._parameters.items():
            if id(parameter) in made:
                module._parameters[key] = made[id(parameter)]


def _groups(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(path of its module, group of parameters that are gathered together), in order."""
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            # torch 2.13 keeps several to a state where it kept one.
            several = getattr(state, "_fsdp_param_groups", None)
            group = state._fsdp_param_group if several is None else None
            for each in several if several is not None else [group] if group else []:
                yield path, each


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
    return Strategy(
        kind="fsdp",
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


def _whole(parameter: Any) -> nn.Parameter:
    shard: Tensor = parameter.sharded_param
    local = torch.empty(parameter._orig_size, dtype=shard.dtype)
    spec = _spec_of(parameter)
    if spec is not None:
        local = DTensor.from_local(
            local,
            spec.mesh,
            spec.placements,
            run_check=False,
            shape=spec.shape,
            stride=spec.stride,
        )
    return nn.Parameter(local, requires_grad=shard.requires_grad)
