"""Sizes of elastic jobs as torchrun and Ray Train take them."""

from __future__ import annotations

from typing import Any

from estimator.errors import ModelError
from estimator.schedulers.sizes import Sizes


def nnodes(found: Sizes) -> str:
    """What ``torchrun --nnodes`` takes: MIN:MAX, or one number where both are the same."""
    if found.least_nodes == found.most_nodes:
        return str(found.least_nodes)
    return f"{found.least_nodes}:{found.most_nodes}"


def torchrun(found: Sizes) -> list[str]:
    """The words of ``torchrun`` that say the size of a job."""
    return ["torchrun", f"--nnodes={nnodes(found)}", f"--nproc-per-node={found.devices}"]


def scaling_config(found: Sizes, **more: Any) -> Any:
    """The ``ray.train.ScalingConfig`` of the most nodes: one worker a device.

    `more` goes to ScalingConfig, as ``placement_strategy`` does. Raises ModelError without ray.
    """
    try:
        from ray.train import ScalingConfig
    except ImportError:
        raise ModelError("a ScalingConfig needs Ray Train; install 'ray[train]'") from None
    is_gpu = found.most.plan.kinds[0].program.profile.kind == "cuda"
    return ScalingConfig(num_workers=found.most.ranks, use_gpu=is_gpu, **more)
