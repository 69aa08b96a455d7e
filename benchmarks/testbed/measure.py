"""Train models for real on an allocation of a testbed, and time their steps."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from control_groups import control_group, join

from estimator.errors import TrainingError
from estimator.placement.allocation import Allocation
from estimator.validate.training import Training, time_steps, transformers_modules
from estimator.workload.optimizers import check_optimizer
from estimator.workload.strategies import Strategy

from .launch import MASTER_PORT
from .network import Testbed
from .processes import PACED, joined, run_ranks

_PACED = "paced:"
_PERIOD_US = 10_000


def measure(
    bed: Testbed,
    model: str,
    allocation: str | Allocation,
    *,
    batch: int | Sequence[int] | None = None,
    strategy: str | Strategy = "ddp",
    optimizer: str = "sgd",
    accumulation_steps: int = 1,
    merges_gradients: bool = True,
    steps: int = 15,
    warmup_steps: int = 3,
    port: int = MASTER_PORT,
) -> float:
    """Median seconds of a step of the slowest rank on an allocation such as ``n0[0,1]+n1[0]``.

    `model` is ``paced:NAME`` or any MODEL text, trained in fresh processes; up to as many computing
    ranks as there are cores have a core each. `batch` is of every rank, or one number for each.
    Without `merges_gradients` every micro-batch runs without gradient sync, which leaves a step
    under DDP without its communication and one under FSDP with its gatherings alone. Jobs that run
    at once have a `port` each.
    Raises TrainingError if a rank fails, dies or hangs.
    """
    is_paced = model.startswith(_PACED)
    ratios = [node.slowdown_ratio for node, _ in bed.description.placement(allocation)]
    if not is_paced:
        _check_cores(len(ratios))
    arguments = {
        "model": model.replace(_PACED, f"{PACED}:") if is_paced else model,
        "batches": list(batch) if isinstance(batch, Sequence) else [batch] * len(ratios),
        "seq_len": None,
        "kind": "cpu",
        "optimizer": check_optimizer(optimizer),
        "precision": "fp32",
        "strategy": str(Strategy.parse(strategy)),
        "steps": steps,
        "warmup_steps": warmup_steps,
        "accumulation_steps": accumulation_steps,
        "merges_gradients": merges_gradients,
        "is_paced": is_paced,
        "slowdown_ratios": ratios,
    }
    with rationed(bed, [1.0 if is_paced else ratio for ratio in ratios]) as groups:
        found = run_ranks(
            bed,
            allocation,
            f"{__name__}:train_rank",
            {**arguments, "groups": groups},
            what=f"training {model} on {allocation}",
            imported=(PACED, *transformers_modules()),
            alone=not is_paced,
            port=port,
        )
    return max(statistics.median(times) for times in found)


@contextlib.contextmanager
def rationed(bed: Testbed, ratios: Sequence[float]) -> Iterator[list[str | None]]:
    """For each rank a group whose processes get 1/ratio of a core in every 10 ms, None for 1.

    They compute `ratio` times as long, whatever they compute (CFS bandwidth control); paced ranks
    wait that long instead.
    """
    with contextlib.ExitStack() as stack:
        groups: list[str | None] = []
        for rank, ratio in enumerate(ratios):
            quota_us = round(_PERIOD_US / ratio)
            limits = {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(quota_us)}
            group = control_group("cpu", f"{bed.prefix}{rank}", limits)
            groups.append(None if ratio == 1.0 else str(stack.enter_context(group)))
        yield groups


def _check_cores(ranks: int) -> None:
    cores = os.cpu_count() or 1
    if ranks > cores:
        raise TrainingError(
            f"{ranks} ranks that compute do not fit on {cores} cores; use a paced model"
        )


def train_rank(rank: int, world_size: int, arguments: Mapping[str, Any]) -> list[float]:
    """One rank, in its own process: its seconds of every step after its warm-up."""
    import torch

    from estimator.probe.devices.backend import keep_memory_resident

    from . import paced

    is_paced = arguments["is_paced"]
    with joined(rank, arguments):
        if group := arguments["groups"][rank]:
            join(group)
        if is_paced:
            paced.pace.slowdown_ratio = arguments["slowdown_ratios"][rank]
        keep_memory_resident()
        torch.manual_seed(0)
        training = Training({**arguments, "batch": arguments["batches"][rank]}, world_size)
        training.merges_gradients = arguments["merges_gradients"]
        if is_paced:
            training.optimizer = paced.PacedUpdate(training.model)
        with paced.pausing_at_collectives() if is_paced else contextlib.nullcontext():
            return time_steps(training, arguments, world_size)["step_times_s"]  # type: ignore[no-any-return]
