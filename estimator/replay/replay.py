"""Replay jobs on a cluster: arrivals, allocations, progress at true speeds, failures, metrics."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from estimator.errors import UserCode, WorkloadError, quoted
from estimator.replay.jobs import Job, check_names
from estimator.replay.nodes import AllocationShape, Nodes
from estimator.replay.speeds import SharedLinks, Speeds
from estimator.replay.view import CurveKey, Grant, Policy, View, Waiting

Steps = Generator[Any, Any, None]
Report = Callable[[str, float], None]
_MOST_IDLE_PLANS = 1000
# Three years: the longest stay on devices. Policies that plan in rounds plan all through it.
_MOST_RUN_S = 1e8
# Of nodes, in a row, without the end of a job.
_MOST_FAILURES = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What starting again costs, and what fails.

    A job that has run before spends `restart_s` on its devices before it trains again. It keeps a
    checkpoint when a policy takes its devices, else one every `checkpoint_s` of training (0: at
    all times); a failed node loses what came after the last. Each node fails after `node_mtbf_s` of
    its time on average (None: never) and is back `repair_s` later.
    """

    restart_s: float = 30.0
    checkpoint_s: float = 600.0
    node_mtbf_s: float | None = None
    repair_s: float = 3600.0

    def restart_of(self, job: Job) -> float:
        """The job's own restart, or that of all."""
        return self.restart_s if job.restart_s is None else job.restart_s

    def checkpoint_of(self, job: Job) -> float:
        """The time between the job's own checkpoints, or that of all."""
        return self.checkpoint_s if job.checkpoint_s is None else job.checkpoint_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A job on the same devices from start to end; it trains from `trains_from_s` on."""

    job: str
    start_s: float
    trains_from_s: float
    end_s: float
    shape: AllocationShape
    given: Mapping[int, int]
    samples: float
    lost_samples: float
    global_batch: int | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Ran:
    """What became of a job."""

    job: Job
    finish_s: float = 0.0
    segments: list[Segment] = field(default_factory=list)

    @property
    def completion_s(self) -> float:
        """From arrival to end."""
        return self.finish_s - self.job.arrival_s

    @property
    def waited_s(self) -> float:
        """Time without devices."""
        return self.completion_s - sum(s.end_s - s.start_s for s in self.segments)


@dataclass(slots=True, kw_only=True, eq=False)
class _Running:
    """A job's hold on devices: where, how fast, since when.

    It has trained `counted` samples until `since_s`, and goes on in steps of `step_s`, which other
    jobs on its links make longer than `alone_s`.
    """

    process: Any
    given: Mapping[int, int]
    shape: AllocationShape
    grant: Grant
    useful_batch: float
    alone_s: float
    step_s: float
    start_s: float
    trains_from_s: float
    since_s: float
    counted: float = 0.0

    def trained_s(self, until_s: float) -> float:
        """Time spent training, restart apart."""
        return max(until_s - self.trains_from_s, 0.0)

    def samples(self, until_s: float) -> float:
        """What is trained until then."""
        return self.counted + self.samples_in(max(until_s - self.since_s, 0.0))

    def samples_in(self, seconds: float) -> float:
        """What is trained in some time at the speed of now."""
        return seconds * self.useful_batch / self.step_s


class Replay:
    """One replay; `run` goes on to the end of the last job and says what became of each.

    The same jobs, speeds, policy and seed give the same result. `true` advances jobs, `believed` is
    what the policy sees; if it has `observe`, it is told the step times of running jobs before
    every plan. With `links` jobs on nodes in common, or below uplinks in common, slow each other.
    Raises WorkloadError where SimPy is missing or a policy plans the impossible.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        nodes: Nodes,
        policy: Policy,
        *,
        true: Speeds,
        believed: Speeds,
        costs: Costs | None = None,
        seed: int = 0,
        report: Report | None = None,
        links: SharedLinks | None = None,
    ) -> None:
        check_names(job.name for job in jobs)
        self.jobs = sorted(jobs, key=lambda job: job.arrival_s)
        self.nodes, self.policy = nodes, policy
        self.true, self.believed = true, believed
        self.costs = costs or Costs()
        self.ran = {job.name: Ran(job=job) for job in self.jobs}
        # Nodes that failed: (index, from, to).
        self.outages: list[tuple[int, float, float]] = []
        self._report, self._links = report, links
        self._simpy = _simpy()
        self._env = self._simpy.Environment()
        self._waiting: dict[str, Waiting] = {}
        self._running: dict[str, _Running] = {}
        self._due = self._env.event()
        self._rng = np.random.default_rng(seed)
        self._left = len(self.jobs)
        self._idle_plans = 0
        self._failed = 0
        self._known: dict[str, dict[CurveKey, dict[int, float]]] = {}

    def run(self) -> list[Ran]:
        """Run until every job has ended."""
        for job in self.jobs:
            self._check_fits(job)
        if self.jobs:
            self._env.process(self._arrivals())
            planner = self._env.process(self._planner())
            if self.costs.node_mtbf_s is not None:
                for index in range(len(self.nodes.nodes)):
                    self._env.process(self._failures(index, self.costs.node_mtbf_s))
            self._env.run(until=planner)
        return list(self.ran.values())

    def _check_fits(self, job: Job) -> None:
        """Refuse a job that no count of any machine type can hold."""
        sizes = {machine: self.nodes.size(machine) for machine in self.nodes.machines}
        for counts in ([job.devices], job.counts(max(sizes.values()))):
            for machine, size in sizes.items():
                shapes = [self.nodes.packed(machine, count) for count in counts if count <= size]
                if any(map(math.isfinite, self.true.step_times_s(job, shapes))):
                    return
        if job.devices > max(sizes.values()):
            # What waits for more devices than there are is said when nothing else runs.
            return
        raise WorkloadError(
            f"job '{job.name}' fits on no count of {' or '.join(sizes)}: {job.graph.name} needs "
            "more memory; give a machine type with more, a smaller most_batch_per_gpu, or a "
            "strategy that shards"
        )

    # What happens by itself

    def _arrivals(self) -> Steps:
        for job in self.jobs:
            if job.arrival_s > self._env.now:
                yield self._env.timeout(job.arrival_s - self._env.now)
            self._waiting[job.name] = Waiting(job=job, remaining_samples=job.samples)
            self._wake()

    def _failures(self, index: int, mtbf_s: float) -> Steps:
        while True:
            yield self._env.timeout(self._rng.exponential(mtbf_s))
            self._failed += 1
            if self._failed > _MOST_FAILURES:
                raise WorkloadError(
                    f"nodes that fail every {mtbf_s:g} s let no job end; raise that time"
                )
            for name in list(self.nodes.holders[index]):
                self._stop(name, planned=False)
            self.nodes.set_down(index, True)
            self._share_links()
            now = self._env.now
            self.outages.append((index, now, now + self.costs.repair_s))
            self._wake()
            yield self._env.timeout(self.costs.repair_s)
            self.nodes.set_down(index, False)
            self._wake()

    def _training(self, name: str, seconds: float) -> Steps:
        try:
            yield self._env.timeout(seconds)
        except self._simpy.Interrupt:
            return
        self._keep_segment(name, self._waiting[name].remaining_samples, 0.0)
        del self._waiting[name]
        self._known.pop(name, None)
        self.ran[name].finish_s = self._env.now
        self._share_links()
        self._left -= 1
        self._failed = 0
        if self._report is not None:
            done = len(self.jobs) - self._left
            self._report(f"{done} of {len(self.jobs)} jobs", done / len(self.jobs))
        self._wake()

    def _wake(self) -> None:
        if not self._due.triggered:
            self._due.succeed()

    # What the policy does

    def _planner(self) -> Steps:
        interval_s = self.policy.interval_s
        while self._left:
            yield self._due
            if interval_s:
                # Sums of times are rounded: what is a round's start is not the next one's.
                turn = math.ceil(self._env.now / interval_s - 1e-6)
                yield self._env.timeout(max(turn * interval_s - self._env.now, 0.0))
            # After everything else that happens at this time.
            yield self._env.timeout(0)
            self._due = self._env.event()
            self._plan()
            self._check_progress()
            if interval_s and self._waiting:
                self._env.process(self._next_round(interval_s))

    def _next_round(self, interval_s: float) -> Steps:
        yield self._env.timeout(interval_s)
        self._wake()

    def _plan(self) -> None:
        view = self._view()
        with UserCode("the policy failed", advice="correct it", error=WorkloadError):
            grants = self.policy.plan(view)
        self._check(grants)
        for name in [n for n, held in self._running.items() if grants.get(n) != held.grant]:
            self._stop(name, planned=True)
        # The largest first: what is left between them has room for the small ones.
        starting = [(name, grant) for name, grant in grants.items() if name not in self._running]
        settled: set[str] = set()
        number = itertools.count()
        for name, grant in starting:
            if grant.on is not None:
                self._start(name, grant)
                settled.add(name)
        queue = [(-g.devices, next(number), name, g) for name, g in starting if g.on is None]
        heapq.heapify(queue)
        while queue:
            _, _, name, grant = heapq.heappop(queue)
            for moved in self._in_the_way(grant, settled):
                held = self._running[moved].grant
                heapq.heappush(queue, (-held.devices, next(number), moved, held))
                self._stop(moved, planned=True)
            self._start(name, grant)
            settled.add(name)
        self._share_links()

    def _in_the_way(self, grant: Grant, settled: Iterable[str]) -> list[str]:
        """Jobs to move so that the granted devices are on one node, where that can be."""
        if not self.policy.moves_jobs or self.nodes.rule == "spread":
            return []
        on_one_node = min(grant.count, self.nodes.per_node(grant.machine))
        if self.nodes.most_free_on_a_node(grant.machine) >= on_one_node:
            return []
        return self.nodes.in_the_way(on_one_node, grant.machine, frozenset(settled))

    def _view(self) -> View:
        now = self._env.now
        observe = getattr(self.believed, "observe", None)
        jobs = []
        for name, waiting in self._waiting.items():
            held = self._running.get(name)
            if held is None:
                jobs.append(waiting)
                continue
            trained_s = held.trained_s(now)
            seen = held.shape, held.step_s, held.grant.global_batch
            if observe is not None and trained_s:
                for changed in observe(waiting.job, *seen):
                    self._known.pop(changed, None)
            jobs.append(
                Waiting(
                    job=waiting.job,
                    remaining_samples=waiting.remaining_samples - held.samples(now),
                    attained_device_s=waiting.attained_device_s
                    + held.grant.devices * (now - held.start_s),
                    grant=held.grant,
                    restarts=waiting.restarts,
                )
            )
        return View(
            now_s=now, jobs=jobs, nodes=self.nodes, believed=self.believed, known=self._known
        )

    def _check(self, grants: Mapping[str, Grant]) -> None:
        if not isinstance(grants, Mapping):
            raise WorkloadError(
                f"the policy answers a {type(grants).__name__}; return the Grant of each job's name"
            )
        given = dict.fromkeys(self.nodes.machines, 0)
        for name, grant in grants.items():
            if not (isinstance(grant, Grant) and isinstance(grant.count, int)):
                raise WorkloadError(
                    f"the policy grants {quoted(grant)}; give a Grant of a whole number of devices"
                )
            if name not in self._waiting:
                raise WorkloadError(
                    f"the policy grants devices to '{name}', which is not waiting; "
                    "grant only to jobs of the view"
                )
            job = self._waiting[name].job
            replicas = (grant.global_batch or job.global_batch) * job.replica_ranks
            least, most = job.lowest_count, min(job.highest_count, replicas)
            if not (grant.count >= 1 and least <= grant.devices <= most):
                raise WorkloadError(
                    f"the policy grants {grant.devices} devices to '{name}', which can use {least} "
                    f"to {most}; leave out jobs that get none"
                )
            for machine, count in grant.parts:
                if machine not in given:
                    raise WorkloadError(
                        f"the policy grants devices of '{machine}', which the cluster does not "
                        f"have; use {' or '.join(given)}"
                    )
                given[machine] += count
        for machine, count in given.items():
            if count > self.nodes.total(machine):
                raise WorkloadError(
                    f"the policy grants {count} devices of {machine} and the cluster has "
                    f"{self.nodes.total(machine)}; plan within the cluster"
                )

    def _check_progress(self) -> None:
        """A policy that lets an empty cluster wait would be replayed for ever."""
        is_idle = bool(self._waiting) and not self._running and not any(self.nodes.is_down)
        self._idle_plans = self._idle_plans + 1 if is_idle else 0
        nothing_comes = not self.policy.interval_s and self._env.peek() == math.inf
        if is_idle and (nothing_comes or self._idle_plans > _MOST_IDLE_PLANS):
            raise WorkloadError(
                f"the policy leaves {len(self._waiting)} jobs waiting on an empty cluster, such as "
                f"'{next(iter(self._waiting))}'; grant devices to jobs that fit, or ask for fewer"
            )

    # Progress

    def _start(self, name: str, grant: Grant) -> None:
        waiting, now, nodes = self._waiting[name], self._env.now, self.nodes.nodes
        given: dict[int, int] = {}
        for machine, count in grant.parts:
            on = grant.on and tuple(
                (node, devices)
                for node, devices in grant.on
                if node >= len(nodes) or nodes[node].machine == machine
            )
            given |= self.nodes.take(name, count, machine, on)
        shape = self.nodes.shape(given)
        (step_s,) = self.true.step_times_s(waiting.job, [shape], grant.global_batch)
        if math.isinf(step_s):
            raise WorkloadError(
                f"the policy grants {shape} to '{name}', which does not fit there; grant counts of "
                "its curve"
            )
        restart_s = self.costs.restart_of(waiting.job) if self.ran[name].segments else 0.0
        waiting.restarts = len(self.ran[name].segments)
        batch = waiting.job.useful_samples(grant.global_batch)
        seconds = restart_s + waiting.remaining_samples * step_s / batch
        if not seconds <= _MOST_RUN_S:
            raise WorkloadError(
                f"job '{name}' would train for {seconds:.3g} s on {shape}, and a replay plays at "
                f"most {_MOST_RUN_S:g} s of one job; check its samples"
            )
        self._running[name] = _Running(
            process=self._env.process(self._training(name, seconds)),
            given=given,
            shape=shape,
            grant=grant,
            useful_batch=batch,
            alone_s=step_s,
            step_s=step_s,
            start_s=now,
            trains_from_s=now + restart_s,
            since_s=now + restart_s,
        )

    def _share_links(self) -> None:
        """Let jobs go on at the speeds that those on the same links leave them."""
        if self._links is None:
            return
        now = self._env.now
        running = {
            name: (self._waiting[name].job, held.given, held.grant.global_batch)
            for name, held in self._running.items()
        }
        for name, ratio in self._links.slowdowns(running).items():
            held = self._running[name]
            if held.step_s == held.alone_s * ratio:
                continue
            held.counted, held.since_s = held.samples(now), max(now, held.trains_from_s)
            held.step_s = held.alone_s * ratio
            held.process.interrupt()
            left = max(self._waiting[name].remaining_samples - held.counted, 0.0)
            seconds = held.since_s - now + left * held.step_s / held.useful_batch
            held.process = self._env.process(self._training(name, seconds))

    def _stop(self, name: str, *, planned: bool) -> None:
        """Take a job's devices; unplanned, it falls back to its last checkpoint."""
        held, waiting = self._running[name], self._waiting[name]
        held.process.interrupt()
        trained_s = held.trained_s(self._env.now)
        every_s = self.costs.checkpoint_of(waiting.job)
        lost_s = 0.0 if planned or not every_s else trained_s % every_s
        lost = min(held.samples_in(lost_s), held.samples(self._env.now))
        samples = min(held.samples(self._env.now) - lost, waiting.remaining_samples)
        self._keep_segment(name, samples, lost)
        waiting.remaining_samples -= samples

    def _keep_segment(self, name: str, samples: float, lost_samples: float) -> None:
        held = self._running.pop(name)
        now = self._env.now
        self.nodes.release(name, held.given)
        self._waiting[name].attained_device_s += held.grant.devices * (now - held.start_s)
        self.ran[name].segments.append(
            Segment(
                job=name,
                start_s=held.start_s,
                trains_from_s=min(held.trains_from_s, now),
                end_s=now,
                shape=held.shape,
                given=held.given,
                samples=samples,
                lost_samples=lost_samples,
                global_batch=held.grant.global_batch,
            )
        )


