"""What a policy is shown of the cluster when it plans, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from estimator.errors import WorkloadError
from estimator.replay.jobs import Job
from estimator.replay.nodes import AllocationShape, Nodes
from estimator.replay.speeds import EngineSpeeds, Speeds

CurveKey = tuple[str, int | None, int | None]


@dataclass(frozen=True, slots=True)
class Grant:
    """Devices for a job: how many, of which machine type, and another global batch if chosen.

    `also` has devices of further machine types, on which the job trains at once, the batch split by
    speed. `on` names nodes by their index and the devices of each; without it the cluster's rule
    places.
    """

    count: int
    machine: str
    global_batch: int | None = None
    on: tuple[tuple[int, int], ...] | None = None
    also: tuple[tuple[str, int], ...] = ()

    @property
    def devices(self) -> int:
        """Devices of all machine types."""
        return self.count + sum(count for _, count in self.also)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Each machine type with its devices."""
        return ((self.machine, self.count), *self.also)


@dataclass(slots=True, kw_only=True, eq=False)
class Waiting:
    """A job that is not finished, as policies see it; `grant` is what it holds, if anything."""

    job: Job
    remaining_samples: float
    attained_device_s: float = 0.0
    grant: Grant | None = None
    restarts: int = 0

    @property
    def count(self) -> int:
        """Devices that the job holds."""
        return self.grant.devices if self.grant else 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """Unfinished jobs in the order of arrival, the cluster, and speeds as they are believed.

    Where `pool` names a machine type the view is of its devices alone; see `of`.
    """

    now_s: float
    jobs: Sequence[Waiting]
    nodes: Nodes
    believed: Speeds
    # Curves of each job by machine, its size and the global batch, and counts between: kept between
    # plans until what is believed of the job changes.
    known: dict[str, dict[CurveKey, dict[int, float]]] = field(default_factory=dict)
    pool: str | None = None

    @property
    def machines(self) -> tuple[str, ...]:
        """The machine types of the cluster, or that of the pool."""
        return self.nodes.machines if self.pool is None else (self.pool,)

    @property
    def machine(self) -> str:
        """The one machine type; raises WorkloadError where the cluster has several."""
        if len(self.machines) > 1:
            raise WorkloadError(
                f"the cluster has {', '.join(self.machines)}; say of which machine type, or plan "
                "for view.of(machine, jobs)"
            )
        return self.machines[0]

    def of(self, machine: str, jobs: Sequence[Waiting]) -> View:
        """Some jobs on the devices of one machine type."""
        return replace(self, jobs=jobs, pool=machine)

    def counts(self, job: Job, machine: str | None = None) -> list[int]:
        """Counts worth considering: powers of two, and what was asked for."""
        return job.counts(self.nodes.total(machine or self.machine))

    def samples_per_s(
        self,
        job: Job,
        counts: Sequence[int],
        machine: str | None = None,
        global_batch: int | None = None,
    ) -> list[float]:
        """Believed throughput on counts packed onto as few nodes as can be; 0: it does not fit."""
        kind = machine or self.machine
        shapes: list[AllocationShape] = [self.nodes.packed(kind, count) for count in counts]
        batch = global_batch or job.global_batch
        return [
            batch / seconds for seconds in self.believed.step_times_s(job, shapes, global_batch)
        ]

    def curve(
        self, job: Job, machine: str | None = None, global_batch: int | None = None
    ) -> dict[int, float]:
        """Believed throughput by count, counts rising; counts on which the job fits."""
        kind = machine or self.machine
        known = self.known.setdefault(job.name, {})
        key = kind, self.nodes.total(kind), global_batch
        if key not in known:
            counts = self.counts(job, kind)
            rates = self.samples_per_s(job, counts, kind, global_batch)
            known[key] = {count: rate for count, rate in zip(counts, rates) if rate > 0}
        return known[key]

    def rate(
        self,
        job: Job,
        count: int,
        machine: str | None = None,
        global_batch: int | None = None,
    ) -> float:
        """Believed throughput on any one count; 0 where the job does not fit.

        Of a batch chosen for one count no other counts are asked.
        """
        kind = machine or self.machine
        known = self.known.setdefault(job.name, {})
        if global_batch is None:
            known_rates = self.curve(job, kind)
        else:
            known_rates = known.get((kind, self.nodes.total(kind), global_batch), {})
        if count in known_rates:
            return known_rates[count]
        between = known.setdefault((kind, None, global_batch), {})
        if count not in between:
            between[count] = self.samples_per_s(job, [count], kind, global_batch)[0]
        return between[count]

    def ask(self, rates: Iterable[tuple[Job, int, int | None]]) -> None:
        """Have rates of (job, count, global batch) worked out together, where speeds can do that.

        `rate` finds them then; without it each is asked for by itself.
        """
        if not isinstance(self.believed, EngineSpeeds):
            return
        kind, known = self.machine, self.known
        missing = {
            (job, count, batch)
            for job, count, batch in rates
            if count not in known.get(job.name, {}).get((kind, None, batch), ())
        }
        packed = self.nodes.packed
        # A set of jobs has another order in each process.
        ordered = sorted(missing, key=lambda rate: (rate[0].name, rate[1], rate[2] or 0))
        self.believed.ask((job, packed(kind, count), batch) for job, count, batch in ordered)

    def rate_of(self, job: Job, grant: Grant) -> float:
        """Believed throughput on a grant, of several machine types too, packed."""
        first, *others = (self.nodes.packed(*part) for part in grant.parts)
        shape = first._replace(also=tuple(others))
        (step_s,) = self.believed.step_times_s(job, [shape], grant.global_batch)
        return job.useful_samples(grant.global_batch) / step_s

    def request(self, job: Job) -> int:
        """What the job asked for, or where that fits nowhere the next count that does."""
        sizes = {machine: self.nodes.size(machine) for machine in self.machines}

        def fits(count: int) -> bool:
            return any(count <= sizes[m] and self.rate(job, count, m) > 0 for m in sizes)

        if fits(job.devices):
            return job.devices
        counts = job.counts(max(sizes.values()))
        return next((n for n in counts if n > job.devices and fits(n)), job.devices)


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
