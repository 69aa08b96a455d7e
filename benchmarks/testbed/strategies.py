"""Train a paced model under several strategies in the same processes, one after the other."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from estimator.units import MIB
from estimator.workload.strategies import DDP, ParameterServers, Strategy, ZeRO1

from .network import Testbed
from .processes import PACED, joined, run_ranks, timed_steps


def step_seconds(
    bed: Testbed,
    model: str,
    workers: Sequence[str],
    servers: Sequence[str],
    strategies: Sequence[str],
    *,
    parameter_s: float,
    steps: int = 3,
) -> list[float]:
    """Median seconds of a step of the slowest worker under each strategy; one rank a node.

    ``ps:N`` takes the first N `servers`; under the other strategies servers do nothing. An update
    waits `parameter_s` seconds for each parameter that a rank updates. Raises TrainingError.
    """
    arguments = {
        "model": model,
        "workers": len(workers),
        "strategies": list(strategies),
        "parameter_s": parameter_s,
        "steps": steps,
    }
    found = run_ranks(
        bed,
        "+".join(f"{node}[0]" for node in (*workers, *servers)),
        f"{__name__}:train_rank",
        arguments,
        what=f"training {model} on the testbed",
        imported=(PACED, f"{__package__}.servers"),
    )
    return [
        max(statistics.median(times) for times in ranks)
        for ranks in zip(*found[: len(workers)], strict=True)
    ]


def train_rank(rank: int, _count: int, arguments: Mapping[str, Any]) -> list[list[float]]:
    """One rank: its seconds of every step that counts, strategy by strategy."""
    with joined(rank, arguments) as dist:
        workers = list(range(arguments["workers"]))
        group = dist.new_group(workers, timeout=timedelta(seconds=arguments["timeout_s"]))
        steps = [
            _step_of(Strategy.parse(text), rank, workers, group, arguments)
            for text in arguments["strategies"]
        ]
        # DDP's first step goes in one bucket.
        return [timed_steps(dist, step, warmup=2, steps=arguments["steps"]) for step in steps]


def _step_of(
    strategy: Strategy, rank: int, workers: Sequence[int], group: Any, arguments: Mapping[str, Any]
) -> Callable[[], None]:
    """What one rank does in a step of one strategy; a server that serves nobody does nothing."""
    import torch.distributed as torch_distributed
    from torch.nn.parallel import DistributedDataParallel

    from . import paced

    dist: Any = torch_distributed
    model, batch = getattr(paced, arguments["model"])()
    if isinstance(strategy, ParameterServers):
        return _served_step(strategy, model, batch, rank, workers, arguments["parameter_s"])
    if rank not in workers:
        return lambda: None
    assert isinstance(strategy, DDP)
    owners = _owners(model, workers) if isinstance(strategy, ZeRO1) else {}
    update = paced.PacedUpdate(model, arguments["parameter_s"], 1 / max(len(owners), 1))
    default = strategy.bucket_cap_bytes == DDP().bucket_cap_bytes
    replica = DistributedDataParallel(
        model,
        process_group=group,
        bucket_cap_mb=None if default else strategy.bucket_cap_bytes / MIB,
        gradient_as_bucket_view=strategy.gradient_as_bucket_view,
    )

    def step() -> None:
        update.zero_grad()
        replica(batch).mean().backward()
        update.step()
        # As torch.distributed.optim.ZeroRedundancyOptimizer does after its share of the update.
        works = [
            dist.broadcast(parameter.data, src=owner, group=group, async_op=True)
            for owner, parameters in owners.items()
            for parameter in parameters
        ]
        for work in works:
            work.wait()

    return step


def _served_step(
    strategy: ParameterServers,
    model: Any,
    batch: Any,
    rank: int,
    workers: Sequence[int],
    parameter_s: float,
) -> Callable[[], None]:
    """A step of a worker that pushes gradients, of a server, or of one that has nothing to do."""
    from .paced import pace
    from .servers import Server, Worker, bucket_numbers

    buckets = bucket_numbers(model, strategy.first_cap_bytes, strategy.bucket_cap_bytes)
    servers = [len(workers) + number for number in range(strategy.servers)]
    if rank in servers:
        part = {"part": servers.index(rank), "parts": len(servers)}
        return Server(model, buckets, workers, **part, parameter_s=parameter_s).step
    if rank not in workers:
        return lambda: None
    worker = Worker(model, buckets, servers)

    def step() -> None:
        pace.restart()
        worker.begin_step()
        model(batch).mean().backward()
        worker.end_step()

    return step


def _owners(model: Any, workers: Sequence[int]) -> dict[int, list[Any]]:
    """Each parameter to the worker with the least so far, the largest first."""
    owners: dict[int, list[Any]] = {worker: [] for worker in workers}
    for parameter in sorted(model.parameters(), key=lambda each: each.numel(), reverse=True):
        least = min(owners, key=lambda worker: sum(each.numel() for each in owners[worker]))
        owners[least].append(parameter)
    return owners
