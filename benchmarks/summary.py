"""Summarise accuracy cases the one way that every accuracy benchmark does, and print tables.

A case is the object that they print as JSON, with ``predicted_s``, ``low_s``, ``high_s``,
``measured_s``, ``noise_ratio``, ``global_batch``, ``model``, ``source``, ``method``, ``ranks``,
``status``, … A case without a prediction or without a measurement counts as an error of 100 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from estimator.coefficients import INTERVAL_ALPHA

Case = Mapping[str, Any]

FAILED_ERROR_RATIO = 1.0
NOISY_RATIO = 0.05
# Pairs whose measured throughputs differ by less are not asked for their order.
PAIR_GAP_RATIO = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The median and the worst error that a method may show."""

    median_ratio: float
    worst_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRow:
    """Errors of one group of cases; None where a figure has no case to come from.

    `beyond_bound` counts the cases whose error exceeds max(worst bound, 2 · noise_ratio), and
    `within_bound_ratio` is the share of the others. Order figures compare global_batch / step time:
    `rank_correlation` (Spearman) over all cases of the group, `pairs_right_ratio` over the `pairs`
    of one model and source whose measured throughputs differ by at least the asked gap.
    `interval_score_ratio` is the mean interval score of the 80 % intervals over the measured time,
    `constant_score_ratio` that of predictions ± one relative width.
    """

    group: Mapping[str, Any]
    cases: int
    failed: int
    median_ratio: float
    p90_ratio: float
    worst_ratio: float
    mean_ratio: float
    bias_ratio: float | None
    beyond_bound: int | None
    within_bound_ratio: float | None
    noisy_share_ratio: float | None
    rank_correlation: float | None
    pairs: int
    pairs_right_ratio: float | None
    intervals: int
    coverage_ratio: float | None
    interval_score_ratio: float | None
    constant_score_ratio: float | None


def error_ratio(case: Case) -> float:
    """|predicted − measured| / measured; 1 for a case without one of them."""
    if not _is_complete(case):
        return FAILED_ERROR_RATIO
    return float(abs(case["predicted_s"] - case["measured_s"]) / case["measured_s"])


def is_beyond(case: Case, worst_ratio: float) -> bool:
    """Whether a case breaks a worst bound even after allowing twice its own noise."""
    return error_ratio(case) > max(worst_ratio, 2 * (case.get("noise_ratio") or 0.0))


def noise_ratio(samples_s: Sequence[float]) -> float:
    """Half the 10-90 % range of repeated measurements over their median."""
    low, high = np.quantile(samples_s, [0.1, 0.9])
    return float((high - low) / 2 / np.median(samples_s))


def interval_score(low: Any, high: Any, value: Any) -> Any:
    """Width plus 2/alpha times the distance by which the value lies outside; of one or an array.

    Gneiting and Raftery, Strictly Proper Scoring Rules, JASA 102 (2007), equation 43.
    """
    outside = np.maximum(low - value, 0.0) + np.maximum(value - high, 0.0)
    return (high - low) + 2 / INTERVAL_ALPHA * outside


def summarise(
    cases: Iterable[Case],
    *,
    by: Sequence[str] = ("method", "ranks"),
    bounds: Mapping[str, Bound] | None = None,
    pair_gap_ratio: float = PAIR_GAP_RATIO,
) -> list[SummaryRow]:
    """One row per distinct value of the fields `by`, in order of first appearance.

    `bounds` maps a method to what it may show; methods without one have no `beyond_bound`.
    """
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault(tuple(case.get(name) for name in by), []).append(case)
    return [
        _row(dict(zip(by, key, strict=True)), members, bounds or {}, pair_gap_ratio)
        for key, members in groups.items()
    ]


def _row(
    group: dict[str, Any], cases: list[Case], bounds: Mapping[str, Bound], pair_gap_ratio: float
) -> SummaryRow:
    errors = np.array([error_ratio(case) for case in cases])
    complete = [case for case in cases if _is_complete(case)]
    signed = [case["predicted_s"] / case["measured_s"] - 1 for case in complete]
    noises = [case["noise_ratio"] for case in cases if case.get("noise_ratio") is not None]
    bounded = [case for case in cases if case.get("method") in bounds]
    beyond = sum(is_beyond(case, bounds[case["method"]].worst_ratio) for case in bounded)
    pairs, right = _pairs_right(cases, pair_gap_ratio)
    scored = [case for case in complete if _has_interval(case)]
    return SummaryRow(
        group=group,
        cases=len(cases),
        failed=len(cases) - len(complete),
        median_ratio=float(np.median(errors)),
        p90_ratio=float(np.quantile(errors, 0.9)),
        worst_ratio=float(errors.max()),
        mean_ratio=float(errors.mean()),
        bias_ratio=float(np.median(signed)) if signed else None,
        beyond_bound=beyond if bounded else None,
        within_bound_ratio=1 - beyond / len(bounded) if bounded else None,
        noisy_share_ratio=_mean(noises, lambda noise: float(noise > NOISY_RATIO)),
        rank_correlation=_rank_correlation(complete),
        pairs=pairs,
        pairs_right_ratio=right / pairs if pairs else None,
        intervals=len(scored),
        coverage_ratio=_mean(scored, _is_covered),
        interval_score_ratio=_mean(scored, _relative_interval_score),
        constant_score_ratio=constant_score_ratio(scored),
    )


def constant_score_ratio(scored: Sequence[Case]) -> float | None:
    """The mean interval score, over the measured time, of predictions ± one relative width.

    The width is the one that covers 8 in 10 of these very cases: no constant could know it better.
    """
    if not scored:
        return None
    predicted = np.array([case["predicted_s"] for case in scored])
    measured = np.array([case["measured_s"] for case in scored])
    width = np.exp(np.quantile(np.abs(np.log(measured / predicted)), 0.8))
    scores = interval_score(predicted / width, predicted * width, measured) / measured
    return float(np.mean(scores))


