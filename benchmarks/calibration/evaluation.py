"""Evaluate regressors on measured jobs: each is fitted to some rows and predicts the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from multiprocessing import get_context
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from records import Progress, say
from summary import noise_ratio

from calibration.machine_priors import priors_of
from calibration.protocols import Split, all_splits
from calibration.rivals import FORMS
from calibration.tables import Job
from estimator.calibrate.regressor import StepTimeRegressor
from estimator.errors import EstimatorError, ObservationError

Array = NDArray[np.float64]


class Regressor(Protocol):
    """What every method offers; some have `predict_interval` (low, high) too."""

    def fit(self, X: ArrayLike, y: ArrayLike) -> Regressor:
        """Learn from rows and their step times."""
        ...

    def predict(self, X: ArrayLike) -> Array:
        """Step times of rows, in seconds."""
        ...


REGRESSORS: Mapping[str, Callable[[], Regressor]] = {
    "calibrated": StepTimeRegressor,
    **FORMS,
}
# Robustness is tested by one outlier of this factor, from so many observations on.
OUTLIER_FACTOR, OUTLIER_LEAST_K = 3.0, 5
# Splits of one job and method that are fitted in one task of the executor.
_SPLITS_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """What a method predicted for the test rows of one split of a job; NaN where it could not.

    `moved_ratio` is the mean relative change of the predictions when the last observation of the
    split is made an outlier, three times too long: what it had taught is lost then. `added_ratio`
    is the change from predictions without that observation: what an outlier added to others does.
    """

    job: int
    method: str
    split: Split
    predicted_s: Array
    low_s: Array | None = None
    high_s: Array | None = None
    moved_ratio: float | None = None
    added_ratio: float | None = None
    reason: str | None = None


def cases(
    jobs: Sequence[Job], runs: Sequence[Run], protocol: str, at: str
) -> Iterator[dict[str, Any]]:
    """Every prediction beside its measurement, in the form of all accuracy benchmarks."""
    abouts = [[step.about() for step in job.steps] for job in jobs]
    noises = [_noises(job) for job in jobs]
    for run in runs:
        job = jobs[run.job]
        for place, index in enumerate(run.split.test):
            predicted_s = _known(run.predicted_s, place)
            yield {
                "id": f"{protocol}/{job.label}/{index}",
                **abouts[run.job][index],
                "job": job.label,
                "method": run.method,
                "k": run.split.k,
                "draw": run.split.draw,
                "predicted_s": predicted_s,
                "low_s": _known(run.low_s, place),
                "high_s": _known(run.high_s, place),
                "measured_s": job.steps[index].step_time_s,
                "noise_ratio": noises[run.job][index],
                "predicted_at": at,
                "measured_at": None,
                "status": "ok" if predicted_s is not None else "no_prediction",
                "reason": None if predicted_s is not None else run.reason,
            }


def evaluate(
    jobs: Sequence[Job],
    protocol: str,
    *,
    ks: Sequence[int] | None = None,
    methods: Mapping[str, Callable[[], Regressor]] | None = None,
    executor: Executor | None = None,
) -> list[Run]:
    """Run methods over all jobs by a protocol of `protocols.PROTOCOLS`, all on the same draws.

    `ks` are the numbers of observations of k-shot and online. Raises ObservationError where no job
    has rows enough.
    """
    splits = all_splits(jobs, protocol, ks)
    if not splits:
        raise ObservationError(
            f"none of the {len(jobs)} jobs of the table has rows enough for the protocol "
            f"'{protocol}'; take another protocol, or a table with more rows of one model and GPU"
        )
    if skipped := [job.label for n, job in enumerate(jobs) if n not in {n for n, _ in splits}]:
        say(f"too few rows for {protocol}: {len(skipped)} jobs, such as {skipped[0]}")
    tasks = [
        _Task(
            job=index,
            method=method,
            regressor=_with_machine_priors(regressor, jobs[index]),
            X=jobs[index].X(),
            y=jobs[index].y(),
            splits=tuple(members),
            has_outlier=protocol == "online",
        )
        for index, of_job in groupby(splits, key=lambda pair: pair[0])
        for members in _chunks([split for _, split in of_job])
        for method, regressor in (methods or REGRESSORS).items()
    ]
    runs, progress = list[Run](), Progress(protocol, len(tasks))
    answers = executor.map(_run, tasks) if executor is not None else map(_run, tasks)
    for task, answer in zip(tasks, answers, strict=True):
        runs += answer
        progress.advance(f"{task.method}, {jobs[task.job].label}")
    return runs


@contextmanager
def processes() -> Iterator[Executor | None]:
    """Two processes to evaluate in; None where there is but one core."""
    if (os.cpu_count() or 1) < 2:
        yield None
        return
    # Spawned, since a fork would take over whatever threads the caller has.
    context = get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as executor:
        yield executor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Task:
    """Some splits of one job for one method."""

    job: int
    method: str
    regressor: Callable[[], Regressor]
    X: Array
    y: Array
    splits: tuple[Split, ...]
    has_outlier: bool


def _with_machine_priors(regressor: Callable[[], Regressor], job: Job) -> Callable[[], Regressor]:
    """The regressor for a job: ours takes priors from the job's machine."""
    if regressor is StepTimeRegressor:
        return partial(StepTimeRegressor, priors=priors_of(job.steps[0]))
    return regressor


