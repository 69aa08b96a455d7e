"""Split the steps of a job into training and test rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibration.tables import Job
from estimator.calibrate.observation_files import MeasuredStep
from estimator.calibrate.performance_model import BATCH, RANKS

Indices = NDArray[np.intp]

SHOTS = (1, 3, 5, 10, 20)
ONLINE_SHOTS = (0, *SHOTS)
DRAWS = 8
FOLDS, FOLD_DRAWS = 5, 3
# Placements of the multi-device training rows of few-shot.
FEW_PLACEMENTS = ((2,), (1, 1), (4,))
# Numbers of workers in the training rows of asynchronous training.
WORKERS_SEEN = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """Training and test rows of a job; `k` observations, draw number `draw`."""

    k: int | None
    draw: int
    train: Indices
    test: Indices


def k_shot(job: Job[Any], ks: Sequence[int] = SHOTS) -> list[Split]:
    """k training rows, one on a single device, the others drawn at random; tests on all others.

    Draw number n is the same permutation for every k, so that a larger k adds to a smaller one. A
    job without single-device rows starts from one on as few devices as it has. A k that leaves no
    test row is left out.
    """
    rows = np.arange(len(job.steps))
    ranks = job.X()[:, RANKS]
    fewest = np.flatnonzero(ranks == ranks.min())
    splits = []
    for draw in range(DRAWS):
        generator = np.random.default_rng(draw)
        first = generator.choice(fewest)
        others = generator.permutation(rows[rows != first])
        order = np.concatenate([[first], others])
        splits += [_split(k, draw, order[:k], order[k:]) for k in ks if k < len(rows)]
    return _one_draw_of_none(splits)


def online(job: Job[Any], ks: Sequence[int] = ONLINE_SHOTS) -> list[Split]:
    """All single-device rows and k random rows on several; tests on the others on several."""
    ranks = job.X()[:, RANKS]
    alone, several = np.flatnonzero(ranks == 1), np.flatnonzero(ranks > 1)
    splits = []
    for draw in range(DRAWS):
        order = np.random.default_rng(draw).permutation(several)
        splits += [
            _split(k, draw, np.concatenate([alone, order[:k]]), order[k:])
            for k in ks
            if k < len(several) and len(alone) + k
        ]
    return _one_draw_of_none(splits)


def few_shot(job: Job[MeasuredStep]) -> list[Split]:
    """All single-device rows, and 2, 1+1 and 4 devices at the smallest and largest batch."""
    train = _few_shot_rows(job)
    test = np.setdiff1d(np.arange(len(job.steps)), train)
    return [_split(None, 0, train, test)] if len(train) and len(test) else []


def pairs(job: Job[MeasuredStep]) -> list[Split]:
    """Trains as few-shot, and predicts all rows, to compare these with each other."""
    train = _few_shot_rows(job)
    several = (job.X()[:, RANKS] > 1).any()
    return [_split(None, 0, train, np.arange(len(job.steps)))] if len(train) and several else []


def _few_shot_rows(job: Job[MeasuredStep]) -> Indices:
    """One row of each placement and batch, the first of those measured more than once."""
    batches = job.X()[:, BATCH]
    extremes = (batches.min(), batches.max())
    train: list[int] = []
    taken: set[tuple[tuple[int, ...], float]] = set()
    for index, step in enumerate(job.steps):
        key = (step.node_sizes, step.batch_per_gpu)
        wanted = step.node_sizes in FEW_PLACEMENTS and step.batch_per_gpu in extremes
        if step.ranks == 1 or (wanted and key not in taken):
            taken.add(key)
            train.append(index)
    return np.array(train, dtype=np.intp)


def cross_validation(job: Job[MeasuredStep]) -> list[Split]:
    """Five-fold cross-validation, repeated with several shuffles."""
    splits = []
    for draw in range(FOLD_DRAWS if len(job.steps) >= FOLDS else 0):
        order = np.random.default_rng(draw).permutation(len(job.steps))
        for fold in np.array_split(order, FOLDS):
            splits.append(_split(None, draw, np.setdiff1d(order, fold), fold))
    return splits


def workers(job: Job[Any]) -> list[Split]:
    """Train on 1, 2, 4 and 8 asynchronous workers, test on the numbers between."""
    seen = np.isin(job.X()[:, RANKS], WORKERS_SEEN)
    if seen.all() or not seen.any():
        return []
    return [_split(None, 0, np.flatnonzero(seen), np.flatnonzero(~seen))]


# Every protocol, and whether it takes k.
PROTOCOLS: dict[str, Callable[..., list[Split]]] = {
    "k-shot": k_shot,
    "online": online,
    "few-shot": few_shot,
    "cv": cross_validation,
    "pairs": pairs,
    "workers": workers,
}
PROTOCOLS_WITH_K = ("k-shot", "online")


def all_splits(
    jobs: Sequence[Job[Any]], protocol: str, ks: Sequence[int] | None = None
) -> list[tuple[int, Split]]:
    """(place of the job in `jobs`, split) of every job that has rows enough for the protocol."""
    rule = PROTOCOLS[protocol]
    options = {"ks": ks} if ks is not None and protocol in PROTOCOLS_WITH_K else {}
    return [(index, split) for index, job in enumerate(jobs) for split in rule(job, **options)]


def _split(k: int | None, draw: int, train: Indices, test: Indices) -> Split:
    return Split(k=k, draw=draw, train=np.asarray(train, dtype=np.intp), test=np.sort(test))


def _one_draw_of_none(splits: list[Split]) -> list[Split]:
    """Keep one draw of k = 0, since all draws of no observation are equal."""
    return [split for split in splits if split.k != 0 or split.draw == 0]
