"""Say what a store of observations holds and shows: jobs, doubtful observations, drift."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from estimator.calibrate.drift import Drift, Residual, drifts
from estimator.calibrate.observed import Observation
from estimator.calibrate.physical_form import PhysicalForm
from estimator.calibrate.step_law import RANKS
from estimator.placement.allocation import Allocation

# Named hosts stand without their machine type, which only a cluster file tells.
NAMED_HOSTS = "named hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReview:
    """One workload on one set of machine types.

    `error_ratio` is the median relative distance of its step times from the law fitted to them;
    `sync_share` the mean share of synchronisation in the steps on several devices, by that law
    (None without any).
    """

    workload: str
    machines: str
    observations: int
    allocations: int
    first: datetime
    last: datetime
    error_ratio: float
    sync_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """What was observed; `doubtful` are (observation, why) that no fit uses."""

    jobs: tuple[JobReview, ...]
    drifts: tuple[Drift, ...]
    doubtful: tuple[tuple[Observation, str], ...]


def review(observations: Iterable[Observation]) -> Review:
    """Fit every job on its own, without an engine, and look at what the fits leave."""
    jobs: dict[tuple[str, str], list[Observation]] = defaultdict(list)
    doubtful = []
    for one in observations:
        if one.doubt is not None:
            doubtful.append((one, one.doubt))
        else:
            jobs[one.workload, _machines(one.allocation)].append(one)
    reviews, residuals = [], []
    for (workload, machines), seen in sorted(jobs.items()):
        found, left = _reviewed(workload, machines, seen)
        reviews.append(found)
        residuals += left
    return Review(jobs=tuple(reviews), drifts=tuple(drifts(residuals)), doubtful=tuple(doubtful))


def _reviewed(
    workload: str, machines: str, seen: Sequence[Observation]
) -> tuple[JobReview, list[Residual]]:
    rows = np.array(
        [
            (one.ranks, one.nodes, one.batch_per_gpu, one.accumulation_steps, one.most_on_node)
            for one in seen
        ],
        dtype=float,
    )
    times_s = np.array([one.step_time_s for one in seen])
    law = PhysicalForm().fit(rows, times_s).law(rows)
    values = np.log(times_s) - law.log_step
    several = rows[:, RANKS] > 1
    found = JobReview(
        workload=workload,
        machines=machines,
        observations=len(seen),
        allocations=len({one.allocation for one in seen}),
        first=min(one.at for one in seen),
        last=max(one.at for one in seen),
        error_ratio=float(np.median(np.abs(np.expm1(values)))),
        sync_share=float(law.sync_share[several].mean()) if several.any() else None,
    )
    left = [
        Residual(at=one.at, nodes=_nodes(one.allocation), value=float(value))
        for one, value in zip(seen, values, strict=True)
    ]
    return found, left


def _machines(allocation: str) -> str:
    groups = Allocation.parse(allocation).groups
    return "+".join(sorted({group.machine or NAMED_HOSTS for group in groups}))


def _nodes(allocation: str) -> frozenset[str]:
    groups = Allocation.parse(allocation).groups
    return frozenset(group.host or group.machine or "" for group in groups)