def _is_complete(case: Case) -> bool:
    return case.get("predicted_s") is not None and case.get("measured_s") is not None


def _has_interval(case: Case) -> bool:
    return case.get("low_s") is not None and case.get("high_s") is not None


def _is_covered(case: Case) -> float:
    return float(case["low_s"] <= case["measured_s"] <= case["high_s"])


def _relative_interval_score(case: Case) -> float:
    score = float(interval_score(case["low_s"], case["high_s"], case["measured_s"]))
    return score / float(case["measured_s"])


def _mean(items: Sequence[Any], measure: Callable[[Any], float]) -> float | None:
    return math.fsum(measure(item) for item in items) / len(items) if items else None


def _throughput(case: Case, field: str) -> float | None:
    seconds = case.get(field)
    if seconds is None:
        return None
    return float((case.get("global_batch") or 1) / seconds)


def _pairs_right(cases: Sequence[Case], gap_ratio: float) -> tuple[int, int]:
    """How many pairs differ by the gap, and how many of them are predicted in the right order.

    A pair with a missing prediction counts as wrong; one without a measurement cannot be judged.
    """
    alike: dict[tuple[Any, ...], list[tuple[float, float | None]]] = {}
    for case in cases:
        measured = _throughput(case, "measured_s")
        if measured is not None:
            key = tuple(case.get(name) for name in ("source", "model", "method", "k", "draw"))
            alike.setdefault(key, []).append((measured, _throughput(case, "predicted_s")))
    pairs = right = 0
    for members in alike.values():
        for (measured, predicted), (other_measured, other_predicted) in combinations(members, 2):
            slower, faster = sorted((measured, other_measured))
            if faster < slower * (1 + gap_ratio):
                continue
            pairs += 1
            if predicted is not None and other_predicted is not None:
                right += (predicted - other_predicted) * (measured - other_measured) > 0
    return pairs, right


def _rank_correlation(cases: Sequence[Case]) -> float | None:
    """Spearman's: the correlation of the ranks, ties sharing their mean rank."""
    if len(cases) < 2:
        return None
    from scipy.stats import rankdata

    predicted, measured = (
        rankdata([_throughput(case, name) or 0.0 for case in cases])
        for name in ("predicted_s", "measured_s")
    )
    if predicted.std() == 0 or measured.std() == 0:
        return None
    return float(np.corrcoef(predicted, measured)[0, 1])


def describe(cases: Sequence[Case], bounds: Mapping[str, Bound] | None = None) -> Iterator[str]:
    """Each case's prediction beside its measurement, then the errors by method and ranks."""
    lines = [["case", "method", "predicted", "measured", "error", "noise", "in 80 %", ""]]
    for case in cases:
        seconds = case.get("predicted_s"), case.get("measured_s")
        covered = ""
        if _is_complete(case) and _has_interval(case):
            covered = "yes" if _is_covered(case) else "no"
        texts = [*map(milliseconds, seconds), off(*seconds), percent(case.get("noise_ratio"))]
        name = case.get("id") or case.get("key") or case.get("model")
        reason = "" if case.get("status", "ok") == "ok" else str(case.get("reason") or "failed")
        lines.append([str(name), str(case.get("method", "")), *texts, covered, reason])
    yield format_table(lines)
    yield "\n" + format_rows(summarise(cases, bounds=bounds))
    for method, bound in (bounds or {}).items():
        asked = f"median {percent(bound.median_ratio)}, worst {percent(bound.worst_ratio)}"
        yield f"asked of {method}: {asked}; beyond: error > max(worst, 2 × noise)"


def format_rows(rows: Sequence[SummaryRow]) -> str:
    """The rows as an aligned table for people; ratios as percentages."""
    if not rows:
        return "no cases"
    header = [*rows[0].group, "cases", "failed", "median", "p90", "worst", "bias", "beyond"]
    header += ["noisy", "rank corr", "pairs right", "coverage", "score"]
    lines = [header]
    for row in rows:
        right = percent(row.pairs_right_ratio)
        lines.append(
            [
                *(str(value) for value in row.group.values()),
                str(row.cases),
                str(row.failed),
                percent(row.median_ratio),
                percent(row.p90_ratio),
                percent(row.worst_ratio),
                percent(row.bias_ratio),
                "-" if row.beyond_bound is None else str(row.beyond_bound),
                percent(row.noisy_share_ratio),
                "-" if row.rank_correlation is None else f"{row.rank_correlation:.3f}",
                f"{right} of {row.pairs}" if row.pairs else "-",
                f"{percent(row.coverage_ratio)} of {row.intervals}" if row.intervals else "-",
                percent(row.interval_score_ratio),
            ]
        )
    return format_table(lines)


def format_table(lines: Sequence[Sequence[str]]) -> str:
    """Columns aligned: the first and those without a heading to the left, others to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 or not lines[0][column] else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def percent(ratio: float | None, sign: str = "") -> str:
    """A ratio for people, with its sign where `sign` is ``+``; a dash where there is none."""
    return "-" if ratio is None else f"{100 * ratio:{sign}.1f} %"


def milliseconds(seconds: float | None) -> str:
    """A time for people; a dash where there is none."""
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"


def off(predicted: float | None, measured: float | None) -> str:
    """How far a prediction is above what was measured, for people; a dash where one is missing."""
    if predicted is None or measured is None:
        return "-"
    return percent(predicted / measured - 1, "+")
