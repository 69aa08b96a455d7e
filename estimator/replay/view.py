"""What a policy is shown of the cluster when it plans, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from estimator.replay.jobs import Job
from estimator.replay.nodes import AllocationShape, Nodes
from estimator.replay.speeds import Speeds

CurveKey = tuple[str, int | None, int | None]


@dataclass(frozen=True, slots=True)
class Grant:
    """Devices for a job: how many, of which machine type, and another global batch if chosen.

    `on` names nodes by their index and the devices of each; without it the cluster's rule places.
    """

    count: int
    machine: str
    global_batch: int | None = None
    on: tuple[tuple[int, int], ...] | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Waiting:
    """A job that is not finished, as policies see it; `grant` is what it holds, if anything."""

    job: Job
    remaining_samples: float
    attained_device_s: float = 0.0
    grant: Grant | None = None

    @property
    def count(self) -> int:
        """Devices that the job holds."""
        return self.grant.count if self.grant else 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """Unfinished jobs in the order of arrival, the cluster, and speeds as they are believed."""

    now_s: float
    jobs: Sequence[Waiting]
    nodes: Nodes
    believed: Speeds
    # Curves of each job by machine, its size and the global batch, and counts between: kept between
    # plans until what is believed of the job changes.
    known: dict[str, dict[CurveKey, dict[int, float]]] = field(default_factory=dict)

    @property
    def machine(self) -> str:
        """The machine type of a cluster that has one."""
        return self.nodes.machines[0]

    def counts(self, job: Job, machine: str | None = None) -> list[int]:
        """Counts worth considering: powers of two, whole nodes, and what was asked for."""
        most = min(job.highest_count, self.nodes.total(machine or self.machine))
        return counts_up_to(most, job.devices)

    def samples_per_s(
        self,
        job: Job,
        counts: Sequence[int],
        machine: str | None = None,
        global_batch: int | None = None,
    ) -> list[float]:
        """Believed throughput on counts packed onto as few nodes as can be."""
        kind = machine or self.machine
        shapes: list[AllocationShape] = [self.nodes.packed(kind, count) for count in counts]
        batch = global_batch or job.global_batch
        return [
            batch / seconds for seconds in self.believed.step_times_s(job, shapes, global_batch)
        ]

    def curve(
        self, job: Job, machine: str | None = None, global_batch: int | None = None
    ) -> dict[int, float]:
        """Believed throughput by count, counts rising."""
        kind = machine or self.machine
        known = self.known.setdefault(job.name, {})
        key = kind, self.nodes.total(kind), global_batch
        if key not in known:
            counts = self.counts(job, kind)
            rates = self.samples_per_s(job, counts, kind, global_batch)
            known[key] = dict(zip(counts, rates, strict=True))
        return known[key]

    def rate(self, job: Job, count: int, machine: str | None = None) -> float:
        """Believed throughput on any one count."""
        curve = self.curve(job, machine)
        if count in curve:
            return curve[count]
        between = self.known[job.name].setdefault((machine or self.machine, None, None), {})
        if count not in between:
            between[count] = self.samples_per_s(job, [count], machine)[0]
        return between[count]


class Policy(Protocol):
    """Says what every job should hold now; a job left out holds nothing.

    `interval_s` is the length of its scheduling rounds; 0 plans at every arrival and end.
    `moves_jobs`: running jobs may be moved to make room on one node for a larger one.
    """

    interval_s: float
    moves_jobs: bool

    def plan(self, view: View) -> Mapping[str, Grant]:
        """Grants by the name of the job, together within the cluster."""
        ...


@dataclass(slots=True)
class PlanOf:
    """A user's function of a view, as a policy that plans at every arrival and end."""

    function: Callable[[View], Mapping[str, Grant]]
    interval_s: float = 0.0
    moves_jobs: bool = True

    def plan(self, view: View) -> Mapping[str, Grant]:
        """What the function answers."""
        return self.function(view)


def counts_up_to(most: int, asked: int) -> list[int]:
    """Powers of two up to `most`, and `asked`.

    >>> counts_up_to(20, 6)
    [1, 2, 4, 6, 8, 16]
    """
    powers = {1 << power for power in range(most.bit_length())}
    return sorted(powers | ({asked} if asked <= most else set()))
