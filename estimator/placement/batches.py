"""Divide the samples of a step over data-parallel ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from estimator.errors import WorkloadError, quoted
from estimator.placement.mesh import Mesh
from estimator.workload import MOST_GLOBAL_BATCH, check_count


def batches_of(
    traced: int | None,
    mesh: Mesh,
    batch_per_gpu: int | Sequence[int] | None,
    global_batch: int | None,
    accumulation_steps: int,
) -> tuple[int, ...] | None:
    """Samples per rank and micro-batch of each group of the allocation.

    By default as many as were `traced`, None for a fixed batch. Raises WorkloadError.
    """
    placement = mesh.placement
    groups = len(placement.allocation.groups)
    if batch_per_gpu is not None and global_batch is not None:
        raise WorkloadError("give either the batch per device or the global batch, not both")
    if global_batch is not None:
        global_batch = check_count(global_batch, "global batch", most=MOST_GLOBAL_BATCH)
        return (even_batch(mesh, global_batch, accumulation_steps),) * groups
    if batch_per_gpu is None:
        return None if traced is None else (traced,) * groups
    given: Any = batch_per_gpu
    if isinstance(given, str) or not isinstance(given, Sequence):
        return (check_count(given),) * groups
    if len(given) != groups:
        raise WorkloadError(
            f"{len(given)} batches were given for '{placement.allocation}', whose groups are "
            f"{groups}; give one for each group, or one number for all"
        )
    if mesh.parallelism.dp != placement.ranks and len(set(given)) > 1:
        raise WorkloadError(
            f"ranks that share layers work on the same samples, found batches {quoted(given)}; "
            "give one number for all"
        )
    return tuple(map(check_count, given))


def even_batch(mesh: Mesh, global_batch: int, accumulation_steps: int) -> int:
    """Samples per rank and micro-batch; raises WorkloadError where that is no whole number."""
    placement, ranks = mesh.placement, mesh.parallelism.dp
    shares = ranks * accumulation_steps
    if global_batch % shares:
        by_speed, kind = "", "ranks" if ranks == placement.ranks else "data-parallel ranks"
        if placement.is_mixed and global_batch >= shares:
            by_speed = ", or ask 'estimate', which splits by speed"
        raise WorkloadError(
            f"global batch {global_batch} cannot be split evenly over {ranks} {kind} and "
            f"{accumulation_steps} accumulation steps; use a multiple of {shares}{by_speed}"
        )
    return check_count(global_batch // shares)
