"""Say per source how far predictions were off: as tables, and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from summary import SummaryRow, format_table, interval_score, percent, summarise

from published.mapping import Verdict

Case = Mapping[str, Any]
METHODS = ("cold", "calibrated", "naive")
# The splits that are printed where they are not all of a source's rows.
SPLITS: tuple[tuple[str, Callable[[Case], bool]], ...] = (
    ("all", lambda case: True),
    ("one GPU", lambda case: case["ranks"] == 1),
    ("one node, several GPUs", lambda case: case["nodes"] == 1 and case["ranks"] > 1),
    ("several nodes", lambda case: case["nodes"] > 1),
)
_FIGURES = ("cases", "MAPE", "median", "p90", "worst", "bias", "rank corr", "coverage", "score")
# Reasons printed for each source, the commonest first.
_MOST_REASONS = 12


def report(found: Sequence[Verdict], cases: Sequence[Case]) -> str:
    """Counts of rows, errors per source, split and method, reasons for refusals."""
    return "\n\n".join((_counts(found), _errors(cases), _reasons(found)))


def _counts(found: Sequence[Verdict]) -> str:
    lines = [["source", "table", "rows", "qualified", "mapped", "share"]]
    for (table, source), verdicts in _grouped(found, lambda each: (each.table, each.source)):
        outcomes = Counter(verdict.outcome for verdict in verdicts)
        qualified = outcomes["mapped"] + outcomes["unmapped"]
        share = f"{100 * outcomes['mapped'] / qualified:.0f} %" if qualified else "-"
        counts = (len(verdicts), qualified, outcomes["mapped"])
        lines.append([source, table, *map(str, counts), share])
    return format_table(lines)


def _errors(cases: Sequence[Case]) -> str:
    lines = [["source", "rows of", "method", *_FIGURES, "constant"]]
    for source, of_source in _grouped(cases, lambda case: case["source"]):
        for split, belongs in SPLITS:
            members = [case for case in of_source if belongs(case)]
            if not members or (split != "all" and len(members) == len(of_source)):
                continue
            for row in summarise(members, by=("method",)):
                of_method = [case for case in members if case["method"] == row.group["method"]]
                lines.append(
                    [source, split, *_figures(row), percent(constant_score_ratio(of_method))]
                )
    return format_table(lines)


def _figures(row: SummaryRow) -> list[str]:
    ratios = (row.mean_ratio, row.median_ratio, row.p90_ratio, row.worst_ratio, row.bias_ratio)
    return [
        str(row.group["method"]),
        str(row.cases),
        *map(percent, ratios),
        "-" if row.rank_correlation is None else f"{row.rank_correlation:.3f}",
        percent(row.coverage_ratio),
        percent(row.interval_score_ratio),
    ]


def constant_score_ratio(cases: Sequence[Case]) -> float | None:
    """The mean interval score, over the measured time, of predictions ± one relative width.

    The width is the one that covers 8 in 10 of these very cases: no constant could know it better.
    """
    known = [case for case in cases if case["predicted_s"] and case["low_s"] is not None]
    if not known:
        return None
    predicted = np.array([case["predicted_s"] for case in known])
    measured = np.array([case["measured_s"] for case in known])
    width = np.exp(np.quantile(np.abs(np.log(measured / predicted)), 0.8))
    scores = interval_score(predicted / width, predicted * width, measured) / measured
    return float(np.mean(scores))


def _reasons(found: Sequence[Verdict]) -> str:
    lines = [["rows that were not judged", "rows", "why"]]
    for source, verdicts in _grouped(found, lambda each: each.source):
        reasons = Counter(
            (verdict.outcome.replace("_", " "), verdict.reason)
            for verdict in verdicts
            if verdict.outcome != "mapped"
        )
        for (outcome, reason), count in reasons.most_common(_MOST_REASONS):
            lines.append([f"{source}, {outcome}", str(count), reason])
    # The last column is read as a sentence, so it stays unaligned.
    head = format_table([line[:2] for line in lines]).splitlines()
    return "\n".join(f"{text}  {line[2]}" for text, line in zip(head, lines, strict=True))


def _grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> list[tuple[Any, list[Any]]]:
    found: dict[Any, list[Any]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.items())


def draw(cases: Sequence[Case], path: Path) -> None:
    """Predicted against measured step times of the cold answers, one colour for each source."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 7.5), layout="constrained")
    cold = [case for case in cases if case["method"] == "cold" and case["predicted_s"]]
    pairs = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    colours = pairs[::2] + pairs[1::2]  # the strong ones, then their pale companions
    for number, (source, members) in enumerate(_grouped(cold, lambda case: case["source"])):
        axes.scatter(
            [case["measured_s"] for case in members],
            [case["predicted_s"] for case in members],
            s=7,
            alpha=0.6,
            linewidths=0,
            rasterized=True,
            zorder=2 + 1 / len(members),  # sources of few rows on top
            color=colours[number % len(colours)],
            label=f"{source} ({len(members)})",
        )
    times = [case[name] for case in cold for name in ("measured_s", "predicted_s")]
    ends = (min(times) / 1.3, max(times) * 1.3)
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for factor, label in ((1.25, "off by a quarter"), (1 / 1.25, None)):
        band = [end * factor for end in ends]
        axes.plot(ends, band, color="black", linewidth=0.7, linestyle=":", label=label)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    axes.set(xlabel="measured step time (s)", ylabel="predicted step time, no observations (s)")
    axes.legend(fontsize="small", frameon=False, markerscale=2)
    pyplot.rcParams["svg.hashsalt"] = "estimator"
    figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