def _chunks(splits: Sequence[Split]) -> Iterator[Sequence[Split]]:
    for start in range(0, len(splits), _SPLITS_AT_ONCE):
        yield splits[start : start + _SPLITS_AT_ONCE]


def _run(task: _Task) -> list[Run]:
    return [_run_split(task, split) for split in task.splits]


def _run_split(task: _Task, split: Split) -> Run:
    X = task.X[split.test]
    run = Run(job=task.job, method=task.method, split=split, predicted_s=np.full(len(X), np.nan))
    try:
        fitted = _fitted(task, split, task.y)
        predicted_s = np.asarray(fitted.predict(X), dtype=float)
        low_s = high_s = None
        if hasattr(fitted, "predict_interval"):
            low_s, high_s = fitted.predict_interval(X)
        moved_ratio = added_ratio = None
        if task.has_outlier and split.k is not None and split.k >= OUTLIER_LEAST_K:
            moved_ratio, added_ratio = _outlier_changes(task, split, predicted_s)
    except (EstimatorError, np.linalg.LinAlgError) as error:
        return replace(run, reason=str(error))
    is_valid = np.isfinite(predicted_s) & (predicted_s > 0)
    return replace(
        run,
        predicted_s=np.where(is_valid, predicted_s, np.nan),
        low_s=low_s,
        high_s=high_s,
        moved_ratio=moved_ratio,
        added_ratio=added_ratio,
        reason=None if is_valid.all() else "it predicted no positive time",
    )


def _fitted(task: _Task, split: Split, y: Array) -> Any:
    regressor: Any = task.regressor()
    return regressor.fit(task.X[split.train], y[split.train])


def _outlier_changes(task: _Task, split: Split, predicted_s: Array) -> tuple[float, float]:
    """Mean relative changes by an outlier, in place of the last observation and added to others."""
    y = task.y.copy()
    y[split.train[-1]] *= OUTLIER_FACTOR
    X = task.X[split.test]
    moved_s = _fitted(task, split, y).predict(X)
    without_s = _fitted(task, replace(split, train=split.train[:-1]), task.y).predict(X)
    moved, added = (np.mean(np.abs(moved_s / each - 1)) for each in (predicted_s, without_s))
    return float(moved), float(added)


def _noises(job: Job) -> list[float | None]:
    """Half the 10–90 % range of each row's repetitions over their median; None for a single one."""
    repeated: dict[tuple[Any, ...], list[float]] = {}
    keys = [(step.about()["allocation"], *step.features) for step in job.steps]
    for key, step in zip(keys, job.steps, strict=True):
        repeated.setdefault(key, []).append(step.step_time_s)
    noises = {
        key: noise_ratio(times) if len(times) > 1 else None for key, times in repeated.items()
    }
    return [noises[key] for key in keys]


def _known(values: Array | None, place: int) -> float | None:
    if values is None or not np.isfinite(values[place]):
        return None
    return float(values[place])
