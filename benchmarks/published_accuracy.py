"""Judge estimates against step times that others measured and published, source by source.

``python benchmarks/published_accuracy.py [--data DIR] [--only SOURCE ...] [--json]`` reads every
table of DIR in the standard columns (by default those that ship in data/published). Rows that
qualify (a training step under a strategy that the engine has, of a source that is described in
``published/``) are asked of the engine with an empty store (`cold`), after 8 observations drawn at
random of each source and GPU, five times (`calibrated`), and of a line of operations at a fixed
share of the peak (`naive`). What does not qualify, or is not mapped, is counted with its reason.
``--page FILE`` fills the tables of a Markdown page, ``--picture FILE`` draws. With ``--from FILE``
all is of what earlier runs printed with ``--json``, and nothing is asked.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from options import add_data, parser_of
from published.graphs import GraphStore
from published.mapping import Question, Verdict, verdicts
from published.methods import calibrated_cases, cold_cases, naive_cases
from published.page import PageError, filled, read_runs
from published.report import draw, report
from published.timm_questions import timm_verdicts
from records import now, say

from estimator.files import home
from estimator.kernels.datasheet_model import choose_kernel_model


def main() -> None:
    """Map, predict, print."""
    parser = parser_of(__doc__)
    add_data(parser)
    parser.add_argument("--only", nargs="+", default=(), help="tables, or words of sources")
    parser.add_argument("--picture", type=Path, help="where to draw, as .svg or .png")
    parser.add_argument("--page", type=Path, help="a page whose tables to fill")
    parser.add_argument("--from", nargs="+", type=Path, dest="runs", help="files of --json")
    parser.add_argument("--graphs", type=Path, help="where traced models are kept")
    parser.add_argument("--timm", type=Path, help="a folder of timm's graphs, to judge its rows by")
    parser.add_argument("--kernels", type=Path, help="a kernel model fitted without what is judged")
    options = parser.parse_args()
    try:
        _answer(options)
    except PageError as error:
        sys.exit(f"published_accuracy: {error}")


def _answer(options: argparse.Namespace) -> None:
    if options.kernels:
        choose_kernel_model(options.kernels)
    found, cases = read_runs(options.runs) if options.runs else _run(options)
    if options.picture:
        draw(cases, options.picture)
    if options.page:
        page = filled(options.page.read_text(encoding="utf-8"), found, cases)
        options.page.write_text(page, encoding="utf-8")
    if options.json:
        rows = [_plain(verdict) for verdict in found if verdict.outcome != "mapped"]
        print(json.dumps({"machine": "published", "at": now(), "cases": cases, "refused": rows}))
    else:
        print(report(found, cases))


def _run(options: argparse.Namespace) -> tuple[list[Verdict], list[dict[str, Any]]]:
    """What becomes of every row, and the cases of those that are mapped."""
    if not options.data.is_dir():
        sys.exit(f"published_accuracy: there is no folder {options.data}; say --data DIR")
    graphs = GraphStore(options.graphs or home() / "published")
    found = list(verdicts(options.data, graphs, options.only))
    if options.timm:
        found += timm_verdicts(options.data, options.timm)
    return found, judged([verdict.question for verdict in found if verdict.question is not None])


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


def _plain(verdict: Verdict) -> dict[str, Any]:
    return {
        "id": f"{verdict.table}:{verdict.line}",
        "source": verdict.source,
        "outcome": verdict.outcome,
        "reason": verdict.reason,
    }


if __name__ == "__main__":
    main()
