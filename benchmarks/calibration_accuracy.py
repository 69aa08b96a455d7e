"""Judge calibration on a table of measured steps: learn from some rows and predict the others.

Beside it stand linear scaling and the models of Optimus, Pollux and ONES, on the same draws.
``--only`` names protocols, tables of ``--data`` and numbers of observations, by default k-shot on
`pollux_t4`: *k-shot* learns from k rows, one of them on a single device; *online* from all
single-device rows and k others; *few-shot* from single-device rows and six others; *cv* is five
folds; *pairs* asks after few-shot which of two placements is faster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from calibration.evaluation import Array, Run, cases, evaluate, processes
from calibration.protocols import PROTOCOLS
from calibration.tables import Job, read_steps
from numpy.typing import NDArray
from options import Options
from records import now, say
from summary import FAILED_ERROR_RATIO, format_table, percent

# Pairs of placements that a scheduler has to order: these two, and any with nearly equal ranks on
# different numbers of nodes whose rates differ by at least the gap.
FEWER_DEVICES, MORE_NODES = (2, 1), (3, 2)
CLOSE_RANKS, CLOSE_GAP_RATIO = 1, 0.05
# Rows of one batch that are compared pairwise; of more, every second, third and so on.
MOST_COMPARED = 500


def run(options: Options) -> Mapping[str, Any]:
    """The cases of each protocol that is asked for; a quick run learns from three rows of Gavel."""
    protocols = [name for name in PROTOCOLS if name in options.only]
    ks = tuple(int(word) for word in options.only if word.isdigit())
    known = [path.stem for path in sorted(options.data.glob("*.csv"))]
    tables = [name for name in known if name in options.only]
    if options.only and not (protocols or ks or tables):
        return {"cases": []}
    if options.quick:
        ks, tables = ks or (3,), tables or ["gavel"]
    paths = [options.data / f"{name}.csv" for name in tables or ["pollux_t4"]]
    table = read_steps(paths)
    for what, counts in (("left out", table.refused), ("completed", table.assumed)):
        for reason, count in counts.items():
            say(f"{count} rows {what}: {reason}")
    found, lines = list[dict[str, Any]](), list[str]()
    with processes() as executor:
        for protocol in protocols or ["k-shot"]:
            runs = evaluate(table.jobs, protocol, ks=ks or None, executor=executor)
            found += cases(table.jobs, runs, protocol, now())
            lines += report(table.jobs, runs, protocol)
    return {"cases": found, "report": lines}


def report(jobs: Sequence[Job], runs: Sequence[Run], protocol: str) -> Iterator[str]:
    """Mean errors of each method, each job weighing the same, what an outlier moves, and order."""
    groups: defaultdict[tuple[str, int | None], list[Run]] = defaultdict(list)
    for each in runs:
        groups[each.method, each.split.k].append(each)
    lines = [["method", "k", "mean error", "worst job", "outlier instead", "outlier added"]]
    for (method, k), members in groups.items():
        errors = mean_errors(jobs, members)
        moves = [
            most_of([getattr(each, name) for each in members])
            for name in ("moved_ratio", "added_ratio")
        ]
        ratios = map(percent, (float(np.mean(errors)), max(errors)))
        lines.append([method, "-" if k is None else str(k), *ratios, *moves])
    yield f"{protocol}: mean over jobs\n{format_table(lines)}"
    if protocol == "pairs":
        lines = [["method", "2 devices of a node or 3 over 2 nodes", "close placements"]]
        for (method, _), members in groups.items():
            few, few_right, close, close_right = np.sum([ordered(jobs, r) for r in members], axis=0)
            lines.append([method, f"{few_right} of {few}", f"{close_right} of {close}"])
        yield f"which is faster\n{format_table(lines)}"


def mean_errors(jobs: Sequence[Job], runs: Sequence[Run]) -> list[float]:
    """The mean relative error of each job; a row without a prediction counts 100 %."""
    by_job: defaultdict[int, list[Array]] = defaultdict(list)
    for each in runs:
        errors = np.abs(each.predicted_s / jobs[each.job].y()[each.split.test] - 1)
        by_job[each.job].append(np.where(np.isnan(errors), FAILED_ERROR_RATIO, errors))
    return [float(np.concatenate(errors).mean()) for errors in by_job.values()]


def most_of(ratios: Sequence[float | None]) -> str:
    """Their mean and the largest, for people."""
    known = [ratio for ratio in ratios if ratio is not None]
    return f"{percent(float(np.mean(known)))}, at most {percent(max(known))}" if known else "-"


def ordered(jobs: Sequence[Job], run: Run) -> tuple[int, int, int, int]:
    """Pairs of few devices against more nodes, how many are right, and so of close placements.

    The former once for each batch, repetitions averaged.
    """
    X, y = jobs[run.job].X()[run.split.test], jobs[run.job].y()[run.split.test]
    # Throughput up to a factor that the rows of one batch have in common.
    measured, predicted = X[:, 0] / y, X[:, 0] / run.predicted_s
    first, second = _same_batch(X)
    close = np.abs(np.log(measured[first] / measured[second])) >= np.log1p(CLOSE_GAP_RATIO)
    close &= (X[first, 1] != X[second, 1]) & (np.abs(X[first, 0] - X[second, 0]) <= CLOSE_RANKS)
    # A missing prediction is NaN, which is never right.
    agreement = (measured[first] - measured[second]) * (predicted[first] - predicted[second])
    few = right = 0
    for batch in np.unique(X[:, 2:4], axis=0):
        alike = (X[:, 2:4] == batch).all(axis=1)
        two, three = (
            alike & (X[:, :2] == placement).all(axis=1) for placement in (FEWER_DEVICES, MORE_NODES)
        )
        if two.any() and three.any():
            few += 1
            difference = measured[two].mean() - measured[three].mean()
            right += bool((predicted[two].mean() - predicted[three].mean()) * difference > 0)
    return few, right, int(close.sum()), int((close & (agreement > 0)).sum())


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
