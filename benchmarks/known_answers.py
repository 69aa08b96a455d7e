"""Ask the engine what is known: published steps, each in the recipe that it was measured with.

``python benchmarks/known_answers.py [--all] [--json]`` asks about the rows of
`known_rows`, a half of which (drawn by a committed seed) is asked with ``--all`` only, so that
nothing is tuned to it, and of `known_layouts`. The goal is a median error of at most 8 %, 25 % at
worst, and to be right of every row on whether it fits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from known_layouts import known_layout_rows
from known_rows import KnownRow, known_rows, unseen
from options import parser_of, print_found
from published.graphs import GraphStore
from published.machines import variant
from published.rows import NotMapped
from records import now, say
from summary import format_table, off, summarise

import estimator as est
from estimator.errors import EstimatorError
from estimator.files import home

MEDIAN_RATIO, WORST_RATIO = 0.08, 0.25


def main() -> None:
    """Ask, compare, print."""
    parser = parser_of(__doc__)
    parser.add_argument("--all", action="store_true", help="ask the half that is kept back, too")
    parser.add_argument("--only", default="", help="part of what rows are called")
    parser.add_argument("--graphs", type=Path, help="where traced models are kept")
    options = parser.parse_args()
    graphs = GraphStore(options.graphs or home() / "published")
    rows = known_rows()
    hidden = unseen(rows)
    asked = [(row, "unseen" if row.id in hidden else "seen") for row in rows]
    asked += [(row, "layouts") for row in known_layout_rows()]
    cases = [
        case_of(row, graphs, half)
        for row, half in asked
        if (options.all or half != "unseen") and options.only in row.id
    ]
    columns, *rows = table = table_of(cases)
    print_found(
        options,
        [format_table(table), *verdicts(cases)],
        cases=cases,
        summary=summarise(_ran(cases), by=("half", "method")),
        tables=[{"title": "Known answers", "columns": columns, "rows": rows}],
    )


def case_of(row: KnownRow, graphs: GraphStore, half: str) -> dict[str, Any]:
    """What the engine says of a row beside what is known, in the form of all benchmarks."""
    say(row.id)
    answer, reason, evaluations_s = None, "", 0.0
    try:
        graph = graphs.graph(row.spec, row.precision, row.optimizer)
        answer = est.estimate(
            replace(graph, grad_scaler=row.scales_loss, clip_grad_norm=row.clips_gradients),
            row.allocation,
            batch_per_gpu=row.batch_per_gpu,
            accumulation_steps=row.accumulation_steps,
            strategy=row.strategy,
            layout=row.layout,
            profile=variant(row.machine, row.setting),
        )
        evaluations_s = row.evaluations_per_step * answer.breakdown.forward_s
    except (EstimatorError, NotMapped) as error:
        reason = str(error)
    seconds = answer and (answer.step_time_s, answer.low_s, answer.high_s)
    predicted_s, low_s, high_s = (
        (each + evaluations_s for each in seconds) if seconds else [None] * 3
    )
    return {
        "id": row.id,
        "source": row.source,
        "model": row.spec.name,
        "allocation": row.allocation,
        "method": "cold",
        "half": half,
        "predicted_s": predicted_s,
        "low_s": low_s,
        "high_s": high_s,
        "measured_s": row.step_time_s,
        "noise_ratio": None,
        "global_batch": row.gpus * row.batch_per_gpu * row.accumulation_steps,
        "fits": answer.fits if answer else None,
        "known_to_fit": row.step_time_s is not None,
        "predicted_at": now(),
        "status": "ok" if answer else "no_prediction",
        "reason": reason,
        "remark": row.remark,
    }


def is_right_of_memory(case: dict[str, Any]) -> bool:
    """Whether a row that ran is not refused, and one that did not is."""
    return bool((case["fits"] != "no") == case["known_to_fit"])


def _ran(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [case for case in cases if case["known_to_fit"]]


def verdicts(cases: list[dict[str, Any]]) -> list[str]:
    """Median, worst and memory, of each half and of all."""
    lines = []
    for name in ("seen", "unseen", "layouts", "all"):
        half = [case for case in cases if name in ("all", case["half"])]
        for row in summarise(_ran(half), by=("method",)):
            right = sum(map(is_right_of_memory, half))
            reached = row.median_ratio <= MEDIAN_RATIO and row.worst_ratio <= WORST_RATIO
            lines.append(
                f"{name}: {row.cases} steps, median {100 * row.median_ratio:.1f} %, "
                f"worst {100 * row.worst_ratio:.1f} %, memory right in {right} of {len(half)}: "
                + ("reached" if reached and right == len(half) else "missed")
            )
    return lines


def table_of(cases: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each row."""
    table = [["source", "recipe", "half", "known", "asked", "off by", "fits"]]
    for case in cases:
        seconds = [case["measured_s"], case["predicted_s"]]
        known, asked = (f"{1e3 * each:.0f} ms" if each else "-" for each in seconds)
        error = off(case["predicted_s"], case["measured_s"])
        fits = case["fits"] or "-"
        fits += "" if is_right_of_memory(case) else " (wrong)"
        table.append([case["source"], case["id"], case["half"], known, asked, error, fits])
    return table


if __name__ == "__main__":
    main()