def _simpy() -> Any:
    """SimPy, an extra of the package; raises WorkloadError without it."""
    try:
        import simpy
    except ImportError:
        raise WorkloadError(
            "a replay needs SimPy, which is not installed; install throughput-estimator[replay]"
        ) from None
    return simpy


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One replay in numbers; JCT is a job's completion time, from arrival to end.

    `utilization_ratio` is the share of device time held by jobs until the makespan,
    `worst_unfairness` the highest finish-time fairness ρ (Themis, NSDI 2020): a job's completion
    time over what it would have had alone on an equal share of the cluster; `unfair_ratio` the
    share of jobs with ρ above 1.
    """

    jobs: int
    average_jct_s: float
    median_jct_s: float
    p90_jct_s: float
    p99_jct_s: float
    makespan_s: float
    utilization_ratio: float
    average_queue_s: float
    average_fairness: float
    worst_unfairness: float
    unfair_ratio: float
    restarts_per_job: float
    lost_samples_ratio: float


def outcome(ran: Sequence[Ran], nodes: Nodes, true: Speeds) -> Outcome:
    """Sum a replay up; all jobs have ended."""
    jct = np.array([job.completion_s for job in ran])
    makespan_s = max(job.finish_s for job in ran) - min(job.job.arrival_s for job in ran)
    held_s = sum(s.shape.ranks * (s.end_s - s.start_s) for job in ran for s in job.segments)
    offered_s = sum(node.devices for node in nodes.nodes) * makespan_s
    fairness = finish_time_fairness(ran, nodes, true)
    trained = sum(job.job.samples for job in ran)
    lost = sum(segment.lost_samples for job in ran for segment in job.segments)
    return Outcome(
        jobs=len(ran),
        average_jct_s=float(jct.mean()),
        median_jct_s=float(np.median(jct)),
        p90_jct_s=float(np.quantile(jct, 0.9)),
        p99_jct_s=float(np.quantile(jct, 0.99)),
        makespan_s=makespan_s,
        utilization_ratio=held_s / offered_s if offered_s else 0.0,
        average_queue_s=float(np.mean([job.waited_s for job in ran])),
        average_fairness=float(fairness.mean()),
        worst_unfairness=float(fairness.max()),
        unfair_ratio=float((fairness > 1).mean()),
        restarts_per_job=float(np.mean([len(job.segments) - 1 for job in ran])),
        lost_samples_ratio=lost / trained,
    )


def schedule_of(ran: Sequence[Ran], outages: Sequence[tuple[int, float, float]]) -> dict[str, Any]:
    """Each job's life, devices held over time, and nodes that were down, in plain values.

    A grant is an allocation from its start to its end, with the devices of each node by the node's
    index; the job trains from `trains_from_s` on.
    """
    lives = []
    for job in ran:
        grants = [
            {
                "allocation": str(segment.shape),
                "nodes": {str(index): count for index, count in segment.given.items()},
                "global_batch": segment.global_batch or job.job.global_batch,
                **{name: getattr(segment, name) for name in _GRANT_FIELDS},
            }
            for segment in job.segments
        ]
        lives.append(
            {
                "name": job.job.name,
                "arrival_s": job.job.arrival_s,
                "finish_s": job.finish_s,
                "waited_s": job.waited_s,
                "moves": max(len(grants) - 1, 0),
                "grants": grants,
            }
        )
    held = held_over_time(ran)
    return {
        "lives": lives,
        "devices_held": {"time_s": list(held), "devices": list(held.values())},
        "outages": [{"node": node, "start_s": s, "end_s": e} for node, s, e in outages],
    }


def held_over_time(ran: Sequence[Ran]) -> dict[float, int]:
    """Devices that all jobs hold, from each time on at which that changes."""
    changes: dict[float, int] = {}
    for segment in (segment for job in ran for segment in job.segments):
        for at, sign in ((segment.start_s, 1), (segment.end_s, -1)):
            changes[at] = changes.get(at, 0) + sign * segment.shape.ranks
    times = sorted(changes)
    return dict(zip(times, itertools.accumulate(changes[at] for at in times), strict=True))


_GRANT_FIELDS = ("start_s", "trains_from_s", "end_s", "samples", "lost_samples")


def finish_time_fairness(ran: Sequence[Ran], nodes: Nodes, true: Speeds) -> np.ndarray:
    """ρ of each job: completion time over that alone on 1/N of the cluster.

    N is the mean number of unfinished jobs over the job's life; its share counts down to the next
    count that a job uses, and is at most what the job asked for.
    """
    starts = np.array([job.job.arrival_s for job in ran])
    ends = np.array([job.finish_s for job in ran])
    sizes = {machine: nodes.size(machine) for machine in nodes.machines}
    total = sum(sizes.values())
    fairness = []
    for job, start, end in zip(ran, starts, ends, strict=True):
        overlap = np.minimum(ends, end) - np.maximum(starts, start)
        # A job may be too short for the digits that a late arrival leaves of a second.
        unfinished = np.maximum(overlap, 0.0).sum() / (end - start) if end > start else 1.0
        share = max(min(int(total / unfinished), job.job.devices), 1)
        counts = job.job.counts(max(sizes.values()))
        # Where that few do not fit, the fewest that do.
        at_most = max(bisect.bisect_right(counts, share), 1)
        for count in counts[at_most - 1 :]:
            fastest_s = min(
                true.step_times_s(job.job, [nodes.packed(machine, count)])[0]
                for machine, size in sizes.items()
                if count <= size
            )
            if math.isfinite(fastest_s):
                break
        fairness.append((end - start) / (job.job.samples * fastest_s / job.job.global_batch))
    return np.array(fairness)
