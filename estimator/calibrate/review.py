"""Say what a store of observations holds and shows: jobs, outliers, drift.

A slow node slows every step that it takes part in. For each node the steps with it after a change
point are compared with its steps before that and with all steps without it, by the two-sample
statistic of their residuals (log of observed over expected); the change point is the one with the
largest statistic (Page 1954).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from estimator.calibrate.change_points import Shown
from estimator.calibrate.mixture import OUTLIER_WEIGHT
from estimator.calibrate.observed import Observation, ObservedWorkload
from estimator.calibrate.performance_model import RANKS, Array
from estimator.calibrate.regressor import StepTimeRegressor
from estimator.calibrate.store import ObservationStore
from estimator.placement.allocation import Allocation
from estimator.placement.topology import Cluster

LEAST_SHIFT_RATIO = 0.05
# Standard errors between the two samples; above 3, since many change points are tested.
_LEAST_Z = 4.5
_LEAST_STEPS = 3
# Observation noise between two runs of the same step is at least about this.
_LEAST_SIGMA = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """log(observed / expected) of one step, when it was seen, and the nodes that took part."""

    at: datetime
    nodes: frozenset[str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A node, or machine type, whose steps take `ratio` times as long as expected since `since`.

    `since` is None where it has been so from the first observation on.
    """

    name: str
    ratio: float
    since: datetime | None
    steps: int

    def __str__(self) -> str:
        percent = 100 * abs(self.ratio - 1)
        how = "slower" if self.ratio > 1 else "faster"
        since = "" if self.since is None else f" since {self.since:%A %Y-%m-%d %H:%M}"
        return f"{self.name} is {percent:.0f} % {how} than expected{since} ({self.steps} steps)"


def drifts(residuals: Sequence[Residual]) -> list[Drift]:
    """What has drifted, the most significant first; each residual is attributed to one node."""
    left = sorted(residuals, key=lambda residual: residual.at)
    values = np.array([residual.value for residual in left])
    times = np.array([residual.at.timestamp() for residual in left])
    names = sorted({name for residual in left for name in residual.nodes})
    takes_part = {name: np.array([name in residual.nodes for residual in left]) for name in names}
    is_left, drifting = np.ones(len(left), dtype=bool), list[Drift]()
    while True:
        changes = {
            name: change
            for name in names
            if (change := _change_point(values, times, takes_part[name] & is_left, is_left))
        }
        if not changes:
            return drifting
        name = max(changes, key=lambda name: changes[name].statistic)
        change = changes[name]
        since = left[change.first].at if change.has_steps_before else None
        explained = takes_part[name] & is_left
        explained[: change.first] = False
        steps = int(explained.sum())
        drifting.append(Drift(name=name, ratio=math.exp(change.shift), since=since, steps=steps))
        is_left &= ~explained


class _ChangePoint(NamedTuple):
    """By how much a node's steps from the `first` on differ, and how significantly."""

    statistic: float
    shift: float
    first: int
    has_steps_before: bool


def _change_point(
    values: Array, times: Array, is_own: NDArray[np.bool_], is_left: NDArray[np.bool_]
) -> _ChangePoint | None:
    """A node's most significant change, if there is any, by sums up to each of its steps."""
    own = np.flatnonzero(is_own)
    if len(own) < _LEAST_STEPS:
        return None
    # About their mean, so that squares are small.
    centre = float(values[is_left].mean())
    every, steps = values[is_left] - centre, values[own] - centre
    first = np.arange(len(own) - _LEAST_STEPS + 1)
    after, squares_after = (np.cumsum(values[::-1])[::-1][first] for values in (steps, steps**2))
    count_after = (len(own) - first).astype(float)
    count_before = len(every) - count_after
    mean_after, deviation_after = _mean_and_deviation(after, squares_after, count_after)
    base, deviation = _mean_and_deviation(
        every.sum() - after, (every**2).sum() - squares_after, count_before
    )
    # With too few others the reference is the expectation itself, a residual of 0.
    is_two_sample = count_before >= np.maximum(_LEAST_STEPS, count_after / 2)
    base = np.where(is_two_sample, base, -centre)
    sigma = np.maximum(np.where(is_two_sample, deviation, 0.0), deviation_after)
    shift = mean_after - base
    statistic = np.abs(shift) / (
        np.maximum(sigma, _LEAST_SIGMA)
        * np.sqrt(1 / count_after + 1 / np.maximum(count_before, _LEAST_STEPS))
    )
    # What was seen at one moment is on one side of a change.
    is_at_once = np.append(False, np.diff(times[own]) == 0)[first]
    statistic[is_at_once | (np.abs(np.expm1(shift)) < LEAST_SHIFT_RATIO)] = 0.0
    best = int(np.argmax(statistic))
    if statistic[best] < _LEAST_Z:
        return None
    return _ChangePoint(float(statistic[best]), float(shift[best]), int(own[best]), best > 0)


