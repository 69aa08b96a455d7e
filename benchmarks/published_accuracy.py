"""Judge estimates against step times that others measured and published, source by source.

Every table of a folder in the standard columns is read (by default those that ship in
data/published). Rows that
qualify (a training step under a strategy that the engine has, of a source that is described in
``published/``) are asked of the engine with an empty store (`cold`), after 8 observations drawn at
random of each source and GPU, five times (`calibrated`), and of a line of operations at a fixed
share of the peak (`naive`). What does not qualify, or is not mapped, is counted with its reason.
Sources are never pooled. A kernel model fitted without what is judged is looked for in the work's
`kernels.json`; the picture of ``docs/accuracy.md`` is drawn there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from options import Options
from published.graphs import GRAPHS, GraphStore
from published.mapping import Outcome, Question, Verdict, verdicts
from published.methods import calibrated_cases, cold_cases, naive_cases
from records import say
from summary import Case, SummaryRow, format_table, summarise

from estimator.kernels.datasheet_model import choose_kernel_model

# Reasons printed for each source, the commonest first.
_MOST_REASONS = 12
QUICK = ("torchtitan", "sailor_e2e", "fms")
_COLUMNS = ["source", "table", "rows", "qualify", "mapped", "commonest reason against"]


def run(options: Options) -> Mapping[str, Any]:
    """The cases of every mapped row by every method, and what became of all rows; draws them."""
    if (kernels := options.work / "kernels.json").exists():
        choose_kernel_model(kernels)
    few = QUICK if options.quick else ()
    asked = list(verdicts(options.data, GraphStore(GRAPHS), options.only or few))
    cases = judged([row.question for row in asked if row.question is not None])
    if find_spec("matplotlib") and cases:
        draw(cases, options.work / "accuracy.svg")
    counts = counted(asked)
    return {
        "cases": cases,
        "summary": summaries(cases),
        "report": [format_table([_COLUMNS, *counts]), "", *_reasons(asked)],
        "tables": [{"title": "Rows", "columns": _COLUMNS, "rows": counts}],
    }


def judged(questions: Sequence[Question]) -> list[dict[str, Any]]:
    """The cases of every method, source by source and GPU by GPU."""

    def place(question: Question) -> tuple[str, str]:
        return question.row.step.source, question.row.step.gpu

    cases: list[dict[str, Any]] = []
    for (source, gpu), members in groupby(sorted(questions, key=place), key=place):
        alike = list(members)
        say(f"{source}, {gpu}: {len(alike)} rows")
        for method in (cold_cases, calibrated_cases, naive_cases):
            cases += method(alike)
    return cases


def place_of(case: Case) -> str:
    """One GPU, several of one node, or several nodes."""
    if case["ranks"] == 1:
        return "one GPU"
    return "one node" if case["nodes"] == 1 else "several nodes"


def summaries(cases: Sequence[Case]) -> list[SummaryRow]:
    """Errors of each source by each method, then of each source's places, cold."""
    ordered = sorted(cases, key=lambda case: case["source"].lower())
    cold = [{**case, "place": place_of(case)} for case in ordered if case["method"] == "cold"]
    return [
        *summarise(ordered, by=("source", "method")),
        *summarise(cold, by=("place", "source", "method")),
    ]


def counted(found: Sequence[Verdict]) -> list[list[str]]:
    """How many rows of each table qualify and are mapped."""
    lines = []
    outcomes = Counter((each.table, each.source, each.outcome) for each in found)
    for table, source in sorted({(each.table, each.source) for each in found}):
        kinds: tuple[Outcome, ...] = ("mapped", "unmapped", "not_qualified")
        mapped, unmapped, others = (outcomes[table, source, kind] for kind in kinds)
        qualified = mapped + unmapped
        share = f"{mapped} ({100 * mapped / qualified:.0f} %)" if qualified else "0"
        against = Counter(
            each.reason
            for each in found
            if (each.table, each.source) == (table, source) and each.outcome != "mapped"
        )
        reason = against.most_common(1)[0][0] if against else ""
        lines.append([source, table, str(qualified + others), str(qualified), share, reason])
    return lines


def _reasons(found: Sequence[Verdict]) -> Iterator[str]:
    """Why rows of each source were not judged, the commonest first."""
    for source in sorted({each.source for each in found}):
        reasons = Counter(
            (each.outcome.replace("_", " "), each.reason)
            for each in found
            if each.source == source and each.outcome != "mapped"
        )
        for (outcome, reason), count in reasons.most_common(_MOST_REASONS):
            yield f"{source}, {outcome}: {count} rows: {reason}"


def draw(cases: Sequence[Case], path: Path) -> None:
    """Predicted against measured step times of the cold answers, one colour for each source."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 7.5), layout="constrained")
    cold = [case for case in cases if case["method"] == "cold" and case["predicted_s"]]
    pairs = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    colours = pairs[::2] + pairs[1::2]  # the strong ones, then their pale companions
    for number, source in enumerate(sorted({case["source"] for case in cold})):
        members = [case for case in cold if case["source"] == source]
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
