"""Print the summary of accuracy cases as an aligned table; `estimator.accuracy` computes it."""

from __future__ import annotations

from collections.abc import Sequence

from estimator.accuracy import (
    INTERVAL_ALPHA,
    PAIR_GAP_RATIO,
    Bound,
    Case,
    SummaryRow,
    error_ratio,
    interval_score,
    is_beyond,
    noise_ratio,
    summarise,
)

# What the benchmarks import from here.
__all__ = [
    "INTERVAL_ALPHA",
    "PAIR_GAP_RATIO",
    "Bound",
    "Case",
    "SummaryRow",
    "error_ratio",
    "format_rows",
    "format_table",
    "interval_score",
    "is_beyond",
    "milliseconds",
    "noise_ratio",
    "off",
    "percent",
    "summarise",
]


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


def milliseconds(seconds: float | None, digits: int = 1, unit: str = " ms") -> str:
    """A time for people; a dash where there is none."""
    return "-" if seconds is None else f"{1e3 * seconds:.{digits}f}{unit}"


def off(predicted: float | None, measured: float | None) -> str:
    """How far a prediction is above what was measured, for people; a dash where one is missing."""
    if predicted is None or measured is None:
        return "-"
    return percent(predicted / measured - 1, "+")
