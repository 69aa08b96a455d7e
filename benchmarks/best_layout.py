"""Judge the layout that the engine would choose among those measured of one model and batch.

``python benchmarks/best_layout.py [--data DIR] [--only SOURCE ...] [--json]`` takes the published
rows of one source, model, number of GPUs and global batch together, wherever there are several, and
asks the engine for the fastest of them, micro-batches included. The goal is a choice within 5 % of
the best measured step in 90 of 100 groups. "slower" is how much longer the chosen one was measured
than the best, "said" how much longer the engine says that the best one takes than the chosen.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from options import add_data, parser_of, print_found
from published.graphs import GraphStore
from published.mapping import Question, verdicts
from published.methods import cold_cases
from summary import format_table

from estimator.files import home

NEAR_RATIO, SHARE_ASKED = 0.05, 0.9


def main() -> None:
    """Ask, choose, compare, print."""
    parser = parser_of(__doc__)
    add_data(parser)
    parser.add_argument("--only", nargs="+", default=["vtrain"], help="tables, or words of sources")
    options = parser.parse_args()
    if not options.data.is_dir():
        sys.exit(f"best_layout: there is no folder {options.data}; say --data DIR")
    found = verdicts(options.data, GraphStore(home() / "published"), options.only)
    cases = list(choices([each.question for each in found if each.question is not None]))
    table = [["model", "GPUs", "batch", "layouts", "chosen", "best", "slower", "said"]]
    table += [
        [
            case["model"],
            str(case["ranks"]),
            f"{case['global_batch']:g}",
            str(case["layouts"]),
            case["chosen"],
            case["best"],
            f"{100 * case['regret_ratio']:.1f} %",
            "" if case["said_ratio"] is None else f"{100 * case['said_ratio']:.1f} %",
        ]
        for case in cases
    ]
    print_found(options, [format_table(table), verdict(cases)], machine="published", cases=cases)


def choices(questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
    """For each group of several rows what the engine would choose, and how much slower that is."""
    groups: defaultdict[tuple[Any, ...], list[Question]] = defaultdict(list)
    for question in questions:
        step, batch = question.row.step, question.global_batch
        groups[step.source, step.model, step.gpu, step.ranks, batch].append(question)
    for (source, model, _, ranks, batch), members in groups.items():
        if len(members) > 1:
            chosen = chosen_of(list(cold_cases(members)))
            about = {"source": source, "model": model, "ranks": ranks, "global_batch": batch}
            yield {**about, "layouts": len(members), **chosen}


def chosen_of(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The case predicted fastest beside the one measured fastest; what has no answer is not chosen.

    >>> a = {"layout": "tp=2", "batch_per_gpu": 1, "predicted_s": 1.0, "measured_s": 1.1}
    >>> b = {"layout": None, "batch_per_gpu": 2, "predicted_s": 2.0, "measured_s": 1.0}
    >>> found = chosen_of([a, b])
    >>> found["chosen"], found["best"], round(found["regret_ratio"], 3), found["said_ratio"]
    ('tp=2 x 1', 'dp=* x 2', 0.1, 1.0)
    """
    answered = [case for case in cases if case["predicted_s"] is not None]
    best = min(cases, key=lambda case: case["measured_s"])
    slowest_s = max(case["measured_s"] for case in cases)
    chosen = min(answered, key=lambda case: case["predicted_s"]) if answered else None
    measured_s = chosen["measured_s"] if chosen else slowest_s
    said_s = best["predicted_s"]
    return {
        "chosen": _named(chosen) if chosen else "none",
        "best": _named(best),
        "regret_ratio": measured_s / best["measured_s"] - 1,
        "said_ratio": said_s / chosen["predicted_s"] - 1 if chosen and said_s else None,
    }


def _named(case: dict[str, Any]) -> str:
    return f"{case['layout'] or 'dp=*'} x {case['batch_per_gpu']:g}"


def verdict(cases: Sequence[dict[str, Any]]) -> str:
    """How often the choice is near the best."""
    if not cases:
        return "no group of several layouts"
    near = sum(case["regret_ratio"] <= NEAR_RATIO for case in cases)
    reached = near >= SHARE_ASKED * len(cases)
    return (
        f"chosen within {NEAR_RATIO:.0%} of the best measured in {near} of {len(cases)} groups "
        f"({near / len(cases):.0%}): {'reached' if reached else 'missed'}"
    )


if __name__ == "__main__":
    main()
