"""Replay the same jobs under many policies and seeds, here or on the workers of an executor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from estimator.cluster.jobs import Job
from estimator.cluster.nodes import Nodes
from estimator.cluster.replay import Costs, Ran, Replay
from estimator.cluster.speeds import Speeds
from estimator.cluster.view import Policy
from estimator.tables.workers import map_shared


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """What one replay has of its own; see `Replay`."""

    policy: Policy
    true: Speeds
    believed: Speeds
    costs: Costs = field(default_factory=Costs)
    seed: int = 0


def replay_many(
    jobs: Sequence[Job], nodes: Nodes, cases: Iterable[Case], *, executor: Executor | None = None
) -> Iterator[list[Ran]]:
    """What became of the jobs in each case, in order.

    With an `executor` (a process pool, ``dask.distributed``'s ``Client.get_executor()``,
    ``mpi4py.futures``) each of its workers is sent the jobs once; what a worker that died had is
    done again. Raises WorkloadError where a case cannot be sent, and what a replay raises.
    """
    for _, ran in map_shared(executor, _ran, (tuple(jobs), nodes), cases):
        yield ran


def _ran(shared: tuple[tuple[Job, ...], Nodes], kept: dict[str, Any], case: Case) -> list[Ran]:
    jobs, nodes = shared
    return Replay(
        jobs,
        nodes,
        case.policy,
        true=case.true,
        believed=case.believed,
        costs=case.costs,
        seed=case.seed,
    ).run()
