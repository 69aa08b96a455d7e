"""Time bare all-reduces of ranks in a given order."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .network import Testbed
from .processes import joined, run_ranks, timed_steps


def all_reduce_s(
    bed: Testbed,
    hosts: Sequence[str],
    *,
    size_bytes: int,
    repeats: int = 5,
) -> float:
    """Median seconds of an all-reduce of `size_bytes` over one rank of each host, in this order.

    Raises TrainingError if a rank fails, dies or hangs.
    """
    found = run_ranks(
        bed,
        "+".join(f"{host}[0]" for host in hosts),
        f"{__name__}:time_rank",
        {"size_bytes": size_bytes, "repeats": repeats},
        what="timing all-reduces",
        trains=False,
    )
    # A call lasts until its last rank is through; ranks begin together.
    return statistics.median(max(times) for times in zip(*found, strict=True))


def time_rank(rank: int, _count: int, arguments: Mapping[str, Any]) -> list[float]:
    """One process: its seconds of every repeat."""
    import torch

    buffer = torch.zeros(arguments["size_bytes"] // 4)
    with joined(rank, arguments) as dist:

        def step() -> None:
            dist.all_reduce(buffer)

        return timed_steps(dist, step, warmup=1, steps=arguments["repeats"])