def _mean_and_deviation(total: Array, squares: Array, count: Array) -> tuple[Array, Array]:
    """Of so many values, by their sum and the sum of their squares."""
    mean = total / np.maximum(count, 1)
    variance = (squares - count * mean**2) / np.maximum(count - 1, 1)
    return mean, np.sqrt(np.maximum(variance, 0.0))


# Steps of each of two populations, and the share of variance that two groups may leave: normal
# values cut in two leave 1 − 2/π = 0.36, uniform ones a quarter.
_LEAST_POPULATION = 4
_MOST_WITHIN_RATIO = 0.12


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
            f"{self.ratio:.2f} times as long as the others; name the unlike machines apart"
        )


def populations(name: str, residuals: Array) -> Populations | None:
    """Two groups of log(observed / expected), far apart and each close together, else None."""
    is_slow = slower_ones(residuals)
    if is_slow is None:
        return None
    shift = float(residuals[is_slow].mean() - residuals[~is_slow].mean())
    count = int(is_slow.sum())
    return Populations(name=name, ratio=math.exp(shift), slower=count, steps=len(residuals))


def slower_ones(residuals: Array) -> NDArray[np.bool_] | None:
    """Which residuals are of the slower of two populations, None where there is but one.

    The cut is the one that leaves least variance within both groups (Fisher 1958). Of one normal
    population it leaves 36 % of the variance; two groups have to leave far less.
    """
    order = np.argsort(residuals, kind="stable")
    values, steps = residuals[order], len(residuals)
    if steps < 2 * _LEAST_POPULATION:
        return None
    # Sum of squares between two groups, the shorter's values adding to `below`; the mean is 0.
    values = values - values.mean()
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
    is_slow = np.zeros(steps, dtype=bool)
    is_slow[order[cut:]] = True
    return is_slow


