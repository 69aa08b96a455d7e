"""Lay out how well calibration predicts as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from calibration.evaluation import Evaluation
from calibration.scores import (
    MeanDeviation,
    MeanMost,
    Overall,
    PairScore,
    Score,
    overall,
    pair_scores,
    scores_of,
)

# Errors above this are not printed as numbers: the model does not fit at all.
LARGEST_PRINTED_RATIO = 10.0


def evaluation_report(evaluation: Evaluation) -> RenderableType:
    """Errors per job and over all jobs, and the order of placements."""
    scores = scores_of(evaluation)
    title = f"{evaluation.protocol}: median / 90th percentile of |error|, %, mean ± sd of draws\n"
    parts: list[RenderableType] = [title]
    for label in dict.fromkeys(score.label for score in scores):
        parts.append(_errors_table(label, [score for score in scores if score.label == label]))
    parts.append(_overall_table(overall(scores)))
    if evaluation.protocol == "pairs":
        parts.append(_pairs_table(pair_scores(evaluation)))
    return Group(*parts)


def _errors_table(label: str, scores: Sequence[Score]) -> Table:
    table = _table(label)
    methods = list(dict.fromkeys(score.method for score in scores))
    for name in ("k", "rows", *methods):
        table.add_column(name, justify="right")
    for k in dict.fromkeys(score.k for score in scores):
        of_k = {score.method: score for score in scores if score.k == k}
        rows = next(iter(of_k.values())).rows
        table.add_row(_count(k), str(rows), *(_errors(of_k[method]) for method in methods))
    return table


def _errors(score: Score) -> str:
    if score.failed == score.rows * score.draws:
        return "-"
    return f"{_mean_deviation(score.median)} / {_mean_deviation(score.p90)}"


def _overall_table(rows: Sequence[Overall]) -> Table:
    table = _table("mean over jobs, %")
    for name in ("method", "k", "median", "p90", "MAPE", "worst job", "order right"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    has_intervals = any(row.coverage_ratio is not None for row in rows)
    if has_intervals:
        table.add_column("inside 80 %", justify="right")
    has_outliers = any(row.moved is not None for row in rows)
    if has_outliers:
        for name in ("outlier instead moves", "outlier added moves"):
            table.add_column(name, justify="right")
    for row in sorted(rows, key=lambda row: -1 if row.k is None else row.k):
        cells = [row.method, _count(row.k)]
        cells += [_percent(row.median_ratio), _percent(row.p90_ratio), _percent(row.mape_ratio)]
        cells += [_percent(row.worst_mape_ratio), _percent(row.order_right_ratio)]
        if has_intervals:
            cells.append(_percent(row.coverage_ratio))
        if has_outliers:
            cells += [_mean_most(row.moved), _mean_most(row.added)]
        table.add_row(*cells)
    return table


def _mean_most(ratios: MeanMost | None) -> str:
    if ratios is None:
        return "-"
    return f"{_percent(ratios.mean)}, at most {_percent(ratios.most)}"


def _pairs_table(rows: Sequence[PairScore]) -> Table:
    table = _table("which is faster: 2 devices of a node or 3 over 2 nodes; close placements")
    for name in ("job", "method", "2 or 3", "close", "close, %"):
        table.add_column(name, justify="left" if name in ("job", "method") else "right")
    for method in dict.fromkeys(row.method for row in rows):
        of_method = [row for row in rows if row.method == method]
        for row in of_method:
            table.add_row(*_pair_cells(row.label, method, [row]))
        table.add_row(*_pair_cells("all", method, of_method), end_section=True)
    return table


def _pair_cells(label: str, method: str, rows: Sequence[PairScore]) -> list[str]:
    few, few_right = sum(row.few for row in rows), sum(row.few_right for row in rows)
    close, close_right = sum(row.close for row in rows), sum(row.close_right for row in rows)
    share = _percent(close_right / close if close else None)
    return [label, method, f"{few_right} of {few}", f"{close_right} of {close}", share]


def _table(title: str) -> Table:
    return Table(
        title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, title_style="bold"
    )


def _mean_deviation(value: MeanDeviation) -> str:
    if value.mean > LARGEST_PRINTED_RATIO:
        return f">{100 * LARGEST_PRINTED_RATIO:.0f}"
    deviation = "" if value.deviation is None else f"±{_digits(value.deviation)}"
    return f"{_digits(value.mean)}{deviation}"


def _digits(ratio: float) -> str:
    return f"{100 * ratio:.1f}" if ratio < 0.1 else f"{100 * ratio:.0f}"


def _percent(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    if ratio > LARGEST_PRINTED_RATIO:
        return f">{100 * LARGEST_PRINTED_RATIO:.0f}"
    return f"{100 * ratio:.1f}"


def _count(k: int | None) -> str:
    return "-" if k is None else str(k)
