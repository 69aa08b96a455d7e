"""Say what a store of observations shows: jobs, drift, what the others of a job contradict.

Each job is fitted on its own, without an engine: graphs of what was observed are not at hand.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache

import numpy as np

from estimator.calibrate.change_points import Change, Shown
from estimator.calibrate.mixture import OUTLIER_WEIGHT
from estimator.calibrate.observed import Observation, ObservedWorkload, latest_noise_samples
from estimator.calibrate.performance_model import RANKS, Array
from estimator.calibrate.regressor import StepTimeRegressor
from estimator.calibrate.store import ObservationStore
from estimator.placement.allocation import Allocation
from estimator.placement.topology import Cluster

LEAST_SHIFT_RATIO = 0.05
# Standard errors between two populations; above 3, since every cut is tried.
_LEAST_Z = 4.5
_LEAST_STEPS = 3
# Observation noise between two runs of the same step is at least about this.
_LEAST_SIGMA = 0.02
# Steps of each of two populations, and the share of variance that two groups may leave: normal
# values cut in two leave 1 − 2/π = 0.36, uniform ones a quarter.
_LEAST_POPULATION = 4
_MOST_WITHIN_RATIO = 0.12
# Jobs of which only the name is at hand cost a fit each; those seen last say most of today.
_MOST_WITNESSES, _MOST_STEPS = 16, 500
# Stands for the machine type of named hosts, which only a cluster file has.
NAMED_HOSTS = "named hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A host, machine type or its network whose steps take `ratio` times as long since `since`."""

    name: str
    ratio: float
    since: datetime
    steps: int

    def __str__(self) -> str:
        percent = 100 * abs(self.ratio - 1)
        how = "slower" if self.ratio > 1 else "faster"
        return (
            f"{self.name} is {percent:.0f} % {how} than expected since "
            f"{self.since:%A %Y-%m-%d %H:%M} ({self.steps} steps)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Populations:
    """Machines of one name whose steps fall into two groups, one `ratio` times as long."""

    name: str
    ratio: float
    slower: int
    steps: int

    def __str__(self) -> str:
        return (
            f"steps on {self.name} fall into two groups: {self.slower} of {self.steps} take "
            f"{self.ratio:.2f} times as long as the others; name unlike machines, or jobs, apart"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReview:
    """One job on one set of machine types, in one `layout`, None where all ranks are data-parallel.

    Without a `fingerprint` only its name tells it from others.
    `error_ratio` is the median relative error of the performance model fitted to its step times;
    `sync_share` the mean share of synchronisation in the steps on several devices, by that model
    (None without any). `gradient_noise_samples` is the noise scale of gradients when last measured.
    """

    workload: str
    fingerprint: str | None
    machines: str
    layout: str | None
    observations: int
    allocations: int
    first: datetime
    last: datetime
    error_ratio: float
    sync_share: float | None
    gradient_noise_samples: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """What was observed.

    `doubted` are (observation, reason) of those that the others of their job contradict, which fits
    give little weight: another unit, another model's, a run that was disturbed. `populations` are
    machine types whose steps fall into two groups.
    """

    jobs: tuple[JobReview, ...]
    drifts: tuple[Drift, ...]
    doubted: tuple[tuple[Observation, str], ...]
    populations: tuple[Populations, ...]


def review(observations: Iterable[Observation]) -> Review:
    """Fit every job on its own, without the engine: what changed, and what is left."""
    jobs: defaultdict[tuple[tuple[str, str], str, str], list[Observation]] = defaultdict(list)
    for one in observations:
        jobs[one.job, *_place(one)].append(one)
    reviews, doubted, shown = [], [], []
    residuals: defaultdict[str, list[Array]] = defaultdict(list)
    for (_, machines, _), of_job in sorted(
        jobs.items(), key=lambda item: (item[1][0].workload, item[0])
    ):
        shown.append(_shown(machines, tuple(of_job)))
        reviewed, values, contradicted = _reviewed(machines, of_job, shown[-1].changes)
        reviews.append(reviewed)
        residuals[machines].append(values)
        doubted += contradicted
    of_machines = (populations(name, np.concatenate(of)) for name, of in residuals.items())
    return Review(
        jobs=tuple(reviews),
        drifts=tuple(_drifts(shown)),
        doubted=tuple(doubted),
        populations=tuple(filter(None, of_machines)),
    )


def doubted_since(store: ObservationStore, revision: int) -> list[tuple[Observation, str]]:
    """What has come since a revision of a store that the other steps of its job contradict."""
    new = {one.identity: one.job for one in store.observations(added_after=revision)}
    jobs = set(new.values())
    doubted = review(one for one in store if one.job in jobs).doubted
    return [(one, why) for one, why in doubted if one.identity in new]


def counting_drifts(
    cluster: Cluster, hosts: Collection[str], observations: Iterable[Observation]
) -> tuple[Cluster, list[str]]:
    """The cluster with those hosts as slow as observations show them, and a sentence on each.

    A node keeps a slowdown of its own.
    """
    nodes, sentences = dict(cluster.nodes), []
    for drift in review(observations).drifts:
        is_wanted = drift.name in hosts and drift.name in nodes
        if not is_wanted or nodes[drift.name].slowdown_ratio != 1.0:
            continue
        nodes[drift.name] = replace(nodes[drift.name], slowdown_ratio=drift.ratio)
        sentences.append(
            f"{drift}; the estimate counts that, as 'slowdown = {drift.ratio:.3g}' for "
            f"{drift.name} in the cluster file does"
        )
    return replace(cluster, nodes=nodes), sentences


def shown_by_others(
    store: ObservationStore, *, since: datetime, known: Collection[tuple[str, str]]
) -> list[Shown]:
    """What jobs of a store show of machines that were seen often enough since some moment.

    Each is fitted on its own, without an engine: their graphs are not at hand. `known` are those to
    leave out. What changed for all steps of a job on named hosts is a change of each of these.
    """
    latest = [job for job in store.jobs_since(since, least=_LEAST_STEPS) if job not in known]
    shown: list[Shown] = []
    for kind, name in latest[-_MOST_WITNESSES:]:
        of_job = ObservedWorkload(name=name, fingerprint=name if kind == "content" else None)
        by_place: defaultdict[tuple[str, str], list[Observation]] = defaultdict(list)
        for one in store.observations(of_job=of_job):
            if one.job == (kind, name):
                by_place[_place(one)].append(one)
        shown += [
            _shown(machines, tuple(sorted(of_place, key=lambda one: one.at)[-_MOST_STEPS:]))
            for (machines, _), of_place in by_place.items()
        ]
    return shown


def populations(name: str, residuals: Array) -> Populations | None:
    """Two groups of log(observed / expected), far apart and each close together, else None.

    The cut is the one that leaves least variance within both groups (Fisher 1958). Of one normal
    population it leaves 36 % of the variance; two groups have to leave far less.
    """
    steps = len(residuals)
    if steps < 2 * _LEAST_POPULATION:
        return None
    # Sum of squares between two groups, the shorter's values adding to `below`; the mean is 0.
    values = np.sort(residuals) - residuals.mean()
    shorter = np.arange(_LEAST_POPULATION, steps - _LEAST_POPULATION + 1)
    below = np.cumsum(values)[shorter - 1]
    between = below**2 * steps / (shorter * (steps - shorter))
    best = int(np.argmax(between))
    cut, total = int(shorter[best]), float(values @ values)
    within = max(total - float(between[best]), 0.0)
    shift = float(values[cut:].mean() - values[:cut].mean())
    is_apart = within < _MOST_WITHIN_RATIO * total and math.expm1(shift) > LEAST_SHIFT_RATIO
    if not is_apart or shift < _LEAST_Z * max(math.sqrt(within / steps), _LEAST_SIGMA):
        return None
    return Populations(name=name, ratio=math.exp(shift), slower=steps - cut, steps=steps)


def _drifts(shown: Iterable[Shown]) -> list[Drift]:
    """What jobs have shown of machines and hosts, by the job that has shown most, largest first."""
    of_places: dict[str, list[Change]] = {}
    for one in shown:
        by_name: defaultdict[str, list[Change]] = defaultdict(list)
        for change in one.changes:
            by_name[change.place(one.machines)].append(change)
        for name, changes in by_name.items():
            known = of_places.get(name, changes)
            of_places[name] = max(known, changes, key=lambda of: sum(one.steps for one in of))
    drifting = [
        Drift(
            name=name,
            ratio=math.exp(change.log_ratio),
            since=datetime.fromtimestamp(change.at, UTC),
            steps=change.steps,
        )
        for name, changes in of_places.items()
        for change in changes
        if abs(math.expm1(change.log_ratio)) >= LEAST_SHIFT_RATIO
    ]
    return sorted(drifting, key=lambda drift: -abs(math.log(drift.ratio)))


@lru_cache(maxsize=256)
def _shown(machines: str, seen: tuple[Observation, ...]) -> Shown:
    """What one job shows of one set of machines."""
    at, on = [one.at.timestamp() for one in seen], [one.hosts for one in seen]
    rows, times_s = _rows(seen)
    changes = StepTimeRegressor().fit(rows, times_s, at=at, hosts=on).changes_.changes
    shown = Shown.of(machines, changes, at, on)
    if machines != NAMED_HOSTS:
        return shown
    of_hosts = (
        [one for one in shown.changes if one.host in (None, host) and one.at <= last_at]
        for host, last_at in shown.hosts.items()
    )
    return shown._replace(
        changes=[
            replace(
                max(changes, key=lambda change: abs(change.log_ratio)),
                log_ratio=sum(change.log_ratio for change in changes),
                host=host,
                hosts=len(shown.hosts),
            )
            for host, changes in zip(shown.hosts, of_hosts, strict=True)
            if changes
        ]
    )


def _rows(seen: Sequence[Observation]) -> tuple[Array, Array]:
    """What a regressor takes: rows and step times."""
    rows = [
        (one.ranks, one.nodes, one.batch_per_gpu, one.accumulation_steps, one.most_on_node)
        for one in seen
    ]
    return np.array(rows, dtype=float), np.array([one.step_time_s for one in seen])


def _reviewed(
    machines: str, seen: Sequence[Observation], changes: Sequence[Change]
) -> tuple[JobReview, Array, list[tuple[Observation, str]]]:
    """A job, log(observed / expected) of its steps, and those that the others contradict.

    Steps of a change that holds count as what is true today.
    """
    rows, times_s = _rows(seen)
    fitted = StepTimeRegressor().fit(rows, times_s)
    model, several = fitted.model(rows), rows[:, RANKS] > 1
    values = np.log(times_s) - model.log_step
    reviewed = JobReview(
        workload=seen[-1].workload,
        fingerprint=seen[0].fingerprint,
        machines=machines,
        layout=seen[0].layout,
        observations=len(seen),
        allocations=len({one.allocation for one in seen}),
        first=min(one.at for one in seen),
        last=max(one.at for one in seen),
        error_ratio=float(np.median(np.abs(np.expm1(values)))),
        sync_share=float(model.sync_share[several].mean()) if several.any() else None,
        gradient_noise_samples=latest_noise_samples(seen),
    )
    doubted = [
        (one, f"it is {_factor(value)} than the {len(seen) - 1} other steps of its job suggest")
        for one, value, weight in zip(seen, values, fitted.observation_weights_, strict=True)
        if weight < OUTLIER_WEIGHT
        and not any(
            change.at <= one.at.timestamp()
            and abs(value - change.log_ratio) < abs(change.log_ratio) / 2
            and change.host in (None, *one.hosts)
            for change in changes
        )
    ]
    return reviewed, values, doubted


def _factor(log_ratio: float) -> str:
    return f"{np.exp(abs(log_ratio)):.1f} times {'longer' if log_ratio > 0 else 'shorter'}"


def _place(one: Observation) -> tuple[str, str]:
    groups = Allocation.parse(one.allocation).groups
    return "+".join(sorted({group.machine or NAMED_HOSTS for group in groups})), one.layout or ""