# Stands for the machine type of named hosts, which only a cluster file has.
NAMED_HOSTS = "named hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReview:
    """One job on one set of machine types, in one `layout`, None where all ranks are data-parallel.

    Without a `fingerprint` only its name tells it from others.
    `error_ratio` is the median relative error of the performance model fitted to its step times;
    `sync_share` the mean share of synchronisation in the steps on several devices, by that model
    (None without any).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """What was observed; `outliers` are (observation, reason), which no fit uses.

    `doubted` are likewise those that the others of their job contradict, which fits give little
    weight: another model's, another batch's, a run that was disturbed. `populations` are machine
    types whose steps fall into two groups.
    """

    jobs: tuple[JobReview, ...]
    drifts: tuple[Drift, ...]
    outliers: tuple[tuple[Observation, str], ...]
    doubted: tuple[tuple[Observation, str], ...]
    populations: tuple[Populations, ...]


def review(observations: Iterable[Observation]) -> Review:
    """Fit every job on its own, without the engine, and search the residuals for drift."""
    jobs: dict[tuple[tuple[str, str], str, str], list[Observation]] = defaultdict(list)
    outliers = []
    for one in observations:
        if one.outlier_reason is not None:
            outliers.append((one, one.outlier_reason))
        else:
            jobs[one.job, _machines(one.allocation), one.layout or ""].append(one)
    reviews, doubted = [], []
    residuals: dict[str, list[Residual]] = defaultdict(list)
    for (_, machines, _), seen in sorted(
        jobs.items(), key=lambda item: (item[1][0].workload, item[0])
    ):
        reviewed, of_job, contradicted = _reviewed(machines, seen)
        reviews.append(reviewed)
        residuals[machines] += of_job
        doubted += contradicted
    every = [residual for of_machines in residuals.values() for residual in of_machines]
    found_twice = (
        populations(name, np.array([residual.value for residual in of_type]))
        for name, of_type in residuals.items()
    )
    return Review(
        jobs=tuple(reviews),
        drifts=tuple(drifts(every)),
        outliers=tuple(outliers),
        doubted=tuple(doubted),
        populations=tuple(population for population in found_twice if population is not None),
    )


def counting_drifts(
    cluster: Cluster, hosts: Collection[str], observations: Iterable[Observation]
) -> tuple[Cluster, list[str]]:
    """The cluster with those hosts as slow as observations show them, and a sentence on each.

    A node keeps a slowdown of its own.
    """
    nodes, sentences = dict(cluster.nodes), []
    for drift in review(observations).drifts:
        is_asked = drift.name in hosts and drift.name in nodes
        if not is_asked or nodes[drift.name].slowdown_ratio != 1.0:
            continue
        nodes[drift.name] = replace(nodes[drift.name], slowdown_ratio=drift.ratio)
        sentences.append(
            f"{drift}; the estimate counts that, as 'slowdown = {drift.ratio:.3g}' for "
            f"{drift.name} in the cluster file does"
        )
    return replace(cluster, nodes=nodes), sentences


# Jobs of which only the name is at hand cost a fit each; those seen last say most of today.
_MOST_WITNESSES = 16


def shown_by_others(
    store: ObservationStore, *, since: datetime, known: Collection[tuple[str, str]]
) -> list[Shown]:
    """What jobs of a store show of machines that were seen often enough since some moment.

    Each is fitted on its own, without an engine: their graphs are not at hand. `known` are those to
    leave out. What changed for all steps of a job on named hosts is a change of each of these.
    """
    newer = Counter(one.job for one in store.observations(since=since))
    latest = [job for job, steps in newer.items() if steps >= _LEAST_STEPS and job not in known]
    shown: list[Shown] = []
    for kind, name in latest[-_MOST_WITNESSES:]:
        of_job = ObservedWorkload(name=name, fingerprint=name if kind == "content" else None)
        seen = [one for one in store.observations(of_job=of_job) if one.job == (kind, name)]
        by_place: dict[tuple[str, str], list[Observation]] = defaultdict(list)
        for one in seen:
            if one.outlier_reason is None:
                by_place[_machines(one.allocation), one.layout or ""].append(one)
        shown += [_shown(machines, tuple(of_place)) for (machines, _), of_place in by_place.items()]
    return shown


@lru_cache(maxsize=256)
def _shown(machines: str, seen: tuple[Observation, ...]) -> Shown:
    """What one job shows of one set of machines."""
    at, on = [one.at.timestamp() for one in seen], [one.hosts for one in seen]
    times_s = [one.step_time_s for one in seen]
    fitted = StepTimeRegressor().fit(_rows(seen), times_s, at=at, hosts=on)
    shown = Shown.of(machines, fitted.changes_.changes, at, on)
    if machines != NAMED_HOSTS:
        return shown
    of_hosts = [
        replace(change, host=host, hosts=len(shown.hosts))
        for change in shown.changes
        for host, last_at in shown.hosts.items()
        if change.host in (None, host) and last_at >= change.at
    ]
    return shown._replace(changes=of_hosts)


def _rows(seen: Sequence[Observation]) -> Array:
    return np.array(
        [
            (one.ranks, one.nodes, one.batch_per_gpu, one.accumulation_steps, one.most_on_node)
            for one in seen
        ],
        dtype=float,
    )


def _reviewed(
    machines: str, seen: Sequence[Observation]
) -> tuple[JobReview, list[Residual], list[tuple[Observation, str]]]:
    rows, times_s = _rows(seen), np.array([one.step_time_s for one in seen])
    fitted = StepTimeRegressor().fit(rows, times_s)
    model = fitted.model(rows)
    values = np.log(times_s) - model.log_step
    several = rows[:, RANKS] > 1
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
    )
    residuals = [
        Residual(at=one.at, nodes=_nodes(one.allocation), value=float(value))
        for one, value in zip(seen, values, strict=True)
    ]
    # Steps of a change that holds count as what is true today.
    changes = _shown(machines, tuple(seen)).changes
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
    return reviewed, residuals, doubted


def _factor(log_ratio: float) -> str:
    return f"{np.exp(abs(log_ratio)):.1f} times {'longer' if log_ratio > 0 else 'shorter'}"


def _machines(allocation: str) -> str:
    groups = Allocation.parse(allocation).groups
    return "+".join(sorted({group.machine or NAMED_HOSTS for group in groups}))


def _nodes(allocation: str) -> frozenset[str]:
    groups = Allocation.parse(allocation).groups
    return frozenset(group.host or group.machine or "" for group in groups)
