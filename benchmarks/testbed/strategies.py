"""Train a paced model under several strategies in the same processes, one after the other."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from estimator.units import MIB
from estimator.workload import DDP, Strategy
from estimator.workload.strategies import ParameterServers, ZeRO1

from .launch import place
from .network import Testbed
from .processes import joined, run_ranks, timed_steps

PACE_MODULE = f"{__package__}.paced"


def step_seconds(
    bed: Testbed,
    model: str,
    workers: Sequence[str],
    servers: Sequence[str],
    strategies: Sequence[str],
    *,
    parameter_s: float,
    steps: int = 3,
    timeout_s: float = 600.0,
) -> list[float]:
    """Median seconds of a step of the slowest worker under each strategy; one rank a node.

    ``ps:N`` takes the first N `servers`; under the other strategies servers do nothing. An update
    waits `parameter_s` seconds for each parameter that a rank updates. Raises TrainingError.
    """
    nodes = [*workers, *servers]
    placed = place(bed, "+".join(f"{node}[0]" for node in nodes))
    arguments = {
        "model": model,
        "workers": len(workers),
        "strategies": list(strategies),
        "parameter_s": parameter_s,
        "steps": steps,
    }
    found = run_ranks(
        bed,
        placed,
        f"{__name__}:train_rank",
        arguments,
        what=f"training {model} on the testbed",
        timeout_s=timeout_s,
        imported=(PACE_MODULE, __name__, f"{__package__}.servers"),
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
        parts = [
            _Part(Strategy.parse(text), rank, workers, group, arguments)
            for text in arguments["strategies"]
        ]
        # DDP's first step goes in one bucket.
        return [timed_steps(dist, part.step, warmup=2, steps=arguments["steps"]) for part in parts]


class _Part:
    """What one rank does in a step of one strategy."""

    def __init__(
        self,
        strategy: Strategy,
        rank: int,
        workers: Sequence[int],
        group: Any,
        arguments: Mapping[str, Any],
    ) -> None:
        from . import paced

        built = getattr(paced, arguments["model"])()
        self._model, self._batch = built
        self._optimizer: Any = contextlib.nullcontext()
        self.step = _idle
        parameter_s, share = arguments["parameter_s"], 1.0
        if isinstance(strategy, ParameterServers):
            self._serve(strategy, rank, workers, parameter_s)
        elif rank in workers:
            assert isinstance(strategy, DDP)
            if isinstance(strategy, ZeRO1):
                share = 1.0 / len(workers)
                self._owners = _owners(self._model, workers)
            self._update = paced.PacedUpdate(self._model, parameter_s, share)
            self._group = group
            self._wrap(strategy, group)
            self.step = self._shared_step if isinstance(strategy, ZeRO1) else self._merged_step

    def _wrap(self, strategy: DDP, group: Any) -> None:
        from torch.nn.parallel import DistributedDataParallel

        default = strategy.bucket_cap_bytes == DDP().bucket_cap_bytes
        self._model = DistributedDataParallel(
            self._model,
            process_group=group,
            bucket_cap_mb=None if default else strategy.bucket_cap_bytes / MIB,
            gradient_as_bucket_view=strategy.gradient_as_bucket_view,
        )

    def _serve(
        self, strategy: Strategy, rank: int, workers: Sequence[int], parameter_s: float
    ) -> None:
        from .servers import Server, Worker, bucket_numbers

        buckets = bucket_numbers(self._model, strategy.first_cap_bytes, strategy.bucket_cap_bytes)
        servers = [len(workers) + number for number in range(strategy.servers)]
        if rank in workers:
            self._worker = Worker(self._model, buckets, servers)
            self.step = self._pushing_step
        elif rank in servers:
            self.step = Server(
                self._model,
                buckets,
                workers,
                part=servers.index(rank),
                parts=len(servers),
                parameter_s=parameter_s,
            ).step

    def _merged_step(self) -> None:
        self._update.zero_grad()
        self._model(self._batch).mean().backward()
        self._update.step()

    def _shared_step(self) -> None:
        import torch.distributed as torch_distributed

        dist: Any = torch_distributed
        self._merged_step()
        # As torch.distributed.optim.ZeroRedundancyOptimizer does after its share of the update.
        works = [
            dist.broadcast(parameter.data, src=owner, group=self._group, async_op=True)
            for owner, parameters in self._owners.items()
            for parameter in parameters
        ]
        for work in works:
            work.wait()

    def _pushing_step(self) -> None:
        from .paced import pace

        pace.begin_step()
        self._worker.begin_step()
        self._model(self._batch).mean().backward()
        self._worker.end_step()


def _idle() -> None:
    """What a server does where there is nothing to serve."""


def _owners(model: Any, workers: Sequence[int]) -> dict[int, list[Any]]:
    """Each parameter to the worker with the least so far, the largest first."""
    owners: dict[int, list[Any]] = {worker: [] for worker in workers}
    for parameter in sorted(model.parameters(), key=lambda each: each.numel(), reverse=True):
        least = min(owners, key=lambda worker: sum(each.numel() for each in owners[worker]))
        owners[least].append(parameter)
    return owners
