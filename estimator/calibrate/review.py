"""Say what a store of observations holds and shows: jobs, outliers, drift."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from estimator.calibrate.drift import Drift, Residual, drifts
from estimator.calibrate.observed import Observation
from estimator.calibrate.performance_model import RANKS
from estimator.calibrate.step_time_regressor import StepTimeRegressor
from estimator.placement.allocation import Allocation

# Stands for the machine type of named hosts, which only a cluster file has.
NAMED_HOSTS = "named hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReview:
    """One job on one set of machine types.

    Without a `fingerprint` only its name tells it from others.
    `error_ratio` is the median relative error of the performance model fitted to its step times;
    `sync_share` the mean share of synchronisation in the steps on several devices, by that model
    (None without any).
    """

    workload: str
    fingerprint: str | None
    machines: str
    observations: int
    allocations: int
    first: datetime
    last: datetime
    error_ratio: float
    sync_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """What was observed; `outliers` are (observation, reason), which no fit uses."""

    jobs: tuple[JobReview, ...]
    drifts: tuple[Drift, ...]
    outliers: tuple[tuple[Observation, str], ...]


def review(observations: Iterable[Observation]) -> Review:
    """Fit every job on its own, without the engine, and search the residuals for drift."""
    jobs: dict[tuple[tuple[str, str], str], list[Observation]] = defaultdict(list)
    outliers = []
    for one in observations:
        if one.outlier_reason is not None:
            outliers.append((one, one.outlier_reason))
        else:
            jobs[one.job, _machines(one.allocation)].append(one)
    reviews, residuals = [], []
    for (_, machines), seen in sorted(
        jobs.items(), key=lambda item: (item[1][0].workload, item[0])
    ):
        found, of_job = _reviewed(machines, seen)
        reviews.append(found)
        residuals += of_job
    return Review(jobs=tuple(reviews), drifts=tuple(drifts(residuals)), outliers=tuple(outliers))


def _reviewed(machines: str, seen: Sequence[Observation]) -> tuple[JobReview, list[Residual]]:
    rows = np.array(
        [
            (one.ranks, one.nodes, one.batch_per_gpu, one.accumulation_steps, one.most_on_node)
            for one in seen
        ],
        dtype=float,
    )
    times_s = np.array([one.step_time_s for one in seen])
    model = StepTimeRegressor().fit(rows, times_s).model(rows)
    values = np.log(times_s) - model.log_step
    several = rows[:, RANKS] > 1
    found = JobReview(
        workload=seen[-1].workload,
        fingerprint=seen[0].fingerprint,
        machines=machines,
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
    return found, residuals


def _machines(allocation: str) -> str:
    groups = Allocation.parse(allocation).groups
    return "+".join(sorted({group.machine or NAMED_HOSTS for group in groups}))


def _nodes(allocation: str) -> frozenset[str]:
    groups = Allocation.parse(allocation).groups
    return frozenset(group.host or group.machine or "" for group in groups)
