"""Score an evaluation: errors with their standard deviation over draws, order, coverage; tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from summary import FAILED_ERROR_RATIO, PAIR_GAP_RATIO, format_table, percent

from calibration.evaluation import Evaluation, Run

Array = NDArray[np.float64]

# Pairs of placements that a scheduler has to order: these two, and any with nearly equal ranks on
# different numbers of nodes whose rates differ by at least the gap.
FEWER_DEVICES, MORE_NODES = (2, 1), (3, 2)
CLOSE_RANKS, CLOSE_GAP_RATIO = 1, 0.05
# Rows of one batch that are compared pairwise; of more, every second, third and so on.
MOST_COMPARED = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanDeviation:
    """A mean over draws, and their standard deviation; None for a single draw."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> MeanDeviation:
        """Of one value a draw."""
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
        return cls(mean=float(np.mean(values)), deviation=deviation)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanMost:
    """A mean, and the largest of all."""

    mean: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> MeanMost | None:
        """Of values, None for none."""
        known = [value for value in values if value is not None]
        return cls(mean=float(np.mean(known)), most=max(known)) if known else None

    @classmethod
    def over(cls, groups: Iterable[MeanMost | None]) -> MeanMost | None:
        """Of groups that weigh the same, None for none."""
        known = [group for group in groups if group is not None]
        if not known:
            return None
        return cls(
            mean=float(np.mean([group.mean for group in known])),
            most=max(group.most for group in known),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How one method did on one job after k observations.

    `median`, `p90` and `mape` are relative errors of a draw's rows, a row without a prediction
    counting 100 %. `order_right_ratio` is the share of pairs of one batch whose measured rates
    differ by 10 % that are predicted in the right order. `moved` and `added` are the mean and the
    largest of those ratios of a run. None where there is nothing to score.
    """

    label: str
    method: str
    k: int | None
    draws: int
    rows: int
    failed: int
    median: MeanDeviation
    p90: MeanDeviation
    mape: MeanDeviation
    pairs: int
    order_right_ratio: float | None
    intervals: int
    coverage_ratio: float | None
    moved: MeanMost | None
    added: MeanMost | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overall:
    """How one method did after k observations, each job weighing the same."""

    method: str
    k: int | None
    jobs: int
    median_ratio: float
    p90_ratio: float
    mape_ratio: float
    worst_mape_ratio: float
    order_right_ratio: float | None
    coverage_ratio: float | None
    moved: MeanMost | None
    added: MeanMost | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairScore:
    """How many pairs of placements a method puts in the right order.

    `few` compares 2 devices of one node with 3 over two nodes; `close` every two rows of one batch
    on different numbers of nodes, devices differing by at most one, rates by at least 5 %.
    """

    label: str
    method: str
    few: int
    few_right: int
    close: int
    close_right: int


def scores_of(evaluation: Evaluation) -> list[Score]:
    """One score per job, method and k, in the order of the runs."""
    groups: defaultdict[tuple[int, str, int | None], list[Run]] = defaultdict(list)
    for run in evaluation.runs:
        groups[run.job, run.method, run.split.k].append(run)
    return [_score(evaluation, *key, runs) for key, runs in groups.items()]


def _score(evaluation: Evaluation, job: int, method: str, k: int | None, runs: list[Run]) -> Score:
    draws: defaultdict[int, list[Run]] = defaultdict(list)
    for run in runs:
        draws[run.split.draw].append(run)
    errors = [
        np.concatenate([_errors(evaluation, run) for run in members]) for members in draws.values()
    ]
    pairs, right = np.sum([_order(evaluation, run) for run in runs], axis=0)
    inside = _inside(evaluation, runs)
    return Score(
        label=evaluation.jobs[job].label,
        method=method,
        k=k,
        draws=len(draws),
        rows=round(np.mean([len(of_draw) for of_draw in errors])),
        failed=int(sum(np.isnan(run.predicted_s).sum() for run in runs)),
        median=MeanDeviation.of([float(np.median(of_draw)) for of_draw in errors]),
        p90=MeanDeviation.of([float(np.quantile(of_draw, 0.9)) for of_draw in errors]),
        mape=MeanDeviation.of([float(of_draw.mean()) for of_draw in errors]),
        pairs=int(pairs),
        order_right_ratio=float(right / pairs) if pairs else None,
        intervals=len(inside),
        coverage_ratio=_mean(inside),
        moved=MeanMost.of(run.moved_ratio for run in runs),
        added=MeanMost.of(run.added_ratio for run in runs),
    )


def overall(scores: Sequence[Score]) -> list[Overall]:
    """Every method and k over all jobs."""
    groups: defaultdict[tuple[str, int | None], list[Score]] = defaultdict(list)
    for score in scores:
        groups[score.method, score.k].append(score)
    return [
        Overall(
            method=method,
            k=k,
            jobs=len(members),
            median_ratio=float(np.mean([score.median.mean for score in members])),
            p90_ratio=float(np.mean([score.p90.mean for score in members])),
            mape_ratio=float(np.mean([score.mape.mean for score in members])),
            worst_mape_ratio=max(score.mape.mean for score in members),
            order_right_ratio=_mean([score.order_right_ratio for score in members]),
            coverage_ratio=_mean([score.coverage_ratio for score in members]),
            moved=MeanMost.over(score.moved for score in members),
            added=MeanMost.over(score.added for score in members),
        )
        for (method, k), members in groups.items()
    ]


def pair_scores(evaluation: Evaluation) -> list[PairScore]:
    """Both comparisons for each job and method of the protocol ``pairs``."""
    found = []
    for run in evaluation.runs:
        job = evaluation.jobs[run.job]
        X = job.X()[run.split.test]
        # Throughput up to a factor that the rows of one batch have in common.
        measured = X[:, 0] / job.y()[run.split.test]
        predicted = X[:, 0] / run.predicted_s
        first, second = _same_batch(X)
        gap = np.abs(np.log(measured[first] / measured[second])) >= np.log1p(CLOSE_GAP_RATIO)
        close = gap & (X[first, 1] != X[second, 1])
        close &= np.abs(X[first, 0] - X[second, 0]) <= CLOSE_RANKS
        right = _is_right(measured, predicted, first, second)
        few, few_right = _few_against_more(X, measured, predicted)
        found.append(
            PairScore(
                label=job.label,
                method=run.method,
                few=few,
                few_right=few_right,
                close=int(close.sum()),
                close_right=int((close & right).sum()),
            )
        )
    return found


def to_dict(evaluation: Evaluation, scores: Sequence[Score]) -> dict[str, Any]:
    """All scores in base units, as plain values."""
    plain: dict[str, Any] = {
        "scores": [asdict(score) for score in scores],
        "overall": [asdict(row) for row in overall(scores)],
    }
    if evaluation.protocol == "pairs":
        plain["pairs"] = [asdict(row) for row in pair_scores(evaluation)]
    return plain


def _measured_s(evaluation: Evaluation, run: Run) -> Array:
    return evaluation.jobs[run.job].y()[run.split.test]


def _errors(evaluation: Evaluation, run: Run) -> Array:
    measured_s = _measured_s(evaluation, run)
    errors = np.abs(run.predicted_s - measured_s) / measured_s
    return np.where(np.isnan(errors), FAILED_ERROR_RATIO, errors)


def _order(evaluation: Evaluation, run: Run) -> tuple[int, int]:
    """Pairs of one batch that differ enough, and how many of them are in the right order."""
    job = evaluation.jobs[run.job]
    X = job.X()[run.split.test]
    if X.shape[1] < 5:
        # Asynchronous workers: in every model more of them are faster.
        return 0, 0
    measured, predicted = X[:, 0] / job.y()[run.split.test], X[:, 0] / run.predicted_s
    first, second = _same_batch(X)
    judged = np.abs(np.log(measured[first] / measured[second])) >= np.log1p(PAIR_GAP_RATIO)
    right = judged & _is_right(measured, predicted, first, second)
    return int(judged.sum()), int(right.sum())


def _same_batch(X: Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """First and second place of every two rows of one batch and number of micro-batches."""
    firsts, seconds = [], []
    _, groups = np.unique(X[:, 2:4], axis=0, return_inverse=True)
    for group in range(groups.max() + 1):
        members = np.flatnonzero(groups.ravel() == group)
        members = members[:: -(-len(members) // MOST_COMPARED)]
        first, second = np.triu_indices(len(members), 1)
        firsts.append(members[first])
        seconds.append(members[second])
    return np.concatenate(firsts), np.concatenate(seconds)


def _is_right(
    measured: Array, predicted: Array, first: NDArray[np.intp], second: NDArray[np.intp]
) -> NDArray[np.bool_]:
    # A missing prediction is NaN, which is never right.
    agreement = (measured[first] - measured[second]) * (predicted[first] - predicted[second])
    return np.asarray(agreement > 0)


def _few_against_more(X: Array, measured: Array, predicted: Array) -> tuple[int, int]:
    """2 devices of one node against 3 over two nodes, once per batch, repetitions averaged."""
    few = right = 0
    for batch, accumulation in np.unique(X[:, 2:4], axis=0):
        alike = (X[:, 2] == batch) & (X[:, 3] == accumulation)
        two, three = (
            alike & (X[:, 0] == ranks) & (X[:, 1] == nodes)
            for ranks, nodes in (FEWER_DEVICES, MORE_NODES)
        )
        if two.any() and three.any():
            few += 1
            difference = measured[two].mean() - measured[three].mean()
            right += bool((predicted[two].mean() - predicted[three].mean()) * difference > 0)
    return few, right


def _inside(evaluation: Evaluation, runs: Sequence[Run]) -> list[bool]:
    """Whether each row with an interval lies inside."""
    inside: list[bool] = []
    for run in runs:
        if run.low_s is not None and run.high_s is not None:
            measured_s = _measured_s(evaluation, run)
            inside += list((run.low_s <= measured_s) & (measured_s <= run.high_s))
    return inside


def _mean(values: Sequence[float | None] | Sequence[float] | Sequence[bool]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def evaluation_report(evaluation: Evaluation) -> Iterator[str]:
    """Errors per job and over all jobs, and the order of placements."""
    scores = scores_of(evaluation)
    yield f"{evaluation.protocol}: median / 90th percentile of |error|, mean ± sd of draws"
    for label in dict.fromkeys(score.label for score in scores):
        of_job = [score for score in scores if score.label == label]
        lines = [["k", "rows", *evaluation.methods]]
        for k in dict.fromkeys(score.k for score in of_job):
            by_method = {score.method: score for score in of_job if score.k == k}
            rows = str(next(iter(by_method.values())).rows)
            lines.append(
                [_count(k), rows, *(_error_cells(by_method[m]) for m in evaluation.methods)]
            )
        yield f"\n{label}\n{format_table(lines)}"
    lines = [["method", "k", "median", "p90", "MAPE", "worst job", "order right", "inside 80 %"]]
    lines[0] += ["outlier instead moves", "outlier added moves"]
    for row in sorted(overall(scores), key=lambda row: -1 if row.k is None else row.k):
        ratios = [row.median_ratio, row.p90_ratio, row.mape_ratio, row.worst_mape_ratio]
        ratios += [row.order_right_ratio, row.coverage_ratio]
        moves = [_mean_most(row.moved), _mean_most(row.added)]
        lines.append([row.method, _count(row.k), *map(percent, ratios), *moves])
    yield f"\nmean over jobs\n{format_table(lines)}"
    if evaluation.protocol == "pairs":
        lines = [["job", "method", "2 or 3", "close", "close, %"]]
        pairs = pair_scores(evaluation)
        for method in dict.fromkeys(row.method for row in pairs):
            of_method = [row for row in pairs if row.method == method]
            lines += [_pair_cells(row.label, method, [row]) for row in of_method]
            lines.append(_pair_cells("all", method, of_method))
        title = "which is faster: 2 devices of a node or 3 over 2 nodes; close placements"
        yield f"\n{title}\n{format_table(lines)}"


def _error_cells(score: Score) -> str:
    if score.failed == score.rows * score.draws:
        return "-"
    return f"{_mean_deviation(score.median)} / {_mean_deviation(score.p90)}"


def _mean_deviation(value: MeanDeviation) -> str:
    deviation = "" if value.deviation is None else f" ± {percent(value.deviation)}"
    return percent(value.mean) + deviation


def _mean_most(ratios: MeanMost | None) -> str:
    return "-" if ratios is None else f"{percent(ratios.mean)}, at most {percent(ratios.most)}"


def _pair_cells(label: str, method: str, rows: Sequence[PairScore]) -> list[str]:
    few, few_right = sum(row.few for row in rows), sum(row.few_right for row in rows)
    close, close_right = sum(row.close for row in rows), sum(row.close_right for row in rows)
    share = percent(close_right / close if close else None)
    return [label, method, f"{few_right} of {few}", f"{close_right} of {close}", share]


def _count(k: int | None) -> str:
    return "-" if k is None else str(k)
