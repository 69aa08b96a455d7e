"""Time bare all-reduces of the same processes with their ranks in several orders, taking turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from .launch import place
from .network import Testbed
from .processes import join_node, run_ranks

_STORE_PORT = 29511


def all_reduce_seconds(
    bed: Testbed,
    orders: Sequence[Sequence[str]],
    *,
    size_bytes: int,
    repeats: int = 5,
    timeout_s: float = 600.0,
) -> list[float]:
    """Median seconds of an all-reduce of `size_bytes` in each order of one rank a node.

    All orders name the same nodes. Raises TrainingError if a rank fails, dies or hangs.
    """
    nodes = list(orders[0])
    placed = place(bed, "+".join(f"{node}[0]" for node in nodes))
    arguments = {
        "ranks": [[list(order).index(node) for node in nodes] for order in orders],
        "size_bytes": size_bytes,
        "repeats": repeats,
        "address": bed.address(nodes[0]),
    }
    found = run_ranks(
        bed,
        placed,
        f"{__name__}:time_rank",
        arguments,
        what="timing all-reduces",
        timeout_s=timeout_s,
        imported=(__name__,),
        trains=False,
    )
    # A call lasts until its last rank is through; ranks begin together.
    calls = [[max(times) for times in zip(*each, strict=True)] for each in zip(*found, strict=True)]
    return [statistics.median(times) for times in calls]


def time_rank(place: int, _count: int, arguments: Mapping[str, Any]) -> list[list[float]]:
    """One process: its seconds of every repeat, order by order."""
    import torch
    import torch.distributed as torch_distributed

    dist: Any = torch_distributed
    torch.set_num_threads(1)
    join_node(place, arguments)
    orders, limit = arguments["ranks"], timedelta(seconds=arguments["timeout_s"])
    world_size = len(orders[0])
    store = dist.TCPStore(
        arguments["address"], _STORE_PORT, world_size, is_master=place == 0, timeout=limit
    )
    buffer = torch.ones(arguments["size_bytes"] // 4)
    seconds: list[list[float]] = []
    for number, ranks in enumerate(orders):
        seconds.append([])
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"order{number}", store),
            rank=ranks[place],
            world_size=world_size,
            timeout=limit,
        )
        dist.all_reduce(buffer)
        for _ in range(arguments["repeats"]):
            buffer.fill_(1.0)
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(buffer)
            seconds[-1].append(time.perf_counter() - began)
        dist.destroy_process_group()
    # The store's process is the last one to go.
    store.set(f"done{place}", "")
    if place == 0:
        store.wait([f"done{other}" for other in range(world_size)], limit)
    return seconds
