"""Split the steps of a job into training and test rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibration.tables import Job
from estimator.calibrate.performance_model import BATCH, RANKS

Indices = NDArray[np.intp]

SHOTS = (1, 3, 5, 10, 20)
ONLINE_SHOTS = (0, *SHOTS)
DRAWS = 8
FOLDS, FOLD_DRAWS = 5, 3
# Placements of the multi-device training rows of few-shot.
FEW_PLACEMENTS = ((2,), (1, 1), (4,))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """Training and test rows of a job; `k` observations, draw number `draw`."""

    k: int | None
    draw: int
    train: Indices
    test: Indices


def k_shot(job: Job, ks: Sequence[int] = SHOTS) -> list[Split]:
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


def online(job: Job, ks: Sequence[int] = ONLINE_SHOTS) -> list[Split]:
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


def few_shot(job: Job) -> list[Split]:
    """All single-device rows, and 2, 1+1 and 4 devices at the smallest and largest batch."""
    train = _few_shot_rows(job)
    test = np.setdiff1d(np.arange(len(job.steps)), train)
    return [_split(None, 0, train, test)] if len(train) and len(test) else []


def pairs(job: Job) -> list[Split]:
    """Trains as few-shot, and predicts all rows, to compare these with each other."""
    train = _few_shot_rows(job)
    several = (job.X()[:, RANKS] > 1).any()
    return [_split(None, 0, train, np.arange(len(job.steps)))] if len(train) and several else []


def _few_shot_rows(job: Job) -> Indices:
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


def cross_validation(job: Job) -> list[Split]:
    """Five-fold cross-validation, repeated with several shuffles."""
    splits = []
    for draw in range(FOLD_DRAWS if len(job.steps) >= FOLDS else 0):
        order = np.random.default_rng(draw).permutation(len(job.steps))
        for fold in np.array_split(order, FOLDS):
            splits.append(_split(None, draw, np.setdiff1d(order, fold), fold))
    return splits


# Every protocol, and whether it takes k.
PROTOCOLS: dict[str, Callable[..., list[Split]]] = {
    "k-shot": k_shot,
    "online": online,
    "few-shot": few_shot,
    "cv": cross_validation,
    "pairs": pairs,
}
PROTOCOLS_WITH_K = ("k-shot", "online")


def all_splits(
    jobs: Sequence[Job], protocol: str, ks: Sequence[int] | None = None
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
